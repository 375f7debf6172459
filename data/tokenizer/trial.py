"""Trials of foreign tokenizers in a process with limits of time and memory, before this process loads them.

A bad file can make the libraries that read it run for ever, use all memory, or crash. The trial process imports the
libraries once and forks for each tokenizer, so that a trial takes milliseconds. The process ends together with its
caller, or after a minute without requests.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from configs.schema import Config
from configs.tokenizer_files import tokenizer_files
from data.tokenizer.base import OTHER, Tokenizer
from data.tokenizer.load import cannot_be_read, open_tokenizer
from data.tokenizer.probes import PROBES, runs_of

REPOSITORY = Path(__file__).resolve().parents[2]
CPU_SECONDS, PER_MEGABYTE = 5, 4  # limit per tokenizer, twice what the largest published ones need
MEMORY_GIB = 2  # of address space
BUSY = 10  # seconds of wall time per second of CPU time, on a machine that does other work
IDLE_SECONDS = 60.0
SERVE = "from data.tokenizer import trial; trial.serve()"

_lock = threading.Lock()
_server: tuple[int, subprocess.Popen[bytes]] | None = None  # with the id of the process that started it
_good: set[str] = set()  # tokenizers that passed, each as names, sizes and times of its files


def load_tokenizer(path: str | Path, tried: bool = False) -> Tokenizer:
    """Open a tokenizer from a file or a folder, after a trial in another process unless `tried`. Raises ConfigError."""
    if not tried:
        full = Path(path)
        files = [*tokenizer_files(full).values(), (full if full.is_dir() else full.parent) / "config.json"]
        stats = [(str(file.absolute()), file.stat()) for file in files if file.is_file()]
        state = json.dumps([(name, found.st_ino, found.st_size, found.st_mtime_ns) for name, found in stats])
        if state not in _good:
            seconds = CPU_SECONDS + PER_MEGABYTE * sum(found.st_size for _, found in stats) // 10**6
            wrong = _answer({"path": str(path), "folder": os.getcwd(), "seconds": seconds})
            if wrong:
                raise ConfigError(wrong)
            _good.add(state)
    return open_tokenizer(path)


def tokenizer_digest(path: str | Path, tried: bool = False) -> str:
    """Return the digest of the tokenizer at `path`, 32 hexadecimal digits, the same for all that give the same tokens.
    `tried`: the tokenizer is known to work, so it is not tried first. Raises ConfigError."""
    return load_tokenizer(path, tried).digest


def expected_vocab_size(config: Config) -> int:
    """Return the vocabulary size of a run whose corpus is not prepared yet: model.vocab_size if set, else the size of
    the given tokenizer or of the tokenizer to be trained."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    if config.data.tokenizer == "sentencepiece":
        return config.data.vocab_size
    return load_tokenizer(config.data.tokenizer).vocab_size


def _answer(question: dict[str, Any]) -> str:
    """Ask the trial process to try the tokenizer that `question` describes (path, folder, seconds). Returns the problem
    that it finds, in one line, or an empty string. Raises OSError if the process does not answer."""
    limit = BUSY * question["seconds"]
    with _lock:
        for _ in range(2):  # an idle process may have ended just now
            server = _running_server()
            assert server.stdin and server.stdout
            try:
                server.stdin.write(json.dumps(question).encode() + b"\n")
                server.stdin.flush()
            except BrokenPipeError:
                server.wait(limit)
                continue
            if not _readable(server.stdout, 2 * limit):
                server.kill()
                break
            line = server.stdout.readline()
            if line:
                return str(json.loads(line))
            server.wait(limit)
    raise OSError(f"data.tokenizer={question['path']}: the process that tries tokenizers did not answer. Start again")


def _running_server() -> subprocess.Popen[bytes]:
    global _server
    if _server is not None and _server[0] == os.getpid() and _server[1].poll() is None:
        return _server[1]
    one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
    environment = {**os.environ, **one_thread, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the libraries print messages before they crash
        env=environment,
    )
    _server = (os.getpid(), server)
    return server


def serve() -> None:
    """Answer requests on standard input, one per line, until the input ends or IDLE_SECONDS pass without one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of libraries out of the replies
    import sentencepiece  # noqa: F401  (here once, not in each fork)
    import tokenizers  # noqa: F401

    while _readable(sys.stdin, IDLE_SECONDS):
        line = sys.stdin.readline()
        if not line:
            return
        replies.write(json.dumps(_tried(json.loads(line))) + "\n")
        replies.flush()


def _tried(question: dict[str, Any]) -> str:
    """Try the tokenizer that `question` describes (path, folder, seconds) in a fork of this process, with limits on
    memory and time. Returns the problem found, or an empty string."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.chdir(question["folder"])
            _limit(resource.RLIMIT_AS, MEMORY_GIB << 30)
            _limit(resource.RLIMIT_CPU, question["seconds"])
            _limit(resource.RLIMIT_CORE, 0)
            os.write(writing, _use(question["path"]).encode(errors="replace")[:8192])
        finally:
            os._exit(0)
    os.close(writing)
    deadline, answer = time.monotonic() + BUSY * question["seconds"], b""
    while _readable(reading, max(deadline - time.monotonic(), 0)):
        content = os.read(reading, 8192)
        if not content:
            break
        answer += content
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return answer.decode()
    name = f"data.tokenizer={question['path']}"
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"{name}: reading it and encoding short texts takes more than {question['seconds']} s. {OTHER}"
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return (
        f"{name}: the library that reads the file crashes ({how}). The file is damaged, or needs more than "
        f"{MEMORY_GIB} GiB of memory. {OTHER}"
    )


def _readable(file: Any, seconds: float) -> bool:
    """Return whether `file` has data or has ended within `seconds`. (`select` accepts no descriptor above 1023.)"""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard))


def _use(path: str) -> str:
    """Call the methods of the tokenizer at `path` that a run calls. Returns the problem found, or an empty string."""
    try:
        tokenizer: Any = open_tokenizer(path)
        texts = [*PROBES, *runs_of(tokenizer.rule_texts())]
        for text in texts:
            tokenizer.decode(tokenizer.encode(text))
            tokenizer.encode_prompt(text)
        tokenizer.encode_batch(texts)
        for first in range(0, 0xD800, 1024):  # a table of characters may be wrong for a single character
            tokenizer.encode("".join(map(chr, range(first, first + 1024))))
        tokenizer.decode(range(min(tokenizer.vocab_size, 4096)))
        for method in ("special_ids", "word_starts", "control_tokens", "notes"):
            getattr(tokenizer, method)()
        _ = tokenizer.digest
    except ConfigError as error:
        return str(error)
    except MemoryError:
        return f"data.tokenizer={path}: it needs more than {MEMORY_GIB} GiB of memory. {OTHER}"
    except BaseException as error:  # tokenizers' PanicException is not an Exception
        return str(cannot_be_read(path, error))
    return ""
