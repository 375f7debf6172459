"""Validation takes the share that data.validation_fraction asks for, and a run keeps the split that it has."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from base.errors import ConfigError
from configs.compose import compose
from data.corpus.documents import document_hash
from data.indexed import IndexedTokens, documents
from data.loader import build_data
from data.prepare import prepare
from data.samples import GPTSamples
from data.samples.shared import of_split
from data.split import LINE_REACH, number_hashes, split_documents, split_index
from data.tokenizer import load_tokenizer
from tests.data.conftest import make_text
from tests.data.token_files import write_tokens

pytestmark = pytest.mark.fast

RNG = np.random.default_rng(0)
SIZES = {
    "one": [5000],
    "two, of which one is huge": [40, 90_000],
    "ten": RNG.integers(100, 3000, 10),
    "hundred": RNG.integers(1, 500, 100),
    "skewed": RNG.pareto(0.7, 300).astype(np.int64) + 1,
    "many": RNG.integers(1, 500, 20_000),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("fraction", [0.001, 0.02, 0.1, 0.5, 0.9])
def test_any_documents_are_split_at_the_fraction(name, fraction):
    lengths = np.asarray(SIZES[name])
    for hashes in (number_hashes(len(lengths)), RNG.integers(0, 2**63, len(lengths)).astype(np.uint64)):
        split = split_documents(hashes, lengths, fraction)
        held_out = int(lengths[split.held_out].sum()) + split.tail
        close = 0.1 * fraction * lengths.sum() if name == "many" else 8  # many documents may be split by hash
        assert abs(held_out - fraction * lengths.sum()) <= close
        if split.cuts:
            assert not split.held_out[split.cuts[0]] and 0 < split.tail < lengths[split.cuts[0]]


def test_the_standard_library_is_split_by_hash():
    lengths, hashes = np.full(1000, 10), np.array([document_hash(f"a.jsonl@{i}") for i in range(1000)], dtype=np.uint64)
    split = split_documents(hashes, lengths, 0.05, is_stdlib=True)
    assert not split.cuts and (split.held_out == (hashes < int(0.05 * 2.0**64))).all()
    assert split_documents(number_hashes(2), lengths[:2], 0.01, is_stdlib=True).held_out.sum() == 1
    assert not split_documents(number_hashes(5), lengths[:5], 0.0).held_out.any()


def test_documents_of_equal_text_are_split_alike():
    rng = np.random.default_rng(2)
    for num_texts, most, fraction in ((1, 2, 0.02), (1, 40, 0.02), (30, 3, 0.1), (30, 50, 0.3), (4000, 3, 0.1)):
        of_text = np.repeat(np.arange(num_texts), rng.integers(1, most + 1, num_texts))
        rng.shuffle(of_text)
        lengths = rng.integers(400, 600, num_texts)[of_text]
        texts = rng.integers(0, 2**63, num_texts).astype(np.uint64)[of_text]
        hashes = rng.integers(0, 2**63, len(of_text)).astype(np.uint64)
        split = split_documents(hashes, lengths, fraction, texts=texts)
        side = split.held_out.astype(int)
        side[list(split.cuts)] = 2
        assert len({(text, here) for text, here in zip(of_text.tolist(), side.tolist())}) == num_texts
        share = (lengths[split.held_out].sum() + split.tail * len(split.cuts)) / lengths.sum()
        assert most == 40 or abs(share - fraction) < 0.1 * fraction, (num_texts, most)
    singles = rng.integers(0, 2**63, len(of_text)).astype(np.uint64)
    one, other = (split_documents(hashes, lengths, 0.1, texts=each) for each in (None, singles))
    assert (one.held_out == other.held_out).all() and (one.cuts, one.tail) == (other.cuts, other.tail)


def text_of(prepared, tokenizer) -> dict[str, str]:
    """The text of either split, in the order of the file, without what is no text."""
    found = {}
    for name, files in (("train", prepared.train), ("valid", prepared.valid)):
        found[name] = "".join(tokenizer.decode(IndexedTokens(file.prefix).tokens[:].tolist()) for file in files)
    return found


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_small_text_file_is_cut_at_a_line(config, tmp_path, tokenizer, family):
    lines = [
        f"{' '.join(random.Random(i).choices(['a', 'model', 'learns', 'tokens'], k=9)).capitalize()}.\n"
        for i in range(800)
    ]
    (tmp_path / "small.txt").write_text("".join(lines))
    for fraction in (0.02, 0.1, 0.37):
        prepared = prepare(
            replace(config, corpus=str(tmp_path / "small.txt"), validation_fraction=fraction), family, False
        )
        train, valid = prepared.train[0].num_tokens, prepared.valid[0].num_tokens
        assert abs(valid - fraction * (train + valid)) <= LINE_REACH + 2
        text = text_of(prepared, tokenizer)
        assert text["train"] + text["valid"] == "".join(lines) and text["train"].endswith("\n")
        for file in (*prepared.train, *prepared.valid):
            indexed = IndexedTokens(file.prefix)
            _, lengths = documents(indexed.sequence_starts, indexed.sequence_lengths, indexed.document_bounds)
            assert lengths.tolist() == [file.num_tokens]
            assert (indexed.tokens[:][-1] == tokenizer.eod) == (family == "gpt")


def test_lines_that_are_far_are_cut_at_a_word(config, tmp_path, tokenizer):
    (tmp_path / "small.txt").write_text(" ".join(random.Random(0).choices(["gradient", "model", "learns"], k=3000)))
    prepared = prepare(replace(config, corpus=str(tmp_path / "small.txt")), "gpt", False)
    assert (
        abs(prepared.valid[0].num_tokens - 0.1 * (prepared.train[0].num_tokens + prepared.valid[0].num_tokens))
        <= LINE_REACH
    )
    text = text_of(prepared, tokenizer)
    assert text["valid"][0] == " " and set(text["train"].split() + text["valid"].split()) == {
        "gradient",
        "model",
        "learns",
    }


@pytest.mark.parametrize("sentences", [1, 5])
def test_token_files_of_a_user(config, tmp_path, sentences):
    rng = np.random.default_rng(1)
    documents_ = [[rng.integers(0, 300, rng.integers(20, 90)) for _ in range(sentences)] for _ in range(12)]
    write_tokens(tmp_path / "own", np.uint16, documents_)
    prepared = prepare(replace(config, corpus=str(tmp_path / "own"), validation_fraction=0.2), "gpt", False)
    indexed = IndexedTokens(tmp_path / "own")
    segments: list[tuple[int, int]] = []
    counts = []
    for file in (prepared.train[0], prepared.valid[0]):
        *index, wanted = of_split(file, indexed)
        starts, lengths = documents(*index)
        segments += list(zip(starts[wanted].tolist(), lengths[wanted].tolist(), strict=True))
        counts.append(int(lengths[wanted].sum()))
        assert file.num_tokens == counts[-1]
        GPTSamples([file], 32, seed=0).batch(range(3))
    assert sorted(segments)[0][0] == 0 and all(
        a + n == b for (a, n), (b, _) in zip(sorted(segments), sorted(segments)[1:], strict=False)
    )
    assert sum(counts) == len(indexed.tokens) and len(segments) == 13
    assert abs(counts[1] - 0.2 * sum(counts)) <= LINE_REACH + 1
    index_of = (indexed.sequence_starts, indexed.sequence_lengths, indexed.document_bounds)
    starts, lengths, bounds, held_out = split_index(*index_of, 0.2)
    assert (
        lengths.sum() == len(indexed.tokens)
        and (starts == np.cumsum(lengths) - lengths).all()
        and len(held_out) == len(bounds) - 1
    )


def test_a_fraction_that_works_is_named(config, tmp_path):
    (tmp_path / "small.txt").write_text(make_text(0, 300))
    full = compose(["model=gpt_tiny", "model.sequence_length=256", "training.eval_interval=1"])

    def build(fraction: float, length: int = 256) -> None:
        full.data = replace(config, corpus=str(tmp_path / "small.txt"), validation_fraction=fraction)
        full.model.sequence_length = length
        loader, _ = build_data(full, prepare(full.data, "gpt", False), rank=0, world_size=1, consumed_samples=0)
        loader.close()

    with pytest.raises(
        ConfigError, match=r"data.validation_fraction \(0.02\) leaves .* Try data.validation_fraction=0"
    ) as error:
        build(0.02)
    build(float(str(error.value).split("Try data.validation_fraction=")[1].split(",")[0]))
    with pytest.raises(ConfigError, match="Try model.sequence_length=") as error:
        build(0.02, 4000)
    assert load_tokenizer(full.data.tokenizer)  # the corpus is as it was
