"""Steps that must not be taken: NaN or Inf in loss or gradients, and losses that leap up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import Config
from tests import distributed
from tests.distributed import RankError
from tests.training.helpers import Lines, make_config, read_metrics
from training import events
from training.health import LEAST_STEPS, MOST_IN_A_ROW, Health, Refusal, Skip, SkippedSamples, UnhealthyRun

SAMPLES = 8  # a step
KEYS = ("step", "loss", "grad_norm")


def train_with_fault(config: Config, rank: int, first_samples: list[int], where: str, value: float) -> Lines:
    """Train on the ranks of the pool; on one rank the output (or its gradient) of a module is spoilt for steps of certain samples."""
    import torch.distributed as dist

    from training.run import Callback, Metrics, Run
    from training.trainer import Trainer

    taken: list[Metrics] = []
    name, _, kind = where.partition(":")

    class Fault(Callback):
        def on_start(self, run: Run) -> None:
            self.run = run
            if dist.get_rank() == rank:
                for chunk in run.model.bare_chunks:
                    modules = dict(chunk.named_modules())
                    if name in modules:
                        modules[name].register_forward_hook(self.spoil)

        def spoil(self, module: Any, inputs: Any, output: Any) -> Any:
            if self.run.progress.consumed_samples not in first_samples or not torch.is_grad_enabled():
                return output
            tensor = output[0] if isinstance(output, tuple) else output
            if kind == "gradient":
                tensor.register_hook(lambda gradient: gradient * value)
                return output
            return (tensor * value, *output[1:]) if isinstance(output, tuple) else tensor * value

        def after_step(self, run: Run, metrics: Metrics) -> None:
            taken.append(dict(metrics))

    trainer = Trainer(config)
    trainer.callbacks.append(Fault())
    trainer.fit()
    return taken


def run(
    overrides: list[str], ranks: int, rank: int = 0, samples: Any = (), where: str = "decoder.layers.2.mlp", value: float = 1.0
) -> Lines:
    config = make_config(["training.steps=6", "optimizer.decay_steps=6", "training.micro_batch_size=2", *overrides], ranks)
    return distributed.run(train_with_fault, ranks, config, rank, list(samples), where, value, timeout=60)[0]


def told(run_dir: Path, kind: str) -> dict[str, Any]:
    (event,) = [event for event in events.read(run_dir) if event["kind"] == kind]
    return event


def picked(lines: Lines) -> list[tuple[Any, ...]]:
    return [tuple(line[key] for key in KEYS) for line in lines]


@pytest.mark.parametrize(
    ("ranks", "rank", "layout", "where", "value", "says"),
    [
        (2, 1, ["experiment=gpt_tiny"], "decoder.layers.1.self_attention", float("inf"), "first layer 2 of 4 (self_attention) on rank 1"),
        (2, 1, ["experiment=gpt_tiny", "parallel.pipeline=2"], "decoder.layers.1.mlp", float("nan"), "first layer 4 of 4 (mlp) on rank 1"),
        (2, 0, ["experiment=gpt_moe_tiny", "parallel.expert=2"], "decoder.layers.0.mlp:gradient", float("inf"), "in the backward pass"),
        (2, 1, ["experiment=bert_tiny", "parallel.tensor=2"], "encoder.layers.0.mlp", float("nan"), "first layer 1 of"),
    ],
)
def test_nonfinite_is_named_and_skipped(
    data: list[str], tmp_path: Path, ranks: int, rank: int, layout: list[str], where: str, value: float, says: str
) -> None:
    overrides = [*layout, *data, "training.nonfinite=skip", f"run_dir={tmp_path}", "checkpoint.interval=2"]
    lines = run(overrides, ranks, rank, [3 * SAMPLES], where, value)
    assert [line["step"] for line in lines] == list(range(1, 7)) and read_metrics(tmp_path) == lines
    event = told(tmp_path, "nonfinite")
    assert says in event["text"] and event["lost_rank"] == rank and event["step"] == 4, event
    assert (told(tmp_path, "batch_skipped")["first"], told(tmp_path, "batch_skipped")["end"]) == (3 * SAMPLES, 4 * SAMPLES)
    # Without a fault but with the record the same steps are taken on the same samples: the optimizer was not touched.
    again = tmp_path / "again"
    again.mkdir()
    (again / "skipped_samples.json").write_text((tmp_path / "skipped_samples.json").read_text())
    assert picked(run([*layout, *data, f"run_dir={again}"], ranks)) == picked(lines)


def test_rollback_takes_the_steps_again_without_the_batch(data: list[str], tmp_path: Path) -> None:
    overrides = ["experiment=gpt_tiny", *data, "training.nonfinite=rollback", "checkpoint.interval=2", f"run_dir={tmp_path}/run"]
    lines = run(overrides, 2, 1, [3 * SAMPLES], value=float("nan"))
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6]  # steps 3 again: back to the checkpoint of step 2
    assert picked(lines[2:3]) == picked(lines[3:4])
    assert read_metrics(tmp_path / "run") == lines[:2] + lines[3:]
    assert told(tmp_path / "run", "rolled_back")["step"] == 2
    record = json.loads((tmp_path / "run" / "skipped_samples.json").read_text())
    assert [(skip["first"], skip["end"], skip["step"]) for skip in record] == [(24, 32, 4)]

    # A later start from before the batch passes over it too, wherever it resumes.
    early = tmp_path / "run" / "checkpoints" / "step_0000002"
    resumed = run([*overrides, f"checkpoint.resume={early}"], 2)
    assert picked(resumed) == picked(lines[3:])


def test_rollback_without_a_checkpoint_stops(data: list[str], tmp_path: Path) -> None:
    with pytest.raises(RankError, match="no checkpoint to go back to") as caught:
        run(["experiment=gpt_tiny", *data, "training.nonfinite=rollback", f"run_dir={tmp_path}"], 1, 0, [8], value=float("nan"))
    assert isinstance(caught.value.__cause__, UnhealthyRun)


def test_stop_saves_the_last_good_step(data: list[str], tmp_path: Path) -> None:
    overrides = ["experiment=gpt_tiny", *data, f"run_dir={tmp_path}"]
    with pytest.raises(
        RankError, match=r"The optimizer was not touched; the checkpoint of step 3 is good.*training.nonfinite=skip"
    ) as caught:
        run(overrides, 2, 0, [3 * SAMPLES], value=float("nan"))
    assert isinstance(caught.value.__cause__, UnhealthyRun)
    assert [line["step"] for line in run([*overrides, "training.nonfinite=skip"], 2, 0, [3 * SAMPLES], value=float("nan"))] == [4, 5, 6]


def test_damage_that_stays_ends_the_run(data: list[str], tmp_path: Path) -> None:
    """Every batch is refused: to skip all of them would waste the data and hide the cause."""
    overrides = ["experiment=gpt_tiny", *data, "training.nonfinite=skip", f"run_dir={tmp_path}"]
    with pytest.raises(RankError, match=f"{MOST_IN_A_ROW + 1} refused batches in a row"):
        run(overrides, 1, 0, range(2 * SAMPLES, 100 * SAMPLES), value=float("nan"))


def test_fp16_overflow_is_no_fault(data: list[str], tmp_path: Path) -> None:
    overrides = ["experiment=gpt_tiny", *data, "training.precision=fp16", "training.initial_loss_scale=1e30", f"run_dir={tmp_path}"]
    lines = run([*overrides, "checkpoint=off"], 1)
    assert not lines[0]["updated"] and [line["step"] for line in lines] == list(range(1, 7))
    assert not [event for event in events.read(tmp_path) if event["kind"] == "nonfinite"]


def judge(health: Health, loss: float, step: int = 0) -> Refusal | None:
    refusal = health.judge(loss, True)
    if refusal is None:
        health.taken(loss, step)
    return refusal


def test_spikes_are_measured_against_the_median() -> None:
    health = Health(make_config(["training.spike_factor=1.5"]))
    losses = [9.0, 5.0, 4.0, 4.1, 3.9, 4.0, 4.2, 4.0]
    assert len(losses) == LEAST_STEPS
    assert [judge(health, loss, step) for step, loss in enumerate(losses)] == [None] * len(losses)
    assert judge(health, 5.9) is None
    refusal = judge(health, 6.3)
    assert refusal is not None and refusal.kind == "loss_spike" and "1.5" in refusal.text
    assert health.policy(refusal) == "skip"
    assert judge(Health(make_config([])), 1e9) is None  # off
    assert judge(health, float("nan")) == Refusal("nonfinite", "the loss is nan")


def test_a_spike_is_skipped(data: list[str], tmp_path: Path) -> None:
    steps = LEAST_STEPS + 2
    overrides = [
        "experiment=gpt_tiny",
        *data,
        "training.spike_factor=1.2",
        "checkpoint=off",
        f"training.steps={steps}",
        f"run_dir={tmp_path}",
    ]
    spoilt = LEAST_STEPS * SAMPLES
    lines = run(overrides, 2, 1, [spoilt], "output_layer", 40.0)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert told(tmp_path, "loss_spike")["step"] == LEAST_STEPS + 1 and told(tmp_path, "batch_skipped")["first"] == spoilt


@pytest.mark.parametrize(
    ("skips", "position", "count", "expected"),
    [
        ([], 8, 8, 8),
        ([(16, 24)], 8, 8, 8),
        ([(16, 24)], 16, 8, 24),
        ([(16, 24)], 12, 8, 24),  # the batch size was changed meanwhile
        ([(24, 32), (16, 24)], 16, 8, 32),
        ([(16, 24), (28, 30)], 20, 8, 30),
    ],
)
def test_position_follows_from_the_record(tmp_path: Path, skips: list[tuple[int, int]], position: int, count: int, expected: int) -> None:
    record = SkippedSamples(tmp_path, [Skip(first, end, 1, "") for first, end in skips])
    assert record.next_position(position, count) == expected
