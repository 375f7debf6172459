"""GPT: a model chunk built on Megatron-core's GPTModel, its forward pass and its loss.

Shapes: b samples, s tokens of a sample, h hidden size, v padded vocabulary rows of this tensor rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from configs.rotary import switches_at
from configs.schema import Config
from models.attention.layers import row_settings, takes_rows
from models.attention.sequence_rows import SLICES, RowSlices, document_slices, is_sharded, position_ids, with_slices
from models.loss.output_layer import LossOutput
from models.loss.token_loss import Targets, targets_of
from models.pointwise.rotary import Rotary
from parallel.layer_wise import StartedPass
from parallel.topology import Axis, Topology

POSITION_EMBEDDINGS = {"rope": "none", "learned": "learned_absolute"}  # models/pointwise has rotary positions


class Gpt(GPTModel):
    """Megatron-core's GPTModel on one (virtual) pipeline stage, with a forward pass that takes packed documents and
    targets."""

    def __init__(
        self,
        config: Config,
        megatron: TransformerConfig,
        topology: Topology,
        block: TransformerBlockSubmodules,
        padded_vocab_size: int,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> None:
        super().__init__(
            config=megatron,
            transformer_layer_spec=block,
            vocab_size=padded_vocab_size,
            max_sequence_length=config.model.sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=config.model.tie_embeddings,
            position_embedding_type=POSITION_EMBEDDINGS[config.model.position_embedding],
            pg_collection=topology.groups,
            vp_stage=vp_stage,
        )
        self.rotary = Rotary(config) if config.model.position_embedding == "rope" else None
        self.passes_rows = takes_rows(self)

    def forward(self, **inputs: Any) -> torch.Tensor | LossOutput:
        """Run this pipeline stage on a micro-batch: the embedding, layers and head that it has. `inputs`: the arguments
        of `begin`. The last stage returns losses or logits, other stages hidden states `[s, b, h]`."""
        started = self.begin(**inputs)
        hidden = self.decoder(hidden_states=started.hidden, **started.settings)
        return started.end(hidden) if self.post_process else hidden

    def begin(
        self,
        tokens: torch.Tensor,
        targets: Targets | None = None,
        positions: torch.Tensor | None = None,
        slices: RowSlices | None = None,
    ) -> StartedPass:
        """Prepare a pass through this stage's layers: return their input, their other arguments, and a function that
        turns their output into losses or logits."""
        hidden = None  # a later stage: the decoder holds what the previous one sent
        if self.pre_process:
            numbers = position_ids(tokens) if positions is None else positions
            hidden = self.embedding(input_ids=tokens, position_ids=numbers)
        settings = {"attention_mask": None, **row_settings(self, tokens, slices, positions)}
        return StartedPass(hidden, settings, partial(self._end, targets))

    def _end(self, targets: Targets | None, hidden: torch.Tensor) -> torch.Tensor | LossOutput:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if targets is None:
            return self.output_layer(hidden, weight=weight)[0].transpose(0, 1).contiguous()
        return self.output_layer(self.output_layer.select(hidden, targets), weight=weight, targets=targets)


build_chunk = Gpt


def on_host(config: Config, batch: dict[str, Any], context: Axis | None = None) -> dict[str, Any]:
    """Add the attention slices to a micro-batch, on the host. A batch of separate documents has `positions`, int64
    `[b, s]`: the position of each token in its segment. Other batches are returned unchanged.

    With context parallelism, return only this rank's rows, and always with positions and slices.
    """
    if "positions" not in batch:
        if not is_sharded(context):
            return batch
        batch = {**batch, "positions": position_ids(batch["tokens"])}
    slices = document_slices(batch["positions"], switches_at(config.model.rotary_scaling))
    return with_slices(config, batch, slices, context)


def forward(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor | LossOutput:
    """Run this rank's pipeline stage on a micro-batch: `tokens` (int64 `[b, s]`), optionally labels and loss mask, and
    the positions and attention slices that it may have.

    The last stage returns the sum of the losses and the loss per token, fp32 `[b, s]`. Without labels, it returns this
    tensor rank's logits `[b, s, v]`. Other stages return hidden states `[s, b, h]`. With context parallelism, a rank's
    rows form one sample.
    """
    return model(
        tokens=batch["tokens"], targets=targets_of(batch), positions=batch.get("positions"), slices=batch.get(SLICES)
    )


def loss(output: LossOutput, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss as an fp32 scalar, summed over the predicted tokens (`loss_mask` is 1), and an empty dict of
    extra losses."""
    return output[0], {}


def logits(model: torch.nn.Module, tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the logits without vocabulary padding, `[b, s, vocab_size]`, on every tensor rank of the last stage."""
    return gather_from_tensor_model_parallel_region(forward(model, {"tokens": tokens}))[..., :vocab_size]
