"""Communication of context parallelism in attention. Key and value rows are sent between groups of ranks; within a
group, ranks exchange their rows of all heads for all rows of some heads.

A group, which the code calls a cp_rank, is a number of neighbouring ranks of the context-parallel group. Shapes: r rows
of this rank, R rows of its group (after heads are exchanged, each rank has all of them), n query heads, g key/value
heads, d channels of a key, v of a value.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from memory.transfer import to_device
from models.attention.exchange_rounds import ExchangeRound
from moe.alltoall.messages import Messages
from parallel.topology import Axis


class RowExchange:
    """Exchange of key and value rows, and of their gradients, between the ranks of the context-parallel group, in one
    round. `_sends`: indices of the rows to send, by receiving rank. `_receives`: number of rows to receive, by sending
    rank."""

    def __init__(self, found: ExchangeRound, context: Axis, heads: int) -> None:
        head = context.rank % heads
        self._group = context.group
        self._sends = {cp_rank * heads + head: sent_rows for cp_rank, sent_rows in found.sends.items()}
        self._receives = {cp_rank * heads + head: number for cp_rank, number in found.receives.items()}
        self.num_rows, self.num_sent = found.num_keys, sum(map(len, self._sends.values()))
        self._on: dict[torch.device, dict[int, torch.Tensor]] = {}

    def fetch(self, key: torch.Tensor, value: torch.Tensor) -> ArrivingRows:
        """Start sending rows of key `[R, 1, g, d]` and value `[R, 1, g, v]` to other ranks, and receiving rows from
        them. R: rows of this rank after heads are exchanged."""
        sends = {
            rank: [torch.cat([key[sent_rows, 0], value[sent_rows, 0]], -1)]
            for rank, sent_rows in self._sent_rows(key.device).items()
        }
        buffer = key.new_empty(self.num_rows, key.size(2), key.size(3) + value.size(3))
        chunks = buffer.split(list(self._receives.values())) if self._receives else ()
        receives = {rank: [chunk] for rank, chunk in zip(self._receives, chunks)}
        return ArrivingRows(Messages(self._group, sends, receives), buffer, key.size(3))

    def return_gradients(self, key_grad: torch.Tensor, value_grad: torch.Tensor) -> ArrivingGradients:
        """Start sending the gradients of received key and value rows back to their owners, and receiving the gradients
        of the rows that this rank sent."""
        both = torch.cat([key_grad, value_grad], -1)[:, 0]
        chunks = both.split(list(self._receives.values())) if self._receives else ()
        sends = {rank: [chunk] for rank, chunk in zip(self._receives, chunks)}
        found = {rank: both.new_empty(len(sent_rows), *both.shape[1:]) for rank, sent_rows in self._sends.items()}
        messages = Messages(self._group, sends, {rank: [chunk] for rank, chunk in found.items()})
        return ArrivingGradients(messages, found, self._sent_rows(both.device), key_grad.size(-1))

    def _sent_rows(self, device: torch.device) -> dict[int, torch.Tensor]:
        if device not in self._on:
            self._on[device] = {rank: to_device(torch.from_numpy(each), device) for rank, each in self._sends.items()}
        return self._on[device]


class ArrivingRows:
    """Key and value rows that this rank is receiving from other ranks."""

    def __init__(self, messages: Messages, buffer: torch.Tensor, width: int) -> None:
        self._messages, self._buffer, self._width = messages, buffer, width

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the m received rows, and return key `[m, 1, g, d]` and value `[m, 1, g, v]`. Sends may still be in
        flight."""
        self._messages.wait_received()
        arrived_rows = self._buffer.unsqueeze(1)
        del self._buffer  # only the caller holds it from here on
        return arrived_rows[..., : self._width], arrived_rows[..., self._width :]

    def wait_sent(self) -> None:
        """Wait until the rows that this rank sends have been transferred. Call `wait` first."""
        self._messages.wait()


class ArrivingGradients:
    """Gradients of this rank's key and value rows, which arrive from the ranks that received these rows."""

    def __init__(
        self, messages: Messages, found: dict[int, torch.Tensor], sent_rows: dict[int, torch.Tensor], width: int
    ) -> None:
        self._messages, self._found, self._sent_rows, self._width = messages, found, sent_rows, width

    def add_to(self, key_grad: torch.Tensor, value_grad: torch.Tensor) -> None:
        """Wait for the gradients that other ranks send, and add them to the fp32 gradients of this rank's R key and
        value rows, in a fixed order of ranks."""
        self._messages.wait()
        for rank, chunk in self._found.items():
            sent_rows = self._sent_rows[rank]
            key_grad[sent_rows, 0] += chunk[..., : self._width]
            value_grad[sent_rows, 0] += chunk[..., self._width :]


