"""Measure what this machine's GPU does with Mixtrain, in order of value, and stop in time:
`python -m benchmarks.card [--seconds 540] [--only WORD ...] [--results DIR] [--small] [--list] [--table]`.

A rung is one thing to measure: it costs at most a minute, and its result is written at once into card.jsonl under
--results. The next call goes on: first with what was never measured on this kind of card, then with figures whose code
has changed since, last with what failed. Nothing is begun that would not end in time. `bash launch/gpu_check.sh` sets
`.venv` up first and counts its seconds from there.

Rungs share one process, which has imported everything and started CUDA once; another process starts it, ends it when
the time is up, and starts it again where a rung brought it down. The exit status is 0 if all rungs of this call went
well, 1 if one did not, and 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from base.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FILE = "card.jsonl"
GRACE = 0.04  # of the seconds: so much later the rungs' process is killed
MOST_LEFT = 2**30  # bytes of the device that a rung may leave allocated; of more the process is begun anew
LEAST_LEFT = 15.0  # seconds that are worth another start of the process
MOST_STARTS = 5
NO_GPU = (
    "card: no GPU: torch {torch} sees none here. A machine with an NVIDIA GPU, its driver and a CUDA build of torch "
    "was expected; where the system's Python has such a torch, use --system-torch. With --small all of it runs on a CPU"
)
# Packages that later rungs import, read from the disk while the first rung runs.
READ_AHEAD = ("torch", "nvidia", "triton", "megatron", "transformers", "safetensors", "tokenizers", "numpy")


def supervise(arguments: argparse.Namespace, end: float) -> int:
    """Run the rungs' process until it ends or the time is up. end: in time.time's seconds."""
    last = end + GRACE * arguments.seconds
    status = 1
    for _ in range(MOST_STARTS):
        command = [sys.executable, "-m", "benchmarks.card", "--worker", str(end), *sys.argv[1:]]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = process.wait(timeout=max(0.0, last - time.time()))
        except subprocess.TimeoutExpired:
            print("card: the time is up: the rungs' process is killed; rows stand", file=sys.stderr, flush=True)
            return 1
        except KeyboardInterrupt:
            print("card: interrupted; rows stand, and the next call goes on", file=sys.stderr, flush=True)
            return 128 + signal.SIGINT
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            process.wait()
        if status in (0, 1, 2) or end - time.time() < LEAST_LEFT:
            break
        print(f"card: the rungs' process ended with status {status}; starting it again", file=sys.stderr, flush=True)
    return status if status in (0, 1, 2) else 1


def machine(is_small: bool) -> dict[str, Any] | None:
    """Return the device's name and versions of driver, torch and Python; None without a GPU, unless sizes are tiny."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": torch.cuda.get_device_name(0),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
            "cuda": torch.version.cuda or "none",
            "driver": _line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    elif is_small:
        found["device"] = "CPU"
    else:
        return None
    return found


def commit() -> str:
    """Return the working tree's commit, with `+` where it has changes; `unknown` in a copy without git."""
    found = _line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    changes = _line("git", "-C", str(ROOT), "status", "--porcelain", "-uno")
    return f"{found}{'+' * (found != 'unknown' and changes not in ('unknown', ''))}"


