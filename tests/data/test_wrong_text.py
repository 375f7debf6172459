"""What is no text is refused or left out, and said: with the file, the line, and what to do."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from base.errors import ConfigError
from data.corpus import BadLine, parse_corpus, plan_shards, read_span, unpack
from data.corpus.documents import Document
from data.prepare import prepare
from data.prepare.command import main

pytestmark = pytest.mark.fast

TEXT = "A text of some words.\nAnd a second line.\n" * 20


def read(path: Path, text_key: str = "text", shard_bytes: int | None = None) -> tuple[list[str], list[str]]:
    """Documents and bad lines of a file."""
    (source,) = parse_corpus(str(path))
    unpacked = {}
    for file in source.files:
        if file.compression:
            unpacked[file.path] = f"{path}.unpacked"
            unpack(file.path, unpacked[file.path])
    items = [
        item for shard in plan_shards(source.files, unpacked) for span in shard for item in read_span(span, text_key)
    ]
    return [i.text for i in items if isinstance(i, Document)], [str(i) for i in items if isinstance(i, BadLine)]


def write(path: Path, content: bytes) -> Path:
    packed = {".gz": gzip.compress(content), ".zst": zstandard.compress(content)}
    path.write_bytes(packed.get(path.suffix, content))
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.md", "a.py", "a.txt.gz", "a.jsonl.zst"])
@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("utf-16", "begins with the byte order mark of UTF-16,"),
        ("utf-32", "begins with the byte order mark of UTF-32,"),
        ("utf-16-le", "looks like UTF-16LE,"),
        ("utf-16-be", "looks like UTF-16BE,"),
    ],
)
def test_utf_16_is_refused_with_the_command_that_converts_it(tmp_path, name, encoding, said):
    text = json.dumps({"text": TEXT}) + "\n" if "jsonl" in name else TEXT
    path = write(tmp_path / name, text.encode(encoding))
    with pytest.raises(ConfigError) as error:
        read(path)
    assert f"data.corpus: {path} {said} but text must be UTF-8. Convert it with: " in str(error.value)
    command = str(error.value).split("Convert it with: ")[1]
    assert command.startswith(
        {".gz": "gzip -dc", ".zst": "zstd -dc"}.get(path.suffix, "iconv -f")
    ) and command.endswith("> NEW")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.rst", "a.txt.gz"])
def test_a_nul_byte_is_refused_with_its_line(tmp_path, name):
    lines = [json.dumps({"text": f"Text {i}."}).encode() for i in range(9)]
    lines[6] = lines[6][:-3] + b"\0" + lines[6][-3:]
    path = write(tmp_path / name, b"\n".join(lines))
    with pytest.raises(ConfigError, match=rf"{path}:7 contains a NUL byte.*tr -d '\\000'"):
        read(path)


def test_a_nul_byte_in_a_later_part_has_its_line(tmp_path):
    lines = [b"A line of a long text, which is cut into parts.\n"] * 50_000
    lines[40_000] = b"here\0\n"
    with pytest.raises(ConfigError, match=r"a.txt:40001 contains a NUL byte"):
        read(write(tmp_path / "a.txt", b"".join(lines)))


def test_values_that_are_no_text_are_left_out(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "good"}\n{"text": "a\\u0000b"}\n{"text": "\xe9"}\n')
    assert read(path)[0] == ["good"]
    assert [line.split(": ", 1)[0] for line in read(path)[1]] == [f"{path}:2", f"{path}:3"]
    column = pyarrow.array([b"good", b"a\0b", b"\xe9", None], pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"text": column, "number": pyarrow.array([1, 2, 3, 4])})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    documents, bad = read(tmp_path / "a.parquet")
    assert documents == ["good"]
    assert [line.split(": ", 1)[1] for line in bad] == [
        "'text' contains a NUL character",
        "'text' is not UTF-8",
        "'text' is null, not a text",
    ]


def test_a_column_is_named(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.table({"id": ["1"], "content": ["A long text."], "n": [3]}), tmp_path / "a.parquet"
    )
    with pytest.raises(
        ConfigError,
        match=r"data.text_key=text is not a column of .*a.parquet; the columns are .*Try data.text_key=content$",
    ):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("tokenizer", ["sentencepiece", None])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b'{"id": "1", "content": "A text."}\n' * 200,
            "'text' (data.text_key); its fields are 'id', 'content'. Try data.text_key=content",
        ),
        (b"nonsense\n" * 200, ":1: not JSON"),
        (
            b'{"text": "\xe9"}\n' * 200,
            ":1: not UTF-8 (invalid continuation byte at byte 10 of the line). Text must be UTF-8: convert it",
        ),
        (b'{"text": ""}\n{"text": 3}\n' * 100, ":1: 'text' is empty; "),
        (b"", "contains no text"),
    ],
)
def test_only_bad_lines_say_why(config, jsonl, tokenizer, content, words):
    jsonl.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        prepare(replace(config, tokenizer=tokenizer or config.tokenizer), "gpt", False)
    message = str(error.value)
    assert words in message and "\n" not in message
    assert (
        not content
        or f"data.corpus: corpus.jsonl contains no documents: all of its 200 lines are bad: {jsonl}:1:" in message
    )


def test_the_command_line_ends_with_one_line_and_status_2(config, jsonl, capsys):
    arguments = [f"data.corpus={jsonl}", f"data.tokenizer={config.tokenizer}", f"data.cache_dir={config.cache_dir}"]
    for content in ("text".encode("utf-16"), b'{"body": "x"}\n'):
        jsonl.write_bytes(content)
        assert main(arguments) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: data.corpus: ")
