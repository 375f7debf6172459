"""The layers of a model on this rank, from token ids to hidden states and logits, and the bytes that a forward pass
needs.

`Decoder` and `Encoder` build on `Transformer`. A pass applies each layer to several batches before the next layer, so
that each layer's weights are fetched once for all batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist

from configs import derived
from configs.schema import Config
from inference.decoder.attention import Attention, DecoderLatentAttention, DecoderRotary
from inference.decoder.experts import DecoderExperts
from inference.decoder.head import LOGIT_BYTES, Head
from inference.decoder.linear import Apply, Group, Weights, feed_forward, if_split, norm
from inference.decoder.step import Step
from inference.weights.budget import BudgetTooSmall, refuse_together
from inference.weights.rank_weights import ATTENTION, FEED_FORWARD, layer_key
from inference.weights.source import WeightSource
from memory.transfer import to_device
from models.blueprint.operation import transformer_name
from parallel.topology import Topology

WORK_BYTES = 16 * 2**20  # for readers, kernels and small tensors
# The two norms of a layer: a post-norm layer applies them to its sums, a pre-norm layer to the inputs of its blocks.
NORMS = {"pre": ("input_layernorm", "pre_mlp_layernorm"), "post": ("pre_cross_attn_layernorm", "mlp_bda.norm")}


class Layer:
    """A transformer layer: attention, then a feed-forward block or experts, each with a residual connection."""

    def __init__(self, layer: int, source: WeightSource, config: Config, group: Group, expert_group: Group) -> None:
        self.layer, self.source, self.config, self.group = layer, source, config, group
        self.small = source.small_of(layer)
        self.is_pre_norm = config.model.norm_position == "pre"
        names = NORMS[config.model.norm_position]
        self.attention_norm, self.feed_forward_norm = (norm(self.small, name, config) for name in names)
        self.experts: DecoderExperts | None = None
        if derived.moe_layer_pattern(config)[layer]:
            self.experts = DecoderExperts(layer, source, config, group, expert_group)
        self.next_moe: Layer | None = None  # the next layer of this rank with experts

    def __call__(self, hidden: Sequence[torch.Tensor], steps: Sequence[Step]) -> list[torch.Tensor]:
        """Return the hidden states [T, H] of each batch after this layer."""
        with self.source.use(layer_key(self.layer, ATTENTION), self._attention) as attend:
            middle = [
                self._sum(each, attend(self._before(self.attention_norm, each), step), self.attention_norm)
                for each, step in zip(hidden, steps, strict=True)
            ]
        inputs = [self._before(self.feed_forward_norm, each) for each in middle]
        if self.experts is not None:
            outputs = self.experts(inputs, steps, self._expected(middle, steps), self._expect)
        else:
            with self.source.use(layer_key(self.layer, FEED_FORWARD), self._feed_forward) as apply:
                outputs = [apply(each) for each in inputs]
        return [self._sum(each, output, self.feed_forward_norm) for each, output in zip(middle, outputs, strict=True)]

    def _before(self, normed: Apply, hidden: torch.Tensor) -> torch.Tensor:
        return normed(hidden) if self.is_pre_norm else hidden

    def _sum(self, hidden: torch.Tensor, output: torch.Tensor, normed: Apply) -> torch.Tensor:
        return hidden + output if self.is_pre_norm else normed(hidden + output)

    def _attention(self, weights: Weights) -> Attention | DecoderLatentAttention:
        kind = DecoderLatentAttention if self.config.model.attention == "latent" else Attention
        return kind(self.layer, {**self.small, **weights}, self.config, self.group)

    def _feed_forward(self, weights: Weights) -> Apply:
        return feed_forward({**self.small, **weights}, "mlp.", self.config, self.group)

    def _expected(self, middle: Sequence[torch.Tensor], steps: Sequence[Step]) -> list[torch.Tensor]:
        """Predict the experts [T, k] that the next MoE layer will choose, per batch; [] if experts are not streamed.

        The next layer's router predicts them from `middle`, the hidden states [T, H] after this layer's attention, to
        which this layer's experts have not been added yet.
        """
        after = self.next_moe
        if after is None or not self.source.streams_experts:
            return []
        assert after.experts is not None
        texts = [each if step.texts is None else each[step.texts] for each, step in zip(middle, steps, strict=True)]
        return [after.experts.route(after._before(after.feed_forward_norm, each))[1] for each in texts]

    def _expect(self, chosen: Sequence[int]) -> None:
        """Prefetch experts of the next MoE layer, the most frequent of `chosen` first."""
        assert self.next_moe is not None
        self.source.expect(self.next_moe.layer, [expert for expert, _ in Counter(chosen).most_common()])


@dataclass(frozen=True)
class _PipelineStage:
    """Consecutive layers of a pipeline rank, and the ranks before and after it, which exchange hidden states."""

    layers: Sequence[int]
    is_mine: bool
    receives_from: int | None  # rank in the pipeline group
    sends_to: int | None


class Transformer:
    """This rank's layers, applied to token ids. A forward pass takes several batches and fetches each weight once.

    Under parallelism every method is a collective call: all ranks pass the same arguments and get the same result.
    """

    def __init__(self, source: WeightSource, config: Config, topology: Topology, vocab_size: int) -> None:
        small = source.small
        self.source, self.config, self.vocab_size = source, config, vocab_size
        self.max_length = config.model.sequence_length if config.model.position_embedding == "learned" else None
        self.device = source.device
        self._tensor_group = if_split(topology.tensor.group)
        self._pipeline_group = if_split(topology.pipeline.group)
        self._position_embedding = small.get("embedding.position_embeddings.weight")
        self._type_embedding = small.get("embedding.tokentype_embeddings.weight")
        self._embedding_norm, self._final_norm = (
            norm(small, name, config) if f"{name}.weight" in small else None
            for name in ("embedding.layer_norm", f"{transformer_name(config)}.final_layernorm")
        )
        self._rotary = DecoderRotary(config, self.device) if config.model.position_embedding == "rope" else None
        # The tensor ranks, and the ranks that together hold all experts of a layer.
        groups = self._tensor_group, if_split(topology.groups.tp_ep)
        self._layers = {layer: Layer(layer, source, config, *groups) for layer in source.held.layers}
        mixtures = [layer for layer in self._layers.values() if layer.experts is not None]
        for layer, after in zip(mixtures, mixtures[1:]):
            layer.next_moe = after
        self._head = Head(source, vocab_size, self._tensor_group) if source.held.head else None
        self._stages = self._find_stages(config.model.num_layers)

    def _run(self, tokens: Sequence[torch.Tensor], steps: Sequence[Step]) -> list[torch.Tensor] | None:
        """Return each batch's final normed hidden states [T, H] on the last pipeline stage, None on other stages."""
        hidden: list[torch.Tensor] | None = None
        if self.source.record is not None:
            self.source.record.begin_pass()
        if self._stages[0].is_mine:
            hidden = [self._embed(each, step) for each, step in zip(tokens, steps, strict=True)]
        for stage in (stage for stage in self._stages if stage.is_mine):
            if hidden is None:
                hidden = []
                for step in steps:
                    shape = step.batch_size * step.new, self.config.model.hidden_size
                    hidden.append(torch.empty(shape, dtype=self.source.dtype, device=self.device))
                    dist.recv(hidden[-1], group=self._pipeline_group, group_src=stage.receives_from)
            for layer in stage.layers:
                hidden = self._layers[layer](hidden, steps)
            if stage.sends_to is not None:
                for each in hidden:
                    dist.send(each, group=self._pipeline_group, group_dst=stage.sends_to)
                hidden = None
        if hidden is None or self._head is None:
            return None
        return hidden if self._final_norm is None else [self._final_norm(each) for each in hidden]

    def _angles(
        self, length: int, positions: slice | torch.Tensor, lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return the fp32 cosines and signed sines of token positions, or (None, None) without rotary positions."""
        return (None, None) if self._rotary is None else self._rotary.at(length, positions, lengths)

    def _reserve_together(self, num_bytes: int) -> None:
        """Reserve bytes in addition to the weights. If one rank has too few, all raise ConfigError. Collective."""
        problem = None
        try:
            self.source.reserve(num_bytes)
        except BudgetTooSmall as error:
            problem = error
        refuse_together(problem)

    def _embed(self, tokens: torch.Tensor, step: Step) -> torch.Tensor:
        words, flat = self.source.held.words, tokens.reshape(-1)
        assert words is not None
        if self._tensor_group is None:
            hidden = self.source.word_rows(flat)
        else:
            table_rows = words.shape[0]
            local = to_device(flat, self.device) - self._tensor_group.rank() * table_rows
            elsewhere = (local < 0) | (local >= table_rows)
            hidden = self.source.word_rows(local.masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0.0)
            dist.all_reduce(hidden, group=self._tensor_group)
        if self._type_embedding is not None:
            hidden = hidden + self._type_embedding[0]  # all tokens are of the first kind of sentence
        if self._position_embedding is not None:
            if step.is_prefill:
                positions = self._position_embedding[: step.new].repeat(step.batch_size, 1)
            else:
                positions = self._position_embedding[step.start if step.positions is None else step.positions]
            hidden = hidden + positions
        return hidden if self._embedding_norm is None else self._embedding_norm(hidden)

    def _logits(self, hidden: list[torch.Tensor] | None, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return the logits of each batch, fp32 `[n, V]`, on all ranks. counts: number of rows n of each batch."""
        if hidden is not None:
            assert self._head is not None
            found = [self._from_last(logits) for logits in self._head.logits(hidden)]
        else:
            found = [self._from_last(torch.empty(count, self.vocab_size, device=self.device)) for count in counts]
        self.source.check_finite(found)
        return found

    def _from_last(self, values: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the last pipeline stage; the other stages receive it into `values`."""
        if self._pipeline_group is not None:
            dist.broadcast(values, group=self._pipeline_group, group_src=self._pipeline_group.size() - 1)
        return values

    def _find_stages(self, num_layers: int) -> list[_PipelineStage]:
        """Return the stages of the pipeline in the order of the layers. With virtual stages, a rank has several."""
        if self._pipeline_group is None:
            return [_PipelineStage(range(num_layers), True, None, None)]
        rank = self._pipeline_group.rank()
        held: list[list[int] | None] = [None] * self._pipeline_group.size()
        dist.all_gather_object(held, sorted(self._layers), group=self._pipeline_group)
        owner = {layer: i for i, layers in enumerate(held) for layer in layers or []}
        runs = [(who, list(layers)) for who, layers in groupby(range(num_layers), owner.__getitem__)]
        receives_from = [None, *(who for who, _ in runs[:-1])]
        sends_to = [*(who for who, _ in runs[1:]), None]
        return [
            _PipelineStage(layers, who == rank, before, after)
            for (who, layers), before, after in zip(runs, receives_from, sends_to, strict=True)
        ]


def cache_bytes(config: Config, source: WeightSource, batch_size: int, length: int) -> int:
    """Return the bytes of this rank's key-value cache for `batch_size` texts of at most `length` tokens."""
    model, heads = config.model, derived.num_query_groups(config) // source.topology.tensor.size
    width = 2 * derived.head_dim(config)
    if model.attention == "latent":
        width = derived.head_dim(config) + model.rotary_head_dim + model.value_head_dim
        heads = model.num_attention_heads // source.topology.tensor.size
    return len(source.held.layers) * batch_size * length * heads * width * source.dtype.itemsize


def pass_bytes(config: Config, source: WeightSource, tokens: int, batches: int, scored: int | None = None) -> int:
    """Return the peak bytes of a forward pass over `batches` batches of at most `tokens` tokens each, without weights
    and cache.

    The sum contains the hidden states of all batches, the tensors of the largest block for one batch, and the logits of
    `scored` tokens (None: one block of logits at a time, as in scoring).
    """
    model, size = config.model, config.model.hidden_size
    heads = model.num_attention_heads * (derived.head_dim(config) + (model.rotary_head_dim or 0))
    routed = 0
    if config.moe.num_experts is not None:
        routed = config.moe.top_k * (2 * size + 3 * derived.expert_ffn_hidden_size(config))
        routed += 3 * (config.moe.shared_expert_ffn_hidden_size or 0)
    widest = max(4 * heads + 2 * size, 3 * derived.ffn_hidden_size(config), routed)
    numbers = tokens * (widest // source.topology.tensor.size + 2 * size) + 3 * size * tokens * batches
    at_once = min(4 * source.vocab_size * tokens, LOGIT_BYTES) if scored is None else 4 * source.vocab_size * scored
    return source.dtype.itemsize * numbers + 2 * at_once + WORK_BYTES
