"""Files whose text two terms of a corpus have: the same file by any path, a copy, or the same text compressed.

A document's side goes by a hash of its name within its term, and its share by the term's own documents. So what one
term holds out would be trained on through the other. What is found is kept under data.cache_dir by the files' paths,
sizes and times, so that a corpus is looked through once. Sizes come first; only files of equal size are read, and of
compressed ones the head.
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

import xxhash

from configs import files
from configs.schema import ConfigError
from data import lock
from data.corpus import Source, unpacked_blocks
from data.digest import digest_of, file_digest

HEAD_BYTES = 1 << 16  # of text, by which files of which one is compressed are compared first
SMALL_BYTES = 1 << 20  # a file that is read at once, and whose digest is not worth a file of its own
BLANK_BYTES = 1 << 12  # a file of this size is looked into: one without text holds no document
MAX_THREADS = 8


@dataclass(frozen=True)
class Overlap:
    """Two terms that hold the same text; `one` and `other`: the first such files, and how many there are."""

    terms: tuple[str, str]
    one: str
    other: str
    same_file: bool
    count: int
    token_files: bool

    def __str__(self) -> str:
        one, other = self.terms
        if one == other and self.one == self.other:
            return f"{one} is there twice"
        how = "is the same file as" if self.same_file else "has the text of"
        more = f", and {self.count - 1:,} more such files" if self.count > 1 else ""
        where = f"both have {self.one}" if self.one == self.other else f"{self.other} {how} {self.one}"
        return f"{one} and {other} overlap ({where}{more})"


@dataclass(frozen=True)
class _Entry:
    term: int
    path: str
    size: int
    is_packed: bool = False


def refuse(overlaps: Sequence[Overlap]) -> None:
    """Raise ConfigError for terms of data.corpus that hold the same text."""
    if not overlaps:
        return
    first = overlaps[0]
    together = (
        ""
        if first.token_files
        else ", or give them as one list without weights, which keeps equal documents on the same side"
    )
    raise ConfigError(
        f"data.corpus: {_in_words(overlaps)}: what one of them holds out for validation would be trained on through "
        f"the other. Leave one of them out (to read a text more often, raise its weight){together}"
    )


def refuse_validation(name: str, overlaps: Sequence[Overlap]) -> None:
    """Raise ConfigError for a validation corpus that holds text of data.corpus."""
    if overlaps:
        raise ConfigError(
            f"data.validation_corpora: {name} is trained on: {_in_words(overlaps)}. Take that text out of data.corpus, "
            "or out of the validation corpus"
        )


def _in_words(overlaps: Sequence[Overlap]) -> str:
    more = f"; and {len(overlaps) - 1} more pairs of terms" if len(overlaps) > 1 else ""
    return f"{overlaps[0]}{more}"


def find(terms: Sequence[Source], others: Sequence[Source], cache: Path, timeout: float) -> list[Overlap]:
    """Which of the terms hold the same text as one of the others; two lists that are one: as another of them.

    Processes that ask at once take turns. timeout: seconds for that. Raises ConfigError for a file that cannot be read,
    TimeoutError.
    """
    pairs = [
        (i, len(terms) + j)
        for i, j in itertools.product(range(len(terms)), range(len(others)))
        if terms is not others or i < j
    ]
    if not pairs:
        return []
    everyone = [*terms, *others]
    key = digest_of(terms is others, [_identity(source) for source in terms], [_identity(source) for source in others])
    place = cache / "overlaps" / f"{key}.json"
    with contextlib.ExitStack() as stack:
        if (kept := _kept(place)) is not None:
            return kept
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock.hold(place.with_suffix(".lock"), timeout))
        except TimeoutError:
            raise
        except OSError:
            pass  # a cache that cannot be written: every process looks for itself
        if (kept := _kept(place)) is not None:
            return kept
        try:
            found = _found(everyone, pairs, cache, timeout)
        except TimeoutError:
            raise
        except OSError as error:
            raise ConfigError(f"data.corpus: cannot read {error.filename}: {error.strerror}") from error
        with contextlib.suppress(OSError):
            files.write_text(place, json.dumps([vars(overlap) for overlap in found]))
    return found


def _identity(source: Source) -> list[object]:
    """What decides the text of a term, and what is said of it."""
    return [source.given, source.identity(), [_stat(path) for path in _token_file(source)]]


def _stat(path: str) -> list[int]:
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns]


def _token_file(source: Source) -> list[str]:
    return [f"{source.megatron}.bin"] if source.megatron else []


def _kept(place: Path) -> list[Overlap] | None:
    try:
        return [Overlap(**{**kept, "terms": tuple(kept["terms"])}) for kept in json.loads(place.read_text())]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _found(sources: Sequence[Source], pairs: Iterable[tuple[int, int]], cache: Path, timeout: float) -> list[Overlap]:
    entries = [
        entry
        for term, source in enumerate(sources)
        for entry in (
            *(_Entry(term, file.path, file.size, file.compression is not None) for file in source.files),
            *(_Entry(term, path, os.path.getsize(path)) for path in _token_file(source)),
        )
        if entry.size
    ]
    wanted = set(pairs)
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
            """Entries with the same key, of more than one term."""
            some = list(some)
            groups: dict[Hashable, list[_Entry]] = defaultdict(list)
            for found, entry in zip(threads.map(key, some), some):
                groups[found].append(entry)
            return (group for group in groups.values() if len({entry.term for entry in group}) > 1)

        def all_of(groups: Iterable[Sequence[_Entry]]) -> list[_Entry]:
            return [entry for group in groups for entry in group]

        equal_size = all_of(groups_by(lambda entry: entry.size, entries))
        note(groups_by(lambda entry: _inode(entry.path), equal_size), True)
        if not same:  # else that is enough, and nothing need be read
            note(groups_by(lambda entry: (entry.size, _digest(entry, cache, timeout)), _with_text(equal_size)), False)
        if not same and any(entry.is_packed for entry in entries):
            packed_too = all_of(group for group in groups_by(_head, entries) if any(e.is_packed for e in group))
            note(groups_by(_text_digest, _with_text(packed_too)), False)
    return [
        Overlap(
            (sources[one].given, sources[other].given),
            *_shown(next(iter(known.values()))),
            count=len(known),
            token_files=bool(sources[one].megatron or sources[other].megatron),
        )
        for (one, other), known in sorted(same.items())
    ]


def _shown(found: tuple[_Entry, _Entry, bool]) -> tuple[str, str, bool]:
    one, other, same_file = found
    return one.path, other.path, same_file


def _inode(path: str) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino


def _with_text(entries: Iterable[_Entry]) -> list[_Entry]:
    """The entries that hold more than white space, which is no document."""
    return [
        entry
        for entry in entries
        if entry.is_packed or entry.size > BLANK_BYTES or Path(entry.path).read_bytes().strip()
    ]


def _digest(entry: _Entry, cache: Path, timeout: float) -> str:
    """The digest of a file's bytes."""
    if entry.size <= SMALL_BYTES:
        return xxhash.xxh3_128_hexdigest(Path(entry.path).read_bytes())
    return file_digest(entry.path, cache, timeout)


def _blocks(entry: _Entry, plain_bytes: int = 1 << 22) -> Iterator[bytes]:
    """A file's text, unpacked; of one that is not packed so many bytes at once."""
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
