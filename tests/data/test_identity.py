"""Data and tokenizers are known by content."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from base.errors import ConfigError
from data import digest as digest_module
from data.digest import file_digest
from data.identity import differences
from data.prepare import prepare
from data.tokenizer import tokenizer_digest
from tests.data.test_tokenizer import byte_level
from tests.data.token_files import write_tokens

pytestmark = pytest.mark.fast


def flip(path: Path, *, keep_mtime: bool = False, in_place: bool = True) -> None:
    """Change the lowest bit of the last token; the size stays, and on wish the time of change."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    if not in_place:
        path.unlink()
    path.write_bytes(content)
    if keep_mtime:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def own(tmp_path) -> Path:
    """Token files of a user's own."""
    rng = np.random.default_rng(0)
    write_tokens(tmp_path / "books", np.uint16, [[rng.integers(0, 300, rng.integers(1, 50))] for _ in range(100)])
    return tmp_path / "books"


def test_the_identity_is_json_and_the_same_at_every_start_and_place(config, jsonl, tmp_path):
    first = prepare(config, "gpt", False).identity
    assert json.loads(json.dumps(first)) == first
    (source,) = first["sources"]
    assert (
        source["name"] == str(jsonl)
        and source["weight"] is None
        and source["documents"] == 200
        and source["python"] is None
    )
    assert prepare(config, "gpt", False).identity == first
    moved = tmp_path / "elsewhere" / "corpus.jsonl"  # the name within the corpus decides the split
    moved.parent.mkdir()
    shutil.copy(jsonl, moved)
    again = prepare(replace(config, corpus=str(moved), cache_dir=str(tmp_path / "new")), "gpt", False).identity
    assert again != first and differences(again, first) == []


@pytest.mark.parametrize("change", [{}, {"keep_mtime": True}, {"keep_mtime": True, "in_place": False}])
def test_token_files_of_equal_size_and_other_bytes(config, own, change, monkeypatch):
    monkeypatch.setattr(digest_module, "TICK_NS", 0)  # what was written just now is remembered as well
    config = replace(config, corpus=[{"path": f"{own}.bin", "weight": 1}])
    trained = prepare(config, "gpt", False).identity
    assert differences(prepare(config, "gpt", False).identity, trained) == []
    time.sleep(0.02)  # longer than the file system's tick
    flip(Path(f"{own}.bin"), **change)
    now = prepare(config, "gpt", False).identity
    assert [found.text for found in differences(now, trained)] == [
        f"data.corpus: the content of {own}.bin is not what the run was trained on"
    ]


def test_prepared_files_of_equal_size_and_other_bytes(config):
    prepared = prepare(config, "gpt", False)
    path = Path(f"{prepared.train[0].prefix}.bin")
    content = path.read_bytes()
    flip(path, keep_mtime=True)
    with pytest.raises(
        ConfigError, match=f"{path} was damaged after it was written: it has other content.*data.prepare"
    ):
        prepare(config, "gpt", False)
    assert prepare(config, "gpt", False, rebuild_damaged=True) == prepared and path.read_bytes() == content


