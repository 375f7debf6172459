"""Small token files for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.indexed import write_index


def write_tokens(
    prefix: Path, dtype: type[np.generic], documents: Sequence[Sequence[Sequence[int] | np.ndarray]]
) -> None:
    """Write a `.bin` and its `.idx` in one go: documents, each a list of token arrays (its sequences)."""
    sequences = [sequence for document in documents for sequence in document]
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            file.write(np.asarray(sequence, dtype=dtype).tobytes())
    bounds = np.cumsum([0] + [len(document) for document in documents])
    write_index(Path(f"{prefix}.idx"), dtype, np.array([len(sequence) for sequence in sequences]), bounds)
