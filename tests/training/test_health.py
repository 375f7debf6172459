"""Steps that must not be taken: NaN or Inf in loss or gradients, and losses that leap up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.schema import Config
from tests import distributed
from tests.configs import advice
from tests.distributed import RankError
from tests.training.helpers import Lines, make_config, read_metrics
from tests.training.test_step import batches_of, build, small
from tests.waits import LONG
from training.callbacks import loss_scale
from training.resilience import events
from training.resilience.health import (
    LEAST_STEPS,
    MOST_DAMAGES,
    MOST_IN_A_ROW,
    WINDOW,
    Health,
    RejectedStep,
    Skip,
    SkippedSamples,
    UnhealthyRun,
)

SAMPLES = 8  # a step
KEYS = ("step", "loss", "grad_norm")
INF = float("inf")
# What passes change before the optimizer is asked: random numbers and the routers' biases.
TRACES = ["model.hidden_dropout=0.1", "moe.expert_bias=true", "moe.expert_bias_rate=0.1", "moe.router_score=sigmoid"]

OFF_DEVICE = ["moe.weights_device=host", "optimizer.state_device=host"]


def train_with_fault(config: Config, rank: int, first_samples: list[int], where: str, value: float) -> Lines:
    """Train on the ranks of the pool; on one rank the output (or its gradient) of a module is spoilt for steps of
    certain samples, or (`weight`) its first parameter after certain steps."""
    import torch.distributed as dist

    from training.run import Callback, Metrics, Run
    from training.trainer import Trainer

    taken: list[Metrics] = []
    name, _, kind = where.partition(":")

    class Fault(Callback):
        def on_start(self, run: Run) -> None:
            self.run = run
            if dist.get_rank() == rank and kind != "weight":
                for chunk in run.engine.bare_chunks:
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
            if kind == "weight" and dist.get_rank() == rank and run.progress.step in first_samples:
                first_samples.remove(run.progress.step)
                parameter = run.engine.bare_chunks[0].get_submodule(name).get_parameter("weight")
                parameter.data.view(-1)[-1] = value

    trainer = Trainer(config)
    trainer.callbacks.append(Fault())
    trainer.fit()
    return taken


def run(
    overrides: list[str],
    ranks: int,
    rank: int = 0,
    samples: Any = (),
    where: str = "decoder.layers.2.mlp",
    value: float = 1.0,
) -> Lines:
    config = make_config(
        ["training.steps=6", "optimizer.decay_steps=6", "training.micro_batch_size=2", *overrides], ranks
    )
    return distributed.run(train_with_fault, ranks, config, rank, list(samples), where, value, timeout=LONG)[0]


def event_of(run_dir: Path, kind: str) -> dict[str, Any]:
    (event,) = [event for event in events.read(run_dir) if event["kind"] == kind]
    return event


def picked(lines: Lines) -> list[tuple[Any, ...]]:
    return [tuple(line[key] for key in KEYS) for line in lines]


@pytest.mark.parametrize(
    ("ranks", "rank", "layout", "where", "value", "says"),
    [
        (
            2,
            1,
            ["experiment=gpt_tiny"],
            "decoder.layers.1.self_attention",
            INF,
            "first layer 2 of 4 (self_attention) on rank 1",
        ),
        (
            2,
            1,
            ["experiment=gpt_tiny", "parallel.pipeline=2"],
            "decoder.layers.1.mlp",
            float("nan"),
            "first layer 4 of 4 (mlp) on rank 1",
        ),
        (
            2,
            0,
            ["experiment=gpt_moe_tiny", "parallel.expert=2", *TRACES],
            "decoder.layers.0.mlp:gradient",
            INF,
            "in the backward pass",
        ),
        (
            2,
            1,
            ["experiment=gpt_moe_tiny", *OFF_DEVICE],
            "decoder.layers.1.mlp",
            float("nan"),
            "first layer 2 of 4 (mlp) on rank 1",
        ),
        (2, 1, ["experiment=bert_tiny", "parallel.tensor=2"], "encoder.layers.0.mlp", float("nan"), "first layer 1 of"),
    ],
)
def test_nonfinite_is_named_and_skipped(
    data: list[str], tmp_path: Path, ranks: int, rank: int, layout: list[str], where: str, value: float, says: str
) -> None:
    overrides = [*layout, *data, "training.nonfinite=skip", f"run_dir={tmp_path}", "checkpoint.interval=2"]
    lines = run(overrides, ranks, rank, [3 * SAMPLES], where, value)
    assert [line["step"] for line in lines] == list(range(1, 7)) and read_metrics(tmp_path) == lines
    event = event_of(tmp_path, "nonfinite")
    assert says in event["text"] and event["lost_rank"] == rank and event["step"] == 4, event
    assert (event_of(tmp_path, "batch_skipped")["first"], event_of(tmp_path, "batch_skipped")["end"]) == (
        3 * SAMPLES,
        4 * SAMPLES,
    )
    # Without a fault but with the record the same steps are taken on the same samples: the optimizer was not touched.
    again = tmp_path / "again"
    again.mkdir()
    (again / "skipped_samples.json").write_text((tmp_path / "skipped_samples.json").read_text())
    assert picked(run([*layout, *data, f"run_dir={again}"], ranks)) == picked(lines)


def test_rollback_takes_the_steps_again_without_the_batch(data: list[str], tmp_path: Path) -> None:
    overrides = [
        "experiment=gpt_tiny",
        *data,
        "training.nonfinite=rollback",
        "checkpoint.interval=2",
        f"run_dir={tmp_path}/run",
    ]
    lines = run(overrides, 2, 1, [3 * SAMPLES], value=float("nan"))
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6]  # steps 3 again: back to the checkpoint of step 2
    assert picked(lines[2:3]) == picked(lines[3:4])
    assert read_metrics(tmp_path / "run") == lines[:2] + lines[3:]
    assert event_of(tmp_path / "run", "rolled_back")["step"] == 2
    record = json.loads((tmp_path / "run" / "skipped_samples.json").read_text())
    assert [(skip["first"], skip["end"], skip["step"]) for skip in record] == [(24, 32, 4)]

    # A later start from before the batch passes over it too, wherever it resumes.
    early = tmp_path / "run" / "checkpoints" / "step_0000002"
    resumed = run([*overrides, f"checkpoint.resume={early}", f"run_dir={tmp_path}/other"], 2)
    assert picked(resumed) == picked(lines[3:])
    assert json.loads((tmp_path / "other" / "skipped_samples.json").read_text()) == record


def test_rollback_without_a_checkpoint_stops(data: list[str], tmp_path: Path) -> None:
    overrides = ["experiment=gpt_tiny", *data, f"run_dir={tmp_path}"]
    with pytest.raises(RankError, match="no checkpoint to go back to") as caught:
        run([*overrides, "training.nonfinite=rollback"], 1, 0, [8], value=float("nan"))
    assert isinstance(caught.value.__cause__, UnhealthyRun)
    # Both that it advises are tried, the second first: it goes back and passes over the batch.
    advice = "Try training.nonfinite=skip, or checkpoint.interval=1 to have a checkpoint next time."
    assert str(caught.value.__cause__).endswith(advice)
    again = [*overrides, "training.nonfinite=rollback", "checkpoint.interval=1", f"run_dir={tmp_path}/with_interval"]
    assert [line["step"] for line in run(again, 1, 0, [8], value=float("nan"))] == [1, 2, 3, 4, 5, 6]
    assert run([*overrides, "training.nonfinite=skip"], 1, 0, [8], value=float("nan"))[-1]["step"] == 6


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "damaged", "step", "advised"),
    [
        (
            "nonfinite",
            False,
            8,
            "Try training.nonfinite=skip, or checkpoint.interval=4 to have a checkpoint next time.",
        ),
        ("spike", False, 8, "Try training.spike=skip, or checkpoint.interval=4 to have a checkpoint next time."),
        ("nonfinite", False, 0, "Try training.nonfinite=skip."),
        ("nonfinite", True, 1, "Try checkpoint.interval=1 to have a checkpoint next time."),
    ],
)
def test_what_is_advised_without_a_checkpoint(
    kind: str, damaged: bool, step: int, advised: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The key is of what was refused, skipping mends no weights, and an interval is of steps that were taken."""
    from training.resilience import recovery

    monkeypatch.setattr(recovery.resume, "newest", lambda *_: None)
    run: Any = SimpleNamespace(run_dir=tmp_path, progress=SimpleNamespace(step=step))
    checkpoints: Any = SimpleNamespace(finish_pending=lambda run: None)
    with pytest.raises(UnhealthyRun) as caught:
        recovery._go_back(run, Health(Config()), "text", checkpoints, kind, damaged)
    assert str(caught.value) == f"text. There is no checkpoint to go back to. {advised}"


