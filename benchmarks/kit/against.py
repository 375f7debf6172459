"""Compare the time or a figure of a command in this working tree with that at another commit.

    python -m benchmarks.kit.against COMMIT [--rounds 10] [--figure REGEX] [--json] -- COMMAND

Both trees are copied into a temporary folder: COMMIT, and this working tree as it is, with what is not committed. In
each round the command runs once in either, in a fresh process, in the other order than in the round before. The result
is the mean of the rounds' ratios new / old (geometric), with its standard error. A command that runs train.py needs a
folder of its own each time: write {folder} for it, as in `python train.py run_dir={folder}`. What a command leaves in
its tree, as a prepared corpus in cache/, is there in the next round; the first round warms up and does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SHOWN_CHARACTERS = 200  # of a failed command's last line


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Values of both trees by round: seconds, or the figure. `ratio`: new / old."""

    old: list[float]
    new: list[float]

    @property
    def _logs(self) -> list[float]:
        return [math.log(new / old) for old, new in zip(self.old, self.new, strict=True)]

    @property
    def ratio(self) -> float:
        return math.exp(statistics.fmean(self._logs))

    @property
    def standard_error(self) -> float:
        """Standard error of the ratio, from how the rounds' ratios scatter."""
        return self.ratio * statistics.stdev(self._logs) / math.sqrt(len(self.old))


class Failure(RuntimeError):
    """A command failed, or its output has no figure."""


def compare(
    trees: dict[str, Path],
    command: Sequence[str],
    *,
    rounds: int,
    warm_up: int = 1,
    figure: str | None = None,
    timeout: float = 3600,
) -> Comparison:
    """Run the command in turns in trees["old"] and trees["new"]. timeout: seconds for one process. Raises Failure."""
    values: dict[str, list[float]] = {"old": [], "new": []}
    for number in range(-warm_up, rounds):
        for name in ("old", "new") if number % 2 else ("new", "old"):
            value = _run_once(name, trees[name], command, figure, timeout)
            if number >= 0:
                values[name].append(value)
        if number >= 0:
            old, new = values["old"][-1], values["new"][-1]
            print(f"round {number + 1:3d}: old {old:.6g}, new {new:.6g}, new / old {new / old:.4f}", flush=True)
    return Comparison(values["old"], values["new"])


