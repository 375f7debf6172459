"""The ring without files: the bytes of each unit, the users that its load waits for, and the restart of a broken
pass."""

from __future__ import annotations

import random

import torch

from inference.weights.rank_weights import LocalShard, WeightUnit
from inference.weights.ring import Ring
from memory.completion import Completion


class _Loads:
    """Records loads, each of which must wait for the last user of each of its bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.keys: list[str] = []
        self.last_user: list[Completion | None] = [None] * num_bytes

    def __call__(self, unit: WeightUnit, memory: torch.Tensor, free: list[Completion]) -> Completion:
        self.keys.append(unit.key)
        start = memory.storage_offset()
        for byte in range(start, start + memory.numel()):
            assert self.last_user[byte] is None or self.last_user[byte] in free
        return Completion.already()


def _ring(sizes: list[int], capacity: int) -> tuple[Ring, _Loads, list[WeightUnit]]:
    units = [WeightUnit(f"u{i}", (LocalShard(f"u{i}", (size,)),)) for i, size in enumerate(sizes)]
    loads = _Loads(capacity)
    return Ring(torch.zeros(capacity, dtype=torch.uint8), units, lambda unit: unit.numel, loads), loads, units


def test_units_come_in_order_to_bytes_whose_users_are_waited_for() -> None:
    draw = random.Random(7)
    for _ in range(40):
        sizes = [draw.randint(1, 50) for _ in range(draw.randint(2, 9))]
        pairs = [one + other for one, other in zip(sizes, [*sizes[1:], sizes[0]], strict=True)]
        ring, loads, units = _ring(sizes, draw.randint(max(sizes), max(pairs) + 20))
        for number in range(6 * len(units)):
            unit = units[number % len(units)]
            ring_slot = ring.take(unit.key)
            assert ring_slot.unit == unit and ring_slot.memory.numel() == ring_slot.end - ring_slot.start == unit.numel
            after = Completion()
            loads.last_user[ring_slot.start : ring_slot.end] = [after] * unit.numel
            ring.give_back(ring_slot, after)
        assert loads.keys == [units[number % len(units)].key for number in range(len(loads.keys))]
        assert len(ring.stop()) <= 2 * len(loads.last_user)


def test_a_broken_pass_begins_anew() -> None:
    ring, loads, _ = _ring([10, 10, 10], 20)
    ring.give_back(ring.take("u0"), Completion.already())
    assert ring.take("u0").unit.key == "u0"  # u1 and u2 were in flight
    assert loads.keys == ["u0", "u1", "u2", "u0", "u1"]
