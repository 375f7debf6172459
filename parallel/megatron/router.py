"""Megatron-core 0.16.1's top-k router with one of its private methods mended and one of its back doors used."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import router
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel.megatron import require_version

require_version()

# (scores [T, E], top_k, num_groups, group_top_k, Megatron's own way) -> (scores of the chosen [T, k], their numbers [T,
# k]).
Choose = Callable[[torch.Tensor, int, int | None, int | None, Callable[..., Any]], tuple[torch.Tensor, torch.Tensor]]


class TopKRouter(router.TopKRouter):
    """Megatron-core's router, whose experts `choose` picks; everything else is Megatron's."""

    # Without this each rank's first step takes a second more: Megatron compiles this sum of a map, with a bias or
    # without one.
    _apply_expert_bias = inspect.unwrap(router.TopKRouter._apply_expert_bias)

    def __init__(
        self, choose: Choose, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config, pg_collection)
        # Without this the choice is torch.topk, which a CPU takes far longer for than a kernel that knows how few are
        # wanted. Megatron has no hook for it, but asks a replayer of recorded choices first, where there is one.
        if not config.moe_enable_routing_replay:
            self.router_replay: Any = _InPlaceOfReplay(choose)


class _InPlaceOfReplay:
    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        top_k: int,
        num_groups: int | None,
        group_top_k: int | None,
        otherwise: Callable[..., Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What Megatron calls."""
        return self._choose(scores, top_k, num_groups, group_top_k, otherwise)
