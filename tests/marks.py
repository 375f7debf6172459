"""What the mark `fast` promises, and how a broken promise is noticed.

A file says by `pytestmark = pytest.mark.fast` that its tests start no rank and no training, and take seconds at most.
A test without the mark may start as many ranks as it likes. A fast test that calls ranks, joins a process group or
starts a program that trains fails, and says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NoReturn
from unittest import mock

import pytest

from tests import distributed

# Programs that make ranks, by a word of their command line.
TRAINING = ("train.py", "torchrun", "torch.distributed", "launch.agent", "benchmarks.kit.cluster", "tests.cuda")


class StartsRanks(Exception):
    """A test that is marked fast started what it must not."""


class Guard:
    """The plugin that refuses ranks to fast tests."""

    def __init__(self) -> None:
        self.fast: str | None = None  # the fast test that runs
        sys.addaudithook(self._hear)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if item.get_closest_marker("fast") is None:
            return (yield)
        self.fast = item.nodeid
        dist = sys.modules.get("torch.distributed")
        try:
            with ExitStack() as stack:
                stack.enter_context(mock.patch.object(distributed, "forbid", self.refuse))
                if dist is not None:
                    stack.enter_context(mock.patch.object(dist, "init_process_group", self.refuse))
                return (yield)
        finally:
            self.fast = None

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StartsRanks(f"{self.fast} is marked fast, but starts ranks or a training: take the mark away")

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and self.fast is not None:
            if any(name in str(word) for word in arguments[1] for name in TRAINING):
                self.refuse()
