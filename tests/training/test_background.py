"""Logs beside the run's own record: what fails there is said once, and ends no run."""

from __future__ import annotations

import errno
import os

import pytest

from training.callbacks.logging.external_loggers import Background

pytestmark = pytest.mark.fast


def test_a_log_that_fails_is_reported_once_and_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def log(number: int) -> None:
        calls.append(number)
        if number >= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    soon = Background("tensorboard")
    for number in range(5):
        soon(log, number)
    soon.close()
    assert calls[:3] == [0, 1, 2] and soon.failed
    done = list(calls)
    soon(log, 9)
    with soon.watched():
        raise ValueError("on the way out")
    assert calls == done
    output = capsys.readouterr().err.splitlines()
    assert output == [
        "tensorboard: nothing more is logged there, because of OSError: [Errno 28] No space left on device"
    ]
