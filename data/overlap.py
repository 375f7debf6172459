"""Detection of text that several terms of a corpus share: equal files, and equal documents in different files.

The split of a term depends on hashes of its documents' names and on its size. So text that one term holds out for
validation would be trained on through another term that contains it too.

Equal files are one file under two paths, a copy, or the same text compressed. They are an error. Sizes are compared
first; only files of equal size are read, and the beginnings of compressed ones. The result is stored under
data.cache_dir by the paths, sizes and times of the files, so that each corpus is searched once.

Equal documents may be in files of other sizes or formats. Preparing a term stores the hashes of its documents' texts
next to the tokens (`write_texts`). A few equal documents are common among large corpora and only noted; many are an
error. Token files of the user have no hashes of texts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from base import checksums, files
from base.errors import ConfigError
from data import lock
from data.corpus import Source
from data.corpus.compressed import unpacked_blocks
from data.digest import digest_of, file_digest
from data.read_errors import unreadable

HEAD_BYTES = 1 << 16  # bytes of text that are compared first if a file is compressed
SMALL_BYTES = 1 << 20  # up to this size, a file is read at once and its digest is not stored
BLANK_BYTES = 1 << 12  # up to this size, a file is checked for text; a blank file has no document
MAX_THREADS = 8


@dataclass(frozen=True)
class Overlap:
    """An overlap of two sources of a corpus, named by `terms`: the first pair of files with the same text, `one` and
    `other`, and the number of such pairs."""

    terms: tuple[str, str]
    one: str
    other: str
    same_file: bool
    count: int
    token_files: bool

    def __str__(self) -> str:
        one, other = self.terms
        if one == other and self.one == self.other:
            return f"{one} is listed twice"
        how = "is the same file as" if self.same_file else "has the same text as"
        more = f", and so for {self.count - 1:,} more files" if self.count > 1 else ""
        where = f"both contain {self.one}" if self.one == self.other else f"{self.other} {how} {self.one}"
        return f"{one} and {other} overlap ({where}{more})"


@dataclass(frozen=True)
class _Entry:
    term: int
    path: str
    size: int
    is_packed: bool = False


def refuse(overlaps: Sequence[Overlap]) -> None:
    """Raise ConfigError if there are overlaps between the sources of data.corpus."""
    if not overlaps:
        return
    together = ", or combine them in a list without weights, which puts equal documents into the same split"
    together = "" if overlaps[0].token_files else together
    raise ConfigError(
        f"data.corpus: {_describe(overlaps)}. Text that one of them holds out for validation would be trained on "
        f"through the other. Leave one of them out (to read a text more often, raise its weight){together}"
    )


def refuse_validation(name: str, overlaps: Sequence[Overlap]) -> None:
    """Raise ConfigError if there are overlaps between the validation corpus `name` and data.corpus."""
    if overlaps:
        raise ConfigError(
            f"data.validation_corpora: {name} contains text that is trained on: {_describe(overlaps)}. Remove that "
            "text from data.corpus or from the validation corpus"
        )


def _describe(overlaps: Sequence[Overlap]) -> str:
    more = f"; and {len(overlaps) - 1} more pairs of terms" if len(overlaps) > 1 else ""
    return f"{overlaps[0]}{more}"


def find(terms: Sequence[Source], others: Sequence[Source], cache: Path, timeout: float) -> list[Overlap]:
    """Find sources that contain the same text: one in `terms` and one in `others`, or any two sources if both are the
    same list. Returns an Overlap for each pair of sources.

    If several processes call this at once, one searches and the others wait, for at most `timeout` seconds. Raises
    ConfigError for a file that cannot be read, and TimeoutError.
    """
    numbers = itertools.product(range(len(terms)), range(len(others)))
    pairs = {(i, len(terms) + j) for i, j in numbers if terms is not others or i < j}
    if not pairs:
        return []
    everyone = [*terms, *others]
    key = digest_of(terms is others, [_identity(source) for source in terms], [_identity(source) for source in others])
    stored = cache / "overlaps" / f"{key}.json"
    if (kept := _kept(stored)) is not None:
        return kept
    with lock.hold_in_cache(stored.with_suffix(".lock"), timeout):
        if (kept := _kept(stored)) is not None:
            return kept
        try:
            found = _found(everyone, pairs, cache, timeout)
        except TimeoutError:
            raise
        except OSError as error:
            raise unreadable(error.filename, error) from error
        with contextlib.suppress(OSError):
            files.write_text(stored, json.dumps([vars(overlap) for overlap in found]))
    return found


def _identity(source: Source) -> list[object]:
    """Return JSON-compatible values that identify a source: its text, and its name in messages."""
    stats = [os.stat(path) for path in _token_file(source)]
    return [source.given, source.identity(), [[stat.st_size, stat.st_mtime_ns] for stat in stats]]


def _token_file(source: Source) -> list[str]:
    return [f"{source.megatron}.bin"] if source.megatron else []


def _kept(stored: Path) -> list[Overlap] | None:
    try:
        return [Overlap(**{**kept, "terms": tuple(kept["terms"])}) for kept in json.loads(stored.read_text())]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _found(sources: Sequence[Source], wanted: set[tuple[int, int]], cache: Path, timeout: float) -> list[Overlap]:
    entries = [
        entry
        for term, source in enumerate(sources)
        for entry in (
            *(_Entry(term, file.path, file.size, file.compression is not None) for file in source.files),
            *(_Entry(term, path, os.path.getsize(path)) for path in _token_file(source)),
        )
        if entry.size
    ]
    same: dict[tuple[int, int], dict[str, tuple[_Entry, _Entry, bool]]] = {}

    def note(groups: Iterable[Sequence[_Entry]], same_file: bool) -> None:
        for group in groups:
            firsts: dict[int, _Entry] = {}
            for entry in group:
                firsts.setdefault(entry.term, entry)
            for one, other in itertools.combinations(sorted(firsts), 2):
                if (one, other) in wanted:
                    known = same.setdefault((one, other), {})
                    known.setdefault(firsts[one].path, (firsts[one], firsts[other], same_file))

    with ThreadPoolExecutor(MAX_THREADS) as threads:

        def groups_by(key: Callable[[_Entry], Hashable], some: Iterable[_Entry]) -> Iterator[list[_Entry]]:
            """Group the entries `some` by their values of `key`; return the groups with entries of several sources."""
            some = list(some)
            groups: dict[Hashable, list[_Entry]] = defaultdict(list)
            for found, entry in zip(threads.map(key, some), some):
                groups[found].append(entry)
            return (group for group in groups.values() if len({entry.term for entry in group}) > 1)

        all_of = itertools.chain.from_iterable
        equal_size = list(all_of(groups_by(lambda entry: entry.size, entries)))
        note(groups_by(lambda entry: os.stat(entry.path)[1:3], equal_size), True)  # inode and device
        if not same:  # otherwise no file has to be read
            note(groups_by(lambda entry: (entry.size, _digest(entry, cache, timeout)), _with_text(equal_size)), False)
        if not same and any(entry.is_packed for entry in entries):
            packed_too = all_of(group for group in groups_by(_head, entries) if any(e.is_packed for e in group))
            note(groups_by(_text_digest, _with_text(packed_too)), False)
    overlaps = []
    for (one, other), known in sorted(same.items()):
        first, second, same_file = next(iter(known.values()))
        terms = sources[one].given, sources[other].given
        token_files = bool(sources[one].megatron or sources[other].megatron)
        overlaps.append(Overlap(terms, first.path, second.path, same_file, len(known), token_files))
    return overlaps


def _with_text(entries: Iterable[_Entry]) -> list[_Entry]:
    """Return the entries whose files contain more than white space."""
    return [e for e in entries if e.is_packed or e.size > BLANK_BYTES or Path(e.path).read_bytes().strip()]


def _digest(entry: _Entry, cache: Path, timeout: float) -> str:
    if entry.size <= SMALL_BYTES:
        return xxhash.xxh3_128_hexdigest(Path(entry.path).read_bytes())
    return file_digest(entry.path, cache, timeout)


def _blocks(entry: _Entry, plain_bytes: int = 1 << 22) -> Iterator[bytes]:
    """Yield the text of a file, decompressed if necessary. plain_bytes: size of an uncompressed file's blocks."""
    if entry.is_packed:
        yield from unpacked_blocks(entry.path)
        return
    with open(entry.path, "rb", buffering=0) as file:
        while block := file.read(plain_bytes):
            yield block


