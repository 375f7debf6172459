"""The fusions of Megatron-core that a model gets with TransformerEngine; without it there are none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

import parallel
from configs.compose import compose
from models.parallelize import accumulate_in_products
from models.transformer_config import fusions, transformer_config

pytestmark = pytest.mark.fast

KINDS = {  # by what is behind experiment=
    "llama3_8b": {"apply_rope_fusion", "bias_activation_fusion"},
    "mixtral_8x7b": {"apply_rope_fusion", "bias_activation_fusion"},
    "gpt2_124m": {"bias_dropout_fusion"},
    "bert_base": {"bias_dropout_fusion"},
    "llama3_8b model.rotary_scaling={rope_type:linear,factor:2}": {"apply_rope_fusion", "bias_activation_fusion"},
    "llama3_8b model.rotary_scaling={rope_type:yarn,factor:4,original_max_position_embeddings:8192}": {
        "bias_activation_fusion"
    },
    "llama3_8b model.attention=latent model.num_query_groups=null": {"bias_activation_fusion"},
}


@pytest.mark.parametrize("experiment", KINDS)
def test_a_model_gets_what_it_can_use(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if TransformerEngine were installed.
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", lambda *args, **kwargs: None)
    config = compose(f"experiment={experiment}".split())
    chosen = fusions(config, "transformer_engine")
    assert chosen.keys() == KINDS[experiment]
    megatron = transformer_config(config, "transformer_engine")  # passes Megatron-core's own checks
    assert {name: getattr(megatron, name) for name in chosen} == chosen
    assert not megatron.gradient_accumulation_fusion, "Megatron-core's output layer needs apex for it"


@pytest.mark.parametrize(
    ("override", "backend"), [("model.fusions=auto", "portable"), ("model.fusions=off", "transformer_engine")]
)
def test_others_get_none(override: str, backend: str) -> None:
    megatron: Any = transformer_config(compose(["experiment=llama3_8b", override]), backend)
    assert not any(value for name, value in vars(megatron).items() if name.endswith("_fusion"))


@pytest.mark.parametrize(
    "overrides",
    [
        "experiment=gpt2_124m training.recompute=selective",
        "experiment=bert_base training.recompute=selective training.deterministic=true",
        "experiment=qwen3_30b_a3b training.recompute=full",
        "experiment=deepseek_v3_like training.recompute=selective",
    ],
)
def test_megatron_core_warns_of_nothing_that_a_user_could_not_mend(
    overrides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", lambda *args, **kwargs: None)
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()  # pytest's own
        parallel.leave_out_notes()
        for backend in ("portable", "transformer_engine"):
            transformer_config(compose(overrides.split()), backend)
        warnings.warn("one of another kind", stacklevel=1)
    assert [str(warning.message) for warning in said] == ["one of another kind"]


def test_layers_that_can_accumulate_their_gradients_do() -> None:
    can, cannot = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    can.fuse_wgrad_accumulation = False  # as TransformerEngine's layers have it
    accumulate_in_products([torch.nn.Sequential(can, cannot)])
    assert can.fuse_wgrad_accumulation
    assert not hasattr(cannot, "fuse_wgrad_accumulation")
