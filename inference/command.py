"""Arguments and error handling that generate, evaluate and fill_mask share, without torch: --help answers at once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from base import command
from base.errors import ConfigError
from base.ranks import launched
from checkpoint import manifest
from parallel.card import refuse_missing

GRACE = 5.0  # seconds for the failed rank to print its error
PRECISIONS = ("bf16", "fp16", "fp32")  # as in parallel/dtypes.py


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a model, its tokenizer, precision, device, memory budget and layout."""
    add, kinds = parser.add_argument, "run, checkpoint, export or Hugging Face folder"
    add("--checkpoint", type=Path, required=True, metavar="MODEL", help=kinds)
    add("--tokenizer", type=Path, help="tokenizer folder or file (default: the model's own)")
    add("--precision", choices=PRECISIONS, help="data type of the weights (default: as stored)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add(
        "--memory-budget",
        type=_mebibytes,
        metavar="MIB",
        help="MiB per rank for weights, key-value cache and activations; weights that do not fit are read from the "
        "files in every pass (default: a share of the free memory)",
    )
    add("layout", nargs="*", metavar="parallel.KEY=VALUE", help="under torchrun: how the model is split over the ranks")


def _mebibytes(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0, in MiB")
    return value


_mebibytes.__name__ = "number"  # the type's name in argparse's errors


def _check_encodings(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option's text is not UTF-8. Options that are paths may have any encoding."""
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raw = text.encode(errors="surrogateescape")[:40]
                    raise ConfigError(
                        f"--{name.replace('_', '-')} ({raw!r}) must be UTF-8. Convert it with iconv -t UTF-8."
                    ) from error


def run_command(
    body: Callable[[argparse.Namespace], Any], parser: argparse.ArgumentParser, arguments: list[str] | None
) -> int:
    """Parse the arguments, run `body` and return the exit status. An error is printed as one line."""
    options = parser.parse_args(arguments)

    def checked() -> None:
        _check_encodings(options)
        launched().check_meeting()
        refuse_missing(options.device, "--device")
        manifest.kind_of_model(options.checkpoint)
        try:
            body(options)
        except Exception as error:
            if launched().world_size == 1:
                raise
            from parallel.joint_errors import is_lost_rank  # torch is imported by now

            if not is_lost_rank(error):
                raise
            time.sleep(GRACE)  # a launcher ends all ranks when the first has ended
            raise OSError("another rank has failed. Read its last line of output, which names the cause.") from error

    return command.run(checked)
