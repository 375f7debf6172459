"""The ring against mapping on a throttled disk: `python -m benchmarks.speed.ring_speed [--models llama qwen3_moe]
[--rate 400] [--rounds 5] [--read-ahead 128] [--folder DIR] [--json]`. Needs root: limits are control groups.

A is `python -m inference.generate` in a memory group, B the same decoder over the pages of the files in a group of the
same limit, which its page cache counts against. Both read a folder of logical weights, whose tensors are the decoder's
own. They run in turns, with a dropped page cache; a ratio is of the two runs of a round. Seconds are of a token after
the first, without prefill. The limit is the peak of A with a one-layer model, and a quarter of the weights.

How much mapping reads around a page that it misses is the disk's setting (read_ahead_kb, Linux has 128): the table says
it. `--read-ahead` makes a disk of its own for the models, a file behind a loop device, that has this one.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kit.cgroups import CgroupOutcome, can_limit_disk, can_limit_memory, disk_of
from benchmarks.kit.ring_rig import (
    MIB,
    MadeModel,
    budget_arguments,
    default_gigabytes,
    disk_rate,
    generate_arguments,
    generate_command,
    last_line,
    make_models,
    models_folder,
    peak_of,
    rig_parser,
    run_cold,
    tokens_of,
)
from benchmarks.kit.rounds import standard_error
from benchmarks.kit.tables import headline, line
from benchmarks.kit.token_times import TokenTimes, read_times


def read_ahead_kib(path: Path) -> int:
    """How much the kernel reads at a time of files on the disk of `path`, KiB."""
    return int(Path(f"/sys/dev/block/{disk_of(path)}/queue/read_ahead_kb").read_text())


@contextlib.contextmanager
def loop_disk(folder: Path, num_bytes: int, read_ahead: int) -> Iterator[Path]:
    """Mount point of an ext4 disk of `num_bytes` in `folder`, read `read_ahead` KiB at a time. Reads of it go past the
    page cache of the file that it is in. Nothing is left of it after."""
    image, mount = folder / "loop-disk.img", folder / "loop-disk"
    with contextlib.ExitStack() as stack:
        stack.callback(image.unlink, missing_ok=True)
        with image.open("wb") as file:
            file.truncate(num_bytes)
        _call("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        device = _call("losetup", "--direct-io=on", "--find", "--show", str(image))
        stack.callback(_call, "losetup", "--detach", device)
        Path(f"/sys/block/{Path(device).name}/queue/read_ahead_kb").write_text(str(read_ahead))
        mount.mkdir()
        stack.callback(mount.rmdir)
        _call("mount", device, str(mount))
        stack.callback(_call, "umount", str(mount))
        yield mount


def _call(*command: str) -> str:
    """Run a command and return its output. Raises RuntimeError with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


RING, MAPPING = "ring", "mapping"
OF_DISK, DENSE_RATIO, MOE_RATIO = 0.9, 1.4, 2.0  # what the ring is to reach


@dataclass(frozen=True)
class TimedRun:
    """A run of one of the two; no times where it failed."""

    outcome: CgroupOutcome
    times: TokenTimes | None
    tokens: list[int] | None


@dataclass(frozen=True)
class RingSpeed:
    """Medians of one model. `disk_share` is the time in which the disk reads what a token of the ring reads, over the
    time that the token takes; ratios are mapping's seconds over the ring's."""

    model: str
    is_moe: bool
    weights_bytes: int
    limit_bytes: int
    read_ahead_kib: int
    disk_rate: float  # bytes per second, measured under the limit
    seconds: dict[str, float]  # of a token after the first
    token_bytes: dict[str, float]
    prefill_seconds: dict[str, float]
    begin_seconds: dict[str, float]
    disk_share: float
    ratio: float
    ratio_error: float
    same_tokens: bool

    @property
    def problems(self) -> list[str]:
        """Which bars it does not reach."""
        bar = MOE_RATIO if self.is_moe else DENSE_RATIO
        found = [] if self.same_tokens else ["other tokens than mapping's"]
        if self.ratio < bar:
            found.append(f"{self.ratio:.2f} times mapping, not {bar}")
        if not self.is_moe and self.disk_share < OF_DISK:
            found.append(f"{self.disk_share:.2f} of the disk's rate, not {OF_DISK}")
        return found


def timed_run(way: str, model: MadeModel, num_tokens: int, rest: list[str], limit: int, rate: float | None) -> TimedRun:
    """One run of `ring` or `mapping`."""
    arguments = generate_arguments(model.full, num_tokens, rest if way == RING else [])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        command = [sys.executable, "-m", "benchmarks.kit.token_times", str(file)]
        command += [*(["--mapped"] if way == MAPPING else []), "--", *arguments]
        outcome = run_cold(command, model.full, memory_bytes=limit, rate=rate)
        return TimedRun(outcome, read_times(file) if outcome.status == 0 else None, tokens_of(outcome))


