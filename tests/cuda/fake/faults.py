"""What the device without numbers must refuse or notice: one small fault each, so that a green table says something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from moe.alltoall.flat import FlatAllToAll
from moe.experts.compute import grouped_mm
from tests.cuda.fake.cases import Case
from tests.cuda.fake.device import Device
from tests.cuda.fake.measure import measure

SMALL = Case("gpt_moe_small", "EP4, bf16", 4, ("parallel.expert=4", "training.precision=bf16"))


def _grouped(columns: int, offsets: torch.dtype) -> None:
    left, right = (torch.zeros(size, dtype=torch.bfloat16, device="cuda") for size in ((32, columns), (4, columns, 64)))
    grouped_mm(left, right, torch.zeros(4, dtype=offsets, device="cuda"))


REFUSED: dict[str, Callable[[], Any]] = {
    "a number is read": lambda: torch.zeros(3, device="cuda").sum().item(),
    "a list is read": lambda: torch.zeros(3, device="cuda").tolist(),
    "a tensor is copied to the host": lambda: torch.zeros(3, device="cuda").cpu(),
    "a size follows from the values": lambda: torch.zeros(3, device="cuda").nonzero(),
    "host and device are mixed": lambda: torch.zeros(3, device="cuda") + torch.zeros(3),
    "rows are not aligned to 16 bytes": lambda: _grouped(12, torch.int32),
    "offsets are not int32": lambda: _grouped(16, torch.int64),
}


def refused() -> dict[str, str]:
    """Each of REFUSED, and the error that it ends in; "" where it goes through."""
    result = {}
    for name, function in REFUSED.items():
        with Device():
            _grouped(16, torch.int32)
            try:
                function()
            except Exception as error:  # of several kinds
                result[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            else:
                result[name] = ""
    return result


def noticed() -> dict[str, Any]:
    """A step as it is, one that asks twice for its counts, and one that keeps every micro-batch's logits."""
    count = FlatAllToAll.count

    def twice(exchange: FlatAllToAll, counts: torch.Tensor) -> Any:
        count(exchange, counts)
        return count(exchange, counts)

    from models.loss.token_loss import _Tiles

    softmax, kept = _Tiles.softmax, list[torch.Tensor]()

    def keeping(tiles: _Tiles, *given: Any) -> Any:
        result = softmax(tiles, *given)
        kept.append(result[0].clone())
        return result

    found = {"as it is": measure(SMALL, 0).as_dict()}
    with mock.patch.object(FlatAllToAll, "count", twice):
        found["counts are asked for twice"] = measure(SMALL, 0).as_dict()
    with mock.patch.object(_Tiles, "softmax", keeping):
        found["logits are kept"] = measure(SMALL, 0).as_dict()
    return found
