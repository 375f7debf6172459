"""Traces of routing counts: written, cut off, read, gone on with."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from base.errors import ConfigError
from moe.placement.trace import TraceHeader, TraceWriter, read, read_header
from moe.placement_map import Integers

pytestmark = pytest.mark.fast

HEADER = TraceHeader("a run", num_experts=32, top_k=2, num_ranks=4)


def counts_of(step: int) -> Integers:
    """3 layers, 8 micro-batches, 4 ranks; 64 tokens a rank, in the last step many more."""
    rng = np.random.default_rng(step)
    return rng.multinomial(128 if step < 6 else 200_000, rng.dirichlet(np.ones(32)), (3, 8, 4))


def write(path: Path, steps: range, after: int = 0) -> None:
    writer = TraceWriter(path, HEADER, after)
    for step in steps:
        writer.append(step, counts_of(step))
    writer.close()


def holds(path: Path, steps: range) -> None:
    found = list(read(path))
    assert [step for step, _ in found] == list(steps)
    for step, counts in found:
        assert counts.dtype == np.int64 and (counts == counts_of(step)).all()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "trace", range(1, 7))
    assert read_header(tmp_path / "trace") == HEADER
    holds(tmp_path / "trace", range(1, 7))
    assert (tmp_path / "trace").stat().st_size < 5 * 3 * 8 * 4 * 32 + 6 * 3 * 8 * 4 * 32


def test_a_file_that_is_cut_off_anywhere_reads_to_its_last_whole_step(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, range(1, 3))
    whole = path.stat().st_size
    write(path, range(3, 4), after=2)
    data = path.read_bytes()
    for end in (whole, whole + 1, whole + 7, whole + 8, whole + 9, len(data) - 1):
        path.write_bytes(data[:end])
        holds(path, range(1, 3))
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    holds(path, range(1, 3))


def frames_of(path: Path) -> list[int]:
    """Where the frames of steps 1, 2, ... begin, and the end."""
    data, found = path.read_bytes(), []
    position = data.index(b"\n") + 1
    while position < len(data):
        found.append(position)
        position += 8 + int.from_bytes(data[position : position + 4], "little")
    return [*found, position]


@pytest.mark.parametrize("position", [0, 3, 4, 7, 8, 9, 40, -1])  # in the length, the checksum, the payload
def test_a_flipped_byte_costs_its_step_and_is_said(tmp_path: Path, position: int) -> None:
    path = tmp_path / "trace"
    write(path, range(1, 6))
    starts, data = frames_of(path), bytearray(path.read_bytes())
    data[starts[2] + position if position >= 0 else starts[3] - 1] ^= 0x41
    path.write_bytes(data)
    said: list[str] = []
    found = dict(read(path, said.append))
    assert list(found) == [1, 2, 4, 5] and all((found[step] == counts_of(step)).all() for step in found)
    where = f"{path}: bytes {starts[2]} to {starts[3] - 1}"
    text = f"{where} are damaged: step 3 is lost, and the 2 steps before them are kept"
    assert said == [text]
    writer = TraceWriter(path, HEADER, after=4)  # what is behind it stays
    assert writer.missing == [text]
    writer.append(5, counts_of(5))
    writer.close()
    assert [step for step, _ in read(path, said.append)] == [1, 2, 4, 5]
    assert TraceWriter(path, HEADER, after=2).missing == [] and [step for step, _ in read(path)] == [1, 2]


def test_what_is_cut_at_the_end_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    write(path, range(1, 5))
    starts, data = frames_of(path), path.read_bytes()
    path.write_bytes(data[: starts[2] + 20])
    assert [step for step, _ in read(path)] == [1, 2]
    text = f"{path}: bytes {starts[2]} to {starts[2] + 19} at the end are not a complete step: all steps after"
    assert capsys.readouterr().err == f"{text} 2 are lost, and 2 steps are kept\n"
    (line,) = TraceWriter(path, HEADER, after=4).missing
    assert line.startswith(f"{path}: bytes {starts[2]} to {starts[2] + 19} are damaged: 2 steps, 3 to 4, are lost")
    path.write_bytes(data[: starts[1]])
    (line,) = TraceWriter(path, HEADER, after=2).missing
    assert line.startswith(f"{path} lacks step 2 (") and line.endswith("The run continues it with step 3.")
    for end in (0, 1, starts[0] - 1):  # in its first line
        path.write_bytes(data[:end])
        (line,) = TraceWriter(path, HEADER, after=2).missing
        assert line.startswith(f"{path} lacks steps 1 to 2 (") and read_header(path) == HEADER


def test_any_damage_is_a_line_and_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, range(1, 4))
    data, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(data)
        for position in rng.integers(0, len(data), rng.integers(1, 9)):
            damaged[position] = rng.integers(256)
        path.write_bytes(damaged[: rng.integers(1, len(data) + 1)])
        said: list[str] = []
        try:
            found = dict(read(path, said.append))
            whole = all((counts == counts_of(step)).all() for step, counts in found.items())
            assert whole and (list(found) == [1, 2, 3] or said or path.stat().st_size in frames_of(path))
            writer = TraceWriter(path, HEADER, after=3)
            assert bool(writer.missing) == (list(found) != [1, 2, 3])
        except ConfigError as error:
            assert str(path) in str(error) and "\n" not in str(error)


def test_a_full_disk_ends_the_trace_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "trace"
    writer = TraceWriter(path, HEADER)
    writer.append(1, counts_of(1))
    with monkeypatch.context() as context:
        context.setattr(os, "write", full)
        writer.append(2, counts_of(2))
    writer.append(3, counts_of(3))
    writer.close()
    holds(path, range(1, 2))
    assert capsys.readouterr().err.startswith(f"{path} cannot be written: No space left on device.")


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, range(1, 6))
    write(path, range(4, 7), after=3)
    holds(path, range(1, 7))
    path.write_bytes(path.read_bytes()[:-3])  # killed in step 6, and in no checkpoint since step 5
    write(path, range(6, 7), after=5)
    holds(path, range(1, 7))
    write(path, range(1, 2))
    holds(path, range(1, 2))


def test_ranks_and_micro_batches_may_change(tmp_path: Path) -> None:
    write(tmp_path / "trace", range(1, 2))
    writer = TraceWriter(tmp_path / "trace", TraceHeader("a run", 32, 2, 2), after=1)
    writer.append(2, counts_of(2)[:, :4, :2])
    assert [counts.shape for _, counts in read(tmp_path / "trace")] == [(3, 8, 4, 32), (3, 4, 2, 32)]
    writer.close()


def test_other_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "trace", range(1, 2))
    with pytest.raises(
        ValueError, match="trace was written with num_experts=32, and this run has 16. Move the file away"
    ):
        TraceWriter(tmp_path / "trace", TraceHeader("a run", 16, 2, 4))
    holds(tmp_path / "trace", range(1, 2))
    for text in ("text", "[]", "{}", '{"format": "other"}', '{"format": "mixtrain routing counts 1"}'):
        (tmp_path / "other").write_text(text)
        with pytest.raises(ValueError, match="other is not a trace of routing counts"):
            list(read(tmp_path / "other"))
    (tmp_path / "bytes").write_bytes(bytes(range(128, 256)))
    with pytest.raises(ValueError, match="bytes is not a trace"):
        read_header(tmp_path / "bytes")
