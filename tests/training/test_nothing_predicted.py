"""Steps, micro-batches and whole runs in which there is no token to predict."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from configs.schema import Config
from data.tokenizer import train_tokenizer
from tests import distributed
from tests.data.token_files import write_tokens
from tests.distributed import RankError
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import Lines, largest_difference, make_config, read_metrics, train
from training.resilience import events
from training.resilience.health import MOST_IN_A_ROW, UnhealthyRun

SAMPLES = 8  # a step
SMALL = ["model.hidden_size=32", "model.num_layers=2", "model.sequence_length=16"]
TINY = ["experiment=gpt_tiny", *SMALL, f"training.global_batch_size={SAMPLES}", "checkpoint=off"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that train on token files, of documents of one token each and of documents of 20."""
    folder, draw = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    train_tokenizer(["a model learns tokens of a text"] * 50, 320, folder / "small.model")
    for name, length in (("single", 1), ("long", 20)):
        (folder / name).mkdir()
        documents = [[draw.integers(10, 200, length)] for _ in range(4000 // length)]
        write_tokens(folder / name / "part", np.uint16, documents)
    of_data = [f"data.tokenizer={folder / 'small.model'}", f"data.cache_dir={folder / 'cache'}", "data.num_workers=1"]
    return [f"data.corpus={folder / 'long'}", "data.documents=separate", "data.validation_fraction=0", *of_data]


def single(words: list[str]) -> list[str]:
    return [words[0].replace("long", "single"), *words[1:]]


def train_with_empty_samples(config: Config, empty: list[int]) -> Lines:
    """Train where these samples, counted in the order in which the run takes them, predict nothing."""
    from data.samples import GPTSamples

    original = GPTSamples.batch

    def batch(self: GPTSamples, indices: list[int]) -> dict[str, np.ndarray]:
        found = original(self, indices)
        found["loss_mask"][np.isin(list(indices), empty)] = 0.0
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPTSamples, "batch", batch)
        return train(config)


def run(overrides: list[str], ranks: int = 1, empty: range | list[int] = ()) -> Lines:  # type: ignore[assignment]
    config = make_config([*TINY, "training.steps=4", "optimizer.decay_steps=4", *overrides], ranks)
    return distributed.run(train_with_empty_samples, ranks, config, list(empty))[0]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 4)])
def test_a_run_that_predicts_nothing_is_refused(words: list[str], tmp_path: Path, ranks: int, micro: int) -> None:
    expected = r"data.documents \(separate\): in step 1, samples 0 to 7: no token is predicted.*data.documents=joined"
    overrides = [*single(words), f"training.micro_batch_size={micro}", f"run_dir={tmp_path}"]
    with pytest.raises(RankError, match=expected) as caught:
        run(overrides, ranks)
    assert "RejectedRun" in str(caught.value)
    assert not (tmp_path / "metrics.jsonl").exists() or read_metrics(tmp_path) == []
    assert [line["step"] for line in run([*overrides, "data.documents=joined"], ranks)] == [1, 2, 3, 4]


@pytest.mark.parametrize(("ranks", "policy"), [(1, "stop"), (2, "rollback")])
def test_a_later_step_is_passed_over(words: list[str], tmp_path: Path, ranks: int, policy: str) -> None:
    overrides = [*words, "training.micro_batch_size=2", f"training.nonfinite={policy}"]
    lines = run([*overrides, f"run_dir={tmp_path}"], ranks, range(2 * SAMPLES, 3 * SAMPLES))
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and all(line["predicted_tokens"] > 0 for line in lines)
    kinds = {event["kind"]: event for event in events.read(tmp_path)}
    assert kinds["nothing_predicted"]["step"] == 3
    assert (kinds["batch_skipped"]["first"], kinds["batch_skipped"]["end"]) == (16, 24)
    # A run that never saw the batch makes the same steps: nothing was updated, decayed or counted in a schedule.
    again = tmp_path / "again"
    again.mkdir()
    (again / "skipped_samples.json").write_text((tmp_path / "skipped_samples.json").read_text())
    unseen = run([*overrides, f"run_dir={again}"], ranks)
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [line[key] for line in lines] == [line[key] for line in unseen], key


def test_such_steps_in_a_row_end_the_run(words: list[str], tmp_path: Path) -> None:
    expected = f"{MOST_IN_A_ROW + 1} rejected batches in a row are too many.*data.documents=joined"
    overrides = [*words, "training.micro_batch_size=8", f"run_dir={tmp_path}"]
    with pytest.raises(RankError, match=expected) as caught:
        run(overrides, 1, range(SAMPLES, 40 * SAMPLES))
    assert isinstance(caught.value.__cause__, UnhealthyRun)
    assert json.loads((tmp_path / "skipped_samples.json").read_text()) == []
    most = range(SAMPLES, (1 + MOST_IN_A_ROW) * SAMPLES)  # one batch fewer is passed over
    assert [line["step"] for line in run([*overrides, f"run_dir={tmp_path / 'most'}"], 1, most)] == [1, 2, 3, 4]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 4)])
def test_empty_micro_batches_change_no_loss(words: list[str], tmp_path: Path, ranks: int, micro: int) -> None:
    """With two ranks one of them predicts nothing in the whole step."""
    empty = [*range(4), *range(12, 16), 17]
    whole = run([*words, "training.micro_batch_size=8", f"run_dir={tmp_path / 'whole'}"], 1, empty)
    split = run([*words, f"training.micro_batch_size={micro}", f"run_dir={tmp_path / 'split'}"], ranks, empty)
    assert [line["predicted_tokens"] for line in split] == [line["predicted_tokens"] for line in whole]
    assert largest_difference(split, whole, "loss") < FP32_LOSS
    assert largest_difference(split, whole, "grad_norm") < FP32_GRAD_NORM
