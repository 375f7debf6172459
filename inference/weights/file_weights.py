"""Weights read from a model's files: once if they fit into the memory budget, otherwise streamed through a ring buffer
and expert slots.

One memory budget covers the weights, the key-value cache, and the activations of a pass.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from base import progress
from base.errors import ConfigError
from base.units import MIB
from configs.schema import Config
from inference.weights.budget import HeldSizes, StreamPlan, plan_weights
from inference.weights.expert_cache import ExpertUses
from inference.weights.expert_slots import ExpertCounts, ExpertKey, ExpertSlots
from inference.weights.loader import UnitLoader, WeightFiles
from inference.weights.rank_weights import WeightUnit, expert_unit_key
from inference.weights.ring import Ring
from inference.weights.source import Named, WeightSource
from memory import host_memory
from memory.budgets import HOST
from memory.completion import Completion
from memory.copy_stream import PASSES, UPDATES
from memory.host_link import HostLink
from memory.transfer import to_device
from parallel.joint_errors import raise_together
from parallel.topology import Topology

T = TypeVar("T")
NUM_STEPS = 50  # the memory reserved for caches grows in steps of this fraction of the budget
ADVICE = "Use another copy of the model, or an earlier checkpoint."


@dataclass
class ReadingCounts:
    """Statistics of reading weights (passes, tokens, bytes, waiting times) since the weights that stay were loaded."""

    passes: int = 0
    tokens: int = 0
    bytes_used: int = 0  # bytes of weights, counted in every pass that uses them
    bytes_read: int = 0
    seconds_waited: float = 0.0
    expert_seconds_waited: float = 0.0
    experts: ExpertCounts = field(default_factory=ExpertCounts)
    started: float = field(default_factory=time.perf_counter)

    @property
    def share_from_memory(self) -> float:
        """Fraction of the used bytes that were already in memory."""
        return 1.0 - min(1.0, self.bytes_read / self.bytes_used) if self.bytes_used else 1.0

    def line(self) -> str:
        """Return a line with tokens per second, the share of weights from memory, and the seconds waited for files."""
        waited, found = self.seconds_waited + self.expert_seconds_waited, self.experts
        rate = self.tokens / max(time.perf_counter() - self.started, 1e-9)
        shown = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        share = f"{self.share_from_memory:.1%} of the weights from memory"
        text = f"{shown} tokens/s, {share}, waited {waited:.1f} s for files"
        wanted = found.hits + found.coming + found.misses
        if found.misses + found.coming:
            text += f"; experts: {found.hits / wanted:.1%} in memory, {found.coming / wanted:.1%} in flight"
        return text


class FileWeights(WeightSource):
    """This rank's weights, read from a model's files within a memory budget.

    budget: bytes for weights, key-value cache and activations. given: the value of --memory-budget in MiB, None without
    the option. The first `reserve` divides the budget and loads the weights that stay in memory. Raises ConfigError if
    a weight cannot be read.
    """

    has_budget = True  # without --memory-budget, a share of the free memory

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
        self._other = -1  # bytes that the plan reserves in addition to the weights
        self._kept: dict[str, Named] = {}
        self._made: dict[str, Any] = {}
        self._ring: Ring | None = None
        self._expert_slots: ExpertSlots | None = None
        self._words: torch.Tensor | None = None
        self._last_logged = 0.0
        self.small = self.loader.load_now(WeightUnit("small", self.held.small))
        self.sizes = self._sizes()
        self.loader.stage_bytes = max([self.sizes.expert, *(size for _, size in self.sizes.units)])
        self._bytes_of = dict(self.sizes.units)

    @property
    def streams(self) -> bool:
        return self.plan is not None and (self.plan.ring_bytes > 0 or self.streams_experts)

    @property
    def streams_experts(self) -> bool:
        return self.plan is not None and self.plan.expert_slots < len(self.held.experts)

    def reserve(self, num_bytes: int) -> None:
        """Divide the budget so that `num_bytes` are reserved in addition to weights; a larger request divides it again.
        Raises ConfigError if the budget is too small."""
        if self.plan is not None and num_bytes <= self._other:
            return
        plan = plan_weights(self.sizes, self.budget, num_bytes, self._given)
        self._other = num_bytes
        step = int(self.budget / NUM_STEPS) or 1
        with contextlib.suppress(ConfigError):  # reserve more than asked: a later increase would empty all slots
            more = -(-num_bytes // step) * step
            if plan.ring_bytes or plan.expert_slots < self.sizes.num_experts:
                plan, self._other = plan_weights(self.sizes, self.budget, more, self._given), more
        if plan != self.plan:
            self._apply(plan)

    @property
    def batch_headroom(self) -> int:
        """Bytes for caches and activations of the batches that share a pass: the budget minus the weights; with
        streamed weights, at most a quarter of the budget."""
        if not self.streams:
            return int(self.budget) - self.bytes_held
        return int(min(self.budget / 4, self.budget - self.sizes.least))

    @contextlib.contextmanager
    def use(self, key: str, make: Callable[[Named], T]) -> Iterator[T]:
        self.counts.bytes_used += self._bytes_of[key]
        if self._ring is None or not self._ring.holds(key):
            yield self._resident(key, make)
            return
        unit = self.units[key]
        ring_slot = self._ring.take(key)
        self.counts.seconds_waited += self.loader.wait(unit, ring_slot.there)
        try:
            yield make(self._named(unit, ring_slot.memory))
        finally:
            self._ring.give_back(ring_slot, Completion.so_far(self.device))

    def experts(self, layer: int, wanted: Mapping[int, int], make: Callable[[Named], T]) -> Iterator[tuple[int, T]]:
        """Return an iterator over the chosen experts of this rank as (expert, callable), those in memory first."""
        units = self.held.experts
        own = {expert: tokens for expert, tokens in wanted.items() if (layer, expert) in units}
        self.counts.bytes_used += len(own) * self.sizes.expert
        if self._expert_slots is None:
            return ((expert, self._resident(expert_unit_key(layer, expert), make)) for expert in own)
        return self._expert_slots.take(layer, own, lambda key, memory: make(self._named(units[key], memory)))

    def _resident(self, key: str, make: Callable[[Named], T]) -> T:
        """Return the callable for a unit of weights that stays in memory; `make` is called at its first use."""
        if key not in self._made:
            self._made[key] = make(self._kept[key])
        return self._made[key]

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        assert self._expert_slots is not None
        self._expert_slots.expect(layer, [expert for expert in experts if (layer, expert) in self.held.experts])

    def word_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return rows of the token embedding; if the table does not stay in memory, read them from its file."""
        if self._words is not None:
            return F.embedding(to_device(tokens, self.device), self._words)
        assert self.held.words is not None
        found, indices = tokens.cpu().unique(return_inverse=True)
        begin = time.perf_counter()
        table_rows = self.loader.read_rows(self.held.words, found.tolist())
        self.counts.seconds_waited += time.perf_counter() - begin
        self.counts.bytes_used += table_rows.nbytes
        return F.embedding(to_device(indices, self.device), to_device(table_rows, self.device))

    def progress(self) -> str | None:
        return self.counts.line() if self.streams else None

    def end_pass(self, num_tokens: int) -> None:
        """Count a forward pass over `num_tokens` tokens, and print statistics every `LOG_EVERY_SECONDS` seconds."""
        counts, now = self.counts, time.perf_counter()
        counts.passes += 1
        counts.tokens += num_tokens
        counts.bytes_read = self.loader.bytes_read
        if self.streams and now - max(self._last_logged, counts.started) >= progress.LOG_EVERY_SECONDS:
            self._last_logged = now
            self._log(counts.line())

    def check_finite(self, answers: Sequence[torch.Tensor]) -> None:
        """Raise ConfigError on all ranks, naming a bad weight if there is one, if an output is NaN or infinite."""
        if torch.stack([each.sum() for each in answers]).isfinite().all().item():
            return
        # Free the memory to read all weights again; generation ends here.
        self._ring = self._expert_slots = self._words = None
        self._kept, self._made = {}, {}
        name = self._first_not_finite()
        text = f"has a number that is NaN or infinite in {self.config.training.precision}. {ADVICE}"
        raise_together(None if name is None else f"{self._files.file_of(name)}: tensor {name} {text}")
        raise ConfigError(
            f"the model's outputs are not finite in {self.config.training.precision}, although all weights are finite: "
            "activations overflow. Give a different --precision."
        )

    def _first_not_finite(self) -> str | None:
        """Read all weights again in the order of use, and return the name of the first one with a NaN or infinite
        number, or None. Raises ConfigError if a weight cannot be read."""
        held = self.held
        words = () if held.words is None else (WeightUnit("words", (held.words,)),)
        for unit in (WeightUnit("small", held.small), *words, *held.units, *held.experts.values()):
            for name, weight in self.loader.load_now(unit).items():
                if not weight.isfinite().all():
                    return name
        return None

    @property
    def bytes_held(self) -> int:
        """Bytes of this rank's memory for weights, the ring buffer and expert slots."""
        plan, sizes = self.plan, dict(self.sizes.units)
        if plan is None:
            return self.sizes.small
        words = 0 if self._words is None or self._head_is_words else self._words.nbytes
        kept = sum(sizes[key] for key in plan.kept)
        return self.sizes.small + kept + words + plan.ring_bytes + plan.expert_slots * self.sizes.expert

    def close(self) -> None:
        """End the loading threads and free the memory."""
        self._stop()
        self._link.close()  # loads in flight still write to this memory
        self._ring = self._expert_slots = self._words = None
        self._kept, self._made = {}, {}

    def _stop(self) -> list[Completion]:
        """Cancel loads into ring and expert slots; return completions to wait for before freeing the memory."""
        return [done for each in (self._ring, self._expert_slots) if each is not None for done in each.stop()]

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
        """Return whether the output layer and the token embedding are the same matrix on this rank."""
        return self.config.model.tie_embeddings and bool(self.held.head)

    def _apply(self, plan: StreamPlan) -> None:
        is_first, self.plan = self.plan is None, plan
        for done in self._stop():
            done.order()
        self._ring = self._expert_slots = self._words = None
        self._made.clear()
        stays = plan.kept if self.streams_experts else {*plan.kept, *(unit.key for unit in self.held.experts.values())}
        self._kept = {key: value for key, value in self._kept.items() if key in stays}
        if self.streams:
            self._log(self._describe(plan, is_first))
        self._keep_words(plan)
        self._keep(unit for unit in self.held.units if unit.key in plan.kept)
        cycle = [unit for unit in self.held.units if unit.key not in plan.kept]
        experts = self.sizes.num_experts * self.sizes.expert if self.streams_experts else 0
        self.loader.host_copies.expected = plan.streamed_bytes + experts
        if cycle:
            self._ring = Ring(
                self.loader.allocate(plan.ring_bytes),
                cycle,
                self.loader.num_bytes,
                lambda unit, memory, free: self.loader.load(unit, memory, free, UPDATES, again=True),
            )
        if self.streams_experts:
            self._expert_slots = self._make_expert_slots(plan.expert_slots)
        else:
            self._keep(self.held.experts.values())
        self.loader.bytes_read, self._last_logged = 0, 0.0
        self.counts = ReadingCounts()
        if self._expert_slots is not None:
            self._expert_slots.counts = self.counts.experts

    def _keep(self, units: Iterable[WeightUnit]) -> None:
        """Load weights that stay in memory; the memory of the next unit is allocated while the current unit is read."""
        coming = []
        for unit in (unit for unit in units if unit.key not in self._kept):
            memory = self.loader.allocate(self.loader.num_bytes(unit))
            coming.append((unit, memory, self.loader.load(unit, memory, (), PASSES)))
        for unit, memory, there in coming:
            self.loader.wait(unit, there)
            self._kept[unit.key] = self._named(unit, memory)

    def _keep_words(self, plan: StreamPlan) -> None:
        """Load the token embedding if it stays in memory; the rows of a tied output layer become views of it."""
        words, head = self.held.words, self.held.head
        if words is None:
            return
        if not self._head_is_words:
            if plan.keeps_words:
                (self._words,) = self.loader.load_now(WeightUnit("words", (words,))).values()
        elif all(unit.key in plan.kept for unit in head):
            (self._words,) = self.loader.load_now(WeightUnit("words", (words,))).values()
            for unit in head:
                (shard,) = unit.shards
                self._kept[unit.key] = {shard.name: self._words[shard.first_row : shard.first_row + shard.shape[0]]}
        else:
            for unit in head:
                self._kept.pop(unit.key, None)

    def _make_expert_slots(self, num_slots: int) -> ExpertSlots:
        units, size = self.held.experts, self.sizes.expert
        layers = sorted({layer for layer, _ in units})

        def wait(key: ExpertKey, there: Completion) -> None:
            self.counts.expert_seconds_waited += self.loader.wait(units[key], there)

        return ExpertSlots(
            list(self.loader.allocate(num_slots * size).split(size)),
            ExpertUses(layers, self.config.moe.num_experts or 0, self.config.moe.top_k),
            lambda key, memory, free, priority: self.loader.load(units[key], memory, free, priority, again=True),
            wait,
            lambda: Completion.so_far(self.device),
        )

    def _named(self, unit: WeightUnit, memory: torch.Tensor) -> Named:
        return {self.name_in_unit(name): each for name, each in self.loader.views(unit, memory).items()}

    def _describe(self, plan: StreamPlan, is_first: bool) -> str:
        """Return a line that says how many MiB of the model stay in memory and how many are streamed.

        is_first: whether `plan` is the first one, instead of one for a larger request.
        """
        sizes = self.sizes
        kept = sum(size for key, size in sizes.units if key in plan.kept)
        on_gpu = self.device.type == "cuda"
        where = "the host" if on_gpu else "the files"
        clauses = [f"{(sizes.small + kept) / MIB:.0f} MiB of the weights stay in memory"]
        if plan.ring_bytes:
            clauses.append(
                f"{plan.streamed_bytes / MIB:.0f} MiB are read from {where} in every pass, through a ring buffer of "
                f"{plan.ring_bytes / MIB:.0f} MiB"
            )
        if self.streams_experts:
            clauses.append(
                f"{plan.expert_slots} of {sizes.num_experts} experts have slots, the others are read from {where}"
            )
        if on_gpu:
            clauses.append(f"the host keeps copies of at most {max(HOST.headroom, 0) / MIB:.0f} MiB")
        whole = "the model" if is_first else "after a larger request, the model"
        return (
            f"{whole} ({sizes.total / MIB:.0f} MiB) exceeds the memory budget ({self.budget / MIB:.0f} MiB, "
            f"{self._other / MIB:.0f} of it for key-value cache and activations): {', '.join(clauses)}"
        )

    def _log(self, text: str) -> None:
        if self.topology.rank == 0:
            print(text, file=sys.stderr, flush=True)
