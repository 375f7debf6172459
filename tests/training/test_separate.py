"""Trainings with separate documents: the same losses in every layout and under every memory setting, a bf16 run against
fp32, and a run that was joined before."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.checks.layout_parity import SINGLE, compare
from tests.tolerances import FP32_LOSS
from tests.training.helpers import largest_difference, read_metrics, train_on_ranks

# All of them: python -m benchmarks.checks.layout_parity --batches separate_1 separate_2 separate_3
LAYOUTS = {"gpt_tiny": ["PP2xVPP2"], "gpt_moe_tiny": ["TP2+SP", "EP2"]}
OTHER_SETTINGS: dict[str, tuple[int, list[str]]] = {
    "EP2, auto degree": (2, ["parallel.expert=2", "moe.pipeline_degree=auto"]),
    "EP2, solve": (2, ["parallel.expert=2", "moe.placement.policy=solve", "moe.placement.extra_slots=2"]),
    "EP2, host state": (2, ["parallel.expert=2", "optimizer.state_device=host"]),
    "layer inputs on the host": (1, ["training.recompute=full", "training.activation_offload=auto"]),
    "selective recompute": (1, ["training.recompute=selective"]),
}


@pytest.fixture(scope="module")
def short_texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that train on texts of 1 to 300 words, many in a sample."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(1)
    words = (Path(__file__).parents[2] / "LICENSE").read_text().split()
    lines = [" ".join(draw.choice(words) for _ in range(draw.choice([1, 1, 2, 5, 10, 40, 300]))) for _ in range(1500)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    settings = ["data.vocab_size=384", "data.num_workers=1", "data.documents=separate", "training.steps=5"]
    return [f"data.corpus={folder / 'texts.jsonl'}", f"data.cache_dir={folder / 'cache'}", *settings]


@pytest.mark.parametrize("model", LAYOUTS)
def test_layouts(short_texts: list[str], model: str) -> None:
    compared = compare([model], LAYOUTS[model], short_texts)
    assert [row.layout for row in compared] == [SINGLE, *LAYOUTS[model]]
    assert [row for row in compared if not row.passed] == []


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_of_other_sizes(short_texts: list[str], size: int) -> None:
    """One and two processes, against micro-batches of 2 of the same samples."""
    common = [*short_texts, "training.global_batch_size=12", "training.steps=2"]
    compared = compare(["gpt_tiny"], ["DP2"], [*common, f"training.micro_batch_size={size}"])
    assert [row for row in compared if not row.passed] == []
    (usual, *_) = compare(["gpt_tiny"], [], [*common, "training.micro_batch_size=2"])
    assert abs(compared[0].last_loss - usual.last_loss) < FP32_LOSS * usual.last_loss


@pytest.fixture(scope="module")
def alone(short_texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The steps of one process that keeps everything."""
    return _steps(short_texts, 1, [], tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_other_settings(short_texts: list[str], alone: list[dict[str, float]], name: str, tmp_path: Path) -> None:
    ranks, changes = OTHER_SETTINGS[name]
    assert largest_difference(_steps(short_texts, ranks, changes, tmp_path), alone, "loss") < FP32_LOSS


def test_bf16(short_texts: list[str], alone: list[dict[str, float]], tmp_path: Path) -> None:
    lines = _steps(short_texts, 1, ["training.precision=bf16"], tmp_path)
    assert 0 < largest_difference(lines, alone, "loss") < 1e-3


def test_a_joined_run_may_resume_with_separate_documents(
    short_texts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = ["experiment=gpt_tiny", f"run_dir={tmp_path}", *short_texts]
    train_on_ranks([*common, "data.documents=joined", "training.steps=3"])
    capfd.readouterr()
    train_on_ranks(common)
    assert "data.documents" in capfd.readouterr().out
    predicted = [line["predicted_tokens"] for line in read_metrics(tmp_path)]
    assert len(set(predicted[:3])) == 1 and max(predicted[3:]) < predicted[0]


def _steps(overrides: list[str], ranks: int, changes: list[str], folder: Path) -> list[dict[str, float]]:
    return train_on_ranks(
        ["experiment=gpt_moe_tiny", "checkpoint=off", f"run_dir={folder}", *overrides, *changes], ranks
    )
