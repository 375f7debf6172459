"""Layer specs: the modules of a transformer layer, for each backend, norm position and kind of feed-forward layer.

portable: our norm, torch's scaled_dot_product_attention and Megatron-core's parallel linear layers; runs wherever torch
runs. transformer_engine: TransformerEngine's norm, attention and linear layers (CUDA only).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from base.errors import ConfigError
from configs import derived
from configs.rotary import attention_factor
from configs.schema import Config, ModelConfig
from models.attention.layers import LatentAttention, RotarySelfAttention, ScaledDotProductAttention
from models.feed_forward import FeedForward
from models.norm import AllHeadsRMSNorm, LatentNorm, norm_class
from moe.layer import moe_spec
from moe.placement.policy import policy_of
from moe.planning.inputs import initial_plan
from parallel.megatron.startup import transformer_engine_fault
from parallel.topology import Axis, Topology


@dataclass(frozen=True)
class Backend:
    """Module classes of a backend. `norm_column_linear`: a norm fused with a linear layer; None if the backend has no
    such class."""

    norm: type
    qk_norm: type
    attention: type
    column_linear: type
    row_linear: type
    norm_column_linear: type | None = None


class PostNorm(torch.nn.Module):
    """The end of a post-norm sublayer (Vaswani et al. 2017, section 3.1): bias, dropout, residual sum, then the norm.
    Replaces Megatron-core's bias-dropout-add in a spec: a call with (training, fused) returns the function to apply."""

    def __init__(self, norm: type, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Any:
        """Return the function (output with bias, residual, dropout probability) -> normalized sum, `[s, b, h]`."""
        add = get_bias_dropout_add(training, fused)
        return lambda output_with_bias, residual, probability: self.norm(add(output_with_bias, residual, probability))


@functools.cache
def bias_copying(row_linear: type) -> type:
    """Return a subclass of a row-parallel linear layer that returns a copy of its bias instead of the parameter.

    A feed-forward layer under recompute (Megatron-core's CheckpointFunction) returns that bias. If it were the
    parameter itself, autograd would make it an output of the checkpoint, whose backward pass would then recurse
    forever.
    """

    class BiasCopying(row_linear):  # type: ignore[valid-type,misc]
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            output, bias = super().forward(hidden)
            return output, None if bias is None else bias.clone()

    return BiasCopying


def resolve_backend(config: Config, device: torch.device) -> str:
    """Return the backend that `model.backend` selects. `auto` selects transformer_engine if the device is a CUDA GPU
    and TransformerEngine works, else portable. Raises ConfigError if transformer_engine is required but cannot run."""
    wanted = config.model.backend
    fault = transformer_engine_fault()
    if wanted == "transformer_engine" and device.type != "cuda":
        raise ConfigError(
            f"model.backend (transformer_engine) needs a CUDA GPU, not {device.type}. Try model.backend=portable."
        )
    if wanted == "transformer_engine" and fault is not None:
        raise ConfigError(
            f"model.backend (transformer_engine) needs TransformerEngine, but {fault}. Try model.backend=portable."
        )
    if wanted == "auto":
        return "transformer_engine" if fault is None and device.type == "cuda" else "portable"
    return wanted


def backend_line(config: Config, device: torch.device) -> str | None:
    """Return the log line for a GPU on which `auto` selected the portable backend; None in all other cases."""
    fault = transformer_engine_fault()
    if config.model.backend != "auto" or device.type != "cuda" or fault is None:
        return None
    return f"model.backend: portable, without TransformerEngine: {fault}"


def block_spec(
    config: Config,
    topology: Topology,
    megatron: TransformerConfig,
    backend_name: str,
    vp_stage: int | None,
    off_device: bool = False,
) -> TransformerBlockSubmodules:
    """Return the spec of a model chunk's layers on this rank and of the final norm. `off_device`: the weights of
    experts are offloaded."""
    backend = _backend(backend_name, megatron)
    # TransformerEngine's attention would need its own sequence lengths, and its own sharding of the sequences.
    if config.data.documents == "separate" or config.parallel.context > 1:
        backend = replace(backend, attention=ScaledDotProductAttention)
    stage = topology.pipeline.rank
    offset = get_transformer_layer_offset(megatron, vp_stage, stage)
    pattern = derived.moe_layer_pattern(config)[offset : offset + get_num_layers_to_build(megatron, vp_stage, stage)]
    all_to_all = "flat" if config.moe.all_to_all == "auto" else config.moe.all_to_all
    linear = MLPSubmodules(linear_fc1=backend.column_linear, linear_fc2=backend.row_linear)
    moe = moe_spec(
        topology.groups,
        linear,
        config.model.activation,
        initial_plan(config),
        all_to_all,
        policy_of(config, topology.device.type),
        config.moe.group_score_top_k,
        strided=config.moe.token_budget is not None,
        off_device=off_device,
    )
    return TransformerBlockSubmodules(
        layer_specs=[_layer(backend, megatron, topology.tensor, config, moe if is_moe else None) for is_moe in pattern],
        # The last layer of a post-norm model has normalized its output already.
        layer_norm=None if config.model.norm_position == "post" else backend.norm,
    )


def _layer(
    backend: Backend, megatron: TransformerConfig, tensor: Axis, config: Config, moe: ModuleSpec | None
) -> ModuleSpec:
    # `moe` replaces the dense feed-forward layer. A backend that fuses a norm with the linear layer after it can do so
    # in a pre-norm model, before attention and before a dense feed-forward layer; an MoE router needs the norm's
    # output too.
    post_norm = config.model.norm_position == "post"
    fused_norm = backend.norm_column_linear if not post_norm else None
    latent = isinstance(megatron, MLATransformerConfig)
    fused_input_norm = None if latent else fused_norm  # in latent attention two linear layers read the norm's output
    attention = (
        _latent_attention(backend) if latent else _attention(backend, megatron, tensor, config.model, fused_norm)
    )
    linears = MLPSubmodules(linear_fc1=fused_norm or backend.column_linear, linear_fc2=backend.row_linear)
    feed_forward = ModuleSpec(module=FeedForward, submodules=linears) if moe is None else moe
    if post_norm:
        # TransformerLayer has no post-norm, but a norm before cross attention. Without cross attention, the output of
        # that norm is the layer's state, so it is the norm after self-attention.
        submodules = TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_cross_attn_layernorm=backend.norm,
            mlp=feed_forward,
            mlp_bda=ModuleSpec(module=PostNorm, params={"norm": backend.norm, "config": megatron}),
        )
    else:
        # Checkpoints name these norms as TransformerEngine does, so that a run can change its backend.
        fused_norm_keys = {} if latent else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
        if moe is None:
            fused_norm_keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        submodules = TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fused_input_norm else backend.norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused_norm and moe is None else backend.norm,
            mlp=feed_forward,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={} if fused_norm else fused_norm_keys,
        )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _attention(
    backend: Backend, megatron: TransformerConfig, tensor: Axis, model: ModelConfig, norm_column_linear: type | None
) -> ModuleSpec:
    query_norm = key_norm = backend.qk_norm if megatron.qk_layernorm else IdentityOp
    if megatron.qk_layernorm and model.qk_norm_over == "all_heads":
        query_norm = ModuleSpec(
            module=AllHeadsRMSNorm, params={"num_heads": megatron.num_attention_heads, "tensor": tensor}
        )
        key_norm = ModuleSpec(module=AllHeadsRMSNorm, params={"num_heads": megatron.num_query_groups, "tensor": tensor})
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal if model.family == "gpt" else AttnMaskType.padding}
    # TransformerEngine has a kernel for the rotary embedding, but none that takes a factor.
    factor = attention_factor(model.rotary_scaling) if model.position_embedding == "rope" else 1.0
    ours = backend.attention is ScaledDotProductAttention or factor != 1.0
    if ours:
        params["rotary_factor"] = factor
    return ModuleSpec(
        module=RotarySelfAttention if ours else SelfAttention,
        params=params,
        submodules=SelfAttentionSubmodules(
            linear_qkv=norm_column_linear or backend.column_linear,
            core_attention=backend.attention,
            linear_proj=backend.row_linear,
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        ),
    )


def _latent_attention(backend: Backend) -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=backend.column_linear,
            linear_q_down_proj=backend.column_linear,
            linear_q_up_proj=backend.column_linear,
            linear_kv_down_proj=backend.column_linear,
            linear_kv_up_proj=backend.column_linear,
            core_attention=backend.attention,
            linear_proj=backend.row_linear,
            q_layernorm=LatentNorm,
            kv_layernorm=LatentNorm,
        ),
    )


def _backend(name: str, megatron: TransformerConfig) -> Backend:
    if name == "portable":
        norm = norm_class(megatron)
        return Backend(norm, norm, ScaledDotProductAttention, ColumnParallelLinear, bias_copying(RowParallelLinear))
    from megatron.core.extensions import transformer_engine as te

    return Backend(
        norm=te.TENorm,
        qk_norm=te.TENorm,
        attention=te.TEDotProductAttention,
        column_linear=te.TEColumnParallelLinear,
        row_linear=bias_copying(te.TERowParallelLinear),
        norm_column_linear=te.TELayerNormColumnParallelLinear,
    )
