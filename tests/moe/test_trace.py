"""Traces of routing counts: written, cut off, read, gone on with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moe.placement.map import Integers
from moe.placement.trace import Header, Writer, read, read_header

HEADER = Header("a run", num_experts=32, top_k=2, num_ranks=4)


def counts_of(step: int) -> Integers:
    """3 layers, 8 micro-batches, 4 ranks; 64 tokens a rank, in the last step many more."""
    rng = np.random.default_rng(step)
    return rng.multinomial(128 if step < 6 else 200_000, rng.dirichlet(np.ones(32)), (3, 8, 4))


def write(path: Path, steps: range, after: int = 0) -> None:
    writer = Writer(path, HEADER, after)
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
    writer = Writer(tmp_path / "trace", Header("a run", 32, 2, 2), after=1)
    writer.append(2, counts_of(2)[:, :4, :2])
    assert [counts.shape for _, counts in read(tmp_path / "trace")] == [(3, 8, 4, 32), (3, 4, 2, 32)]
    writer.close()


def test_other_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "trace", range(1, 2))
    with pytest.raises(ValueError, match="trace has num_experts=32, and the run 16; move the file away"):
        Writer(tmp_path / "trace", Header("a run", 16, 2, 4))
    holds(tmp_path / "trace", range(1, 2))
    for text in ("text", "[]", "{}", '{"format": "other"}', '{"format": "mixtrain routing counts 1"}'):
        (tmp_path / "other").write_text(text)
        with pytest.raises(ValueError, match="other is no trace of routing counts"):
            list(read(tmp_path / "other"))
    (tmp_path / "bytes").write_bytes(bytes(range(128, 256)))
    with pytest.raises(ValueError, match="bytes is no trace"):
        read_header(tmp_path / "bytes")
