"""Token files of others whose documents do not end with the tokenizer's end token."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from configs.schema import DataConfig
from data.indexed import IndexedTokens, write_index
from data.prepare import notes, prepare
from data.prepare.command import main as prepare_command
from data.tokenizer import load_tokenizer, train_tokenizer
from tests.data.test_special_tokens import CONFIG, FAST, MAP, byte_folder

pytestmark = pytest.mark.fast

END, EOT, PAD, LETTER = 1, 0, 2, 40  # ids of byte_folder


def token_files(folder: Path, documents: list[list[list[int]]]) -> str:
    """Files of documents, each of sequences of tokens."""
    sequences = [sequence for document in documents for sequence in document]
    np.array([token for sequence in sequences for token in sequence], np.uint16).tofile(folder / "x.bin")
    lengths, counts = [len(sequence) for sequence in sequences], [len(document) for document in documents]
    write_index(folder / "x.idx", np.uint16, np.array(lengths, np.int32), np.cumsum([0, *counts]))
    return str(folder / "x")


def ends(*last: int) -> list[list[list[int]]]:
    return [[[LETTER] * (3 + i % 5) + [token]] for i, token in enumerate(last)]


def notes_of(tmp_path: Path, tokenizer: Path, documents: list[list[list[int]]], family: str = "gpt") -> list[str]:
    files = token_files(tmp_path, documents)
    config = DataConfig(corpus=files, tokenizer=str(tokenizer), cache_dir=str(tmp_path / "cache"))
    return prepare(config, family, show_progress=False).notes


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        (ends(*[END] * 1000), None),
        (ends(*[EOT] * 1000), r"1,000 of 1,000 documents of x end with 0 \('<\|endoftext\|>'\), and 0 with the end "),
        (
            ends(*[EOT] * 700, *[END] * 300),
            r"700 of 1,000 documents of .* end with 0 .*, and 300 with the end token of ",
        ),
        (
            ends(*[END] * 999, PAD),
            r"1 of 1,000 documents of .* do not end with the end token of .*, 1 \('</s>'\), but ",
        ),
        (
            ends(*range(3, 103)),
            r"0 of 100 documents of .* end with .*, and no other token ends most of them \(the most ",
        ),
        (
            ends(*[EOT] * 50, *[END] * 50),
            r"50 of 100 documents .*, and no other token ends most .*Megatron-LM: --append-",
        ),
        ([[[LETTER], [LETTER, END], []], [[]], [[END]]], None),  # sequences and documents without a token
        ([[[LETTER, END], [LETTER, EOT], []]] * 3, r"3 of 3 documents of .* end with 0 .*, and 0 with"),
        ([[[]]], None),
    ],
)
def test_other_ends_are_said(documents: list[list[list[int]]], said: str | None, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_folder(tmp_path / "t", {CONFIG: {**FAST, "eos_token": "</s>"}}))
    note = notes.other_ends("x", IndexedTokens(token_files(tmp_path, documents)), tokenizer)
    assert note is None if said is None else note is not None and re.search(said, note), note


def test_of_many_documents_a_sample_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "MOST_ENDS", 10)
    tokenizer = load_tokenizer(byte_folder(tmp_path / "t", {CONFIG: {**FAST, "eos_token": "</s>"}}))
    files = IndexedTokens(token_files(tmp_path, ends(*[EOT] * 25)))
    assert "10 of 10 documents (a sample of 25) of x end with 0" in (notes.other_ends("x", files, tokenizer) or "")


@pytest.mark.parametrize("file", [CONFIG, MAP])
def test_what_is_advised_ends_the_warning(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = byte_folder(tmp_path / "t", {CONFIG: FAST, file: {**FAST, "eos_token": "</s>"}})
    (note,) = notes_of(tmp_path, folder, ends(*[EOT] * 50))
    assert note.endswith(f"or set eos_token to '<|endoftext|>' in {folder / file}")
    arguments = {"corpus": tmp_path / "x", "tokenizer": folder, "cache_dir": tmp_path / "cache"}
    assert prepare_command([f"data.{key}={value}" for key, value in arguments.items()]) == 0
    assert f"note        {note}" in capsys.readouterr().out
    (folder / file).write_text(json.dumps({**FAST, "eos_token": "<|endoftext|>"}))
    assert notes_of(tmp_path, folder, ends(*[EOT] * 50)) == []


def test_the_end_of_a_sentencepiece_model_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    train_tokenizer(["a b c"], 330, tmp_path / "t" / "tokenizer.model")
    sep = load_tokenizer(tmp_path / "t").sep
    (note,) = notes_of(tmp_path, tmp_path / "t", ends(*[sep] * 50))
    assert f"end with {sep} ('[SEP]'), and 0 with" in note and note.endswith(str(tmp_path / "t" / CONFIG))
    (tmp_path / "t" / CONFIG).write_text(json.dumps({"eos_token": "[SEP]"}))
    assert notes_of(tmp_path, tmp_path / "t", ends(*[sep] * 50)) == []
    assert notes_of(tmp_path, tmp_path / "t", ends(*[LETTER] * 50), "bert") == []  # which has sentences
