import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from base.errors import ConfigError
from data.loader import Loader
from data.prepare import TokenFile, prepare
from data.samples import BertSamples, Blend, GPTSamples, segment_documents
from data.samples.shared import BLEND_PERIOD
from data.tokenizer import load_tokenizer
from tests.data.test_tokenizer import word_piece
from tests.data.token_files import write_tokens

pytestmark = pytest.mark.fast


def numbered(prefix: Path, lengths: list[int], start: int = 0) -> TokenFile:
    """A GPT token file whose tokens count up from `start`, so that a token says where it came from."""
    stops = start + np.cumsum([0, *lengths])
    write_tokens(prefix, np.int32, [[np.arange(a, b)] for a, b in zip(stops[:-1], stops[1:], strict=True)])
    return TokenFile(str(prefix), 1.0, sum(lengths))


def windows(samples: GPTSamples, indices: range) -> list[list[int]]:
    batch = samples.batch(indices)
    return [
        [*tokens, labels[-1]] for tokens, labels in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True)
    ]


@pytest.mark.parametrize("longest", [3, 40, 500])
def test_an_epoch_visits_every_window_of_its_documents_once(tmp_path, longest):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, longest, 150).tolist()
    file = numbered(tmp_path / "a", lengths)
    samples = GPTSamples([file], 16, seed=1)
    n = samples.files[0].num_samples
    assert n == (sum(lengths) - 1) // 16
    starts = np.cumsum([0, *lengths])
    orders = []
    for epoch in range(3):
        found = windows(samples, range(epoch * n, (epoch + 1) * n))
        # All but the tail is an input once; each document's tokens stay in order.
        inputs = Counter(token for window in found for token in window[:-1])
        assert set(inputs.values()) == {1} and len(inputs) == 16 * n
        for window in found:
            for a, b in zip(window, window[1:], strict=False):
                assert b == a + 1 or (b in starts and a + 1 in starts)
        orders.append(found)
    assert orders[0] != orders[1] != orders[2]


def test_samples_are_pure_functions_of_seed_and_index(tmp_path):
    file = numbered(tmp_path / "a", [30] * 40)
    one, other = GPTSamples([file], 8, seed=5), GPTSamples([file], 8, seed=5)
    forward = windows(one, range(600))
    backward = [windows(other, range(i, i + 1))[0] for i in reversed(range(600))][::-1]
    assert forward == backward
    assert forward != windows(GPTSamples([file], 8, seed=6), range(600))


def test_every_epoch_has_an_order_of_its_own(tmp_path):
    samples = GPTSamples([numbered(tmp_path / "a", [161])], 8, seed=0)
    first, second = windows(samples, range(20)), windows(samples, range(20, 40))
    assert first != second and sorted(first) == sorted(second)


def test_labels_are_the_next_tokens(tmp_path):
    batch = GPTSamples([numbered(tmp_path / "a", [100])], 10, seed=0).batch(range(4))
    assert {name: (array.dtype.name, array.shape) for name, array in batch.items()} == {
        "tokens": ("int64", (4, 10)),
        "labels": ("int64", (4, 10)),
        "loss_mask": ("float32", (4, 10)),
    }
    assert (batch["labels"] == batch["tokens"] + 1).all() and (batch["loss_mask"] == 1).all()


def test_validation_is_in_order_from_the_start(tmp_path):
    samples = GPTSamples([numbered(tmp_path / "a", [7] * 20)], 8, seed=3, shuffle=False)
    assert windows(samples, range(3)) == [list(range(8 * i, 8 * i + 9)) for i in range(3)]
    # 140 tokens hold 17 windows; then from the start
    assert windows(samples, range(17, 18)) == windows(samples, range(1))


