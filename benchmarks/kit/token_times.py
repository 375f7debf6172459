"""`python -m inference.generate` with the time of each token: `python -m benchmarks.kit.token_times TIMES_FILE
[--mapped] -- --checkpoint MODEL --ids --prompt "1 2 3" ...`.

What is measured is that command, with a function that looks at the clock where it may ask whether a text is done.
`--mapped` runs the same decoder over the pages of a folder of logical weights (benchmarks/kit/token_times.py). The
file gets a JSON object of TokenTimes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from safetensors import safe_open

from configs.architecture import for_use
from inference import generate as command
from inference.open_model import OpenModel
from inference.weights.source import TensorWeights
from models import folder as folders
from models.huggingface import special_tokens
from parallel import topology


def mapped_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return every weight of a folder by its logical name; its storage is the file's pages."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weights.update((name, file.get_tensor(name)) for name in file.keys())
    return weights


@contextlib.contextmanager
def open_mapped(options: argparse.Namespace) -> Iterator[OpenModel]:
    """Replacement of `inference.open_model.open_from` for a folder of logical weights in one process, on the host."""
    folder: Path = options.checkpoint
    stated: Any = folders.config_from(folders.read_config(folder))
    config = for_use(stated)
    config.training.device = "cpu"
    config.model.backend = "portable"
    vocab_size = stated.model.vocab_size
    ends = special_tokens.end_tokens(folder, special_tokens.kept_in(folder, vocab_size))
    run_topology = topology.initialize(config)
    try:
        weights: Any = TensorWeights(mapped_weights(folder), config, run_topology, vocab_size)
        yield OpenModel(config, run_topology, vocab_size, weights, None, ends or set(), folder)
    finally:
        topology.destroy()


@dataclass
class TokenTimes:
    """Seconds since the process began and bytes that it had read from the disk: when generation began, and when each
    token of the first prompt was there."""

    begin: float = 0.0
    tokens: list[float] = field(default_factory=list)
    begin_read: int = 0
    tokens_read: list[int] = field(default_factory=list)

    @property
    def prefill_seconds(self) -> float:
        """To the first token."""
        return self.tokens[0] - self.begin

    @property
    def token_seconds(self) -> float:
        """Of a token after the first, on average."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    @property
    def token_bytes(self) -> float:
        """Read from the disk for a token after the first, on average."""
        return (self.tokens_read[-1] - self.tokens_read[0]) / (len(self.tokens) - 1)


def read_times(path: Path) -> TokenTimes:
    """What a run wrote. Raises FileNotFoundError for one that did not end well."""
    return TokenTimes(**json.loads(path.read_text()))


def bytes_read() -> int:
    """From disks by this process, pages of mapped files among them (proc_pid_io(5))."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def main(arguments: list[str]) -> int:
    own, rest = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    from inference import generation, open_model

    started = psutil.Process().create_time()
    times = TokenTimes()
    inner: Callable[..., Any] = generation.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        times.begin, times.begin_read = time.time() - started, bytes_read()

        def is_done(tokens: list[int]) -> bool:
            if len(tokens) > len(times.tokens):
                times.tokens.append(time.time() - started)
                times.tokens_read.append(bytes_read())
            return False

        return inner(*args, **{**kwargs, "is_done": is_done})

    with mock.patch.object(generation, "generate", timed):
        if "--mapped" in own:
            from benchmarks.kit.token_times import open_mapped

            with mock.patch.object(open_model, "open_from", open_mapped):
                status = command.main(rest)
        else:
            status = command.main(rest)
    Path(own[0]).write_text(json.dumps(asdict(times)))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