def test_stop_saves_the_last_good_step(data: list[str], tmp_path: Path) -> None:
    overrides = ["experiment=gpt_tiny", *data, f"run_dir={tmp_path}"]
    with pytest.raises(
        RankError,
        match=r"The optimizer made no update; the checkpoint of step 3 is good.*"
        r"training.nonfinite=skip, or training.nonfinite=rollback to",
    ) as caught:
        run(overrides, 2, 0, [3 * SAMPLES], value=float("nan"))
    assert isinstance(caught.value.__cause__, UnhealthyRun)
    assert [
        line["step"] for line in run([*overrides, "training.nonfinite=skip"], 2, 0, [3 * SAMPLES], value=float("nan"))
    ] == [4, 5, 6]


def test_refusals_that_never_end_blame_no_batch(data: list[str], tmp_path: Path) -> None:
    """Every batch is refused: to skip all of them would waste the data and hide the cause."""
    overrides = ["experiment=gpt_tiny", *data, "training.nonfinite=skip", f"run_dir={tmp_path}"]
    with pytest.raises(RankError, match=f"{MOST_IN_A_ROW + 1} rejected batches in a row"):
        run(overrides, 1, 0, range(2 * SAMPLES, 100 * SAMPLES), value=float("nan"))
    assert json.loads((tmp_path / "skipped_samples.json").read_text()) == []
    assert len(event_of(tmp_path, "batches_taken_back")["samples"]) == MOST_IN_A_ROW
    assert [line["step"] for line in run(overrides, 1)] == [3, 4, 5, 6]  # the fault is mended: all samples are used