def _head(entry: _Entry) -> str:
    head = b""
    for block in _blocks(entry, HEAD_BYTES):
        head += block
        if len(head) >= HEAD_BYTES:
            break
    return xxhash.xxh3_128_hexdigest(head[:HEAD_BYTES])


def _text_digest(entry: _Entry) -> str:
    digest = xxhash.xxh3_128()
    for block in _blocks(entry):
        digest.update(block)
    return digest.hexdigest()


FEW = 0.01  # largest share of the validation documents that may be trained on


@dataclass(frozen=True)
class Texts:
    """A prepared source of text: its name in data.corpus, and the folder of its tokens and text hashes."""

    given: str
    folder: str


def write_texts(folder: Path, texts: np.ndarray, held_out: np.ndarray, cuts: Sequence[int]) -> dict[str, int]:
    """Write the hashes of the documents' texts, uint64 [d], to a file for training and a file for validation. Documents
    with a number in `cuts` are partly held out, so both files contain them. Returns the files' sizes in bytes, by
    name."""
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
    """Return notes about documents that one source trains on and another source holds out for validation. Raises
    ConfigError if there are many."""
    advice = (
        "Remove the documents from one of the two, or combine both in a list without weights, which puts equal "
        "documents into the same split"
    )
    notes = list[str]()
    for one, other in itertools.permutations(terms, 2):
        subject = f"data.corpus: {{}} documents that {one.given} holds out for validation"
        notes += _check_pair(subject, one, "valid", other, advice, cache)
    return notes


