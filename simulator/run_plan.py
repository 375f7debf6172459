"""What a run will need, before it is launched: `python train.py plan=true`, or `plan=json` for scripts.

Everything follows from the configuration; no rank, device or data is touched. `refuse_what_cannot_fit` holds a run to
it before anything is allocated.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import derived
from configs.files import write_text
from configs.ranks import launched
from configs.rules import first_problem
from configs.schema import Config, ConfigError
from memory import host_memory
from models.blueprint import padded_vocab_size, parts
from models.huggingface import translate
from moe.placement_map import PlacementMap
from optim.arrangement.arrange import Arrangement, Capacity
from parallel.pipeline import layers_of_stage
from simulator import communication
from simulator.clock import predict as clock
from simulator.clock.hardware import Hardware
from simulator.clock.measured import measured_costs
from simulator.clock.output.words import step_as_dict
from simulator.clock.prediction import Prediction
from simulator.context.rows import Lengths, SharedRows, shared_rows
from simulator.context.sizes import layer_exchange, layouts
from simulator.flops import (
    executed_flops_per_token,
    forward_flops_per_token,
    forward_operations,
    training_flops_per_token,
)
from simulator.memory import KINDS, TOLERANCE, RankMemory, budgets_of_node, needed_budgets, over_budget, rank_memory
from simulator.off_device.choice import fitting_way
from simulator.off_device.options import ExpertOption, options
from simulator.parameters import Place, parameters, places
from simulator.tiers import left

if TYPE_CHECKING:
    import torch

PLAN_FILE = "plan.json"
GIB = 2**30
MOST_DRAWN = 20_000  # passes of all stages in a predicted step whose timeline is written


@dataclass(frozen=True)
class RunPlan:
    """A run's plan on `world_size` ranks of `device` ("cpu" or "cuda"). Memory in bytes, communication in bytes of one
    rank and step."""

    config: Config
    world_size: int
    vocab_size: int
    device: str
    total_parameters: int
    active_parameters: int
    memory: list[RankMemory]
    communication: list[dict[str, int]]  # by stage
    rooms: Capacity = Capacity()  # what a rank may use of each memory tier
    attended_share: float | None = None  # of separate documents, as simulator/flops.py has it; None: not known
    documents: Sequence[Lengths] | None = None  # their lengths in some micro-batches, where context ranks share them
    hardware: Hardware | None = None  # the machine that a step is predicted for
    step: Prediction | None = None  # of the clock, for that machine

    @functools.cached_property
    def shared(self) -> SharedRows:
        """What context ranks do with a micro-batch."""
        return shared_rows(self.config, self.documents)

    @property
    def worst(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.memory, key=lambda rank: rank.total)

    @functools.cached_property
    def expert_options(self) -> list[ExpertOption]:
        """Where experts lie, and where they might."""
        of = _of_stages(self.config, self.memory)
        seconds = None if self.step is None else self.step.seconds
        return options(self.config, self.vocab_size, self.world_size, self.hardware, of, seconds)

    @property
    def unexportable(self) -> str | None:
        """Why the model cannot be exported to Hugging Face; None where it can."""
        return translate.unexportable(self.config, self.vocab_size)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.training.global_batch_size * self.config.model.sequence_length

    @property
    def micro_batches(self) -> int:
        """How many micro-batches one rank has in a step."""
        return derived.num_micro_batches(self.config, self.world_size)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        config, padded = self.config, padded_vocab_size(self.vocab_size, self.config.parallel.tensor)
        vocab, share = self.vocab_size, self.attended_share
        return {
            "name": config.name,
            "world_size": self.world_size,
            "device": self.device,
            "vocab_size": self.vocab_size,
            "parameters": {"total": self.total_parameters, "active": self.active_parameters},
            "flops_per_token": training_flops_per_token(config, vocab, share),
            "flops": {
                "forward_per_token": forward_flops_per_token(config, vocab, share),
                "training_per_token": training_flops_per_token(config, vocab, share),
                "executed_per_token": executed_flops_per_token(config, padded, self.device, share, self.shared),
                "forward_operations": forward_operations(config, vocab),
            },
            "attended_share": share,
            "micro_batches": self.micro_batches,
            "memory_per_rank": [rank.as_dict() for rank in self.memory],
            "worst_rank": self.worst.rank,
            "layout": [
                {**asdict(place), "layers": _layers(config, place.stage), "experts": _experts(config, place)}
                for place in places(config, self.world_size)
            ],
            "communication_per_step": self.communication,
            "context": {**asdict(self.shared), "sent_in_a_layer": layer_exchange(config, self.shared)},
            "predicted_step": None
            if self.step is None or self.hardware is None
            else step_as_dict(self.step, self.hardware, self.tokens),
            "experts_off_device": [each.as_dict() for each in self.expert_options],
            "unexportable": self.unexportable,
        }


def make_plan(
    config: Config,
    world_size: int,
    vocab_size: int,
    device: str | None = None,
    device_memory: float | None = None,
    attended_share: float | None = None,
    documents: Sequence[Lengths] | None = None,
    hardware: Hardware | None = None,
) -> RunPlan:
    """The plan of a checked config. `device`: by default that of `hardware`, or where it would train if it were started
    here; `device_memory`: bytes that a GPU has; `attended_share`: of the corpus; `documents`: their lengths in some
    micro-batches of it, one list each; where they are known; `hardware`: the machine to predict a step for. Raises
    ConfigError."""
    device = device or (device_type(config) if hardware is None else hardware.kind)
    if hardware is not None and device == "cuda" and device_memory is None:
        device_memory = hardware["device.memory"]
    every = [p for of_stage in parts(config) for part in of_stage for p in parameters(config, part, vocab_size)]
    shared = shared_rows(config, documents)
    sent = communication.bytes_per_step(config, vocab_size, world_size, device, shared)
    of = rooms(config, world_size, device_memory)
    memory = rank_memory(config, vocab_size, world_size, device, rooms=of)
    costs = None if hardware is None or config.hardware is not None else measured_costs(config, device)
    measured = None if costs is None else costs[0]
    return RunPlan(
        config,
        world_size,
        vocab_size,
        device,
        sum(parameter.total for parameter in every),
        sum(parameter.active for parameter in every),
        memory,
        sent,
        of,
        attended_share,
        documents,
        hardware,
        None
        if hardware is None
        else clock.predict_step(
            config,
            world_size,
            vocab_size,
            hardware,
            attended_share=attended_share,
            shared=shared,
            arrangements=_of_stages(config, memory),
            measured=measured,
            with_spans=derived.num_micro_batches(config, world_size) * config.parallel.pipeline <= MOST_DRAWN,
        ),
    )


def _of_stages(config: Config, memory: Sequence[RankMemory]) -> list[Arrangement | None]:
    """How optimizer state is arranged on the first rank of each stage."""
    first = {rank.stage: rank.tiers for rank in reversed(memory)}
    return [first[stage] for stage in range(config.parallel.pipeline)]


def rooms(config: Config, world_size: int, device_memory: float | None) -> Capacity:
    """Bytes of each tier that a rank may take: `training.memory_limit_gib`, or the most of `device_memory`; the
    budgets, or a share of what is free. Nothing is known of the host and disk of ranks that were not started here."""
    host, disk = budgets_of_node(config, world_size)
    device = math.inf if device_memory is None else device_memory * (1 - TOLERANCE)
    if config.training.memory_limit_gib is not None:
        device = config.training.memory_limit_gib * GIB
    return Capacity(device, host.limit, 0.0 if config.memory.disk_dir is None else disk.limit)


def room_beside(rank: RankMemory, of: Capacity) -> float:
    """Bytes of a rank's device that optimizer state may take."""
    return left(of, rank.total - rank.optimizer).device


