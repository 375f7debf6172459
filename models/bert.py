"""BERT (Devlin et al. 2018): a model chunk built from Megatron-core's modules, its forward pass and its losses.

Megatron-core's own BertModel needs apex for sequence parallelism (for the norm of its head), has no norm on the
embeddings and ignores the rotary base; this class has the same structure and parameter names. Shapes: b samples, s
tokens of a sample, h hidden size, v padded vocabulary rows of this tensor rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.bert.pooler import Pooler
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from configs.rotary import switches_at
from configs.schema import Config
from models.attention.layers import row_settings, takes_rows
from models.attention.sequence_rows import SLICES, RowSlices, is_sharded, padding_slices, position_ids, with_slices
from models.blueprint.ends import NUM_TOKEN_TYPES
from models.gpt import POSITION_EMBEDDINGS
from models.loss.token_loss import Targets, targets_of
from models.norm import mark_sequence_parallel, norm_class
from models.pointwise.rotary import Rotary
from parallel.layer_wise import StartedPass
from parallel.topology import Axis, Topology

# Hidden states; or logits and sentence logits; or the sum of the losses, the loss per token, and sentence logits.
Output: TypeAlias = (
    torch.Tensor | tuple[torch.Tensor, torch.Tensor | None] | tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
)


class BertEmbedding(LanguageModelEmbedding):
    """Word, position and token type embeddings, then a norm and dropout: `[b, s] -> [s (or its shard), b, h]`."""

    def __init__(self, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__(config=config, num_tokentypes=NUM_TOKEN_TYPES, **kwargs)
        self.layer_norm = norm_class(config)(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, tokentype_ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids, positions and token types, int64 `[b, s]` each: return `[s (or its shard), b, h]`."""
        embeddings = self.word_embeddings(input_ids) + self.tokentype_embeddings(tokentype_ids)
        if self.add_position_embedding:
            embeddings = embeddings + self.position_embeddings(position_ids)
        embeddings = embeddings.transpose(0, 1).contiguous()
        if not self.config.sequence_parallel:
            return self.embedding_dropout(self.layer_norm(embeddings))
        embeddings = tensor_parallel.scatter_to_sequence_parallel_region(embeddings, group=self.tp_group).clone()
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return self.embedding_dropout(self.layer_norm(embeddings))


class MaskedLMHead(MegatronModule):
    """Linear layer, GELU and norm before BERT's output layer: `[s, b, h] -> [s, b, h]`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.dense = torch.nn.Linear(config.hidden_size, config.hidden_size)
        mark_sequence_parallel(self.dense, config)
        self.layer_norm = norm_class(config)(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Transform hidden states `[s, b, h]` for the output layer; the shape does not change."""
        return self.layer_norm(F.gelu(self.dense(hidden_states)))


class Bert(LanguageModule):
    """The layers of a BERT on one (virtual) pipeline stage; the first stage also has the embedding, the last one the
    heads."""

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
        super().__init__(config=megatron, pg_collection=topology.groups)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = config.model.tie_embeddings
        if pre_process:
            self.embedding = BertEmbedding(
                megatron,
                vocab_size=padded_vocab_size,
                max_sequence_length=config.model.sequence_length,
                position_embedding_type=POSITION_EMBEDDINGS[config.model.position_embedding],
            )
        self.rotary = Rotary(config) if config.model.position_embedding == "rope" else None
        self.encoder = TransformerBlock(
            config=megatron,
            spec=block,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=self.pg_collection,
            vp_stage=vp_stage,
        )
        if post_process:
            self.lm_head = MaskedLMHead(megatron)
            self.output_layer = ColumnParallelLinear(
                megatron.hidden_size,
                padded_vocab_size,
                config=megatron,
                init_method=megatron.init_method,
                bias=True,
                skip_bias_add=False,
                gather_output=False,
                skip_weight_param_allocation=pre_process and self.share_embeddings_and_output_weights,
                tp_group=self.pg_collection.tp,
            )
            self.pooler = None
            if config.model.sentence_head != "none":
                self.pooler = Pooler(megatron.hidden_size, megatron.init_method, megatron, megatron.sequence_parallel)
                self.binary_head = torch.nn.Linear(megatron.hidden_size, 2)
        self.passes_rows = takes_rows(self)
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Set this stage's input: the hidden states that the previous pipeline stage sent."""
        self.encoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(self, **inputs: Any) -> Output:
        """Run this pipeline stage on a micro-batch: the embedding, layers and heads that it has. `inputs`: the
        arguments of `begin`. The last stage returns losses or logits, other stages hidden states `[s, b, h]`."""
        started = self.begin(**inputs)
        hidden = self.encoder(hidden_states=started.hidden, **started.settings)
        return started.end(hidden) if self.post_process else hidden  # type: ignore[no-any-return]

    def begin(
        self,
        tokens: torch.Tensor,
        types: torch.Tensor,
        padding_mask: torch.Tensor,
        targets: Targets | None = None,
        slices: RowSlices | None = None,
        positions: torch.Tensor | None = None,
        first_rows: torch.Tensor | None = None,
    ) -> StartedPass:
        """Prepare a pass through this stage's layers: return their input, their other arguments, and a function that
        turns their output into losses or logits. Under context parallelism, a rank's share of a micro-batch has
        `positions`: the position of each row in its sample, int64 `[1, s]`; and `first_rows`: indices of the rows that
        are the first token of a sample, int64 `[k]`."""
        hidden = None  # a later stage: the encoder holds what the previous one sent
        if self.pre_process:
            numbers = position_ids(tokens) if positions is None else positions
            hidden = self.embedding(input_ids=tokens, position_ids=numbers, tokentype_ids=types)
        # Megatron-core's convention: True = masked. Only keys are masked: the outputs of padding positions reach no
        # loss.
        settings = {"attention_mask": ~padding_mask[:, None, None, :], **row_settings(self, tokens, slices, positions)}
        return StartedPass(hidden, settings, partial(self._end, targets, first_rows))

    def _end(self, targets: Targets | None, first_rows: torch.Tensor | None, hidden: torch.Tensor) -> Output:
        sentence_logits = None
        if self.pooler is not None:
            pooled = self.pooler(hidden, 0) if first_rows is None else self._pooled(hidden, first_rows)
            sentence_logits = self.binary_head(pooled)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if targets is None:
            logits, _ = self.output_layer(self.lm_head(hidden), weight=weight)
            return logits.transpose(0, 1).contiguous(), sentence_logits
        transformed = self.lm_head(self.output_layer.select(hidden, targets))
        return *self.output_layer(transformed, weight=weight, targets=targets), sentence_logits

    def _pooled(self, hidden: torch.Tensor, first_rows: torch.Tensor) -> torch.Tensor:
        """Pool the first tokens that this rank holds (possibly none): return `[k, h]` for hidden states `[s, 1, h]`.
        The gathered hidden states are freed on return, before the loss."""
        assert self.pooler is not None
        if self.config.sequence_parallel:  # all tensor ranks compute the same from here on
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return torch.tanh(self.pooler.dense(hidden[first_rows, 0]))


