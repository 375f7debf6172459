"""What the decoder asks of whoever holds its weights, and the chunks of a model in training as one that does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from configs.schema import Config
from inference.weights.parts import EXPERTS, OUTPUT, WORDS, LocalPart, RankWeights, WeightUnit, expert_key, rank_weights
from models.blueprint.pieces import transformer_name
from models.weights import logical_tensors
from parallel.topology import Topology

Named = dict[str, torch.Tensor]
T = TypeVar("T")


class RoutingRecord(Protocol):
    """Whoever keeps who chose what."""

    def begin_pass(self) -> None:
        """All layers follow."""

    def add(self, layer: int, tokens: list[tuple[int, int]], experts: list[list[int]]) -> None:
        """The experts of each token (prompt, position), in one layer."""


class WeightSource(ABC):
    """This rank's weights, unit by unit. Names are given without their layer's, or their expert's, beginning.

    `make` turns a unit's weights into what applies them; it is asked again whenever they have come to another place.
    """

    def __init__(self, config: Config, topology: Topology, vocab_size: int, dtype: torch.dtype) -> None:
        self.config, self.topology, self.vocab_size = config, topology, vocab_size
        self.dtype, self.device = dtype, topology.device
        self.held: RankWeights = rank_weights(config, topology, vocab_size, dtype.itemsize)
        self.units = {unit.key: unit for unit in self.held.units}
        self._prefix = f"{transformer_name(config)}.layers."
        self.record: RoutingRecord | None = None  # hears who chose which experts

    @property
    def streams(self) -> bool:
        """Whether weights come and go, so that several batches should share a pass."""
        return False

    @property
    def streams_experts(self) -> bool:
        """Whether experts come and go, so that it pays to say which ones will be wanted."""
        return False

    @property
    @abstractmethod
    def small(self) -> Named:
        """What always stays, under its logical names."""

    def small_of(self, layer: int) -> Named:
        """What always stays of a layer."""
        prefix = f"{self._prefix}{layer}."
        return {name.removeprefix(prefix): each for name, each in self.small.items() if name.startswith(prefix)}

    @abstractmethod
    def use(self, key: str, make: Callable[[Named], T]) -> AbstractContextManager[T]:
        """A unit, made of its weights, which are there until the block ends. Units are used in their order."""

    @abstractmethod
    def experts(self, layer: int, wanted: Mapping[int, int], make: Callable[[Named], T]) -> Iterator[tuple[int, T]]:
        """The wanted experts of this rank, given with how many tokens chose each: each once, as they come. One is there
        until the next is asked for."""

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Experts that will probably be wanted soon are these, the surest first."""
        return

    @abstractmethod
    def word_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's table of tokens, `[n, H]`, for int64 indices `[n]` into it."""

    def reserve(self, num_bytes: int) -> None:
        """Leave room beside the weights, for keys and values and what a pass computes."""
        return

    def pass_is_over(self, num_tokens: int) -> None:
        """A pass has gone through all units and made, or read, so many tokens."""
        return

    @property
    def has_budget(self) -> bool:
        """Whether there is a limit to what may be kept in memory."""
        return False

    @property
    def room_for_batches(self) -> int:
        """Bytes that batches which share a pass may take beside the weights."""
        return 0

    def check_finite(self, answers: Sequence[torch.Tensor]) -> None:
        """What the model answers, which is the same on all ranks. Raises ConfigError where it is no number because of a
        weight of the files."""
        return

    def close(self) -> None:
        """Nobody uses the weights any more."""
        return

    def name_in_unit(self, name: str) -> str:
        """A logical name without its layer's and its expert's beginning."""
        rest = name.removeprefix(self._prefix)
        if rest == name:
            return name
        rest = rest.partition(".")[2]
        return rest.removeprefix(EXPERTS).partition(".")[2] if rest.startswith(EXPERTS) else rest


class ChunkWeights(WeightSource):
    """The weights of model chunks, in their own memory: later changes count."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: Config, topology: Topology, vocab_size: int) -> None:
        weights = {item.name: item.local.detach() for item in logical_tensors(chunks)}
        super().__init__(config, topology, vocab_size, next(iter(weights.values())).dtype)
        self._weights = weights
        self.held = replace(self.held, experts=self._own_experts())
        self._small = {part.name: self._tensor(part) for part in self.held.small}
        self._made: dict[str, object] = {}

    @property
    def small(self) -> Named:
        """What always stays, under its logical names."""
        return self._small

    @contextmanager
    def use(self, key: str, make: Callable[[Named], T]) -> Iterator[T]:
        """A unit, made of its weights."""
        yield self._module(self.units[key], make)

    def experts(self, layer: int, wanted: Mapping[int, int], make: Callable[[Named], T]) -> Iterator[tuple[int, T]]:
        """The wanted experts of this rank."""
        for expert in wanted:
            if (layer, expert) in self.held.experts:
                yield expert, self._module(self.held.experts[layer, expert], make)

    def word_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the table of tokens."""
        return F.embedding(tokens, self._weights[WORDS])

    def _own_experts(self) -> dict[tuple[int, int], WeightUnit]:
        """The experts whose homes are here now: homes may have moved."""
        found: dict[tuple[int, int], list[LocalPart]] = {}
        for name, tensor in self._weights.items():
            layer, _, rest = name.removeprefix(self._prefix).partition(".")
            if name.startswith(self._prefix) and rest.startswith(EXPERTS):
                expert = rest.removeprefix(EXPERTS).partition(".")[0]
                found.setdefault((int(layer), int(expert)), []).append(LocalPart(name, tuple(tensor.shape)))
        return {place: WeightUnit(expert_key(*place), tuple(parts)) for place, parts in found.items()}

    def _module(self, unit: WeightUnit, make: Callable[[Named], T]) -> T:
        if unit.key not in self._made:
            self._made[unit.key] = make({self.name_in_unit(part.name): self._tensor(part) for part in unit.parts})
        return self._made[unit.key]  # type: ignore[return-value]

    def _tensor(self, part: LocalPart) -> torch.Tensor:
        tensor = self._weights[part.name]
        if part.name in (WORDS, OUTPUT):  # some rows of it, without the vocabulary's padding
            return tensor[part.first_row : part.first_row + part.shape[0]]
        return tensor
