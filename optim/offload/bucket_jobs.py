"""The jobs that update a bucket, for each engine, with the work that each job waits for. No call here blocks.

In place, where the state is on the device; `device_stream`: the record is copied to the device, updated there and
copied back (arXiv 2609.14306, section 3.4); `host`: the gradient is copied out, the host updates, the weights are
copied back. Early updates write the new state to the bucket's shadow and the new weights to host memory during the
backward pass; whether the step takes them is known after it.

On a CPU device and host are the same memory, and all copies are made all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from memory.completion import Cancelled, Completion, soonest_free
from memory.host_link import HostLink
from memory.store import Checkout, Store
from optim.arrangement.buckets import Bucket
from optim.offload.experts import OffloadedExperts
from optim.offload.kernel import SCRATCH, State, UpdateScalars, adamw
from optim.offload.records import OffloadMemory, RecordLayout
from parallel.megatron.offloaded import OwnedSlice


@dataclass(frozen=True)
class UpdateJob:
    """The step of an update, as it was when the job was made."""

    step: int  # from 1
    rates: Sequence[UpdateScalars]  # of the bucket's spans
    coefficient: float = 1.0  # that the gradients are clipped with; 1: they are not


@dataclass(frozen=True)
class Early:
    """An update that may be made before it is known whether the step takes it."""

    done: Completion
    first: Completion  # of its work; until that has started, cancelling it cancels the update


class BucketJobs:
    """The jobs of one rank's buckets."""

    def __init__(
        self,
        slices: Sequence[OwnedSlice],
        buckets: Sequence[Bucket],
        layout: RecordLayout,
        memory: OffloadMemory,
        experts: OffloadedExperts | None = None,
    ):
        """experts: the weights and gradients of buckets of offloaded experts."""
        self.buckets, self._layout, self._memory, self._experts = buckets, layout, memory, experts
        self._link: HostLink = memory.link
        self._store: Store = memory.store
        on_device = {s.index for bucket in buckets if bucket.expert_bucket is None for s in bucket.slice_spans}
        weights, grads = ({i: getattr(slices[i], what) for i in sorted(on_device)} for what in ("weights", "grads"))
        self.weights = [_views(bucket, weights, slices) for bucket in buckets]
        self._grads = [_views(bucket, grads, slices) for bucket in buckets]
        self._states: dict[tuple[int, int], State] = {}
        self._watched: list[Completion] = []
        device = self._link.device
        # Filled by the copy streams themselves, in the order of their work.
        self._device_step = torch.zeros((), dtype=torch.float32, device=device)
        self._host_step = torch.zeros((), dtype=torch.float32)
        scratch = SCRATCH if layout.moment_dtype != torch.float32 else 0
        self._device_scratch = torch.empty(scratch, dtype=torch.float32, device=device)
        self._host_scratch = torch.empty(scratch, dtype=torch.float32)

    def problem(self) -> str | None:
        """Return the error of a job in one line; None while there is none. An error stays."""
        failed = [
            done
            for done in self._watched
            if done.is_issued and done.error is not None and not isinstance(done.error, Cancelled)
        ]
        self._watched = failed or [done for done in self._watched if not done.is_issued]
        return None if not failed else " ".join(str(failed[0].error).split()) or type(failed[0].error).__name__

    # -----------------------------------------------------------------------------------------------------------------
    # Once the step's gradients are final, and their norm is known. The result of each: the bucket's weights are back.
    # -----------------------------------------------------------------------------------------------------------------

    def in_place(self, index: int, job: UpdateJob, gradients: Completion) -> Completion:
        """Update a record that stays on the device."""
        resident = self._memory.resident[index]
        assert resident is not None
        work = self._device_update(index, job, self._state(index, resident), self.weights[index])
        return self._watch(self._link.update.submit(work, (gradients, *self._memory.unread(index))))

    def stream(self, index: int, job: UpdateJob, before: Sequence[Completion], early: bool = False) -> Early:
        """Copy the record to the device, update it there and copy it back; early: to the shadow."""
        stage = self._memory.device_stages[soonest_free([stage.users for stage in self._memory.device_stages])]
        checkout, record = self._borrow(index, early), stage.record[: self._store.sizes[index]]
        source, target, size = checkout.source, checkout.target, record.numel()
        up = self._link.up.submit(
            lambda: record.copy_(source, non_blocking=True), (checkout.there,), num_bytes=size, free=stage.users.all()
        )
        link, new_weights, weights = self._link, None, self.weights[index]
        if early:
            assert stage.weights is not None
            new_weights = stage.weights[: self.buckets[index].numel]
            weights = self._split(index, new_weights)
        state = self._state(index, record, None if self._layout.has_master else weights)
        work = self._device_update(index, job, state, weights, copy_first=early and not self._layout.has_master)
        updated = self._watch(link.update.submit(work, (up, *before)))
        area = self._memory.weight_areas[index] if early else None

        def back() -> None:
            target.copy_(record, non_blocking=True)
            if area is not None and new_weights is not None:
                area.copy_(new_weights, non_blocking=True)

        num_bytes = size + (0 if area is None else area.nbytes)
        gone = link.down.submit(back, (updated, *checkout.change_after), num_bytes=num_bytes)
        stage.users.add(gone, self.buckets[index].numel)
        there = self._watch(self._store.put(checkout, gone))
        return Early(there if early else updated, up if checkout.stage is None else checkout.there)

    def on_host(self, index: int, job: UpdateJob, before: Sequence[Completion], left: Completion | None) -> Completion:
        """Copy the gradient out, unless it is (`left`), update on the host, and copy the weights back. With the first
        of `before` the step's gradients are final."""
        numel = self.buckets[index].numel
        stage = self._memory.host_stages[soonest_free([stage.users for stage in self._memory.host_stages])]
        free = stage.users.all()
        area, weights = self._memory.grad_areas[index], stage.weights[:numel]
        grads = stage.grads[:numel] if area is None else area
        if left is None:
            left = self._gather(index, grads, self._grads[index], before, free if area is None else [])
            free = [] if area is None else free  # that copy has waited for it
        # Without the step's gradients, as this one's copy has waited: the host's thread would wait once more.
        after = (*before[1:], left)
        if not self._layout.has_master:
            after = (*after, self._gather(index, weights, self.weights[index], (*before, left), free))
            free = []
        updated, _ = self._host_update(index, job, after, grads, weights, free, early=False)
        back = self._scatter(index, weights, (updated, before[0]))
        stage.users.add(back, numel)
        return back

    def on_records(self, index: int, job: UpdateJob, before: Sequence[Completion], early: bool = False) -> Early:
        """Update a bucket whose weights, gradient and state are all offloaded, on the host; early: to the shadows."""
        experts, expert_bucket = self._experts, self.buckets[index].expert_bucket
        assert experts is not None and expert_bucket is not None
        checkout, has_master = self._borrow(index, early), self._layout.has_master
        first = (checkout.there,) if early else ()  # all other work waits for it, so that it cancels all
        checkouts = weights, grads = experts.borrow(*expert_bucket, early, first)
        new = self._split(index, weights.target.view(experts.dtype))
        split_grads = self._split(index, grads.target.view(torch.float32))
        state = self._state(index, checkout.target, None if has_master else new)
        step, flat = self._host_step, grads.target.view(torch.float32)
        changed = [checkout] if has_master else [checkout, weights]
        copied = [each for each in changed if each.source is not each.target]

        def work() -> None:
            step.fill_(job.step)
            for each in copied:
                each.target.copy_(each.source)
            if job.coefficient < 1:
                flat.mul_(job.coefficient)
            adamw(state, split_grads, step, job.rates, self._host_scratch)
            if has_master:
                for weight, master in zip(new, state.masters, strict=True):
                    weight.copy_(master)

        num_bytes = 2 * checkout.target.numel() + grads.target.numel() + 2 * weights.target.numel()
        there = (checkout.there, weights.there, grads.there)
        after = (*before, *there, *checkout.change_after, *weights.change_after)
        free = (*experts.readers(*expert_bucket, early), *weights.free)
        updated = self._link.host.submit(work, after, num_bytes=num_bytes, free=free)
        back = self._watch(experts.give_back(*expert_bucket, checkouts, updated))  # first: the next passes wait for it
        self._watch(self._store.put(checkout, updated))
        return Early(back, updated if checkout.stage is None else checkout.there)

    # -----------------------------------------------------------------------------------------------------------------
    # During the backward pass
    # -----------------------------------------------------------------------------------------------------------------

    def unscale(
        self, index: int, final: Sequence[Completion], found_inf: torch.Tensor, inverse_scale: torch.Tensor
    ) -> Completion:
        """Divide the gradient by the fp16 loss scale, in place; `found_inf` counts overflows."""
        grads = self._grads[index]
        return self._watch(
            self._link.update.submit(
                lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale), final
            )
        )

    def leave(self, index: int, final: Sequence[Completion]) -> Completion:
        """Copy the gradient, which is final, to its memory on the host."""
        area = self._memory.grad_areas[index]
        assert area is not None
        return self._gather(index, area, self._grads[index], final)

    def on_host_early(self, index: int, job: UpdateJob, left: Completion) -> Early:
        """Update like `on_host`, but with a gradient that is on the host, and to the shadow."""
        grads, weights = self._memory.grad_areas[index], self._memory.weight_areas[index]
        assert grads is not None and weights is not None
        before: tuple[Completion, ...] = (left,)
        if not self._layout.has_master:
            before = (self._gather(index, weights, self.weights[index], before),)
        return Early(*self._host_update(index, job, before, grads, weights, [], early=True))

    def commit(self, index: int, early: Completion, gradients: Completion) -> Completion:
        """Make the shadow the state. With the result its weights are the model's."""
        weights, expert_bucket = self._memory.weight_areas[index], self.buckets[index].expert_bucket
        self._store.swap(index, len(self.buckets) + index)
        if expert_bucket is not None:
            assert self._experts is not None
            self._experts.commit(*expert_bucket)
            return early
        assert weights is not None
        return self._scatter(index, weights, (early, gradients))

    # -----------------------------------------------------------------------------------------------------------------
    # Jobs
    # -----------------------------------------------------------------------------------------------------------------

    def _device_update(
        self, index: int, job: UpdateJob, state: State, weights: Sequence[torch.Tensor], copy_first: bool = False
    ) -> Callable[[], None]:
        grads, has_master, own = self._grads[index], self._layout.has_master, self.weights[index]
        step, scratch = self._device_step, self._device_scratch

        def work() -> None:
            step.fill_(job.step)
            if copy_first:
                torch._foreach_copy_(weights, own)
            if job.coefficient < 1:
                torch._foreach_mul_(grads, job.coefficient)
            adamw(state, grads, step, job.rates, scratch)
            if has_master:
                torch._foreach_copy_(weights, state.masters)

        return work

    def _host_update(
        self,
        index: int,
        job: UpdateJob,
        before: Sequence[Completion],
        grads: torch.Tensor,
        weights: torch.Tensor,
        free: Sequence[Completion],
        early: bool,
    ) -> tuple[Completion, Completion]:
        """Update on the host; return the completions of the update and of its first work."""
        checkout, has_master = self._borrow(index, early), self._layout.has_master
        new, split_grads = self._split(index, weights), self._split(index, grads)
        state = self._state(index, checkout.target, None if has_master else new)
        source, target = checkout.source, checkout.target
        step, scratch = self._host_step, self._host_scratch

        def work() -> None:
            step.fill_(job.step)
            if source is not target:
                target.copy_(source)
            if job.coefficient < 1:
                grads.mul_(job.coefficient)
            adamw(state, split_grads, step, job.rates, scratch)
            if has_master:
                for weight, master in zip(new, state.masters, strict=True):
                    weight.copy_(master)

        num_bytes = 2 * target.numel() + grads.nbytes + weights.nbytes  # that the host reads and writes
        after = (*before, checkout.there, *checkout.change_after)
        updated = self._link.host.submit(work, after, num_bytes=num_bytes, free=free)
        there = self._watch(self._store.put(checkout, updated))
        return there if early else updated, updated if checkout.stage is None else checkout.there

    def _borrow(self, index: int, early: bool) -> Checkout:
        return self._store.fetch(index, len(self.buckets) + index if early else None)

    def _gather(
        self,
        index: int,
        flat: torch.Tensor,
        sources: list[torch.Tensor],
        before: Sequence[Completion],
        free: Sequence[Completion] = (),
    ) -> Completion:
        """Copy a bucket's tensors from the device to a flat tensor of the host."""
        work = partial(_copy_all, self._split(index, flat), sources)
        return self._watch(self._link.down.submit(work, before, num_bytes=flat.nbytes, free=free))

    def _scatter(self, index: int, flat: torch.Tensor, before: Sequence[Completion]) -> Completion:
        """Copy new weights from the host to the model."""
        work = partial(_copy_all, self.weights[index], self._split(index, flat))
        return self._watch(self._link.up.submit(work, before, num_bytes=flat.nbytes))

    def _state(self, index: int, record: torch.Tensor, masters: list[torch.Tensor] | None = None) -> State:
        """Return the state in a bucket's record; its masters are in the record, or given, or the model's weights."""
        key = (index, record.data_ptr())
        if key not in self._states:
            kinds = self._layout.split(record, self.buckets[index].numel)
            split = {kind: self._split(index, flat) for kind, flat in kinds.items()}
            self._states[key] = State(split.get("master", self.weights[index]), split["exp_avg"], split["exp_avg_sq"])
        state = self._states[key]
        return state if masters is None else State(masters, state.exp_avgs, state.exp_avg_sqs)

    def _split(self, index: int, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[span.offset : span.offset + span.end - span.start] for span in self.buckets[index].slice_spans]

    def _watch(self, done: Completion) -> Completion:
        self._watched.append(done)
        return done


def _views(bucket: Bucket, flats: dict[int, torch.Tensor], slices: Sequence[OwnedSlice]) -> list[torch.Tensor]:
    """Return a bucket's spans of the flat tensors of slices; [] for offloaded experts."""
    if bucket.expert_bucket is not None:
        return []
    return [
        flats[span.index][span.start - slices[span.index].start : span.end - slices[span.index].start]
        for span in bucket.slice_spans
    ]


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