def device_type(config: Config) -> str:
    """`training.device`, or what this machine has."""
    if config.training.device != "auto":
        return config.training.device
    return "cuda" if _has_cuda() else "cpu"


def _has_cuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False  # without a driver torch, whose import takes seconds, need not be asked
    import torch

    return torch.cuda.is_available()


def write(plan: RunPlan, run_dir: Path) -> None:
    """Leave the plan beside the run's metrics, for those who compare."""
    write_text(run_dir / PLAN_FILE, json.dumps(plan.as_dict()))


# ---------------------------------------------------------------------------------------------------------------------
# What fits
# ---------------------------------------------------------------------------------------------------------------------


def refuse_what_cannot_fit(plan: RunPlan, device: torch.device | None = None) -> None:
    """Raise ConfigError if a rank needs more than `training.memory_limit_gib`, or clearly more than its GPU has, or if
    no memory tier holds its optimizer state: with what would do, all of it at once."""
    config, limit, slack = plan.config, math.inf, 1.0
    if config.training.memory_limit_gib is not None:
        limit = config.training.memory_limit_gib * GIB
    elif device is not None and device.type == "cuda":
        import torch

        limit, slack = float(torch.cuda.get_device_properties(device).total_memory), 1 - TOLERANCE
    elif plan.hardware is not None and plan.device == "cuda":
        limit, slack = plan.hardware["device.memory"], 1 - TOLERANCE
    most = limit / slack
    needs = needed_budgets(config, plan.vocab_size, plan.world_size, plan.device, plan.memory, plan.rooms, most)
    if needs is not None:
        plan = replace(plan, rooms=needs.rooms, memory=needs.memory)
    if plan.worst.total > most:
        raise ConfigError(out_of_memory(plan, limit, "" if needs is None else needs.keys))
    if needs is not None:
        raise ConfigError(needs.refusal)


