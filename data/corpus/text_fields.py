"""The texts of structured files: lines of JSON, objects of a JSON array, and columns of Parquet files."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from base.errors import ConfigError
from data.corpus.documents import BadLine, Document, Span

HEAD_BYTES = 1 << 20
SPACES = re.compile(r"[ \t\r\n]*")
LETTER = re.compile(r"[^\W\d_]")
# Fields among which corpora of questions and answers, instructions or preferences divide a text.
SHARES_OF_A_TEXT = frozenset(
    "prompt completion response question answer instruction input inputs output outputs target targets context query "
    "chosen rejected problem solution system user assistant human title abstract premise hypothesis".split()
)


def json_text(line: bytes, text_key: str) -> tuple[str, str]:
    """Return (text, "") for a line of JSON, or ("", reason) if the line contains no usable text."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return "", f"not UTF-8 ({error.reason} at byte {error.start} of the line)"
    except (ValueError, RecursionError) as error:
        return "", f"not JSON ({error})"
    return _row_text(row, text_key)


def _row_text(row: Any, text_key: str) -> tuple[str, str]:
    if not isinstance(row, dict):
        return "", f"a JSON {type(row).__name__}, not an object with the field {text_key!r} (data.text_key)"
    if text_key not in row:
        has = ", ".join(map(repr, list(row)[:8])) or "none"
        return "", f"no field {text_key!r} (data.text_key); its fields are {has}{_other_key(row)}"
    return _check_text(row[text_key], text_key)


def is_one_value(path: str) -> bool:
    """Return whether a .json file contains one array or object rather than JSON lines, judging by its first line."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        more = bool(file.read(1))
    first, line_end, rest = head.partition(b"\n")
    first, rest = first.rstrip(), rest.lstrip()
    if first.startswith(b"["):
        return not (line_end and first.endswith(b"]") and (rest or more))  # else each line is a list
    return first.startswith(b"{") and bool(line_end) and not first.endswith(b"}") and not rest.startswith(b"{")


def json_values(content: bytes, text_key: str) -> Iterator[tuple[int, int, str, str]]:
    """Yield (number, line counted from 0, text, reason) for each object of a JSON array or a sequence of JSON values.
    The reason says why the text is missing. Stops at the first position that is not JSON."""
    line = position = number = 0
    try:
        source = content.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 ({error.reason} at byte {error.start} of the file), so the entire file is left out"
        yield 0, content.count(b"\n", 0, error.start), "", reason
        return
    decoder, in_array, offset = json.JSONDecoder(), False, _skip_spaces(source, 0)
    while offset < len(source):
        mark = source[offset]
        if mark in ",]" if in_array else mark == "[":
            in_array, offset = mark != "]", _skip_spaces(source, offset + 1)
            continue
        line, position = line + source.count("\n", position, offset), offset
        try:
            row, end = decoder.raw_decode(source, offset)
        except (ValueError, RecursionError) as error:
            yield number, line, "", f"not JSON ({error}); the rest of the file is left out"
            return
        text, reason = _row_text(row, text_key)
        yield number, line, text, reason + (_list_advice(row) if reason else "")
        number, offset = number + 1, _skip_spaces(source, end)
    if in_array:
        yield number, source.count("\n"), "", "not JSON (the end of the array is missing: the file is cut off)"


def _skip_spaces(text: str, position: int) -> int:
    found = SPACES.match(text, position)
    assert found
    return found.end()


def _list_advice(row: Any) -> str:
    """Return advice with a command that extracts the rows of an object such as {"data": [...]}; an empty string for
    other values."""
    if not isinstance(row, dict):
        return ""
    lists = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if not lists:
        return ""
    code = f"import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)[{lists[0]!r}]]"
    return f". {lists[0]!r} is a list of objects; extract them with: python -c {shlex.quote(code)} < FILE > NEW.jsonl"


def _other_key(row: dict[str, Any], parquet: str | None = None) -> str:
    """Return advice on which field or column to read, from a row that lacks data.text_key.

    Proposes the field with the longest text, or a command that joins several fields, such as questions and answers.
    parquet: the name of the file if it is a Parquet file.
    """
    texts = {key: value for key, value in row.items() if isinstance(value, str) and LETTER.search(value)}
    # Including fields that are empty in this row, as the input of an instruction often is.
    shares = [key for key, value in row.items() if isinstance(value, str) and key.lower() in SHARES_OF_A_TEXT]
    if len(shares) > 1:
        join = f'json.dumps({{"text": "\\n\\n".join(row[key] for key in {json.dumps(shares)} if row.get(key))}})'
        if parquet is None:
            code = f"import json, sys; [print({join}) for row in map(json.loads, sys.stdin)]"
            command = f"python -c {shlex.quote(code)} < FILE > NEW.jsonl"
        else:
            loop = "for batch in pq.ParquetFile(sys.argv[1]).iter_batches() for row in batch.to_pylist()"
            code = f"import json, sys, pyarrow.parquet as pq; [print({join}) {loop}]"
            command = f"python -c {shlex.quote(code)} {shlex.quote(parquet)} > NEW.jsonl"
        return f". The text is in {len(shares)} fields ({', '.join(shares)}); join them, for example with: {command}"
    return f". Try data.text_key={max(texts, key=lambda key: len(texts[key]))}" if texts else ""


def _check_text(text: Any, text_key: str) -> tuple[str, str]:
    if isinstance(text, bytes):
        return "", f"{text_key!r} is not UTF-8"
    if not isinstance(text, str):
        return "", f"{text_key!r} is {'null' if text is None else type(text).__name__}, not a text"
    if not text.strip():
        return "", f"{text_key!r} is empty"
    if "\0" in text:
        return "", f"{text_key!r} contains a NUL character"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "", f"{text_key!r} contains half of a surrogate pair, which is not a character"
    return text, ""


def open_parquet(path: str) -> Any:
    """Open a Parquet file. Raises ConfigError if it is not readable."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"data.corpus: {path} is not a readable Parquet file: {str(error).splitlines()[0]}. Download it again"
        ) from error


