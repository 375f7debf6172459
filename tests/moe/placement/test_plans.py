"""Files of plans: continued over kills and migrations, and refused for another run than they are of."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from base.errors import ConfigError
from moe.placement.plans import PlanFile, PlanHeader, ReplayedPlanner, ReplicaQuotas, read_plans
from moe.placement.quotas import Costs, ReplicaLimits
from moe.placement_map import PlacementMap

pytestmark = pytest.mark.fast

PRIMARIES = {0: (0, 0, 1, 1), 2: (0, 0, 1, 1)}
MOVED = {0: (1, 0, 0, 1), 2: (0, 0, 1, 1)}
LAST = 4


def header(step: int, **other: Any) -> PlanHeader:
    fields = {
        "run": "a1",
        "expert_ranks": 2,
        "num_experts": 4,
        "replica_slots": 2,
        "primaries": PRIMARIES if step < 3 else MOVED,
    }
    return PlanHeader(**{"step": step, **fields, **other})


def calls_of(step: int) -> dict[int, list[ReplicaQuotas]]:
    """Two calls of two layers, with primaries that migrate after step 2."""
    away = [[(0, 1, step), (1, 1, 3)], []] if step < 3 else [[(1, 1, step)], [(2, 1, 2)]]
    return {0: away, 2: [[(3, 0, 1)], [(2, 0, 1), (3, 0, 7)]]}


def write(path: Path, steps: range, after: int = 0) -> PlanFile:
    file = PlanFile(path, "a1", after)
    for step in steps:
        file.append(header(step), calls_of(step))
    file.close()
    return file


def holds(path: Path, steps: range) -> None:
    plans = read_plans(path)
    assert plans.calls == {layer: {step: calls_of(step)[layer] for step in steps} for layer in PRIMARIES}
    for step in steps:
        found = plans.header(step)
        assert found is not None and dataclasses.replace(found, step=0) == dataclasses.replace(header(step), step=0)


def test_a_resumed_run_has_each_step_once_with_its_primaries(tmp_path: Path) -> None:
    path = tmp_path / "a.plans"
    write(path, range(1, 4))
    holds(path, range(1, 4))
    assert sum(b"format" in line for line in path.read_bytes().splitlines()) == 2  # the start, and the move
    before = path.read_bytes()
    for cut in (1, 5, len(before.splitlines()[-1]), 200):  # a kill in step 3, and the run goes on from step 2
        path.write_bytes(before[:-cut])
        assert write(path, range(3, 5), after=2).missing is None
        holds(path, range(1, 5))
    assert read_plans(path).problem(header(1), LAST, 2) is None
    second, third = (before.index(b'{"step": %d' % step) for step in (2, 3))
    for end in range(second + 1, before.rindex(b"{", 0, third - 300), 40):  # inside step 2, also between its lines
        path.write_bytes(before[:end])
        missing = PlanFile(path, "a1", 2).missing
        assert missing is not None and missing.startswith(f"{path} lacks step 2 (")
        holds(path, range(1, 2))
    path.write_bytes(before[:second] + b'{"ste')
    file = write(path, range(4, 5), after=3)
    assert file.missing is not None and file.missing.startswith(f"{path} lacks steps 2 to 3 (")
    assert "step 2, layer 0, call 0 is not in the file" in str(read_plans(path).problem(header(1), LAST, 2))
    with pytest.raises(ConfigError, match=r"a.plans has the plans of run a1, and this is run b2. Move the file away."):
        PlanFile(path, "b2", 4)


def test_a_step_without_calls_is_not_missing(tmp_path: Path) -> None:
    write(tmp_path / "a.plans", range(1, 3))
    file = PlanFile(tmp_path / "a.plans", "a1", 2)
    file.append(header(3), {0: [], 2: []})
    file.close()
    assert PlanFile(tmp_path / "a.plans", "a1", 3).missing is None
    holds(tmp_path / "a.plans", range(1, 3))


def test_a_full_disk_ends_the_record_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.plans"
    write(path, range(1, 2))
    with monkeypatch.context() as context:
        context.setattr(os, "write", full)
        write(path, range(2, 4), after=1)
    holds(path, range(1, 2))
    assert capsys.readouterr().err.count("a.plans cannot be written: No space left on device.") == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"expert_ranks": 4}, "step 1 was recorded with parallel.expert=2, but this run has 4. Replay plans only with"),
        ({"num_experts": 8}, "step 1 was recorded with moe.num_experts=4, but this run has 8"),
        ({"replica_slots": 1}, "step 1 was recorded with moe.placement.extra_slots=2, but this run has 1"),
        ({"replica_slots": 3}, None),
        ({"primaries": {0: (0, 0, 1, 1)}}, r"step 1 was recorded with the MoE layers \[0, 2\], but this run has \[0\]"),
        ({"primaries": MOVED}, "step 1, layer 0: the primary of expert 0 was on rank 0, but is on rank 1 in this run;"),
        ({"step": 5, "primaries": MOVED}, "step 5, layer 0, call 0 is not in the file"),
    ],
)
def test_what_is_of_another_run_is_refused_before_it(
    tmp_path: Path, other: dict[str, Any], message: str | None
) -> None:
    write(tmp_path / "a.plans", range(1, 5))
    plans = read_plans(tmp_path / "a.plans")
    own = dataclasses.replace(header(1), **other)
    text = plans.problem(own, max(LAST, own.step), 2)
    assert text is None if message is None else text is not None
    if message is not None:
        with pytest.raises(ConfigError, match=f"^moe.placement.replay: {tmp_path}/a.plans: {message}"):
            raise ConfigError(text)
    assert "step 1, layer 0 was recorded with 2 calls, but this run has 3" in str(plans.problem(header(1), LAST, 3))
    assert plans.primaries_differ(header(3)) is None
    assert "the primary of expert 0 was on rank 1, but is on rank 0 in this run" in str(
        plans.primaries_differ(header(3, primaries=PRIMARIES))
    )


Change = Callable[[list[dict[str, Any]]], None]


def put(number: int, **fields: Any) -> Change:
    return lambda lines: lines[number].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(1, copies=[[0, -1, 1]]), r"line 2: rank \(-1\) must be from 0 to 1"),
        (put(1, copies=[[0, 2, 1]]), r"line 2: rank \(2\) must be from 0 to 1"),
        (put(1, copies=[[4, 1, 1]]), r"line 2: expert \(4\) must be from 0 to 3"),
        (put(1, copies=[[-1, 1, 1]]), r"line 2: expert \(-1\) must be from 0 to 3"),
        (put(1, copies=[[0, 1, 0]]), r"line 2: assignments \(0\) must be from 1 to"),
        (put(1, copies=[[0, 1, 10**30]]), rf"line 2: assignments \({10**30}\) must be from 1 to"),
        (put(1, copies=[[0, 1, 1.5]]), "line 2: 1.5 must be an integer"),
        (put(1, copies=[[0, 1, True]]), "line 2: True must be an integer"),
        (put(1, copies=[[0, 1]]), "line 2: "),
        (put(1, copies=[[0, 1, 1], [0, 1, 2]]), "line 2: a replica is listed twice"),
        (put(1, copies=[[0, 0, 1]]), "line 2: expert 0 has a replica on the rank of its primary; expected a different"),
        (put(1, layer=1), r"line 2: layer \(1\) must be one of \[0, 2\]"),
        (put(1, call=7), r"line 2: step 1, layer 0: call \(7\) must be 0, the next number"),
        (put(1, step=None), "line 2: None must be an integer"),
        (
            put(0, format="other"),
            r"line 1: its format \(other\) must be mixtrain placement plans 2, which this version reads",
        ),
        (
            put(0, homes={"0": [0, 0, 0, 1], "2": [0, 0, 1, 1]}),
            "line 1: homes must give each of the 2 ranks 2 of the 4 experts, in every layer",
        ),
        (
            put(0, homes={"0": [0, 0, 1, -1], "2": [0, 0, 1, 1]}),
            "line 1: homes must give each of the 2 ranks 2 of the 4",
        ),
        (
            put(0, expert_ranks=0),
            r"line 1: step \(1\), expert_ranks \(0\), num_experts \(4\) and slots \(\d+\) must be at least 1",
        ),
        (put(0, slots=1), "line 2: a rank has 2 replicas; expected at most 1"),
        (put(0, run=None), r"line 10: its run \(a1\) must be that of the first header \(None\)"),
        (lambda lines: lines.insert(3, {}), "line 4: it must be a JSON object with a plan's fields"),
        (lambda lines: lines.clear(), "has no plans: it was cut off"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_line(tmp_path: Path, change: Change, message: str) -> None:
    path = tmp_path / "a.plans"
    write(path, range(1, 5))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=message) as caught:
        read_plans(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_any_damage_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.plans"
    write(path, range(1, 5))
    data, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(damaged[: rng.integers(1, len(data) + 1)])
        try:
            text = read_plans(path).problem(header(1), LAST, 2)
        except ConfigError as error:
            text = str(error)
        assert text is None or (str(path) in text and "\n" not in text)
        PlanFile(path, "a1", 2).close() if b'"a1"' in path.read_bytes().split(b"\n")[0] else None


def test_a_file_without_a_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.plans"
    write(path, range(1, 5))
    lines = [line for line in path.read_text().splitlines() if "format" not in line]
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ConfigError, match=r"line 1: there is no header for step 1 before it"):
        read_plans(path)


def test_a_call_of_other_counts_is_refused(tmp_path: Path) -> None:
    placement, counts_RE = PlacementMap(4, 2), np.full((2, 4), 5)
    for replicas, message in (
        ([(0, 1, 4)], None),
        ([(0, 1, 11)], r"call 0 gives replicas of expert 0 more assignments than the expert has \(10\)"),
        ([(3, 1, 1)], "call 0 has a replica of expert 3 on the rank of its primary, 1"),
    ):
        replayed = ReplayedPlanner(tmp_path / "a.plans", 2, {7: [replicas]})
        replayed.begin(7)
        if message is None:
            for _ in range(2):  # passes may come once more, where a step is not finite
                quotas_ER = replayed(counts_RE, placement, Costs(), ReplicaLimits(2, 2))
                assert quotas_ER.tolist() == [[6, 4], [10, 0], [0, 10], [0, 10]]
        else:
            with pytest.raises(ConfigError, match=f"a.plans: step 7, layer 2, {message}"):
                replayed(counts_RE, placement, Costs(), ReplicaLimits(2, 2))
