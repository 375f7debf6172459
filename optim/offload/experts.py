"""Weights and gradients of offloaded experts: records on the host or the disk, and the copies to and from the device.

The experts of a layer are one flat range (optim/arrangement/experts.py). Ranks with the same experts may each store a
shard of it: then a fetch copies that shard to the device and all-gathers the others (SE-MoE, arXiv 2205.10034, section
3.2), and a gradient is reduce-scattered before it is copied out. OffloadedOptimizer has the shard's optimizer state.
Only the thread that computes makes calls, and no call waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist

from memory.budgets import DISK, HOST
from memory.completion import Cancelled, Completion, Users, soonest_free
from memory.copy_stream import LAYERS
from memory.disk import Disk, offsets
from memory.host_link import HostLink
from memory.store import Checkout, Snapshot, Store
from memory.transfer import to_device
from optim.arrangement.experts import PASS_STAGES, UPDATE_STAGES, ExpertRecords
from parallel.norms import squares_into
from parallel.owned import at_hand

NUM_GRAD_STAGES = 2  # one buffer is filled while the host reads the other
PURPOSE = "experts off the device"  # in the budgets
# Gradients that replicas have sent to the primary: (number of the expert on this rank, fp32 gradient of its matrices).
Arrived = Sequence[tuple[int, torch.Tensor]]


@dataclass
class GradStage:
    """Host buffers for gradients of a layer's offloaded experts.

    `flat`: the layer's gradient of one micro-batch, in the weights' dtype. `record`: a gradient that a replica of an
    expert sent, in fp32.
    """

    flat: torch.Tensor
    record: torch.Tensor
    users: Users = field(default_factory=Users)


class GradStages:
    """Reused host buffers for the gradients of experts from single micro-batches, before the host adds them up."""

    def __init__(self, link: HostLink, numel: int, arrived_numel: int, dtype: torch.dtype):
        """Allocate the host buffers for gradients.

        numel: elements of a layer's gradient. arrived_numel: elements of a gradient that a replica sends, or 0.
        """
        self._link = link
        self.num_bytes = 0  # copied out since the start
        size, arrived_size = numel * dtype.itemsize, arrived_numel * torch.float32.itemsize
        self._stages = [
            GradStage(link.allocate(size).zero_().view(dtype), link.allocate(arrived_size).view(torch.float32))
            for _ in range(NUM_GRAD_STAGES)
        ]

    def next(self) -> GradStage:
        """Return the host buffers that are expected to be free first."""
        return self._stages[soonest_free([each.users for each in self._stages])]

    def copy_out(self, stage: GradStage, memory: torch.Tensor, grad: torch.Tensor) -> Completion:
        """Copy a flat gradient from the device to the memory of a host buffer. Returns the completion of the copy."""
        on_gpu = self._link.device.type == "cuda"

        def work() -> None:
            memory.copy_(grad, non_blocking=True)
            if on_gpu:
                grad.record_stream(torch.cuda.current_stream())  # its memory is not reused before the copy is done

        so_far = Completion.so_far(self._link.device)
        self.num_bytes += grad.nbytes
        return self._link.down.submit(work, (so_far,), grad.nbytes, free=stage.users.all(), priority=LAYERS)


class OffloadedExperts:
    """Weights and gradients of one rank's offloaded experts, with copies to and from the device, by layer from 0."""

    def __init__(
        self,
        records: ExpertRecords,
        layers: Sequence[Sequence[torch.nn.Parameter]],
        link: HostLink,
        disk: Disk | None,
        group: dist.ProcessGroup | None,
    ):
        """Allocate the memory of this rank's offloaded experts on the host or disk, filled with zeros.

        layers: placeholders of each layer's weights, [experts, ...] for each kind. group: the ranks with the same
        experts, for collectives of this class only; None if no other rank has these experts.
        """
        self.records, self.layers, self.link, self.disk = records, layers, link, disk
        self.kind_offsets, self.sums_on_host = records.kind_offsets, records.sums_on_host
        self.dtype = layers[0][0].dtype
        self._group = group
        self.shard = 0 if group is None or records.num_shards == 1 else group.rank()
        self.buckets = records.buckets
        start = self.shard * records.shard_numel
        self.bounds = [(start + first, start + end) for first, end in self.buckets]  # in the flat range
        num_shards = records.sum_numel // records.shard_numel
        origin = 0 if num_shards > 1 else start
        # [first, end) of the gradients that this rank stores: those of all shards, or of its own shard.
        self._sums = [
            (origin + shard * records.shard_numel + first, origin + shard * records.shard_numel + end)
            for shard in range(num_shards)
            for first, end in self.buckets
        ]
        self._own_sums = self.shard * len(self.buckets) if num_shards > 1 else 0
        weights = [(end - first) * self.dtype.itemsize for first, end in self.buckets] * len(layers)
        grads = [(end - first) * torch.float32.itemsize for first, end in self._sums] * len(layers)
        self._num_weights, shadows = len(weights), weights if records.has_shadows else []
        on_host, sizes = disk is None, weights + grads + shadows
        self._first_shadow = len(weights + grads)
        memory = [link.allocate(size, in_blocks=True).zero_()[:size] if on_host else None for size in sizes]
        number = 0 if on_host else PASS_STAGES + UPDATE_STAGES
        stages = [link.allocate(records.largest_record, in_blocks=True) for _ in range(number)]
        self.store = Store(link, sizes, memory, stages, disk, offsets(sizes)[:-1], min(PASS_STAGES, number))
        self._when_final: Callable[[int], object] = lambda layer: None
        self.buffer = link.allocate(records.largest_record, in_blocks=True)
        numels = records.padded_numel, records.arrived_numel
        self._stages = GradStages(link, *numels, self.dtype) if self.sums_on_host else None
        self._read = [Users() for _ in sizes]  # the readers of each record
        self._collective = Completion.already()  # the last one; all ranks must run them in the same order
        self._squares: dict[tuple[int, ...], tuple[torch.Tensor, Completion]] = {}
        self._bytes_up = self._bytes_down = 0
        self._square_buffers: dict[int, torch.Tensor] = {}  # by layer
        self._watched: list[Completion] = []

    @property
    def moved(self) -> dict[str, int]:
        """Bytes of weights and gradients moved so far: to the device (up), from it (down), read and written on disk."""
        down = self._bytes_down + (0 if self._stages is None else self._stages.num_bytes)
        store = self.store
        return {"up": self._bytes_up, "down": down, "read": store.bytes_read, "written": store.bytes_written}

    # -- weights -----------------------------------------------------------------------------------------------------

    def bring(self, layer: int, weight_slot: torch.Tensor, free: Sequence[Completion]) -> list[Completion]:
        """Copy a layer's weights to a device buffer [padded_numel] once `free` is done. Returns the completions."""
        start = self.weight_index(layer, 0)
        ups = [self._copy_up(start + i, weight_slot[first:end], free) for i, (first, end) in enumerate(self.bounds)]
        if self.records.num_shards == 1:
            return ups
        own = weight_slot[self.bounds[0][0] : self.bounds[0][0] + self.records.shard_numel]
        return [self._collectively(lambda: dist.all_gather_into_tensor(weight_slot, own, group=self._group), ups)]

    def weight_index(self, layer: int, bucket: int) -> int:
        """Return the index of the stored record with a bucket's weights."""
        return layer * len(self.buckets) + bucket

    def grad_index(self, layer: int, bucket: int) -> int:
        """Return the index of the stored record with a bucket's gradient, which is complete after a step's passes."""
        return self._num_weights + layer * len(self._sums) + self._own_sums + bucket

    @contextmanager
    def filling(self, layer: int) -> Iterator[None]:
        """Within this context, a layer's parameters are ordinary host tensors; their last values become its weights."""
        flat, parameters = torch.zeros(self.records.padded_numel, dtype=self.dtype), self.layers[layer]
        spans = zip(self.kind_offsets, parameters, strict=True)
        with at_hand(parameters, [flat[start : start + each.numel()].view(each.shape) for start, each in spans]):
            yield
        for bucket, (first, end) in enumerate(self.bounds):
            self.put_weights(self.weight_index(layer, bucket), flat[first:end])

    def put_weights(self, index: int, weights: torch.Tensor) -> None:
        """Overwrite the stored weights of a bucket with flat weights on the host, and wait until they are stored."""
        checkout = self.store.overwrite(index)
        for done in (*checkout.change_after, *checkout.free):
            done.wait()
        checkout.there.wait()
        checkout.target.view(self.dtype)[: len(weights)].copy_(weights)
        self.store.put(checkout, Completion.already()).result()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the gradients of the last step, before the passes of a new step."""
        self._squares.clear()

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have the same experts and add to their gradients."""
        return self.records.data_parallel_size > 1

    def add(
        self, layer: int, grad_slot: torch.Tensor, arrived: Arrived, is_first: bool, is_last: bool
    ) -> list[Completion]:
        """Add a micro-batch's gradient of a layer to the sum on the host; the first micro-batch overwrites the sum.

        grad_slot: the gradient in a device buffer [padded_numel], in the weights' dtype. arrived: (expert, gradient) of
        replicas on other ranks. Returns completions after which the device buffer is free.
        """
        stages = self._stages
        assert stages is not None
        stage = stages.next()
        left = stages.copy_out(stage, stage.flat, grad_slot)
        whole = [(0, 0, self.records.padded_numel)]
        self._add(layer, (stage, stage.flat, left), whole, is_first, is_last and not arrived)
        numels = [parameter[0].numel() for parameter in self.layers[layer]]
        for number, (expert, record) in enumerate(arrived, start=1):
            stage = stages.next()
            left_too = stages.copy_out(stage, stage.record, record.reshape(-1))
            starts = accumulate(numels[:-1], initial=0)
            spans = [
                (at, start + expert * n, n) for at, start, n in zip(starts, self.kind_offsets, numels, strict=True)
            ]
            self._add(layer, (stage, stage.record, left_too), spans, False, is_last and number == len(arrived))
        if is_last:
            self._when_final(layer)
        return [left]

    def _add(
        self,
        layer: int,
        staged: tuple[GradStage, torch.Tensor, Completion],
        spans: Sequence[tuple[int, int, int]],
        is_first: bool,
        is_last: bool,
    ) -> None:
        """Add a gradient in host memory to a layer's sum.

        staged: (buffer, gradient in it, the copy to wait for). spans: (start in the gradient, start in the layer's flat
        gradient, elements).
        """
        stage, source, left = staged
        for number, (first, end) in enumerate(self._sums):
            addends = [
                (source[at + max(start, first) - start : at + min(start + numel, end) - start], max(start - first, 0))
                for at, start, numel in spans
                if start < end and first < start + numel
            ]
            if not addends and not is_last:
                continue
            index = self._num_weights + layer * len(self._sums) + number
            checkout = self.store.overwrite(index, LAYERS) if is_first else self.store.fetch(index, priority=LAYERS)
            target = checkout.target.view(torch.float32)
            views = self._views_by_kind(target[: end - first], first) if is_last else []
            squares = torch.zeros(len(views), dtype=torch.float64)
            done = self.link.host.submit(
                partial(_add_up, target, addends, is_first, views, squares),
                (left, checkout.there, *checkout.change_after),
                num_bytes=sum(addend.numel() for addend, _ in addends) * (4 + source.itemsize + 4 * (not is_first)),
                free=(*self._read[index].all(), *checkout.free),
            )
            if is_last:
                self._squares[layer, number] = squares, done
            self._watch(self.store.put(checkout, done))
            stage.users.add(done)

    def sum_to(self, layer: int, grad_slot: torch.Tensor, free: Sequence[Completion]) -> list[Completion]:
        """Copy a layer's gradient sum from the host to a device buffer, fp32 [padded_numel]. Returns completions."""
        start = self._num_weights + layer * len(self._sums)
        return [self._copy_up(start + i, grad_slot[first:end], free) for i, (first, end) in enumerate(self._sums)]

    def finish(self, layer: int, grad_slot: torch.Tensor) -> list[Completion]:
        """Reduce a layer's complete gradient in a device buffer over the ranks, and store it on the host or disk.

        Returns completions after which the buffer is free.
        """
        start = self.shard * self.records.shard_numel
        own = grad_slot[start : start + self.records.shard_numel]
        views = self._views_by_kind(own, start)
        if layer not in self._square_buffers:  # kept, so that no tensor reuses memory that a stream writes
            self._square_buffers[layer] = torch.zeros(len(views), dtype=torch.float64, device=self.link.device)
        squares = self._square_buffers[layer]
        ready = Completion.so_far(self.link.device)
        if self._group is None or self._group.size() == 1:
            squares_into(views, squares)
        else:

            def reduce() -> None:
                if self.records.num_shards > 1:
                    dist.reduce_scatter_tensor(own, grad_slot, group=self._group)
                else:
                    dist.all_reduce(grad_slot, group=self._group)
                squares_into(views, squares)

            ready = self._collectively(reduce, (ready,))
        self._squares[layer, 0] = squares, ready
        downs = []
        for bucket, (first, end) in enumerate(self.bounds):
            index = self.grad_index(layer, bucket)
            checkout = self.store.overwrite(index, LAYERS)
            target, source = checkout.target.view(torch.float32), grad_slot[first:end]
            work = lambda source=source, target=target: target.copy_(source, non_blocking=True)  # noqa: E731
            down = self.link.down.submit(
                work,
                (ready, checkout.there, *checkout.change_after),
                checkout.target.numel(),
                free=(*self._read[index].all(), *checkout.free),
                priority=LAYERS,
            )
            self._bytes_down += checkout.target.numel()
            self._watch(self.store.put(checkout, down))
            downs.append(down)
        self._when_final(layer)
        return downs

    def call_when_final(self, call: Callable[[int], None]) -> None:
        """Register a function to call with a layer's number once all jobs that complete its gradient are submitted."""
        self._when_final = call

    def squares(self) -> torch.Tensor:
        """Return the squared norms of this rank's gradients, fp64 [n] on its device.

        There is one per layer, kind of weight and, if the host sums gradients, bucket; none if another rank counts
        them.
        """
        found = [torch.zeros(0, dtype=torch.float64, device=self.link.device)]
        for _, (squares, done) in sorted(self._squares.items(), key=lambda item: item[0]):
            done.follow()
            found.append(to_device(squares, self.link.device))
        counts = self.records.num_shards > 1 or self._group is None or self._group.rank() == 0
        return torch.cat(found) if counts else found[0]

    # -- updates -----------------------------------------------------------------------------------------------------

    def borrow(self, layer: int, bucket: int, early: bool, after: Sequence[Completion]) -> tuple[Checkout, Checkout]:
        """Open the stored weights of a bucket for change, and its gradient for reading.

        Old weights are read only if they are their own masters. `early`: changed weights go to a second record
        (shadow). `after`: jobs to wait for before disk reads.
        """
        index = self.weight_index(layer, bucket)
        to = self._first_shadow + index if early else index
        if self.dtype == torch.float32 or (early and self.disk is None):
            weights = self.store.fetch(index, to, after=after)
        else:
            weights = self.store.overwrite(to)
        return weights, self.store.fetch(self.grad_index(layer, bucket), after=after)

    def readers(self, layer: int, bucket: int, early: bool) -> list[Completion]:
        """Return the reads of a bucket's weights that must end before an update overwrites them.

        `early`: the update overwrites the second record (shadow) instead.
        """
        return self._read[self.weight_index(layer, bucket) + early * self._first_shadow].all()

    def commit(self, layer: int, bucket: int) -> None:
        """Make the second record (shadow), to which an early update wrote, the weights of a bucket."""
        index = self.weight_index(layer, bucket)
        shadow = self._first_shadow + index
        self.store.swap(index, shadow)
        self._read[index], self._read[shadow] = self._read[shadow], self._read[index]

    def give_back(
        self, layer: int, bucket: int, checkouts: tuple[Checkout, Checkout], updated: Completion
    ) -> Completion:
        """Store the changed weights of a bucket and release its gradient, once `updated` is done.

        `checkouts`: both as opened for the update. Returns the completion of the write.
        """
        weights, grads = checkouts
        self._release(self.grad_index(layer, bucket), grads, updated)
        return self._watch(self.store.put(weights, updated))

    def snapshot(self, buckets: Sequence[tuple[int, int]]) -> Snapshot:
        """Return the weights of buckets (layer, bucket) for a save; they cannot change until the save releases them."""
        return self.store.snapshot([self.weight_index(*each) for each in buckets], self.buffer)

    def read_weights(self, layer: int, bucket: int) -> torch.Tensor:
        """Return a bucket's weights as a flat host tensor, valid until the next call. Waits for a write in flight."""
        index = self.weight_index(layer, bucket)
        checkout = self.store.fetch(index)
        checkout.there.result()
        self._release(index, checkout, Completion.already())
        return checkout.source.view(self.dtype)

    def problem(self) -> str | None:
        """Return the error of a failed copy or collective as one line, or None."""
        for done in self._watched:
            if done.is_issued and done.error is not None and not isinstance(done.error, Cancelled):
                return " ".join(str(done.error).split()) or type(done.error).__name__
        return None

    def close(self) -> None:
        """Release the reserved memory after the link was closed, and delete the scratch file."""
        if self.disk is not None and not self.link.is_running:
            self.disk.close()
        HOST.give(self.records.host_bytes, PURPOSE)
        DISK.give(self.records.disk_bytes, PURPOSE)

    def _copy_up(self, index: int, target: torch.Tensor, free: Sequence[Completion]) -> Completion:
        """Copy the stored weights or gradient of a bucket to a range of a device buffer. Returns the completion."""
        checkout = self.store.fetch(index, priority=LAYERS)
        source, size = checkout.source.view(target.dtype), checkout.source.numel()
        work = lambda: target.copy_(source, non_blocking=True)  # noqa: E731
        up = self.link.up.submit(work, (checkout.there,), size, free=free, priority=LAYERS)
        self._bytes_up += size
        self._release(index, checkout, up)
        return up

    def _collectively(self, call: Callable[[], object], after: Sequence[Completion]) -> Completion:
        self._collective = self._watch(
            self.link.gather.submit(call, (*after,), free=(self._collective,), priority=LAYERS)
        )
        return self._collective

    def _release(self, index: int, checkout: Checkout, read: Completion) -> None:
        self.store.release(checkout, read)
        self._read[index].add(read)

    def _views_by_kind(self, flat: torch.Tensor, start: int) -> list[torch.Tensor]:
        """Return views of `flat`, one per kind of weight. `start`: its first element in the layer's flat range."""
        views = []
        for first, numel in zip(self.kind_offsets, self.records.numels, strict=True):
            low, high = max(first, start), min(first + numel, start + flat.numel())
            if low < high:
                views.append(flat[low - start : high - start])
        return views

    def _watch(self, done: Completion) -> Completion:
        self._watched = [each for each in self._watched if not each.is_issued or each.error is not None]
        self._watched.append(done)
        return done


def _add_up(
    target: torch.Tensor,
    addends: Sequence[tuple[torch.Tensor, int]],
    overwrites: bool,
    views: Sequence[torch.Tensor],
    squares: torch.Tensor,
) -> None:
    """Add gradients to a flat host tensor, or overwrite it with them; then write the squared norms of `views`.

    `addends`: (gradient, its first element in `target`). `squares`: receives the norms.
    """
    for addend, start in addends:
        span = target[start : start + addend.numel()]
        span.copy_(addend) if overwrites else span.add_(addend)
    squares_into(views, squares)
