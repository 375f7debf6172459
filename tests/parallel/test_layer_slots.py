"""Which weights of experts off the device come to which slot."""

from __future__ import annotations

import itertools

import pytest

from parallel.pipeline import slot_fills

pytestmark = pytest.mark.fast


def _there_and_back(layers: int) -> list[int]:
    return [*range(layers), *reversed(range(layers))]


@pytest.mark.parametrize(("layers", "micro_batches"), itertools.product([2, 3, 6], [1, 2, 5]))
def test_what_lies_in_slots_at_a_turn_does_not_come_again(layers: int, micro_batches: int) -> None:
    fills = slot_fills(_there_and_back(layers) * micro_batches, 2)
    assert len(fills) == micro_batches * 2 * layers - 2 * (2 * micro_batches - 1)


def _fewest(visits: list[int], num_slots: int) -> int:
    """The least fills of any choice, where the layer before stays until the next one is there."""
    states: dict[tuple[frozenset[int], int], int] = {(frozenset(), -1): 0}
    for layer in visits:
        after: dict[tuple[frozenset[int], int], int] = {}
        for (held, before), count in states.items():
            if layer in held:
                choices = [(held, count)]
            elif len(held) < num_slots:
                choices = [(held | {layer}, count + 1)]
            else:
                choices = [(held - {out} | {layer}, count + 1) for out in held if out != before or num_slots == 1]
            for kept, number in choices:
                key = kept, layer
                after[key] = min(number, after.get(key, number))
        states = after
    return min(states.values())


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
@pytest.mark.parametrize("visits", [_there_and_back(5) * 2, [0, 1, 0, 2, 0, 3, 2, 1], [4, 4, 3, 3, 4, 1, 0, 1]])
def test_no_choice_of_slots_needs_fewer_fills(visits: list[int], num_slots: int) -> None:
    assert len(slot_fills(visits, num_slots)) == _fewest(visits, num_slots)


def test_a_slot_is_filled_behind_its_last_use_and_never_while_its_layer_is_next() -> None:
    visits, held = _there_and_back(7) * 3, {}
    fills = {fill.visit: fill for fill in slot_fills(visits, 3)}
    last: dict[int, int] = {}
    for index, layer in enumerate(visits):
        if (fill := fills.get(index)) is not None:
            assert fill.layer == layer and fill.after == last.get(fill.slot_index, -1)
            assert fill.after < index - 1 or fill.after == -1  # the layer before computes meanwhile
            held[fill.slot_index] = layer
        (slot_index,) = [slot_index for slot_index, each in held.items() if each == layer]
        last[slot_index] = index
    with pytest.raises(ValueError, match="number of device slots must be at least 1"):
        slot_fills([0], 0)