WEIGHT = "decoder.layers.1.self_attention.linear_proj"


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_damaged_weights_blame_no_batch(data: list[str], tmp_path: Path, policy: str) -> None:
    overrides = [
        "experiment=gpt_tiny",
        *data,
        f"training.nonfinite={policy}",
        "checkpoint.interval=2",
        f"run_dir={tmp_path}",
    ]
    overrides.append("optimizer.distributed=false")  # no gather: the damage stays where it is
    fault = (2, 1, [3], f"{WEIGHT}:weight", float("nan"))
    if policy == "rollback":
        lines = run(overrides, *fault)
        assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6] and picked(lines[2:3]) == picked(lines[3:4])
        assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 7))
    else:
        with pytest.raises(
            RankError, match="damaged, and were not saved. To go back .*training.nonfinite=rollback"
        ) as caught:
            run(overrides, *fault)
        assert isinstance(caught.value.__cause__, UnhealthyRun)
    event = event_of(tmp_path, "nonfinite")
    assert (
        "first layer 2 of 4 (self_attention.linear_proj.weight) on rank 1" in event["text"] and event["lost_rank"] == 1
    )
    assert not (tmp_path / "skipped_samples.json").exists()


def test_damage_that_comes_back_ends_the_run() -> None:
    health, damage = Health(make_config(["training.nonfinite=rollback"])), RejectedStep("nonfinite", "")
    assert [health.policy(damage, damaged=True) for _ in range(MOST_DAMAGES + 1)] == ["rollback"] * MOST_DAMAGES + [
        "stop"
    ]
    health.taken(1.0, 1)
    assert health.policy(damage, damaged=True) == "rollback"
    assert Health(make_config(["training.nonfinite=skip"])).policy(damage, damaged=True) == "stop"


def damage_off_device(config: Config) -> list[str]:
    from optim.offload.optimizer import offload_of
    from training.resilience import diagnosis

    model = build(config)
    offload = offload_of(model.optimizer)
    assert offload is not None and offload.experts is not None
    found = [str(diagnosis.damage(model))]
    weights = offload.experts.read_weights(1, 0).clone()
    weights[0] = INF
    offload.experts.put_weights(offload.experts.weight_index(1, 0), weights)
    return [*found, str(diagnosis.damage(model))]


def test_damage_of_weights_off_the_device_is_named() -> None:
    (found,) = distributed.run(damage_off_device, 1, small("gpt_moe_tiny", *OFF_DEVICE))
    assert found[0] == "None" and "layer 2 of 2 (mlp.experts.linear_fc1.weight) on rank 0" in found[1]


def find_damage(config: Config) -> list[str]:
    from optim.state import named_state
    from training.resilience import diagnosis
    from training.step import train_step

    model = build(config)
    train_step(model, batches_of(config, 1), 1)
    found = [str(diagnosis.damage(model))]
    *_, (_, _, _, moment) = (
        state_entry for state_entry in named_state(model.optimizer, model.chunks) if state_entry[2] == "exp_avg_sq"
    )
    moment.view(-1)[0] = INF
    return [*found, str(diagnosis.damage(model))]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_damage_of_the_optimizer_is_named(precision: str) -> None:
    (found,) = distributed.run(find_damage, 1, small("gpt_moe_tiny", f"training.precision={precision}", micro=4))
    assert found[0] == "None" and found[1].startswith("the optimizer's exp_avg_sq of ") and " on rank 0 " in found[1]


