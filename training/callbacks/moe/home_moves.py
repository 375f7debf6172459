"""Homes of experts change places, every so many steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from configs import derived
from moe.layer import layers_of
from moe.placement.map import Integers, PlacementMap
from moe.placement.moves import SlotMove, slot_moves, trade
from moe.placement.planners.homes import plan_homes, swapped
from optim.slices import Slice, change_state
from training.engine import Engine
from training.run import Callback, Metrics, Run

Maps = Mapping[int, PlacementMap]  # by layer of the whole model


class HomeMoves(Callback):
    """Counts each expert's tokens, and every `moe.placement.interval` steps moves homes where that pays. All ranks know
    the homes of all layers. Adds the number of experts that moved to `placement`, as `moved`.

    A checkpoint keeps the homes beside the weights, which know logical experts alone. A run that goes on with as many
    expert ranks takes them up; with others homes are in order again.
    """

    name = "home_moves"

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        homes = {str(layer): each.home_ranks.tolist() for layer, each in self._maps.items()}
        return {"expert_ranks": self._ranks, "homes": homes, "tokens": self._tokens_LE.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state

    def on_start(self, run: Run) -> None:
        experts, self._ranks = run.config.moe.num_experts or 0, run.config.parallel.expert
        layers = [number for number, is_moe in enumerate(derived.moe_layer_pattern(run.config)) if is_moe]
        self._in_order = PlacementMap(experts, self._ranks)
        self._maps: dict[int, PlacementMap] = dict.fromkeys(layers, self._in_order)
        self._tokens_LE: Integers = np.zeros((len(layers), experts), dtype=np.int64)
        # Copies pay inside a node alone where the policy has no others.
        self._ranks_per_node = self._ranks
        for layer in layers_of(run.engine.bare_chunks).values():
            assert layer.placement is not None
            self._ranks_per_node = layer.placement.limits.ranks_per_node
        self._take_up(run)

    def on_rollback(self, run: Run) -> None:
        self._take_up(run)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        assert run.result is not None and run.result.tokens_per_expert is not None
        self._tokens_LE += run.result.tokens_per_expert[list(self._maps)].numpy().astype(np.int64)
        moved = 0
        if run.progress.step % run.config.moe.placement.interval == 0:
            after = {
                layer: plan_homes(tokens_E, before, self._ranks_per_node)
                for (layer, before), tokens_E in zip(self._maps.items(), self._tokens_LE, strict=True)
            }
            moved = sum(swapped(self._maps[layer], each) for layer, each in after.items())
            self._move(run, after)
            self._tokens_LE[:] = 0
        metrics["placement"]["moved"] = moved

    def _take_up(self, run: Run) -> None:
        """The homes that the checkpoint was left with, where there are as many ranks."""
        saved, self._saved = self._saved, None
        homes, tokens_LE = dict.fromkeys(self._maps, self._in_order), np.zeros_like(self._tokens_LE)
        if saved is not None:
            tokens_LE += np.asarray(saved["tokens"], dtype=np.int64)
            if saved["expert_ranks"] == self._ranks:
                homes = {layer: self._in_order.moved_to(saved["homes"][str(layer)]) for layer in homes}
            elif any(each != sorted(each) for each in saved["homes"].values()):
                run.say(
                    f"parallel.expert is {self._ranks}, and was {saved['expert_ranks']}: experts are at home in order "
                    "again"
                )
        self._move(run, homes)
        self._tokens_LE = tokens_LE

    def _move(self, run: Run, after: Maps) -> None:
        move_homes(run.engine, self._maps, after)
        self._maps = dict(after)


@torch.no_grad()
def move_homes(engine: Engine, before: Maps, after: Maps) -> None:
    """Bring all that the homes of this rank's layers own to where they are to be: weights, masters and moments. A
    collective call, between two steps; all ranks are told of all layers."""
    if before == after:
        return
    layers = layers_of(engine.bare_chunks)
    changed = [number for number in sorted(layers) if before[number] != after[number]]
    weights: list[tuple[torch.Tensor, SlotMove]] = []
    slices: list[Slice[SlotMove]] = []
    for number in changed:
        layer = layers[number]
        for move in slot_moves(before[number], after[number], layer.ep_group.rank()):
            for parameter in layer.experts.parameters():
                numel = parameter[0].numel()
                weights.append((parameter.detach()[move.slot], move))
                slices.append(Slice(parameter, move.slot * numel, (move.slot + 1) * numel, move))
    exchange = partial(trade, engine.topology.expert.group, engine.topology.device)
    with engine.frozen_weights():
        exchange(weights)
    change_state(engine.optimizer, slices, exchange)
    for number in changed:
        layers[number].set_homes(after[number])
