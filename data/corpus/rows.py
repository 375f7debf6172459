"""The text of a row: a line of JSON, an object of a JSON array, or a value of a Parquet column."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

HEAD_BYTES = 1 << 20
SPACES = re.compile(r"[ \t\r\n]*")
LETTER = re.compile(r"[^\W\d_]")
# Fields that hold a share of a text each, in corpora of questions and answers, instructions, and preferences.
SHARES_OF_A_TEXT = frozenset(
    "prompt completion response question answer instruction input inputs output outputs target targets context query "
    "chosen rejected problem solution system user assistant human title abstract premise hypothesis".split()
)


def json_text(line: bytes, text_key: str) -> tuple[str, str]:
    """The text of a line of JSON, or the reason why there is none."""
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
        return "", f"no field {text_key!r} (data.text_key); the line has {has}{other_key(row)}"
    return check_text(row[text_key], text_key)


def is_one_value(path: str) -> bool:
    """Whether a .json file is an array or an object over several lines, by its first line, and not an object a line."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        more = bool(file.read(1))
    first, line_end, rest = head.partition(b"\n")
    first, rest = first.rstrip(), rest.lstrip()
    if first.startswith(b"["):
        return not (line_end and first.endswith(b"]") and (rest or more))  # else each line is a list
    return first.startswith(b"{") and bool(line_end) and not first.endswith(b"}") and not rest.startswith(b"{")


def json_values(content: bytes, text_key: str) -> Iterator[tuple[int, int, str, str]]:
    """The objects of a JSON array, or of values one after another: (number, line from 0, text, or the reason why there
    is none). What is no JSON ends it."""
    line = position = number = 0
    try:
        source = content.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 ({error.reason} at byte {error.start} of the file), so the file is left out"
        yield 0, content.count(b"\n", 0, error.start), "", reason
        return
    decoder, in_array, place = json.JSONDecoder(), False, _skip_spaces(source, 0)
    while place < len(source):
        mark = source[place]
        if mark in ",]" if in_array else mark == "[":
            in_array, place = mark != "]", _skip_spaces(source, place + 1)
            continue
        line, position = line + source.count("\n", position, place), place
        try:
            row, end = decoder.raw_decode(source, place)
        except (ValueError, RecursionError) as error:
            yield number, line, "", f"not JSON ({error}); what follows in the file is left out"
            return
        text, reason = _row_text(row, text_key)
        yield number, line, text, reason + (_list_advice(row) if reason else "")
        number, place = number + 1, _skip_spaces(source, end)
    if in_array:
        yield number, source.count("\n"), "", "not JSON (the array has no end: the file is cut off)"


def _skip_spaces(text: str, place: int) -> int:
    found = SPACES.match(text, place)
    assert found
    return found.end()


def _list_advice(row: Any) -> str:
    """How to take out the rows of an object that holds them as a list, as {"data": [...]} does."""
    if not isinstance(row, dict):
        return ""
    lists = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if not lists:
        return ""
    code = f"import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)[{lists[0]!r}]]"
    return (
        f". Its {lists[0]!r} is a list of objects; take them out with: python -c {shlex.quote(code)} < FILE > NEW.jsonl"
    )


def other_key(row: dict[str, Any], parquet: str | None = None) -> str:
    """Advise which field or column to read in the place of data.text_key, by a row that lacks it: its longest text, or
    where its text stands in several fields, as a question and its answer do, a command that joins them. `parquet`: the
    file, if it is one."""
    texts = {key: value for key, value in row.items() if isinstance(value, str) and LETTER.search(value)}
    # also those that are empty in this row, as an instruction's input often is
    shares = [key for key, value in row.items() if isinstance(value, str) and key.lower() in SHARES_OF_A_TEXT]
    if len(shares) > 1:
        join = f'json.dumps({{"text": "\\n\\n".join(row[key] for key in {json.dumps(shares)} if row.get(key))}})'
        if parquet is None:
            code = f"import json, sys; [print({join}) for row in map(json.loads, sys.stdin)]"
            command = f"python -c {shlex.quote(code)} < FILE > NEW.jsonl"
        else:
            rows = "for batch in pq.ParquetFile(sys.argv[1]).iter_batches() for row in batch.to_pylist()"
            code = f"import json, sys, pyarrow.parquet as pq; [print({join}) {rows}]"
            command = f"python -c {shlex.quote(code)} {shlex.quote(parquet)} > NEW.jsonl"
        return (
            f". Its text stands in {len(shares)} fields ({', '.join(shares)}); join them, for example with: {command}"
        )
    return f". Try data.text_key={max(texts, key=lambda key: len(texts[key]))}" if texts else ""


def check_text(text: Any, text_key: str) -> tuple[str, str]:
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
