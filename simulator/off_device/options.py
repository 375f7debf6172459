"""Where a config's experts might lie and in which order its passes might come: what each takes, moves and would cost.

A weight that crosses the link serves the tokens of its expert until it leaves its slot. Where these are fewer than the
break-even, the link takes longer than the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from configs import derived
from configs.keys import get
from configs.rules import first_problem
from configs.schema import Config
from optim.arrangement.arrange import Arrangement, Capacity
from optim.arrangement.traffic import ExpertTraffic, Moved, expert_traffic
from simulator.clock.hardware import Hardware
from simulator.clock.predict import predict_step
from simulator.clock.stages import rates
from simulator.parameters import places
from simulator.search.space import with_keys
from simulator.sizes import FP32
from simulator.tiers import TierPlan

WEIGHTS, ORDER, STATE = "moe.weights_device", "training.pass_order", "optimizer.state_device"
BELOW = {"host": ("host", "disk"), "disk": ("disk",)}  # tiers of state by that of the weights
DAY = 86400.0


@dataclass(frozen=True)
class ExpertOption:
    """One way to keep experts. Bytes are one rank's in a step, of the stage that moves most; `moved`: of experts,
    `read` and `written`: of the disk with all optimizer state there; `tokens` that an expert's weights serve between
    two transfers, and `break_even`, from which on the link takes no longer than the forward pass's products."""

    values: dict[str, Any]  # of WEIGHTS, ORDER and STATE
    is_own: bool  # the config's own
    device: int  # bytes of experts' weights and gradients on the device
    tokens: float
    break_even: float | None  # None: no machine is known, or nothing is moved
    moved: Moved
    read: int
    written: int
    seconds: float | None  # of a step, predicted; None: no machine is known
    ranks_of_node: int

    @property
    def written_a_day(self) -> float | None:
        """Bytes that a node's disk gets in a day of training; None where no step is predicted."""
        return self.ranks_of_node * self.written * DAY / self.seconds if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "disk_written_a_day": self.written_a_day}


def with_weights(config: Config, weights: str, order: str, moves_state: bool) -> Config | None:
    """The config with its experts there. Optimizer state that lies above the weights' tier moves to it where it may;
    where it may not there is no such config: None."""
    state = config.optimizer.state_device
    if weights in BELOW and state not in BELOW[weights]:
        if not moves_state:
            return None
        state = weights
    return with_keys(config, {WEIGHTS: weights, ORDER: order, STATE: state})


def ways(config: Config, world_size: int, moves_state: bool) -> Iterator[Config]:
    """The config with each place for experts' weights and each order of passes that the rules allow; the simplest
    first. By layer changes nothing for weights that stay."""
    for weights in ("device", "host", "disk"):
        for order in ("by_micro_batch", "by_layer"):
            changed = with_weights(config, weights, order, moves_state)
            if changed is None or (weights == "device" and order == "by_layer"):
                continue
            if may_go(changed) and first_problem(changed, world_size) is None:
                yield changed


def may_go(config: Config) -> bool:
    """Whether passes may come in the config's order: by layer needs whole layers computed again, and one stage."""
    by_layer = config.training.pass_order == "by_layer"
    return not by_layer or (config.training.recompute == "full" and config.parallel.pipeline == 1)


def tokens_between(config: Config, world_size: int) -> float:
    """Tokens that an expert computes between two transfers of its weights, with every expert equally busy."""
    moe = config.moe
    calls = derived.num_micro_batches(config, world_size) if config.training.pass_order == "by_layer" else 1
    kept = moe.top_k * derived.kept_share(config)  # of a token's assignments
    return calls * derived.tokens_per_call(config) * config.parallel.expert * kept / (moe.num_experts or 1)


