"""Experts of an MoE layer in the decoder, of which only those that a token chose are computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from configs.schema import Config
from inference.decoder.linear import Apply, Group, feed_forward
from inference.decoder.step import Step
from inference.weights.rank_weights import FEED_FORWARD, layer_key
from inference.weights.source import WeightSource
from moe.router import limit_to_groups

SHARED = "mlp.shared_experts."


class DecoderExperts:
    """An MoE layer of the decoder: router, this rank's experts (only chosen ones are computed), shared expert."""

    def __init__(self, layer: int, source: WeightSource, config: Config, group: Group, expert_group: Group) -> None:
        small = source.small_of(layer)
        self.layer, self.source, self.config, self.moe = layer, source, config, config.moe
        self.router = small["mlp.router.weight"].float()
        self.bias = small["mlp.router.bias"].float() if "mlp.router.bias" in small else None
        self.expert_bias = small.get("mlp.router.expert_bias")
        self.group, self.tensor_group = expert_group, group
        self.has_shared = config.moe.shared_expert_ffn_hidden_size is not None

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        steps: Sequence[Step],
        expected: Sequence[torch.Tensor],
        expect: Callable[[Sequence[int]], None],
    ) -> list[torch.Tensor]:
        """Return the layer's outputs [T, H] for each batch of `inputs`, zero for padding.

        Each chosen expert is loaded once for all batches. expected: experts [T, k] per batch that the next MoE layer
        will probably choose; `expect` prefetches them after this layer's loads have been enqueued.
        """
        texts = [
            hidden if step.texts is None else hidden[step.texts] for hidden, step in zip(inputs, steps, strict=True)
        ]
        routed = [self.route(hidden) for hidden in texts]
        on_host = _to_host([*(chosen for _, chosen in routed), *expected])
        found = zip(texts, routed, on_host)
        batches = [_ExpertBatch(hidden, *of_batch, numbers) for hidden, of_batch, numbers in found]
        if self.source.record is not None:
            tokens = [token for step in steps for token in step.recorded_tokens or ()]
            choices = [choice for batch in batches for choice in batch.numbers.tolist()]
            self.source.record.add(self.layer, tokens, choices)
        wanted = batches[0].counts
        for batch in batches[1:]:
            wanted = dict(sorted((Counter(wanted) + Counter(batch.counts)).items()))
        fetched = self.source.experts(self.layer, wanted, lambda weights: feed_forward(weights, "", self.config, None))
        if expected:
            expect(torch.cat([each.flatten() for each in on_host[len(routed) :]]).tolist())
        for expert, apply in fetched:
            for batch in batches:
                batch.compute(expert, apply)
        outputs = [batch.sum() for batch in batches]
        if self.group is not None:
            for output in outputs:
                dist.all_reduce(output, group=self.group)
        if self.has_shared:
            key, group = layer_key(self.layer, FEED_FORWARD), self.tensor_group
            with self.source.use(key, lambda weights: feed_forward(weights, SHARED, self.config, group)) as shared:
                outputs = [output + shared(hidden) for output, hidden in zip(outputs, texts, strict=True)]
        return [
            output if step.texts is None else torch.zeros_like(hidden).index_copy_(0, step.texts, output)
            for output, hidden, step in zip(outputs, inputs, steps, strict=True)
        ]

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights (fp32) and indices of each token's experts, `[T, k]`, as Megatron-core's router does."""
        moe = self.moe
        scores = F.linear(hidden.float(), self.router, self.bias)
        if moe.router_score == "sigmoid":
            scores = scores.sigmoid()
        elif not moe.normalize_top_k:
            scores = scores.softmax(dim=1)
        ranking = scores if self.expert_bias is None else scores + self.expert_bias
        if moe.num_groups is not None and moe.group_top_k is not None:
            best = moe.group_score_top_k or moe.top_k // moe.group_top_k
            ranking = limit_to_groups(ranking, moe.num_groups, moe.group_top_k, best)
        chosen = ranking.topk(moe.top_k, dim=1).indices
        probs = scores.gather(1, chosen)
        if moe.router_score == "softmax" and moe.normalize_top_k:
            probs = probs.softmax(dim=1)
        elif moe.router_score == "sigmoid" and moe.top_k > 1:
            probs = probs / (probs.sum(dim=1, keepdim=True) + 1e-20)
        return probs * (moe.routed_scaling_factor or 1.0), chosen


def _to_host(numbers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy integer tensors `[T, k]` to the host in one transfer, so that the host waits for the device once."""
    if numbers[0].device.type == "cpu":
        return list(numbers)
    flat = torch.cat([each.flatten() for each in numbers]).cpu()
    split = flat.split([each.numel() for each in numbers])
    return [on_host.view(each.shape) for on_host, each in zip(split, numbers, strict=True)]


class _ExpertBatch:
    """The routed tokens of a batch: hidden states [T, H], weights and indices of experts, and outputs so far."""

    def __init__(self, hidden: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor, numbers: torch.Tensor) -> None:
        self.hidden, self.probs, self.chosen, self.numbers = hidden, probs, chosen, numbers
        self.outputs: dict[int, torch.Tensor] = {}
        if len(hidden) == 1:
            self.counts = dict.fromkeys(numbers[0].tolist(), 1)  # tokens of each chosen expert
            return
        counts = torch.bincount(numbers.flatten()).tolist()
        self._order = chosen.reshape(-1).argsort(stable=True)  # token-expert pairs sorted by expert
        tokens = (self._order // chosen.size(1)).split(counts)
        self._tokens = {expert: of_expert for expert, of_expert in enumerate(tokens) if counts[expert]}
        self.counts = {expert: counts[expert] for expert in self._tokens}

    def compute(self, expert: int, apply: Apply) -> None:
        """Apply an expert to the tokens of this batch that chose it, if there are any."""
        if expert in self.counts:
            self.outputs[expert] = apply(self.hidden if len(self.hidden) == 1 else self.hidden[self._tokens[expert]])

    def sum(self) -> torch.Tensor:
        """Return the weighted sum of expert outputs, [T, H], independent of the order in which experts load."""
        if len(self.hidden) == 1:
            nothing = torch.zeros_like(self.hidden)
            outputs = torch.cat([self.outputs.get(expert, nothing) for expert in self.counts])
            return torch.mm(self.probs.to(self.hidden.dtype), outputs)
        by_expert = [  # experts of other ranks contribute zeros
            self.outputs[expert] if expert in self.outputs else self.hidden.new_zeros(len(tokens), self.hidden.size(1))
            for expert, tokens in self._tokens.items()
        ]
        by_token = torch.cat(by_expert)[self._order.argsort()].view(*self.chosen.shape, -1)
        return torch.bmm(self.probs.to(self.hidden.dtype)[:, None], by_token).squeeze(1)
