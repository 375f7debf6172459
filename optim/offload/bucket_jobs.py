"""Background jobs that update a bucket of optimizer state, with one way for each engine. No call here blocks.

State on the device is updated in place. Engine `device_stream` copies the state to the device, updates it and copies it
back (arXiv 2609.14306, section 3.4). Engine `host` copies the gradient to the host, updates there, and copies the
weights back. Early updates run before it is known whether the step is taken: they write new state to the bucket's
shadow (a second record) and new weights to host memory. On a CPU, all copies are still made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from memory.completion import Cancelled, Completion, soonest_free
from memory.store import Checkout
from optim.arrangement.buckets import Bucket
from optim.offload.kernel import SCRATCH, State, UpdateScalars, adamw
from optim.offload.records import OffloadMemory
from parallel.megatron.offloaded import OwnedSlice


@dataclass(frozen=True)
class UpdateJob:
    """Step number, hyperparameters and clipping of one bucket's update, fixed when its jobs are submitted."""

    step: int  # from 1
    rates: Sequence[UpdateScalars]  # of the bucket's slices
    coefficient: float = 1.0  # factor of the gradients; below 1 if they are clipped


@dataclass(frozen=True)
class Early:
    """An update that runs before it is known whether the step is taken.

    `done`: its end. `first`: its first job; cancelling it stops the update.
    """

    done: Completion
    first: Completion


