"""Possible offload targets of a config's experts and orders of its passes, with the memory, traffic and time of each.

A weight that is copied to the device computes the tokens of its expert until another weight replaces it. With fewer
tokens than the break-even, the copy takes longer than the matmuls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from configs import derived
from configs.job import Job
from configs.keys import get
from configs.rules import first_problem
from configs.schema import Config
from optim.arrangement.buckets import Arrangement, Capacity
from optim.arrangement.experts import BytesMoved, ExpertTraffic, expert_traffic
from simulator.clock.hardware import Hardware
from simulator.clock.predict import predict_step
from simulator.clock.stages import rates
from simulator.memory import RankMemory
from simulator.offload.state import stage_arrangements
from simulator.search.space import with_keys
from simulator.sizes import FP32, format_size, format_table

WEIGHTS, ORDER, STATE = "moe.weights_device", "training.pass_order", "optimizer.state_device"
BELOW = {"host": ("host", "disk"), "disk": ("disk",)}  # targets of state by that of the weights
DAY = 86400.0


@dataclass(frozen=True)
class ExpertOption:
    """An offload target for experts with an order of passes, and its traffic in the busiest pipeline stage.

    Bytes are per rank and step. `moved`: of experts; `read`, `written`: of experts and optimizer state on the disk.
    `tokens`: per expert between two transfers of its weights. `break_even`: number of tokens for which the transfer
    takes as long as the forward matmuls.
    """

    values: dict[str, Any]  # of WEIGHTS, ORDER and STATE
    is_own: bool  # the config has these values
    device: int  # bytes of experts' weights and gradients on the device
    tokens: float
    break_even: float | None  # None: no machine is known, or nothing is moved
    moved: BytesMoved
    read: int
    written: int
    seconds: float | None  # of a step, predicted; None: no machine is known
    ranks_of_node: int

    @property
    def written_a_day(self) -> float | None:
        """Bytes written to a node's disk in a day of training; None if no step is predicted."""
        return self.ranks_of_node * self.written * DAY / self.seconds if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        """Return this offload target with its traffic as a dict for JSON."""
        return {**asdict(self), "disk_written_a_day": self.written_a_day}


def expert_candidates(config: Config, world_size: int, moves_state: bool) -> Iterator[Config]:
    """Yield the config with each allowed device for expert weights and order of passes, simplest first.

    Weights on the device have only one order, because the layer-wise order makes no difference.
    """
    for weights in ("device", "host", "disk"):
        state = config.optimizer.state_device
        if weights in BELOW and state not in BELOW[weights]:  # on a faster target than the weights'
            if not moves_state:
                continue
            state = weights
        for order in ("by_micro_batch", "by_layer"):
            if weights == "device" and order == "by_layer":
                continue
            changed = with_keys(config, {WEIGHTS: weights, ORDER: order, STATE: state})
            # Layer-wise passes recompute whole layers, in one pipeline stage.
            is_allowed = changed.training.recompute == "full" and changed.parallel.pipeline == 1
            if (order != "by_layer" or is_allowed) and first_problem(changed, world_size) is None:
                yield changed


def tokens_between(config: Config, world_size: int) -> float:
    """Return the tokens that an expert computes between two transfers of its weights, under an even load."""
    moe = config.moe
    calls = derived.num_micro_batches(config, world_size) if config.training.pass_order == "by_layer" else 1
    kept = moe.top_k * derived.kept_share(config)  # of a token's assignments
    return calls * derived.tokens_per_call(config) * config.parallel.expert * kept / (moe.num_experts or 1)


def break_even(config: Config, world_size: int, hardware: Hardware) -> float:
    """Return the number of tokens per expert for which the forward matmuls take as long as copying the weights.

    This is FLOP/s divided by bytes/s, times bytes of a weight over 2 FLOP. Ranks that keep a shard copy only the shard.
    """
    half, of = config.training.precision != "fp32", rates(hardware, world_size)
    flops = hardware["products.half" if half else "products.fp32"]
    disk = config.moe.weights_device == "disk"
    slowest = min(of.up, of.read) if disk else of.up
    num_shards = derived.expert_data_parallel_size(config, world_size) if config.moe.shard_weights else 1
    return flops * derived.element_size(config) / (2 * slowest * num_shards) if slowest else float("inf")


def expert_option(
    config: Config,
    world_size: int,
    hardware: Hardware | None,
    arrangements: Sequence[Arrangement | None],
    seconds: float | None,
    is_own: bool = False,
) -> ExpertOption:
    """Return the memory, traffic and time of a validated config's experts.

    `arrangements`: of offloaded optimizer state on one rank of each pipeline stage; `seconds`: predicted per step.
    """
    stages = [expert_traffic(config, world_size, stage) for stage in range(config.parallel.pipeline)]
    found = [_of_stage(config, traffic, of) for traffic, of in zip(stages, arrangements, strict=True)]
    moved, read, written, device = max(found, key=lambda each: (each[0].up + each[0].down, each[2], each[3]))
    streams = derived.streams_experts(config)
    even = break_even(config, world_size, hardware) if hardware is not None and streams else None
    ranks = 1 if hardware is None else min(int(hardware["ranks_per_node"]), world_size)
    values = {key: get(config, key) for key in (WEIGHTS, ORDER, STATE)}
    tokens = tokens_between(config, world_size)
    return ExpertOption(values, is_own, device, tokens, even, moved, read, written, seconds, ranks)


