"""GPT: one model chunk on Megatron-core's GPTModel, its forward pass and its loss.

Shapes: b samples, s tokens of a sample, h hidden size, v padded vocabulary rows of this tensor rank.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from configs.schema import Config

POSITION_EMBEDDINGS = {"rope": "rope", "learned": "learned_absolute"}


def build_chunk(
    config: Config,
    megatron: TransformerConfig,
    block: TransformerBlockSubmodules,
    padded_vocab_size: int,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> GPTModel:
    """The part of a GPT that one (virtual) pipeline stage holds, weights not yet filled."""
    return GPTModel(
        config=megatron,
        transformer_layer_spec=block,
        vocab_size=padded_vocab_size,
        max_sequence_length=config.model.sequence_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=config.model.tie_embeddings,
        position_embedding_type=POSITION_EMBEDDINGS[config.model.position_embedding],
        rotary_percent=config.model.rotary_fraction,
        rotary_base=config.model.rotary_base,
        vp_stage=vp_stage,
    )


def position_ids(tokens: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, ... for each sample: int64 `[b, s]`."""
    return torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0).expand_as(tokens)


def forward(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run this rank's stage on `batch["tokens"]` and `batch["labels"]`, int64 `[b, s]`.

    Last stage: the loss of each token, fp32 `[b, s]`; without labels, this tensor rank's logits `[b, s, v]`.
    Other stages: hidden `[s, b, h]`.
    """
    tokens = batch["tokens"]
    return model(input_ids=tokens, position_ids=position_ids(tokens), attention_mask=None, labels=batch.get("labels"))


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the language-model loss over the predicted tokens (where `loss_mask` is 1), fp32 scalar; no extra losses."""
    return (output.float() * batch["loss_mask"]).sum(), {}


def logits(model: torch.nn.Module, tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits over the whole logical vocabulary, `[b, s, vocab_size]`, on every tensor rank of the last stage."""
    return gather_from_tensor_model_parallel_region(forward(model, {"tokens": tokens}))[..., :vocab_size]