def break_even(config: Config, world_size: int, hardware: Hardware) -> float:
    """Tokens of an expert whose forward products take as long as its weights' way: FLOP/s over bytes/s, times bytes of
    a weight over 2 FLOP. Ranks that keep a part each bring as much less."""
    half, of = config.training.precision != "fp32", rates(hardware, world_size)
    flops = hardware["products.half" if half else "products.fp32"]
    disk = config.moe.weights_device == "disk"
    slowest = min(of.up, of.read) if disk else of.up
    parts = derived.expert_data_parallel_size(config, world_size) if config.moe.shard_weights else 1
    return flops * derived.element_size(config) / (2 * slowest * parts) if slowest else float("inf")


def option(
    config: Config,
    world_size: int,
    hardware: Hardware | None,
    arrangements: Sequence[Arrangement | None],
    seconds: float | None,
    is_own: bool = False,
) -> ExpertOption:
    """What a checked config's experts take and move. `arrangements`: of optimizer state, of a rank of each stage;
    `seconds`: of a predicted step."""
    stages = [expert_traffic(config, world_size, stage) for stage in range(config.parallel.pipeline)]
    found = [_of_stage(config, traffic, of) for traffic, of in zip(stages, arrangements, strict=True)]
    moved, read, written, device = max(found, key=lambda each: (each[0].up + each[0].down, each[2], each[3]))
    streams = derived.streams_experts(config)
    even = break_even(config, world_size, hardware) if hardware is not None and streams else None
    ranks = 1 if hardware is None else min(int(hardware["ranks_per_node"]), world_size)
    values = {key: get(config, key) for key in (WEIGHTS, ORDER, STATE)}
    tokens = tokens_between(config, world_size)
    return ExpertOption(values, is_own, device, tokens, even, moved, read, written, seconds, ranks)


def _of_stage(config: Config, traffic: ExpertTraffic | None, tiers: Arrangement | None) -> tuple[Moved, int, int, int]:
    """(what moves of experts, bytes read from the disk and written to it, bytes of experts on the device)."""
    others = 0
    if tiers is not None:
        each = zip(tiers.sizes, tiers.tiers, tiers.ways, strict=True)
        others = sum(size for size, tier, way in each if tier == "disk" and way != "record")
    if traffic is None:
        layers = sum(derived.moe_layer_pattern(config)) // config.parallel.pipeline
        numel = (config.moe.num_experts or 0) // config.parallel.expert * derived.expert_numbers(config)
        return Moved(), others, others, layers * numel * (derived.element_size(config) + FP32)
    moved, records = traffic.total, traffic.moves.records
    device = records.weights_on_device + records.grads_on_device
    return moved, moved.read + others, moved.written + others, device


def stage_arrangements(config: Config, vocab_size: int, world_size: int) -> list[Arrangement | None]:
    """How optimizer state lies on the first rank of each stage where there is room for all."""
    stages = range(config.parallel.pipeline)
    if not derived.has_tiers(config):
        return [None for _ in stages]
    plan = TierPlan(config, vocab_size, world_size, Capacity())
    first = {place.stage: place for place in reversed(list(places(config, world_size)))}
    return [plan.of(first[stage], 0) for stage in stages]


def options(
    config: Config,
    vocab_size: int,
    world_size: int,
    hardware: Hardware | None,
    arrangements: Sequence[Arrangement | None],
    seconds: float | None,
) -> list[ExpertOption]:
    """The config's own way to keep experts first, then the others that the rules allow; [] for a model without experts.
    `arrangements`, `seconds`: the own ones."""
    if not derived.is_moe(config):
        return []
    found = [option(config, world_size, hardware, arrangements, seconds, is_own=True)]
    own = found[0].values
    for changed in ways(config, world_size, moves_state=True):
        if all(get(changed, key) == own[key] for key in (WEIGHTS, ORDER)):
            continue
        of = stage_arrangements(changed, vocab_size, world_size)
        time = None
        if hardware is not None:
            time = predict_step(changed, world_size, vocab_size, hardware, arrangements=of).seconds
        found.append(option(changed, world_size, hardware, of, time))
    return found