# ---------------------------------------------------------------------------------------------------------------------
# fp16
# ---------------------------------------------------------------------------------------------------------------------


def fp16(data: list[str], run_dir: Path, scale: float, steps: int) -> list[str]:
    more = [
        "training.precision=fp16",
        f"training.initial_loss_scale={scale}",
        f"training.steps={steps}",
        "checkpoint=off",
    ]
    return ["experiment=gpt_tiny", *data, *more, f"run_dir={run_dir}"]


def test_fp16_overflow_is_no_fault(data: list[str], tmp_path: Path) -> None:
    lines = run(fp16(data, tmp_path, 2.0**22, 8), 1)
    assert (
        not lines[0]["updated"]
        and any(line["updated"] for line in lines)
        and [line["step"] for line in lines] == list(range(1, 9))
    )
    found = [event for event in events.read(tmp_path) if event["kind"] == "no_update"]
    assert [event["step"] for event in found] == [line["step"] for line in lines if not line["updated"]]
    assert [event["in_all"] for event in found] == list(range(1, len(found) + 1))
    assert not [event for event in events.read(tmp_path) if event["kind"] == "nonfinite"]


def test_fp16_that_never_updates_is_not_finished(data: list[str], tmp_path: Path) -> None:
    overrides = [*fp16(data, tmp_path / "run", 1e30, 4), "checkpoint.interval=2"]
    with pytest.raises(
        RankError, match="after step 4: no step made an update, because fp16 gradients overflowed"
    ) as caught:
        run(overrides, 1)
    assert isinstance(caught.value.__cause__, UnhealthyRun)
    # The checkpoints there are of fp16 and of their loss scale: the advice begins another run.
    (fixes,) = advice.split(str(caught.value.__cause__))[1]
    assert fixes == ["training.precision=bf16", f"run_dir={tmp_path}/run_2"]
    lines = run([*overrides, *fixes], 1)
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and all(line["updated"] for line in lines)


@pytest.mark.parametrize(
    ("scale", "in_a_row", "steps_left", "updates", "says"),
    [
        (512.0, 3, 10, 5, None),
        (512.0, 3, 0, 5, None),
        (1e30, 20, 10, 0, None),
        (1e30, 20, 0, 0, "no step made an update"),
        (1.0, 17, 10, 5, "the last 17 steps made no update"),
        (1e20, loss_scale.MOST_IN_A_ROW, 10, 5, f"the last {loss_scale.MOST_IN_A_ROW} steps made no update"),
    ],
)
def test_when_fp16_is_hopeless(scale: float, in_a_row: int, steps_left: int, updates: int, says: str | None) -> None:
    assert loss_scale.hopeless(scale, 1.0, in_a_row, steps_left, updates) == says


def overflow_experts(config: Config) -> list[tuple[float, ...]]:
    import torch.distributed as dist

    from optim.optimizer import prepare_gradients, update_loss_scale
    from parallel.megatron.optimizer import members

    model = build(config)
    scales = []
    for spoilt in (True, True, False):
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
            chunk.finish_grad_sync()  # no pass has written a gradient: they are zero
        model.optimizer.zero_grad()
        if spoilt:
            experts = [p for name, p in model.bare_chunks[0].named_parameters() if "experts" in name]
            if dist.get_rank() == 0:
                experts[0].main_grad.view(-1)[0] = INF
        overflow = prepare_gradients(model.optimizer)
        assert overflow is not None
        dist.all_reduce(overflow)
        assert (float(overflow) > 0) == spoilt
        update_loss_scale(model.optimizer, spoilt)
        scales.append(tuple(float(member.grad_scaler._scale) for member in members(model.optimizer)))
    return scales


def test_experts_and_the_rest_have_one_loss_scale() -> None:
    """The loss has one: gradients of experts that were divided by another would be too large for ever."""
    config = small("gpt_moe_tiny", "training.precision=fp16", "training.initial_loss_scale=1024", micro=4)
    config.parallel.expert = 2
    scales = distributed.run(overflow_experts, 2, config)
    assert scales == [[(1024.0, 1024.0), (512.0, 512.0), (512.0, 512.0)]] * 2  # Megatron's hysteresis is 2


