"""Files and folders that are not what their names say are refused in one line, with a command that helps."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from base.errors import ConfigError
from data.corpus import parse_corpus
from tests.data.test_wrong_text import read

pytestmark = pytest.mark.fast

JSON_LINES = b"".join(json.dumps({"text": f"Text {i}."}).encode() + b"\n" for i in range(50))
LFS = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daa\nsize 9\n"
)
ANNEX = b"/annex/objects/SHA256E-s31390--f50d7ac4c6b9031379986bc362fcefb65f1e52621ce1708d537e740fefc59cc0.txt\n"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.md", "a.parquet", "a.txt.gz", "a.jsonl.zst"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LFS, "is a git-lfs pointer, not the file itself. Fetch the file in its folder: git lfs pull --include=a."),
        (ANNEX, "is a git-annex pointer, not the file itself. Fetch the file: git annex get "),
        (b"Entry not found", "contains a server's error (Entry not found), not the file. Download the file again."),
        (b'{"error":"Invalid credentials in header"}', "contains a server's error ("),
        (b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title>", "is a saved error page (404 Not Found), not"),
        (b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>', "is a saved error page (NoSuchKey), not"),
    ],
)
def test_what_stands_for_another_file_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert f"{path} {words}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "version https://git-lfs.example is how it begins\n",
        "/annex/objects/ is a folder, he said, and went on to say more\nof it\n",
        "<!doctype html>\n<html><title>A page of recipes</title><p>Not Found is a dish.",
        "<html>\nno title, and 404\n",
        "Not Found\nis a novel of two lines.\n",
        '{"error": "one"}\n{"text": "two"}\n',
        "BZh is no magic number where text follows it\n",
        "PAR1 begins a line of golf\n",
        "PK of the match\n",
    ],
)
def test_text_about_such_files_is_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text)
    assert "".join(read(path)[0]).strip() == text.strip()


@pytest.mark.parametrize("name", ["a.jsonl", "a b.txt", "a.json"])
def test_compressed_text_without_its_suffix_is_renamed_by_the_command(tmp_path: Path, name: str) -> None:
    content = b"Text of some words, and more.\n" * 20 if name.endswith(".txt") else JSON_LINES
    for packed in (gzip.compress(content), zstandard.compress(content), lzma.compress(content), bz2.compress(content)):
        path = tmp_path / name
        path.write_bytes(packed)
        with pytest.raises(ConfigError, match="is compressed with") as error:
            read(path)
        subprocess.run(str(error.value).split("right suffix: ")[1], shell=True, check=True)
        (renamed,) = set(tmp_path.glob(f"{name}.*")) - set(tmp_path.glob("*.unpacked"))
        assert read(renamed)[0]
        renamed.unlink()


def test_parquet_under_another_name_is_renamed_by_the_command(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["A text."]}), tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="a.jsonl is Parquet, not text") as error:
        read(tmp_path / "a.jsonl")
    subprocess.run(str(error.value).split("right suffix: ")[1], shell=True, check=True)
    assert read(tmp_path / "a.parquet")[0] == ["A text."]


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.binary(),
        pyarrow.large_binary(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.binary_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.binary()),
    ],
    ids=str,
)
def test_text_in_a_column_of_any_type_of_bytes_is_read(tmp_path: Path, kind: pyarrow.DataType) -> None:
    plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    column = pyarrow.array(["Größe", "plain", None], pyarrow.string()).cast(plain)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": column.dictionary_encode() if plain != kind else column}), tmp_path / "a.parquet"
    )
    documents, bad = read(tmp_path / "a.parquet")
    assert documents == ["Größe", "plain"] and [line.split(": ", 1)[1] for line in bad] == [
        "'text' is null, not a text"
    ]


PAIRS = [
    {"prompt": "What is it?", "completion": "A very long answer, as they are."},
    {"instruction": "Add.", "input": "", "output": "3", "id": "7"},
    {"instruction": "Add more.", "input": "1 and 2", "output": "3", "id": "8"},
]


@pytest.mark.parametrize("table_rows", [PAIRS[:1], PAIRS[1:]], ids=["prompts", "alpaca"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_texts_in_several_fields_are_joined_by_the_command(
    tmp_path: Path, table_rows: list[dict[str, str]], kind: str
) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table_rows))
        said = read(path)[1][0]
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table_rows), path)
        with pytest.raises(ConfigError) as error:
            read(path)
        said = str(error.value)
    assert "Try data.text_key" not in said
    command = said.split("for example with: ")[1].replace("FILE", path.name).replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    expected = ["\n\n".join(row[key] for key in row if key != "id" and row[key]) for row in table_rows]
    assert read(tmp_path / "NEW.jsonl")[0] == expected


def test_a_field_without_letters_is_not_proposed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "1", "url": "2/3", "n": 4}\n')
    assert read(path)[1][0].endswith("its fields are 'id', 'url', 'n'")


def test_a_saved_dataset_is_converted_by_the_command(tmp_path: Path) -> None:
    """The files of datasets' save_to_disk, of a dataset with two splits."""
    expected = []
    for split in ("test", "train"):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        for number in range(2):
            texts = [f"Text {i} of {split} {number}." for i in range(3)]
            table = pyarrow.table({"text": texts})
            with pyarrow.ipc.new_stream(str(folder / f"data-{number:05}-of-00002.arrow"), table.schema) as stream:
                stream.write_table(table)
            expected += texts
        for name in ("state.json", "dataset_info.json"):
            (folder / name).write_text('{"features": {"text": {"dtype": "string"}}}')
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    with pytest.raises(
        ConfigError, match="contains no file that can be read; it contains 5 description of a dataset"
    ) as error:
        parse_corpus(str(tmp_path / "saved"))
    command = str(error.value).split("for example with: ")[1].replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert read(tmp_path / "NEW_FOLDER")[0] == expected


def test_a_folder_of_mds_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"shards": [], "version": 2}')
    for name in ("shard.00000.mds.zstd", "shard.00001.mds"):
        (tmp_path / name).write_bytes(b"\0")
    with pytest.raises(ConfigError, match=r"1 description of a dataset \(index.json\).* streaming.StreamingDataset"):
        parse_corpus(str(tmp_path))