def refuse_what_the_host_cannot_hold(plan: RunPlan) -> None:
    """Raise ConfigError if this node's ranks, as their launcher's environment names them, clearly need more than its
    memory has left.

    For ranks on CPUs; to be asked before any of them takes what it needs.
    """
    launch = launched()
    first = launch.rank - (launch.local_rank or 0)
    here = plan.memory[first : first + (launch.local_world_size or plan.world_size)]
    in_tiers = sum(place.host for place in here)
    needed, limit = sum(place.total for place in here) + in_tiers, host_memory.available()
    if needed * (1 - TOLERANCE) <= limit:
        return
    kinds = ", ".join(
        f"{kind} {_size(total)}" for kind in KINDS if (total := sum(getattr(place, kind) for place in here))
    )
    kinds += f", optimizer state's tier of the host {_size(in_tiers)}" if in_tiers else ""
    fix = what_fits(plan, (limit - in_tiers) / len(here))
    advice = (
        f"Try {fix.partition(' (')[0]}"
        if fix
        else "Try a smaller model (model.num_layers, model.hidden_size), or more nodes"
    )
    ranks = "this rank needs" if len(here) == 1 else f"the {len(here)} ranks of this node need"
    layers = f"model.num_layers ({plan.config.model.num_layers}) of model.hidden_size ({plan.config.model.hidden_size})"
    raise ConfigError(
        f"{layers}: {ranks} {_size(needed)} ({kinds}), but {_size(limit)} of the host's memory are left. {advice}."
    )


def out_of_memory(plan: RunPlan, limit: float, beside: str = "") -> str:
    """One line: what is asked for, what is there, and what would fit, with the keys `beside`."""
    worst, config = plan.worst, plan.config
    kinds = ", ".join(f"{kind} {_size(getattr(worst, kind))}" for kind in KINDS if getattr(worst, kind))
    what = "training.memory_limit_gib" if config.training.memory_limit_gib is not None else "the device's memory"
    fix = what_fits(plan, limit)
    advice = (
        f"Try {beside.lstrip()}{' ' * bool(beside)}{fix}."
        if fix
        else f"No smaller micro-batch nor recomputation fits: {_more_ranks(plan, limit)}."
    )
    return (
        f"training.micro_batch_size ({config.training.micro_batch_size}) needs {_size(worst.total)} on rank "
        f"{worst.rank} ({kinds}), but {what} is {_size(limit)}. {advice}"
    )