def measure_speed(
    model: MadeModel, rest: list[str], limit: int, rate: float | None, rounds: int, num_tokens: int
) -> RingSpeed:
    """Both in turns. Raises RuntimeError where one fails."""
    runs: dict[str, list[TimedRun]] = {RING: [], MAPPING: []}
    for index in range(rounds):
        for way in (RING, MAPPING) if index % 2 == 0 else (MAPPING, RING):
            run = timed_run(way, model, num_tokens, rest, limit, rate)
            if run.times is None:
                raise RuntimeError(
                    f"{way} of {model.family} in {limit / MIB:.0f} MiB: {run.outcome.verdict()}; it said last: "
                    f"{last_line(run.outcome.stderr)}"
                )
            runs[way].append(run)
            print(f"    {way}: {run.times.token_seconds:.3f} s a token after the first", file=sys.stderr, flush=True)
    times = {way: [run.times for run in each if run.times is not None] for way, each in runs.items()}
    pairs = zip(times[MAPPING], times[RING], strict=True)
    ratios = [mapping.token_seconds / ring.token_seconds for mapping, ring in pairs]
    measured_rate = disk_rate(model.full, rate)
    return RingSpeed(
        model.family,
        model.is_moe,
        model.num_bytes,
        limit,
        read_ahead_kib(model.full),
        measured_rate,
        {way: statistics.median(each.token_seconds for each in times[way]) for way in times},
        {way: statistics.median(each.token_bytes for each in times[way]) for way in times},
        {way: statistics.median(each.prefill_seconds for each in times[way]) for way in times},
        {way: statistics.median(each.begin for each in times[way]) for way in times},
        statistics.median(each.token_bytes / measured_rate / each.token_seconds for each in times[RING]),
        statistics.median(ratios),
        standard_error(ratios),
        all(run.tokens == runs[RING][0].tokens for each in runs.values() for run in each),
    )


def main() -> int:
    parser = rig_parser(__doc__, ["llama", "qwen3_moe"])
    parser.add_argument("--tokens", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=400.0, help="MB/s that the disk is held to (400); 0: as it is")
    parser.add_argument("--read-ahead", type=int, metavar="KIB", help="of a disk made for the models")
    parser.add_argument("--limit", type=int, metavar="MIB", help="of both groups, in place of the one-layer peak")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(models_folder(options.folder))
        reason = can_limit_memory() or can_limit_disk(folder)
        if reason is not None:
            print(f"skipped: {reason}")
            return 0
        if options.read_ahead is not None:
            size = sum(options.gigabytes or default_gigabytes(name) for name in options.models)
            folder = stack.enter_context(loop_disk(folder, int(size * 1.4e9) + 2 * 10**9, options.read_ahead))
        headings = ["model", "GB", "limit MiB", "read-ahead KiB", "disk MB/s", "ring s", "mapping s", "ring MB/token"]
        headings += ["mapping", "ring prefill s", "mapping", "of disk", "times mapping", "tokens", "bars"]
        print(headline(headings, markdown=False))
        rate = options.rate * 1e6 or None
        rest = budget_arguments(options)
        results: list[RingSpeed | None] = []
        for family in options.models:
            model = make_models(folder, family, options.gigabytes, options.dtype, logical=True)
            limit = (options.limit or 0) * MIB
            if not limit:
                one = run_cold(generate_command(model.one, options.tokens, rest), model.one)
                limit = peak_of(one, options.without_pages) + model.num_bytes // 4
            try:
                row = measure_speed(model, rest, limit, rate, options.rounds, options.tokens)
            except RuntimeError as error:
                print(f"{error}", flush=True)
                results.append(None)
                continue
            results.append(row)
            cells = [row.model, f"{row.weights_bytes / 1e9:.2f}", f"{row.limit_bytes / MIB:.0f}"]
            cells += [str(row.read_ahead_kib), f"{row.disk_rate / 1e6:.0f}"]
            cells += [f"{row.seconds[way]:.3f}" for way in (RING, MAPPING)]
            cells += [f"{row.token_bytes[way] / 1e6:.0f}" for way in (RING, MAPPING)]
            cells += [f"{row.prefill_seconds[way]:.2f}" for way in (RING, MAPPING)]
            cells += [f"{row.disk_share:.2f}", f"{row.ratio:.2f} +- {row.ratio_error:.2f}"]
            cells += ["same" if row.same_tokens else "OTHER", "; ".join(row.problems) or "met"]
            print(line(cells, headings, markdown=False), flush=True)
    if options.json:
        print(json.dumps([None if row is None else asdict(row) for row in results]))
    return 0 if all(row is not None and not row.problems for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
