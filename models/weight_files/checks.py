"""What every file of weights is asked before it is opened, and how a library's error is told."""

from __future__ import annotations

import os
from pathlib import Path

from configs.schema import ConfigError

LFS_POINTER = b"version https://git-lfs"


def check_file(path: Path) -> None:
    """Raises ConfigError unless this is a file with content of its own."""
    if not path.is_file():
        what = "is missing" if not os.path.lexists(path) else "is no file"
        raise ConfigError(f"{path} {what}; copy the folder again.")
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    if start == LFS_POINTER:
        raise ConfigError(f"{path} is a pointer of Git LFS, not the weights: run `git lfs pull` in its folder.")


def one_line(said: object) -> str:
    """What an error says, on one line and without its full stop."""
    return " ".join(str(said).split()).removesuffix(".")
