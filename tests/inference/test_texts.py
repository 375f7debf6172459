"""Files to score and to take prompts from are read as training reads them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
import zstandard

from base.errors import ConfigError
from inference.texts import prompts_of, read_prompts, read_texts
from tests.data.test_documents_in_text import documents

pytestmark = pytest.mark.fast

ODD = b"\xef\xbb\xbfone\r\ntwo\xe2\x80\xa8still two\x0c\rstill\n\nlast \xc2\x85 line"
TEXT = "one\r\ntwo\u2028still two\f\rstill\n\nlast \x85 line"
RECORDS = [{"text": "a\r\nb\u2028", "body": "c"}, {"text": "d", "body": "e\n"}]


@pytest.mark.parametrize("name", ["a", "a.txt", "a.md", "a.csv", "a.txt.gz", "a.raw.xz"])
def test_texts_are_read_as_training_reads_them(tmp_path: Path, name: str) -> None:
    packed = {".gz": gzip.compress(ODD), ".xz": lzma.compress(ODD)}
    path = tmp_path / name
    path.write_bytes(packed.get(path.suffix, ODD))
    assert read_texts(path, "--files") == [TEXT]
    if name.endswith(".txt"):
        for rule in ("file", "blank_line", "line"):
            assert read_texts(path, "--files", documents_in_text=rule) == documents(path, rule)
    assert read_prompts(path, "--prompts-file") == ["one", "two\u2028still two\f\rstill", "", "last \x85 line"]
    assert prompts_of(ODD + b"\n", "standard input") == read_prompts(path, "--prompts-file")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson.zst", "a.json.bz2", "array.json"])
def test_rows_of_json(tmp_path: Path, name: str) -> None:
    lines = json.dumps(RECORDS, indent=2) if "array" in name else "".join(json.dumps(row) + "\n" for row in RECORDS)
    path, content = tmp_path / name, lines.encode()
    path.write_bytes({".zst": zstandard.compress(content), ".bz2": bz2.compress(content)}.get(path.suffix, content))
    for key in ("text", "body"):
        for read in (read_texts, read_prompts):
            assert read(path, "--files", key) == [row[key] for row in RECORDS]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "text".encode("utf-16"), "--files (PATH) begins with the byte order mark of UTF-16"),
        ("a.txt", b"a text\nb\0c of words\n", "--files (PATH):2 contains a NUL byte"),
        (
            "a.txt",
            b"a\ncaf\xe9\n",
            "--files (PATH) has a line that cannot be used: PATH:2: not UTF-8",
        ),
        ("a.txt.gz", b"none", "--files: cannot decompress PATH"),
        (
            "a.jsonl",
            b'{"body": "b"}\n' * 2,
            "2 lines that cannot be used, the first: PATH:1: no field 'text' (--text-key)",
        ),
        ("a.jsonl", b'{"body": "b"}\n', "Try --text-key=body"),
        ("folder", None, "--files (PATH) cannot be read: Is a directory. Check the path."),
        ("missing", None, "--files (PATH) cannot be read: No such file or directory. Check the path."),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    elif name == "folder":
        path.mkdir()
    for read in (read_texts, read_prompts):
        with pytest.raises(ConfigError) as error:
            read(path, "--files")
        assert said.replace("PATH", str(path)) in str(error.value) and "data." not in str(error.value)
    if name == "a.jsonl":  # what is proposed works
        assert set(read_texts(path, "--files", "body")) == {"b"}


def test_what_standard_input_cannot_be() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^standard input has a line that cannot be used: line 2: not UTF-8",
    ):
        prompts_of(b"a\n\xe9\n", "standard input")
