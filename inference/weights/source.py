"""The interface from which the decoder gets its weights (`WeightSource`), implemented for a model in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F

from configs.schema import Config
from inference.weights.rank_weights import (
    EXPERTS,
    OUTPUT,
    WORDS,
    LocalShard,
    RankWeights,
    WeightUnit,
    expert_unit_key,
    rank_weights,
)
from inference.weights.routing_file import RoutingWriter
from memory.transfer import to_device
from models.blueprint.operation import transformer_name
from parallel.topology import Topology

if TYPE_CHECKING:
    from moe.layer import MixtrainMoELayer

Named = dict[str, torch.Tensor]
T = TypeVar("T")


class WeightSource(ABC):
    """This rank's weights in units (such as a layer's attention, or an expert), by names without the prefix of layer
    and expert.

    `make` turns the weights of a unit into a callable that applies them. It is called again whenever the weights have
    been loaded to different memory.
    """

    has_budget = False  # whether the memory for weights is limited

    def __init__(self, config: Config, topology: Topology, vocab_size: int, dtype: torch.dtype) -> None:
        self.config, self.topology, self.vocab_size = config, topology, vocab_size
        self.dtype, self.device = dtype, topology.device
        self.held: RankWeights = rank_weights(config, topology, vocab_size, dtype.itemsize)
        self.units = {unit.key: unit for unit in self.held.units}
        self._prefix = f"{transformer_name(config)}.layers."
        self.record: RoutingWriter | None = None  # receives the experts that tokens choose
        self.small: Named = {}  # norms, biases, routers and position tables, by logical name; always in memory

    @property
    def streams(self) -> bool:
        """Return whether weights are read from files in every pass, so that several batches should share a pass."""
        return False

    @property
    def streams_experts(self) -> bool:
        """Return whether experts are loaded on demand, so that prefetching them saves time."""
        return False

    def small_of(self, layer: int) -> Named:
        """Return the small weights of a layer (norms, biases, router), which always stay in memory."""
        prefix = f"{self._prefix}{layer}."
        return {name.removeprefix(prefix): each for name, each in self.small.items() if name.startswith(prefix)}

    @abstractmethod
    def use(self, key: str, make: Callable[[Named], T]) -> AbstractContextManager[T]:
        """Return a context manager that yields `make(weights)` for the unit `key`, which stays loaded until exit. Units
        must be used in their fixed order."""

    @abstractmethod
    def experts(self, layer: int, wanted: Mapping[int, int], make: Callable[[Named], T]) -> Iterator[tuple[int, T]]:
        """Yield each chosen expert of this rank once, in the order in which they are loaded. An expert stays loaded
        until the next one is requested.

        wanted: number of tokens that chose each expert.
        """

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Prefetch experts that will probably be chosen soon, the most probable first."""
        return

    @abstractmethod
    def word_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return rows of this rank's token embedding, `[n, H]`, for int64 indices `[n]` on the host or the device."""

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes for caches and activations, in addition to the weights."""
        return

    def end_pass(self, num_tokens: int) -> None:
        """Count a forward pass that used all units and read or generated `num_tokens` tokens."""
        return

    def progress(self) -> str | None:
        """Return a line about the streaming of weights so far; None if all weights stay in memory."""
        return None

    @property
    def batch_headroom(self) -> int:
        """Bytes for caches and activations of the batches that share a pass."""
        return 0

    def check_finite(self, answers: Sequence[torch.Tensor]) -> None:
        """Raise ConfigError if an output of the model is NaN or infinite. All ranks pass equal outputs."""
        return

    def close(self) -> None:
        """Release the memory of the weights."""
        return

    def name_in_unit(self, name: str) -> str:
        """Return a logical name without the prefix of its layer and expert."""
        rest = name.removeprefix(self._prefix)
        if rest == name:
            return name
        rest = rest.partition(".")[2]
        return rest.removeprefix(EXPERTS).partition(".")[2] if rest.startswith(EXPERTS) else rest


class TensorWeights(WeightSource):
    """Weights in the tensors of a model, used in place, so that later changes take effect. `weights`: this rank's
    shards by logical name."""

    def __init__(self, weights: Named, config: Config, topology: Topology, vocab_size: int) -> None:
        super().__init__(config, topology, vocab_size, next(iter(weights.values())).dtype)
        self._weights = weights
        self.held = replace(self.held, experts=self._own_experts())
        self.small = {shard.name: self._tensor(shard) for shard in self.held.small}
        self._made: dict[str, object] = {}

    @contextmanager
    def use(self, key: str, make: Callable[[Named], T]) -> Iterator[T]:
        yield self._module(self.units[key], make)

    def experts(self, layer: int, wanted: Mapping[int, int], make: Callable[[Named], T]) -> Iterator[tuple[int, T]]:
        for expert in wanted:
            if (layer, expert) in self.held.experts:
                yield expert, self._module(self.held.experts[layer, expert], make)

    def word_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(to_device(tokens, self.device), self._weights[WORDS])

    def _own_experts(self) -> dict[tuple[int, int], WeightUnit]:
        """Return the experts whose primaries (the owned parameters) are on this rank now; experts may have migrated."""
        found: dict[tuple[int, int], list[LocalShard]] = {}
        for name, tensor in self._weights.items():
            layer, _, rest = name.removeprefix(self._prefix).partition(".")
            if name.startswith(self._prefix) and rest.startswith(EXPERTS):
                expert = rest.removeprefix(EXPERTS).partition(".")[0]
                found.setdefault((int(layer), int(expert)), []).append(LocalShard(name, tuple(tensor.shape)))
        return {key: WeightUnit(expert_unit_key(*key), tuple(shards)) for key, shards in found.items()}

    def _module(self, unit: WeightUnit, make: Callable[[Named], T]) -> T:
        if unit.key not in self._made:
            self._made[unit.key] = make({self.name_in_unit(shard.name): self._tensor(shard) for shard in unit.shards})
        return self._made[unit.key]  # type: ignore[return-value]

    def _tensor(self, shard: LocalShard) -> torch.Tensor:
        tensor = self._weights[shard.name]
        if shard.name in (WORDS, OUTPUT):  # a block of its rows, without the vocabulary's padding
            return tensor[shard.first_row : shard.first_row + shard.shape[0]]
        return tensor


class SlotWeights(TensorWeights):
    """Weights of a model in training with offloaded experts, one layer at a time in the device buffers of training.

    Every rank loads every layer into its buffers, because several ranks may store shards of it.
    """

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
        module = self._layers[layer]
        streamed = module.expert_compute.streamed
        assert streamed is not None
        slab = streamed.open()
        streamed.wait()
        names = ("linear_fc1.weight", "linear_fc2.weight", "linear_fc1.bias", "linear_fc2.bias")
        by_name = {name: each.detach() for name, each in zip(names, slab.parameters) if each is not None}
        here = module.experts.experts_here()
        try:
            for expert in wanted:
                if expert in here:
                    yield expert, make({name: each[here.index(expert)] for name, each in by_name.items()})
        finally:
            streamed.leave()
