"""Documents' lengths and the pairs that attend: formulas against windows that are cut and counted, and what is said of
a corpus before and after it is prepared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from base.errors import ConfigError
from configs import derived
from configs.compose import compose
from configs.job import Job
from configs.schema import Config
from data.document_lengths import (
    attended_pairs,
    corpus_share,
    document_lengths,
    expected_share,
    planned_segments,
    planned_share,
    share_of,
    summary,
)
from data.indexed import IndexedTokens
from data.prepare import find_prepared, prepare
from data.prepare.command import main
from data.samples import GPTSamples
from simulator.run_plan import make_plan
from simulator.text import text
from tests.data.test_samples import numbered

pytestmark = pytest.mark.fast

LENGTHS = {
    "one token each": np.ones(2000, np.int64),
    "short": np.random.default_rng(0).integers(1, 40, 5000),
    "around a window": np.random.default_rng(1).integers(1, 300, 3000),
    "one giant": np.array([100_000]),
    "skewed": np.random.default_rng(2).geometric(0.01, 3000) ** 2 // 50 + 1,
}


def config_of(length: int, window: int | None = None, first: int = 0, batch: int = 8) -> Config:
    config = compose(["model=gpt_tiny"])
    config.model.sequence_length, config.training.global_batch_size = length, batch
    config.model.sliding_window, config.model.sliding_window_from = window, first
    config.data.documents = "separate"
    return config


@pytest.mark.parametrize("window", [None, 5, 64, 1000])
@pytest.mark.parametrize("name", LENGTHS)
def test_the_expected_share_is_that_of_windows(name: str, window: int | None) -> None:
    length, lengths = 64, LENGTHS[name]
    offsets = np.arange(lengths.sum())
    positions = np.minimum(offsets - np.repeat(np.cumsum(lengths) - lengths, lengths), offsets % length)
    positions = positions[: len(offsets) // length * length]
    keys = np.minimum(positions + 1, window or length)
    counted = keys.sum() / (len(keys) * (length + 1) / 2)
    assert expected_share(lengths, length, window) == pytest.approx(counted, rel=0.02)
    if name == "one giant" and window is None:
        assert expected_share(lengths, length) > 0.999


def test_pairs_of_a_batch(tmp_path: Path) -> None:
    """As a mask of all pairs has them, in layers with and without a window."""
    lengths = [1, 30, 7, 100, 2, 2, 60]
    batch = GPTSamples([numbered(tmp_path / "a", lengths)], 32, seed=0, separate=True).batch(range(6))
    positions = batch["positions"]
    index = np.arange(32)
    document = np.cumsum(positions == 0, axis=1)
    same = document[:, :, None] == document[:, None, :]
    distance = index[:, None] - index[None, :]
    full = (same & (distance >= 0)).sum()
    near = (same & (distance >= 0) & (distance < 4)).sum()
    layers = config_of(32).model.num_layers
    assert attended_pairs(config_of(32), positions) == full * layers
    assert attended_pairs(config_of(32, window=4), positions) == near * layers
    assert attended_pairs(config_of(32, window=4, first=1), positions) == full + near * (layers - 1)
    share = share_of(config_of(32, batch=6), attended_pairs(config_of(32), positions))
    assert share == full / (6 * 32 * 33 / 2)


@pytest.mark.parametrize(("window", "first"), [(None, 0), (8, 0), (8, 2)])
def test_one_document_is_as_joined(window: int | None, first: int) -> None:
    config = config_of(1024, window, first)
    positions = np.broadcast_to(np.arange(1024), (8, 1024))
    share = share_of(config, attended_pairs(config, positions))
    assert share == pytest.approx(derived.attended_share(config), rel=2e-3)


def test_what_is_said_of_a_corpus(config, capsys) -> None:
    arguments = [f"data.{key}={getattr(config, key)}" for key in ("corpus", "tokenizer", "cache_dir")]
    assert main([*arguments, "model.sequence_length=64"]) == 0
    output = capsys.readouterr().out
    (file,) = prepare(config_with(config, validation_fraction=0.02), "gpt", False).train
    lengths = document_lengths(file)
    assert lengths.sum() == file.num_tokens == len(IndexedTokens(file.prefix).tokens)
    found = summary(lengths)
    assert f"lengths     {len(lengths)} documents to train on, in tokens: median {found['median']:,.0f}" in output
    assert f"longest {lengths.max()}" in output
    share = re.search(r"separate keeps ([\d.]+)% of the token pairs at model.sequence_length=64\n", output)
    assert share and float(share[1]) == pytest.approx(100 * expected_share(lengths, 64), abs=0.05)
    assert main(arguments) == 0
    assert "separate keeps" not in capsys.readouterr().out


def config_with(config, **changes):
    from dataclasses import replace

    return replace(config, **changes)


def test_a_plan_uses_the_lengths_once_they_are_there(config, tmp_path: Path) -> None:
    whole = config_of(64)
    whole.data = config_with(config, documents="separate")
    assert find_prepared(whole.data, "gpt") is None and planned_share(whole) is None
    assert not Path(config.cache_dir).exists()  # nothing is made
    before = make_plan(Job(whole, 1, 400, "cpu"))
    assert "separate documents the corpus is not prepared with these settings" in text(before)
    prepared = prepare(whole.data, "gpt", False)
    assert find_prepared(whole.data, "gpt") is not None
    share = planned_share(whole)
    assert share is not None and share == pytest.approx(corpus_share(whole, prepared.train)) and 0.1 < share < 0.9
    after = make_plan(Job(whole, 1, 400, "cpu"), attended_share=share)
    assert f"separate documents {share:.1%} of the pairs of one-document samples attend" in text(after)
    joined = json.loads(json.dumps(before.as_dict()))
    separate = json.loads(json.dumps(after.as_dict()))
    assert joined["attended_share"] is None and separate["attended_share"] == share
    scores = joined["flops"]["forward_operations"]["attention_scores"]
    forward = [plan["flops"]["forward_per_token"] for plan in (joined, separate)]
    assert forward[0] - forward[1] == pytest.approx(scores / 2 * (1 - share))
    executed = [plan["flops"]["executed_per_token"] for plan in (joined, separate)]
    assert executed[0] - executed[1] == pytest.approx(3.5 * scores * (1 - share))
    assert planned_segments(whole) is None  # nobody shares sequences
    whole.parallel.context, whole.training.micro_batch_size = 2, 3
    segments = planned_segments(whole)
    assert segments is not None and all(each.sum() == 3 * 64 and each.min() > 0 for each in segments)
    found = sum(float((each * (each + 1)).sum()) for each in segments) / (len(segments) * 3 * 64 * 65)
    assert found == pytest.approx(share, rel=0.2)
    whole.parallel.context = 1
    whole.data.documents = "joined"
    assert planned_segments(whole) is None
    assert planned_share(whole) is None and "separate documents" not in text(make_plan(Job(whole, 1, 400, "cpu")))
    whole.data.documents, whole.data.corpus = "separate", str(tmp_path / "nowhere.txt")
    assert planned_share(whole) is None


def test_token_files_and_trained_tokenizers_are_found(config, jsonl: Path) -> None:
    prepared = prepare(config, "gpt", False)
    own = config_with(config, corpus=f"{prepared.train[0].prefix}.bin", documents="separate")
    assert find_prepared(own, "gpt") == find_prepared_by_preparing(own)
    blend = [{"path": str(jsonl), "weight": 0.75}, {"path": prepared.train[0].prefix, "weight": 0.25}]
    mixed = config_with(config, corpus=blend, validation_fraction=0.0)
    assert find_prepared(mixed, "gpt") is None
    assert find_prepared_by_preparing(mixed) == find_prepared(mixed, "gpt")
    trained = config_with(config, tokenizer="sentencepiece", vocab_size=400)
    assert find_prepared(trained, "gpt") is None
    assert find_prepared_by_preparing(trained) == find_prepared(trained, "gpt")
    with pytest.raises(ConfigError, match="does not exist"):
        find_prepared(config_with(config, corpus="nowhere.txt"), "gpt")


def find_prepared_by_preparing(config) -> list:
    """The blend of training, with weights as they are before they are scaled."""
    found = prepare(config, "gpt", False).train
    if all(abs(file.weight * sum(other.num_tokens for other in found) - file.num_tokens) < 1 for file in found):
        for file in found:
            file.weight = file.num_tokens
    return found
