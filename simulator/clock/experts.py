"""Seconds of the routed experts of an MoE layer, predicted by moe/planning for the configured or the chosen chunk plan.

Costs of operations are measured (from the cache of moe/planning) or derived from the hardware's figures.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from configs import derived
from configs.schema import Config
from models.blueprint.operation import EXPERT
from moe.chunk_plan import LayerLoad, Plan, pass_plans
from moe.planning.costs import LayerCosts
from moe.planning.inputs import even_load, initial_plan, layer_shape, limits
from moe.planning.planner import Planner, predict, unseen
from parallel.costs.cache_files import read_cache
from parallel.costs.models import NOTHING, Curve, Line
from simulator.clock.axes import Group, collective, exchange
from simulator.clock.hardware import Hardware
from simulator.clock.passes import BlockWork, PassClock, Reasons

LARGE = 2.0**40  # assignments: second point of a linear curve
STARTED_PER_EXPERT = {"cuda": 0, "cpu": 4}  # operations; on a GPU all experts of a rank are one matmul
STARTED_PER_CHUNK = 8
TORCH_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}  # names in the cache


def costs_of(config: Config, hardware: Hardware, group: Group, load: LayerLoad, clock: PassClock) -> LayerCosts:
    """Estimate the seconds of an MoE layer's operations from the hardware's figures, as functions of their size.

    `load`: sizes and assignments of the layer. `clock`: rates of matmuls.
    """
    matrices = load.hidden_columns + load.width
    element, experts = load.element_size, (config.moe.num_experts or 1) // config.parallel.expert
    rate, each = hardware["device.rate"], hardware["device.operation"]
    host = min(1.0, hardware["launch.exposed"]) * hardware["launch.operation"]
    weights = experts * load.hidden_size * matrices * element / rate
    operations = STARTED_PER_CHUNK + experts * STARTED_PER_EXPERT[hardware.kind]

    def product(columns: float) -> Curve:
        """Return the seconds of a matmul with `columns` weight columns, as a curve over its number of token rows."""
        flops = 2.0 * load.hidden_size * columns / clock.products
        moved = (load.hidden_size + 2 * columns) * element / rate
        fixed = weights * columns / matrices + operations * (each + host)
        return Curve((1.0, LARGE), (fixed, fixed + LARGE * (flops + moved)))

    start, a_byte = exchange(hardware, group)
    per_row = load.hidden_size * element / rate
    moving = Line(2 * (each + host), 2 * per_row)
    sorting = Line(6 * (each + host), 8 * 8 / rate)
    counts = collective(hardware, "all_gather", group, 8.0 * (config.moe.num_experts or 1) * group.size)
    return LayerCosts(
        exchange=Line(start, a_byte),
        gather=moving if group.size > 1 else NOTHING,
        combine_sum=moving,
        forward=product(matrices),
        recompute=product(load.hidden_columns),
        input_gradients=product(matrices),
        weight_gradients=product(matrices),
        prepare=sorting,
        copy_out=Line(each, 1 / hardware["host.down"]),
        copy_in=Line(each, 1 / hardware["host.up"]),
        count_exchange=counts + 6 * (each + host),
        copies_by_program=hardware.kind == "cpu",
    )


class ExpertCalls:
    """Predicts the seconds of one call of an MoE layer's routed experts."""

    def __init__(
        self,
        config: Config,
        world_size: int,
        hardware: Hardware,
        groups: Mapping[str, Group],
        clock: PassClock,
        measured: LayerCosts | None = None,
    ) -> None:
        self.config, self.world_size, self.group = config, world_size, groups[EXPERT]
        self.hardware, self.clock = hardware, clock
        self.load = even_load(config, hardware.kind)
        self.measured = measured is not None
        self.costs = measured or costs_of(config, hardware, self.group, self.load, clock)

    def of(self, work: BlockWork, stage: int) -> tuple[Reasons, Reasons]:
        """Predict the seconds of an MoE layer's (forward, backward) pass by reason.

        The reasons are computing and waiting for expert ranks. `work`: the layer's operations, of which the shared
        expert runs during the all-to-alls. `stage`: pipeline stage, for its memory limit. Raises ConfigError if no
        number of chunks fits moe.memory_budget.
        """
        costs = self.costs
        if not self.measured:
            forward, backward = (sum(self.clock.of(each).values()) for each in work.shared_expert)
            costs = replace(costs, shared_forward=forward, shared_backward=backward)
        plan = self._plan(costs, stage)
        both = predict(costs, self.load, plan)
        alone = predict(replace(costs, exchange=NOTHING, count_exchange=0.0), self.load, plan)
        # The simulated schedule underestimates how long ranks wait for each other.
        longer = 1.0 + unseen(pass_plans(plan)[1]) * (self.group.size > 1)
        return self._by_reason(both.forward, alone.forward), self._by_reason(longer * both.backward, alone.backward)

    def _plan(self, costs: LayerCosts, stage: int) -> Plan:
        if not derived.plans_moe(self.config):
            return initial_plan(self.config)
        chosen = limits(self.config, self.hardware.kind, self.world_size, stage)
        try:
            return Planner(costs, chosen).decide(self.load).plan
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _by_reason(self, seconds: float, alone: float) -> Reasons:
        alone = min(seconds, alone)
        return Reasons({"products": alone, f"expert:{self.group.link}": seconds - alone})


def measured_costs(config: Config, device: str) -> tuple[LayerCosts, str] | None:
    """Return the newest measured costs of this config's MoE layers, and their device; None if nothing was measured."""
    if not derived.is_moe(config):
        return None
    shared = (config.moe.shared_expert_ffn_hidden_size or 0) // config.parallel.tensor
    wanted = {
        "shape": layer_shape(config, device).as_key(),
        "dtype": TORCH_DTYPES[config.training.precision],
        "activation": config.model.activation,
        "bias": config.model.linear_bias,
        "shared_width": shared,
        "group_size": config.parallel.expert,
    }
    files = sorted(
        Path(config.data.cache_dir, "costs").glob("costs_*.json"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    for path in files:
        try:
            key: dict[str, Any] = json.loads(path.read_text())["key"]
        except (OSError, ValueError, KeyError, TypeError):
            logging.getLogger(__name__).warning("cannot read measured costs from %s", path)
            continue
        if not isinstance(key, dict) or any(key.get(name) != value for name, value in wanted.items()):
            continue
        values = read_cache(path, key)
        if values is not None:
            hardware = key.get("gpu") or key.get("processor") or key.get("device")
            return LayerCosts.from_dict(values), f"{hardware}, {key.get('threads')} thread(s)"
    return None


def measured_rates(config: Config, device: str) -> tuple[float, float] | None:
    """Return the measured bytes/s of an all-to-all and FLOP/s of the experts' matmuls; None if nothing was measured."""
    found = measured_costs(config, device)
    if found is None:
        return None
    layer, load = found[0], layer_shape(config, device).even()
    matrices = 3 if config.model.activation == "swiglu" else 2
    flops = 2 * matrices * load.hidden_size * load.width * load.assignments
    return 1 / layer.exchange.beta, flops / layer.forward(load.assignments)
