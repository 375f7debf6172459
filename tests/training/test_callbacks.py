"""The hooks of callbacks: in which order a step calls them, what rides with its loss, and the state that checkpoints
keep."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import manifest
from checkpoint.state_file import read_state
from configs.schema import Config
from tests import distributed
from tests.training.helpers import make_config, read_metrics
from training.run import Callback, Metrics, Run, states_of
from training.step import StepResult

TINY = ["experiment=gpt_moe_tiny", "model.hidden_size=32", "model.num_layers=2"]


class Watch(Callback):
    """Puts down which hook was called when, and has one entry summed from the second step on."""

    def __init__(self, rides: bool) -> None:
        self.calls: list[tuple[str, int]] = []
        self.summed: list[Any] = []
        self._rides = rides

    def on_start(self, run: Run) -> None:
        self._weight = next(run.engine.bare_chunks[0].parameters())
        self.changed: list[tuple[bool, bool]] = []  # whether each step changed the weights before its update, and by it
        self._device = run.topology.device
        self._rank = run.topology.rank

    def before_step(self, run: Run) -> None:
        self.calls.append(("before_step", run.progress.step))
        self._before = self._weight.detach().clone()
        if self._rides and run.progress.step == 1:
            run.engine.sums.register("mine", self._entry)

    def _entry(self) -> torch.Tensor:
        return torch.full((2, 3), 10.0 + self._rank, dtype=torch.float64, device=self._device)

    def before_update(self, run: Run, result: StepResult) -> None:
        self.calls.append(("before_update", run.progress.step))
        self.summed.append(result.sums["mine"].tolist() if "mine" in result.sums else None)
        assert all(value.device.type == "cpu" for value in result.sums.values())
        self._changed_early = not torch.equal(self._before, self._weight)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        self.calls.append(("after_step", run.progress.step))
        self.changed.append((self._changed_early, not torch.equal(self._before, self._weight)))


def train_watched(config: Config, rides: bool) -> dict[str, Any]:
    import torch.distributed as dist

    from training import step
    from training.trainer import Trainer

    watch, messages, passes, all_reduce = Watch(rides), Counter[int](), step.gradients, dist.all_reduce

    def counted(*arguments: Any, **keywords: Any) -> Any:
        messages[len(watch.summed)] += 1
        return all_reduce(*arguments, **keywords)

    def watched(*arguments: Any) -> Any:
        dist.all_reduce = counted
        try:
            return passes(*arguments)
        finally:
            dist.all_reduce = all_reduce

    trainer = Trainer(config)
    trainer.callbacks.append(watch)
    step.gradients = watched  # type: ignore[assignment]
    try:
        trainer.fit()
    finally:
        step.gradients = passes
    return {
        "calls": watch.calls,
        "summed": watch.summed,
        "changed": watch.changed,
        "messages": [messages[i] for i in range(3)],
    }


def test_what_rides_with_the_loss_is_read_before_the_update(data: list[str], tmp_path: Path) -> None:
    """No message of its own, and the losses are those of a run without it."""
    # A sharded optimizer gathers what it changed when the next step begins.
    common = [*TINY, *data, "training.steps=3", "optimizer.distributed=false", "checkpoint=off"]
    seen = {}
    for rides in (False, True):
        config = make_config([*common, f"run_dir={tmp_path / str(rides)}"], 2)
        first, second = distributed.run(train_watched, 2, config, rides)
        assert first == second
        seen[rides] = first
    assert seen[True]["summed"] == [None, *[[[21.0] * 3] * 2] * 2] and seen[False]["summed"] == [None] * 3
    assert seen[True]["calls"] == [
        call for step in range(3) for call in (("before_step", step), ("before_update", step), ("after_step", step + 1))
    ]
    assert seen[True]["changed"] == [(False, True)] * 3
    assert seen[True]["messages"] == seen[False]["messages"] and min(seen[True]["messages"]) > 0
    with_it, without = (read_metrics(tmp_path / str(rides)) for rides in (True, False))
    assert [(line["loss"], line["grad_norm"]) for line in with_it] == [
        (line["loss"], line["grad_norm"]) for line in without
    ]


def train_through_a_refusal(config: Config) -> list[tuple[str, int]]:
    from training.resilience.health import Health, Refusal
    from training.trainer import Trainer

    watch, judge, refusals = Watch(False), Health.judge, [Refusal("loss_spike", "planted")]

    def refuse(self: Health, loss: float, finite: bool) -> Refusal | None:
        return refusals.pop() if len(watch.changed) == 1 and refusals else judge(self, loss, finite)

    trainer = Trainer(config)
    trainer.callbacks.append(watch)
    Health.judge = refuse  # type: ignore[method-assign]
    try:
        trainer.fit()
    finally:
        Health.judge = judge  # type: ignore[method-assign]
    return watch.calls


def test_a_refused_step_has_no_update(data: list[str], tmp_path: Path) -> None:
    config = make_config(
        [*TINY, *data, "training.steps=2", "training.spike=skip", "checkpoint=off", f"run_dir={tmp_path}"]
    )
    (calls,) = distributed.run(train_through_a_refusal, 1, config)
    whole = [("before_step", 1), ("before_update", 1), ("after_step", 2)]
    assert calls == [("before_step", 0), ("before_update", 0), ("after_step", 1), ("before_step", 1), *whole]


class Steps(Callback):
    """Counts the steps of a run over all its starts; keeps floats too, which must read back exactly."""

    name = "steps"

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
        self.seen.append(("loaded", len(self.losses)))

    def on_start(self, run: Run) -> None:
        self.seen.append(("started", len(self.losses)))

    def on_rollback(self, run: Run) -> None:
        self.seen.append(("rolled back", len(self.losses)))

    def after_step(self, run: Run, metrics: Metrics) -> None:
        self.losses.append(metrics["loss"])


def train_counted(config: Config, with_callback: bool = True, refused_step: int = 0) -> tuple[list[Any], list[float]]:
    from training.resilience.health import Health, Refusal
    from training.trainer import Trainer

    steps, judge, refusals = Steps(), Health.judge, [Refusal("loss_spike", "planted")]

    def refuse(self: Health, loss: float, finite: bool) -> Refusal | None:
        return refusals.pop() if len(steps.losses) == refused_step - 1 and refusals else judge(self, loss, finite)

    trainer = Trainer(config)
    if with_callback:
        trainer.callbacks.insert(0, steps)  # before the checkpoints
    Health.judge = refuse if refused_step else judge  # type: ignore[method-assign]
    try:
        trainer.fit()
    finally:
        Health.judge = judge  # type: ignore[method-assign]
    return steps.seen, steps.losses


def losses_of(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run_dir)]


def test_a_state_is_kept_in_checkpoints_for_any_layout(data: list[str], tmp_path: Path) -> None:
    """As often as a run is started, on however many ranks."""

    def start(steps: int, ranks: int) -> list[Any]:
        config = make_config(
            [*TINY, *data, f"training.steps={steps}", f"run_dir={tmp_path}", "optimizer.decay_steps=6"], ranks
        )
        found = distributed.run(train_counted, ranks, config)
        assert all(losses == losses_of(tmp_path) for _, losses in found)
        return [seen for seen, _ in found]

    assert start(2, 1) == [[("started", 0)]]
    assert read_state(manifest.folder_of(tmp_path, 2))["callbacks"] == {"steps": {"losses": losses_of(tmp_path)}}
    assert start(3, 2) == [[("loaded", 2), ("started", 2)]] * 2
    assert start(4, 1) == [[("loaded", 3), ("started", 3)]]


def test_a_rollback_brings_the_state_back(data: list[str], tmp_path: Path) -> None:
    more = [
        "training.steps=4",
        "training.spike=rollback",
        "training.spike_factor=1e6",
        "checkpoint.interval=2",
        f"run_dir={tmp_path}",
    ]
    ((seen, losses),) = distributed.run(train_counted, 1, make_config([*TINY, *data, *more]), True, 4)
    assert seen == [("started", 0), ("loaded", 2), ("rolled back", 2)]
    assert losses == losses_of(tmp_path) and len(losses) == 4


def test_a_state_that_nobody_takes_is_left_out_and_said(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def start(steps: int, with_callback: bool) -> Any:
        config = make_config(
            [*TINY, *data, f"training.steps={steps}", f"run_dir={tmp_path}", "optimizer.decay_steps=6"]
        )
        ((seen, _),) = distributed.run(train_counted, 1, config, with_callback)
        return seen, capfd.readouterr().out

    start(2, True)
    _, said = start(3, False)
    assert "the checkpoint of step 2 keeps the state of steps, which this run is without: it is left out" in said
    assert "callbacks" not in read_state(manifest.folder_of(tmp_path, 3))  # as versions without states wrote it
    seen, said = start(4, True)
    assert seen == [("started", 0)] and "left out" not in said


def test_a_callback_with_a_state_must_have_a_name_of_its_own() -> None:
    class Nameless(Steps):
        name = ""

    assert states_of([Callback(), Steps()]) == {"steps": {"losses": []}}
    for wrong in ([Nameless()], [Steps(), Steps()]):
        with pytest.raises(AssertionError, match="names of callbacks"):
            states_of(wrong)
