"""Going on from a checkpoint of another model is refused, with advice that can be typed and makes the model the
checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from base.errors import ConfigError
from checkpoint.manifest import STATE
from checkpoint.start import check_model
from configs.architecture import architecture
from configs.compose import compose
from configs.validate import validate
from tests.configs import advice
from training.starting import preflight

VOCAB = 512


def _checkpoint(folder: Path, overrides: list[str]) -> Path:
    config = compose(overrides)
    state: dict[str, Any] = {
        "step": 1,
        "consumed_samples": 8,
        "health": None,
        "vocab_size": VOCAB,
        "architecture": architecture(config, VOCAB),
    }
    state |= {"precision": config.training.precision, "layout": {}, "optimizer_steps": 1, "loss_scaler": None}
    (folder / STATE).write_text(json.dumps(state))
    return folder


LINEAR = "model.rotary_scaling={rope_type: linear, factor: 4.0}"
GPT, MOE, BERT = "model=gpt_tiny", "model=gpt_moe_tiny", "model=bert_tiny"


@pytest.mark.parametrize(
    ("saved", "asked", "says"),
    [
        ([GPT], [GPT, "model.hidden_size=32"], "Try model.hidden_size=64, or another name"),
        ([GPT], [GPT, "model.position_embedding=learned"], "Try model.position_embedding=rope, or another name"),
        ([GPT, "model.position_embedding=learned"], [GPT], "Try model.position_embedding=learned, or another name"),
        ([GPT], [GPT, "model.qk_norm=true", "model.qk_norm_over=all_heads"], "Try another name"),
        ([GPT], [GPT, LINEAR], "Try model.rotary_scaling=null"),
        ([GPT, LINEAR], [GPT], "Try 'model.rotary_scaling={rope_type:"),
        ([GPT, LINEAR], [GPT, LINEAR.replace("4", "8")], "Try 'model.rotary_scaling={rope_type:"),
        (
            [GPT, "model.qk_norm=true"],
            [GPT, "model.qk_norm=true", "model.qk_norm_over=all_heads"],
            "Try model.qk_norm_over=head,",
        ),
        ([GPT, "model.attention=latent"], [GPT], "Try model.attention=latent"),
        ([GPT], [GPT, "model.attention=latent"], "Try model.attention=grouped"),
        ([GPT], [MOE], "moe.num_experts (4) differs"),
        ([MOE], [GPT], "moe.num_experts (null) differs"),
        ([MOE], [MOE, "moe.layers=2"], "Try moe.layers=[1,1,1,1]"),
        ([MOE], [MOE, "moe.num_groups=2", "moe.group_top_k=1"], "moe.num_groups=null"),
        ([MOE], [MOE, "moe.routed_scaling_factor=2"], "Try moe.routed_scaling_factor=null"),
        ([GPT], [GPT, "training.precision=bf16"], "Try training.precision=fp32"),
        ([GPT], [BERT], "model.family (bert) differs"),
        ([BERT], [GPT], "model.family (gpt) differs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_another_model(tmp_path: Path, saved: list[str], asked: list[str], says: str) -> None:
    folder = _checkpoint(tmp_path, saved)
    check_model(compose(saved), None, folder)
    with pytest.raises(ConfigError) as caught:
        check_model(compose(asked), None, folder)
    message = str(caught.value)
    assert says in message and "None" not in message and message.endswith("another name or run_dir.")
    for fixes in advice.split(message.replace(", or another name or run_dir", ""))[1]:
        config = compose([*asked, *fixes])
        validate(config, 1)
        check_model(config, None, folder)


def test_a_longer_sequence_of_rotary_positions_is_the_same_model(tmp_path: Path) -> None:
    check_model(compose([GPT, "model.sequence_length=32"]), None, _checkpoint(tmp_path, [GPT]))


def test_wandb_online_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose([GPT, "logging.wandb=online", f"run_dir={tmp_path / 'run'}"])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"logging\.wandb \(online\) needs an API key.*Try logging\.wandb=offline"):
        preflight.check(config)
    assert not (tmp_path / "run").exists()
