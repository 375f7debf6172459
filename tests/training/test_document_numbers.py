"""Numbers of separate documents in a run's lines, against its own batches: the same in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from configs import derived
from data.document_lengths import attended_pairs, corpus_share, segment_lengths
from data.loader import HELD_OUT, build_data
from data.prepare import prepare
from simulator.flops import training_flops_per_token
from tests.tolerances import FP32_LOSS
from tests.training.helpers import Lines, make_config, read_metrics, train_on_ranks

SIZES = [
    "experiment=gpt_tiny",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.sequence_length=32",
    "training.global_batch_size=8",
    "training.micro_batch_size=2",
    "training.steps=2",
    "training.eval_interval=2",
    "training.eval_batches=2",
    "logging.peak_tflops=1",
    "checkpoint=off",
]
SEPARATE = [*SIZES, "data.documents=separate", "data.documents_in_text=line"]


@pytest.fixture(scope="module")
def lines_of_text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Documents of one to many tokens."""
    folder = tmp_path_factory.mktemp("lines")
    rng = np.random.default_rng(0)
    words = "model learns tokens gradient expert router layer batch step loss".split()
    texts = [" ".join(rng.choice(words, 1 + int(rng.geometric(0.08)))) for _ in range(500)]
    (folder / "corpus.txt").write_text("\n".join(texts) + "\n")
    return [f"data.corpus={folder / 'corpus.txt'}", f"data.cache_dir={folder}", "data.vocab_size=320"]


@pytest.fixture(scope="module")
def separate(lines_of_text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return train_on_ranks([*SEPARATE, *lines_of_text, f"run_dir={tmp_path_factory.mktemp('separate')}"])


def test_numbers_are_those_of_the_batches(lines_of_text: list[str], separate: Lines) -> None:
    config = make_config([*SEPARATE, *lines_of_text])
    prepared = prepare(config.data, "gpt", False)
    train, makers = build_data(config, prepared, rank=0, world_size=1, consumed_samples=0)
    for line in separate:
        step = train.next_step()
        assert line["predicted_tokens"] == sum(int(batch["loss_mask"].sum()) for batch in step) < line["tokens"]
        pairs = sum(attended_pairs(config, batch["positions"]) for batch in step)
        assert line["attended_share"] == pairs / (2 * 8 * 32 * 33 / 2) < 1
        flops = training_flops_per_token(config, prepared.vocab_size, line["attended_share"])
        assert line["mfu"] == pytest.approx(flops * line["tokens_per_second"] / 1e12)
    train.close()
    valid = makers[HELD_OUT]()
    batches = [batch for _ in range(2) for batch in valid.next_step()]
    valid.close()
    counted = [batch["loss_mask"].numpy() > 0 for batch in batches]
    seen: dict[str, list[np.ndarray]] = {
        "position": [batch["positions"].numpy() for batch in batches],
        "length": [segment_lengths(batch["positions"]) for batch in batches],
    }
    for by, values in seen.items():
        buckets = separate[-1][f"validation_loss_by_{by}"]
        found = [int(value).bit_length() for some, real in zip(values, counted, strict=True) for value in some[real]]
        numbers = np.bincount(found)
        assert len(buckets) == (numbers > 0).sum()
        # Their mean, by the tokens of each, is the loss.
        mean = sum(loss * number for loss, number in zip(buckets.values(), numbers[numbers > 0], strict=True))
        assert mean / numbers.sum() == pytest.approx(separate[-1]["validation_loss"], rel=FP32_LOSS)
    assert "validation_loss_by_position" not in separate[0]


LAYOUTS = {"DP2": [], "PP2": ["parallel.pipeline=2"], "TP2+SP": ["parallel.tensor=2", "parallel.sequence=true"]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_do_not_depend_on_the_layout(
    lines_of_text: list[str], separate: Lines, layout: str, tmp_path: Path
) -> None:
    lines = train_on_ranks([*SEPARATE, *lines_of_text, *LAYOUTS[layout], f"run_dir={tmp_path}"], 2)
    assert read_metrics(tmp_path) == lines
    config = make_config([*SEPARATE, *lines_of_text])
    share = json.loads((tmp_path / "plan.json").read_text())["attended_share"]
    assert share == corpus_share(config, prepare(config.data, "gpt", False).train)
    assert share == pytest.approx(lines[0]["attended_share"], rel=0.3)
    for line, expected in zip(lines, separate, strict=True):
        assert line["predicted_tokens"] == expected["predicted_tokens"]
        assert line["attended_share"] == expected["attended_share"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=FP32_LOSS)
    for by in ("position", "length"):
        key = f"validation_loss_by_{by}"
        assert lines[-1][key] == pytest.approx(separate[-1][key], rel=FP32_LOSS)


def test_joined_documents_have_positions_in_the_sample(lines_of_text: list[str], tmp_path: Path) -> None:
    (first, last) = train_on_ranks([*SIZES, "data.documents_in_text=line", *lines_of_text, f"run_dir={tmp_path}"])
    assert first["predicted_tokens"] == first["tokens"] and "attended_share" not in first
    buckets = last["validation_loss_by_position"]
    assert list(buckets) == ["0", "1", "2-3", "4-7", "8-15", "16-31"] and "validation_loss_by_length" not in last
    mean = sum(loss * number for loss, number in zip(buckets.values(), (1, 1, 2, 4, 8, 16), strict=True)) / 32
    assert mean == pytest.approx(last["validation_loss"], rel=FP32_LOSS)
    config = make_config([*SIZES, "data.documents_in_text=line", *lines_of_text])
    vocab_size = prepare(config.data, "gpt", False).vocab_size
    flops = training_flops_per_token(config, vocab_size, derived.attended_share(config))
    assert first["mfu"] == pytest.approx(flops * first["tokens_per_second"] / 1e12)
