"""The load-balancing loss over the global batch: the same in every layout and cut, bit for bit over a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checks.layout_parity import LAYOUTS
from checkpoint import manifest
from checkpoint.state_file import read_state
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import Lines, largest_difference, train_on_ranks

STEPS, STOP = 6, 3
EXPERTS, PAIRS = 4, 8 * 32 * 2  # choices of a step in a layer
COMMON = [
    "experiment=gpt_moe_tiny",
    "model.num_layers=4",
    "moe.layers=[0,1,1,1]",
    "model.hidden_size=32",
    "model.sequence_length=32",
    "training.global_batch_size=8",
    "training.micro_batch_size=2",
    "optimizer.warmup_steps=1",
    f"optimizer.decay_steps={STEPS}",
    f"training.steps={STEPS}",
    "moe.aux_loss_coeff=0",  # depends on the size of a micro-batch
    "checkpoint=off",
]
LOSS = "moe.global_aux_loss_coeff=0.5"  # as strong as the language model's, so that it is seen
OTHERS = {
    "micro-batches of 1, evaluation": (
        1,
        ["training.micro_batch_size=1", "training.eval_interval=1", "training.eval_batches=1"],
    ),
    "DP2, one micro-batch, full recompute": (2, ["training.micro_batch_size=4", "training.recompute=full"]),
    **{name: (LAYOUTS[name].ranks, list(LAYOUTS[name].overrides)) for name in ("TP2+SP",)},
    "DP2xPP2xVPP2xEP2": (4, [*LAYOUTS["DP2xPP2xVPP2xEP2"].overrides, "training.micro_batch_size=1"]),
}


@pytest.fixture(scope="module")
def single(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return train_on_ranks([*COMMON, *data, LOSS, f"run_dir={tmp_path_factory.mktemp('single')}"])


@pytest.mark.parametrize("case", OTHERS)
def test_equal_in_every_layout(data: list[str], single: Lines, tmp_path: Path, case: str) -> None:
    ranks, overrides = OTHERS[case]
    lines = train_on_ranks([*COMMON, *data, LOSS, *overrides, f"run_dir={tmp_path}"], ranks)
    for key, most in (("loss", FP32_LOSS), ("global_aux_loss", FP32_LOSS), ("grad_norm", FP32_GRAD_NORM)):
        assert largest_difference(lines, single, key) < most, key
    for line, expected in zip(lines, single, strict=True):
        assert line["moe_layers"]["global_aux_loss"] == pytest.approx(
            expected["moe_layers"]["global_aux_loss"], rel=FP32_LOSS
        )


def test_it_acts_from_the_second_step_on(data: list[str], single: Lines, tmp_path: Path) -> None:
    without = train_on_ranks([*COMMON, *data, f"run_dir={tmp_path}"])
    assert "global_aux_loss" not in without[0] and "global_aux_loss" not in without[0]["moe_layers"]
    assert without[0]["grad_norm"] == pytest.approx(single[0]["grad_norm"], rel=FP32_GRAD_NORM)  # nothing known yet
    assert without[1]["loss"] == pytest.approx(single[1]["loss"], rel=FP32_LOSS)
    assert all(abs(a["grad_norm"] / b["grad_norm"] - 1) > 1e-3 for a, b in zip(without[1:], single[1:], strict=True))
    for line in single:
        layers = line["moe_layers"]["global_aux_loss"]
        assert len(layers) == 3 and sum(layers) / 3 == pytest.approx(line["global_aux_loss"])
        assert layers == pytest.approx([1.0] * 3, abs=0.2)


RESUMES = {
    "PP2xVPP2, bf16": (2, [*LAYOUTS["PP2xVPP2"].overrides, "training.precision=bf16"]),
    # some steps overflow
    "EP2, fp16": (2, ["parallel.expert=2", "training.precision=fp16", f"training.initial_loss_scale={2.0**19}"]),
}


@pytest.mark.parametrize("case", RESUMES)
def test_resume_bit_for_bit(data: list[str], tmp_path: Path, case: str) -> None:
    ranks, overrides = RESUMES[case]
    common = [*COMMON, *data, LOSS, *overrides]
    whole = train_on_ranks([*common, f"run_dir={tmp_path / 'whole'}"], ranks)
    updated = [line["updated"] for line in whole]
    assert (False in updated) == ("fp16" in case)
    legs = [
        *common,
        f"run_dir={tmp_path / 'legs'}",
        "checkpoint.at_end=true",
        "checkpoint.interval=1",
        "checkpoint.keep=9",
    ]
    lines: Lines = []
    for stop in (STOP, STEPS - 1, STEPS):
        lines += train_on_ranks([*legs, f"training.steps={stop}"], ranks)
    for key in ("step", "loss", "grad_norm", "global_aux_loss"):
        assert [line[key] for line in lines] == [line[key] for line in whole], key
    folders = [manifest.folder_of(tmp_path / "legs", step) for step in range(1, STEPS + 1)]
    states = [None, *(read_state(folder)["callbacks"].get("global_aux_loss") for folder in folders)]
    for before, state, is_updated in zip(states, states[1:], updated, strict=False):
        assert (state != before) == is_updated  # a step that changed nothing changes this neither
    assert [sum(layer) for layer in states[-1]["choices"]] == [PAIRS] * 3
    assert {len(layer) for layer in states[-1]["choices"]} == {EXPERTS}


def test_resume_in_another_layout_and_without(
    data: list[str], single: Lines, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = [*COMMON, *data, f"run_dir={tmp_path}", "checkpoint.at_end=true"]
    lines = train_on_ranks([*common, LOSS, f"training.steps={STOP}"], 1)
    lines += train_on_ranks([*common, LOSS, f"training.steps={STEPS - 1}", "parallel.expert=2"], 2)
    for key, most in (("loss", FP32_LOSS), ("global_aux_loss", FP32_LOSS), ("grad_norm", FP32_GRAD_NORM)):
        assert largest_difference(lines, single[:-1], key) < most, key
    capfd.readouterr()
    (line,) = train_on_ranks([*common, "moe.global_aux_loss_coeff=0"], 1)
    assert (
        "global_aux_loss" not in line
        and "has a state of global_aux_loss, but this run has no such callback" in capfd.readouterr().out
    )
