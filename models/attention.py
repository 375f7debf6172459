"""Core attention on torch's scaled_dot_product_attention: Megatron's DotProductAttention without its mask tensor and s x s scores.

Shapes: s sequence, b batch, n query heads of this rank, g key/value heads of this rank, d channels of a head.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from configs.schema import ConfigError


class ScaledDotProductAttention(MegatronModule):
    """Drop-in for Megatron-core's DotProductAttention. Raises ConfigError for context parallelism."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        # Context parallelism comes here: exchange keys and values (or heads) between the context ranks before the kernel.
        if config.context_parallel_size > 1:
            raise ConfigError(
                f"parallel.context ({config.context_parallel_size}) is not supported by the portable attention yet. Try parallel.context=1."
            )
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query `[s, b, n, d]`, key and value `[s, b, g, d]` -> `[s, b, n * d]`.

        Causal masking needs no tensor; for other mask types, attention_mask is bool `[b, 1, 1 or s, s]` with Megatron's
        True = masked.
        """
        assert attention_bias is None and packed_seq_params is None, "no model of this repository uses attention bias or packed sequences"
        causal = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        mask = None if causal or attention_mask is None else ~attention_mask
        dropout = self.attention_dropout if self.training else 0.0
        # Heads are split over tensor ranks, so each draws its own dropout: from the tracker's stream. Under sequence
        # parallelism the whole block already runs inside it (as in Megatron's DotProductAttention).
        own_stream = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if own_stream else nullcontext():
            context = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=causal,
                scale=self.softmax_scale,
                enable_gqa=query.size(2) != key.size(2),
            )
        return context.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)
