"""Tasks of the LM evaluation harness against the harness's own model of transformers, and the first token of a text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.checks import harness_parity as parity
from data.tokenizer import load_tokenizer
from inference import evaluate, scoring

SAMPLE = ["choices_of_long_questions", "choices_without_question", "last_words", "long_texts", "answers"]


@pytest.mark.fast
@pytest.mark.parametrize("kind", parity.TOKENIZERS)
def test_the_first_token_is_begin_or_else_end(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first, end = parity.write_tokenizer(kind, tmp_path)
    words = load_tokenizer(tmp_path)
    wanted = end if first is None else first
    assert words.before_text == wanted
    assert words.encode_prompt("the end") == [*([] if first is None else [first]), *words.encode("the end")]
    read: list[list[int]] = []

    def found(_: Any, texts: list[list[int]], *rest: Any) -> list[torch.Tensor]:
        read.extend(texts)
        return [torch.zeros(len(text) - 1, dtype=torch.float64) for text in texts]

    monkeypatch.setattr(scoring, "log_likelihoods_of", found)
    model: Any = SimpleNamespace(needed_tokenizer=lambda advice: words)
    evaluate.evaluate_texts(model, model, ["the end"], 8, 4, 1)
    assert read == [[wanted, *words.encode("the end")]]


@pytest.mark.fast
def test_bytes_that_are_no_text_read_as_in_transformers(tmp_path: Path) -> None:
    parity.write_tokenizer(parity.BY_SETTING, tmp_path)
    words = load_tokenizer(tmp_path)
    ids = {words.token_piece(i): i for i in range(words.vocab_size)}
    assert words.decode([ids["<0xE2>"], ids["<0x28>"], ids["<0x41>"]]) == "\ufffd" * 3


@pytest.mark.fast
def test_ten_tasks_of_all_kinds(tmp_path: Path) -> None:
    parity.write_tasks(tmp_path / "tasks", 1, 2)
    specs = [json.loads(file.read_text()) for file in (tmp_path / "tasks").glob("*.yaml")]
    assert len(specs) == 10
    assert {spec["output_type"] for spec in specs} == {
        parity.CHOICE,
        parity.LOGLIKELIHOOD,
        parity.ROLLING,
        parity.ANSWER,
    }
    assert parity.difference([1.0, "a"], [1.0, "a"]) == 0.0
    assert parity.difference([1.0, "a"], [1.0, "b"]) == parity.difference([1.0], [1.0, 2.0]) == float("inf")


@pytest.mark.parametrize("kind", parity.TOKENIZERS)
def test_tasks_have_the_numbers_of_the_harness(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "accelerate"):
        pytest.importorskip(name, reason=f"the optional package {name} is not installed")
    monkeypatch.setitem(os.environ, "HF_HOME", str(tmp_path / "cache"))
    parity.write_tasks(tmp_path / "tasks", 2, 4)
    parity.write_model(kind, tmp_path / "model")
    mine = parity.ours(tmp_path / "model", tmp_path / "tasks", SAMPLE)
    other = parity.theirs(tmp_path / "model", tmp_path / "tasks", SAMPLE)
    differences = {name: parity.difference(mine[name], other[name]) for name in SAMPLE}
    assert max(differences.values()) < parity.BOUND, differences
