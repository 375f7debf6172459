"""Rounds in which variants take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest

from benchmarks.kit import rounds
from benchmarks.kit.cluster import Cluster

pytestmark = pytest.mark.fast


class _OneRank:
    """Runs a variant here; the n-th call of one takes n times its seconds."""

    pids = ()

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if function is not rounds._timed:
            return []
        measured, (name, seconds) = args
        self.calls[name] += 1
        return [measured(seconds * self.calls[name])]


def test_only_contenders_run_after_the_first_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "is_disturbed", lambda before, after: False)
    cluster, variants = _OneRank(), {"near": ("near", 1.0), "far": ("far", 2.0)}
    result = rounds.measure_contenders(
        cast(Cluster, cluster), lambda seconds: {"step": seconds}, variants, rounds.FOR_ALL + 2, lambda first: {"near"}
    )
    assert result.num_rounds == 5 and result.seconds == {
        "near": {"step": [1.0, 2.0, 3.0, 4.0, 5.0]},
        "far": {"step": [2.0, 4.0, 6.0]},
    }
    assert result.speedup("near", "step", "far") == 2.0  # over the rounds that both ran in
    assert cluster.calls == {"near": 5, "far": 3}
