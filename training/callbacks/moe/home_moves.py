"""What is decided of placement between steps: homes that change places, and whether there are to be copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from configs import derived
from moe.layer import layers_of
from moe.placement.measure import implausible, measure
from moe.placement.moves import SlotMove, slot_moves, trade
from moe.placement.planners.homes import plan_homes, swapped
from moe.placement.policy import ASSUMED, pays
from moe.placement.quotas import Costs
from moe.placement_map import Integers, PlacementMap
from optim.slices import StateSlice, change_state
from parallel.owned import is_off_device
from training.engine import Engine
from training.run import Callback, Metrics, Run

Maps = Mapping[int, PlacementMap]  # by layer of the whole model


class HomeMoves(Callback):
    """Counts each expert's tokens, and every `moe.placement.interval` steps moves homes where that pays; with policy
    auto says after each step whether the next one has copies. All ranks know the homes of all layers. Adds to
    `placement` the number of experts that `moved` and, where any did, the `homes`: by layer and expert the rank.

    A checkpoint keeps the homes beside the weights, which know logical experts alone. A run that goes on with as many
    expert ranks takes them up; with others homes are in order again.
    """

    follows = ("ExpertPlacement",)

    name = "home_moves"

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        homes = {str(layer): each.home_ranks.tolist() for layer, each in self._maps.items()}
        tokens = {"tokens": self._tokens_LE.tolist(), "last_tokens": self._last_LE.tolist()}
        costs = {"costs": asdict(self._costs), "costs_asked": self._asked, "device": self._device}
        return {"expert_ranks": self._ranks, "homes": homes, **tokens, **costs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state

    def on_start(self, run: Run) -> None:
        experts, self._ranks = run.config.moe.num_experts or 0, run.config.parallel.expert
        numbers = [number for number, is_moe in enumerate(derived.moe_layer_pattern(run.config)) if is_moe]
        self._in_order = PlacementMap(experts, self._ranks)
        self._maps: dict[int, PlacementMap] = dict.fromkeys(numbers, self._in_order)
        # Since homes last moved, and of the last step.
        self._tokens_LE: Integers = np.zeros((len(numbers), experts), dtype=np.int64)
        self._last_LE = self._tokens_LE
        # Of all ranks the same, also of those without a MoE layer.
        layers = layers_of(run.engine.bare_chunks).values()
        nodes = [layer.placement.limits.ranks_per_node for layer in layers if layer.placement is not None]
        least = torch.tensor(min(nodes, default=self._ranks), device=run.topology.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        self._ranks_per_node = int(least)
        self._reckon(run)
        self._take_up(run)

    def _reckon(self, run: Run) -> None:
        """Costs as the config asks, the same on all ranks; measured ones are those of the start that first asked."""
        layers = [layer for layer in layers_of(run.engine.bare_chunks).values() if layer.placement is not None]
        self._asked, self._device = run.config.moe.placement.costs, run.topology.device.type
        self._costs = assumed = ASSUMED[self._device]
        kept, kept_asked = self._kept_costs()
        if self._asked == "measured":
            if kept is not None and kept_asked == "measured" and implausible(kept, assumed) is None:
                how = "assumed, as none that are plausible were measured," if kept == assumed else "measured"
                self._costs, how = kept, f"{how} at an earlier start"
            else:
                weights, topology = layers[0].experts() if layers else None, run.topology
                found = measure(weights, topology.expert.group, self._ranks_per_node, topology.device, assumed)
                if found.problem is None:
                    self._costs, how = found.costs, f"measured, one takes {1e6 * found.assignment:.3g} us"
                else:
                    how = f"assumed, as those measured are not plausible: {found.problem}"
            run.say(f"placement reckons {_in_words(self._costs)} ({how})")
        elif kept is not None and kept_asked == "measured":
            run.say(f"placement reckons {_in_words(assumed)} (assumed, no longer those measured)")
        for layer in layers:
            assert layer.placement is not None
            layer.placement.costs = self._costs

    def _kept_costs(self) -> tuple[Costs | None, str]:
        """The costs that a checkpoint of as many expert ranks on such a device keeps, and what had been asked for."""
        saved = self._saved
        if saved is None or (saved["expert_ranks"], saved["device"]) != (self._ranks, self._device):
            return None, ""
        return Costs(**saved["costs"]), saved["costs_asked"]

    def on_rollback(self, run: Run) -> None:
        self._take_up(run)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        assert run.result is not None and run.result.tokens_per_expert is not None
        self._last_LE = run.result.tokens_per_expert[list(self._maps)].numpy().astype(np.int64)
        self._tokens_LE += self._last_LE
        moved, interval = 0, run.config.moe.placement.interval
        if interval > 0 and run.progress.step % interval == 0:
            after = {
                layer: plan_homes(tokens_E, before, self._ranks_per_node)
                for (layer, before), tokens_E in zip(self._maps.items(), self._tokens_LE, strict=True)
            }
            moved = sum(swapped(self._maps[layer], each) for layer, each in after.items())
            self._move(run, after)
            self._tokens_LE[:] = 0
        metrics["placement"]["moved"] = moved
        if moved:
            metrics["placement"]["homes"] = [each.home_ranks.tolist() for each in self._maps.values()]
        self._choose(run)

    def _take_up(self, run: Run) -> None:
        """The homes that the checkpoint was left with, where there are as many ranks."""
        saved, self._saved = self._saved, None
        homes = dict.fromkeys(self._maps, self._in_order)
        tokens_LE = last_LE = np.zeros_like(self._tokens_LE)
        if saved is not None:
            tokens_LE, last_LE = (np.asarray(saved[name], dtype=np.int64) for name in ("tokens", "last_tokens"))
            if saved["expert_ranks"] == self._ranks:
                homes = {layer: self._in_order.moved_to(saved["homes"][str(layer)]) for layer in homes}
            elif any(each != sorted(each) for each in saved["homes"].values()):
                run.say(
                    f"parallel.expert is {self._ranks}, and was {saved['expert_ranks']}: experts are at home in order "
                    "again"
                )
        self._move(run, homes)
        self._tokens_LE, self._last_LE = tokens_LE, last_LE
        self._choose(run)

    def _choose(self, run: Run) -> None:
        """Whether the next step has copies, where the policy leaves it open."""
        if run.config.moe.placement.policy != "auto":
            return
        last, layers = dict(zip(self._maps, self._last_LE, strict=True)), layers_of(run.engine.bare_chunks)
        for number, layer in layers.items():
            assert layer.placement is not None
            layer.placement.active = pays(last[number], self._maps[number], layer.placement.costs)

    def _move(self, run: Run, after: Maps) -> None:
        move_homes(run.engine, self._maps, after)
        self._maps = dict(after)


class HomesInOrder(Callback):
    """In place of HomeMoves where nothing places experts: homes are in order, and a checkpoint's others are left. Says
    so where that changes any."""

    name = HomeMoves.name

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {"homes": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state

    def on_start(self, run: Run) -> None:
        if any(each != sorted(each) for each in self._saved["homes"].values()):
            policy, ranks = run.config.moe.placement.policy, run.config.parallel.expert
            run.say(
                f"moe.placement.policy is {policy} and parallel.expert {ranks}: experts that had moved are at home in "
                "order again, also for later starts"
            )


def _in_words(costs: Costs) -> str:
    return (
        f"with {costs.piece} of an expert's assignments for a piece, {costs.copy_in_node} for a copy inside a node and "
        f"{costs.copy_between} between nodes, {costs.grad_in_node} and {costs.grad_between} for its gradient"
    )


@torch.no_grad()
def move_homes(engine: Engine, before: Maps, after: Maps) -> None:
    """Bring all that the homes of this rank's layers own to where they are to be: weights, masters and moments. A
    collective call, between two steps; all ranks are told of all layers."""
    if before == after:
        return
    layers = layers_of(engine.bare_chunks)
    changed = [number for number in sorted(layers) if before[number] != after[number]]
    weights: list[tuple[torch.Tensor, SlotMove]] = []
    slices: list[StateSlice[SlotMove]] = []
    for number in changed:
        layer = layers[number]
        for move in slot_moves(before[number], after[number], layer.ep_group.rank()):
            for parameter in layer.experts.parameters():
                numel = parameter[0].numel()
                if not is_off_device(parameter):  # else they are moved with their state
                    weights.append((parameter.detach()[move.slot], move))
                slices.append(StateSlice(parameter, move.slot * numel, (move.slot + 1) * numel, move))
    exchange = partial(trade, engine.topology.expert.group, engine.topology.device)
    with engine.frozen_weights():
        exchange(weights)
    change_state(engine.optimizer, slices, exchange)
    for number in changed:
        layers[number].set_homes(after[number])