build_chunk = Bert


def on_host(config: Config, batch: dict[str, Any], context: Axis | None = None) -> dict[str, Any]:
    """Add the attention slices to a micro-batch, on the host. With context parallelism, return only this rank's rows,
    and the sentence labels of the samples whose first tokens are among them."""
    slices = padding_slices(batch["padding_mask"], switches_at(config.model.rotary_scaling))
    if not is_sharded(context):
        return with_slices(config, batch, slices, context)
    samples, length = batch["tokens"].shape
    found = with_slices(config, {**batch, "positions": position_ids(batch["tokens"])}, slices, context)
    is_first = found["positions"][0] == 0
    found["first_rows"] = is_first.nonzero().flatten()
    if "sentence_label" in batch:
        found["sentence_label"] = batch["sentence_label"][found[SLICES].sequence_rows[is_first] // length]
        found["num_samples"] = samples
    return found


def forward(model: torch.nn.Module, batch: dict[str, Any]) -> Output:
    """Run this rank's pipeline stage on a micro-batch: `tokens` and `types` (int64 `[b, s]`), `padding_mask` (bool `[b,
    s]`, True = real token), and optionally labels and loss mask.

    The last stage returns (sum of the losses, loss per token fp32 `[b, s]`, sentence logits `[b, 2]` or None). Without
    labels, it returns (logits `[b, s, v]`, sentence logits or None). Other stages return hidden states `[s, b, h]`.
    """
    inputs = {name: batch[name] for name in ("tokens", "types", "padding_mask")}
    if "first_rows" in batch:
        inputs |= {name: batch[name] for name in ("positions", "first_rows")}
    return model(**inputs, targets=targets_of(batch), slices=batch.get(SLICES))


def loss(output: Output, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the masked-LM loss as an fp32 scalar, summed over the predicted tokens (`loss_mask` is 1), and a dict of
    extra losses. The extra losses are `{"sentence_loss": mean}` with a sentence head (`sentence_label` int64 `[b]`),
    else empty."""
    assert isinstance(output, tuple) and len(output) == 3, "only the last pipeline stage has a loss"
    loss_sum, _, sentence_logits = output
    extra = {}
    if sentence_logits is not None:
        if "num_samples" in batch:  # of all ranks; this rank has some of these samples, or none
            summed = F.cross_entropy(sentence_logits.float(), batch["sentence_label"], reduction="sum")
            extra["sentence_loss"] = summed / batch["num_samples"]
        else:
            extra["sentence_loss"] = F.cross_entropy(sentence_logits.float(), batch["sentence_label"])
    return loss_sum, extra


def logits(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the token logits without vocabulary padding, `[b, s, vocab_size]`, and the sentence head's logits or None,
    on every tensor rank of the last stage."""
    output = forward(model, {name: value for name, value in batch.items() if name != "labels"})
    assert isinstance(output, tuple) and len(output) == 2, "only the last pipeline stage has logits"
    token_logits, sentence_logits = output
    return gather_from_tensor_model_parallel_region(token_logits)[..., :vocab_size], sentence_logits
