"""The weights of a model in training whose experts lie off the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from configs.schema import Config
from inference.weights.source import Named, T, TensorWeights
from moe.layer import MixtrainMoELayer
from parallel.topology import Topology


class SlotWeights(TensorWeights):
    """Weights in tensors, but for the experts of these layers: they come to the training's slots, a layer at a time.
    Every rank asks for every layer, as several may hold a part of each."""

    def __init__(
        self,
        weights: Named,
        layers: Mapping[int, MixtrainMoELayer],
        config: Config,
        topology: Topology,
        vocab_size: int,
    ) -> None:
        super().__init__(weights, config, topology, vocab_size)
        self._layers = layers
        for layer in layers.values():
            if layer.expert_compute.streamed is not None:
                layer.expert_compute.streamed.forget()

    def experts(self, layer: int, wanted: Mapping[int, int], make: Callable[[Named], T]) -> Iterator[tuple[int, T]]:
        """The wanted experts of this rank."""
        module = self._layers[layer]
        assert module.expert_compute.streamed is not None
        slab = module.expert_compute.streamed.open()
        module.expert_compute.streamed.wait()
        matrices = zip(
            ("linear_fc1.weight", "linear_fc2.weight", "linear_fc1.bias", "linear_fc2.bias"), slab.parameters
        )
        by_name = {name: each.detach() for name, each in matrices if each is not None}
        here = module.experts.experts_here()
        try:
            for expert in wanted:
                if expert in here:
                    yield expert, make({name: each[here.index(expert)] for name, each in by_name.items()})
        finally:
            module.expert_compute.streamed.leave()