class HeadExchange:
    """All-to-all in a group of context-parallel ranks: each rank sends its rows of all heads and receives the whole
    group's rows of some heads (as in DeepSpeed Ulysses). If there are fewer key heads than ranks, several ranks receive
    the same key head."""

    def __init__(self, context: Axis, heads: int) -> None:
        first = context.rank // heads * heads
        self.group, self.size, self.rank = context.group, heads, context.rank - first
        self.ranks = range(first, first + heads)

    def heads_of_ranks(self, number: int) -> list[slice]:
        """Return which slice of `number` query or key heads each rank of the group computes, as a list by rank."""
        if number % self.size == 0:
            each = number // self.size
            return [slice(i * each, (i + 1) * each) for i in range(self.size)]
        shared = self.size // number
        return [slice(i // shared, i // shared + 1) for i in range(self.size)]

    def to_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Exchange this rank's rows of all heads for the whole group's rows of this rank's heads: query `[r, 1, n, d]`,
        key `[r, 1, g, d]` and value `[r, 1, g, v]` become `[R, 1, heads, ...]`."""
        return _ToHeads.apply(query, key, value, self)  # type: ignore[no-any-return]

    def to_rows(self, output: torch.Tensor) -> torch.Tensor:
        """Exchange the whole group's rows of this rank's heads, `[R, 1, heads, v]`, for this rank's rows of all heads,
        `[r, 1, n, v]`."""
        return _ToRows.apply(output, self)  # type: ignore[no-any-return]

    def scatter(self, tensors: Sequence[torch.Tensor], heads: Sequence[list[slice]]) -> list[torch.Tensor]:
        """Exchange rows for heads in several tensors: send every rank of the group its heads of this rank's rows, `[r,
        1, heads, ...]`. Returns this rank's heads of all R rows. `heads`: for each tensor, the slice of heads per
        rank."""
        found = [
            tensor.new_empty(len(tensor) * self.size, 1, tensor[:, :, of[self.rank]].size(2), *tensor.shape[3:])
            for tensor, of in zip(tensors, heads)
        ]
        sends, receives = {}, {}
        for i, rank in enumerate(self.ranks):
            chunks = [tensor[:, :, of[i]] for tensor, of in zip(tensors, heads)]
            targets = [whole.unflatten(0, (self.size, -1))[i] for whole in found]
            if i == self.rank:
                for target, chunk in zip(targets, chunks):
                    target.copy_(chunk)
            else:
                sends[rank], receives[rank] = [chunk.contiguous() for chunk in chunks], targets
        Messages(self.group, sends, receives).wait()
        return found

    def gather(self, tensors: Sequence[torch.Tensor], heads: Sequence[list[slice]]) -> list[list[torch.Tensor]]:
        """Exchange heads for rows in several tensors: send every rank of the group its rows of this rank's heads, `[R,
        1, heads, ...]`. Returns for each tensor a list with every rank's heads of this rank's r rows. `heads`: for each
        tensor, the slice of heads per rank."""
        by_rank = [tensor.unflatten(0, (self.size, -1)) for tensor in tensors]
        found: list[list[torch.Tensor]] = [[] for _ in tensors]
        sends, receives = {}, {}
        for i, rank in enumerate(self.ranks):
            chunks = [whole[i] for whole in by_rank]
            if i != self.rank:
                sends[rank] = [chunk.contiguous() for chunk in chunks]
                chunks = [
                    chunk.new_empty(len(chunk), 1, of[i].stop - of[i].start, *chunk.shape[3:])
                    for chunk, of in zip(chunks, heads)
                ]
                receives[rank] = chunks
            for each, chunk in zip(found, chunks):
                each.append(chunk)
        Messages(self.group, sends, receives).wait()
        return found


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exchange: HeadExchange
    ) -> tuple[torch.Tensor, ...]:
        of_keys = exchange.heads_of_ranks(key.size(2))
        ctx.exchange, ctx.heads = exchange, [exchange.heads_of_ranks(query.size(2)), of_keys, of_keys]
        return tuple(exchange.scatter((query, key, value), ctx.heads))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        found = ctx.exchange.gather([grad.contiguous() for grad in grads], ctx.heads)
        return *(_joined(chunks, of) for chunks, of in zip(found, ctx.heads)), None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
        ctx.exchange, ctx.heads = exchange, exchange.heads_of_ranks(output.size(2) * exchange.size)
        (chunks,) = exchange.gather([output], [ctx.heads])
        return torch.cat(chunks, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.exchange.scatter([grad], [ctx.heads])[0], None


def _joined(chunks: list[torch.Tensor], heads: list[slice]) -> torch.Tensor:
    """Concatenate the gradients of all ranks' heads: one `[r, 1, heads, ...]` per rank, in `chunks`. If several ranks
    have the same head, its gradients are summed in fp32."""
    if len({of.start for of in heads}) == len(heads):
        return torch.cat(chunks, dim=2)
    by_head: dict[int, list[torch.Tensor]] = {}
    for chunk, of in zip(chunks, heads):
        by_head.setdefault(of.start, []).append(chunk)
    summed = [functools.reduce(torch.add, (chunk.float() for chunk in same)) for _, same in sorted(by_head.items())]
    return torch.cat(summed, dim=2).to(chunks[0].dtype)
