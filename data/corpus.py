"""Documents from sources: the standard library, text, JSON lines, Parquet, folders and blends of them.

`parse_corpus` turns `data.corpus` into sources; `plan_parts` cuts a source's files into parts of work; `read_span` yields the
documents of one piece of a file, and every line that could not be used. What a document is:

* stdlib: a source file; a topic of pydoc_data's prose.
* .py, .md, .rst: the whole file.
* .txt: what lies between runs of two or more empty lines; longer documents are cut at a line end after 64 KiB.
* .jsonl: a line's field data.text_key. .parquet: a row's column data.text_key.
* .txt, .jsonl, .md, .rst and .py may be compressed as .gz or .zst.

A document's name is its file and place in it, so it is the same wherever the corpus lies. torch is not imported here.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import mmap
import os
import re
import shlex
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from configs.schema import ConfigError

BYTE_ORDER_MARKS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
NUL_FOR_TR = r"'\000'"
COMPRESSED = (".gz", ".zst")
FORMATS = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet", ".py": "file", ".md": "file", ".rst": "file"}
KNOWN = ".txt, .jsonl, .md, .rst, .py (each also .gz or .zst), .parquet, a folder of those, or Megatron .bin/.idx files"
DOCUMENT_BYTES = 1 << 16  # a .txt document is cut after this many
MIN_PART_BYTES, MAX_PART_BYTES, TARGET_PARTS = 1 << 20, 1 << 25, 64
BLANK_RUN = re.compile(rb"\n(?:[ \t\r]*\n){2,}")

# Left out of the standard library: other people's packages, and files that exist to be unreadable or were generated.
STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encoded_modules", "lib-dynload"}
STDLIB_SKIPPED_FILES = re.compile(r"bad_coding|badsyntax|bad_source|bad_test|_sysconfigdata")
GENERATED_CODEC = b"generated from"


@dataclass(frozen=True)
class File:
    path: str
    name: str  # stable: relative to its source, without the compression's suffix
    format: str  # text | jsonl | parquet | file | stdlib | topics
    size: int
    mtime_ns: int

    @property
    def compression(self) -> str | None:
        return next((suffix for suffix in COMPRESSED if self.path.endswith(suffix)), None)


@dataclass(frozen=True)
class Source:
    """One term of the blend: files that are concatenated, or (`megatron`) the prefix of token files that exist already."""

    name: str
    weight: float | None  # None: by size
    given: str  # as data.corpus has it
    files: tuple[File, ...] = ()
    megatron: str | None = None

    @property
    def is_stdlib(self) -> bool:
        """Whether it is the standard library and nothing else."""
        return bool(self.files) and all(file.format in ("stdlib", "topics") for file in self.files)

    def identity(self) -> list[Any]:
        """What decides the content: paths, sizes and times of change."""
        return [self.megatron, [[file.path, file.name, file.format, file.size, file.mtime_ns] for file in self.files]]


@dataclass(frozen=True)
class Span:
    """A piece of a file: bytes [start, end) of `path`, or row groups of a Parquet file; `shown` is what messages call it."""

    path: str
    shown: str
    name: str
    format: str
    start: int
    end: int
    size: int  # bytes, for the progress bar


@dataclass(frozen=True)
class Document:
    name: str
    text: str


@dataclass(frozen=True)
class BadLine:
    file: str
    line: int  # from 1; a row of a Parquet file
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def parse_corpus(corpus: Any) -> list[Source]:
    """Sources of `data.corpus`: "stdlib", a path, a list of those, or a list of {path, weight}.

    A list without weights is one source (its documents mix by size). Raises ConfigError naming data.corpus and the path.
    """
    items = list(corpus) if isinstance(corpus, Sequence) and not isinstance(corpus, str) else [corpus]
    if not items:
        raise ConfigError("data.corpus=[]: give at least one source, for example data.corpus=stdlib")
    entries = [_parse_item(item) for item in items]
    with_weight = [weight is not None for _, weight in entries]
    if any(with_weight) and not all(with_weight):
        raise ConfigError(f"data.corpus={corpus}: either every source has a weight or none has (then they mix by size)")
    sources = [_open_source(path, weight) for path, weight in entries]
    if any(with_weight):
        return sources
    texts = [source for source in sources if source.files]
    files = tuple(file for source in texts for file in source.files)
    merged = [Source("+".join(s.name for s in texts)[:80], None, " + ".join(s.given for s in texts), files)] if files else []
    return merged + [source for source in sources if source.megatron]


def _parse_item(item: Any) -> tuple[str, float | None]:
    if isinstance(item, (str, os.PathLike)):
        return str(item), None
    if hasattr(item, "keys") and "path" in item and set(item.keys()) <= {"path", "weight"}:
        weight = item["weight"] if "weight" in item else None
        if weight is not None and not (isinstance(weight, (int, float)) and 0 < weight < float("inf")):
            raise ConfigError(f"data.corpus: the weight of {item['path']} is {weight!r}; it must be a number above 0, for example 0.5")
        return str(item["path"]), weight
    raise ConfigError(f"data.corpus: {item!r} is no source; give stdlib, a path, or {{path: ..., weight: 0.5}}")


def _open_source(path: str, weight: float | None) -> Source:
    if path == "stdlib":
        return Source("stdlib", weight, path, tuple(_stdlib_files()))
    place = Path(path).expanduser().absolute()
    prefix = str(place.with_suffix("")) if place.suffix in (".bin", ".idx") else str(place)
    if not place.is_dir() and os.path.isfile(f"{prefix}.bin") and os.path.isfile(f"{prefix}.idx"):
        return Source(Path(prefix).name, weight, path, megatron=prefix)
    if not place.exists():
        raise ConfigError(f"data.corpus={path}: no such file or folder ({place}); data.corpus=stdlib needs none")
    if place.is_dir():
        paths = [Path(root) / name for root, _, names in os.walk(place) for name in names]
        files = [_file(p, p.relative_to(place).as_posix()) for p in sorted(paths) if _format(p) and not p.name.startswith(".")]
        if not files:
            raise ConfigError(f"data.corpus={path}: the folder holds no file that can be read; supported: {KNOWN}")
        return Source(place.name, weight, path, tuple(files))
    if place.suffix in (".bin", ".idx"):
        raise ConfigError(f"data.corpus={path}: token files come in pairs, but {prefix}.bin and {prefix}.idx are not both there")
    if not _format(place):
        raise ConfigError(f"data.corpus={path}: unknown kind of file; supported: {KNOWN}")
    return Source(place.name, weight, path, (_file(place, place.name),))


def _uncompressed_name(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in COMPRESSED if name.endswith(suffix)), name)


def _format(path: Path) -> str | None:
    name = _uncompressed_name(path.name)
    kind = FORMATS.get(Path(name).suffix)
    return None if kind == "parquet" and name != path.name else kind


def _file(path: Path, name: str, kind: str | None = None) -> File:
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"data.corpus: cannot read {path}: {error.strerror}") from error
    return File(str(path), _uncompressed_name(name), kind or str(_format(path)), stat.st_size, stat.st_mtime_ns)


def _stdlib_files() -> Iterator[File]:
    """The running Python's library sources, about 30 MB (half of it, where the distribution ships no tests), in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED_FOLDERS]
        found += [Path(folder) / name for name in names if name.endswith(".py") and not STDLIB_SKIPPED_FILES.search(name)]
    if not found:
        raise ConfigError(f"data.corpus=stdlib: {root} holds no Python sources; give a path of your own")
    for path in sorted(found):
        name = path.relative_to(root).as_posix()
        if name.startswith("encodings/") and GENERATED_CODEC in path.open("rb").read(300):
            continue
        yield _file(path, f"stdlib/{name}", "topics" if name == "pydoc_data/topics.py" else "stdlib")


