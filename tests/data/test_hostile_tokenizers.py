"""Tokenizer files that make the libraries which read them search for ever, take all memory or end their process: one
line that names the tokenizer."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from base.errors import ConfigError
from checkpoint import kept_tokenizer
from configs.tokenizer_files import copy_tokenizer
from data.tokenizer import load_tokenizer, trial
from data.tokenizer.load import open_tokenizer

pytestmark = pytest.mark.fast

VOCABULARY = {token: i for i, token in enumerate([*"abcdefgh", "</s>"])}
BYTES = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
DEEP = "[" * 100_000


def _spec(model: dict[str, Any] | None = None, **sections: Any) -> str:
    """A tokenizer.json."""
    rules = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    usual: dict[str, Any] = {"type": "BPE", "vocab": VOCABULARY, "merges": [], "dropout": None, "unk_token": None}
    return json.dumps({"version": "1.0", "added_tokens": [], **rules, "model": {**usual, **(model or {})}, **sections})


def _pattern(text: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}


def _tekken(**config: int) -> str:
    return json.dumps({"config": {"pattern": "a", **config}, "vocab": BYTES})


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 8).decode()}
CASES: dict[str, tuple[dict[str, str], str]] = {
    "a pattern that backtracks": ({"tokenizer.json": _spec(pre_tokenizer=_pattern("(h+)+$x"))}, "retry-limit"),
    "chained replacements": (
        {"tokenizer.json": _spec(normalizer={"type": "Sequence", "normalizers": [DOUBLING] * 40})},
        "takes more than 1 s",
    ),
    "a charsmap that ends the process": ({"tokenizer.json": _spec(normalizer=CHARSMAP)}, "SIGABRT"),
    "deep JSON": ({"tekken.json": DEEP}, "RecursionError"),
    "deep settings": ({"tokenizer.json": _spec(), "tokenizer_config.json": DEEP}, "tokenizer_config.json is not JSON"),
    "no tokens": ({"tokenizer.json": _spec({"type": "WordLevel", "vocab": {}, "unk_token": "x"})}, "has no tokens"),
    "1e9 special tokens": ({"tekken.json": _tekken(default_num_special_tokens=10**9)}, "at most 65536"),
    "an id of 1e9": ({"tokenizer.json": _spec({"vocab": {**VOCABULARY, "z": 10**9}})}, "must be below 16777216"),
    "no object": ({"tokenizer.json": '{"model": null}'}, "not a Hugging Face tokenizer.json"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_names_the_tokenizer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, word = CASES[name]
    monkeypatch.setattr(trial, "CPU_SECONDS", 1)
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError) as error:
        load_tokenizer(tmp_path)
    text = str(error.value)
    assert str(tmp_path) in text and word in text and "\n" not in text, text


def test_a_token_of_200_kilobytes_is_read(tmp_path: Path) -> None:
    tokens = [bytes([i]) for i in range(256)] + [b"x" * length for length in (2, 200_000, 200_001)]
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    assert load_tokenizer(tmp_path).encode("xx") == [256]


def test_texts_that_no_trial_has_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(_spec(pre_tokenizer=_pattern("((ab)+)+$x")))
    tokenizer = open_tokenizer(tmp_path)
    for encode in (tokenizer.encode, tokenizer.encode_prompt, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(ConfigError, match=r"data.tokenizer=.*'abab.*80 characters.*retry-limit"):
            encode("ab" * 40)


def test_dropout_is_left_out_and_said(tmp_path: Path) -> None:
    model = {"vocab": {**VOCABULARY, "ab": 9, "abc": 10}, "merges": [["a", "b"], ["ab", "c"]], "dropout": 0.9}
    digests = []
    for dropout in (0.9, None):
        folder = tmp_path / f"{dropout}"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(_spec({**model, "dropout": dropout}))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        tokenizer = load_tokenizer(folder)
        assert {tuple(tokenizer.encode("abcabc")) for _ in range(20)} == {(10, 10)}
        assert ["dropout 0.9" in note for note in tokenizer.notes()] == [True] * (dropout is not None)
        kept_tokenizer.keep(tmp_path / f"run{dropout}", tokenizer)
        kept = tmp_path / f"run{dropout}" / "tokenizer"
        assert json.loads((kept / "tokenizer.json").read_text())["model"]["dropout"] is None
        assert (kept / "tokenizer_config.json").is_file()
        digests += [tokenizer.digest, load_tokenizer(kept).digest]
        copy_tokenizer(folder, tmp_path / "exported")
        for name, text in tokenizer.for_transformers("gpt").items():
            (tmp_path / "exported" / name).write_text(text)
        assert json.loads((tmp_path / "exported" / "tokenizer.json").read_text())["model"]["dropout"] is None
    assert len(set(digests)) == 1


def test_a_pipe_is_no_tokenizer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(ConfigError, match=f"data.tokenizer={path}(: the folder contains| is neither a file)"):
            load_tokenizer(path)
