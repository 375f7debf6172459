"""Traces: which steps and ranks write them, what is named in them, and that nothing is left behind after one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from base.errors import ConfigError
from configs.schema import Config
from parallel import trace
from tests import distributed
from tests.training.helpers import make_config, read_metrics, train_on_ranks

SIZES = [
    "experiment=gpt_moe_tiny",
    "model.hidden_size=32",
    "model.sequence_length=32",
    "training.global_batch_size=8",
    "training.micro_batch_size=2",
    "training.steps=4",
    "checkpoint.interval=3",
]
EVERYWHERE = {
    "data",
    "forward",
    "backward",
    "attention",
    "attention backward",
    "dispatch",
    "experts",
    "experts backward",
    "combine",
}
EVERYWHERE |= {"gradient reduction", "optimizer"}


def names_in(path: Path) -> set[str]:
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def train_and_look(config: Config) -> tuple[list[str], list[bool]]:
    """Attributes that a trace left on what it named, and whether names were recorded outside of traced steps."""
    from megatron.core.transformer.attention import Attention

    from training.run import Callback, Metrics, Run
    from training.trainer import Trainer

    left: list[str] = []
    recording: list[bool] = []

    class Look(Callback):
        def after_step(self, run: Run, metrics: Metrics) -> None:
            recording.append(trace._recording)
            if metrics["step"] == config.training.steps:
                modules = [module for chunk in run.engine.bare_chunks for module in chunk.modules()]
                left.extend(
                    "forward" for module in modules if isinstance(module, Attention) and "forward" in vars(module)
                )
                left.extend(name for name in ("next_step",) if name in vars(run.loader))

    trainer = Trainer(config)
    trainer.callbacks.append(Look())
    trainer.fit()
    return left, recording


def test_chosen_steps_on_chosen_ranks(data: list[str], tmp_path: Path) -> None:
    layout = [
        "parallel.pipeline=2",
        "parallel.expert=2",
        "training.profile.steps=[2,3]",
        "training.profile.ranks=[0,3]",
    ]
    answers = distributed.run(train_and_look, 4, make_config([*SIZES, *data, *layout, f"run_dir={tmp_path}"], 4))
    written = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert written == [f"step_000000{step}_rank_0000{rank}.json.gz" for step in (2, 3) for rank in (0, 3)]
    for name in written:
        names = names_in(tmp_path / "traces" / name)
        assert EVERYWHERE | {"dispatch wait", "pipeline exchange", "experts weight gradients"} <= names, name
        assert ("checkpoint" in names) == ("0003_" in name), name
    # Recorded after step n means that step n + 1 is traced.
    assert [recording for _, recording in answers] == [
        [True, True, False, False],
        [False] * 4,
        [False] * 4,
        [True, True, False, False],
    ]
    assert all(left == [] for left, _ in answers)


def test_tracing_changes_no_number(data: list[str], tmp_path: Path) -> None:
    plain = train_on_ranks([*SIZES, *data, f"run_dir={tmp_path / 'plain'}"])
    traced = train_on_ranks([*SIZES, *data, f"run_dir={tmp_path / 'traced'}", "training.profile.steps=[1,3]"])
    assert [(line["loss"], line["grad_norm"]) for line in traced] == [
        (line["loss"], line["grad_norm"]) for line in plain
    ]
    assert len(read_metrics(tmp_path / "traced")) == 4
    assert EVERYWHERE <= names_in(tmp_path / "traced" / "traces" / "step_0000001_rank_00000.json.gz")
    assert not (tmp_path / "plain" / "traces").exists()


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_layers_are_named_too(data: list[str], tmp_path: Path, recompute: str) -> None:
    extra = [f"training.recompute={recompute}", "training.steps=1", "training.profile.steps=[1]", "checkpoint=off"]
    train_on_ranks([*SIZES, *data, *extra, f"run_dir={tmp_path}"])
    assert EVERYWHERE <= names_in(tmp_path / "traces" / "step_0000001_rank_00000.json.gz")


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("training.profile.steps=[0]", "training.profile.steps"),
        ("training.profile.steps=[5]", "training.profile.steps"),
        ("training.profile.ranks=[1]", "training.profile.ranks"),
        ("training.profile.ranks=some", "training.profile.ranks"),
        ("training.profile.ranks=[]", "training.profile.ranks"),
    ],
)
def test_wrong_choices_are_refused(override: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make_config([*SIZES, override])


class Owner:
    @trace.named("own")
    def own(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def foreign(self) -> int:
        with trace.span("inside"):
            return 7


def test_names_are_put_down_only_while_recording() -> None:
    owner: Any = Owner()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        owner.own(torch.ones(1))
        owner.foreign()
        with trace.recording((owner, "foreign", "theirs"), (Owner, "foreign", "of the class")):
            assert owner.foreign() == 7
            owner.own(torch.ones(1))
        assert vars(owner) == {} and owner.foreign() == 7
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert {name: counts.get(name, 0) for name in ("own", "inside", "theirs", "of the class")} == {
        "own": 1,
        "inside": 1,
        "theirs": 1,
        "of the class": 0,
    }
