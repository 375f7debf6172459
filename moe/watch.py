"""Statistics of the routers per layer: tokens per expert, entropy and auxiliary losses.

Tokens per expert are the tokens that experts compute, without tokens that exceed a capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from moe.router import Router

# Megatron's tracker names -> ours. Under sequence and context parallelism, each rank has other tokens; the sum over
# these ranks is then the load-balancing loss, and their mean is the z-loss.
LOSSES = {"load_balancing_loss": "aux_loss", "seq_load_balancing_loss": "sequence_aux_loss", "z_loss": "z_loss"}
# With fewer experts than vector lanes, a CPU's softmax over the last dimension is not vectorized.
FEW_EXPERTS = 16


@dataclass(frozen=True)
class RouterReport:
    """Statistics of all routers in a step. Entries of dense layers are zero."""

    tokens_per_expert: torch.Tensor  # [num_layers, num_experts]
    entropy: torch.Tensor  # [num_layers], nats, summed over tokens
    losses: dict[str, torch.Tensor]  # [num_layers] each, summed over micro-batches and ranks


class RouterWatch:
    """A collector of router statistics over a step's training passes, on the device and without communication.

    `take` returns a flat float64 tensor: [num_layers * num_experts] tokens per expert (rows of dense layers and of
    layers on other ranks are zero), [num_layers] entropies, then [num_losses * num_layers] losses summed over
    micro-batches. Its sum over all ranks of the job has the statistics of the step. `losses`: the names of the
    auxiliary losses in order.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        num_layers: int,
        num_experts: int,
        losses: Sequence[str],
        device: torch.device,
    ):
        self.num_layers, self.num_experts, self.losses = num_layers, num_experts, list(losses)
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        self._entropy = torch.zeros(num_layers, dtype=torch.float64, device=device)
        self._counts_of, self._entropy_of = self._counts.unbind(), self._entropy.unbind()  # by layer
        for module in (each for chunk in chunks for each in chunk.modules() if isinstance(each, Router)):
            module.register_forward_hook(self._count)
            module.watch = self._watch  # Megatron builds the router from its spec

    def _count(self, router: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        # Without gradients it is an evaluation, or the first of two passes under recompute.
        if torch.is_grad_enabled():
            self._counts_of[router.layer_number - 1].add_(output[1].sum(dim=0))

    def _watch(self, layer: int, logits: torch.Tensor, score_function: str) -> None:
        self._entropy_of[layer].add_(entropy(logits, score_function))

    def take(self) -> torch.Tensor:
        """Return this rank's statistics since the last call as one flat float64 tensor, and reset them."""
        tracker = get_moe_layer_wise_logging_tracker()
        statistics = [self._counts.flatten(), self._entropy]
        for name in self.losses:
            entry = tracker.get(next(theirs for theirs, ours in LOSSES.items() if ours == name))
            values = self._counts.new_zeros(self.num_layers) if entry is None else entry["values"]
            statistics.append(values.to(self._counts.dtype))
        flat = torch.cat(statistics)
        self._counts.zero_()
        self._entropy.zero_()
        for entry in tracker.values():
            entry["values"].zero_()
        return flat

    def split(self, flat: torch.Tensor) -> RouterReport:
        """Split the flat tensor of a step's statistics, summed over ranks, into a report."""
        sizes = self.num_layers * self.num_experts, self.num_layers, len(self.losses) * self.num_layers
        counts, entropies, losses = flat.split(sizes)
        by_name = dict(zip(self.losses, losses.view(len(self.losses), self.num_layers), strict=True))
        return RouterReport(counts.view(self.num_layers, self.num_experts), entropies, by_name)


def router_metrics(
    report: RouterReport, layers: torch.Tensor, tokens: int, micro_batches: int, top_k: int, num_holders: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return a step's router metrics by name: lists with an entry per MoE layer, and each loss's mean over MoE layers.

    `layers` [num_layers] is the mask of MoE layers. `tokens` and `micro_batches`: their numbers in the global batch.
    `num_holders`: the number of ranks that share a micro-batch's tokens, tensor times context parallel size.
    """
    kept = report.tokens_per_expert[layers].sum(dim=1)
    per_layer: dict[str, list[float]] = {
        "dropped_tokens": (tokens * top_k - kept).long().tolist(),
        "router_entropy": (report.entropy[layers] / tokens).tolist(),
    }
    means = {}
    for name, values in report.losses.items():
        ranks = num_holders if name == "z_loss" else 1
        per_layer[name] = (values[layers] / (micro_batches * ranks)).tolist()
        means[name] = float(values.sum() / (layers.sum() * micro_batches * ranks))
    return per_layer, means


def entropy(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """Return the entropy, in nats, of tokens' scores over all experts, summed over the tokens of `logits` [..., E].

    The result is a 0-d fp32 tensor. One token contributes from 0 (one expert has all the probability) to log(E).
    Sigmoid scores are divided by their sum, as in the load-balancing loss.
    """
    log_scores = torch.nn.functional.logsigmoid(logits.float()) if score_function == "sigmoid" else logits.float()
    experts = -1
    if logits.size(-1) < FEW_EXPERTS and logits.device.type == "cpu":
        log_scores, experts = log_scores.flatten(0, -2).t().contiguous(), 0
    log_probs = torch.log_softmax(log_scores, dim=experts).flatten()
    return -torch.dot(log_probs.exp(), log_probs)