def what_fits(plan: RunPlan, limit: float) -> str | None:
    """Overrides with which every rank stays under `limit` bytes: the largest micro-batch, recomputation, both, or more
    ranks for each sequence."""
    config, size = plan.config, plan.config.training.micro_batch_size
    if max(rank.weights + rank.gradients + rank.optimizer for rank in plan.memory) > limit:
        return None  # whatever the batch
    smaller = [
        number for number in range(size, 0, -1) if size % number == 0 or config.training.global_batch_size % number == 0
    ]
    kinds = {"none": ("none", "selective", "full"), "selective": ("selective", "full"), "full": ("full",)}[
        config.training.recompute
    ]
    for recompute in kinds:
        for number in smaller:
            changed = copy.deepcopy(config)
            changed.training.micro_batch_size, changed.training.recompute = number, recompute
            if (number, recompute) == (size, config.training.recompute) or first_problem(
                changed, plan.world_size
            ) is not None:
                continue
            memory = rank_memory(changed, plan.vocab_size, plan.world_size, plan.device, rooms=plan.rooms)
            most = max(rank.total for rank in memory)
            if most <= limit and not over_budget(memory, plan.rooms):
                fix = [f"training.micro_batch_size={number}"] if number != size else []
                fix += [f"training.recompute={recompute}"] if recompute != config.training.recompute else []
                return f"{' '.join(fix)} ({_size(most)})"
    return _wider_context(plan, limit, kinds)


def _wider_context(plan: RunPlan, limit: float, kinds: Sequence[str]) -> str | None:
    """More ranks for each sequence, with the least recomputation."""
    own = plan.config.parallel.context
    for recompute in kinds:
        asked = copy.deepcopy(plan.config)
        asked.training.recompute = recompute
        for changed in layouts(asked, plan.world_size):
            if changed.parallel.context <= own or changed.parallel.context % own:
                continue
            memory = rank_memory(changed, plan.vocab_size, plan.world_size, plan.device, rooms=plan.rooms)
            most = max(rank.total for rank in memory)
            if most <= limit and not over_budget(memory, plan.rooms):
                more = f" training.recompute={recompute}" if recompute != plan.config.training.recompute else ""
                return f"parallel.context={changed.parallel.context}{more} ({_size(most)})"
    return None


def _more_ranks(plan: RunPlan, limit: float) -> str:
    """What else would help: other tiers or more data parallel ranks hold the optimizer's state, those of a layout the
    model."""
    for tier in ("host", "disk"):
        changed = copy.deepcopy(plan.config)
        changed.optimizer.state_device = tier
        if plan.config.optimizer.state_device == "device" and first_problem(changed, plan.world_size) is None:
            memory = rank_memory(changed, plan.vocab_size, plan.world_size, plan.device, rooms=plan.rooms)
            most, on_host = max(rank.total for rank in memory), max(rank.host for rank in memory)
            if most <= limit and on_host <= plan.rooms.host and max(rank.disk for rank in memory) <= plan.rooms.disk:
                return f"optimizer.state_device={tier} would, with {_size(most)} each and {_size(on_host)} of the host"
    if way := fitting_way(plan.config, plan.world_size, plan.vocab_size, plan.device, plan.rooms, limit):
        return way
    for factor in (2, 4, 8, 16, 32, 64):
        ranks, config = factor * plan.world_size, plan.config
        if config.optimizer.distributed and first_problem(config, ranks) is None:
            most = max(
                rank.total for rank in rank_memory(config, plan.vocab_size, ranks, plan.device, rooms=plan.rooms)
            )
            if most <= limit:
                return f"{ranks} ranks would, with {_size(most)} each"
    return "give parallel.tensor, pipeline or expert more ranks"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _layers(config: Config, stage: int) -> list[int]:
    return [number for chunk in layers_of_stage(config, stage) for number in chunk]


def _experts(config: Config, place: Place) -> list[int]:
    if config.moe.num_experts is None:
        return []
    return PlacementMap(config.moe.num_experts, config.parallel.expert).experts_of(place.expert)
