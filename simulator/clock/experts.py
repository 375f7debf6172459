"""A call of routed experts: moe/planning's own prediction of the schedule that the config fixes or a run would choose,
with costs made of a hardware's figures where none were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from configs import derived
from configs.schema import Config, ConfigError
from models.blueprint.operation import EXPERT
from moe.chunk_plan import LayerLoad, Plan, pass_plans
from moe.planning.costs import LayerCosts
from moe.planning.inputs import even_load, initial_plan, limits
from moe.planning.planner import Planner
from moe.planning.search import predict, unseen
from parallel.costs.models import NOTHING, Curve, Line
from simulator.clock.axes import Group, collective, exchange
from simulator.clock.hardware import Hardware
from simulator.clock.passes import PassClock, Reasons
from simulator.clock.work import BlockWork

LARGE = 2.0**40  # assignments: the second point of a straight curve
STARTED_BY_EXPERT = {"cuda": 0, "cpu": 4}  # on a card all experts of a rank are one product
STARTED_BY_CHUNK = 8


def costs_of(config: Config, hardware: Hardware, group: Group, load: LayerLoad, clock: PassClock) -> LayerCosts:
    """What a layer's operations should take."""
    matrices = load.hidden_columns + load.width
    element, experts = load.element_size, (config.moe.num_experts or 1) // config.parallel.expert
    rate, each = hardware["device.rate"], hardware["device.operation"]
    host = min(1.0, hardware["launch.exposed"]) * hardware["launch.operation"]
    weights = experts * load.hidden_size * matrices * element / rate
    operations = STARTED_BY_CHUNK + experts * STARTED_BY_EXPERT[hardware.kind]

    def product(columns: float) -> Curve:
        """Over assignments: `columns` of each with the hidden state."""
        flops = 2.0 * load.hidden_size * columns / clock.products
        moved = (load.hidden_size + 2 * columns) * element / rate
        fixed = weights * columns / matrices + operations * (each + host)
        return Curve((1.0, LARGE), (fixed, fixed + LARGE * (flops + moved)))

    start, a_byte = exchange(hardware, group)
    rows = load.hidden_size * element / rate
    moving = Line(2 * (each + host), 2 * rows)
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
    """Calls of a config's MoE layers, by stage and what the shared expert does."""

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
        """Seconds of both passes by reason; what is not computing is waiting for expert ranks.

        Raises ConfigError if no plan fits moe.memory_budget, as the run does.
        """
        costs = self.costs
        if not self.measured:
            forward, backward = (sum(self.clock.of(each).values()) for each in work.shared_expert)
            costs = replace(costs, shared_forward=forward, shared_backward=backward)
        plan = self._plan(costs, stage)
        both = predict(costs, self.load, plan)
        alone = predict(replace(costs, exchange=NOTHING, count_exchange=0.0), self.load, plan)
        # What the schedule's simulation is known to see too little of: a wait of ranks for each other.
        longer = 1.0 + unseen(pass_plans(plan)[1]) * (self.group.size > 1)
        return (
            self._by_reason(both.forward, alone.forward),
            self._by_reason(longer * both.backward, alone.backward),
        )

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
        return Reasons({"products": alone, f"expert:{self.group.place}": seconds - alone})
