"""What ranks of context parallelism send each other for attention: keys and values between places, and heads for rows
within a place.

Ranks of a context group are place x heads, those of a place side by side. Shapes: r rows of this rank, R rows of its
place (all of them after heads were exchanged), n query heads, g key/value heads, d channels of a key, v of a value.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from memory.transfer import to_device
from models.attention.rounds import Round
from moe.alltoall.messages import Messages
from parallel.topology import Axis


class RowExchange:
    """The rows of one round, by rank of the context group: `sends` says which of this place's rows a rank gets, and
    `receives` how many come from it."""

    def __init__(self, found: Round, context: Axis, heads: int) -> None:
        head = context.rank % heads
        self._group = context.group
        self._sends = {place * heads + head: rows for place, rows in found.sends.items()}
        self._receives = {place * heads + head: number for place, number in found.receives.items()}
        self.num_rows, self.num_sent = found.num_keys, sum(map(len, self._sends.values()))
        self._on: dict[torch.device, dict[int, torch.Tensor]] = {}

    def fetch(self, key: torch.Tensor, value: torch.Tensor) -> ArrivingRows:
        """Send rows of key `[R, 1, g, d]` and value `[R, 1, g, v]`, and have those of others sent."""
        sends = {rank: [torch.cat([key[rows, 0], value[rows, 0]], -1)] for rank, rows in self._rows(key.device).items()}
        buffer = key.new_empty(self.num_rows, key.size(2), key.size(3) + value.size(3))
        parts = buffer.split(list(self._receives.values())) if self._receives else ()
        receives = {rank: [part] for rank, part in zip(self._receives, parts)}
        return ArrivingRows(Messages(self._group, sends, receives), buffer, key.size(3))

    def bring_home(self, key_grad: torch.Tensor, value_grad: torch.Tensor) -> ComingGradients:
        """Send the gradients of the rows that `fetch` brought to where they are from, and get those of this place's."""
        both = torch.cat([key_grad, value_grad], -1)[:, 0]
        parts = both.split(list(self._receives.values())) if self._receives else ()
        sends = {rank: [part] for rank, part in zip(self._receives, parts)}
        found = {rank: both.new_empty(len(rows), *both.shape[1:]) for rank, rows in self._sends.items()}
        messages = Messages(self._group, sends, {rank: [part] for rank, part in found.items()})
        return ComingGradients(messages, found, self._rows(both.device), key_grad.size(-1))

    def _rows(self, device: torch.device) -> dict[int, torch.Tensor]:
        if device not in self._on:
            rows = {rank: to_device(torch.from_numpy(each), device) for rank, each in self._sends.items()}
            self._on[device] = rows
        return self._on[device]


class ArrivingRows:
    """Keys and values that are on their way."""

    def __init__(self, messages: Messages, buffer: torch.Tensor, width: int) -> None:
        self._messages, self._buffer, self._width = messages, buffer, width

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Key `[m, 1, g, d]` and value `[m, 1, g, v]`. What this rank sent may still be on its way."""
        self._messages.wait_received()
        rows = self._buffer.unsqueeze(1)
        del self._buffer  # the caller's alone
        return rows[..., : self._width], rows[..., self._width :]

    def wait_sent(self) -> None:
        """Until what this rank sent has left; after `wait`."""
        self._messages.wait()


class ComingGradients:
    """Gradients of this place's rows that are on their way home."""

    def __init__(
        self, messages: Messages, found: dict[int, torch.Tensor], rows: dict[int, torch.Tensor], width: int
    ) -> None:
        self._messages, self._found, self._rows, self._width = messages, found, rows, width

    def add_to(self, key_grad: torch.Tensor, value_grad: torch.Tensor) -> None:
        """Add them to the gradients of all rows, fp32, one rank after the other: always in the same order."""
        self._messages.wait()
        for rank, part in self._found.items():
            rows = self._rows[rank]
            key_grad[rows, 0] += part[..., : self._width]
            value_grad[rows, 0] += part[..., self._width :]