# ---------------------------------------------------------------------------------------------------------------------
# Spikes
# ---------------------------------------------------------------------------------------------------------------------


def verdict(health: Health, loss: float, step: int = 0) -> RejectedStep | None:
    rejected = health.validate(loss, True, 1)
    if rejected is None:
        health.taken(loss, step)
    return rejected


def test_spikes_are_measured_against_the_median() -> None:
    health = Health(make_config(["training.spike_factor=1.5"]))
    losses = [9.0, 5.0, 4.0, 4.1, 3.9, 4.0, 4.2, 4.0]
    assert len(losses) == LEAST_STEPS
    assert [verdict(health, loss, step) for step, loss in enumerate(losses)] == [None] * len(losses)
    assert verdict(health, 5.9) is None
    rejected = verdict(health, 6.3)
    assert rejected is not None and rejected.kind == "loss_spike" and "1.5" in rejected.text
    assert health.policy(rejected) == "skip"
    assert verdict(Health(make_config([])), 1e9) is None  # off
    assert verdict(health, float("nan")) == RejectedStep("nonfinite", "the loss is nan")


def test_a_spike_is_seen_from_so_many_steps_on() -> None:
    config = make_config(["training.spike_factor=1.5"])
    for steps in range(LEAST_STEPS + 1):
        health = Health(config)
        assert [verdict(health, 4.0, step) for step in range(steps)] == [None] * steps
        assert (health.validate(100.0, True, 1) is not None) == (steps >= LEAST_STEPS), steps


@pytest.mark.parametrize("steps", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW])
def test_the_median_is_that_of_the_last_steps(steps: int) -> None:
    health = Health(make_config(["training.spike_factor=1.5"]))
    losses = [10.0 * 0.99**step for step in range(steps)]
    for step, loss in enumerate(losses):
        health.taken(loss, step)
    last = sorted(losses[-64:])
    usual = (last[(len(last) - 1) // 2] + last[len(last) // 2]) / 2
    assert health.validate(1.5 * usual * (1 - 1e-9), True, 1) is None
    assert health.validate(1.5 * usual * (1 + 1e-9), True, 1) is not None


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
    assert (
        event_of(tmp_path, "loss_spike")["step"] == LEAST_STEPS + 1
        and event_of(tmp_path, "batch_skipped")["first"] == spoilt
    )


def test_a_resumed_run_sees_the_same_spikes(data: list[str], tmp_path: Path) -> None:
    """Stopped where the window is filled in part."""
    steps = LEAST_STEPS + 3
    more = ["training.spike_factor=1.2", "model.hidden_dropout=0.1", f"optimizer.decay_steps={steps}"]
    overrides = ["experiment=gpt_tiny", *data, *more, "checkpoint.interval=3"]
    fault = (1, 0, [(LEAST_STEPS + 1) * SAMPLES], "output_layer", 40.0)
    whole = run([*overrides, f"training.steps={steps}", f"run_dir={tmp_path / 'whole'}"], *fault)
    again = [*overrides, f"run_dir={tmp_path / 'again'}"]
    first = run([*again, f"training.steps={LEAST_STEPS - 2}"], *fault)
    rest = run([*again, f"training.steps={steps}"], *fault)
    assert picked(first + rest) == picked(whole) and len(whole) == steps
    skipped = [json.loads((tmp_path / name / "skipped_samples.json").read_text()) for name in ("whole", "again")]
    assert skipped[0] == skipped[1] and len(skipped[0]) == 1


def test_health_reads_back_exactly() -> None:
    config = make_config(["training.spike_factor=1.5"])
    health = Health(config)
    for step in range(1, 100):
        health.taken(1 / step, step, step % 7 != 0)
    health.policy(RejectedStep("nonfinite", ""))
    health.skip(Skip(8, 16, 100, ""))
    kept = json.loads(json.dumps(health.state()))
    again = Health(config)
    again.resume(kept)
    assert again.state() == health.state() and kept["losses"][-1] == 1 / 99 and len(kept["losses"]) == WINDOW
    for step in range(100, 110):
        again.taken(5.0, step)
    again.policy(RejectedStep("nonfinite", ""))
    again.go_back(kept)
    # else it would go back for ever
    assert again.state() == {**kept, "furthest": 109, "refused_in_a_row": 1, "marked": []}


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
def test_position_follows_from_the_record(
    tmp_path: Path, skips: list[tuple[int, int]], position: int, count: int, expected: int
) -> None:
    record = SkippedSamples(tmp_path, [Skip(first, end, 1, "") for first, end in skips])
    assert record.next_position(position, count) == expected
