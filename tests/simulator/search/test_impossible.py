"""What is impossible says the least change that makes it possible, and the change works."""

from __future__ import annotations

import re
import shlex

import pytest

from base.errors import ConfigError
from configs.compose import compose
from configs.job import Job
from simulator.search.impossible import Asked, no_layout_error
from simulator.search.search import search_layout
from tests.simulator.search.machines import SIMPLE, machine

pytestmark = pytest.mark.fast
VOCAB = 1000
MOE, DENSE, BERT = "experiment=gpt_moe_tiny", "experiment=gpt_tiny", "experiment=bert_tiny"
QUICK = ["parallel.context=1", "optimizer.engine=auto", "moe.pipeline_degree=1", "moe.memory_strategy=keep"]

# Overrides that are no keys of the search, given keys, ranks, MB of a device.
REQUESTS = [
    ([DENSE], ["parallel.tensor=3"], 4, 9999),
    ([DENSE], ["parallel.pipeline=3"], 6, 9999),
    ([DENSE], ["training.micro_batch_size=16"], 2, 9999),
    ([DENSE], ["parallel.context=3"], 4, 9999),
    ([DENSE], ["parallel.expert=2"], 4, 9999),
    ([DENSE], ["parallel.virtual_pipeline=2", "parallel.pipeline=1"], 2, 9999),
    ([DENSE], [], 7, 9999),
    ([DENSE], [], 11, 9999),
    ([MOE], ["parallel.expert=3"], 4, 9999),
    ([MOE], ["parallel.sequence=false", "parallel.tensor=2"], 4, 9999),
    ([MOE], ["parallel.expert=1", "parallel.expert_tensor=2", "parallel.tensor=1"], 4, 9999),
    ([BERT], ["parallel.tensor=8"], 8, 9999),
    ([DENSE], ["optimizer.state_device=device", "parallel.tensor=1", "parallel.pipeline=1"], 2, 2.1),
    ([DENSE], ["training.recompute=none", "training.micro_batch_size=8"], 1, 6),
    ([MOE], ["parallel.expert=1", "optimizer.state_device=device", "parallel.tensor=1"], 4, 3),
    ([MOE], ["parallel.expert=1", "parallel.pipeline=1", "parallel.tensor=1"], 4, 2),
    ([BERT], ["training.micro_batch_size=4", "training.recompute=none"], 2, 3),
    ([DENSE, "memory.host_budget=0.5"], ["optimizer.state_device=host"], 2, 9999),
    ([DENSE, "training.memory_limit_gib=0.0002"], [], 2, 9999),
    ([MOE, "training.memory_limit_gib=0.001"], [], 1, 9999),
]


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_advice_works(number: int) -> None:
    overrides, given, world_size, megabytes = REQUESTS[number]
    given = [*given, *(each for each in QUICK if each.partition("=")[0] not in {g.partition("=")[0] for g in given})]
    fixed = frozenset(each.partition("=")[0] for each in given)
    hardware = machine(device__memory=megabytes * 1e6 / 0.9)
    with pytest.raises(ConfigError) as error:
        search_layout(Job(compose([*overrides, *given]), world_size, VOCAB, "cuda"), hardware, fixed, SIMPLE)
    message = str(error.value)
    assert "\n" not in message
    found = re.search(r"Try (?:(\d+) ranks(?: with)? ?)?(.*?) ?\(", message)
    assert found, message
    keys = shlex.split(found[2] or "")
    ranks = int(found[1] or world_size)
    changed = compose([*overrides, *given, *keys])
    fixed |= {each.partition("=")[0] for each in keys}
    answer = search_layout(Job(changed, ranks, VOCAB, "cuda"), hardware, fixed, SIMPLE)
    assert answer.best.memory.device <= answer.limits.device


def test_it_says_how_much_is_missing_on_which_tier() -> None:
    given = ["optimizer.state_device=device", "parallel.tensor=1", "parallel.pipeline=1", "parallel.context=1"]
    config = compose([DENSE, *given])
    fixed = frozenset(each.partition("=")[0] for each in given)
    message = str(no_layout_error(Asked(Job(config, 2, VOCAB, "cuda"), machine(device__memory=2.1e6 / 0.9), fixed)))
    assert re.search(r"needs [\d.]+ MiB of the device, [\d.]+ MiB more than 90% of the device's memory", message)
    assert "Try optimizer.state_device=" in message
