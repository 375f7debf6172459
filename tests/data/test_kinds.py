"""Which files are read and as what, and that what is left out is said."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shlex
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard

from base.errors import ConfigError
from data.corpus import parse_corpus
from data.prepare import prepare
from data.prepare.command import main
from tests.data.test_corpus import read
from tests.data.token_files import write_tokens

pytestmark = pytest.mark.fast

JSON_ROWS = [{"text": f"Document {i}.\nIts second line.", "url": "u"} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in JSON_ROWS).encode()
PACKED = {
    ".gz": gzip.compress(LINES),
    ".zst": zstandard.compress(LINES),
    ".xz": lzma.compress(LINES[:100]) + lzma.compress(LINES[100:]),
    ".bz2": bz2.compress(LINES[:100]) + bz2.compress(LINES[100:]),
}


@pytest.mark.parametrize(
    "name",
    [
        "c4.00000-of-01024.json.gz",
        "dolma-0000.json.zst",
        "a.json",
        "a.ndjson",
        "a.jsonl.xz",
        "a.jsonl.bz2",
        "A.JSONL.GZ",
    ],
)
def test_names_of_json_lines(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(PACKED.get(path.suffix.lower(), LINES))
    documents, bad = read(str(path), tmp_path)
    assert [document.text for document in documents] == [row["text"] for row in JSON_ROWS] and not bad


@pytest.mark.parametrize("name", ["wiki.train.raw", "wiki.valid.tokens", "BOOK.TXT", "a.txt.XZ"])
def test_names_of_text(tmp_path, name):
    path, content = tmp_path / name, b" \n = Title = \n \n Words . \n"
    path.write_bytes(lzma.compress(content) if name.endswith("XZ") else content)
    assert [document.text for document in read(str(path), tmp_path)[0]] == [content.decode()]
    assert len(read(str(path), tmp_path, rule="blank_line")[0]) == 2


@pytest.mark.parametrize(
    ("content", "texts", "bad"),
    [
        (json.dumps(JSON_ROWS), 5, []),
        (json.dumps(JSON_ROWS, indent=2), 5, []),
        ("\ufeff" + json.dumps(JSON_ROWS, indent=2), 5, []),
        (json.dumps(JSON_ROWS[0], indent=2), 1, []),
        ("\n".join(json.dumps(row, indent=2) for row in JSON_ROWS), 5, []),  # as jq writes them
        ("[]", 0, []),
        (json.dumps([*JSON_ROWS, 7, {"x": 1}], indent=2), 5, ["22: a JSON int", "23: no field 'text'"]),
        (json.dumps(JSON_ROWS, indent=2)[:-1], 5, ["22: not JSON (the end of the array is missing"]),
        (json.dumps(JSON_ROWS, indent=2)[:-40], 4, ["18: not JSON (Unterminated"]),
        ("[1]\n[2]\n" + LINES.decode(), 5, ["1: a JSON list", "2: a JSON list"]),
        ('{"text": "cut\n' + LINES.decode(), 5, ["1: not JSON"]),
    ],
)
def test_a_json_of_one_value_is_read_as_its_objects(tmp_path, content, texts, bad):
    path = tmp_path / "a.json"
    path.write_text(content)
    documents, found = read(str(path), tmp_path)
    assert [document.text for document in documents] == [row["text"] for row in JSON_ROWS[:texts]]
    assert len({document.name for document in documents}) == texts
    assert len(found) == len(bad)
    assert all(str(line).startswith(f"{path}:{said}") for line, said in zip(found, bad, strict=True))


def test_a_list_inside_an_object_is_taken_out_by_the_command_that_is_given(tmp_path):
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"version": 2, "it's data": JSON_ROWS}, indent=1))
    (line,) = read(str(path), tmp_path)[1]
    command = line.reason.split("extract them with: ")[1]
    command = command.replace("python", shlex.quote(sys.executable), 1).replace("FILE", "squad.json")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert [document.text for document in read(str(tmp_path / "NEW.jsonl"), tmp_path)[0]] == [
        r["text"] for r in JSON_ROWS
    ]


@pytest.mark.parametrize("name", ["corpus.zip", "corpus.tar.gz"])
def test_an_archive_is_unpacked_by_the_command_that_is_given(tmp_path, name):
    (tmp_path / "a.txt").write_text("Words.")
    path = tmp_path / name
    if name.endswith("zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(tmp_path / "a.txt", "a.txt")
    else:
        with tarfile.open(path, "w:gz") as tar:
            tar.add(tmp_path / "a.txt", "a.txt")
    with pytest.raises(ConfigError, match="files of this kind cannot be read") as error:
        parse_corpus(str(path))
    command = str(error.value).split("for example with: ")[1].replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert [document.text for document in read(str(tmp_path / "FOLDER"), tmp_path)[0]] == ["Words."]


def test_what_a_folder_leaves_out_is_counted_and_named(config, tmp_path, capsys):
    folder = tmp_path / "corpus"
    for name in ("sub/deep", ".git", "elsewhere"):
        (folder / name).mkdir(parents=True)
    for name in ("a.txt", "B.TXT", "README.md", "sub/c.raw"):
        (folder / name).write_text(f"Text of {name}.\n")
    (folder / "d.json.gz").write_bytes(PACKED[".gz"])
    for name in ("x.csv", "sub/y.CSV", "z.tar.gz", "LICENSE", ".hidden.txt", "sub/lone.bin", "half.idx"):
        (folder / name).write_text("nothing")
    (folder / ".git" / "words.txt").write_text("not read")
    (folder / "sub" / "deep" / "empty.txt").touch()
    os.symlink(tmp_path / "nowhere", folder / "gone.txt")
    os.symlink(folder / "sub", folder / "again")
    os.mkfifo(folder / "pipe.txt")
    write_tokens(folder / "tokens", np.uint16, [[[1, 2]]])
    (source,) = parse_corpus(str(folder))
    assert [file.name for file in source.files] == [
        "B.TXT", "README.md", "a.txt", "d.json", "sub/c.raw", "sub/deep/empty.txt"
    ]  # fmt: skip
    (note,) = source.notes
    read_, left = note.split("; left out: ")
    assert read_ == f"data.corpus={folder}: it reads 1 .json.gz, 1 .md, 1 .raw, 2 .txt"
    assert left.split("), ") == [
        "1 broken link (gone.txt",
        "1 empty (sub/deep/empty.txt",
        "1 hidden (.hidden.txt",
        "1 hidden folder (.git",
        "1 link to a folder (again",
        "1 not a regular file (pipe.txt",
        "1 without a suffix (LICENSE",
        "2 .csv (sub/y.CSV, ...",
        "1 .bin without its .idx (sub/lone.bin",
        "1 .bin/.idx next to text (name it by its path to use it) (tokens.bin",
        "1 .idx without its .bin (half.idx",
        "1 .tar.gz (z.tar.gz)",
    ]
    arguments = [f"data.corpus={folder}", f"data.tokenizer={config.tokenizer}", f"data.cache_dir={config.cache_dir}"]
    for _ in range(2):  # the second time from the cache
        assert main(arguments) == 0
        assert f"note        {note}\n" in capsys.readouterr().out


def test_a_folder_of_one_kind_says_nothing_and_one_without_any_names_what_it_has(tmp_path):
    (tmp_path / "a.txt").write_text("Words.")
    assert parse_corpus(str(tmp_path))[0].notes == ()
    (tmp_path / "a.txt").rename(tmp_path / "a.pdf")
    says = r"no file that can be read; it contains 1 \.pdf \(a\.pdf\)\. Give a folder with \.txt, "
    with pytest.raises(ConfigError, match=says):
        parse_corpus(str(tmp_path))


def test_a_folder_of_token_files(config, tmp_path):
    """Each pair is a source, by size, or by its share of the folder's weight; beside text they are named."""
    folder = tmp_path / "tokens"
    (folder / "sub").mkdir(parents=True)
    for name, dtype, length in (("a", np.uint16, 300), ("sub/b", np.int32, 100)):
        write_tokens(folder / name, dtype, [[np.full(length, 7, dtype)]])
    prepared = prepare(replace(config, corpus=str(folder)), "gpt", False)
    assert [file.prefix for file in prepared.train] == [str(folder / "a"), str(folder / "sub/b")]
    assert [file.weight for file in prepared.train] == [0.75, 0.25]
    assert [source["name"] for source in prepared.identity["sources"]] == [f"{folder}/a", f"{folder}/sub/b"]
    blend = [{"path": str(folder), "weight": 0.5}, {"path": config.corpus, "weight": 0.5}]
    prepared = prepare(replace(config, corpus=blend), "gpt", False)
    assert [file.weight for file in prepared.train] == [0.375, 0.125, 0.5]
    (folder / "lone.idx").touch()
    notes = prepare(replace(config, corpus=str(folder)), "gpt", False).notes
    note = next(note for note in notes if "left out" in note)
    assert "it reads 2 .bin/.idx pairs; left out: 1 .idx without its .bin (lone.idx)" in note
    (folder / "text.jsonl").write_bytes(LINES)
    (source,) = parse_corpus(str(folder))
    assert (
        source.megatron is None
        and "2 .bin/.idx next to text (name it by its path to use it) (a.bin, ...)" in source.notes[0]
    )
    named = parse_corpus([str(folder), str(folder / "a.bin")])
    assert [source.megatron for source in named] == [None, str(folder / "a")]
    assert Path(named[0].files[0].path).name == "text.jsonl"
