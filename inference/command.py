"""What the command lines of generate, evaluate and fill_mask have in common. Imports nothing heavy: --help shall not
wait for torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint import manifest
from configs import command
from configs.ranks import launched
from parallel.devices import refuse_missing

PRECISIONS = ("bf16", "fp16", "fp32")  # those of parallel/dtypes.py


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `open_model.open_from` reads."""
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="MODEL",
        help="run, checkpoint, exported or Hugging Face folder",
    )
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer folder or file; default: the one beside the model")
    parser.add_argument("--precision", choices=PRECISIONS, help="of the weights; default: as stored")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--memory-budget",
        type=_mebibytes,
        metavar="MIB",
        help="of a rank for weights, keys and values, and what a pass computes; weights beyond it come from the files "
        "in every pass (default: what is left of the memory)",
    )
    parser.add_argument(
        "layout", nargs="*", metavar="parallel.KEY=VALUE", help="under torchrun: how the model is split over the ranks"
    )


def _mebibytes(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be above 0, in MiB")
    return value


_mebibytes.__name__ = "number"  # what argparse calls it


def run_command(
    body: Callable[[argparse.Namespace], Any], parser: argparse.ArgumentParser, arguments: list[str] | None
) -> int:
    """Parse, run, and turn a mistake into one line and an exit status."""
    options = parser.parse_args(arguments)

    def checked() -> None:
        launched().check_meeting()
        refuse_missing(options.device, "--device")
        manifest.kind_of_model(options.checkpoint)
        body(options)

    return command.run(checked)
