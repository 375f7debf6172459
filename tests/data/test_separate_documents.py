"""Documents that do not attend to each other: the windows of joined ones, with positions from 0 in every segment and no
prediction across a boundary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from configs.compose import compose
from data.loader import HELD_OUT, build_data
from data.prepare import TokenFile, prepare
from data.samples import GPTSamples
from data.samples.shared import IGNORED
from tests.data.test_loader import unigram_entropy
from tests.data.test_samples import numbered
from tests.data.token_files import write_tokens

pytestmark = pytest.mark.fast


def both(files: list[TokenFile], length: int, shuffle: bool = True) -> tuple[GPTSamples, GPTSamples]:
    joined, separate = (GPTSamples(files, length, seed=3, shuffle=shuffle, separate=kind) for kind in (False, True))
    return joined, separate


def check(joined: dict[str, np.ndarray], separate: dict[str, np.ndarray], first: np.ndarray) -> None:
    """Both batches of the same windows over `numbered` tokens, whose documents begin with the tokens `first`."""
    tokens, labels, positions = separate["tokens"], joined["labels"], separate["positions"]
    assert (tokens == joined["tokens"]).all() and "positions" not in joined
    assert positions.dtype == np.int64 and positions.flags.c_contiguous
    begins = np.isin(tokens, first)
    begins[:, 0] = True
    for row in range(len(tokens)):  # by hand: one token after the other
        count = 0
        for column in range(tokens.shape[1]):
            count = 0 if begins[row, column] else count + 1
            assert positions[row, column] == count
    foreign = np.isin(labels, first)
    assert (separate["loss_mask"] == np.where(foreign, 0.0, 1.0)).all() and separate["loss_mask"].dtype == np.float32
    assert (separate["labels"] == np.where(foreign, IGNORED, labels)).all()
    own = separate["loss_mask"] > 0
    assert (separate["labels"][own] == tokens[own] + 1).all()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "lengths",
    [[1] * 40, [500], [16] * 9, [17, 15, 1, 1, 64, 3, 40], [0, 5, 0, 0, 90, 1, 2], [33, 200, 7]],
    ids=["one token each", "one giant", "as long as a window", "cut", "empty ones", "longer than a window"],
)
def test_positions_begin_anew_in_every_piece(tmp_path: Path, lengths: list[int], shuffle: bool) -> None:
    joined, separate = both([numbered(tmp_path / "a", lengths, start=1)], 16, shuffle)
    first = 1 + np.cumsum([0, *lengths])
    epochs = range(3 * joined.files[0].num_samples + 1)
    check(joined.batch(epochs), separate.batch(epochs), first)


def test_documents_of_one_token_predict_nothing(tmp_path: Path) -> None:
    batch = both([numbered(tmp_path / "a", [1] * 40)], 16)[1].batch([0, 1])
    assert not batch["positions"].any() and not batch["loss_mask"].any() and (batch["labels"] == IGNORED).all()


def test_a_giant_document_is_as_joined(tmp_path: Path) -> None:
    joined, separate = both([numbered(tmp_path / "a", [500])], 16)
    batch = separate.batch(range(5))
    assert (batch["positions"] == np.arange(16)).all()
    assert all((batch[name] == array).all() for name, array in joined.batch(range(5)).items())


def test_blends(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(0, 30, 60).tolist() for _ in range(2)]
    files = [
        numbered(tmp_path / "a", lengths[0], start=1),
        numbered(tmp_path / "b", lengths[1], start=10_000),
    ]
    files[1].weight = 0.25
    joined, separate = both(files, 24)
    first = np.concatenate([start + np.cumsum([0, *some]) for start, some in zip((1, 10_000), lengths, strict=True)])
    check(joined.batch(range(150)), separate.batch(range(150)), first)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_of_any_size_holds_the_tokens_of_the_file(tmp_path: Path, size: int) -> None:
    """Tokens and labels of each batch, read one by one from the flat list of the corpus' tokens: marking a label that
    predicts nothing changes no token, and no two arrays of a batch share memory."""
    lengths = [4, 1, 7, 16, 2, 30, 5, 1, 1, 29] * 2
    stream = np.arange(1, 1 + sum(lengths))
    ends = set(np.cumsum(lengths).tolist())
    _, separate = both([numbered(tmp_path / "a", lengths, start=1)], 16, shuffle=False)
    for first in range(0, 6, size):
        batch = separate.batch(range(first, first + size))
        for row, sample in enumerate(range(first, first + size)):
            window = stream[sample * 16 : sample * 16 + 17].tolist()
            assert batch["tokens"][row].tolist() == window[:-1]
            own = [token not in ends for token in window[:-1]]
            assert batch["labels"][row].tolist() == [
                label if is_own else IGNORED for label, is_own in zip(window[1:], own, strict=True)
            ]
            assert batch["loss_mask"][row].tolist() == [float(is_own) for is_own in own]
        names = list(batch)
        assert not any(np.shares_memory(batch[a], batch[b]) for a in names for b in names if a < b)


def test_boundaries_come_from_the_index_and_not_from_tokens(tmp_path: Path) -> None:
    """A document of several sequences, and tokens that are all alike."""
    write_tokens(tmp_path / "a", np.uint16, [[[7] * 3, [7] * 4], [[7] * 2], [[7] * 8]])
    batch = both([TokenFile(str(tmp_path / "a"), 1.0, 17)], 16, shuffle=False)[1].batch([0])
    assert batch["positions"][0].tolist() == [*range(7), *range(2), *range(7)]
    assert np.flatnonzero(batch["loss_mask"][0] == 0).tolist() == [6, 8]


def test_the_made_up_batch_is_the_hardest() -> None:
    from training.starting.dry_run import made_up_batches

    config = compose(["model=gpt_tiny"])
    assert all("positions" not in batch for batch in made_up_batches(config, 2, 100))
    config.data.documents = "separate"
    for batch in made_up_batches(config, 2, 100):
        size, length = config.training.micro_batch_size, config.model.sequence_length
        assert batch["positions"].tolist() == [list(range(length))] * size
        assert batch["positions"].is_contiguous() and bool((batch["loss_mask"] == 1).all())


def test_a_validation_corpus_is_filled_up(config, tmp_path: Path) -> None:
    """Each of its samples once, and what fills the last batch predicts nothing."""
    (tmp_path / "own.txt").write_text("".join(f"number {i} is here\n" for i in range(40)))
    config.documents, config.documents_in_text = "separate", "line"
    config.validation_corpora = {"own": str(tmp_path / "own.txt")}
    whole = compose(["model=gpt_tiny", "model.sequence_length=32", "training.eval_interval=1"])
    whole.data, whole.training.eval_batches = config, 100
    whole.training.global_batch_size, whole.training.micro_batch_size = 8, 8
    prepared = prepare(config, "gpt", False)
    train, makers = build_data(whole, prepared, rank=0, world_size=1, consumed_samples=0)
    train.close()
    loader, batches = makers["own"](), []
    with pytest.raises(StopIteration):
        while True:
            batches += loader.next_step()
    loader.close()
    (file,) = prepared.validation["own"]
    samples = (file.num_tokens - 1) // 32
    real = [bool(row.any()) for batch in batches for row in batch["loss_mask"]]
    assert real == [True] * samples + [False] * (-samples % 8)
    predicted = sum(int(batch["loss_mask"].sum()) for batch in batches)
    begins = int((torch.cat([batch["positions"] for batch in batches])[:samples, 1:] == 0).sum())
    assert begins > 20 and samples * 32 - begins - samples <= predicted <= samples * 32 - begins


def test_from_text_to_batches(config) -> None:
    """Training and validation loaders, the held-out part of a document, and the unigram entropy."""
    config.documents = "separate"
    prepared = prepare(config, "gpt", False)
    whole = compose(["model=gpt_tiny", "model.sequence_length=32", "training.eval_interval=1"])
    whole.data, whole.training.global_batch_size, whole.training.micro_batch_size = config, 8, 4
    train, makers = build_data(whole, prepared, rank=0, world_size=1, consumed_samples=0)
    for loader in (train, makers[HELD_OUT]()):
        batches = [batch for _ in range(4) for batch in loader.next_step()]
        loader.close()
        assert any((batch["positions"][:, 1:] == 0).any() for batch in batches)
        for batch in batches:
            assert not batch["positions"][:, 0].any()
            # the first token of a segment is no label
            assert not batch["loss_mask"][:, :-1][batch["positions"][:, 1:] == 0].any()
    assert 0 < unigram_entropy(makers[HELD_OUT](), prepared.vocab_size) < np.log(prepared.vocab_size)
    whole.data.documents = "joined"
    train, _ = build_data(whole, prepared, rank=0, world_size=1, consumed_samples=0)
    assert "positions" not in train.next_step()[0]
    train.close()
