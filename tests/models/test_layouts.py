"""One model in every layout: the same initial weights bit for bit, the same loss, logits and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run
from tests.models.helpers import make_config, random_batch, relative_error, run_model
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS

VOCAB_SIZE = 131  # odd, and over one padded block of 128 rows: with two tensor ranks the second holds mostly padding

Overrides = dict[str, dict[str, Any]]

SMALL: Overrides = {
    "model": {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "sequence_length": 12,
    }
}
GPT_MOE: Overrides = {
    "model": {"qk_norm": True},
    "moe": {"num_experts": 4, "ffn_hidden_size": 48, "layers": [1, 0, 1, 1], "shared_expert_ffn_hidden_size": 16},
}
LATENT: Overrides = {
    "model": {
        "num_query_groups": None,
        "attention": "latent",
        "head_dim": 6,
        "q_lora_rank": 10,
        "kv_lora_rank": 8,
        "rotary_head_dim": 4,
        "value_head_dim": 7,
    }
}
BERT: Overrides = {
    "model": {
        "family": "bert",
        "position_embedding": "learned",
        "activation": "gelu",
        "linear_bias": True,
        "normalization": "layernorm",
        "norm_position": "post",
        "sentence_head": "next_sentence",
    }
}
BERT_MOE: Overrides = {"model": BERT["model"], "moe": {"num_experts": 4, "ffn_hidden_size": 48, "layers": 2}}
MODELS: dict[str, list[Overrides]] = {
    "gpt": [
        {
            "model": {
                "tie_embeddings": False,
                "position_embedding": "learned",
                "activation": "gelu_tanh",
                "linear_bias": True,
            }
        }
    ],
    "gpt_moe": [GPT_MOE],
    "bert": [BERT],
    "bert_pre_norm": [
        BERT,
        {
            "model": {
                "norm_position": "pre",
                "position_embedding": "rope",
                "rotary_base": 500.0,
                "rotary_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
            }
        },
    ],
    "bert_moe": [BERT_MOE],
    "bert_moe_without_bias": [BERT_MOE, {"model": {"linear_bias": False}}],
    "gpt_latent": [LATENT],
    "gpt_norm_of_each_head": [{"model": {"qk_norm": True}}],
    "gpt_norm_of_all_heads": [{"model": {"qk_norm": True, "qk_norm_over": "all_heads"}}],
    "gpt_one_query_group": [{"model": {"num_query_groups": 1, "qkv_bias": True}}],
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2, "sequence": True}),
    "tp2_without_sp": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "pp2_vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "ep2": (2, {"expert": 2}),
    "tp2_ep2_etp1": (2, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
    "tp2_ep2_etp2": (4, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}),
    "tp2_pp2": (4, {"tensor": 2, "sequence": True, "pipeline": 2}),
}
CASES = [
    ("gpt", "tp2"),
    ("gpt", "tp2_without_sp"),
    ("gpt", "pp2_vpp2"),
    ("gpt_moe", "tp2"),
    ("gpt_moe", "pp2"),
    ("gpt_moe", "pp2_vpp2"),
    ("gpt_moe", "ep2"),
    ("gpt_moe", "tp2_ep2_etp1"),
    ("gpt_moe", "tp2_ep2_etp2"),
    ("bert", "tp2"),
    ("bert", "tp2_pp2"),
    ("bert_pre_norm", "tp2"),
    ("bert_pre_norm", "pp2"),
    ("bert_moe", "pp2"),
    ("bert_moe", "pp2_vpp2"),
    ("bert_moe", "ep2"),
    ("bert_moe", "tp2_ep2_etp1"),
    ("bert_moe_without_bias", "tp2"),
    ("bert_moe_without_bias", "tp2_ep2_etp2"),
    ("gpt_one_query_group", "tp2"),
    ("gpt_latent", "tp2_without_sp"),
    ("gpt_latent", "pp2_vpp2"),
    ("gpt_norm_of_each_head", "tp2_without_sp"),
    ("gpt_norm_of_all_heads", "tp2_without_sp"),
]
_single: dict[str, dict[str, Any]] = {}


def _run(model: str, layout: dict[str, Any]) -> dict[str, Any]:
    config = make_config(SMALL, *MODELS[model], {"parallel": layout})
    return run_model(config, VOCAB_SIZE, random_batch(VOCAB_SIZE, num_samples=8, length=12))


@pytest.mark.parametrize("model,layout", CASES)
def test_layout_changes_nothing(model: str, layout: str) -> None:
    if model not in _single:
        _single[model] = run(_run, 1, model, {})[0]
    expected = _single[model]
    world_size, parallel = LAYOUTS[layout]
    results = run(_run, world_size, model, parallel)
    for rank, result in enumerate(results):
        assert result["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            assert torch.equal(result["weights"][name], weight), f"initial {name} on rank {rank}"
        assert result["loss"] == pytest.approx(expected["loss"], rel=FP32_LOSS)
        for name, grad in expected["gradients"].items():
            assert relative_error(result["gradients"][name], grad) < FP32_GRAD_NORM, (
                f"gradient of {name} on rank {rank}"
            )
        if result["logits"] is not None:
            first = result["data_rank"] * len(result["logits"])
            same_samples = expected["logits"][first : first + len(result["logits"])]
            assert relative_error(result["logits"], same_samples) < FP32_LOSS


def test_weights_depend_on_the_seed() -> None:
    weights = [run(_run_with_seed, 1, seed)[0]["weights"]["embedding.word_embeddings.weight"] for seed in (1, 2)]
    assert not torch.equal(*weights)
    assert weights[0].shape == (VOCAB_SIZE, 32)
    assert weights[0].std().item() == pytest.approx(0.02, rel=0.05)


def _run_with_seed(seed: int) -> dict[str, Any]:
    return run_model(
        make_config(SMALL, {"training": {"seed": seed}}), VOCAB_SIZE, random_batch(VOCAB_SIZE, num_samples=2, length=12)
    )
