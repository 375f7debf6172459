"""Validation corpora: all of their documents, each sample once, by the run's tokenizer, and none that is trained on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from base.errors import ConfigError
from configs.compose import compose
from configs.schema import Config
from data.identity import differences
from data.indexed import IndexedTokens
from data.loader import HELD_OUT, build_data
from data.prepare import prepare
from data.prepare.command import main
from data.tokenizer import load_tokenizer
from tests.data.conftest import make_text

pytestmark = pytest.mark.fast

TEXTS = [make_text(1000 + i, 9) for i in range(13)]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def full(config, own) -> Config:
    whole = compose(["model=gpt_tiny", "model.sequence_length=32", "training.eval_interval=1"])
    whole.training.global_batch_size, whole.training.micro_batch_size, whole.training.eval_batches = 8, 2, 100
    whole.data = replace(config, validation_corpora={"own": str(own)})
    return whole


def batches(full: Config, prepared, name: str, world: int = 1) -> list[dict[str, torch.Tensor]]:
    """All micro-batches of an evaluation, in the order of their samples."""
    loaders = []
    for rank in range(world):
        train, makers = build_data(full, prepared, rank=rank, world_size=world, consumed_samples=0)
        train.close()
        loaders.append(makers[name]())
    found: list[dict[str, torch.Tensor]] = []
    while True:
        try:
            ranks = [loader.next_step() for loader in loaders]
        except StopIteration:
            return found
        found += [batch for together in zip(*ranks, strict=True) for batch in together]


def test_all_documents_of_a_corpus_are_for_validation(config, full, own):
    plain = prepare(config, "gpt", False)
    prepared = prepare(full.data, "gpt", False)
    assert (prepared.train, prepared.valid) == (plain.train, plain.valid)  # nothing of training is otherwise
    assert prepared.identity == {**plain.identity, "validation": prepared.identity["validation"]}
    (file,) = prepared.validation["own"]
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    tokens = IndexedTokens(file.prefix).tokens[:].tolist()
    documents = [tokenizer.decode(tokens[a:b]) for a, b in _between(tokens, tokenizer.eod)]
    assert documents == TEXTS and file.weight == 1
    # Each window once, and the batch that they do not fill is filled up with what does not count.
    sample_tokens = torch.cat(
        [batch["tokens"][batch["loss_mask"].sum(1) > 0] for batch in batches(full, prepared, "own")]
    )
    assert (
        sample_tokens.flatten().tolist() == tokens[: len(sample_tokens) * 32]
        and len(sample_tokens) == (len(tokens) - 1) // 32
    )
    assert len(sample_tokens) % 8  # so that there is such a batch
    full.training.eval_batches = 2
    assert sum(len(batch["tokens"]) for batch in batches(full, prepared, "own")) == 16
    assert len(batches(full, prepared, HELD_OUT)) == 2 * 4


def _between(tokens: list[int], end: int) -> list[tuple[int, int]]:
    ends = [i for i, token in enumerate(tokens) if token == end]
    return list(zip([0, *(i + 1 for i in ends)], ends))


def test_every_layout_evaluates_on_the_same(full, own, tmp_path):
    (tmp_path / "more.txt").write_text(make_text(7, 60))
    full.data.validation_corpora = {"own": [str(own), str(tmp_path / "more.txt")]}
    for full.model.family, full.model.sentence_head in (("gpt", "none"), ("bert", "sentence_order")):
        prepared = prepare(full.data, full.model.family, False)
        single, ranks = batches(full, prepared, "own"), batches(full, prepared, "own", 4)
        for one, other in zip(single, ranks, strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        counted = torch.cat([batch["loss_mask"].sum(1) > 0 for batch in single])
        number = int(counted.sum())
        assert counted[:number].all() and len(counted) - 8 < number <= len(counted)


def test_without_a_share_of_the_corpus(full, config):
    full.data.validation_fraction = 0.0
    prepared = prepare(full.data, "gpt", False)
    assert not prepared.valid and sum(file.num_tokens for file in prepared.train) > 0
    train, makers = build_data(full, prepared, rank=0, world_size=1, consumed_samples=0)
    train.close()
    assert list(makers) == ["own"]


def test_what_cannot_be_a_validation_corpus(full, config, own, jsonl, tmp_path):
    def message(value, family: str = "gpt") -> str:
        with pytest.raises(ConfigError) as error:
            full.data.validation_corpora = value
            prepared = prepare(full.data, family, False)
            build_data(full, prepared, rank=0, world_size=1, consumed_samples=0)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert message({"a": "no/such"}).startswith(
        f"data.validation_corpora.a=no/such: {Path('no/such').absolute()} does not exist."
    )
    shutil.copy(jsonl, tmp_path / "renamed.jsonl")
    text = message({"fine": str(own), "mine": str(tmp_path / "renamed.jsonl")})
    assert (
        text.startswith("data.validation_corpora: mine contains text that is trained on: ")
        and "renamed.jsonl and" in text
    )
    assert f"{jsonl} has the same text as" in text and "Remove that text from data.corpus" in text
    (tmp_path / "short.txt").write_text("A model reads.")
    text = message({"short": str(tmp_path / "short.txt")})
    assert text.startswith("data.validation_corpora: short has ") and "a sample needs 33" in text
    (tmp_path / "blank.txt").write_text("\n")
    assert "data.validation_corpora.blank: blank.txt contains no" in message({"blank": str(tmp_path / "blank.txt")})
    assert "must have names of" in message({"a/b": str(own)}) and "must map each name to a text" in message({"a": []})


def test_a_run_is_bound_to_its_validation_corpora(full, own):
    trained = prepare(full.data, "gpt", False).identity
    without = prepare(replace(full.data, validation_corpora={}), "gpt", False).identity
    assert differences(trained, without) == differences(without, trained) == []
    own.write_text(own.read_text() + json.dumps({"text": "One more text."}) + "\n")
    (found,) = differences(prepare(full.data, "gpt", False).identity, trained)
    assert found.key == "data.validation_corpora"
    assert found.text == f"data.validation_corpora: own: {own} has 14 documents, but the run was validated on 13"


def test_prepare_names_them(full, own, capsys):
    settings = {key: getattr(full.data, key) for key in ("corpus", "tokenizer", "cache_dir", "num_workers")}
    arguments = [f"data.{key}={value}" for key, value in settings.items()]
    assert main([*arguments, f"data.validation_corpora={{own: {own}}}"]) == 0
    assert "\nvalid/own   " in capsys.readouterr().out
    assert main([*arguments, f"data.validation_corpora={own}"]) == 2
    assert "data.validation_corpora" in capsys.readouterr().err
