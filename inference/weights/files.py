"""Weights that come from a model's files: all at once where they fit, else through a ring of slots and slots for
experts, under one budget with the cache and what a pass computes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from configs import progress
from configs.schema import Config, ConfigError
from inference.weights.expert_cache import ExpertUses
from inference.weights.expert_slots import ExpertCounts, ExpertSlots, Place
from inference.weights.finite import are_finite, first_not_finite
from inference.weights.loader import UnitLoader, WeightFiles
from inference.weights.parts import WeightUnit, expert_key
from inference.weights.plan import MIB, HeldSizes, StreamPlan, plan_weights
from inference.weights.ring import Ring
from inference.weights.source import Named, WeightSource
from memory import host_memory
from memory.budgets import HOST
from memory.completion import Completion
from memory.copy_stream import PASSES, UPDATES
from memory.host_link import HostLink
from memory.transfer import to_device
from parallel.refusal import raise_together
from parallel.topology import Topology

T = TypeVar("T")
NUM_STEPS = 50  # in which the room beside weights that come and go grows, as parts of the budget
OTHER_COPY = "Take another copy of the model, or an earlier checkpoint."


@dataclass
class ReadingCounts:
    """What passes needed and where it came from, since the weights that stay were there."""

    passes: int = 0
    tokens: int = 0
    bytes_used: int = 0  # of weights, each time a pass needed them
    bytes_read: int = 0
    seconds_waited: float = 0.0
    expert_seconds_waited: float = 0.0
    experts: ExpertCounts = field(default_factory=ExpertCounts)
    begun: float = field(default_factory=time.perf_counter)

    @property
    def share_from_memory(self) -> float:
        """The part of the bytes used that no file was read for."""
        return 1.0 - min(1.0, self.bytes_read / self.bytes_used) if self.bytes_used else 1.0

    def line(self) -> str:
        """Tokens a second, the share of the weights that came from memory, and seconds waited."""
        waited, found = self.seconds_waited + self.expert_seconds_waited, self.experts
        rate = self.tokens / max(time.perf_counter() - self.begun, 1e-9)
        shown = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        text = f"{shown} tokens/s, {self.share_from_memory:.1%} of the weights from memory, "
        text += f"waited {waited:.1f} s for files"
        wanted = found.hits + found.coming + found.misses
        if found.misses + found.coming:
            text += f"; experts: {found.hits / wanted:.1%} there, {found.coming / wanted:.1%} on their way"
        return text


class FileWeights(WeightSource):
    """This rank's weights from files. `budget`: bytes for all that is kept (`given`: the MiB of --memory-budget, None
    where nobody said so); they are divided when the first pass says what it needs beside the weights.

    Raises ConfigError where a weight cannot be read.
    """

    def __init__(
        self,
        files: WeightFiles,
        config: Config,
        topology: Topology,
        vocab_size: int,
        dtype: torch.dtype,
        budget: float,
        given: float | None = None,
    ) -> None:
        super().__init__(config, topology, vocab_size, dtype)
        self.budget, self._given, self._files = budget, given, files
        self._link = HostLink(topology.device)
        if topology.device.type == "cuda":
            HOST.open(None, host_memory.available())  # for pinned memory
        self.loader = UnitLoader(files, self._link, dtype)
        self.counts = ReadingCounts()
        self.plan: StreamPlan | None = None
        self._other = -1  # bytes beside the weights that the plan leaves
        self._kept: dict[str, Named] = {}
        self._made: dict[str, Any] = {}
        self._ring: Ring | None = None
        self._slots: ExpertSlots | None = None
        self._words: torch.Tensor | None = None
        self._told = 0.0
        self._small = self.loader.load_now(WeightUnit("small", self.held.small))
        self.sizes = self._sizes()
        self.loader.stage_bytes = max([self.sizes.expert, *(size for _, size in self.sizes.units)])
        self._bytes_of = dict(self.sizes.units)

    @property
    def small(self) -> Named:
        """What always stays, under its logical names."""
        return self._small

    @property
    def has_budget(self) -> bool:
        """There is one, whoever said it."""
        return True

    @property
    def streams(self) -> bool:
        """Whether weights come and go."""
        return self.plan is not None and (self.plan.ring_bytes > 0 or self.streams_experts)

    @property
    def streams_experts(self) -> bool:
        """Whether experts come and go."""
        return self.plan is not None and self.plan.expert_slots < len(self.held.experts)

    def reserve(self, num_bytes: int) -> None:
        """Divide the budget, anew where more than before is needed beside the weights. Raises ConfigError where it is
        too small."""
        if self.plan is not None and num_bytes <= self._other:
            return
        plan = plan_weights(self.sizes, self.budget, num_bytes, self._given)
        self._other = num_bytes
        step = int(self.budget / NUM_STEPS) or 1
        with contextlib.suppress(ConfigError):  # somewhat more is soon asked for, and would empty all slots
            more = -(-num_bytes // step) * step
            if plan.ring_bytes or plan.expert_slots < self.sizes.num_experts:
                plan, self._other = plan_weights(self.sizes, self.budget, more, self._given), more
        if plan != self.plan:
            self._take_up(plan)

    @property
    def room_for_batches(self) -> int:
        """What leaves all weights where they are; where they come and go, a quarter of the budget, and what leaves room
        for one unit."""
        if not self.streams:
            return int(self.budget) - self.bytes_held
        return int(min(self.budget / 4, self.budget - self.sizes.least))

    @contextlib.contextmanager
    def use(self, key: str, make: Callable[[Named], T]) -> Iterator[T]:
        """A unit, made of its weights, which are there until the block ends."""
        self.counts.bytes_used += self._bytes_of[key]
        if self._ring is None or not self._ring.holds(key):
            if key not in self._made:
                self._made[key] = make(self._kept[key])
            yield self._made[key]
            return
        unit = self.units[key]
        slot = self._ring.take(key)
        self.counts.seconds_waited += self.loader.wait(unit, slot.there)
        try:
            yield make(self._named(unit, slot.memory))
        finally:
            self._ring.give_back(slot, Completion.so_far(self.device))

    def experts(self, layer: int, wanted: Mapping[int, int], make: Callable[[Named], T]) -> Iterator[tuple[int, T]]:
        """The wanted experts of this rank, those first that are there."""
        units = self.held.experts
        own = {expert: tokens for expert, tokens in wanted.items() if (layer, expert) in units}
        self.counts.bytes_used += len(own) * self.sizes.expert
        if self._slots is None:
            return self._resident(layer, own, make)
        return self._slots.take(layer, own, lambda place, memory: make(self._named(units[place], memory)))

    def _resident(self, layer: int, wanted: Iterable[int], make: Callable[[Named], T]) -> Iterator[tuple[int, T]]:
        """Experts that all stay."""
        for expert in wanted:
            key = expert_key(layer, expert)
            if key not in self._made:
                self._made[key] = make(self._kept[key])
            yield expert, self._made[key]

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Fetch experts ahead."""
        assert self._slots is not None
        self._slots.expect(layer, [expert for expert in experts if (layer, expert) in self.held.experts])

    def word_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the table of tokens; each is read from its file where the table does not stay."""
        if self._words is not None:
            return F.embedding(to_device(tokens, self.device), self._words)
        assert self.held.words is not None
        found, places = tokens.cpu().unique(return_inverse=True)
        begin = time.perf_counter()
        rows = self.loader.read_rows(self.held.words, found.tolist())
        self.counts.seconds_waited += time.perf_counter() - begin
        self.counts.bytes_used += rows.nbytes
        return F.embedding(to_device(places, self.device), to_device(rows, self.device))

    def progress(self) -> str | None:
        """Tokens a second, the share of the weights that came from memory, and seconds waited."""
        return self.counts.line() if self.streams else None

    def pass_is_over(self, num_tokens: int) -> None:
        """Count it, and say now and then how it goes."""
        counts, now = self.counts, time.perf_counter()
        counts.passes += 1
        counts.tokens += num_tokens
        counts.bytes_read = self.loader.bytes_read
        if self.streams and now - max(self._told, counts.begun) >= progress.LOG_EVERY_SECONDS:
            self._told = now
            self._say(counts.line())

    def check_finite(self, answers: Sequence[torch.Tensor]) -> None:
        """Raises ConfigError, on all ranks, with the file and the weight to blame where an answer is no number."""
        if are_finite(answers):
            return
        self._ring = self._slots = self._words = None  # their memory is needed, and nobody goes on
        self._kept, self._made = {}, {}
        name = first_not_finite(self.loader, self.held)
        text = f"has a number that is NaN or infinite in {self.config.training.precision}. {OTHER_COPY}"
        raise_together(None if name is None else f"{self._files.file_of(name)}: tensor {name} {text}")
        raise ConfigError(
            f"the model's answers are not finite in {self.config.training.precision}, though all of its weights are. "
            "Its numbers grow beyond what that holds."
        )

    @property
    def bytes_held(self) -> int:
        """Bytes of this rank's memory that weights, the ring and the slots take."""
        plan, sizes = self.plan, dict(self.sizes.units)
        if plan is None:
            return self.sizes.small
        words = 0 if self._words is None or self._head_is_words else self._words.nbytes
        kept = sum(sizes[key] for key in plan.kept)
        return self.sizes.small + kept + words + plan.ring_bytes + plan.expert_slots * self.sizes.expert

    def close(self) -> None:
        """End the threads, and let go of the memory."""
        self._stop()
        self._link.close()  # what is under way still writes to this memory
        self._ring = self._slots = self._words = None
        self._kept, self._made = {}, {}

    def _stop(self) -> list[Completion]:
        """Nothing more comes to the ring and the slots; all that must be over before their memory may go."""
        return [done for each in (self._ring, self._slots) if each is not None for done in each.stop()]

    def _sizes(self) -> HeldSizes:
        experts, size = self.held.experts, self.loader.num_bytes
        words = None if self._head_is_words else self.held.words
        return HeldSizes(
            size(WeightUnit("small", self.held.small)),
            tuple((unit.key, size(unit)) for unit in self.held.units),
            max((size(unit) for unit in experts.values()), default=0),
            len(experts),
            self.config.moe.top_k if experts else 0,
            0 if words is None else size(WeightUnit("words", (words,))),
        )

    @property
    def _head_is_words(self) -> bool:
        """Whether the blocks of the head are the table of tokens."""
        return self.config.model.tie_embeddings and bool(self.held.head)

    def _take_up(self, plan: StreamPlan) -> None:
        is_first, self.plan = self.plan is None, plan
        for done in self._stop():
            done.order()
        self._ring = self._slots = self._words = None
        self._made.clear()
        stays = plan.kept if self.streams_experts else {*plan.kept, *(unit.key for unit in self.held.experts.values())}
        self._kept = {key: value for key, value in self._kept.items() if key in stays}
        if self.streams:
            self._say(self._words_of(plan, is_first))
        self._keep_words(plan)
        self._keep(unit for unit in self.held.units if unit.key in plan.kept)
        cycle = [unit for unit in self.held.units if unit.key not in plan.kept]
        self.loader.copies.expected = (
            plan.streamed_bytes + self.streams_experts * self.sizes.num_experts * self.sizes.expert
        )
        if cycle:
            self._ring = Ring(
                self.loader.allocate(plan.ring_bytes),
                cycle,
                self.loader.num_bytes,
                lambda unit, memory, free: self.loader.load(unit, memory, free, UPDATES, again=True),
            )
        if self.streams_experts:
            self._slots = self._expert_slots(plan.expert_slots)
        else:
            self._keep(self.held.experts.values())
        self.loader.bytes_read, self._told = 0, 0.0
        self.counts = ReadingCounts()
        if self._slots is not None:
            self._slots.counts = self.counts.experts

    def _keep(self, units: Iterable[WeightUnit]) -> None:
        """Have units stay; one is read while the memory of the next is taken."""
        coming = []
        for unit in (unit for unit in units if unit.key not in self._kept):
            memory = self.loader.allocate(self.loader.num_bytes(unit))
            coming.append((unit, memory, self.loader.load(unit, memory, (), PASSES)))
        for unit, memory, there in coming:
            self.loader.wait(unit, there)
            self._kept[unit.key] = self._named(unit, memory)

    def _keep_words(self, plan: StreamPlan) -> None:
        """The table of tokens, whose rows the blocks of the head are where it is the output layer too."""
        words, head = self.held.words, self.held.head
        if words is None:
            return
        if not self._head_is_words:
            if plan.keeps_words:
                (self._words,) = self.loader.load_now(WeightUnit("words", (words,))).values()
        elif all(unit.key in plan.kept for unit in head):
            (self._words,) = self.loader.load_now(WeightUnit("words", (words,))).values()
            for unit in head:
                (part,) = unit.parts
                self._kept[unit.key] = {part.name: self._words[part.first_row : part.first_row + part.shape[0]]}
        else:
            for unit in head:
                self._kept.pop(unit.key, None)

    def _expert_slots(self, num_slots: int) -> ExpertSlots:
        units, size = self.held.experts, self.sizes.expert
        layers = sorted({layer for layer, _ in units})

        def wait(place: Place, there: Completion) -> None:
            self.counts.expert_seconds_waited += self.loader.wait(units[place], there)

        return ExpertSlots(
            list(self.loader.allocate(num_slots * size).split(size)),
            ExpertUses(layers, self.config.moe.num_experts or 0, self.config.moe.top_k),
            lambda place, memory, free, priority: self.loader.load(units[place], memory, free, priority, again=True),
            wait,
            lambda: Completion.so_far(self.device),
        )

    def _named(self, unit: WeightUnit, memory: torch.Tensor) -> Named:
        return {self.name_in_unit(name): each for name, each in self.loader.views(unit, memory).items()}

    def _words_of(self, plan: StreamPlan, is_first: bool) -> str:
        """How much of the model stays, in a line."""
        sizes = self.sizes
        kept = sum(size for key, size in sizes.units if key in plan.kept)
        beside_gpu = self.device.type == "cuda"
        where = "the host" if beside_gpu else "the files"
        parts = [f"{(sizes.small + kept) / MIB:.0f} MiB of the weights stay"]
        if plan.ring_bytes:
            parts.append(
                f"{plan.streamed_bytes / MIB:.0f} MiB come from {where} in every pass, through a ring of "
                f"{plan.ring_bytes / MIB:.0f} MiB"
            )
        if self.streams_experts:
            parts.append(f"{plan.expert_slots} of {sizes.num_experts} experts have slots, the others come from {where}")
        if beside_gpu:
            parts.append(f"the host keeps at most {max(HOST.room, 0) / MIB:.0f} MiB of what comes and goes")
        whole = "the model" if is_first else "with what is needed beside it, the model"
        return (
            f"{whole} ({sizes.total / MIB:.0f} MiB) is larger than its memory ({self.budget / MIB:.0f} MiB, "
            f"{self._other / MIB:.0f} of it for keys, values and passes): {', '.join(parts)}"
        )

    def _say(self, text: str) -> None:
        if self.topology.rank == 0:
            print(text, file=sys.stderr, flush=True)
