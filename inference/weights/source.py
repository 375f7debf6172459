"""The decoder's view of its weights, unit by unit (`WeightSource`), and a source that reads a model in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

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
from memory.transfer import to_device
from models.blueprint.operation import transformer_name
from parallel.topology import Topology

if TYPE_CHECKING:
    from moe.layer import MixtrainMoELayer

Named = dict[str, torch.Tensor]
T = TypeVar("T")


class RoutingRecord(Protocol):
    """A receiver of the experts that tokens chose."""

    def begin_pass(self) -> None:
        """Begin a pass: `add` is called for each MoE layer next."""

    def add(self, layer: int, tokens: list[tuple[int, int]], experts: list[list[int]]) -> None:
        """Record the experts of each token (prompt, position) in one layer."""


class WeightSource(ABC):
    """This rank's weights, unit by unit. Names are given without the prefix of their layer or expert.

    `make` turns a unit's weights into a callable that applies them; it is called again whenever they have been loaded
    to other memory.
    """

    def __init__(self, config: Config, topology: Topology, vocab_size: int, dtype: torch.dtype) -> None:
        self.config, self.topology, self.vocab_size = config, topology, vocab_size
        self.dtype, self.device = dtype, topology.device
        self.held: RankWeights = rank_weights(config, topology, vocab_size, dtype.itemsize)
        self.units = {unit.key: unit for unit in self.held.units}
        self._prefix = f"{transformer_name(config)}.layers."
        self.record: RoutingRecord | None = None  # receives the experts that tokens choose

    @property
    def streams(self) -> bool:
        """Whether weights are streamed, so that several batches should share a pass."""
        return False

    @property
    def streams_experts(self) -> bool:
        """Whether experts are streamed, so that announcing the expected ones pays."""
        return False

    @property
    @abstractmethod
    def small(self) -> Named:
        """The weights that always stay, by logical name."""

    def small_of(self, layer: int) -> Named:
        """Return the weights of a layer that always stay."""
        prefix = f"{self._prefix}{layer}."
        return {name.removeprefix(prefix): each for name, each in self.small.items() if name.startswith(prefix)}

    @abstractmethod
    def use(self, key: str, make: Callable[[Named], T]) -> AbstractContextManager[T]:
        """Yield what `make` returns for a unit's weights, which stay loaded until the block ends. Units are used in
        order."""

    @abstractmethod
    def experts(self, layer: int, wanted: Mapping[int, int], make: Callable[[Named], T]) -> Iterator[tuple[int, T]]:
        """Yield each wanted expert of this rank once, as they are loaded. One stays loaded until the next is asked for.

        wanted: the number of tokens that chose each expert.
        """

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Prefetch experts that will probably be wanted soon, the surest first."""
        return

    @abstractmethod
    def word_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return rows of this rank's table of tokens, `[n, H]`, for int64 indices `[n]` on the host or the device."""

    def reserve(self, num_bytes: int) -> None:
        """Reserve memory in addition to the weights, for keys and values and a pass's computation."""
        return

    def end_pass(self, num_tokens: int) -> None:
        """Count a pass, which used all units and generated or read `num_tokens` tokens."""
        return

    def progress(self) -> str | None:
        """Describe the streaming of weights so far in a line; None if all stay."""
        return None

    @property
    def has_budget(self) -> bool:
        """Whether the memory for weights is limited."""
        return False

    @property
    def batch_headroom(self) -> int:
        """Bytes that batches which share a pass may take in addition to the weights."""
        return 0

    def check_finite(self, answers: Sequence[torch.Tensor]) -> None:
        """Raise ConfigError if an output of the model, the same on all ranks, is NaN or infinite."""
        return

    def close(self) -> None:
        """Release the weights."""
        return

    def name_in_unit(self, name: str) -> str:
        """Return a logical name without the prefix of its layer and expert."""
        rest = name.removeprefix(self._prefix)
        if rest == name:
            return name
        rest = rest.partition(".")[2]
        return rest.removeprefix(EXPERTS).partition(".")[2] if rest.startswith(EXPERTS) else rest


class TensorWeights(WeightSource):
    """Weights in tensors: this rank's shards by logical name. They are used in place, so that later changes count."""

    def __init__(self, weights: Named, config: Config, topology: Topology, vocab_size: int) -> None:
        super().__init__(config, topology, vocab_size, next(iter(weights.values())).dtype)
        self._weights = weights
        self.held = replace(self.held, experts=self._own_experts())
        self._small = {shard.name: self._tensor(shard) for shard in self.held.small}
        self._made: dict[str, object] = {}

    @property
    def small(self) -> Named:
        """The weights that always stay, by logical name."""
        return self._small

    @contextmanager
    def use(self, key: str, make: Callable[[Named], T]) -> Iterator[T]:
        """Yield what `make` returns for a unit's weights."""
        yield self._module(self.units[key], make)

    def experts(self, layer: int, wanted: Mapping[int, int], make: Callable[[Named], T]) -> Iterator[tuple[int, T]]:
        """Yield the wanted experts of this rank."""
        for expert in wanted:
            if (layer, expert) in self.held.experts:
                yield expert, self._module(self.held.experts[layer, expert], make)

    def word_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return rows of the table of tokens."""
        return F.embedding(to_device(tokens, self.device), self._weights[WORDS])

    def _own_experts(self) -> dict[tuple[int, int], WeightUnit]:
        """Return the experts whose primaries are here now: they may have migrated."""
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
    """Weights of a model in training whose experts are offloaded: they are fetched to the training's slots, a layer at
    a time. Every rank asks for every layer, because several may hold a shard of each."""

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
        """Yield the wanted experts of this rank."""
        module = self._layers[layer]
        streamed = module.expert_compute.streamed
        assert streamed is not None
        slab = streamed.open()
        streamed.wait()
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
            streamed.leave()