def test_a_digest_is_kept_while_the_file_is_not_touched(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(digest_module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(digest_module, "ANNOUNCED_BYTES", 2000)
    path, cache = tmp_path / "file", tmp_path / "cache"
    contents = [bytes(n % 251 for n in range(size)) for size in (0, 999, 1000, 2500)]
    contents.append(contents[-1][:-1] + b"x")
    digests = []
    for content in contents:
        path.write_bytes(content)
        digests.append(file_digest(path, cache, 10))
    assert len(set(digests)) == len(contents)
    said = f"Reading {path} (0 GB) to compute the digest of its content ...\n"  # the two that are long
    assert capsys.readouterr().err == 2 * said
    assert not list(cache.rglob("*.json"))  # written just now: another write may have the same time
    old = time.time_ns() - 10**10
    real = digest_module._fingerprint
    monkeypatch.setattr(digest_module, "_fingerprint", lambda stat: {**real(stat), "ctime_ns": old})
    assert file_digest(path, cache, 10) == digests[-1]
    with monkeypatch.context() as patch:
        patch.setattr(digest_module, "_read", None)  # any reading would fail
        assert file_digest(path, cache, 10) == digests[-1]
        os.utime(path)
        with pytest.raises(TypeError):
            file_digest(path, cache, 10)
    assert file_digest(path, cache, 10) == digests[-1]
    with pytest.raises(ConfigError, match="none cannot be read: "):
        file_digest(tmp_path / "none", cache, 10)


def test_a_cache_that_cannot_be_written(tmp_path):
    path = tmp_path / "file"
    path.write_text("text")
    (tmp_path / "cache").write_text("no folder")
    assert file_digest(path, tmp_path / "cache", 10) == file_digest(path, tmp_path / "other", 10)


def source(name="books", digest="a", **changes):
    split = {"tokens": 10, "digest": digest}
    return {
        "name": name,
        "weight": None,
        "documents": 3,
        "train": split,
        "valid": split,
        "files": None,
        "python": None,
        "text": None,
        "documents_in_text": None,
        **changes,
    }


def identity(*sources, tokenizer="t", fraction=0.02, rule="alike"):
    return {"tokenizer": tokenizer, "split": {"rule": rule, "fraction": fraction}, "sources": list(sources)}


@pytest.mark.parametrize(
    ("now", "trained", "words"),
    [
        (
            identity(source("stdlib", python="3.12.1", digest="b")),
            identity(source("stdlib", python="3.11.7")),
            ["data.corpus: stdlib is that of Python 3.12.1, but the run was trained on that of 3.11.7"],
        ),
        (identity(source("stdlib", python="3.12.1")), identity(source("stdlib", python="3.11.7")), []),
        (
            identity(source(documents=4, digest="b")),
            identity(source()),
            ["data.corpus: books has 4 documents, but the run was trained on 3"],
        ),
        (
            identity(source(valid={"tokens": 11, "digest": "b"})),
            identity(source()),
            ["data.corpus: the text of books is not what the run was trained on (validation: 11 tokens, before 10)"],
        ),
        (
            identity(source(weight=0.7), source("b", "b", weight=0.3)),
            identity(source(weight=0.7), source("b", "b", weight=0.4)),
            ["data.corpus: the weight of b is 0.3, but the run was trained with 0.4"],
        ),
        (
            identity(source("a", "a"), source("b", "b")),
            identity(source("b", "b"), source("a", "a")),
            ["data.corpus has the sources in the order [a, b], but the run was trained with the order [b, a]"],
        ),
        (
            identity(source("a", "a")),
            identity(source("a", "a"), source("b", "b")),
            ["data.corpus has the sources [a], but the run was trained on [a, b]"],
        ),
        (
            identity(source(digest="b"), fraction=0.1),
            identity(source()),
            ["data.validation_fraction is 0.1, but the run was trained with 0.02"],
        ),
        (
            identity(source(digest="b", files={"bin": "1", "idx": "3"}), tokenizer="u"),
            identity(source(files={"bin": "1", "idx": "2"})),
            [
                "data.tokenizer is not the tokenizer that the run was trained with",
                "data.corpus: the content of books.idx is not what the run was trained on",
            ],
        ),
    ],
)
def test_what_differs_is_said(now, trained, words):
    assert [found.text for found in differences(now, trained)] == words


def test_tokenizers_by_content(model_path, texts, tmp_path):
    shutil.copy(model_path, tmp_path / "other.model")
    assert (
        tokenizer_digest(tmp_path / "other.model") == tokenizer_digest(model_path)
        and len(tokenizer_digest(model_path)) == 32
    )
    folder = tmp_path / "hf"
    folder.mkdir()
    byte_level(folder, texts)
    digest = tokenizer_digest(folder)
    assert digest != tokenizer_digest(model_path)
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(spec.items())), indent=3))  # laid out otherwise
    os.utime(file, (1, 1))
    assert tokenizer_digest(folder) == digest == tokenizer_digest(file)
    merges = spec["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    file.write_text(json.dumps(spec))
    assert tokenizer_digest(folder) != digest
