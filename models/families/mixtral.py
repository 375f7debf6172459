"""Mixtral (Jiang et al. 2024): `MixtralForCausalLM`."""

from __future__ import annotations

from configs import derived
from configs.schema import Config
from models.families.llama import COMMON_RULES, QKV_RULE, read_common, write_common
from models.families.rules import GATE_UP, Family, HfConfig, Overrides, Rule

EXPERT_RULES = (
    Rule("decoder.layers.{l}.mlp.router.weight", ("model.layers.{l}.block_sparse_moe.gate.weight",), only="moe"),
    Rule(
        "decoder.layers.{l}.mlp.experts.{e}.linear_fc1.weight",
        ("model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight", "model.layers.{l}.block_sparse_moe.experts.{e}.w3.weight"),
        GATE_UP,
        only="moe",
    ),
    Rule(
        "decoder.layers.{l}.mlp.experts.{e}.linear_fc2.weight",
        ("model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight",),
        only="moe",
    ),
)


def _read(hf: HfConfig) -> Overrides:
    overrides = read_common(hf, "MixtralForCausalLM")
    overrides["moe"] = {
        "num_experts": hf["num_local_experts"],
        "top_k": hf["num_experts_per_tok"],
        "ffn_hidden_size": hf["intermediate_size"],
        "normalize_top_k": True,
    }
    return overrides


def _write(config: Config) -> HfConfig:
    return {
        **write_common(config, "mixtral", "MixtralForCausalLM"),
        "intermediate_size": derived.expert_ffn_hidden_size(config),
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "sliding_window": None,
    }


FAMILY = Family("mixtral", _read, _write, (*COMMON_RULES, QKV_RULE, *EXPERT_RULES), "model.", is_moe=True)
