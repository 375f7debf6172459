"""The order of callbacks is what each of them declares."""

from __future__ import annotations

import itertools

import pytest

from tests.training.helpers import make_config
from training.callbacks import check_order, default_callbacks

pytestmark = pytest.mark.fast

PLACED = ["experiment=gpt_moe_tiny", "parallel.expert=2", "moe.placement.policy=solve", "moe.placement.extra_slots=1"]
LIMITED = ["moe.placement.max_load=1.5", "moe.placement.record=true", "moe.pipeline_degree=auto"]


def test_every_callback_declares_what_it_follows_by_names_that_exist() -> None:
    callbacks = default_callbacks(make_config([*PLACED, *LIMITED, "training.device=cpu"], 2))
    names = {type(each).__name__ for each in callbacks} | {"GlobalAuxLoss", "ReplayedPlans", "Guard"}
    assert {name for each in callbacks for name in each.follows} <= names


def test_another_order_is_refused_where_one_follows_another() -> None:
    callbacks = default_callbacks(make_config([*PLACED, *LIMITED, "training.device=cpu"], 2))
    refused = 0
    for first, second in itertools.combinations(range(len(callbacks)), 2):
        swapped = list(callbacks)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        if type(callbacks[first]).__name__ in callbacks[second].follows:
            with pytest.raises(AssertionError, match="must be called after"):
                check_order(swapped)
            refused += 1
    assert refused >= 10
