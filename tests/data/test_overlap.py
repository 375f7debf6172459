"""No document of validation is trained on: terms that hold the same text are refused, copies within one split alike."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from base.errors import ConfigError
from configs.schema import DataConfig
from data import overlap
from data.corpus import parse_corpus
from data.indexed import IndexedTokens, documents
from data.prepare import prepare
from data.samples.shared import of_split
from tests.data.conftest import make_text
from tests.data.token_files import write_tokens

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a folder of texts, the same in other forms, and the cache of all tests."""
    root = tmp_path_factory.mktemp("overlap")
    folder = root / "texts"
    (folder / "inner").mkdir(parents=True)
    for i in range(6):
        (folder / ("inner" if i % 2 else "") / f"{i}.txt").write_text(make_text(i, 40 + i))
    lines = "".join(json.dumps({"text": make_text(50 + i, 12)}) + "\n" for i in range(40))
    (folder / "rows.jsonl").write_text(lines)
    (folder / "empty.txt").write_text("\n")
    (root / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    shutil.copy(folder / "rows.jsonl", root / "copy.jsonl")
    shutil.copytree(folder, root / "copied")
    (root / "link").symlink_to(folder)
    (root / "link.jsonl").symlink_to(folder / "rows.jsonl")
    os.link(folder / "rows.jsonl", root / "hard.jsonl")
    (root / "other.jsonl").write_text(json.dumps({"text": make_text(99, 200)}) + "\n")
    (root / "blank.txt").write_text("\n")
    rng = np.random.default_rng(0)
    write_tokens(root / "own", np.uint16, [[rng.integers(3, 300, 60)] for _ in range(30)])
    for suffix in ("bin", "idx"):
        shutil.copy(root / f"own.{suffix}", root / f"again.{suffix}")
    return root


@pytest.fixture
def settings(config: DataConfig, root: Path) -> DataConfig:
    return replace(config, cache_dir=str(root / "cache"), validation_fraction=0.2)


def sides(prepared) -> list[Counter]:
    """How often each document is trained on, and validated on, by its tokens."""
    found = []
    for files in (prepared.train, prepared.valid):
        counts: Counter = Counter()
        for file in files:
            indexed = IndexedTokens(file.prefix)
            *index, wanted = of_split(file, indexed)
            starts, lengths = documents(*index)
            for start, length in zip(starts[wanted].tolist(), lengths[wanted].tolist()):
                counts[indexed.tokens[start : start + length].tobytes()] += 1
        found.append(counts)
    return found


def leaks(prepared) -> int:
    """Return how many documents of validation, or segments of them, are in a document that is trained on."""
    trained, validated = sides(prepared)
    assert trained and validated
    return sum(any(segment[:-2] in document for document in trained) for segment in validated)


def test_a_leak_is_found(settings, root, monkeypatch):
    """`leaks` counts every validation document if training reads the files of both sides."""
    clean = prepare(replace(settings, corpus=str(root / "texts")), "gpt", False)
    assert leaks(clean) == 0
    both = [sum(sides(clean), Counter()), sides(clean)[1]]
    monkeypatch.setitem(globals(), "sides", lambda _: both)
    assert leaks(clean) == len(both[1])


# What two terms of a blend are, by their paths, and which of their files the error names.
TERMS = {
    "a folder and a file in it": ("texts", "texts/0.txt", "0.txt"),
    "a nested folder": ("texts", "texts/inner", "inner/1.txt"),
    "a file and its copy": ("texts/rows.jsonl", "copy.jsonl", "copy.jsonl has the same text as"),
    "a folder and a copy of a file in it": ("texts", "copy.jsonl", "copy.jsonl has the same text as"),
    "a folder and its copy": ("texts", "copied", "and so for 6 more files"),
    "a symbolic link to a file": ("texts", "link.jsonl", "link.jsonl is the same file as"),
    "a hard link": ("texts/rows.jsonl", "hard.jsonl", "hard.jsonl is the same file as"),
    "a folder under two paths": ("texts", "link", "link/0.txt is the same file as"),
    "lines and the same compressed": ("texts/rows.jsonl", "packed.jsonl.gz", "packed.jsonl.gz has the same text as"),
    "a folder and a compressed file of it": ("packed.jsonl.gz", "texts", "rows.jsonl has the same text as"),
    "token files and their copy": ("own", "again.bin", "again.bin has the same text as"),
    "the same file": ("texts/rows.jsonl", "texts/rows.jsonl", "rows.jsonl is listed twice"),
}


# The same files under the same names: a list of both paths is no other corpus.
HARMLESS = (
    "a folder and its copy",
    "a folder under two paths",
    "token files and their copy",
    "the same file",
)


@pytest.mark.parametrize("name", TERMS)
def test_terms_that_hold_the_same_text_are_refused(settings, root, name):
    one, other, words = TERMS[name]
    paths = [str(root / one), str(root / other)]
    blend = replace(settings, corpus=[{"path": path, "weight": 1 + i} for i, path in enumerate(paths)])
    with pytest.raises(ConfigError) as error:
        prepare(blend, "gpt", False)
    assert words in str(error.value) and all(path in str(error.value) for path in paths) and "\n" not in str(error)
    if "in a list without weights" in str(error.value) and name not in HARMLESS:
        alike = prepare(replace(blend, corpus=paths), "gpt", False)
        assert leaks(alike) == 0 and max(sum(sides(alike), Counter()).values()) == 2  # as often as it was given
    prepare(replace(blend, corpus=paths[:1]), "gpt", False)  # and leaving one out


def test_copies_within_a_term_are_split_alike(settings, root, tmp_path):
    """A folder with a file, its copy and one compressed; a file that is named twice; a folder and its copy."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        shutil.copy(root / "copy.jsonl", folder / name)
    shutil.copy(root / "packed.jsonl.gz", folder)
    single = root / "texts" / "inner" / "5.txt"
    for corpus, times in ((str(folder), 3), ([str(single)] * 2, 2), ([str(root / "texts"), str(folder)], 4)):
        alike = prepare(replace(settings, corpus=corpus), "gpt", False)
        assert leaks(alike) == 0 and max(sum(sides(alike), Counter()).values()) == times


def test_what_is_no_overlap(settings, root, tmp_path):
    content = (root / "copy.jsonl").read_bytes()
    (tmp_path / "equal_size.jsonl").write_bytes(b"x" * len(content))
    (tmp_path / "equal_head.jsonl.gz").write_bytes(gzip.compress(content * (overlap.HEAD_BYTES // len(content) + 1)))
    (tmp_path / "plain.jsonl").write_bytes(content * (overlap.HEAD_BYTES // len(content) + 2))
    paths = [root / "texts", root / "other.jsonl", root / "blank.txt", *tmp_path.glob("[ep]*")]
    sources = [source for path in paths for source in parse_corpus(str(path))]
    assert overlap.find(sources, sources, tmp_path / "cache", 10) == []  # an empty text is no document
    twice = [{"path": str(paths[0]), "weight": 1}, {"path": str(paths[0]), "weight": 1}]
    assert not prepare(replace(settings, corpus=twice, validation_fraction=0), "gpt", False).valid


def test_documents_in_another_form_are_found(settings, root, tmp_path):
    """Documents in a larger file, and the same texts in another format: many are refused, a few noted."""
    texts = [make_text(200 + i, 9) for i in range(300)]
    content = [json.dumps({"text": text}) + "\n" for text in texts]
    first_lines, whole, single = (tmp_path / name for name in ("part.jsonl", "whole.jsonl", "single.txt"))
    first_lines.write_text("".join(content[:150]))
    whole.write_text("".join(content))
    single.write_text(texts[200])

    def prepared(*paths: Path, **more):
        blend = [{"path": str(path), "weight": 1 + i} for i, path in enumerate(paths)]
        return prepare(replace(settings, corpus=blend, **more), "gpt", False)

    with pytest.raises(
        ConfigError, match="documents that .* holds out for validation are in .* too, and are trained on"
    ):
        prepared(first_lines, whole)
    alike = prepare(replace(settings, corpus=[str(first_lines), str(whole)]), "gpt", False)
    assert leaks(alike) == 0 and not alike.notes
    with pytest.raises(ConfigError, match=r"_corpora: 150 of the 150 documents of own \(.*part.jsonl\) are in"):
        prepared(whole, validation_corpora={"own": str(first_lines)}, validation_fraction=0)
    with pytest.raises(ConfigError, match="1 of the 1 documents of own"):
        prepared(whole, validation_corpora={"own": str(single)}, validation_fraction=0)
    (said,) = prepared(single, validation_corpora={"own": str(whole)}, validation_fraction=0).notes
    assert said == (
        f"data.validation_corpora: 1 of the 300 documents of own ({whole}) are in {single} too, and are trained on"
    )


def test_what_was_found_is_kept(root, tmp_path, monkeypatch):
    shutil.copytree(root / "texts", tmp_path / "copied")

    def find() -> list[overlap.Overlap]:
        sources = [source for path in (root / "texts", tmp_path / "copied") for source in parse_corpus(str(path))]
        return overlap.find(sources, sources, tmp_path / "cache", 10)

    (first,) = find()
    assert first.count == 7 and not first.same_file and not first.token_files
    with monkeypatch.context() as patch:
        patch.setattr(overlap, "_found", None)  # looking again would fail
        assert find() == [first]
    for path in (tmp_path / "copied").rglob("*.*"):
        path.write_bytes(path.read_bytes() + b"More.\n")
    assert find() == []
