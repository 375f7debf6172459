"""The line that a process leaves for its launcher is whole, whoever speaks."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from base import exit_handler

pytestmark = pytest.mark.fast


def test_two_threads_that_speak_at_once_leave_one_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's launcher fails of a file that is not JSON, and then says that in place of the cause."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    lines = ["stopped", "config error: " + "a long line " * 4000]
    ended = threading.Event()

    def speak(line: str) -> None:
        while not ended.is_set():
            exit_handler._write_error_file(line, 2)

    threads = [threading.Thread(target=speak, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    try:
        while not path.exists():
            pass
        said = {json.loads(path.read_text())["message"]["message"] for _ in range(500)}
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert said <= set(lines) and not list(tmp_path.glob("*.tmp"))
