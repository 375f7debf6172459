"""An optimizer whose state lies on the device, on the host or on the disk, bucket by bucket, and whose update runs
beside the passes.

By default it runs into the next forward pass, bucket by bucket in the order of first use; whoever needs a weight waits
for its buckets alone. Early it runs beside the backward pass, as gradients become final: then the norm is not known
yet, so that what comes of it is kept aside, and dropped where the step is clipped or refused. Either way the numbers
are those of an update that waits for everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from memory.completion import Completion
from memory.store import Store
from optim.arrangement.buckets import Bucket
from optim.arrangement.planning import Bandwidths, ElementBytes, choose
from optim.tiers.bucket_jobs import BucketJobs, Early, UpdateJob
from optim.tiers.buckets import WEIGHT, RecordLayout
from optim.tiers.expert_tier import ExpertTier
from optim.tiers.kernel import UpdateScalars
from optim.tiers.measure import measure
from optim.tiers.memory import TierMemory
from optim.tiers.state_snapshot import StateSnapshot
from parallel.megatron.tiered import OwnedSlice

CLIPPED_WINDOW = 100  # steps that early_update=auto looks back
CLIPPED_FEW = 0.1  # share of them below which early updates are worth it


@dataclass(frozen=True)
class Hyperparameters:
    """What all parameter groups share, and when an update may begin."""

    beta1: float
    beta2: float
    epsilon: float
    early_update: str  # auto, always, never


class Tiers:
    """The state and the updates of one rank. The training's thread calls everything; none of it waits for the
    device."""

    def __init__(
        self,
        slices: Sequence[OwnedSlice],
        buckets: Sequence[Bucket],
        layout: RecordLayout,
        memory: TierMemory,
        hyperparameters: Hyperparameters,
        experts: ExpertTier | None = None,
    ):
        """experts: the weights and gradients of buckets off the device."""
        self.experts = experts
        self.slices, self.buckets, self.layout, self.memory = slices, buckets, layout, memory
        self.hyperparameters, self.device = hyperparameters, memory.link.device
        self.jobs = BucketJobs(slices, buckets, layout, memory, experts)
        self.ways = list(memory.arrangement.ways)
        self.rates: Bandwidths | None = None  # of the tiers, as `choose` measured them
        self.steps = 0  # taken
        self.num_committed = self.num_dropped = 0  # early updates of buckets
        self._of: dict[torch.nn.Parameter, list[int]] = {}
        self._of_layer: dict[int, list[int]] = {}  # of experts off the device
        for index, bucket in enumerate(buckets):
            if bucket.of_experts is not None:
                self._of_layer.setdefault(bucket.of_experts[0], []).append(index)
                continue  # a pass waits for them to come, and not here
            for piece in bucket.pieces:
                owners = self._of.setdefault(slices[piece.index].parameter, [])
                if index not in owners:
                    owners.append(index)
        self._back: dict[
            int, Completion
        ] = {}  # buckets whose weights are on their way, until somebody has waited for them
        self._left: dict[int, Completion] = {}  # buckets whose gradient of this step is on its way to the host
        self._early: dict[int, Early] = {}  # buckets whose update of this step is on its way to their shadow
        self._newest: list[int] = []  # whose gradient came last, by DDP
        self._newest_records: list[int] = []  # and of experts off the device
        self._clipped: deque[bool] = deque(maxlen=CLIPPED_WINDOW)
        self._hold: StateSnapshot | None = None
        self._may_leave = self._may_update = False
        self._inverse_scale: torch.Tensor | None = None
        self._unscaled: dict[int, Completion] = {}
        self._found_inf = torch.zeros(1, dtype=torch.float32, device=self.device)
        if experts is not None:
            experts.when_final = self.final_records

    @property
    def store(self) -> Store:
        """The store of the records off the device."""
        return self.memory.store

    # -----------------------------------------------------------------------------------------------------------------
    # A step
    # -----------------------------------------------------------------------------------------------------------------

    def begin_step(self, inverse_scale: torch.Tensor | None, passive: bool = False) -> None:
        """Gradients of a step begin to be computed; what an earlier one left behind is dropped. `inverse_scale`: of
        the loss in fp16. passive: they will change nothing."""
        self.drop()
        if self.experts is not None:
            self.experts.begin_step()
        few = len(self._clipped) > 0 and sum(self._clipped) < CLIPPED_FEW * len(self._clipped)
        wanted = self.hyperparameters.early_update
        self._may_leave = not passive
        self._may_update = not passive and (wanted == "always" or (wanted == "auto" and few))
        self._inverse_scale = inverse_scale
        if inverse_scale is not None:
            self._found_inf.zero_()

    def reduced(self, group: Any) -> None:
        """The gradients of one of DDP's bucket groups are on their way to being final: see
        parallel/megatron/tiered.py."""
        if not self._may_leave:
            return
        final: tuple[Completion, ...] = (Completion.so_far(self.device), _Reduction(group.grad_reduce_handle))
        found = dict.fromkeys(index for parameter in group.params for index in self._of.get(parameter, ()))
        indices = [index for index in found if not self.buckets[index].late]
        if not any(self._leaves(index) or self._updates(index) for index in indices):
            return
        self._cancel_ahead(keep=[*self._newest, *self._newest_records])
        self._newest = indices
        for index in indices:
            if self._inverse_scale is not None:
                # Also of buckets that wait: a slice in several is unscaled as a whole.
                self._unscaled[index] = self.jobs.unscale(index, final, self._found_inf, self._inverse_scale)
            self._start(index, (self._unscaled[index],) if index in self._unscaled else final)

    def final_records(self, layer: int) -> None:
        """The gradient of a layer's experts off the device is complete."""
        indices = self._of_layer.get(layer, []) if self._may_update else []
        if not any(self._updates(index) for index in indices):
            return
        self._cancel_ahead(keep=[*self._newest, *self._newest_records])
        self._newest_records = indices
        for index in indices:
            self._early[index] = self.jobs.on_records_early(index, UpdateJob(self.steps + 1, self._rates(index)))

    def _leaves(self, index: int) -> bool:
        return self.memory.grad_areas[index] is not None and self.ways[index] == "host"

    def _updates(self, index: int) -> bool:
        return self._may_update and self.memory.arrangement.early[index]

    def _start(self, index: int, final: Sequence[Completion]) -> None:
        """Do what can be done for a bucket before the step's norm is known."""
        job = UpdateJob(self.steps + 1, self._rates(index))
        if self._leaves(index):
            self._left[index] = self.jobs.leave(index, final)
        if self._updates(index):
            if self.ways[index] == "host":
                self._early[index] = self.jobs.on_host_early(index, job, self._left[index])
            else:
                self._early[index] = self.jobs.stream_early(index, job, final)

    def unscaled(self) -> tuple[set[int], torch.Tensor | None]:
        """(addresses of gradients that the fp16 loss scale is out of, how many of them overflowed)."""
        grads: set[int] = set()
        for index, done in self._unscaled.items():
            done.order()
            grads |= {self.slices[piece.index].grads.data_ptr() for piece in self.buckets[index].pieces}
        self._unscaled = {}
        return grads, self._found_inf if grads else None

    def update(self, coefficient: float) -> None:
        """Have all weights changed by the gradients that are there, times `coefficient`. Nothing is waited for."""
        self._cancel_ahead()
        self.steps += 1
        gradients, clipped = Completion.so_far(self.device), coefficient < 1
        self._clipped.append(clipped)
        for index, way in enumerate(self.ways):
            early, left = self._early.pop(index, None), self._left.pop(index, None)
            if early is not None and not clipped:
                self._back[index] = self.jobs.commit(index, early.done, gradients)
                self.num_committed += 1
                continue
            self.num_dropped += early is not None
            job = UpdateJob(self.steps, self._rates(index), coefficient)
            before = (gradients,) if early is None else (gradients, early.done)
            if way == "host":
                self._back[index] = self.jobs.on_host(index, job, before, left)
            elif way == "record":
                self._back[index] = self.jobs.on_records(index, job, before)
            elif way == "device_stream":
                self._back[index] = self.jobs.stream(index, job, before)
            else:
                self._back[index] = self.jobs.in_place(index, job, gradients)

    def drop(self) -> None:
        """The step is not taken: what was done for it ahead is forgotten, once nothing reads its gradients any more."""
        self._cancel_ahead()
        self.num_dropped += len(self._early)
        early = {index: update.done for index, update in self._early.items()}
        for started in (self._unscaled, self._left, early):
            self._back.update(started)
        self._unscaled, self._left, self._early = {}, {}, {}

    def _cancel_ahead(self, keep: Sequence[int] = ()) -> None:
        """Leave out what was to be done ahead and has not begun.

        The backward pass goes through the buckets the other way round than the next forward pass will. Where not all
        get done ahead, first come first served would leave the first ones, for which that pass would stand waiting.
        """
        for index in [index for index in self._early if index not in keep]:
            if self._early[index].cancel():
                del self._early[index]
        for index in [index for index in self._left if index not in keep and index not in self._early]:
            if self._left[index].cancel():
                del self._left[index]

    def gate(self, parameter: torch.nn.Parameter) -> None:
        """The current stream goes on with this parameter's weights once the last step has changed them, and may write
        its gradient."""
        if not self._back:
            return
        for index in self._of.get(parameter, ()):
            if (done := self._back.pop(index, None)) is not None:
                done.order()

    def settle(self) -> None:
        """The current stream goes on once all weights are as the last step leaves them."""
        for index in list(self._back):
            self._back.pop(index).order()

    def problem(self) -> str | None:
        """What a copy or an update raised, in one line; None where all is well so far. Once there is one it stays."""
        return self.jobs.problem() or (None if self.experts is None else self.experts.problem())

    def choose(self, engine: str) -> bool:
        """Measure the tiers and give each bucket its way (optim/arrangement/planning.py); whether any was changed. A
        collective call, between two steps, while no save is under way."""
        assert self._hold is None or self._hold.is_over
        self.settle()
        arrangement = self.memory.arrangement
        self.rates = measure(self.memory, self.layout)
        before, may = self.ways, [index for index, way in enumerate(self.ways) if way != "record"]
        numels, lie = [arrangement.numels[index] for index in may], [arrangement.tiers[index] for index in may]
        chosen = dict(zip(may, choose(engine, numels, lie, ElementBytes.of(arrangement), self.rates), strict=True))
        self.ways = [chosen.get(index, "record") for index in range(len(before))]
        return self.ways != before

    def close(self) -> None:
        """Give back the room of its memory, once the link is closed."""
        self.memory.close()
        if self.experts is not None:
            self.experts.close()

    # -----------------------------------------------------------------------------------------------------------------
    # What saves and loads see
    # -----------------------------------------------------------------------------------------------------------------

    def hold(self) -> StateSnapshot:
        """The state as it is now, to be read bucket by bucket; a bucket changes no more before it is released. Waits
        until all of an earlier one are."""
        if self._hold is not None:
            self._hold.wait()
        self._hold = StateSnapshot(self.memory, self.layout, self.buckets, self.experts)
        return self._hold

    def empty(self, index: int) -> dict[str, torch.Tensor]:
        """Host tensors for a bucket's state, flat, and its weights where they lie off the device, that `fill` takes;
        the same memory for every bucket."""
        bucket = self.buckets[index]
        kinds = self.layout.split(self.memory.buffer, bucket.numel)
        if self.experts is not None and bucket.of_experts is not None:
            kinds[WEIGHT] = self.experts.buffer.view(self.experts.dtype)[: bucket.numel]
        return kinds

    def fill(self, index: int) -> None:
        """Make what `empty` was filled with the bucket's. Returns when it is."""
        of_experts = self.buckets[index].of_experts
        if self.experts is not None and of_experts is not None:
            weights = self.empty(index)[WEIGHT]
            self.experts.put_weights(self.experts.weight_index(*of_experts), weights)
        record = self.memory.buffer[: self.store.sizes[index]]
        resident = self.memory.resident[index]
        if resident is not None:
            resident.copy_(record)
            return
        checkout = self.store.fetch(index)
        checkout.there.wait()
        checkout.target.copy_(record)
        written = self.store.put(checkout, Completion.already())
        written.wait()
        if written.error is not None:
            raise written.error

    @torch.no_grad()
    def begin(self) -> None:
        """State of a run that begins: masters from the weights, no moments."""
        self.steps = 0
        for index in range(len(self.buckets)):
            kinds = self.empty(index)
            for kind, flat in kinds.items():
                if kind not in ("master", WEIGHT):
                    flat.zero_()
            self._take_masters(index, kinds)
            self.fill(index)

    @torch.no_grad()
    def reload(self) -> None:
        """Masters from the weights; the moments stay."""
        if self.layout.has_master:
            self.change(range(len(self.buckets)), self._take_masters)

    @torch.no_grad()
    def change(self, indices: Sequence[int], change: Callable[[int, dict[str, torch.Tensor]], None]) -> None:
        """Have `change(index, state by kind)` change these buckets' state, flat tensors on the host, one after the
        other. Between two steps; waits for a save that is under way."""
        self.settle()
        hold = self.hold()
        for index in range(len(self.buckets)):
            if index not in indices:
                hold.release(index)
                continue
            kinds, now = self.empty(index), hold.read(index)
            for kind, flat in kinds.items():
                flat.copy_(now[kind])
            hold.release(index)
            change(index, kinds)
            self.fill(index)

    def _take_masters(self, index: int, kinds: dict[str, torch.Tensor]) -> None:
        of_experts = self.buckets[index].of_experts
        if self.experts is not None and of_experts is not None:
            kinds[WEIGHT].copy_(self.experts.read_weights(*of_experts))
            if self.layout.has_master:
                kinds["master"].copy_(kinds[WEIGHT])
        elif self.layout.has_master:
            for piece, weights in zip(self.buckets[index].pieces, self.jobs.weights[index], strict=True):
                kinds["master"][piece.offset : piece.offset + piece.end - piece.start].copy_(weights)

    def _rates(self, index: int) -> list[UpdateScalars]:
        shared, groups = self.hyperparameters, [self.slices[p.index].group for p in self.buckets[index].pieces]
        return [
            UpdateScalars(group["lr"], group["weight_decay"], shared.beta1, shared.beta2, shared.epsilon)
            for group in groups
        ]


class _Reduction(Completion):
    """A reduction of DDP's that is under way."""

    def __init__(self, handle: Any) -> None:
        super().__init__()
        self._handle = handle

    def when_issued(self, call: Callable[[], None]) -> None:
        """Whoever waits for it waits for the handle."""
        call()

    def wait(self, timeout: float = 0.0) -> None:
        """Its own time-out is the process group's."""
        self._handle.wait()

    def order(self, timeout: float = 0.0) -> None:
        """On a GPU the current stream waits."""
        self._handle.wait()


def tiers_of(optimizer: MegatronOptimizer) -> Tiers | None:
    """The tiers that hold an optimizer's state; None where Megatron-core's own does, on the device."""
    return getattr(optimizer, "tiers", None)