class BucketJobs:
    """Submits the background jobs that update one rank's buckets of optimizer state."""

    def __init__(self, slices: Sequence[OwnedSlice], memory: OffloadMemory):
        self._memory, self._link, self._store = memory, memory.link, memory.store
        self._buckets, self._layout, self._experts = memory.buckets, memory.layout, memory.experts
        on_device = {s.index for bucket in memory.buckets if bucket.expert_bucket is None for s in bucket.slice_spans}
        weights, grads = ({i: getattr(slices[i], what) for i in sorted(on_device)} for what in ("weights", "grads"))
        self.weights = [_views(bucket, weights, slices) for bucket in memory.buckets]
        self._grads = [_views(bucket, grads, slices) for bucket in memory.buckets]
        self._states: dict[tuple[int, int], State] = {}
        self._watched: list[Completion] = []
        device = self._link.device
        # Written by the jobs themselves.
        self._device_step = torch.zeros((), dtype=torch.float32, device=device)
        self._host_step = torch.zeros((), dtype=torch.float32)
        scratch = SCRATCH if self._layout.moment_dtype != torch.float32 else 0
        self._device_scratch = torch.empty(scratch, dtype=torch.float32, device=device)
        self._host_scratch = torch.empty(scratch, dtype=torch.float32)

    def problem(self) -> str | None:
        """Return the first error of a job as one line, or None. Later calls return the same error."""
        failed = [
            done
            for done in self._watched
            if done.is_issued and done.error is not None and not isinstance(done.error, Cancelled)
        ]
        self._watched = failed or [done for done in self._watched if not done.is_issued]
        return None if not failed else " ".join(str(failed[0].error).split()) or type(failed[0].error).__name__

    # -- updates after the gradient norm is known: they return the completion of the bucket's new weights -------------

    def in_place(self, index: int, job: UpdateJob, gradients: Completion) -> Completion:
        """Update a bucket whose state is stored on the device. Returns the completion of the update."""
        resident = self._memory.resident[index]
        assert resident is not None
        work = self._device_update(index, job, self._state(index, resident), self.weights[index])
        return self._watch(self._link.update.submit(work, (gradients, *self._memory.unread(index))))

    def stream(self, index: int, job: UpdateJob, before: Sequence[Completion], early: bool = False) -> Early:
        """Copy a bucket's state to the device, update it there and copy it back.

        `early`: copy it to the bucket's second record (shadow) instead. `before`: jobs to wait for.
        """
        stage = self._memory.device_stages[soonest_free([stage.users for stage in self._memory.device_stages])]
        checkout, record = self._borrow(index, early), stage.record[: self._store.sizes[index]]
        source, target, size = checkout.source, checkout.target, record.numel()
        up = self._link.up.submit(
            lambda: record.copy_(source, non_blocking=True), (checkout.there,), num_bytes=size, free=stage.users.all()
        )
        link, new_weights, weights = self._link, None, self.weights[index]
        if early:
            assert stage.weights is not None
            new_weights = stage.weights[: self._buckets[index].numel]
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
        stage.users.add(gone, self._buckets[index].numel)
        there = self._watch(self._store.put(checkout, gone))
        return Early(there if early else updated, up if checkout.stage is None else checkout.there)

    def on_host(self, index: int, job: UpdateJob, before: Sequence[Completion], left: Completion | None) -> Completion:
        """Update a bucket on the host, and copy its weights back to the device.

        `before`: jobs to wait for. `left`: the copy of its gradient to the host, if it was started.
        """
        numel = self._buckets[index].numel
        stage = self._memory.host_stages[soonest_free([stage.users for stage in self._memory.host_stages])]
        free = stage.users.all()
        area, weights = self._memory.grad_areas[index], stage.weights[:numel]
        grads = stage.grads[:numel] if area is None else area
        if left is None:
            left = self._gather(index, grads, self._grads[index], before, free if area is None else [])
            free = [] if area is None else free  # the copy has waited for these
        after = (*before[1:], left)  # the copy has waited for before[0], so the host must not wait for it again
        if not self._layout.has_master:
            after = (*after, self._gather(index, weights, self.weights[index], (*before, left), free))
            free = []
        updated, _ = self._host_update(index, job, after, grads, weights, free, early=False)
        back = self._scatter(index, weights, (updated, before[0]))
        stage.users.add(back, numel)
        return back

    def on_records(self, index: int, job: UpdateJob, before: Sequence[Completion], early: bool = False) -> Early:
        """Update a bucket of offloaded experts on the host, where its weights, gradient and state are read and written.

        `early`: write weights and state to the bucket's second records (shadows) instead. `before`: jobs to wait for.
        """
        experts, expert_bucket = self._experts, self._buckets[index].expert_bucket
        assert experts is not None and expert_bucket is not None
        checkout = self._borrow(index, early)
        first = (checkout.there,) if early else ()  # all other jobs wait for this one, which cancels them all
        checkouts = weights, grads = experts.borrow(*expert_bucket, early, first)
        work = self._host_work(
            index,
            job,
            [checkout] if self._layout.has_master else [checkout, weights],
            grads.target.view(torch.float32),
            weights.target.view(experts.dtype),
        )
        num_bytes = 2 * checkout.target.numel() + grads.target.numel() + 2 * weights.target.numel()
        there = (checkout.there, weights.there, grads.there)
        after = (*before, *there, *checkout.change_after, *weights.change_after)
        free = (*experts.readers(*expert_bucket, early), *weights.free)
        updated = self._link.host.submit(work, after, num_bytes=num_bytes, free=free)
        back = self._watch(experts.give_back(*expert_bucket, checkouts, updated))  # first: passes wait for it
        self._watch(self._store.put(checkout, updated))
        return Early(back, updated if checkout.stage is None else checkout.there)

    # -- during the backward pass ------------------------------------------------------------------------------------

    def unscale(
        self, index: int, final: Sequence[Completion], found_inf: torch.Tensor, inverse_scale: torch.Tensor
    ) -> Completion:
        """Divide a bucket's gradient by the fp16 loss scale in place, and set `found_inf` if it overflowed."""
        work = partial(torch._amp_foreach_non_finite_check_and_unscale_, self._grads[index], found_inf, inverse_scale)
        return self._watch(self._link.update.submit(work, final))

    def leave(self, index: int, final: Sequence[Completion]) -> Completion:
        """Copy a bucket's final gradient to its own memory on the host. Returns the completion of the copy."""
        area = self._memory.grad_areas[index]
        assert area is not None
        return self._gather(index, area, self._grads[index], final)

    def on_host_early(self, index: int, job: UpdateJob, left: Completion) -> Early:
        """Update a bucket on the host during the backward pass, with the result in its second record (shadow).

        `left`: the copy of its gradient to the host, which the update waits for.
        """
        grads, weights = self._memory.grad_areas[index], self._memory.weight_areas[index]
        assert grads is not None and weights is not None
        before: tuple[Completion, ...] = (left,)
        if not self._layout.has_master:
            before = (self._gather(index, weights, self.weights[index], before),)
        return Early(*self._host_update(index, job, before, grads, weights, [], early=True))

    def commit(self, index: int, early: Completion, gradients: Completion) -> Completion:
        """Make the second record (shadow) of an early update the bucket's state, and copy its weights to the model.

        `early`: the update; `gradients`: the device's work on gradients. The copy waits for both. Returns its end.
        """
        weights, expert_bucket = self._memory.weight_areas[index], self._buckets[index].expert_bucket
        self._store.swap(index, len(self._buckets) + index)
        if expert_bucket is not None:
            assert self._experts is not None
            self._experts.commit(*expert_bucket)
            return early
        assert weights is not None
        return self._scatter(index, weights, (early, gradients))

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
        """Submit the update of a bucket on the host, and return the completions of the update and of its first job.

        `before`: jobs to wait for. `free`: earlier jobs that use the buffers `grads` and `weights`. `early`: the state
        is written to its second record, and the update is complete when it is stored there.
        """
        checkout = self._borrow(index, early)
        work = self._host_work(index, job, [checkout], grads, weights)
        num_bytes = 2 * checkout.target.numel() + grads.nbytes + weights.nbytes  # that the host reads and writes
        after = (*before, checkout.there, *checkout.change_after)
        updated = self._link.host.submit(work, after, num_bytes=num_bytes, free=free)
        there = self._watch(self._store.put(checkout, updated))
        return there if early else updated, updated if checkout.stage is None else checkout.there

    def _host_work(
        self, index: int, job: UpdateJob, changed: Sequence[Checkout], grads: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], None]:
        """Return a job that updates a bucket on the host.

        `changed`: the records that it changes, opened for change: the bucket's state first.
        """
        has_master, new, split_grads = self._layout.has_master, self._split(index, weights), self._split(index, grads)
        state = self._state(index, changed[0].target, None if has_master else new)
        step, scratch = self._host_step, self._host_scratch

        def work() -> None:
            step.fill_(job.step)
            for each in changed:
                if each.source is not each.target:
                    each.target.copy_(each.source)
            if job.coefficient < 1:
                grads.mul_(job.coefficient)
            adamw(state, split_grads, step, job.rates, scratch)
            if has_master:
                for weight, master in zip(new, state.masters, strict=True):
                    weight.copy_(master)

        return work

    def _borrow(self, index: int, early: bool) -> Checkout:
        return self._store.fetch(index, len(self._buckets) + index if early else None)

    def _gather(
        self,
        index: int,
        flat: torch.Tensor,
        sources: list[torch.Tensor],
        before: Sequence[Completion],
        free: Sequence[Completion] = (),
    ) -> Completion:
        """Copy a bucket's tensors `sources` from the device into one flat host tensor.

        `before`: jobs to wait for. `free`: earlier uses of the host tensor to wait for.
        """
        work = partial(_copy_all, self._split(index, flat), sources)
        return self._watch(self._link.down.submit(work, before, num_bytes=flat.nbytes, free=free))

    def _scatter(self, index: int, flat: torch.Tensor, before: Sequence[Completion]) -> Completion:
        """Copy a bucket's new weights from a flat host tensor to the model, after the jobs `before`."""
        work = partial(_copy_all, self.weights[index], self._split(index, flat))
        return self._watch(self._link.up.submit(work, before, num_bytes=flat.nbytes))

    def _state(self, index: int, record: torch.Tensor, masters: list[torch.Tensor] | None = None) -> State:
        """Return the masters and moments of a bucket, as views of its record where it has them.

        Masters are `masters` if given, else those of the record, else the model's weights.
        """
        key = (index, record.data_ptr())
        if key not in self._states:
            kinds = self._layout.split(record, self._buckets[index].numel)
            split = {kind: self._split(index, flat) for kind, flat in kinds.items()}
            self._states[key] = State(split.get("master", self.weights[index]), split["exp_avg"], split["exp_avg_sq"])
        state = self._states[key]
        return state if masters is None else State(masters, state.exp_avgs, state.exp_avg_sqs)

    def _split(self, index: int, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[span.offset : span.offset + span.end - span.start] for span in self._buckets[index].slice_spans]

    def _watch(self, done: Completion) -> Completion:
        self._watched.append(done)
        return done


def _views(bucket: Bucket, flats: dict[int, torch.Tensor], slices: Sequence[OwnedSlice]) -> list[torch.Tensor]:
    """Return a bucket's ranges as views of the flat tensors of its parameter slices; [] for offloaded experts."""
    if bucket.expert_bucket is not None:
        return []
    return [
        flats[span.index][span.start - slices[span.index].start : span.end - slices[span.index].start]
        for span in bucket.slice_spans
    ]


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