def read_parquet(span: Span, text_key: str) -> Iterator[Document | BadLine]:
    """Yield a Document, or a BadLine with the reason, for each row in a span of a Parquet file. Raises ConfigError."""
    file = open_parquet(span.path)
    if text_key not in file.schema_arrow.names:
        first = next(file.iter_batches(batch_size=1), None)
        advice = _other_key(first.to_pylist()[0], span.shown) if first is not None and first.num_rows else ""
        raise ConfigError(
            f"data.text_key={text_key} is not a column of {span.shown}; the columns are "
            f"{', '.join(file.schema_arrow.names)}{advice or '. Name the column with the text'}"
        )
    row = sum(file.metadata.row_group(i).num_rows for i in range(span.start))
    for group in range(span.start, span.end):
        for value in _column(file, group, text_key, span):
            text, reason = _check_text(value, text_key)
            yield BadLine(span.shown, row + 1, reason) if reason else Document(f"{span.name}@{row}", text)
            row += 1


def _column(file: Any, group: int, text_key: str, span: Span) -> Iterator[Any]:
    """Yield the values of column `text_key` in row group `group` of a Parquet file. Text that is not UTF-8 is yielded
    as bytes. Raises ConfigError if the file is damaged."""
    import pyarrow
    from pyarrow import types

    text_types = (
        *(types.is_string, types.is_large_string, types.is_string_view),
        *(types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary),
    )
    try:
        column = file.read_row_group(group, columns=[text_key]).column(0)
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        # As bytes: text may be stored as binary, and a string that is not UTF-8 must make only one row unusable.
        is_text = any(is_type(column.type) for is_type in text_types)
        values = (column.cast(pyarrow.large_binary()) if is_text else column).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"data.corpus: row group {group} of {span.shown} cannot be read: {str(error).splitlines()[0]}. Download "
            "the file again"
        ) from error
    for value in values:
        if is_text and value is not None:
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError:
                pass  # _check_text reports it
        yield value