class HeadExchange:
    """Between the ranks of a place: rows of all heads for all rows of some heads. With fewer key heads than ranks, a
    key head goes to several."""

    def __init__(self, context: Axis, heads: int) -> None:
        first = context.rank // heads * heads
        self.group, self.size, self.rank = context.group, heads, context.rank - first
        self.ranks = range(first, first + heads)

    def key_heads(self, number: int) -> list[slice]:
        """The key heads of so many that each rank of the place computes with."""
        if number % self.size == 0:
            each = number // self.size
            return [slice(i * each, (i + 1) * each) for i in range(self.size)]
        shared = self.size // number
        return [slice(i // shared, i // shared + 1) for i in range(self.size)]

    def query_heads(self, number: int) -> list[slice]:
        """The query heads of so many that each rank of the place computes with."""
        each = number // self.size
        return [slice(i * each, (i + 1) * each) for i in range(self.size)]

    def to_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """query `[r, 1, n, d]`, key `[r, 1, g, d]`, value `[r, 1, g, v]` -> the same of all rows of the place and this
        rank's heads, `[R, 1, ...]`."""
        return _ToHeads.apply(query, key, value, self)  # type: ignore[no-any-return]

    def to_rows(self, output: torch.Tensor) -> torch.Tensor:
        """`[R, 1, n of this rank, v]` -> `[r, 1, n, v]`."""
        return _ToRows.apply(output, self)  # type: ignore[no-any-return]

    def spread(self, tensors: Sequence[torch.Tensor], heads: Sequence[list[slice]]) -> list[torch.Tensor]:
        """Tensors `[r, 1, heads, ...]` of this rank's rows, with the heads that each rank gets -> `[R, 1, ...]`."""
        found = [
            tensor.new_empty(len(tensor) * self.size, 1, tensor[:, :, of[self.rank]].size(2), *tensor.shape[3:])
            for tensor, of in zip(tensors, heads)
        ]
        sends, receives = {}, {}
        for i, rank in enumerate(self.ranks):
            parts = [tensor[:, :, of[i]] for tensor, of in zip(tensors, heads)]
            places = [whole.unflatten(0, (self.size, -1))[i] for whole in found]
            if i == self.rank:
                for place, part in zip(places, parts):
                    place.copy_(part)
            else:
                sends[rank], receives[rank] = [part.contiguous() for part in parts], places
        Messages(self.group, sends, receives).wait()
        return found

    def collect(self, tensors: Sequence[torch.Tensor], heads: Sequence[list[slice]]) -> list[list[torch.Tensor]]:
        """The other way: `[R, 1, ...]` of this rank's heads -> by tensor, what each rank of the place has of this
        rank's rows, `[r, 1, its heads, ...]`."""
        rows = [tensor.unflatten(0, (self.size, -1)) for tensor in tensors]
        found: list[list[torch.Tensor]] = [[] for _ in tensors]
        sends, receives = {}, {}
        for i, rank in enumerate(self.ranks):
            parts = [whole[i] for whole in rows]
            if i != self.rank:
                sends[rank] = [part.contiguous() for part in parts]
                parts = [
                    part.new_empty(len(part), 1, of[i].stop - of[i].start, *part.shape[3:])
                    for part, of in zip(parts, heads)
                ]
                receives[rank] = parts
            for each, part in zip(found, parts):
                each.append(part)
        Messages(self.group, sends, receives).wait()
        return found


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exchange: HeadExchange
    ) -> tuple[torch.Tensor, ...]:
        of_keys = exchange.key_heads(key.size(2))
        ctx.exchange, ctx.heads = exchange, [exchange.query_heads(query.size(2)), of_keys, of_keys]
        return tuple(exchange.spread((query, key, value), ctx.heads))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        found = ctx.exchange.collect([grad.contiguous() for grad in grads], ctx.heads)
        return *(_joined(parts, of) for parts, of in zip(found, ctx.heads)), None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
        ctx.exchange, ctx.heads = exchange, exchange.query_heads(output.size(2) * exchange.size)
        (parts,) = exchange.collect([output], [ctx.heads])
        return torch.cat(parts, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.exchange.spread([grad], [ctx.heads])[0], None


def _joined(parts: list[torch.Tensor], heads: list[slice]) -> torch.Tensor:
    """Gradients of the heads that each rank had, one after the other; what several had is added up in fp32."""
    if len({of.start for of in heads}) == len(heads):
        return torch.cat(parts, dim=2)
    by_head: dict[int, list[torch.Tensor]] = {}
    for part, of in zip(parts, heads):
        by_head.setdefault(of.start, []).append(part)
    summed = [functools.reduce(torch.add, (part.float() for part in same)) for _, same in sorted(by_head.items())]
    return torch.cat(summed, dim=2).to(parts[0].dtype)
