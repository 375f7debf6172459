"""A stage after the other, from tokens to hidden states: what a decoder of text and an encoder have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist

from configs.schema import Config
from inference.decoder.attention import DecoderRotary
from inference.decoder.head import Head
from inference.decoder.layer import Layer
from inference.decoder.linear import Apply, if_split, norm
from inference.decoder.step import Step
from inference.weights.budget import refuse_together
from inference.weights.plan import BudgetTooSmall
from inference.weights.source import WeightSource
from memory.transfer import to_device
from models.blueprint.pieces import transformer_name
from parallel.topology import Topology


@dataclass(frozen=True)
class _Stage:
    layers: Sequence[int]
    is_mine: bool
    comes_from: int | None  # rank in the pipeline group
    goes_to: int | None


class Transformer:
    """Runs this rank's weights on token ids. Every pass takes several batches, for which weights come once.

    Under parallelism every method is a collective call, with the same arguments on all ranks; each returns the same on
    all ranks.
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
        self._embedding_norm = _norm_if_there(small, "embedding.layer_norm", config)
        self._final_norm = _norm_if_there(small, f"{transformer_name(config)}.final_layernorm", config)
        self._rotary = DecoderRotary(config, self.device) if config.model.position_embedding == "rope" else None
        expert_group = if_split(topology.groups.tp_ep)  # the ranks that together hold all experts of a layer
        self._layers = {
            layer: Layer(layer, source, config, self._tensor_group, expert_group) for layer in source.held.layers
        }
        mixtures = [layer for layer in self._layers.values() if layer.experts is not None]
        for layer, after in zip(mixtures, mixtures[1:]):
            layer.next_moe = after
        self._head = Head(source, vocab_size, self._tensor_group) if source.held.head else None
        self._stages = self._find_stages(config.model.num_layers)

    def _run(self, tokens: Sequence[torch.Tensor], steps: Sequence[Step]) -> list[torch.Tensor] | None:
        """The final hidden states [T, H] of each batch, normed, on the ranks of the last pipeline stage; None on the
        others."""
        hidden: list[torch.Tensor] | None = None
        if self.source.record is not None:
            self.source.record.begin_pass()
        if self._stages[0].is_mine:
            hidden = [self._embed(each, step) for each, step in zip(tokens, steps, strict=True)]
        for stage in self._stages:
            if stage.is_mine:
                if hidden is None:
                    hidden = [self._received(step, stage.comes_from) for step in steps]
                for layer in stage.layers:
                    hidden = self._layers[layer](hidden, steps)
                if stage.goes_to is not None:
                    for each in hidden:
                        dist.send(each, group=self._pipeline_group, group_dst=stage.goes_to)
                    hidden = None
        if hidden is None or self._head is None:
            return None
        return hidden if self._final_norm is None else [self._final_norm(each) for each in hidden]

    def _reserve_together(self, num_bytes: int) -> None:
        """Leave room beside the weights. Raises ConfigError, on all ranks, where the budget of one is too small. A
        collective call."""
        problem = None
        try:
            self.source.reserve(num_bytes)
        except BudgetTooSmall as error:
            problem = error
        refuse_together(problem)

    def _received(self, step: Step, source: int | None) -> torch.Tensor:
        shape = step.rows * step.new, self.config.model.hidden_size
        hidden = torch.empty(shape, dtype=self.source.dtype, device=self.device)
        dist.recv(hidden, group=self._pipeline_group, group_src=source)
        return hidden

    def _embed(self, tokens: torch.Tensor, step: Step) -> torch.Tensor:
        words, flat = self.source.held.words, tokens.reshape(-1)
        assert words is not None
        if self._tensor_group is None:
            hidden = self.source.word_rows(flat)
        else:
            rows = words.shape[0]
            local = to_device(flat, self.device) - self._tensor_group.rank() * rows
            elsewhere = (local < 0) | (local >= rows)
            hidden = self.source.word_rows(local.masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0.0)
            dist.all_reduce(hidden, group=self._tensor_group)
        if self._type_embedding is not None:
            hidden = hidden + self._type_embedding[0]  # one text is one kind of sentence
        if self._position_embedding is not None:
            if step.is_prefill:
                positions = self._position_embedding[: step.new].repeat(step.rows, 1)
            else:
                positions = self._position_embedding[step.start if step.positions is None else step.positions]
            hidden = hidden + positions
        return hidden if self._embedding_norm is None else self._embedding_norm(hidden)

    def _logits(self, hidden: list[torch.Tensor] | None, counts: Sequence[int]) -> list[torch.Tensor]:
        """fp32 `[n, V]` of each batch on all ranks, of which `counts` has the n."""
        if hidden is not None:
            assert self._head is not None
            found = [self._from_last(logits) for logits in self._head.logits(hidden)]
        else:
            found = [self._from_last(torch.empty(count, self.vocab_size, device=self.device)) for count in counts]
        self.source.check_finite(found)
        return found

    def _from_last(self, values: torch.Tensor) -> torch.Tensor:
        """The last pipeline stage's values, which others have room for."""
        if self._pipeline_group is not None:
            dist.broadcast(values, group=self._pipeline_group, group_src=self._pipeline_group.size() - 1)
        return values

    def _find_stages(self, num_layers: int) -> list[_Stage]:
        """Runs of layers that one pipeline rank holds, in the order of the model; with virtual stages a rank has
        several."""
        if self._pipeline_group is None:
            return [_Stage(range(num_layers), True, None, None)]
        rank = self._pipeline_group.rank()
        held: list[list[int] | None] = [None] * self._pipeline_group.size()
        dist.all_gather_object(held, sorted(self._layers), group=self._pipeline_group)
        owner = {layer: i for i, layers in enumerate(held) for layer in layers or []}
        runs = [(who, list(layers)) for who, layers in groupby(range(num_layers), owner.__getitem__)]
        comes_from = [None, *(who for who, _ in runs[:-1])]
        goes_to = [*(who for who, _ in runs[1:]), None]
        return [
            _Stage(layers, who == rank, before, after)
            for (who, layers), before, after in zip(runs, comes_from, goes_to, strict=True)
        ]


def _norm_if_there(weights: dict[str, torch.Tensor], name: str, config: Config) -> Apply | None:
    return norm(weights, name, config) if f"{name}.weight" in weights else None
