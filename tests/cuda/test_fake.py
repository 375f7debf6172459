"""Every preset at its real widths through FakeTensorMode: no error, no other wait than sync_points.py lists, and the
plan's memory. The whole table, with further layouts, is benchmarks/results/fake_presets.md."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from configs.overrides import presets_by_group
from simulator.run_plan import TOLERANCE
from tests.distributed import ROOT
from tests.waits import LONG

pytestmark = [pytest.mark.cuda_pretended]


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    """What the command prints as JSON, of the presets in their experiments' layouts."""
    command = [sys.executable, "-m", "tests.cuda.fake", "--quick", "--faults", "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * LONG)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def test_every_preset_takes_a_step_as_planned(printed: dict[str, Any]) -> None:
    found = printed["found"]
    assert {each["case"]["preset"] for each in found} == set(presets_by_group()["model"])
    for each in found:
        assert each["waits"] == each["expected_waits"], each
        assert each["grouped_products"] == each["expected_grouped_products"], each
        assert abs(each["ratio"] - 1) < TOLERANCE, each
        assert abs(each["activations"] / each["planned_activations"] - 1) < TOLERANCE, each
    assert any(each["grouped_products"] for each in found)
    assert {each["stage"] for each in found if each["case"]["world_size"] == 256} == {0, 2, 3}


def test_what_a_gpu_would_refuse_is_refused(printed: dict[str, Any]) -> None:
    errors = printed["refused"]
    assert len(errors) == 7
    expected = {
        "a number is read": "DataDependentOutputException",
        "a list is read": "the host reads a tensor (3,) of the device",
        "a tensor is copied to the host": "the host reads a tensor (3,) of the device",
        "a size follows from the values": "DynamicOutputShapeException",
        "host and device are mixed": "cuda:0 and cpu",
        "rows are not aligned to 16 bytes": "multiple of 16 bytes",
        "offsets are not int32": "int32",
    }
    assert {name for name, words in expected.items() if words in errors[name]} == set(errors)


def test_one_wait_more_and_memory_that_is_kept_are_noticed(printed: dict[str, Any]) -> None:
    plain, twice, kept = (
        printed["noticed"][name] for name in ("as it is", "counts are asked for twice", "logits are kept")
    )
    call_site = "tolist, moe/alltoall/flat.py:FlatAllToAll.count"
    assert plain["waits"] == plain["expected_waits"] == twice["expected_waits"]
    assert twice["waits"][call_site] == 2 * plain["waits"][call_site] == 4
    assert abs(plain["ratio"] - 1) < TOLERANCE < kept["ratio"] - 1
