"""configs/schema.py -> Megatron-core's TransformerConfig. The only file that knows both vocabularies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from configs.derived import expert_tensor_size
from configs.schema import Config, ConfigError
from parallel.topology import choose_device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NORMALIZATIONS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation, as GPT-2 has it (Hendrycks and Gimpel 2016, section 2)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"swiglu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}


def transformer_config(config: Config) -> TransformerConfig:
    """Megatron's view of the model, its layout and its precision. Raises ConfigError for what Megatron-core cannot do."""
    model, layout, training = config.model, config.parallel, config.training
    dtype = _choice("training.precision", training.precision, DTYPES)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=ffn_hidden_size(config),
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        kv_channels=model.head_dim or model.hidden_size // model.num_attention_heads,
        normalization=_choice("model.normalization", model.normalization, NORMALIZATIONS),
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_norm,
        activation_func=_choice("model.activation", model.activation, ACTIVATIONS),
        gated_linear_unit=model.activation == "swiglu",
        add_bias_linear=model.linear_bias,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        sequence_parallel=layout.sequence,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        # Megatron-core falls back to the tensor size where this is None, in the groups and in the config alike.
        expert_tensor_parallel_size=expert_tensor_size(config),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        deterministic_mode=training.deterministic,
        calculate_per_token_loss=False,
        # Frees an output as soon as its send is posted. CUDA streams keep the bytes until they are sent; gloo reads them
        # later, from memory that is no longer theirs.
        deallocate_pipeline_outputs=choose_device(config).type == "cuda",
        # The interleaved schedule sends activations and gradients to the same rank when there are two pipeline ranks. In
        # one batch they are told apart by order alone, and get swapped; overlapped, each direction has its own group.
        overlap_p2p_comm=layout.virtual_pipeline is not None,
        batch_p2p_comm=layout.virtual_pipeline is None,
        # models/initialize.py fills every weight, so Megatron's own draw would be thrown away.
        perform_initialization=False,
        use_cpu_initialization=False,
        # These kernels come from apex or TransformerEngine; without them Megatron-core fails late, so they stay off.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **_recompute(training.recompute),
        **_moe(config),
    )


def ffn_hidden_size(config: Config) -> int:
    """Width of a dense feed-forward layer: `model.ffn_hidden_size`, or 4 x `model.hidden_size`."""
    return config.model.ffn_hidden_size or 4 * config.model.hidden_size


def moe_layer_pattern(config: Config) -> list[int]:
    """One 0 (dense) or 1 (MoE) per layer, from `moe.layers`. Raises ConfigError for a list of another length."""
    num_layers = config.model.num_layers
    if config.moe.num_experts is None:
        return [0] * num_layers
    layers = config.moe.layers
    if isinstance(layers, int):
        if layers < 1:
            raise ConfigError(f"moe.layers ({layers}) must be at least 1: every n-th layer is MoE. Try moe.layers=1.")
        return [int(i % layers == 0) for i in range(num_layers)]
    pattern = [int(value) for value in layers]
    if len(pattern) != num_layers or set(pattern) - {0, 1}:
        raise ConfigError(f"moe.layers ({pattern}) must hold a 0 or 1 for each of model.num_layers ({num_layers}). Try moe.layers=1.")
    return pattern


def _moe(config: Config) -> dict[str, Any]:
    moe = config.moe
    if moe.num_experts is None:
        return {}
    _check_moe(config)
    losses = {"aux_loss": moe.aux_loss_coeff, "seq_aux_loss": moe.sequence_aux_loss_coeff}
    losses = {name: coeff for name, coeff in losses.items() if coeff > 0}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size or ffn_hidden_size(config),
        "moe_shared_expert_intermediate_size": moe.shared_expert_ffn_hidden_size,
        "moe_layer_freq": moe_layer_pattern(config),
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.router_score,
        # Softmax before the choice leaves the weights as they are; after it, they sum to 1.
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
        "moe_token_dispatcher_type": moe.dispatcher,
        "moe_grouped_gemm": False,
    }


def _check_moe(config: Config) -> None:
    moe, layout = config.moe, config.parallel
    if moe.router_score == "sigmoid" and not moe.normalize_top_k and moe.top_k > 1:
        raise ConfigError(
            f"moe.normalize_top_k (false) with moe.router_score=sigmoid and moe.top_k={moe.top_k}: "
            "Megatron-core always normalizes several sigmoid weights. Try moe.normalize_top_k=true."
        )
    if moe.router_score == "softmax" and moe.normalize_top_k and moe.top_k == 1:
        raise ConfigError(
            "moe.normalize_top_k (true) with moe.top_k=1 would make every weight 1, and the router would get no gradient. "
            "Try moe.normalize_top_k=false."
        )
    if config.model.linear_bias and moe.shared_expert_ffn_hidden_size is not None:
        raise ConfigError(
            f"moe.shared_expert_ffn_hidden_size ({moe.shared_expert_ffn_hidden_size}) needs linear layers without bias: shared experts "
            "have none. Try model.linear_bias=false."
        )
    if config.model.linear_bias and expert_tensor_size(config) > 1:
        raise ConfigError(
            f"parallel.expert_tensor ({expert_tensor_size(config)}) with model.linear_bias=true: an expert's output bias cannot be split. "
            "Try parallel.expert_tensor=1."
        )
    if layout.expert == 1 and expert_tensor_size(config) != layout.tensor:
        raise ConfigError(
            f"parallel.expert_tensor ({expert_tensor_size(config)}) must equal parallel.tensor ({layout.tensor}) when "
            "parallel.expert is 1: Megatron-core would reduce expert gradients over the wrong ranks. "
            f"Try parallel.expert_tensor={layout.tensor}."
        )


def _recompute(kind: str) -> dict[str, Any]:
    # selective: attention scores and the wide activations of dense feed-forward layers, which hold most of a layer's
    # memory (Korthikanti et al. 2022, section 4). What an MoE layer keeps is moe.memory_strategy's business.
    settings: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    return _choice("training.recompute", kind, settings)


def _choice(field: str, value: str, table: dict[str, Any]) -> Any:
    if value not in table:
        raise ConfigError(f"{field} ({value}) must be one of {', '.join(table)}. Try {field}={next(iter(table))}.")
    return table[value]
