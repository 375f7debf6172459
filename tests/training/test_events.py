"""What happened to a run is on record, also after a kill in the middle of a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.resilience import events

pytestmark = pytest.mark.fast


def test_events_come_back_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert events.read(tmp_path) == []
    events.record(tmp_path, "checkpoint_saved", "checkpoint of step 5", step=5)
    with open(tmp_path / events.EVENTS, "a") as stream:
        stream.write('{"time": 1.0, "ki\n')  # a kill cut it off, and the next process wrote on
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    events.record(tmp_path, "resumed", "resumed at step 5", step=5)
    first, second = events.read(tmp_path)
    assert (first["kind"], first["step"], first["rank"], first["text"]) == (
        "checkpoint_saved",
        5,
        0,
        "checkpoint of step 5",
    )
    assert (second["kind"], second["rank"]) == ("resumed", 3) and second["time"] >= first["time"]


def test_an_event_that_cannot_be_written_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(events, "EVENTS", "/dev/full")
    events.record(tmp_path, "resumed", "a line")
    message = capsys.readouterr().err
    assert "/dev/full cannot be written: No space left on device." in message and message.endswith(
        "The event was resumed: a line\n"
    )
