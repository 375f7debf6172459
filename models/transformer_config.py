"""Translates configs/schema.py to Megatron-core's TransformerConfig; only this file knows the names of both."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from configs import derived
from configs.rotary import attention_factor, scores_factor
from configs.schema import Config
from models.parallelize import layer_settings
from parallel.dtypes import DTYPES
from parallel.topology import choose_device

NORMALIZATIONS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh approximation, as in GPT-2 (Hendrycks and Gimpel 2016, section 2)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"swiglu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}


def transformer_config(config: Config, backend: str = "portable") -> TransformerConfig:
    """Return Megatron-core's settings for the model, its layout and its precision. `config` must have passed
    configs/validate.py. `backend`: portable or transformer_engine, which determines the available fusions."""
    model, training = config.model, config.training
    dtype = DTYPES[training.precision]
    kind = MLATransformerConfig if model.attention == "latent" else TransformerConfig
    return kind(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=derived.ffn_hidden_size(config),
        num_attention_heads=model.num_attention_heads,
        num_query_groups=derived.num_query_groups(config),
        kv_channels=derived.head_dim(config),
        normalization=NORMALIZATIONS[model.normalization],
        layernorm_epsilon=model.norm_epsilon,
        # Also makes Megatron sum gradients of q_layernorm and k_layernorm over tensor ranks, whose heads differ.
        qk_layernorm=model.qk_norm,
        activation_func=ACTIVATIONS[model.activation],
        gated_linear_unit=model.activation == "swiglu",
        add_bias_linear=model.linear_bias,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        attention_softmax_in_fp32=True,
        window_size=None if model.sliding_window is None else (model.sliding_window - 1, 0),  # before and after it
        window_attn_skip_freq=None if model.sliding_window is None else derived.window_pattern(config),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        deterministic_mode=training.deterministic,
        calculate_per_token_loss=False,
        # Frees an output as soon as its send is posted. CUDA streams keep the bytes until they are sent; gloo reads
        # them later, when the memory may have been reused.
        deallocate_pipeline_outputs=choose_device(config).type == "cuda",
        # models/initial_weights.py fills every weight, so Megatron's own draw would be thrown away.
        perform_initialization=False,
        use_cpu_initialization=False,
        # Needs apex: Megatron's own output layer would refuse it. models/parallelize.py sets it for TransformerEngine's
        # layers.
        gradient_accumulation_fusion=False,
        # For Megatron's own attention and the norm of apex, which no backend has.
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **fusions(config, backend),
        **layer_settings(config),
        **_latent(config),
        **_moe(config),
    )


def fusions(config: Config, backend: str) -> dict[str, Any]:
    """Return the settings that turn on the fusions of Megatron-core that this model can use; {} if fusions are off, or
    for a backend other than transformer_engine. The fused kernels are compiled by torch or belong to
    TransformerEngine."""
    model = config.model
    if backend != "transformer_engine" or model.fusions == "off":
        return {}
    # Not for latent attention, which fuses with Megatron-core's own YaRN only, nor with a factor of cosines and sines.
    rotates = model.position_embedding == "rope" and model.attention == "grouped"
    joined = config.data.documents == "joined"  # the kernel takes one list of angles for all samples
    chosen = {
        "apply_rope_fusion": rotates and joined and attention_factor(model.rotary_scaling) == 1.0,
        # The fused GELU is the tanh approximation, not the exact function that `gelu` means.
        "bias_activation_fusion": model.activation == "swiglu",
        "bias_dropout_fusion": model.hidden_dropout > 0 or model.linear_bias,  # otherwise it is a single addition
    }
    return {name: True for name, is_on in chosen.items() if is_on}


def _latent(config: Config) -> dict[str, Any]:
    model = config.model
    if model.attention != "latent":
        return {}
    scaling = model.rotary_scaling
    return {
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": derived.head_dim(config),
        "qk_pos_emb_head_dim": model.rotary_head_dim,
        "v_head_dim": model.value_head_dim,
        # models/pointwise/rotary.py has the frequencies. Megatron-core takes a factor with them for YaRN alone.
        "rope_type": "rope" if attention_factor(scaling) == 1.0 else "yarn",
        "rotary_base": model.rotary_base,
        # Both set the scale of the scores only, to the same value as configs.rotary.scores_factor.
        "rotary_scaling_factor": scaling["factor"] if scores_factor(scaling) != 1.0 else 1.0,
        "mscale_all_dim": scaling["mscale_all_dim"] if scores_factor(scaling) != 1.0 else 0.0,
    }


def _moe(config: Config) -> dict[str, Any]:
    moe = config.moe
    if moe.num_experts is None:
        return {}
    losses = {
        "aux_loss": moe.aux_loss_coeff,
        "seq_aux_loss": moe.sequence_aux_loss_coeff,
        "global_aux_loss": moe.global_aux_loss_coeff,
    }
    losses = {name: coeff for name, coeff in losses.items() if coeff > 0}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": derived.expert_ffn_hidden_size(config),
        "moe_shared_expert_intermediate_size": moe.shared_expert_ffn_hidden_size,
        "moe_layer_freq": derived.moe_layer_pattern(config),
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.router_score,
        # Softmax before the top-k keeps the probabilities; after it, the weights sum to 1.
        "moe_router_pre_softmax": moe.router_score == "softmax" and not moe.normalize_top_k,
        "moe_router_topk_scaling_factor": moe.routed_scaling_factor,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.group_top_k,
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_bias_update_rate": moe.expert_bias_rate,
        "moe_router_load_balancing_type": list(losses) or "none",
        "moe_aux_loss_coeff": list(losses.values()) or 0.0,
        "moe_z_loss_coeff": moe.z_loss_coeff or None,
        "moe_expert_capacity_factor": moe.capacity_factor,
        "moe_token_drop_policy": moe.drop_policy,
        # Built by Megatron's constructor and not used; the other dispatcher would refuse a capacity factor.
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
    }
