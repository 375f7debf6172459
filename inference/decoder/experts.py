"""The experts of an MoE layer; only those that a token chose are computed."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from configs.schema import Config
from inference.decoder.linear import Group, Weights, feed_forward
from moe.router import limit_to_groups


class DecoderExperts:
    """The router's choice, the experts of this rank for the tokens that chose them, and the shared expert."""

    def __init__(self, weights: Weights, config: Config, group: Group, expert_group: Group) -> None:
        self.moe = config.moe
        self.router = weights["mlp.router.weight"].float()
        self.bias = weights["mlp.router.bias"].float() if "mlp.router.bias" in weights else None
        self.expert_bias = weights.get("mlp.router.expert_bias")
        held = {int(name.split(".")[2]) for name in weights if name.startswith("mlp.experts.")}
        self.experts = {
            expert: feed_forward(weights, f"mlp.experts.{expert}.", config, None) for expert in sorted(held)
        }
        self.group = expert_group
        has_shared = "mlp.shared_experts.linear_fc1.weight" in weights
        self.shared = feed_forward(weights, "mlp.shared_experts.", config, group) if has_shared else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        probs, chosen = self.route(hidden)
        if len(hidden) == 1:
            output = torch.zeros_like(hidden)
            for expert, weight in zip(chosen[0].tolist(), probs[0].tolist(), strict=True):
                if expert in self.experts:
                    output.add_(self.experts[expert](hidden), alpha=weight)
        else:
            output = self._all_tokens(hidden, probs.to(hidden.dtype), chosen)
        if self.group is not None:
            dist.all_reduce(output, group=self.group)
        return output if self.shared is None else output + self.shared(hidden)

    def _all_tokens(self, hidden: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)  # assignments, by expert
        counts = torch.bincount(flat, minlength=self.moe.num_experts or 0).tolist()
        rows = hidden[order // chosen.size(1)].split(counts)
        outputs = [
            self.experts[expert](part) if expert in self.experts else torch.zeros_like(part)
            for expert, part in enumerate(rows)
            if len(part)
        ]
        by_token = torch.cat(outputs)[order.argsort()].view(*chosen.shape, -1)
        return torch.bmm(probs[:, None], by_token).squeeze(1)

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (fp32) and numbers of each token's experts `[T, k]`: Megatron-core's
        topk_routing_with_score_function."""
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