def _run_once(name: str, tree: Path, command: Sequence[str], figure: str | None, timeout: float) -> float:
    """Return the seconds of one run, or the figure in its output."""
    folder = tree.parent / "folder"
    folder.mkdir()
    words = [word.replace("{folder}", str(folder)) for word in command]
    path = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), os.environ.get("PATH")]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(tree)}
    try:
        with tempfile.TemporaryFile() as output:
            begin = time.perf_counter()
            try:
                process = subprocess.Popen(
                    words,
                    cwd=tree,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise Failure(f"{words[0]}: {error.strerror}") from error
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise Failure(f"the command did not end within {timeout:g} s in the {name} tree (--timeout)") from None
            finally:  # with all that it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            seconds = time.perf_counter() - begin
            output.seek(0)
            text = output.read().decode(errors="replace")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    last = (text.strip().splitlines() or ["nothing"])[-1][:SHOWN_CHARACTERS]
    if status:
        raise Failure(f"the command ended with status {status} in the {name} tree; it said last: {last}")
    return seconds if figure is None else _figure(figure, text, name, last)


def _figure(figure: str, text: str, name: str, last: str) -> float:
    """Return the number in the last match of `figure`: its first group, or all of it."""
    found: re.Match[str] | None = None
    for found in re.finditer(figure, text, re.MULTILINE):  # noqa: B007 - the last one is wanted
        pass
    if found is None:
        raise Failure(f"--figure {figure}: no such text in the output of the {name} tree; its last line: {last}")
    number = found[1] if found.re.groups else found[0]
    try:
        value = float(number.replace(",", ""))
    except (ValueError, AttributeError):
        raise Failure(f"--figure {figure}: {number!r} in the output of the {name} tree is no number") from None
    if not 0 < value < math.inf:
        raise Failure(f"--figure {figure}: it is {value} in the {name} tree; a ratio needs numbers above 0")
    return value


@contextlib.contextmanager
def two_trees(repository: Path, commit: str) -> Iterator[dict[str, Path]]:
    """Worktrees of `commit` ("old") and of the working tree as it is now ("new"), in a temporary folder that goes at
    the end."""
    scratch = Path(tempfile.mkdtemp(prefix="against-"))
    trees = {"old": scratch / "old", "new": scratch / "new"}
    try:
        _git(repository, "worktree", "add", "--detach", "--quiet", str(trees["old"]), commit)
        _git(repository, "worktree", "add", "--detach", "--quiet", str(trees["new"]), "HEAD")
        _copy_changes(repository, trees["new"])
        for tree in trees.values():
            if (repository / ".venv").exists() and not (tree / ".venv").exists():
                (tree / ".venv").symlink_to((repository / ".venv").resolve())
        yield trees
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C
        for tree in trees.values():
            with contextlib.suppress(Failure):  # it was not made
                _git(repository, "worktree", "remove", "--force", str(tree))
        shutil.rmtree(scratch, ignore_errors=True)
        signal.signal(signal.SIGINT, before)


def changes(repository: Path) -> list[str]:
    """Files of the working tree that HEAD has otherwise or not at all, without those that git ignores."""
    changed = _git(repository, "diff", "--name-only", "--no-renames", "-z", "HEAD")
    new = _git(repository, "ls-files", "--others", "--exclude-standard", "-z")
    return [name for name in (changed + new).split("\0") if name]


def _copy_changes(repository: Path, tree: Path) -> None:
    for name in changes(repository):
        source, target = repository / name, tree / name
        if target.is_symlink() or target.is_file():
            target.unlink()
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def _git(folder: Path, *arguments: str) -> str:
    """Return the output of git. A Ctrl-C takes effect after git has ended, so that no worktree is left incomplete.
    Raises Failure."""
    command = ["git", "-C", str(folder), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=600)
    except BaseException:
        process.communicate(timeout=600)
        raise
    if process.returncode:
        raise Failure(f"{' '.join(command)}: {(errors.strip().splitlines() or ['failed'])[-1]}")
    return output


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = _options(arguments[:end]), arguments[end + 1 :]
    if not command:
        print("error: no command; give it after --, as in: -- python train.py run_dir={folder}", file=sys.stderr)
        return 2
    try:
        repository = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel").strip())
        head = _git(repository, "rev-parse", "HEAD").strip()
    except Failure as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        commit = _git(repository, "rev-parse", "--verify", "--end-of-options", f"{options.commit}^{{commit}}").strip()
    except Failure:
        print(f"error: {repository} has no commit {options.commit}; `git log` lists them", file=sys.stderr)
        return 2
    modified = changes(repository)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with two_trees(repository, commit) as trees:
            made = compare(
                trees,
                command,
                rounds=options.rounds,
                warm_up=options.warm_up,
                figure=options.figure,
                timeout=options.timeout,
            )
    except Failure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    what = "seconds" if options.figure is None else options.figure
    here = f"{head[:10]}{f' with {len(modified)} changed files' if modified else ''}"
    print(
        f"old {commit[:10]}: {statistics.median(made.old):.6g}; new {here}: {statistics.median(made.new):.6g} (medians "
        f"of {what})"
    )
    print(f"new / old {made.ratio:.4f} +- {made.standard_error:.4f} over {options.rounds} rounds")
    if options.json:
        print(json.dumps(_as_dict(made, commit, head, modified, command, options.figure)))
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kit.against",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("commit", help="a commit, branch or tag to compare with")
    parser.add_argument("--rounds", type=int, default=10, help="that count; 10 by default, even numbers are best")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before those; 1 by default")
    parser.add_argument(
        "--figure", help="a regular expression: compare the number of its last match in the output, not the time"
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one run of the command")
    parser.add_argument("--json", action="store_true", help="the result as JSON on the last line")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: a standard error needs 2 rounds or more")
    if options.warm_up < 0:
        parser.error(f"--warm-up {options.warm_up}: must be 0 or more")
    if options.figure is not None:
        try:
            re.compile(options.figure)
        except re.error as error:
            parser.error(f"--figure {options.figure}: no regular expression ({error})")
    return options


def _as_dict(
    made: Comparison, commit: str, head: str, modified: list[str], command: Sequence[str], figure: str | None
) -> dict[str, Any]:
    return {
        "commit": commit,
        "head": head,
        "modified": modified,
        "command": list(command),
        "figure": figure,
        "old": made.old,
        "new": made.new,
        "ratio": made.ratio,
        "standard_error": made.standard_error,
    }


if __name__ == "__main__":
    sys.exit(main())
