"""An optimizer whose state is stored in buckets on device, host or disk, and whose updates overlap with the passes.

By default, updates run during the next forward pass, in the order of first use; an operation that needs a weight waits
only for that weight's buckets. An early update runs during the backward pass, once its gradients are final. The
gradient norm is not known then, so its result is written to a shadow, and dropped if the step is clipped or rejected.
Either way the numbers are those of an update that waits for all gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from memory.completion import Completion
from optim.arrangement.engines import Bandwidths, ElementBytes, choose
from optim.offload.bandwidths import measure
from optim.offload.bucket_jobs import BucketJobs, Early, UpdateJob
from optim.offload.kernel import UpdateScalars
from optim.offload.records import WEIGHT, OffloadMemory, StateSnapshot
from parallel.megatron.offloaded import OwnedSlice

CLIPPED_WINDOW = 100  # recent steps that early_update=auto considers
CLIPPED_FEW = 0.1  # early_update=auto updates early if a smaller share of these steps was clipped


@dataclass(frozen=True)
class Hyperparameters:
    """The AdamW settings that all parameter groups share, and whether updates may run during the backward pass."""

    beta1: float
    beta2: float
    epsilon: float
    early_update: str  # auto, always, never


class OffloadedOptimizer:
    """Stores one rank's optimizer state, and updates it in the background. Only the training thread may call it."""

    def __init__(self, slices: Sequence[OwnedSlice], memory: OffloadMemory, hyperparameters: Hyperparameters):
        self.slices, self.memory, self.hyperparameters = slices, memory, hyperparameters
        self.buckets, self.layout, self.experts = memory.buckets, memory.layout, memory.experts
        self.device, self.jobs = memory.link.device, BucketJobs(slices, memory)
        self.engines = list(memory.arrangement.engines)
        self.rates: Bandwidths | None = None  # measured by `choose`
        self.steps = 0  # taken
        self.num_committed = self.num_dropped = 0  # early updates of buckets
        self._buckets_of: dict[torch.nn.Parameter, list[int]] = {}
        self._buckets_of_layer: dict[int, list[int]] = {}  # of offloaded experts
        for index, bucket in enumerate(self.buckets):
            if bucket.expert_bucket is not None:
                self._buckets_of_layer.setdefault(bucket.expert_bucket[0], []).append(index)
                continue  # a pass waits for the copy of the weights to the device
            for span in bucket.slice_spans:
                indices = self._buckets_of.setdefault(slices[span.index].parameter, [])
                if index not in indices:
                    indices.append(index)
        # Jobs in flight, by bucket
        self._back: dict[int, Completion] = {}  # the copy of new weights, until a pass has waited for it
        self._left: dict[int, Completion] = {}  # the copy of this step's gradient to the host
        self._early: dict[int, Early] = {}  # this step's early update
        self._newest: list[int] = []  # buckets whose gradient DDP reduced last
        self._newest_records: list[int] = []  # buckets of the offloaded layer whose gradient became final last
        self._clipped: deque[bool] = deque(maxlen=CLIPPED_WINDOW)
        self._snapshot: StateSnapshot | None = None
        self._may_leave = self._may_update = False
        self._inverse_scale: torch.Tensor | None = None
        self._unscaled: dict[int, Completion] = {}
        self._found_inf = torch.zeros(1, dtype=torch.float32, device=self.device)
        if self.experts is not None:
            self.experts.call_when_final(self.final_records)

    def begin_step(self, inverse_scale: torch.Tensor | None, passive: bool = False) -> None:
        """Prepare a step's passes, and drop updates that were started early.

        inverse_scale: 1 / the fp16 loss scale. passive: whether no update follows the passes.
        """
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
        """Start gradient copies to the host, or early updates, for a DDP bucket group whose reduction has started."""
        if not self._may_leave:
            return
        final: tuple[Completion, ...] = (Completion.so_far(self.device), _Reduction(group.grad_reduce_handle))
        found = dict.fromkeys(index for parameter in group.params for index in self._buckets_of.get(parameter, ()))
        indices = [index for index in found if not self.buckets[index].reduced_at_step_end]
        if not any(self._leaves(index) or self._updates(index) for index in indices):
            return
        self._cancel_ahead(keep=[*self._newest, *self._newest_records])
        self._newest = indices
        for index in indices:
            if self._inverse_scale is not None:
                # Also for buckets that are not updated early: the slices of a gradient must all be unscaled.
                self._unscaled[index] = self.jobs.unscale(index, final, self._found_inf, self._inverse_scale)
            ready = (self._unscaled[index],) if index in self._unscaled else final
            job = UpdateJob(self.steps + 1, self._rates(index))
            if self._leaves(index):
                self._left[index] = self.jobs.leave(index, ready)
            if self._updates(index):
                if self.engines[index] == "host":
                    self._early[index] = self.jobs.on_host_early(index, job, self._left[index])
                else:
                    self._early[index] = self.jobs.stream(index, job, ready, early=True)

    def final_records(self, layer: int) -> None:
        """Start early updates of the offloaded experts of a layer whose gradient is final."""
        indices = self._buckets_of_layer.get(layer, []) if self._may_update else []
        if not any(self._updates(index) for index in indices):
            return
        self._cancel_ahead(keep=[*self._newest, *self._newest_records])
        self._newest_records = indices
        for index in indices:
            job = UpdateJob(self.steps + 1, self._rates(index))
            self._early[index] = self.jobs.on_records(index, job, (), early=True)

    def _leaves(self, index: int) -> bool:
        return self.memory.grad_areas[index] is not None and self.engines[index] == "host"

    def _updates(self, index: int) -> bool:
        return self._may_update and self.memory.arrangement.early[index]

    def unscaled(self) -> tuple[set[int], torch.Tensor | None]:
        """Return (addresses of gradients that were divided by the fp16 loss scale, how many of them overflowed)."""
        grads: set[int] = set()
        for index, done in self._unscaled.items():
            done.order()
            grads |= {self.slices[span.index].grads.data_ptr() for span in self.buckets[index].slice_spans}
        self._unscaled = {}
        return grads, self._found_inf if grads else None

    def update(self, coefficient: float) -> None:
        """Start the update of all weights, with the step's gradients multiplied by `coefficient`."""
        self._cancel_ahead()
        self.steps += 1
        gradients, clipped = Completion.so_far(self.device), coefficient < 1
        self._clipped.append(clipped)
        for index, engine in enumerate(self.engines):
            early, left = self._early.pop(index, None), self._left.pop(index, None)
            if early is not None and not clipped:
                self._back[index] = self.jobs.commit(index, early.done, gradients)
                self.num_committed += 1
                continue
            self.num_dropped += early is not None
            job = UpdateJob(self.steps, self._rates(index), coefficient)
            before = (gradients,) if early is None else (gradients, early.done)
            if engine == "host":
                self._back[index] = self.jobs.on_host(index, job, before, left)
            elif engine == "record":
                self._back[index] = self.jobs.on_records(index, job, before).done
            elif engine == "device_stream":
                self._back[index] = self.jobs.stream(index, job, before).done
            else:
                self._back[index] = self.jobs.in_place(index, job, gradients)

    def drop(self) -> None:
        """Drop this step's early copies and updates. Later passes wait until those that have started are done."""
        self._cancel_ahead()
        self.num_dropped += len(self._early)
        early = {index: update.done for index, update in self._early.items()}
        for started in (self._unscaled, self._left, early):
            self._back.update(started)
        self._unscaled, self._left, self._early = {}, {}, {}

    def _cancel_ahead(self, keep: Sequence[int] = ()) -> None:
        """Cancel early copies and updates that have not started, except those of the buckets `keep`.

        The backward pass reaches last the buckets that the next forward pass needs first. Waiting jobs of other buckets
        must not delay these.
        """
        for index in [index for index in self._early if index not in keep]:
            if self._early[index].first.cancel():
                del self._early[index]
        for index in [index for index in self._left if index not in keep and index not in self._early]:
            if self._left[index].cancel():
                del self._left[index]

    def gate(self, parameter: torch.nn.Parameter) -> None:
        """Make the current CUDA stream wait until the last step has updated this parameter and read its gradient."""
        if not self._back:
            return
        for index in self._buckets_of.get(parameter, ()):
            if (done := self._back.pop(index, None)) is not None:
                done.order()

    def synchronize(self) -> None:
        """Make the current CUDA stream wait until the last step has updated all weights."""
        for index in list(self._back):
            self._back.pop(index).order()

    def problem(self) -> str | None:
        """Return the first error of a background copy or update as one line, or None. Later calls return it again."""
        return self.jobs.problem() or (None if self.experts is None else self.experts.problem())

    def choose(self, engine: str) -> bool:
        """Measure bandwidths, and choose device or host to update each bucket. Returns whether any engine changed.

        A collective call between two steps, while no save is in flight. `engine`: the setting optimizer.engine.
        """
        assert self._snapshot is None or self._snapshot.is_over
        self.synchronize()
        arrangement = self.memory.arrangement
        self.rates = measure(self.memory)
        before, may = self.engines, [index for index, own in enumerate(self.engines) if own != "record"]
        numels, targets = [arrangement.numels[index] for index in may], [arrangement.targets[index] for index in may]
        chosen = dict(zip(may, choose(engine, numels, targets, ElementBytes.of(arrangement), self.rates), strict=True))
        self.engines = [chosen.get(index, "record") for index in range(len(before))]
        return self.engines != before

    def close(self) -> None:
        """Release the reserved memory, after the link was closed."""
        self.memory.close()
        if self.experts is not None:
            self.experts.close()

    # -- saving and loading ------------------------------------------------------------------------------------------

    def snapshot(self) -> StateSnapshot:
        """Return the state for a save, once the last snapshot is released.

        A bucket cannot change until the save releases it.
        """
        if self._snapshot is not None:
            self._snapshot.wait()
        self._snapshot = StateSnapshot(self.memory)
        return self._snapshot

    def empty(self, index: int) -> dict[str, torch.Tensor]:
        """Return flat host tensors by kind, to be filled with a bucket's state and then stored by `fill`.

        All buckets share the memory.
        """
        bucket = self.buckets[index]
        kinds = self.layout.split(self.memory.buffer, bucket.numel)
        if self.experts is not None and bucket.expert_bucket is not None:
            kinds[WEIGHT] = self.experts.buffer.view(self.experts.dtype)[: bucket.numel]
        return kinds

    def fill(self, index: int) -> None:
        """Store a bucket's state from the host tensors that the caller has filled, and wait until it is stored."""
        expert_bucket = self.buckets[index].expert_bucket
        if self.experts is not None and expert_bucket is not None:
            weights = self.empty(index)[WEIGHT]
            self.experts.put_weights(self.experts.weight_index(*expert_bucket), weights)
        record = self.memory.buffer[: self.memory.store.sizes[index]]
        resident = self.memory.resident[index]
        if resident is not None:
            resident.copy_(record)
            return
        checkout = self.memory.store.fetch(index)
        checkout.there.wait()
        checkout.target.copy_(record)
        self.memory.store.put(checkout, Completion.already()).result()

    def expect_state(self, steps: int) -> None:
        """Prepare to load the state after `steps` steps: drop early updates, and wait for those in flight."""
        self.drop()
        self.synchronize()
        self.steps = steps

    @torch.no_grad()
    def initialize(self) -> None:
        """Set the optimizer state of a new run: masters are copies of the weights, and moments are zero."""
        self.steps = 0
        for index in range(len(self.buckets)):
            kinds = self.empty(index)
            for kind, flat in kinds.items():
                if kind not in ("master", WEIGHT):
                    flat.zero_()
            self._copy_masters(index, kinds)
            self.fill(index)

    @torch.no_grad()
    def reload(self) -> None:
        """Copy the model's weights to the fp32 masters, and leave the moments as they are."""
        if self.layout.has_master:
            self.change(range(len(self.buckets)), self._copy_masters)

    @torch.no_grad()
    def change(self, indices: Sequence[int], change: Callable[[int, dict[str, torch.Tensor]], None]) -> None:
        """Call `change(index, state)` for each of these buckets, to modify its state (flat host tensors) in place.

        Call it between two steps. It waits for a save that is in flight.
        """
        self.synchronize()
        snapshot = self.snapshot()
        for index in range(len(self.buckets)):
            if index not in indices:
                snapshot.release(index)
                continue
            kinds, now = self.empty(index), snapshot.read(index)
            for kind, flat in kinds.items():
                flat.copy_(now[kind])
            snapshot.release(index)
            change(index, kinds)
            self.fill(index)

    def _copy_masters(self, index: int, kinds: dict[str, torch.Tensor]) -> None:
        expert_bucket = self.buckets[index].expert_bucket
        if self.experts is not None and expert_bucket is not None:
            kinds[WEIGHT].copy_(self.experts.read_weights(*expert_bucket))
            if self.layout.has_master:
                kinds["master"].copy_(kinds[WEIGHT])
        elif self.layout.has_master:
            for span, weights in zip(self.buckets[index].slice_spans, self.jobs.weights[index], strict=True):
                kinds["master"][span.offset : span.offset + span.end - span.start].copy_(weights)

    def _rates(self, index: int) -> list[UpdateScalars]:
        shared = self.hyperparameters.beta1, self.hyperparameters.beta2, self.hyperparameters.epsilon
        groups = (self.slices[span.index].group for span in self.buckets[index].slice_spans)
        return [UpdateScalars(group["lr"], group["weight_decay"], *shared) for group in groups]


class _Reduction(Completion):
    """The completion of a gradient reduction that DDP has started."""

    def __init__(self, handle: Any) -> None:
        super().__init__()
        self._handle = handle

    def when_issued(self, call: Callable[[], None]) -> None:
        """Call the function immediately, because DDP has started the reduction; `wait` and `order` wait for its end."""
        call()

    def wait(self, timeout: float = 0.0) -> None:
        """Wait for the reduction, up to the timeout of its process group."""
        self._handle.wait()

    def order(self, timeout: float = 0.0) -> None:
        """Wait for the reduction; on a GPU, only the current CUDA stream waits."""
        self._handle.wait()


def offload_of(optimizer: MegatronOptimizer) -> OffloadedOptimizer | None:
    """Return the OffloadedOptimizer behind an optimizer, or None if Megatron-core keeps the state on the device."""
    return getattr(optimizer, "offload", None)
