"""Documents of validation whose text another term trains on, where no file is the same: a part of a larger file, or
another format.

Preparing a term keeps the hashes of its documents' texts beside the tokens (`write`). A few equal documents are usual
among large corpora, and said; many are refused, as equal files are (data/overlap.py). Token files keep no texts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs import checksums
from configs.schema import ConfigError
from data.digest import digest_of

FEW = 0.01  # share of the documents of validation: what is trained on beyond it is refused


@dataclass(frozen=True)
class Texts:
    """A term that was prepared: what it is called, and the folder of its tokens."""

    given: str
    folder: str


def write(folder: Path, texts: np.ndarray, held_out: np.ndarray, cuts: Sequence[int]) -> dict[str, int]:
    """Keep the hashes uint64 [d] of the texts on either side; a document that is cut is on both. Returns the sizes of
    the files, by name."""
    sizes = {}
    both = np.zeros(len(texts), dtype=bool)
    both[list(cuts)] = True
    for side, wanted in (("train", ~held_out), ("valid", held_out | both)):
        temporary = folder / f"{side}.texts.tmp"
        with open(temporary, "wb") as file:
            np.save(file, np.unique(texts[wanted]))
        sizes[f"{side}.texts"] = temporary.stat().st_size
        temporary.rename(folder / f"{side}.texts")
    return sizes


def check_terms(terms: Sequence[Texts], cache: Path) -> list[str]:
    """What is said of the terms of data.corpus. Raises ConfigError where one trains on much that another holds out."""
    advice = (
        "Take them out of one of the two, or give both as one list without weights, which keeps equal documents on the "
        "same side"
    )
    return list(
        _judged(
            (
                (f"data.corpus: {{}} documents that {one.given} holds out for validation are", one, "valid", other)
                for one in terms
                for other in terms
                if one is not other
            ),
            advice,
            cache,
        )
    )


def check_validation(name: str, corpus: Sequence[Texts], terms: Sequence[Texts], cache: Path) -> list[str]:
    """What is said of a validation corpus. Raises ConfigError where much of it is trained on."""
    return list(
        _judged(
            (
                (f"data.validation_corpora: {{}} documents of {name} ({one.given}) are", one, "train", other)
                for one in corpus
                for other in terms
            ),
            "Take them out of data.corpus, or out of the validation corpus",
            cache,
        )
    )


def _judged(pairs: Iterator[tuple[str, Texts, str, Texts]], advice: str, cache: Path) -> Iterator[str]:
    for words, one, side, other in pairs:
        shared, total = _shared(Path(one.folder, f"{side}.texts"), Path(other.folder, "train.texts"), cache)
        if not shared:
            continue
        line = f"{words.format(f'{shared:,} of the {total:,}')} in {other.given} too, and trained on"
        if shared > FEW * total:
            raise ConfigError(f"{line}. {advice}")
        yield line


def _shared(one: Path, other: Path, cache: Path) -> tuple[int, int]:
    """Return how many of the texts of file `one` are in `other`, and how many `one` has."""
    stats = [os.stat(path) for path in (one, other)]
    key = digest_of([[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in zip((one, other), stats)])
    place = cache / "overlaps" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = checksums.read_summed(place)
        return int(found["shared"]), int(found["total"])
    texts = np.load(one)
    shared = len(np.intersect1d(texts, np.load(other), assume_unique=True))
    with contextlib.suppress(OSError):  # a cache that cannot be written: every start looks again
        place.parent.mkdir(parents=True, exist_ok=True)
        checksums.write_summed(place, {"shared": shared, "total": len(texts)})
    return shared, len(texts)
