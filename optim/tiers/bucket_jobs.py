"""How a bucket is updated: the jobs of each way, with what each waits for. No call here blocks.

In place, where the state is on the device; `device_stream`, the record comes to the device, is updated there and goes
back (arXiv 2609.14306, section 3.4); `host`, the gradient leaves, the host updates, the weights return. Early ways
write the new state to the bucket's shadow and the new weights to host memory, while the backward pass goes on; whether
that is what the step comes to is known after it.

On a CPU device and host are the same memory. What is said here of copies is done all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memory.completion import Cancelled, Completion, soonest_free
from memory.host_link import HostLink
from memory.store import Checkout, Store
from optim.arrangement.buckets import Bucket
from optim.tiers.buckets import RecordLayout
from optim.tiers.expert_tier import ExpertTier
from optim.tiers.kernel import SCRATCH, State, UpdateScalars, adamw
from optim.tiers.memory import TierMemory
from parallel.megatron.tiered import OwnedSlice


@dataclass(frozen=True)
class UpdateJob:
    """What an update needs to know of its step, as it was when the job was made."""

    step: int  # from 1
    rates: Sequence[UpdateScalars]  # of the bucket's pieces
    coefficient: float = 1.0  # that the gradients are clipped with; 1: they are not


@dataclass(frozen=True)
class Early:
    """An update of which nobody knows yet whether the step takes it."""

    done: Completion
    first: Completion  # of its work; where that has not begun the update can be cancelled

    def cancel(self) -> bool:
        """Whether nothing of it will be done."""
        return self.first.cancel()


class BucketJobs:
    """The jobs of one rank's buckets."""

    def __init__(
        self,
        slices: Sequence[OwnedSlice],
        buckets: Sequence[Bucket],
        layout: RecordLayout,
        memory: TierMemory,
        experts: ExpertTier | None = None,
    ):
        """experts: where weights and gradients of buckets off the device are."""
        self.buckets, self._layout, self._memory, self._experts = buckets, layout, memory, experts
        self._link: HostLink = memory.link
        self._store: Store = memory.store
        weights, grads = ({i: getattr(slices[i], what) for i in _here(buckets)} for what in ("weights", "grads"))
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
        """What a job raised, in one line; None where all is well so far. Once there is one it stays."""
        failed = [
            done
            for done in self._watched
            if done.is_issued and done.error is not None and not isinstance(done.error, Cancelled)
        ]
        self._watched = failed or [done for done in self._watched if not done.is_issued]
        return None if not failed else " ".join(str(failed[0].error).split()) or type(failed[0].error).__name__

    # -----------------------------------------------------------------------------------------------------------------
    # Once the step's gradients are final, and their norm is known. Each returns when the bucket's weights are back.
    # -----------------------------------------------------------------------------------------------------------------

    def in_place(self, index: int, job: UpdateJob, gradients: Completion) -> Completion:
        """The record stays on the device."""
        resident = self._memory.resident[index]
        assert resident is not None
        work = self._device_update(index, job, self._state(index, resident), self.weights[index])
        return self._watch(self._link.update.submit(work, (gradients, *self._memory.held(index))))

    def stream(self, index: int, job: UpdateJob, before: Sequence[Completion]) -> Completion:
        """The record comes to the device and goes back."""
        return self._streamed(index, job, before, self.weights[index], early=False)[0]

    def on_host(self, index: int, job: UpdateJob, before: Sequence[Completion], left: Completion | None) -> Completion:
        """The gradient leaves, unless it has (`left`), and the weights come back. The first of `before` is what the
        step's gradients are final with."""
        numel = self.buckets[index].numel
        stage = self._memory.stages[soonest_free([stage.users for stage in self._memory.stages])]
        free = stage.users.all()
        area, weights = self._memory.grad_areas[index], stage.weights[:numel]
        grads = stage.grads[:numel] if area is None else area
        if left is None:
            left = self._gather(index, grads, self._grads[index], before, free if area is None else [])
            free = [] if area is None else free  # that copy has waited for it
        # Without the gradients, where they have left: the host's thread would wait for the device once more.
        after = (*before[1:], left)
        if not self._layout.has_master:
            after = (*after, self._gather(index, weights, self.weights[index], (*before, left), free))
            free = []
        updated, _ = self._host_update(index, job, after, grads, weights, free, early=False)
        back = self._scatter(index, weights, (updated, before[0]))
        stage.users.add(back, numel)
        return back

    def on_records(self, index: int, job: UpdateJob, before: Sequence[Completion]) -> Completion:
        """Weights, gradient and state lie off the device: the host updates them there."""
        return self._on_records(index, job, before, early=False).done

    def _on_records(self, index: int, job: UpdateJob, before: Sequence[Completion], early: bool) -> Early:
        experts, of_experts = self._experts, self.buckets[index].of_experts
        assert experts is not None and of_experts is not None
        checkout, has_master = self._borrow(index, early), self._layout.has_master
        first = (checkout.there,) if early else ()  # all else waits for it, so that it cancels all
        checkouts = weights, grads = experts.borrow(*of_experts, early, first)
        new = self._pieces(index, weights.target.view(experts.dtype))
        pieces, state = self._pieces(index, grads.target.view(torch.float32)), None
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
            adamw(state, pieces, step, job.rates, self._host_scratch)
            if has_master:
                for weight, master in zip(new, state.masters, strict=True):
                    weight.copy_(master)

        num_bytes = 2 * checkout.target.numel() + grads.target.numel() + 2 * weights.target.numel()
        there = (checkout.there, weights.there, grads.there)
        after = (*before, *there, *checkout.change_after, *weights.change_after)
        free = (*experts.readers(*of_experts, early), *weights.free)
        updated = self._link.host.submit(work, after, num_bytes=num_bytes, free=free)
        back = self._watch(experts.give_back(*of_experts, checkouts, updated))  # first: the next passes wait for them
        self._watch(self._store.put(checkout, updated))
        return Early(back, updated if checkout.slot is None else checkout.there)

    # -----------------------------------------------------------------------------------------------------------------
    # While the backward pass goes on
    # -----------------------------------------------------------------------------------------------------------------

    def unscale(
        self, index: int, final: Sequence[Completion], found_inf: torch.Tensor, inverse_scale: torch.Tensor
    ) -> Completion:
        """Take the fp16 loss scale out of the gradient, in place; `found_inf` counts what overflowed."""
        grads = self._grads[index]
        return self._watch(
            self._link.update.submit(
                lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale), final
            )
        )

    def leave(self, index: int, final: Sequence[Completion]) -> Completion:
        """The gradient, which is final, goes to its area on the host."""
        area = self._memory.grad_areas[index]
        assert area is not None
        return self._gather(index, area, self._grads[index], final)

    def stream_early(self, index: int, job: UpdateJob, final: Sequence[Completion]) -> Early:
        """Update like `stream`, but to the shadow."""
        return Early(*self._streamed(index, job, final, None, early=True))

    def on_host_early(self, index: int, job: UpdateJob, left: Completion) -> Early:
        """Update like `on_host`, but of a gradient that has left, and to the shadow."""
        grads, weights = self._memory.grad_areas[index], self._memory.weight_areas[index]
        assert grads is not None and weights is not None
        before: tuple[Completion, ...] = (left,)
        if not self._layout.has_master:
            before = (self._gather(index, weights, self.weights[index], before),)
        return Early(*self._host_update(index, job, before, grads, weights, [], early=True))

    def on_records_early(self, index: int, job: UpdateJob) -> Early:
        """Update like `on_records`, but to the shadows."""
        return self._on_records(index, job, (), early=True)

    def commit(self, index: int, early: Completion, gradients: Completion) -> Completion:
        """The shadow is the state from now on, and its weights are the model's once the result is over."""
        weights, of_experts = self._memory.weight_areas[index], self.buckets[index].of_experts
        self._store.swap(index, len(self.buckets) + index)
        if of_experts is not None:
            assert self._experts is not None
            self._experts.commit(*of_experts)
            return early
        assert weights is not None
        return self._scatter(index, weights, (early, gradients))

    # -----------------------------------------------------------------------------------------------------------------
    # Jobs. An update's parts return when it is over, and which work of it comes first.
    # -----------------------------------------------------------------------------------------------------------------

    def _streamed(
        self, index: int, job: UpdateJob, before: Sequence[Completion], weights: list[torch.Tensor] | None, early: bool
    ) -> tuple[Completion, Completion]:
        slot = self._memory.device_slots[soonest_free([slot.users for slot in self._memory.device_slots])]
        checkout, record = self._borrow(index, early), slot.record[: self._store.sizes[index]]
        source, target, size = checkout.source, checkout.target, record.numel()
        up = self._link.up.submit(
            lambda: _copy(record, source), (checkout.there,), num_bytes=size, free=slot.users.all()
        )
        link, new_weights = self._link, None
        if early:
            assert slot.weights is not None
            new_weights = slot.weights[: self.buckets[index].numel]
            weights = self._pieces(index, new_weights)
        assert weights is not None
        state = self._state(index, record, None if self._layout.has_master else weights)
        work = self._device_update(index, job, state, weights, copy_first=early and not self._layout.has_master)
        updated = self._watch(link.update.submit(work, (up, *before)))
        area = self._memory.weight_areas[index] if early else None

        def back() -> None:
            _copy(target, record)
            if area is not None and new_weights is not None:
                _copy(area, new_weights)

        num_bytes = size + (0 if area is None else area.nbytes)
        gone = link.down.submit(back, (updated, *checkout.change_after), num_bytes=num_bytes)
        slot.users.add(gone, self.buckets[index].numel)
        there = self._watch(self._store.put(checkout, gone))
        return there if early else updated, up if checkout.slot is None else checkout.there

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
        checkout, has_master = self._borrow(index, early), self._layout.has_master
        new, pieces = self._pieces(index, weights), self._pieces(index, grads)
        state = self._state(index, checkout.target, None if has_master else new)
        source, target = checkout.source, checkout.target
        step, scratch = self._host_step, self._host_scratch

        def work() -> None:
            step.fill_(job.step)
            if source is not target:
                target.copy_(source)
            if job.coefficient < 1:
                grads.mul_(job.coefficient)
            adamw(state, pieces, step, job.rates, scratch)
            if has_master:
                for weight, master in zip(new, state.masters, strict=True):
                    weight.copy_(master)

        num_bytes = 2 * target.numel() + grads.nbytes + weights.nbytes  # that the host reads and writes
        after = (*before, checkout.there, *checkout.change_after)
        updated = self._link.host.submit(work, after, num_bytes=num_bytes, free=free)
        there = self._watch(self._store.put(checkout, updated))
        return there if early else updated, updated if checkout.slot is None else checkout.there

    def _borrow(self, index: int, early: bool) -> Checkout:
        return self._store.fetch(index, len(self.buckets) + index if early else None)

    def _gather(
        self,
        index: int,
        flat: torch.Tensor,
        pieces: list[torch.Tensor],
        before: Sequence[Completion],
        free: Sequence[Completion] = (),
    ) -> Completion:
        """Pieces of the device go to a flat tensor of the host."""
        targets = self._pieces(index, flat)

        def work() -> None:
            for target, source in zip(targets, pieces, strict=True):
                _copy(target, source)

        return self._watch(self._link.down.submit(work, before, num_bytes=flat.nbytes, free=free))

    def _scatter(self, index: int, flat: torch.Tensor, before: Sequence[Completion]) -> Completion:
        """New weights of the host go to the model."""
        sources, targets = self._pieces(index, flat), self.weights[index]

        def work() -> None:
            for target, source in zip(targets, sources, strict=True):
                _copy(target, source)

        return self._watch(self._link.up.submit(work, before, num_bytes=flat.nbytes))

    def _state(self, index: int, record: torch.Tensor, masters: list[torch.Tensor] | None = None) -> State:
        """The pieces of a bucket's record that lies there. What is its own master is the model's weights, or given."""
        key = (index, record.data_ptr())
        if key not in self._states:
            kinds = self._layout.split(record, self.buckets[index].numel)
            pieces = {kind: self._pieces(index, flat) for kind, flat in kinds.items()}
            self._states[key] = State(
                pieces.get("master", self.weights[index]), pieces["exp_avg"], pieces["exp_avg_sq"]
            )
        state = self._states[key]
        return state if masters is None else State(masters, state.exp_avgs, state.exp_avg_sqs)

    def _pieces(self, index: int, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[piece.offset : piece.offset + piece.end - piece.start] for piece in self.buckets[index].pieces]

    def _watch(self, done: Completion) -> Completion:
        self._watched.append(done)
        return done


def _here(buckets: Sequence[Bucket]) -> list[int]:
    """The slices whose weights and gradients are on the device."""
    return sorted({piece.index for bucket in buckets if bucket.of_experts is None for piece in bucket.pieces})


def _views(bucket: Bucket, flats: dict[int, torch.Tensor], slices: Sequence[OwnedSlice]) -> list[torch.Tensor]:
    """The bucket's pieces of tensors that hold a slice each; none of what lies off the device."""
    if bucket.of_experts is not None:
        return []
    return [
        flats[piece.index][piece.start - slices[piece.index].start : piece.end - slices[piece.index].start]
        for piece in bucket.pieces
    ]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