def test_blends_keep_their_weights_at_every_length(tmp_path):
    files = [
        numbered(tmp_path / "a", [1000]),
        numbered(tmp_path / "b", [300], 10_000),
        numbered(tmp_path / "c", [2000], 20_000),
    ]
    for file, weight in zip(files, (0.5, 0.2, 0.3), strict=True):
        file.weight = weight
    samples = GPTSamples(files, 10, seed=0)
    found = [window[0] // 10_000 for window in windows(samples, range(1000))]
    for n in (10, 50, 333, 1000):
        counts = np.bincount(found[:n], minlength=3)
        assert np.abs(counts - np.array([0.5, 0.2, 0.3]) * n).max() <= 2
    # Each file's own samples follow each other.
    a = [window for window in windows(samples, range(1000)) if window[0] < 10_000]
    assert a == windows(GPTSamples(files[:1], 10, seed=0), range(len(a)))


def test_blend_positions_continue_over_periods():
    blend = Blend([0.7, 0.3])
    ranks: dict[int, list[int]] = {0: [], 1: []}
    for i in range(25_000):
        file, rank = blend.locate(i)
        ranks[file].append(rank)
    assert all(found == list(range(len(found))) for found in ranks.values())
    with pytest.raises(ConfigError, match="data.corpus"):
        Blend([1.0, 1e-9])


def test_the_least_shares_of_a_blend():
    """Half a sample of a period is one; more files than a tenth of a period are too many."""
    half = 0.5 / BLEND_PERIOD
    assert Blend([1 - half, half]).counts.tolist() == [BLEND_PERIOD, 1]
    most = BLEND_PERIOD // 10
    assert Blend([1.0] * most).counts.tolist() == [10] * most
    for weights in ([1 - 0.99 * half, 0.99 * half], [1.0] * (most + 1)):
        with pytest.raises(ConfigError, match="data.corpus"):
            Blend(weights)


def test_too_little_data(tmp_path):
    with pytest.raises(ConfigError, match="10 tokens, but a sample needs model.sequence_length \\+ 1 = 17"):
        GPTSamples([numbered(tmp_path / "a", [10])], 16, seed=0)
    with pytest.raises(ConfigError, match="data.validation_fraction"):
        GPTSamples([], 16, seed=0)


def test_tokens_beyond_the_vocabulary(tmp_path):
    with pytest.raises(ConfigError, match="token 9.* does not fit a vocabulary of 50"):
        GPTSamples([numbered(tmp_path / "a", [100])], 9, seed=0, vocab_size=50).batch(range(11))


def test_many_tokens_are_cheap(tmp_path):
    """Building touches documents, not tokens: a sparse file of 2 GB."""
    from data.indexed import write_index

    lengths = np.full(1_000_000, 1000)
    write_index(tmp_path / "big.idx", np.uint16, lengths, np.arange(1_000_001))
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(2_000_000_000)
    samples = GPTSamples([TokenFile(str(tmp_path / "big"), 1.0, 10**9)], 1024, seed=0)
    assert samples.batch([0, 10**7])["tokens"].shape == (2, 1024)


def test_segments_cover_documents_and_stay_inside():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(0, 9, 30)  # documents without sentences, too
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        lengths = rng.integers(1, 12, bounds[-1])
        firsts, lasts = segment_documents(lengths, bounds, 20)
        assert [i for a, b in zip(firsts, lasts, strict=True) for i in range(a, b)] == list(range(len(lengths)))
        for a, b in zip(firsts, lasts, strict=True):
            document = np.searchsorted(bounds, a, side="right")
            assert b <= bounds[document] and lengths[a : b - 1].sum() <= 20 + 12
    assert segment_documents(np.zeros(0), np.array([0, 0]), 20)[0].tolist() == []


@pytest.fixture
def bert_files(config):
    return prepare(config, "bert", False).train


def restored(batch: dict[str, np.ndarray], row: int) -> np.ndarray:
    """The tokens of a row before masking, without padding."""
    real = batch["padding_mask"][row]
    return np.where(batch["loss_mask"][row] > 0, batch["labels"][row], batch["tokens"][row])[real]


@pytest.mark.parametrize("head", ["none", "next_sentence", "sentence_order"])
def test_bert_samples_are_well_formed(bert_files, tokenizer, texts, head):
    samples = BertSamples(bert_files, tokenizer, 64, seed=1, sentence_head=head)
    batch = samples.batch(range(300))
    types = {"tokens": "int64", "labels": "int64", "types": "int64", "loss_mask": "float32", "padding_mask": "bool"}
    expected = types | ({} if head == "none" else {"sentence_label": "int64"})
    assert {name: array.dtype.name for name, array in batch.items()} == expected
    corpus = "\x00".join(texts)
    labels: Counter[int] = Counter()
    for row in range(300):
        tokens = restored(batch, row)
        ends = np.flatnonzero(tokens == tokenizer.sep)
        assert tokens[0] == tokenizer.cls and len(ends) == (1 if head == "none" else 2) and ends[-1] == len(tokens) - 1
        assert (batch["tokens"][row][len(tokens) :] == tokenizer.pad).all() and (
            batch["padding_mask"][row][: len(tokens)]
        ).all()
        assert not batch["loss_mask"][row][[0, *ends]].any() and batch["loss_mask"][row].any()
        assert (
            not batch["loss_mask"][row][len(tokens) :].any()
            and not batch["labels"][row][batch["loss_mask"][row] == 0].any()
        )
        first = tokenizer.decode(tokens[1 : ends[0]])
        assert first in corpus
        types_row = batch["types"][row]
        assert not types_row[: ends[0] + 1].any() and not types_row[len(tokens) :].any()
        if head == "none":
            assert not types_row.any()
            continue
        assert types_row[ends[0] + 1 : len(tokens)].all()
        second = tokenizer.decode(tokens[ends[0] + 1 : -1])
        label = int(batch["sentence_label"][row])
        labels[label] += 1
        assert first and second
        if label == 0:
            assert first + second in corpus
        elif head == "sentence_order":
            assert second + first in corpus
        else:
            assert second in corpus
    if head != "none":
        assert 90 < labels[0] < 210


def test_bert_samples_are_pure_functions(bert_files, tokenizer):
    one, other = (BertSamples(bert_files, tokenizer, 48, seed=2, sentence_head="next_sentence") for _ in range(2))
    together = one.batch(range(100))
    alone = [other.batch([i]) for i in reversed(range(100))][::-1]
    for name, array in together.items():
        assert (array == np.concatenate([batch[name] for batch in alone])).all()
    n = one.files[0].num_samples
    assert (one.batch(range(n))["tokens"] != one.batch(range(n, 2 * n))["tokens"]).any()


def test_masking_takes_whole_words_at_the_right_rate(bert_files, tokenizer):
    samples = BertSamples(bert_files, tokenizer, 96, seed=3, short_sequence_probability=0)
    begins, ends = tokenizer.word_starts(), tokenizer.word_ends()
    predicted = masked = kept = maskable = 0
    for first in range(0, 2000, 100):
        batch = samples.batch(range(first, first + 100))
        for row in range(100):
            tokens = restored(batch, row)
            chosen = batch["loss_mask"][row][: len(tokens)] > 0
            inside = np.ones(len(tokens), dtype=bool)
            inside[[0, -1]] = False
            joined = ~begins[tokens[1:]] & ~ends[tokens[:-1]] & inside[1:] & inside[:-1]
            assert (chosen[1:] == chosen[:-1])[joined].all()  # pieces of one word go together
            now = batch["tokens"][row][: len(tokens)]
            predicted += chosen.sum()
            masked += (now[chosen] == tokenizer.mask).sum()
            kept += (now[chosen] == tokens[chosen]).sum()
            maskable += inside.sum()
            assert (now[~chosen] == tokens[~chosen]).all()
            replaced = now[chosen & (now != tokenizer.mask)]
            assert not np.isin(replaced, tokenizer.special_ids()).any()
    assert abs(predicted / maskable - 0.15) < 0.01
    assert abs(masked / predicted - 0.8) < 0.02 and abs(kept / predicted - 0.1) < 0.02


def test_masking_with_word_piece(config, texts, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    config.tokenizer = str(word_piece(folder, texts))
    tokenizer = load_tokenizer(folder)
    samples = BertSamples(prepare(config, "bert", False).train, tokenizer, 64, seed=0, sentence_head="sentence_order")
    batch = samples.batch(range(200))
    continuing = ~tokenizer.word_starts()
    seen = 0
    for row in range(200):
        tokens = restored(batch, row)
        chosen = batch["loss_mask"][row][: len(tokens)] > 0
        inner = continuing[tokens[1:]] & (tokens[:-1] != tokenizer.cls) & (tokens[:-1] != tokenizer.sep)
        assert (chosen[1:] == chosen[:-1])[inner].all()
        seen += int((inner & chosen[1:]).sum())
    assert seen > 50


@pytest.mark.parametrize("head", ["none", "next_sentence", "sentence_order"])
@pytest.mark.parametrize(
    "documents",
    [
        [[[40, 41]]],
        [[[40]], [[41, 42]]],
        [[[40] * 500]],
        [[[40, 41]] for _ in range(50)],
        [[[40] * 3, [41] * 90, [42]], [[43] * 2]],
    ],
)
def test_every_document_length_works(tmp_path, tokenizer, head, documents):
    write_tokens(tmp_path / "a", np.uint16, documents)
    samples = BertSamples(
        [TokenFile(str(tmp_path / "a"), 1.0, 0)],
        tokenizer,
        16,
        seed=0,
        sentence_head=head,
        short_sequence_probability=0.5,
    )
    batch = samples.batch(range(200))
    assert (batch["loss_mask"].sum(axis=1) > 0).all()
    separators = (batch["tokens"] == tokenizer.sep).sum(axis=1)
    assert (separators == (1 if head == "none" else 2)).all()


def test_bert_errors(tmp_path, tokenizer):
    write_tokens(tmp_path / "a", np.uint16, [[[40]]])
    file = TokenFile(str(tmp_path / "a"), 1.0, 1)
    with pytest.raises(ConfigError, match="1 tokens in 1 sentences.*at least 2 tokens"):
        BertSamples([file], tokenizer, 16, seed=0, sentence_head="next_sentence")
    with pytest.raises(ConfigError, match="model.sequence_length=4.*at least 5"):
        BertSamples([file], tokenizer, 4, seed=0, sentence_head="next_sentence")
    with pytest.raises(ConfigError, match="data.mask_probability=0"):
        BertSamples([file], tokenizer, 16, seed=0, mask_probability=0)


def test_short_sequences(bert_files, tokenizer):
    never, always = (
        BertSamples(bert_files, tokenizer, 64, seed=0, short_sequence_probability=p)
        .batch(range(200))["padding_mask"]
        .sum()
        for p in (0, 1)
    )
    assert always < 0.75 * never and math.isfinite(always)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def write_over(path: Path) -> None:
    content = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(bytes(len(content)))
    os.utime(path, (1, 1))  # a clock's tick may be longer than this test


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("damage", "words"), [(cut, "has 2000 bytes instead of 4000"), (write_over, "was written to")])
def test_a_token_file_that_is_changed_while_it_is_read(tmp_path, damage, words, prefetch):
    file = numbered(tmp_path / "a", [100] * 10)
    loader = Loader(GPTSamples([file], 32, seed=0), global_batch_size=2, micro_batch_size=2, prefetch=prefetch)
    loader.next_step()
    damage(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=f"data.corpus: {tmp_path}/a.bin {words}: it was changed during the run"):
        for _ in range(50):
            loader.next_step()
    loader.close()


def test_a_token_file_that_is_deleted_or_exchanged_while_it_is_read(tmp_path):
    file = numbered(tmp_path / "a", [100] * 10)
    expected = windows(GPTSamples([numbered(tmp_path / "b", [100] * 10)], 32, seed=0), range(40))
    samples = GPTSamples([file], 32, seed=0)
    numbered(tmp_path / "other", [100] * 10, start=5000)
    for suffix in ("bin", "idx"):
        (tmp_path / f"other.{suffix}").rename(tmp_path / f"a.{suffix}")
    assert windows(samples, range(40)) == expected  # the file that was opened is still there
    with pytest.raises(ConfigError, match="a.bin or .idx was replaced during the run"):
        GPTSamples([file], 32, seed=0)
    (tmp_path / "a.bin").unlink()
    assert windows(samples, range(40)) == expected
