"""Every claim's command runs. All of them: `bash launch/test.sh --claims`."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from benchmarks.kit import claims
from tests.waits import LONG

QUICK = [entry.smaller for entry in claims.smallest() if entry.is_quick]


@pytest.mark.fast
def test_every_command_of_a_claim_is_run_or_says_why_not() -> None:
    found = claims.smallest()
    assert len(found) > 80
    for entry in found:
        assert (entry.smaller is None) != (entry.not_run is None), entry.command
        words = (entry.smaller or "").split()
        if words[1:2] == ["-m"]:
            assert importlib.util.find_spec(words[2]), entry.smaller


@pytest.mark.parametrize("command", QUICK, ids=lambda command: " ".join(command.split()[2:4]))
def test_it_runs(command: str) -> None:
    outcome = claims.run(command, LONG)
    assert outcome.status == 0, outcome.stdout + outcome.stderr


@pytest.mark.fast
def test_a_command_that_fails_or_never_ends_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    entries = [
        claims.Smallest("python a", "python -c 'print(1)'", None, False, False),
        claims.Smallest("python b", "python -c 'raise SystemExit(\"no such case\")'", None, False, False),
        claims.Smallest("python d", None, "it needs a card", False, False),
    ]
    assert claims.run_all(entries) == 1
    output = capfd.readouterr().out
    assert "    no such case" in output
    assert "not run: python d: it needs a card" in output and "claims: 1 of 2 commands ran, 1 not run" in output
    monkeypatch.setattr(claims, "SECONDS", 1.0)
    endless = claims.Smallest("python c", "python -c 'import time; time.sleep(600)'", None, False, False)
    assert claims.run_all([endless]) == 1 and "stopped after 1 s" in capfd.readouterr().out


def test_a_bar_that_is_missed_is_no_fault(capfd: pytest.CaptureFixture[str]) -> None:
    missed = claims.Smallest("python a", "python -c 'raise SystemExit(1)'", None, False, False)
    raised = claims.Smallest("python b", "python -c 'raise ValueError'", None, False, False, has_bar=True)
    assert claims.run_all([missed, replace(missed, has_bar=True), raised]) == 2
    assert "claims: 1 of 3 commands ran" in capfd.readouterr().out