def check_validation(name: str, corpus: Sequence[Texts], terms: Sequence[Texts], cache: Path) -> list[str]:
    """Return notes about documents of a validation corpus that are trained on. Raises ConfigError if there are many."""
    advice, notes = "Remove them from data.corpus or from the validation corpus", list[str]()
    for one, other in itertools.product(corpus, terms):
        subject = f"data.validation_corpora: {{}} documents of {name} ({one.given})"
        notes += _check_pair(subject, one, "train", other, advice, cache)
    return notes


def _check_pair(subject: str, one: Texts, side: str, other: Texts, advice: str, cache: Path) -> list[str]:
    """Return a note if source `other` trains on a few documents of the split `side` (train or valid) of source `one`,
    and [] if on none. Raises ConfigError if `other` trains on many."""
    shared, total = _shared(Path(one.folder, f"{side}.texts"), Path(other.folder, "train.texts"), cache)
    if not shared:
        return []
    note = f"{subject.format(f'{shared:,} of the {total:,}')} are in {other.given} too, and are trained on"
    if shared > FEW * total:
        raise ConfigError(f"{note}. {advice}")
    return [note]


def _shared(one: Path, other: Path, cache: Path) -> tuple[int, int]:
    """Return how many text hashes in file `one` are also in file `other`, and how many `one` contains."""
    stats = [os.stat(path) for path in (one, other)]
    key = digest_of([[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in zip((one, other), stats)])
    stored = cache / "overlaps" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = checksums.read_summed(stored)
        return int(found["shared"]), int(found["total"])
    texts = np.load(one)
    shared = len(np.intersect1d(texts, np.load(other), assume_unique=True))
    with contextlib.suppress(OSError):  # the cache cannot be written, so every start compares again
        stored.parent.mkdir(parents=True, exist_ok=True)
        checksums.write_summed(stored, {"shared": shared, "total": len(texts)})
    return shared, len(texts)
