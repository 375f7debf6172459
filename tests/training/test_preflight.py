"""What files, nodes and variables show before torch is imported is refused then; what is proposed is accepted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from base.errors import ConfigError
from configs.compose import compose
from configs.job import Job
from configs.validate import validate
from simulator.run_plan import make_plan
from simulator.text import text
from tests.configs import advice
from training.callbacks.logging.external_loggers import WeightsAndBiases
from training.starting import preflight

pytestmark = pytest.mark.fast


def refused(overrides: list[str], run_dir: Path, ranks: int = 1) -> str:
    """The refusal of a command, whose advice, each by itself, is then accepted."""
    words = [*overrides, f"run_dir={run_dir}"]
    validate(compose(words), ranks)
    with pytest.raises(ConfigError) as caught:
        preflight.check(compose(words))
    message = str(caught.value)
    for fixes in advice.split(message)[1]:
        config = compose([*words, *fixes])
        validate(config, ranks)
        preflight.check(config)
    return message


def _launched(monkeypatch: pytest.MonkeyPatch, ranks: int, on_a_node: int) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": on_a_node}.items():
        monkeypatch.setenv(name, str(value))


def test_plans_to_replay_must_be_there(tmp_path: Path) -> None:
    words = ["model=gpt_moe_tiny", "parallel.expert=2", "moe.placement.policy=solve", "moe.placement.extra_slots=2"]
    for folder in (tmp_path / "missing", tmp_path):
        message = refused([*words, f"moe.placement.replay={folder}"], tmp_path / "run", 2)
        assert message.startswith(f"moe.placement.replay ({folder}) must be a folder with placement_*.plans")
        assert len(advice.split(message)[1]) == 1
    (tmp_path / "placement_0.plans").touch()
    preflight.check(compose([*words, f"moe.placement.replay={tmp_path}", f"run_dir={tmp_path / 'run'}"]))


@pytest.mark.parametrize(
    ("on_a_node", "layout", "legal"),
    [
        (4, ["parallel.expert=4"], False),  # one node
        (2, ["parallel.expert=4"], True),
        (1, ["parallel.expert=4"], False),  # nobody shares a node
        (2, ["parallel.expert=2"], False),  # a group each
        (2, ["parallel.expert=2", "parallel.pipeline=2"], False),
    ],
)
def test_a_hierarchy_needs_nodes(
    on_a_node: int, layout: list[str], legal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _launched(monkeypatch, 4, on_a_node)
    words = ["model=gpt_moe_tiny", "moe.all_to_all=hierarchical", *layout]
    if legal:
        preflight.check(compose([*words, f"run_dir={tmp_path}"]))
    else:
        message = refused(words, tmp_path, 4)
        assert message.startswith("moe.all_to_all (hierarchical) needs") and "Try moe.all_to_all=flat." in message


@pytest.mark.parametrize("preset", ["gpt_tiny", "llama3_8b"])
def test_a_vocabulary_that_is_too_small(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "load_tokenizer", lambda path: SimpleNamespace(vocab_size=10**6 + 1))
    words = [f"model={preset}", "model.vocab_size=384", "data.tokenizer=there.model"]
    message = refused(words, tmp_path)
    assert "must be at least the vocabulary of data.tokenizer (1000001)" in message
    assert len(advice.split(message)[1]) == 1
    # The size of a model that is there stays, so that no other is proposed.
    with pytest.raises(ConfigError, match=r"give a data\.tokenizer with at most 384 tokens") as caught:
        preflight._check_vocabulary(compose(words), 385, tmp_path)
    assert not advice.split(str(caught.value))[1]


@pytest.mark.parametrize("mode", ["online", "offline", "auto"])
def test_wandb_obeys_its_own_variable(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = compose(["model=gpt_tiny", f"logging.wandb={mode}", f"run_dir={tmp_path / 'run'}"])
    preflight.check(config)
    logger, run = WeightsAndBiases(), SimpleNamespace(config=config, is_main=True, run_dir=tmp_path)
    logger.on_start(run)  # type: ignore[arg-type]
    logger.close()
    assert (
        capsys.readouterr().out == f"logging.wandb={mode}: nothing is logged to wandb, because WANDB_MODE is disabled\n"
    )
    assert not (tmp_path / "wandb").exists()


def test_a_plan_names_what_has_no_effect(tmp_path: Path) -> None:
    config: Any = compose(["model=gpt_tiny", "memory.disk_dir=/var/tmp"])
    validate(config, 1)
    assert text(make_plan(Job(config, 1, 1024, "cpu"))).endswith(
        "without effect here: memory.disk_dir (optimizer.state_device is neither disk nor auto)"
    )


def test_the_folder_that_is_proposed_for_the_disk_is_made_by_the_run(tmp_path: Path) -> None:
    """Also for a plan, which makes none."""
    words = ["model=gpt_tiny", "optimizer.state_device=disk", f"run_dir={tmp_path / 'runs/new'}"]
    with pytest.raises(ConfigError) as caught:
        validate(compose(words), 1)
    for fixes in advice.split(str(caught.value))[1]:
        config = compose([*words, *fixes])
        validate(config, 1)
        make_plan(Job(config, 1, 1024, "cpu"))
        preflight.check(config)
        assert Path(config.run_dir).is_dir()
