"""Where a run's experts lie with moe.weights_device=auto: decided once, kept by the folder, said."""

from __future__ import annotations

from pathlib import Path

import pytest

from base.checksums import read_summed, write_summed
from base.errors import ConfigError
from configs.compose import compose
from configs.schema import Config
from tests.training.test_layout_choice import cpu_machine
from training.starting import choices
from training.starting.choices import EXPERTS_CHOSEN, choose_experts

pytestmark = pytest.mark.fast
MOE = ["model=gpt_moe_tiny", "training.device=cpu", "sample.prompts=[]", "training.eval_interval=0"]
KEYS = ("moe.weights_device", "training.pass_order", "optimizer.state_device")


def _config(folder: Path, *more: str) -> Config:
    return compose([*MOE, f"run_dir={folder}/run", f"hardware={cpu_machine(folder)}", "moe.weights_device=auto", *more])


def _values(config: Config) -> tuple[str, str, str]:
    return config.moe.weights_device, config.training.pass_order, config.optimizer.state_device


def test_a_run_decides_once_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path)
    chosen = choose_experts(config, frozenset({"moe.weights_device"}))
    line = capsys.readouterr().out
    assert _values(chosen)[0] in ("device", "host") and line.startswith("experts: moe.weights_device=")
    assert "s a step predicted" in line and line.count("\n") == 1
    path = tmp_path / "run" / EXPERTS_CHOSEN
    record = read_summed(path)
    assert tuple(record["values"][key] for key in KEYS) == _values(chosen) and record["world_size"] == 1
    # whatever a prediction would say now
    write_summed(path, record | {"values": dict(zip(KEYS, ("host", "by_micro_batch", "host"), strict=True))})
    assert _values(choose_experts(config, frozenset())) == ("host", "by_micro_batch", "host")
    assert "is kept: this run chose it for 1 rank(s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change", [{"world_size": 2}, {"asked": {}}, {"values": {"optimizer.state_device": "nowhere"}}]
)
def test_what_was_chosen_for_other_ranks_or_keys_is_decided_again(
    change: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path)
    first = choose_experts(config, frozenset())
    path = tmp_path / "run" / EXPERTS_CHOSEN
    write_summed(path, read_summed(path) | change)
    capsys.readouterr()
    assert _values(choose_experts(config, frozenset())) == _values(first)
    assert capsys.readouterr().out.startswith("decided again, because the number of ranks or the keys changed: ")


def test_what_is_given_is_left_alone(tmp_path: Path) -> None:
    config = _config(tmp_path, "moe.weights_device=device")
    assert choose_experts(config, frozenset()) is config and not (tmp_path / "run").exists()


def test_too_little_memory_lets_experts_go(tmp_path: Path) -> None:
    config = _config(tmp_path, "training.memory_limit_gib=0.0088", "memory.host_budget=1000")
    chosen = choose_experts(config, frozenset({"moe.weights_device"}))
    assert _values(chosen) == ("host", "by_micro_batch", "host")


def test_a_machine_of_another_kind_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    config.hardware = "h100_8x"
    config.training.device = "auto"
    with pytest.raises(ConfigError, match="must describe cpu devices"):
        choices.decided_experts(config, frozenset(), 1)
