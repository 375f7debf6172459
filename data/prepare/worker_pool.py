"""A pool of worker processes that decompress and tokenize."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

from base import progress
from base.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
Message = dict[str, Any]  # sent to a worker as JSON


def run_jobs(
    jobs: list[Message], settings: Message, num_workers: int, timeout: float, verb: str, ready: int, shown: bool
) -> None:
    """Run jobs in worker processes, each of which receives `settings` first. verb: word for the work in messages.
    ready: bytes already done, at which the progress bar begins. shown: show the bar. Raises an error if a job fails, or
    if a worker dies or hangs."""
    if not jobs:
        return
    # One thread per worker, since there is a worker per core.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    pending = list(enumerate(jobs))[::-1]
    processes: list[subprocess.Popen[bytes]] = []
    selector = selectors.DefaultSelector()
    total = ready + sum(job["size"] for job in jobs)
    try:
        with progress.bar(total, verb, ready, shown) as bar:
            for _ in range(min(num_workers, len(jobs))):
                command = [sys.executable, "-m", "data.worker"]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
                processes.append(process)
                assert process.stdout
                selector.register(process.stdout, selectors.EVENT_READ, process)
                _send(process, settings)
                number, job = pending.pop()
                _send(process, {"job": number, **job})
            running = len(processes)
            while running:
                events = selector.select(timeout)
                if not events:
                    raise TimeoutError(
                        f"{verb}: no worker finished a shard within {timeout} s (data.timeout_seconds). Raise "
                        "data.timeout_seconds"
                    )
                for key, _ in events:
                    process = key.data
                    bar.update(jobs[_finished_job(process, verb)]["size"])
                    if pending:
                        number, job = pending.pop()
                        _send(process, {"job": number, **job})
                    else:
                        selector.unregister(process.stdout)
                        process.stdin.close()
                        running -= 1
    finally:
        selector.close()
        _end(processes)


def _send(process: subprocess.Popen[bytes], message: Message) -> None:
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed when its answer is read
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()


def _finished_job(process: subprocess.Popen[bytes], verb: str) -> int:
    """Return the number of the job that a worker has finished. verb: word for the work in messages. Raises the job's
    error, or RuntimeError if the worker died."""
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(
            f"{verb}: a worker process died with status {process.wait(timeout=10)}. Repeat the command to continue "
            "from the finished shards; if memory was short, set data.num_workers=1, which needs the least"
        )
    reply = json.loads(line)
    if "error" not in reply:
        return int(reply["job"])
    if reply.get("config"):
        raise ConfigError(reply["error"])
    raise OSError(reply["errno"], f"{verb}: {reply['error']}", reply["file"])


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the worker processes. After an error, do not wait for their jobs."""
    for process in processes:
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream:
                    stream.close()
        try:
            process.wait(timeout=1 if sys.exc_info()[0] is None else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
