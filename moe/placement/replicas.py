"""Replicas of other ranks' experts: their memory, and the messages of their weights and gradients.

A replica is a cache of its primary's weights for one step; the optimizer never sees it. Its gradients are summed on its
rank in fp32 and returned to the primary once: when a different expert takes the slot, or in the layer's last backward
pass of the step. If gradients are added block by block (`Slab.block_rows`), each call returns the gradients of its
blocks instead.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe.alltoall.messages import Messages
from moe.experts.blocks import BlockGrads
from moe.experts.weights import Slab, WeightGrads, Weights, wide
from parallel.megatron.grad_buffers import add_with_next
from parallel.trace import named

ByRank = defaultdict[int, list[torch.Tensor]]  # tensors sent to each rank, or received from it


class HeldReplica(NamedTuple):
    """A replica of an expert: the rank and slot of its primary, and its own rank and replica slot."""

    primary_rank: int
    primary_slot: int
    rank: int
    replica_slot: int


class ExpertBlocks(NamedTuple):
    """The blocks of assignments of one expert in a call, with the rank that computes each block."""

    expert: int  # its number on this rank: the slot of its primary or, after those, of its replica
    primary_rank: int
    ranks: list[int]  # the rank that computes each block, in the order of adding


class ReplicaBuffers:
    """Memory for a layer's replicas on this rank: each slot is one contiguous record of an expert's matrices."""

    def __init__(self, group: dist.ProcessGroup, num_slots: int, like: Slab) -> None:
        """`like`: weights of this rank's primaries, perhaps still in flight: only their shapes and dtype are read."""
        self.group, self.rank = group, group.rank()
        self._shapes = [each.shape[1:] for each in like.tensors]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self.weights = torch.zeros(num_slots, sum(self._sizes), dtype=like.fc1.dtype, device=like.fc1.device)
        self._grads: torch.Tensor | None = None  # allocated with the first gradients
        self._written: set[int] = set()  # slots with gradients of this step
        # Returned gradients, to be added to those of the primary: (its slot, record).
        self.arrived: list[tuple[int, torch.Tensor]] = []
        # The host's kernels need consecutive matrices; a grouped matmul takes them with a stride.
        records = self.weights.split(1) if like.fc1.device.type == "cpu" else (self.weights,)
        self.slabs = [like.like(*self._views(each)) for each in records]

    def _views(self, records: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the matrices in flat records [n, size]: one tensor [n, ...] per matrix of an expert."""
        matrices = records.split(self._sizes, dim=1)
        return [each.unflatten(1, shape) for each, shape in zip(matrices, self._shapes, strict=True)]

    @property
    def grads(self) -> torch.Tensor:
        """The summed gradients of all replica slots: [slots, record size], in fp32 or wider."""
        if self._grads is None:
            self._grads = torch.empty_like(self.weights, dtype=wide(self.weights.dtype))
        return self._grads

    @property
    def nbytes(self) -> int:
        """The bytes of the replicas' weights and, once allocated, of their gradients."""
        return self.weights.nbytes + (0 if self._grads is None else self._grads.nbytes)

    def begin_passes(self) -> None:
        """Drop all summed and all returned gradients, at the start of a step."""
        self._written.clear()
        self.arrived.clear()

    def add(self, grads: WeightGrads, used: Sequence[int]) -> None:
        """Add a call's gradients of the replicas in the slots `used` to the sums of the step."""
        made = {index: of_slab.finish() for index, of_slab in grads.take_others().items()}
        for replica_slot in used:
            index, within_slab = (1 + replica_slot, 0) if len(self.slabs) > 1 else (1, replica_slot)
            new = [each[within_slab] for each in made[index] if each is not None]
            totals = self._views(self.grads[replica_slot : replica_slot + 1])
            for (total,), grad in zip(totals, new, strict=True):
                total.add_(grad) if replica_slot in self._written else total.copy_(grad)
            self._written.add(replica_slot)

    def leave(self, replica_slot: int) -> torch.Tensor:
        """Return a replica's summed gradient (a view), to be sent to the primary, and mark the slot as empty."""
        assert replica_slot in self._written, f"the replica in slot {replica_slot} has no gradients"
        self._written.remove(replica_slot)
        return self.grads[replica_slot]

    def add_arrived(self, primaries: Slab, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Add the gradients that replicas have returned to the primaries' gradients, and return these for autograd.

        If a parameter has a gradient buffer, returned gradients are added there, after the primary's own.
        """
        for expert_slot, record in self.arrived:
            views = iter(self._views(record[None]))
            for parameter, grad in zip(primaries.parameters, grads, strict=True):
                if grad is None or parameter is None:
                    continue
                returned = next(views)[0]
                if not add_with_next(parameter, expert_slot, returned):
                    grad[expert_slot] += returned
        self.arrived = []
        return tuple(grads)


class CallReplicas:
    """The replicas of one call, and the messages with their weights and gradients."""

    def __init__(
        self,
        buffers: ReplicaBuffers,
        used: Sequence[int],
        fetched: Sequence[HeldReplica],
        leaving: Sequence[HeldReplica],
        blocks: Sequence[ExpertBlocks] = (),
    ) -> None:
        """`used`: replica slots of this rank that compute. `fetched`: new replicas, whose weights are sent.

        `leaving`: replicas that the new ones replace and whose gradients are returned. `fetched` and `leaving` cover
        all ranks, in the same order on each. `blocks`: the experts with replicas whose primary or replica is on this
        rank, if gradients are added block by block.
        """
        self.buffers, self._used, self._blocks = buffers, used, blocks
        self._fetched, self._leaving = fetched, leaving
        self._messages: Messages | None = None
        self.on_sent: Callable[[int], None] = lambda num_bytes: None
        # Called in the backward pass; returns the replicas whose gradients it must send back.
        self.on_backward: Callable[[], Sequence[HeldReplica]] = tuple

    def weights(self, primaries: Slab) -> Weights:
        """Return the weights of this rank's primaries, followed by those of all its replica slots."""
        return Weights((primaries, *self.buffers.slabs))

    @property
    def separate_experts(self) -> list[int]:
        """Indices (in the layer) of this rank's experts whose gradients are stored per block of tokens."""
        return [each.expert for each in self._blocks]

    @named("copies")
    def fetch(self, primaries: Slab) -> None:
        """Start sending the weights of new replicas, and the gradients of the replicas that they replace."""
        sends: ByRank = defaultdict(list)
        receives: ByRank = defaultdict(list)
        for replica in self._fetched:
            if replica.primary_rank == self.buffers.rank:
                sends[replica.rank] += [each[replica.primary_slot] for each in primaries.tensors]
            elif replica.rank == self.buffers.rank:
                receives[replica.primary_rank].append(self.buffers.weights[replica.replica_slot])
        self._start(sends, receives, self._leaving)

    @named("copies")
    def return_grads(self, grads: WeightGrads | None) -> None:
        """Add the call's replica gradients to the sums of the step, and start returning the complete sums.

        If gradients are added block by block, all have been returned and added when this function ends.
        """
        complete = self.on_backward()
        if isinstance(grads, BlockGrads):
            self._return_blocks(grads)
        elif grads is not None:
            self.buffers.add(grads, self._used)
            self._start(defaultdict(list), defaultdict(list), complete)

    def _start(self, sends: ByRank, receives: ByRank, returning: Sequence[HeldReplica]) -> None:
        buffers = self.buffers
        for replica in returning:
            if replica.rank == buffers.rank:
                sends[replica.primary_rank].append(buffers.leave(replica.replica_slot))
            elif replica.primary_rank == buffers.rank:
                record = buffers.weights.new_empty(buffers.weights.size(1), dtype=wide(buffers.weights.dtype))
                buffers.arrived.append((replica.primary_slot, record))
                receives[replica.rank].append(record)
        self._messages = Messages(buffers.group, sends, receives)
        self.on_sent(self._messages.sent_bytes)

    @named("copies wait")
    def wait(self) -> None:
        """Wait for the messages that `fetch` or `return_grads` started."""
        if self._messages is not None:
            self._messages.wait()
            self._messages = None

    def take_arrived(self) -> list[tuple[int, torch.Tensor]]:
        """Return and clear the gradients that replicas have returned, as (slot of the primary, flat gradient)."""
        arrived, self.buffers.arrived = self.buffers.arrived, []
        return arrived

    def _return_blocks(self, grads: BlockGrads) -> None:
        # All ranks process one expert after the other in the same order; the primary's rank adds the blocks in order.
        group, rank = self.buffers.group, self.buffers.rank
        for expert, primary_rank, ranks in self._blocks:
            own = grads.partials.pop(expert)
            sends: dict[int, list[torch.Tensor]] = {}
            receives: ByRank = defaultdict(list)
            in_order = []
            if primary_rank != rank:
                sends[primary_rank] = [tensor for partial in own for tensor in partial]
            else:
                partials = iter(own)
                in_order = [next(partials) if by == rank else grads.empty_partial() for by in ranks]
                for by, partial in zip(ranks, in_order, strict=True):
                    receives[by] += () if by == rank else partial
            messages = Messages(group, sends, receives)
            messages.wait()
            self.on_sent(messages.sent_bytes)
            for partial in in_order:
                grads.add_partial(expert, partial)
