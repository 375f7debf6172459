"""Attention layers: self attention that rotates queries and keys in one function, latent attention, and core attention
on torch's scaled_dot_product_attention, without the mask tensor and s x s scores of Megatron's DotProductAttention.

Shapes: s sequence, b batch, n query heads of this rank, g key/value heads of this rank, d channels of a head.
"""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from models.attention.sequence_rows import MicroBatchRows, RowSlices, ShardedSlices
from models.attention.slice_attention import SlicePlan, attend, attend_latents
from models.pointwise.rotary import rotate, split_and_rotate


def _for_core(core_attention: torch.nn.Module, sequence_rows: MicroBatchRows | None) -> MicroBatchRows | None:
    """Return `sequence_rows` if core attention is ScaledDotProductAttention, else None: TransformerEngine's core
    attention takes only packed sequences."""
    return sequence_rows if isinstance(core_attention, ScaledDotProductAttention) else None


class RotarySelfAttention(SelfAttention):
    """Megatron-core's self attention, with one function that splits queries, keys and values and rotates queries and
    keys. `rotary_factor`: factor that multiplies the cosines and sines of the rotary angles."""

    def __init__(self, *args: Any, rotary_factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_factor = rotary_factor

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: MicroBatchRows | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attention output `[s, b, h]` without its bias, and the bias. `hidden_states`: `[s, b, h]`.
        `rotary_pos_emb`: rotary angles `[s, 1 or b, 1, rotating channels]`."""
        sequence_rows, for_core = packed_seq_params, _for_core(self.core_attention, packed_seq_params)
        if rotary_pos_emb is None or self.config.num_query_groups < self.world_size:
            # a rule of the configuration refuses fractions of a head; Megatron-core has no factor
            assert rotary_pos_emb is None or self.rotary_factor == 1.0
            others |= {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": for_core}
            return super().forward(hidden_states, attention_mask, **others)
        assert sequence_rows is not None, "rotary embedding needs the rows of the micro-batch"
        unsupported = [name for name, value in others.items() if value is not None]
        assert not unsupported, f"these arguments of attention are not supported: {unsupported}"
        if self.config.qk_layernorm:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
            cos_sin = sequence_rows.tables(query.dtype, self.rotary_factor)
            query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
        else:
            mixed, _ = self.linear_qkv(hidden_states)
            groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
            cos_sin = sequence_rows.tables(mixed.dtype, self.rotary_factor)
            query, key, value = split_and_rotate(mixed, groups, size, cos_sin)
        core = functools.partial(self.core_attention, attn_mask_type=self.attn_mask_type, packed_seq_params=for_core)
        if self.checkpoint_core_attention and self.training:
            context = tensor_parallel.checkpoint(core, False, query, key, value, attention_mask)
        else:
            context = core(query, key, value, attention_mask)
        return self.linear_proj(context)


class RowAngles:
    """Replacement for the position module of Megatron-core's latent attention. A call returns the rotary angles of the
    micro-batch's rows and, with YaRN, their factor."""

    def __init__(self, with_factor: bool) -> None:
        self.sequence_rows: MicroBatchRows | None = None
        self._with_factor = with_factor

    def get_rotary_seq_len(self, *_: Any) -> int:
        """Return 0: the angles belong to the rows, so no sequence length is needed."""
        return 0

    def __call__(self, _length: int, **_: Any) -> Any:
        """Return the rotary angles `[s, 1 or b, 1, rotating channels]`; with YaRN, a tuple of the angles and their
        factor."""
        assert self.sequence_rows is not None
        angles = self.sequence_rows.angles
        return (angles, self.sequence_rows.factor) if self._with_factor else angles


class WeightProjection(ColumnParallelLinear):
    """Linear layer whose forward pass returns its weight instead of multiplying by it. The layer's forward hooks still
    run, and wait for pending updates of the weight."""

    def forward(self, _: None) -> torch.Tensor:
        """Return this tensor rank's shard of the weight, instead of a product."""
        return self.weight


class LatentAttention(MLASelfAttention):
    """Megatron-core's multi-head latent attention, with rotary angles per row and a correct gradient of the rotary key
    under tensor parallelism.

    Megatron-core gathers the compressed keys and values from the tensor ranks, and in the backward pass each rank keeps
    only its own contribution to their gradient. But the heads of all ranks use the rotary key, so the contributions to
    its gradient must be summed over the ranks.
    """

    rotary_pos_emb: RowAngles

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config: MLATransformerConfig = kwargs["config"] if "config" in kwargs else args[0]
        # Not YaRN: its module makes its angles in the constructor, in pinned memory of a GPU.
        rope_type, config.rope_type = config.rope_type, "rope"
        try:
            super().__init__(*args, **kwargs)
        finally:
            config.rope_type = rope_type
        del self.rotary_pos_emb
        self.rotary_pos_emb = RowAngles(with_factor=rope_type == "yarn")
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(self._gather)
        if self.config.context_parallel_size > 1:
            # Megatron builds this layer from the backend's class, and takes no other class with context parallelism.
            self.linear_kv_up_proj.__class__ = WeightProjection

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: MicroBatchRows | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attention output `[s, b, h]` without its bias, and the bias, for hidden states `[s, b, h]`."""
        self.rotary_pos_emb.sequence_rows = packed_seq_params  # Megatron calls it without the rows
        if packed_seq_params is None or not isinstance(packed_seq_params.slices, ShardedSlices):
            others["packed_seq_params"] = _for_core(self.core_attention, packed_seq_params)
            return super().forward(hidden_states, attention_mask, **others)
        # Context ranks share the rows: they exchange latents and rotated rotary keys.
        config, core = self.config, self.core_attention
        compressed = hidden_states
        if config.q_lora_rank is not None:
            compressed, _ = self.linear_q_down_proj(hidden_states)
            if compressed.size(-1) != config.q_lora_rank:
                compressed = gather_from_tensor_model_parallel_region(compressed)
                if config.sequence_parallel:
                    compressed = scatter_to_sequence_parallel_region(compressed)
            compressed = self.q_layernorm(compressed)
        query, _ = (self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj)(compressed)
        query = query.unflatten(-1, (self.num_attention_heads_per_partition, -1))
        both, _ = self.linear_kv_down_proj(hidden_states)
        latent, rotary = both.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        latent = self.kv_layernorm(latent)
        if config.sequence_parallel:
            latent, rotary = (gather_from_sequence_parallel_region(x, group=self.tp_group) for x in (latent, rotary))
        else:  # each tensor rank has some heads; `_gather` has copied the rotary key
            latent = copy_to_tensor_model_parallel_region(latent)
        plain, turned = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        query = torch.cat([plain, self._rotated(turned, packed_seq_params)], dim=-1)
        latents = torch.cat([latent.unsqueeze(2), self._rotated(rotary.unsqueeze(2), packed_seq_params)], dim=-1)
        weight, plan = self.linear_kv_up_proj(None), packed_seq_params.plan(core.window)

        def attend_all(query: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
            return attend_latents(query, latents, weight, plan, core.softmax_scale).flatten(2)

        if self.checkpoint_core_attention and self.training:
            return self.linear_proj(tensor_parallel.checkpoint(attend_all, False, query, latents))
        return self.linear_proj(attend_all(query, latents))

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: MicroBatchRows | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return Megatron-core's query, key and value tensors, without passing on `packed_seq_params`: Megatron-core
        would take it for packed sequences."""
        return super().get_query_key_value_tensors(hidden_states, key_value_states, position_ids, None, **others)

    def _rotated(self, x: torch.Tensor, sequence_rows: MicroBatchRows) -> torch.Tensor:
        """Rotate channels `[s, 1, heads, p]` by the rotary angles of their rows (`sequence_rows`), with Megatron-core's
        function."""
        assert sequence_rows.angles is not None
        factor = sequence_rows.factor if self.config.rope_type == "yarn" else 1.0
        group = self.pg_collection.cp  # unused: there is no communication over it
        return apply_rotary_pos_emb(x, sequence_rows.angles, config=self.config, mscale=factor, cp_group=group)

    def _gather(
        self, _module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        full = gather_from_tensor_model_parallel_region(output[0])  # [s, b, latent + rotary]
        if self.config.sequence_parallel:
            # Megatron-core gathers the rotary key of a sequence shard itself, and that sums its gradients.
            return scatter_to_sequence_parallel_region(full), output[1]
        latent, rotary = full.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat([latent, copy_to_tensor_model_parallel_region(rotary)], dim=-1), output[1]


@functools.lru_cache(maxsize=4)
def window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the mask of sliding-window attention, bool `[length, length]`: each token attends to the last `window`
    tokens, including itself. Cached, so that all layers share it."""
    with torch.inference_mode(False):
        return torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)


class ScaledDotProductAttention(MegatronModule):
    """Replacement for Megatron-core's DotProductAttention that calls torch's scaled_dot_product_attention. With context
    parallelism, it also exchanges keys and values between ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if slides and config.window_size is not None else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: MicroBatchRows | None = None,
    ) -> torch.Tensor:
        """Return the attention output `[s, b, n * d]` (d: channels of a value head) for query `[s, b, n, d]`, key and
        value `[s, b, g, d]`. `attention_mask`: bool `[b, 1, 1 or s, s]`, True = masked as in Megatron-core, or None;
        ignored if attention is causal or is computed slice by slice."""
        assert attention_bias is None, "attention bias is not supported"
        causal = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        plan = self._plan(query, value, packed_seq_params, causal)
        if plan is not None:
            return attend(query, key, value, plan, self.softmax_scale).flatten(2)
        mask = None if causal or attention_mask is None else ~attention_mask
        if causal and self.window is not None and query.size(0) > self.window:
            mask, causal = window_mask(query.size(0), self.window, query.device), False
        dropout = self.attention_dropout if self.training else 0.0
        # Heads are split over tensor ranks, so each draws its own dropout: from the tracker's stream. Under sequence
        # parallelism the whole block already runs inside it (as in Megatron's DotProductAttention).
        own_stream = dropout > 0 and not self.config.sequence_parallel
        scale, grouped = self.softmax_scale, query.size(2) != key.size(2)
        inputs = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
        with tensor_parallel.get_cuda_rng_tracker().fork() if own_stream else nullcontext():
            context = F.scaled_dot_product_attention(
                *inputs, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
            )
        return context.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    def _plan(
        self, query: torch.Tensor, value: torch.Tensor, sequence_rows: MicroBatchRows | None, causal: bool
    ) -> SlicePlan | None:
        """Return the plan for computing attention slice by slice, or None if one call of scaled_dot_product_attention
        computes it."""
        if sequence_rows is None or self.attention_dropout > 0:
            return None
        if sequence_rows.slices is not None:
            return sequence_rows.plan(self.window)
        if not causal:
            return None
        slides = self.window is not None and query.size(0) > self.window
        # On a CPU torch makes all scores where values are narrower than keys.
        uneven = not query.is_cuda and query.size(-1) != value.size(-1)
        return sequence_rows.plan(self.window) if slides or uneven else None


def takes_rows(chunk: torch.nn.Module) -> bool:
    """Return whether a model chunk has attention layers that take the rows of a micro-batch (MicroBatchRows) as
    `packed_seq_params`. Megatron-core's layers with TransformerEngine take only packed sequences there."""
    ours = RotarySelfAttention, LatentAttention, ScaledDotProductAttention
    return any(isinstance(module, ours) for module in chunk.modules())


def row_settings(
    chunk: Any, tokens: torch.Tensor, slices: RowSlices | None, positions: torch.Tensor | None
) -> dict[str, Any]:
    """Return the arguments by which the layers of a model chunk get the rows of a micro-batch. `tokens`, `slices`,
    `positions`: as in MicroBatchRows."""
    group = chunk.pg_collection.tp if chunk.config.sequence_parallel else None
    micro_batch_rows = MicroBatchRows(tokens, chunk.rotary, slices, positions, group)
    return {
        # latent attention takes them from the rows
        "rotary_pos_emb": None if chunk.config.multi_latent_attention else micro_batch_rows.angles,
        "packed_seq_params": micro_batch_rows if chunk.passes_rows else None,
    }