def unpack(path: str, out: str, limit: int | None = None) -> None:
    """Decompress a .gz or .zst file, or about its first `limit` bytes, to `out`, atomically.

    Raises ConfigError naming the file when it is damaged.
    """
    import zstandard

    temporary = f"{out}.tmp{os.getpid()}"
    written = 0
    try:
        with open(path, "rb") as source, open(temporary, "wb") as target:
            for block in _gzip_blocks(source) if path.endswith(".gz") else _zstd_blocks(source):
                target.write(block)
                written += len(block)
                if limit is not None and written >= limit:
                    break
        os.rename(temporary, out)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise ConfigError(f"data.corpus: cannot unpack {path}: {error}; the file is damaged or truncated") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _gzip_blocks(source: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=source) as stream:
        while block := stream.read(1 << 22):
            yield block


def _zstd_blocks(source: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames. (The library's own file reader takes a truncated frame for the end of the file.)"""
    import zstandard

    decoder = zstandard.ZstdDecompressor().decompressobj()
    begun = False
    while block := source.read(1 << 20):
        while block:
            if decoder.eof:
                decoder = zstandard.ZstdDecompressor().decompressobj()
            begun = True
            yield decoder.decompress(block)
            block = decoder.unused_data if decoder.eof else b""
    if begun and not decoder.eof:
        raise EOFError("the last frame ends early")


def plan_parts(files: Iterable[File], unpacked: dict[str, str]) -> list[list[Span]]:
    """Cut files into parts of work, each a list of spans, in corpus order; `unpacked`: path -> its decompressed copy.

    The cut depends on the files alone, so that a later run continues an earlier one with any number of workers.
    """
    files = list(files)
    sizes = [os.path.getsize(unpacked.get(file.path, file.path)) for file in files]
    part_bytes = min(max(sum(sizes) // TARGET_PARTS, MIN_PART_BYTES), MAX_PART_BYTES)
    parts: list[list[Span]] = [[]]
    filled = 0
    for file, size in zip(files, sizes, strict=True):
        for span in _cut_file(file, unpacked.get(file.path, file.path), size, part_bytes):
            if filled and filled + span.size > part_bytes:
                parts.append([])
                filled = 0
            parts[-1].append(span)
            filled += span.size
    return [part for part in parts if part]


def _cut_file(file: File, path: str, size: int, part_bytes: int) -> Iterator[Span]:
    def span(start: int, end: int, num_bytes: int) -> Span:
        return Span(path, file.path, file.name, file.format, start, end, num_bytes)

    if file.format == "parquet":
        groups = _parquet(file.path).metadata
        for i in range(groups.num_row_groups):
            yield span(i, i + 1, size // groups.num_row_groups)
    elif file.format not in ("text", "jsonl") or size <= part_bytes:
        yield span(0, size, size)
    else:
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = 0
            while start < size:
                end = size
                if start + part_bytes < size:
                    end = _text_cut(content, start + part_bytes) if file.format == "text" else _line_end(content, start + part_bytes)
                yield span(start, end, end - start)
                start = end


def _line_end(content: Any, position: int, stop: int | None = None) -> int:
    """The first position at or after `position` that begins a line; `stop` or the end when there is none."""
    stop = len(content) if stop is None else min(stop, len(content))
    found = content.find(b"\n", position - 1, stop)
    return stop if found < 0 else found + 1


def _text_cut(content: Any, position: int) -> int:
    """Where a text may be cut near `position`: after a run of empty lines, else after a line, else after a space."""
    stop = position + DOCUMENT_BYTES
    run = BLANK_RUN.search(content, position, stop)
    if run:
        return run.end()
    for separator in (b"\n", b" "):
        found = content.find(separator, position, stop)
        if found >= 0:
            return found + 1
    found = content.find(b"\n", stop)
    return len(content) if found < 0 else found + 1


def read_span(span: Span, text_key: str) -> Iterator[Document | BadLine]:
    """The documents of a span, in order, and each line that could not be used."""
    if span.format == "parquet":
        yield from _read_parquet(span, text_key)
        return
    try:
        with open(span.path, "rb") as file:
            file.seek(span.start)
            content = file.read(span.end - span.start)
    except OSError as error:
        raise ConfigError(f"data.corpus: cannot read {span.path}: {error.strerror}") from error
    if span.format not in ("stdlib", "topics"):
        _refuse_other_encodings(span, content)
    if span.start == 0:
        content = content.removeprefix(b"\xef\xbb\xbf")
    if span.format == "jsonl":
        yield from _read_jsonl(span, content, text_key)
    elif span.format == "text":
        yield from _read_text(span, content)
    elif span.format == "topics":
        yield from _read_topics(span, content)
    elif span.format == "stdlib":
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            return  # fixtures of the codec tests; not part of this corpus by definition
        if text.strip():
            yield Document(span.name, text)
    else:
        yield from _decode(span, span.name, content, 0, content, _Lines(span))


def _refuse_other_encodings(span: Span, content: bytes) -> None:
    """Raise ConfigError for UTF-16 and UTF-32, and for a NUL byte, with the command that mends it."""
    nul = content.find(b"\0")
    if nul < 0 and span.start:
        return
    with open(span.path, "rb") as file:
        head = file.read(4096)
    encoding = next((name for mark, name in BYTE_ORDER_MARKS if head.startswith(mark)), None)
    said = "begins with the byte order mark of"
    if encoding is None and nul >= 0:
        place = f"data.corpus: {span.shown}:{_Lines(span).number(content, nul)} holds a NUL byte, which no text has"
        zeros = [head[i::2].count(0) / (len(head) / 2) for i in range(2)]
        if max(zeros) < 0.3 or min(zeros) > 0.1:
            raise ConfigError(f"{place}. Take it out, for example with: {_through(span.shown, ['tr', '-d', NUL_FOR_TR])}")
        encoding, said = "UTF-16LE" if zeros[1] > zeros[0] else "UTF-16BE", "looks like"
    if encoding is not None:
        command = _through(span.shown, ["iconv", "-f", encoding, "-t", "UTF-8"])
        raise ConfigError(f"data.corpus: {span.shown} {said} {encoding}, but text must be UTF-8. Convert it with: {command}")


def _through(path: str, command: list[str]) -> str:
    """A shell's line that sends a file's text through a command."""
    unpacker = next((tool for suffix, tool in ((".gz", "gzip"), (".zst", "zstd")) if path.endswith(suffix)), None)
    words, name = " ".join(command), shlex.quote(path)
    return f"{unpacker} -dc {name} | {words} > NEW" if unpacker else f"{words} < {name} > NEW"


class _Lines:
    """Line numbers in a span's file; what comes before the span is counted once, when the first is asked for."""

    def __init__(self, span: Span):
        self._span = span
        self._before: int | None = None

    def number(self, content: bytes, offset: int) -> int:
        """Of the line with byte `offset` of the span's content, from 1."""
        return self.at(content.count(b"\n", 0, offset))

    def at(self, index: int) -> int:
        """Of the span's line `index`, counted from 0."""
        if self._before is None:
            self._before = _lines_before(self._span)
        return self._before + index + 1


def _decode(span: Span, name: str, raw: bytes, offset: int, content: bytes, lines: _Lines) -> Iterator[Document | BadLine]:
    """The document in `raw`, which begins at `offset` of `content`; a line that is no UTF-8 is reported and left out."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        kept = []
        first = content.count(b"\n", 0, offset)
        for i, line in enumerate(raw.split(b"\n")):
            try:
                kept.append(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield BadLine(span.shown, lines.at(first + i), f"not UTF-8 ({error.reason} at byte {error.start} of the line)")
        text = "\n".join(kept)
    if text.strip():
        yield Document(name, text)


def _read_text(span: Span, content: bytes) -> Iterator[Document | BadLine]:
    begin, lines = 0, _Lines(span)
    for end in [*(run.end() for run in BLANK_RUN.finditer(content)), len(content)]:
        while begin < end:
            cut = end if end - begin <= 2 * DOCUMENT_BYTES else min(_text_cut(content, begin + DOCUMENT_BYTES), end)
            raw = content[begin:cut]
            stripped = raw.strip(b"\r\n")
            lead = len(raw) - len(raw.lstrip(b"\r\n"))
            yield from _decode(span, f"{span.name}@{span.start + begin}", stripped, begin + lead, content, lines)
            begin = cut


def _read_jsonl(span: Span, content: bytes, text_key: str) -> Iterator[Document | BadLine]:
    offset, lines = span.start, _Lines(span)
    for i, line in enumerate(content.split(b"\n")):
        if line.strip():
            text, reason = _json_text(line, text_key)
            if reason:
                yield BadLine(span.shown, lines.at(i), reason)
            else:
                yield Document(f"{span.name}@{offset}", text)
        offset += len(line) + 1


def _json_text(line: bytes, text_key: str) -> tuple[str, str]:
    """The text of a line of JSON, or the reason why there is none."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return "", f"not UTF-8 ({error.reason} at byte {error.start} of the line)"
    except (ValueError, RecursionError) as error:
        return "", f"not JSON ({error})"
    if not isinstance(row, dict):
        return "", f"a JSON {type(row).__name__}, not an object with the field {text_key!r} (data.text_key)"
    if text_key not in row:
        has = ", ".join(map(repr, list(row)[:8])) or "none"
        return "", f"no field {text_key!r} (data.text_key); the line has {has}{_other_key(row)}"
    return _check_text(row[text_key], text_key)


def _other_key(row: dict[str, Any]) -> str:
    """Advice which field or column to take: the longest text of a row that has no data.text_key."""
    texts = {key: value for key, value in row.items() if isinstance(value, str) and value.strip()}
    return f". Try data.text_key={max(texts, key=lambda key: len(texts[key]))}" if texts else ""


def _check_text(text: Any, text_key: str) -> tuple[str, str]:
    if isinstance(text, bytes):
        return "", f"{text_key!r} is not UTF-8"
    if not isinstance(text, str):
        return "", f"{text_key!r} is {'null' if text is None else type(text).__name__}, not a text"
    if not text.strip():
        return "", f"{text_key!r} is empty"
    if "\0" in text:
        return "", f"{text_key!r} holds a NUL character"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "", f"{text_key!r} holds half of a surrogate pair, which is no character"
    return text, ""


def _parquet(path: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"data.corpus: {path} is no readable Parquet file: {str(error).splitlines()[0]}") from error


def _read_parquet(span: Span, text_key: str) -> Iterator[Document | BadLine]:
    file = _parquet(span.path)
    if text_key not in file.schema_arrow.names:
        rows = next(file.iter_batches(batch_size=1), None)
        raise ConfigError(
            f"data.text_key={text_key}: {span.shown} has no such column; its columns are {', '.join(file.schema_arrow.names)}"
            + (_other_key(rows.to_pylist()[0]) if rows is not None and rows.num_rows else "")
        )
    row = sum(file.metadata.row_group(i).num_rows for i in range(span.start))
    for group in range(span.start, span.end):
        for value in _column(file, group, text_key, span):
            text, reason = _check_text(value, text_key)
            yield BadLine(span.shown, row + 1, reason) if reason else Document(f"{span.name}@{row}", text)
            row += 1


def _column(file: Any, group: int, text_key: str, span: Span) -> Iterator[Any]:
    """The values of a row group's column; bytes where a string is no UTF-8. Raises ConfigError for a damaged file."""
    import pyarrow

    try:
        column = file.read_row_group(group, columns=[text_key]).column(0)
        is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
        values = (column.cast(pyarrow.large_binary()) if is_text else column).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"data.corpus: {span.shown} cannot be read in row group {group}: {str(error).splitlines()[0]}") from error
    for value in values:
        if is_text and value is not None:
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError:
                pass  # reported as what is no text
        yield value


def _read_topics(span: Span, content: bytes) -> Iterator[Document]:
    """pydoc's topics: prose about the language, in a dictionary literal."""
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Dict):
            for topic, text in ast.literal_eval(node).items():
                yield Document(f"{span.name}@{topic}", text)


def _lines_before(span: Span) -> int:
    """Line ends of the file before the span; asked for only when a line is bad."""
    count, position = 0, 0
    with open(span.path, "rb") as file:
        while position < span.start:
            block = file.read(min(1 << 24, span.start - position))
            count += block.count(b"\n")
            position += len(block)
    return count


def document_hash(name: str) -> int:
    """A stable 64-bit hash of a document's name; it decides the validation split."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


SENTENCE_END = re.compile(r"[.!?]['\")\]]*\s+(?=['\"(\[]*[A-Z0-9])|\n[ \t]*\n\s*")
LINE_END = re.compile(r"\n\s*?(?=[ \t]*\S)|\n\s*\Z")
MAX_SENTENCE_CHARACTERS = 400


def split_sentences(text: str, by_line: bool) -> list[str]:
    """Cut a text into sentences; joined they give the text again.

    Prose is cut after ., ! or ? before a capital, and at empty lines; code (`by_line`) after each line. Longer sentences than
    MAX_SENTENCE_CHARACTERS are cut at spaces, so that no text is lost to a sample's length.
    """
    ends = [match.end() for match in (LINE_END if by_line else SENTENCE_END).finditer(text)]
    sentences = []
    begin = 0
    for end in [*ends, len(text)]:
        if not text[begin:end].strip():
            continue  # goes with the next
        while end - begin > MAX_SENTENCE_CHARACTERS:
            cut = text.rfind(" ", begin + 1, begin + MAX_SENTENCE_CHARACTERS)
            cut = begin + MAX_SENTENCE_CHARACTERS if cut < 0 else cut
            sentences.append(text[begin:cut])
            begin = cut
        sentences.append(text[begin:end])
        begin = end
    if begin < len(text) and sentences:
        sentences[-1] += text[begin:]
    return sentences
