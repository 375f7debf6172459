"""Decide between steps which experts migrate to other ranks, and whether the next step uses replicas."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from configs import derived
from moe.layer import layers_of
from moe.placement.cost_measurement import implausible, measure
from moe.placement.migration import Migration, exchange_tensors, num_migrated, plan_migrations, rank_migrations
from moe.placement.policy import ASSUMED, pays
from moe.placement.quotas import Costs
from moe.placement_map import Integers, PlacementMap
from optim.state import StateSlice, change_state
from parallel.owned import is_off_device
from training.engine import Engine
from training.run import Callback, Metrics, Run

Maps = Mapping[int, PlacementMap]  # by layer of the whole model


class ExpertMigration(Callback):
    """Migrates experts to other ranks every `moe.placement.interval` steps if their token counts show that it pays off.

    With policy auto, also decides after each step whether the next step uses replicas. All ranks know the experts'
    primary ranks in all layers. Adds to `placement` the number of experts that `moved` and, after migrations, `homes`:
    each expert's primary rank, by layer and expert.

    A checkpoint stores the primary ranks; its weights are stored by expert number. A resumed run restores the primary
    ranks if its number of expert parallel ranks is unchanged, and else assigns experts to ranks in order.
    """

    follows = ("ExpertPlacement",)

    name = "home_moves"

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        primaries = {str(layer): each.primary_ranks.tolist() for layer, each in self._maps.items()}
        tokens = {"tokens": self._tokens_LE.tolist(), "last_tokens": self._last_LE.tolist()}
        costs = {"costs": self._costs.as_dict(), "costs_asked": self._asked, "device": self._device}
        return {"expert_ranks": self._ranks, "homes": primaries, **tokens, **costs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state

    def on_start(self, run: Run) -> None:
        experts, self._ranks = run.config.moe.num_experts or 0, run.config.parallel.expert
        numbers = [number for number, is_moe in enumerate(derived.moe_layer_pattern(run.config)) if is_moe]
        self._in_order = PlacementMap(experts, self._ranks)
        self._maps: dict[int, PlacementMap] = dict.fromkeys(numbers, self._in_order)
        # Tokens of each expert since the last migrations, and in the last step.
        self._tokens_LE: Integers = np.zeros((len(numbers), experts), dtype=np.int64)
        self._last_LE = self._tokens_LE
        # The ranks per node are made equal on all ranks, including ranks without an MoE layer.
        layers = layers_of(run.engine.bare_chunks).values()
        nodes = [layer.placement.limits.ranks_per_node for layer in layers if layer.placement is not None]
        least = torch.tensor(min(nodes, default=self._ranks), device=run.topology.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        self._ranks_per_node = int(least)
        self._set_costs(run)
        self._restore(run)

    def _set_costs(self, run: Run) -> None:
        """Set the costs of replicas (measured or assumed, as the config says), equal on all ranks. Costs that an
        earlier start measured are kept if the device type and the number of expert parallel ranks are unchanged."""
        layers = [layer for layer in layers_of(run.engine.bare_chunks).values() if layer.placement is not None]
        self._asked, self._device = run.config.moe.placement.costs, run.topology.device.type
        self._costs = assumed = ASSUMED[self._device]
        kept, kept_asked, saved = None, "", self._saved
        if saved is not None and (saved["expert_ranks"], saved["device"]) == (self._ranks, self._device):
            kept, kept_asked = Costs.from_dict(saved["costs"]), saved["costs_asked"]
        if self._asked == "measured":
            if kept is not None and kept_asked == "measured" and implausible(kept, assumed) is None:
                how = "assumed, as the measured ones were not plausible," if kept == assumed else "measured"
                self._costs, how = kept, f"{how} at an earlier start"
            else:
                weights, topology = layers[0].experts() if layers else None, run.topology
                found = measure(weights, topology.expert.group, self._ranks_per_node, topology.device, assumed)
                if found.problem is None:
                    self._costs, how = found.costs, f"measured, an assignment takes {1e6 * found.assignment:.3g} us"
                else:
                    how = f"assumed, as the measured ones are not plausible: {found.problem}"
            run.log(f"placement costs: {_describe(self._costs)} ({how})")
        elif kept is not None and kept_asked == "measured":
            run.log(f"placement costs: {_describe(assumed)} (assumed, no longer those measured)")
        for layer in layers:
            assert layer.placement is not None
            layer.placement.costs = self._costs

    def on_rollback(self, run: Run) -> None:
        self._restore(run)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        assert run.result is not None and run.result.tokens_per_expert is not None
        self._last_LE = run.result.tokens_per_expert[list(self._maps)].numpy().astype(np.int64)
        self._tokens_LE += self._last_LE
        moved, interval = 0, run.config.moe.placement.interval
        if interval > 0 and run.progress.step % interval == 0:
            after = {
                layer: plan_migrations(tokens_E, before, self._ranks_per_node)
                for (layer, before), tokens_E in zip(self._maps.items(), self._tokens_LE, strict=True)
            }
            moved = sum(num_migrated(self._maps[layer], each) for layer, each in after.items())
            migrate_experts(run.engine, self._maps, after)
            self._maps = dict(after)
            self._tokens_LE[:] = 0
        metrics["placement"]["moved"] = moved
        if moved:
            metrics["placement"]["homes"] = [each.primary_ranks.tolist() for each in self._maps.values()]
        self._choose(run)

    def _restore(self, run: Run) -> None:
        """Restore token counts from a checkpoint, and the experts' primary ranks if the number of expert parallel ranks
        is unchanged."""
        saved, self._saved = self._saved, None
        primaries = dict.fromkeys(self._maps, self._in_order)
        tokens_LE = last_LE = np.zeros_like(self._tokens_LE)
        if saved is not None:
            tokens_LE, last_LE = (np.asarray(saved[name], dtype=np.int64) for name in ("tokens", "last_tokens"))
            if saved["expert_ranks"] == self._ranks:
                primaries = {layer: self._in_order.moved_to(saved["homes"][str(layer)]) for layer in primaries}
            elif any(each != sorted(each) for each in saved["homes"].values()):
                run.log(
                    f"parallel.expert is {self._ranks}, and was {saved['expert_ranks']}: experts are on their "
                    "initial ranks again"
                )
        migrate_experts(run.engine, self._maps, primaries)
        self._maps = dict(primaries)
        self._tokens_LE, self._last_LE = tokens_LE, last_LE
        self._choose(run)

    def _choose(self, run: Run) -> None:
        """With policy auto, decide whether the next step uses replicas."""
        if run.config.moe.placement.policy != "auto":
            return
        last, layers = dict(zip(self._maps, self._last_LE, strict=True)), layers_of(run.engine.bare_chunks)
        for number, layer in layers.items():
            assert layer.placement is not None
            layer.placement.active = pays(last[number], self._maps[number], layer.placement.costs)


class PrimariesInOrder(Callback):
    """Replaces ExpertMigration in runs without expert placement, which assign experts to ranks in order. Logs a line if
    the checkpoint had any expert on a different rank."""

    name = ExpertMigration.name

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {"homes": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state

    def on_start(self, run: Run) -> None:
        if any(each != sorted(each) for each in self._saved["homes"].values()):
            policy, ranks = run.config.moe.placement.policy, run.config.parallel.expert
            run.log(
                f"moe.placement.policy is {policy} and parallel.expert {ranks}: experts that had migrated are on "
                "their initial ranks again, also for later starts"
            )


def _describe(costs: Costs) -> str:
    return (
        f"{costs.expert_overhead} assignments for the overhead per expert, {costs.replica_in_node} for a replica "
        f"inside a node and {costs.replica_between} between nodes, {costs.grad_in_node} and {costs.grad_between} for "
        "its gradient"
    )


@torch.no_grad()
def migrate_experts(engine: Engine, before: Maps, after: Maps) -> None:
    """Migrate the experts whose primary ranks differ between `before` and `after`: send their weights, fp32 master
    weights and moments. A collective call between two steps. Both maps have all MoE layers on all ranks."""
    if before == after:
        return
    layers = layers_of(engine.bare_chunks)
    changed = [number for number in sorted(layers) if before[number] != after[number]]
    weights: list[tuple[torch.Tensor, Migration]] = []
    slices: list[StateSlice[Migration]] = []
    for number in changed:
        layer = layers[number]
        for migration in rank_migrations(before[number], after[number], layer.ep_group.rank()):
            for parameter in layer.experts.parameters():
                numel, expert_slot = parameter[0].numel(), migration.expert_slot
                if not is_off_device(parameter):  # else the weights are sent with their state
                    weights.append((parameter.detach()[expert_slot], migration))
                slices.append(StateSlice(parameter, expert_slot * numel, (expert_slot + 1) * numel, migration))
    exchange = partial(exchange_tensors, engine.topology.expert.group, engine.topology.device)
    with engine.frozen_weights():
        exchange(weights)
    change_state(engine.optimizer, slices, exchange)
    for number in changed:
        layers[number].set_primaries(after[number])