def _line(*command: str) -> str:
    """Return the first line that a command prints, `` if it prints none, `unknown` if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if done.returncode != 0:
        return "unknown"
    return done.stdout.splitlines()[0] if done.stdout else ""


def read_ahead(stop: threading.Event) -> None:
    """Read the packages of later rungs into the page cache: a cold disk is slower than most rungs."""
    import importlib.util

    for name in READ_AHEAD:
        found = importlib.util.find_spec(name)
        for folder in found.submodule_search_locations or [] if found else []:
            for path in sorted(Path(folder).rglob("*")):
                if stop.is_set():
                    return
                if path.suffix in (".py", ".so", ".pyc") or ".so." in path.name:
                    try:
                        with open(path, "rb") as file:
                            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
                    except OSError:
                        continue


def work(arguments: argparse.Namespace, end: float) -> int:
    """Measure, in the rungs' process, until `end`, in time.time's seconds."""
    from base.exit_handler import end_with_caller
    from benchmarks.card.ladder import Walk

    end_with_caller()
    stop = threading.Event()
    if not arguments.small:
        threading.Thread(target=read_ahead, args=(stop,), daemon=True).start()
    prepare()
    from benchmarks.card.records import Records, kind_of_card
    from benchmarks.card.rungs import by_name, rungs

    chosen = by_name(arguments.only, rungs(arguments.small))
    found = machine(arguments.small)
    if found is None:
        import torch

        print(NO_GPU.format(torch=torch.__version__), file=sys.stderr)
        return 2
    kept, card = Records(arguments.results / FILE), kind_of_card(found["device"], arguments.small)
    print(f"card: {card}, torch {found['torch']}, {end - time.time():.0f} s left", flush=True)
    walk = Walk(kept, card, found, arguments.commit or commit(), time.monotonic() + end - time.time(), arguments.small)
    left = walk.run(chosen, clear)
    stop.set()
    counts = {status: list(walk.ended.values()).count(status) for status in sorted(set(walk.ended.values()))}
    print(f"card: {json.dumps(counts)} of {len(chosen)} rungs; {left}; results in {kept.path}", flush=True)
    return 1 if set(walk.ended.values()) & {"failed", "late"} else 0


def clear() -> None:
    """Free the memory that a rung has left, on the device and pinned on the host.

    If the device is broken, or a rung that failed still holds its model, end this process, so that a new one is
    started.
    """
    import torch

    from benchmarks.card.ladder import BROKEN

    gc.collect()
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # torch 2.11 and 2.13 have no public call for pinned memory.
        for name in ("_host_emptyCache", "_accelerator_emptyHostCache"):
            if torch.backends.cuda.is_built() and hasattr(torch._C, name):  # a pretended device has none
                getattr(torch._C, name)()
                break
        left = torch.cuda.memory_allocated()
    except RuntimeError as error:
        print(f"card: the device is broken: {error}".splitlines()[0], file=sys.stderr, flush=True)
        os._exit(BROKEN)
    if left > MOST_LEFT:
        print(f"card: a rung left {left / 2**30:.1f} GiB on the device", file=sys.stderr, flush=True)
        os._exit(BROKEN)


def prepare() -> None:
    """Set the environment variables that CUDA and its allocator read at their start, as a training does."""
    from configs.compose import compose
    from parallel import card

    card.set_environment(compose(["experiment=llama3_8b", "parallel=single", "training.device=auto"]))
    for name, value in (("OMP_NUM_THREADS", str(os.cpu_count() or 1)), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(name, value)


def check(arguments: argparse.Namespace) -> None:
    """Refuse arguments that would end a call after its imports. Raises ConfigError."""
    from benchmarks.card.records import Records

    Records(arguments.results / FILE)
    try:
        arguments.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--results ({arguments.results}) cannot be made: {error.strerror}. Give a folder that can be written."
        ) from None


@contextlib.contextmanager
def sole_call(folder: Path) -> Iterator[None]:
    """Keep other calls off a folder of results, since each writes the whole file. Raises ConfigError if another call
    runs."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another call writes its results to {folder}. Wait for its end, or give another --results."
            ) from None
        yield
    finally:
        os.close(descriptor)


def show_tables(arguments: argparse.Namespace) -> None:
    """Print the results as Markdown. Raises ConfigError."""
    from benchmarks.card.records import Records
    from benchmarks.card.tables import page

    text = page(Records(arguments.results / FILE))
    sys.stdout.buffer.write(text.encode())


def show_list(arguments: argparse.Namespace) -> int:
    """Print each rung with its turn, its cost and its state."""
    from benchmarks.card.ladder import listing, state
    from benchmarks.card.records import Records, kind_of_card
    from benchmarks.card.rungs import by_name, rungs
    from benchmarks.kit.tables import table

    found = machine(arguments.small)
    card = "no GPU here" if found is None else kind_of_card(found["device"], arguments.small)
    kept = Records(arguments.results / FILE)
    torch_version = "" if found is None else found["torch"]
    states = [state(rung, kept, card, torch_version) for rung in by_name(arguments.only, rungs(arguments.small))]
    print(f"card: {card}")
    print(table(["turn", "rung", "seconds", "state"], listing(states), markdown=False))
    return 0


def main() -> int:
    began = time.time()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--since", type=float, default=began, help=argparse.SUPPRESS)  # of gpu_check.sh, epoch seconds
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rungs whose name has one of these words")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of card.jsonl")
    parser.add_argument("--commit", help="that the results name; default: git's, where the tree is a clone")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a device without speed, or a CPU")
    parser.add_argument("--list", action="store_true", help="print the rungs with cost and state, and measure nothing")
    parser.add_argument("--table", action="store_true", help="print the results as Markdown, and measure nothing")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.seconds > 0:
        parser.error(f"--seconds {arguments.seconds:g} must be more than 0, such as 540")
    if arguments.table and arguments.only:
        parser.error("--only goes with measuring and with --list, not with --table")
    try:
        if arguments.list:
            return show_list(arguments)
        if arguments.table:
            show_tables(arguments)
            return 0
        if arguments.worker is not None:
            return work(arguments, arguments.worker)
        check(arguments)
        with sole_call(arguments.results):
            return supervise(arguments, arguments.since + arguments.seconds)
    except (ConfigError, OSError) as error:
        print(f"card: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
