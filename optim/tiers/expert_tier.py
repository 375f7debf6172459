"""Weights and gradients of experts that lie off the device: records of the host or the disk, and their way to the
device and back.

A layer's experts are one flat range (optim/arrangement/off_device.py). Ranks that hold the same experts may keep a part
of it each: then a fetch brings that part and gathers the rest from the others, both at once (SE-MoE, arXiv 2205.10034,
section 3.2), and a gradient is added up and scattered before it leaves. The optimizer's state of a part is the tiers'.

All calls are those of the thread that computes, and none waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.distributed as dist

from memory.budgets import DISK, HOST
from memory.completion import Cancelled, Completion, Users
from memory.copy_stream import LAYERS
from memory.disk import Disk, offsets
from memory.host_link import HostLink
from memory.store import Checkout, Snapshot, Store
from memory.transfer import to_device
from optim.arrangement.off_device import PASS_SLOTS, UPDATE_SLOTS, ExpertRecords
from optim.tiers.grad_stages import GradStage, GradStages, adding
from parallel.norms import squares_into
from parallel.owned import at_hand

Arrived = Sequence[tuple[int, torch.Tensor]]  # an expert's number here, and a gradient of all its matrices in fp32


WHAT = "experts off the device"  # as the budgets call it


class ExpertTier:
    """The records of one rank. Layers are numbered on this rank, from 0."""

    def __init__(
        self,
        records: ExpertRecords,
        layers: Sequence[Sequence[torch.nn.Parameter]],
        link: HostLink,
        disk: Disk | None,
        group: dist.ProcessGroup | None,
    ):
        """layers: stand-ins of each layer's weights by kind, [experts, ...] each. group: the ranks that hold the same
        experts, for these collectives alone; None: this one."""
        self.records, self.layers, self.link, self.disk = records, layers, link, disk
        self.first, self.adds_on_host = records.first, records.sums_on_host
        self.dtype = layers[0][0].dtype
        self._group = group
        self.part = 0 if group is None or records.parts == 1 else group.rank()
        self.buckets = records.buckets
        start = self.part * records.part_numel
        self.bounds = [(start + first, start + end) for first, end in self.buckets]  # in the flat range
        sums = records.sum_numel // records.part_numel
        origin = 0 if sums > 1 else start
        # Of the gradients that this rank keeps: all parts', or its own.
        self._sums = [
            (origin + part * records.part_numel + first, origin + part * records.part_numel + end)
            for part in range(sums)
            for first, end in self.buckets
        ]
        self._own_sums = self.part * len(self.buckets) if sums > 1 else 0
        weights = [(end - first) * self.dtype.itemsize for first, end in self.buckets] * len(layers)
        grads = [(end - first) * torch.float32.itemsize for first, end in self._sums] * len(layers)
        self._num_weights, shadows = len(weights), weights if records.has_shadows else []
        on_host, sizes = disk is None, weights + grads + shadows
        self._first_shadow = len(weights + grads)
        memory = [link.allocate(size, in_blocks=True).zero_()[:size] if on_host else None for size in sizes]
        number = 0 if on_host else PASS_SLOTS + UPDATE_SLOTS
        slots = [link.allocate(records.largest_record, in_blocks=True) for _ in range(number)]
        ahead = min(PASS_SLOTS, number)
        self.store = Store(link, sizes, memory, slots, disk, offsets(sizes)[:-1], ahead)
        self.when_final: Callable[[int], None] | None = None  # called with a layer whose gradient is complete
        self.buffer = link.allocate(records.largest_record, in_blocks=True)
        numels = records.padded_numel, records.arrived_numel
        self._stages = GradStages(link, *numels, self.dtype) if self.adds_on_host else None
        self._read = [Users() for _ in sizes]  # who reads a record
        self._collective = Completion.already()  # the last one: all ranks have them in the same order
        self._squares: dict[tuple[int, ...], tuple[torch.Tensor, Completion]] = {}
        self._bytes_up = self._bytes_down = 0
        self._rooms: dict[int, torch.Tensor] = {}  # squares of each layer
        self._watched: list[Completion] = []

    @property
    def moved(self) -> dict[str, int]:
        """Bytes of weights and gradients since the start: to the device, from it, read and written of the disk."""
        down = self._bytes_down + (0 if self._stages is None else self._stages.num_bytes)
        store = self.store
        return {"up": self._bytes_up, "down": down, "read": store.bytes_read, "written": store.bytes_written}

    # -- weights -----------------------------------------------------------------------------------------------------

    def bring(self, layer: int, slot: torch.Tensor, free: Sequence[Completion]) -> list[Completion]:
        """Have a layer's weights come to a slot of the device, [padded_numel], once it is free."""
        ups = []
        for bucket, (first, end) in enumerate(self.bounds):
            checkout = self.store.fetch(self.weight_index(layer, bucket), priority=LAYERS)
            source, target = checkout.source.view(self.dtype), slot[first:end]
            ups.append(
                self.link.up.submit(
                    lambda source=source, target=target: target.copy_(source, non_blocking=True),  # type: ignore[misc]
                    (checkout.there,),
                    num_bytes=checkout.source.numel(),
                    free=free,
                    priority=LAYERS,
                )
            )
            self._bytes_up += checkout.source.numel()
            self._release(self.weight_index(layer, bucket), checkout, ups[-1])
        if self.records.parts == 1:
            return ups
        own = slot[self.bounds[0][0] : self.bounds[0][0] + self.records.part_numel]
        return [self._collectively(lambda: dist.all_gather_into_tensor(slot, own, group=self._group), ups)]

    def weight_index(self, layer: int, bucket: int) -> int:
        """The record of a bucket's weights."""
        return layer * len(self.buckets) + bucket

    def grad_index(self, layer: int, bucket: int) -> int:
        """The record of its gradient, when the step's passes are over."""
        return self._num_weights + layer * len(self._sums) + self._own_sums + bucket

    @contextmanager
    def filling(self, layer: int) -> Iterator[None]:
        """Inside, a layer's parameters lie in the host's memory; what they hold at the end are its weights."""
        flat, parameters = torch.zeros(self.records.padded_numel, dtype=self.dtype), self.layers[layer]
        spans = zip(self.first, parameters, strict=True)
        with at_hand(parameters, [flat[start : start + each.numel()].view(each.shape) for start, each in spans]):
            yield
        for bucket, (first, end) in enumerate(self.bounds):
            self.put_weights(self.weight_index(layer, bucket), flat[first:end])

    def put_weights(self, index: int, weights: torch.Tensor) -> None:
        """Make a flat tensor of the host what a record holds. Returns when it is."""
        checkout = self.store.overwrite(index)
        for done in (*checkout.change_after, *checkout.free):
            done.wait()
        checkout.there.wait()
        checkout.target.view(self.dtype)[: len(weights)].copy_(weights)
        written = self.store.put(checkout, Completion.already())
        written.wait()
        if written.error is not None:
            raise written.error

    # -- gradients ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Gradients of a step begin to be computed."""
        self._squares.clear()

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hold the same experts, and add to their gradients."""
        return self.records.alike > 1

    def add(self, layer: int, slot: torch.Tensor, arrived: Arrived, is_first: bool, is_last: bool) -> list[Completion]:
        """Add a micro-batch's gradient to the sum on the host: of a slot, [padded_numel] in the weights' dtype, and of
        copies of its experts. The first is written over what is there. When the slot is free again."""
        stages = self._stages
        assert stages is not None
        stage = stages.next()
        left = stages.leave(stage, stage.flat, slot)
        whole = [(0, 0, self.records.padded_numel)]
        self._add(layer, (stage, stage.flat, left), whole, is_first, is_last and not arrived)
        numels = [parameter[0].numel() for parameter in self.layers[layer]]
        for number, (expert, record) in enumerate(arrived, start=1):
            stage = stages.next()
            come = stages.leave(stage, stage.record, record.reshape(-1))
            begins = accumulate(numels[:-1], initial=0)
            spans = [(at, start + expert * n, n) for at, start, n in zip(begins, self.first, numels, strict=True)]
            self._add(layer, (stage, stage.record, come), spans, False, is_last and number == len(arrived))
        if is_last:
            self._final(layer)
        return [left]

    def _final(self, layer: int) -> None:
        if self.when_final is not None:
            self.when_final(layer)

    def _add(
        self,
        layer: int,
        come: tuple[GradStage, torch.Tensor, Completion],
        spans: Sequence[tuple[int, int, int]],
        is_first: bool,
        is_last: bool,
    ) -> None:
        """Add what has come to a stage to the sum; spans: (where it begins there, and in the flat range, how many)."""
        stage, source, left = come
        for number, (first, end) in enumerate(self._sums):
            parts = [
                (source[at + max(start, first) - start : at + min(start + numel, end) - start], max(start - first, 0))
                for at, start, numel in spans
                if start < end and first < start + numel
            ]
            if not parts and not is_last:
                continue
            index = self._num_weights + layer * len(self._sums) + number
            checkout = self.store.overwrite(index, LAYERS) if is_first else self.store.fetch(index, priority=LAYERS)
            work = adding(checkout.target.view(torch.float32), parts, is_first)
            done = self.link.host.submit(
                self._and_squares(work, checkout, layer, number, (first, end)) if is_last else work,
                (left, checkout.there, *checkout.change_after),
                num_bytes=sum(part.numel() for part, _ in parts) * (4 + source.itemsize + 4 * (not is_first)),
                free=(*self._read[index].all(), *checkout.free),
            )
            if is_last:
                self._squares[layer, number] = self._squares[layer, number][0], done
            self._watch(self.store.put(checkout, done))
            stage.users.add(done)

    def sum_to(self, layer: int, slot: torch.Tensor, free: Sequence[Completion]) -> list[Completion]:
        """Have the sum on the host come to a slot for gradients, fp32 [padded_numel]."""
        ups = []
        for number, (first, end) in enumerate(self._sums):
            index = self._num_weights + layer * len(self._sums) + number
            checkout = self.store.fetch(index, priority=LAYERS)
            source, target = checkout.source.view(torch.float32), slot[first:end]
            work = lambda source=source, target=target: target.copy_(source, non_blocking=True)  # noqa: E731
            up = self.link.up.submit(work, (checkout.there,), checkout.source.numel(), free=free, priority=LAYERS)
            self._bytes_up += checkout.source.numel()
            self._release(index, checkout, up)
            ups.append(up)
        return ups

    def finish(self, layer: int, slot: torch.Tensor) -> list[Completion]:
        """A layer's gradient of this rank is complete in a slot: it is added up over the ranks that hold the same
        experts, and leaves. When the slot is free again."""
        start = self.part * self.records.part_numel
        own = slot[start : start + self.records.part_numel]
        views = self._pieces(own, start)
        squares = self._squares_room(layer, len(views))
        ready = Completion.so_far(self.link.device)
        if self._group is None or self._group.size() == 1:
            squares_into(views, squares)
            self._squares[layer, 0] = squares, ready
        else:

            def reduce() -> None:
                if self.records.parts > 1:
                    dist.reduce_scatter_tensor(own, slot, group=self._group)
                else:
                    dist.all_reduce(slot, group=self._group)
                squares_into(views, squares)

            ready = self._collectively(reduce, (ready,))
            self._squares[layer, 0] = squares, ready
        downs = []
        for bucket, (first, end) in enumerate(self.bounds):
            index = self.grad_index(layer, bucket)
            checkout = self.store.overwrite(index, LAYERS)
            target, source = checkout.target.view(torch.float32), slot[first:end]
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
        self._final(layer)
        return downs

    def squares(self) -> torch.Tensor:
        """Squares of the norms of pieces of this rank's gradients, fp64 on its device; none where another rank stands
        for them."""
        found = [torch.zeros(0, dtype=torch.float64, device=self.link.device)]
        for _, (squares, done) in sorted(self._squares.items(), key=lambda item: item[0]):
            done.order()
            if done.error is not None:
                raise done.error
            found.append(to_device(squares, self.link.device))
        counts = self.records.parts > 1 or self._group is None or self._group.rank() == 0
        return torch.cat(found) if counts else found[0]

    # -- updates -----------------------------------------------------------------------------------------------------

    def borrow(self, layer: int, bucket: int, early: bool, after: Sequence[Completion]) -> tuple[Checkout, Checkout]:
        """The records of a bucket's weights, to be changed, and its gradient. Weights are read where they are their own
        masters. early: changed ones go to the shadow. `after`: what reads of the disk wait for."""
        index = self.weight_index(layer, bucket)
        to = self._first_shadow + index if early else index
        if self.dtype == torch.float32 or (early and self.disk is None):
            weights = self.store.fetch(index, to, after=after)
        else:
            weights = self.store.overwrite(to)
        return weights, self.store.fetch(self.grad_index(layer, bucket), after=after)

    def readers(self, layer: int, bucket: int, early: bool) -> list[Completion]:
        """Who reads the weights that an update changes, or their shadow."""
        return self._read[self.weight_index(layer, bucket) + early * self._first_shadow].all()

    def commit(self, layer: int, bucket: int) -> None:
        """The shadow is the bucket's weights from now on."""
        index = self.weight_index(layer, bucket)
        shadow = self._first_shadow + index
        self.store.swap(index, shadow)
        self._read[index], self._read[shadow] = self._read[shadow], self._read[index]

    def give_back(
        self, layer: int, bucket: int, checkouts: tuple[Checkout, Checkout], updated: Completion
    ) -> Completion:
        """They are changed once `updated` is over. Returns when the weights are where they lie."""
        weights, grads = checkouts
        self._release(self.grad_index(layer, bucket), grads, updated)
        return self._watch(self.store.put(weights, updated))

    def hold(self, buckets: Sequence[tuple[int, int]]) -> Snapshot:
        """Keep the weights of these, (layer, bucket) each, as they are now, for a save."""
        return self.store.hold([self.weight_index(*each) for each in buckets], self.buffer)

    def read_weights(self, layer: int, bucket: int) -> torch.Tensor:
        """A bucket's weights, flat, on the host, until the next call. Waits for them."""
        index = self.weight_index(layer, bucket)
        checkout = self.store.fetch(index)
        checkout.there.wait()
        if checkout.there.error is not None:
            raise checkout.there.error
        self._release(index, checkout, Completion.already())
        return checkout.source.view(self.dtype)

    def problem(self) -> str | None:
        """What a copy or an exchange raised, in one line; None where all is well so far."""
        for done in self._watched:
            if done.is_issued and done.error is not None and not isinstance(done.error, Cancelled):
                return " ".join(str(done.error).split()) or type(done.error).__name__
        return None

    def close(self) -> None:
        """Give back the room, once the link is closed."""
        if self.disk is not None and not self.link.is_running:
            self.disk.close()
        HOST.give(self.records.host_bytes, WHAT)
        DISK.give(self.records.disk_bytes, WHAT)

    # -----------------------------------------------------------------------------------------------------------------

    def _collectively(self, call: Callable[[], object], after: Sequence[Completion]) -> Completion:
        self._collective = self._watch(
            self.link.gather.submit(call, (*after,), free=(self._collective,), priority=LAYERS)
        )
        return self._collective

    def _release(self, index: int, checkout: Checkout, read: Completion) -> None:
        self.store.release(checkout, read)
        self._read[index].add(read)

    def _and_squares(
        self, work: Callable[[], None], checkout: Checkout, layer: int, number: int, span: tuple[int, int]
    ) -> Callable[[], None]:
        target, (first, end) = checkout.target.view(torch.float32), span
        views = self._pieces(target[: end - first], first)
        squares = torch.zeros(len(views), dtype=torch.float64)
        self._squares[layer, number] = squares, Completion.already()

        def with_squares() -> None:
            work()
            squares_into(views, squares)

        return with_squares

    def _squares_room(self, layer: int, count: int) -> torch.Tensor:
        """Memory of the device for a layer's squares that stays: nobody can get it while a stream writes to it."""
        if layer not in self._rooms:
            self._rooms[layer] = torch.zeros(count, dtype=torch.float64, device=self.link.device)
        return self._rooms[layer]

    def _pieces(self, flat: torch.Tensor, start: int) -> list[torch.Tensor]:
        """What lies of each expert's matrices in a run of the flat range that begins at `start`."""
        pieces = []
        for first, numel in zip(self.first, self.records.numels, strict=True):
            low, high = max(first, start), min(first + numel, start + flat.numel())
            if low < high:
                pieces.append(flat[low - start : high - start])
        return pieces

    def _watch(self, done: Completion) -> Completion:
        self._watched = [each for each in self._watched if not each.is_issued or each.error is not None]
        self._watched.append(done)
        return done
