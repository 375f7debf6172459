"""The whole suite in several processes of pytest at once: `python -m tests.lanes [PYTEST ARGUMENT]...`.

Ranks wait for each other much of the time, and tests without ranks keep one core busy. So there is one lane more than
cores, as far as the memory goes. A lane claims the next file that no other has begun, and runs it whole: files of ranks
first, fast ones last, so that all lanes end at about the same time. What one lane prints is shown as it comes, that of
the others when they have ended. The exit status is 0 if all tests passed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
LANE_BYTES = 3 * 2**30  # that a lane takes at most, with its ranks
OUTCOMES = re.compile(r"(\d+) (passed|failed|skipped|error|xfailed|xpassed)")


class Lane:
    """The plugin of one process: it runs what no other process with the same folder has claimed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop says what is wrong
        items = self._claimed(session.items)
        item = next(items, None)
        while item is not None:
            following = next(items, None)  # what is torn down after a test depends on the next one
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def _claimed(self, items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
        units: dict[str, list[pytest.Item]] = {}
        for item in items:
            units.setdefault(unit_of(item.nodeid), []).append(item)
        # Stable: in the order of names, what is fast last.
        for unit in sorted(units, key=lambda unit: all(item.get_closest_marker("fast") for item in units[unit])):
            try:
                os.close(os.open(self.folder / unit.replace("/", "."), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            yield from units[unit]


def unit_of(nodeid: str) -> str:
    """What one lane runs as a whole: a file, or all of the pretended device, whose ranks take most memory."""
    file = nodeid.split("::")[0]
    return "tests/cuda" if file.startswith("tests/cuda/") else file


def num_lanes() -> int:
    """One more than cores, where the memory that is free is enough."""
    return max(1, min(len(os.sched_getaffinity(0)) + 1, psutil.virtual_memory().available // LANE_BYTES))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lanes", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--lanes", type=int, default=num_lanes(), help="how many (default here: %(default)s)")
    parser.add_argument(
        "--durations", type=Path, metavar="FOLDER", help="keep what each test takes: tests/durations.py"
    )
    arguments, for_pytest = parser.parse_known_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lanes-") as folder:
        statuses, outputs = _run(Path(folder), arguments.lanes, arguments.durations, for_pytest)
    counts = Counter[str]()
    for text in outputs:
        counts.update({word: int(count) for count, word in OUTCOMES.findall(text.rstrip().rpartition("\n")[2])})
    for number, status in enumerate(statuses, 1):
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            print(f"lane {number} ended with status {status}: what it had claimed did not all run")
    total = ", ".join(f"{count:,} {word}" for word, count in counts.items())
    print(f"{arguments.lanes} lanes: {total} in {time.monotonic() - begin:.0f} s")
    return max(statuses, key=abs)


def _run(folder: Path, num: int, durations: Path | None, for_pytest: Sequence[str]) -> tuple[list[int], list[str]]:
    """Run the lanes and show what they print: their exit statuses and outputs."""
    claims = folder / "claims"
    claims.mkdir()
    outputs = [folder / f"{number}.txt" for number in range(num)]
    processes = []
    for number, output in enumerate(outputs):
        command = [sys.executable, "-m", "pytest", f"--lane={claims}", *for_pytest]
        if durations is not None:
            durations.mkdir(parents=True, exist_ok=True)
            command.append(f"--durations-file={durations.absolute() / f'lane_{number + 1}.tsv'}")
        # Threads of one lane would take the others' cores, and burn them while they wait for each other.
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        with output.open("wb") as stream:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=stream, stderr=subprocess.STDOUT))
    try:
        _follow(processes[0], outputs[0])
        statuses = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
    texts = [output.read_text(errors="replace") for output in outputs]
    for number, text in enumerate(texts[1:], 2):
        print(f"\n--- lane {number}\n{text}")
    return statuses, texts


def _follow(process: subprocess.Popen[bytes], output: Path) -> None:
    """Show what a process writes to a file, until it ends."""
    with output.open(errors="replace") as stream:
        ended = False
        while not ended:
            ended = process.poll() is not None
            sys.stdout.write(stream.read())
            sys.stdout.flush()
            if not ended:
                time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