def _of_stage(
    config: Config, traffic: ExpertTraffic | None, arrangement: Arrangement | None
) -> tuple[BytesMoved, int, int, int]:
    """Return a stage's expert traffic, bytes read from and written to the disk, and device bytes of experts."""
    others = 0
    if arrangement is not None:
        buckets = zip(arrangement.sizes, arrangement.targets, arrangement.engines, strict=True)
        others = sum(size for size, target, engine in buckets if target == "disk" and engine != "record")
    if traffic is None:
        layers = sum(derived.moe_layer_pattern(config)) // config.parallel.pipeline
        numel = (config.moe.num_experts or 0) // config.parallel.expert * derived.expert_numel(config)
        return BytesMoved(), others, others, layers * numel * (derived.element_size(config) + FP32)
    moved, records = traffic.total, traffic.layer.records
    device = records.weights_on_device + records.grads_on_device
    return moved, moved.read + others, moved.written + others, device


def expert_options(
    job: Job, hardware: Hardware | None, arrangements: Sequence[Arrangement | None], seconds: float | None
) -> list[ExpertOption]:
    """Return the offload targets of experts with their traffic: the config's own, then others that the rules allow.

    `arrangements` (of offloaded optimizer state) and `seconds` (of a step) belong to the config's own target. [] for a
    model without experts.
    """
    config, world_size = job.config, job.world_size
    if not derived.is_moe(config):
        return []
    found = [expert_option(config, world_size, hardware, arrangements, seconds, is_own=True)]
    own = found[0].values
    for changed in expert_candidates(config, world_size, moves_state=True):
        if all(get(changed, key) == own[key] for key in (WEIGHTS, ORDER)):
            continue
        other = replace(job, config=changed)
        of = stage_arrangements(other, Capacity())
        time = None if hardware is None else predict_step(other, hardware, arrangements=of).seconds
        found.append(expert_option(changed, world_size, hardware, of, time))
    return found


HEADINGS = "weights passes state device tokens break-even up down read written step".split() + ["TB a day"]


def format_expert_options(found: Sequence[ExpertOption], memory: Sequence[RankMemory]) -> str:
    """Return the offload targets of experts as a table for the plan; "" if experts cannot be offloaded."""
    if len(found) < 2 and not any(each.moved.up for each in found):
        return ""
    own = found[0]
    lines = [
        "Experts by the offload target of their weights (bytes of one rank per step; the first line is this run's):",
        format_table(HEADINGS, [_row(each) for each in found]),
        "  tokens: per expert, between two transfers of its weights; below the break-even, the link is slower.",
        *_format_kept(memory),
    ]
    if own.written_a_day:
        lines.append(f"  This run writes {own.written_a_day / 1e12:.3g} TB per day to a node's disk.")
    elif own.written and own.seconds is None:
        lines.append(
            f"  This run writes {format_size(own.written)} per rank and step to the disk; with hardware=NAME, the plan "
            "says how much per day."
        )
    return "\n".join(lines)


def _row(of: ExpertOption) -> list[str]:
    day = of.written_a_day
    return [
        *(str(of.values[key]) for key in (WEIGHTS, ORDER, STATE)),
        format_size(of.device),
        f"{of.tokens:,.0f}",
        "" if of.break_even is None else f"{of.break_even:,.0f}",
        *(format_size(number) if number else "" for number in (of.moved.up, of.moved.down, of.read, of.written)),
        "" if of.seconds is None else f"{of.seconds:.3g} s",
        "" if not day else f"{day / 1e12:.3g}",
    ]


def _format_kept(memory: Sequence[RankMemory]) -> list[str]:
    """Return the lines about expert bytes on device, host and disk, for the rank with the most of them."""
    found = [rank.experts for rank in memory if rank.experts is not None]
    if not found:
        return []
    most = max(found, key=lambda records: records.weights_kept + records.grads_kept)
    lines = []
    for target, sizes in most.bytes_by_purpose.items():
        text = ", ".join(f"{purpose} {format_size(number)}" for purpose, number in sizes.items() if number)
        if text:
            lines.append(f"  {target:<6} {format_size(sum(sizes.values())):>11}  {text}")
    shared = f"; each of {most.num_shards} ranks keeps a shard" if most.num_shards > 1 else ""
    lines.append(f"  of {most.num_layers} MoE layers, {most.weight_slots} on the device at once{shared}")
    return lines
