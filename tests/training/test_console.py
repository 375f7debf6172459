"""What a person sees of a run that is going, on terminals of 100 and 80 columns and in a log."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import Config
from tests.distributed import ROOT
from tests.waits import LONG
from training.callbacks import evaluation
from training.callbacks.logging.console import ProgressLine, fitting
from training.progress import Progress
from training.resilience.health import Skip, SkippedSamples
from training.run import Run

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


class Terminal:
    """A pseudo terminal, and what stands on its screen in the end. `overflows` counts lines that ran over the right
    edge."""

    def __init__(self, columns: int):
        self.columns, self.overflows = columns, 0
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self._content = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                self._content += os.read(self._master, 65536)
            except OSError:  # nobody has the other end open any more
                return

    def screen(self) -> list[str]:
        """The lines, once all that had the terminal open have closed it."""
        self._thread.join(timeout=LONG)
        assert not self._thread.is_alive()
        os.close(self._master)
        screen_rows, row, column = [[" "] * self.columns], 0, 0
        for character in re.sub(r"\x1b\[[0-9;]*m", "", self._content.decode()):
            if character == "\r":
                column = 0
            elif character == "\n":
                row += 1
            else:
                assert character.isprintable(), repr(character)
                if column == self.columns:
                    row, column = row + 1, 0
                    self.overflows += 1
                while len(screen_rows) <= row:
                    screen_rows.append([" "] * self.columns)
                screen_rows[row][column] = character
                column += 1
            while len(screen_rows) <= row:
                screen_rows.append([" "] * self.columns)
        return ["".join(cells).rstrip() for cells in screen_rows]


def make_run(**training: Any) -> Run:
    config = Config()
    for key, value in training.items():
        setattr(config.training, key, value)
    nothing: Any = None
    run = Run(config, SimpleNamespace(rank=0), nothing, 384, nothing, nothing, nothing, nothing, nothing)  # type: ignore[arg-type]
    run.progress = Progress()
    return run


def metrics_of(step: int, seconds: float = 0.25) -> dict[str, Any]:
    values = {
        "step": step,
        "loss": 12.3456,
        "grad_norm": 1234.567,
        "learning_rate": 1.25e-4,
        "tokens": 500_000,
        "step_seconds": seconds,
    }
    return {**values, "tokens_per_second": 500_000 / seconds, "mfu": 0.5, "peak_memory_bytes": 150 << 30}


@pytest.mark.parametrize("columns", [100, 80])
def test_nothing_is_printed_into_the_bar(columns: int) -> None:
    terminal = Terminal(columns)
    with open(terminal.slave, "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        printed = _a_hundred_steps()
        assert (sys.stdout, sys.stderr) == (out, out)
        print("after the bar")
    lines = terminal.screen()
    wanted = [*printed, *(f"thread {i} says" for i in range(50)), "a warning of a library", "without a newline"]
    assert [line for line in wanted if lines.count(line) != 1] == [], lines
    (bar_line,) = [line for line in lines if "%|" in line]  # no other is left anywhere
    assert lines[-4:] == ["without a newline", bar_line, "after the bar", ""]
    assert bar_line.startswith("100%|██████████| 100000/100000 | eta 0:00:00 | loss 12.3456 | 2,000,000 tok/s")
    assert ("grad 1234.567" in bar_line) == (columns == 100) and len(bar_line) < columns
    assert len(lines) == len(wanted) + 3 and terminal.overflows == 0


def _a_hundred_steps() -> list[str]:
    """Steps with a bar, lines, and a thread that speaks all the time; the lines."""
    run, bar, printed = make_run(steps=100_000), ProgressLine(), ["checkpoint saved"]

    def speak_all_the_time() -> None:
        for i in range(50):
            sys.stderr.write(f"thread {i} ")
            sys.stderr.write("says\n")

    run.progress.step = 99_900
    bar.on_start(run)
    run.log(printed[0])
    speaker = threading.Thread(target=speak_all_the_time)
    speaker.start()
    for step in range(99_901, 100_001):
        run.progress.step = step
        bar.after_step(run, metrics_of(step))
        if step % 10 == 0:
            printed.append(f"line {step}")
            run.log(printed[-1])
    speaker.join()
    assert logging.lastResort is not None  # which shows what nobody has set up logging for
    logging.lastResort.handle(
        logging.LogRecord("somewhere", logging.WARNING, "", 1, "a warning of a library", None, None)
    )
    print("without a newline", end="")
    bar.close()
    return printed


def test_rates_are_means_and_lines_have_stamps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, log = make_run(steps=4), ProgressLine()
    for step, seconds in enumerate([100.0, 1.0, 3.0, 1.0], 1):  # the first has the start in it
        run.progress.step = step
        log.after_step(run, metrics_of(step, seconds))
    captured = capsys.readouterr()
    assert captured.err == "" and "\r" not in captured.out
    first, last = captured.out.splitlines()
    assert re.match(rf"{STAMP} step 1/4 \| loss 12.3456 \| 5,000 tok/s \| .* \| eta 0:05:00$", first), first
    assert re.match(
        rf"{STAMP} step 4/4 \| loss 12.3456 \| 300,000 tok/s \| .* \| MFU 30.0% \| 150.00 GiB \| eta 0:00:00$", last
    ), last


def test_what_is_placed_and_offloaded_has_one_number_each(capsys: pytest.CaptureFixture[str]) -> None:
    memory = {"layer_inputs_host": 3 << 30, "layer_inputs_device_peak": 5, "host": 7}
    placed = {"placement": {"at_home": 2.5, "placed": 1.125, "copies": 4}, "memory": memory}
    for more in (placed, {"placement": {"at_home": None, "placed": None}, "memory": {"host": 7}}, {}):
        run = make_run(steps=1)
        ProgressLine().after_step(run, metrics_of(1) | more)
    lines = capsys.readouterr().out.splitlines()
    assert "GiB | busiest rank 1.12x | offload 3,072 MiB | eta" in lines[0]
    assert all("busiest" not in line and "offload" not in line for line in lines[1:])


def test_each_validation_loss_has_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    entropies = {2: 4.5, 4: 4.5, 5: 2.5}
    monkeypatch.setattr(evaluation, "evaluate", lambda run, make: (make(), {}, entropies[run.progress.step], {}))
    run, callback = make_run(steps=5, eval_interval=2), evaluation.Evaluation()
    run.make_validation_loaders = {evaluation.HELD_OUT: lambda: 3.0}
    run.config.model.sequence_length = 100
    run.skipped = SkippedSamples(Path(), [Skip(8, 16, 2, "a spike"), Skip(1000, 1008, 9, "not yet")])
    for step in range(1, 6):
        run.progress = Progress(step, 8 * step + (8 if step > 1 else 0))
        callback.after_step(run, {"step": step})
    lines = capsys.readouterr().out.splitlines()
    seen = [re.fullmatch(rf"{STAMP} step (\d)/5 \| ([\d,]+) tokens \| (validation loss .*)", line) for line in lines]
    assert [match and match.groups() for match in seen] == [
        ("2", "1,600", "validation loss 3.0000 nats, 1.5000 below the unigram entropy of the same tokens (4.5000)"),
        ("4", "3,200", "validation loss 3.0000 nats, 1.5000 below the unigram entropy of the same tokens (4.5000)"),
        ("5", "4,000", "validation loss 3.0000 nats, 0.5000 above the unigram entropy of the same tokens (2.5000)"),
    ]
    run.make_validation_loaders = {"wiki": lambda: 2.0, "code.v2": lambda: 4.0}
    callback.after_step(run, metrics := {"step": 5})
    lines = capsys.readouterr().out.splitlines()
    assert "| validation loss of wiki 2.0000 nats, 0.5000 below the unigram entropy of the same" in lines[0]
    assert "| validation loss of code.v2 4.0000 nats, 1.5000 above the unigram entropy of the same" in lines[1]
    assert metrics["valid/wiki/loss"] == 2.0 and metrics["valid/code.v2/unigram_entropy"] == 2.5
    assert len(metrics) == 5


def test_what_fits() -> None:
    assert fitting(["12/20", "eta 1", "loss"], 13) == "12/20 | eta 1"
    assert fitting(["12/20", "eta 1", "loss"], 12) == "12/20"
    assert fitting(["12/20"], 3) == "12/" and fitting([], 3) == ""


def test_a_run_on_a_terminal(tmp_path: Path, data: list[str]) -> None:
    terminal = Terminal(100)
    settings = [
        *(
            "model=gpt_tiny",
            "training.steps=6",
            "training.eval_interval=2",
            "training.eval_batches=1",
            "checkpoint.interval=3",
        ),
        *(
            "model.sequence_length=32",
            "model.hidden_size=32",
            "logging.wandb=auto",
            "sample.prompts=[]",
            f"run_dir={tmp_path}/run",
        ),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")} | {
        "HOME": str(tmp_path)
    }
    command, end = [sys.executable, "train.py", *settings, *data], terminal.slave
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=end, stdout=end, stderr=end)
    os.close(terminal.slave)
    assert process.wait(timeout=LONG) == 0
    lines = terminal.screen()
    text = "\n".join(lines)
    assert lines[0] == "Loading torch and Megatron-core ..."  # seconds, in which nothing else is said
    assert len(re.findall(rf"^{STAMP} step [246]/6 \| [\d,]+ tokens \| validation loss", text, re.M)) == 3, text
    assert len(re.findall(r"^checkpoint .*$", text, re.M)) == 2, text
    assert not re.search("wandb|warning|deprecat", text.replace(str(tmp_path), ""), re.I), text
    assert sum("%|" in line for line in lines if not line.startswith("tokenizing")) == 1, text
    (folder,) = (tmp_path / "run/wandb").glob("offline-run-*")
    assert folder.name.endswith(f"-{json.loads((tmp_path / 'run/run.json').read_text())['id']}")
    assert json.loads((tmp_path / "run/environment.json").read_text())["ranks"] == 1
