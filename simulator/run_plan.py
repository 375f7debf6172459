"""Plan of a run before its launch: memory, communication and layout (`python train.py plan=true`; `plan=json` for
scripts).

Everything is computed from the configuration, without ranks, devices or data. `refuse_what_cannot_fit` checks a run
against its plan before anything is allocated.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.errors import ConfigError
from base.files import write_text
from base.ranks import launched
from base.units import GIB
from configs import derived
from configs.job import Job
from configs.rules import first_problem
from configs.schema import Config
from memory import host_memory
from models.blueprint import model_chunks, padded_vocab_size
from models.huggingface import translate
from moe.placement_map import PlacementMap
from optim.arrangement.buckets import Capacity
from parallel.pipeline import layers_of_stage
from simulator import communication
from simulator.clock import predict as clock
from simulator.clock.experts import measured_costs
from simulator.clock.hardware import Hardware
from simulator.clock.prediction import Prediction, step_as_dict
from simulator.context.context_sizes import layer_exchange, layouts
from simulator.context.shared_rows import Lengths, SharedRows, shared_rows
from simulator.flops import (
    executed_flops_per_token,
    forward_flops_per_token,
    forward_operations,
    training_flops_per_token,
)
from simulator.memory import (
    KINDS,
    TOLERANCE,
    RankMemory,
    budgets_of_node,
    first_arrangements,
    fits,
    needed_budgets,
    rank_memory,
)
from simulator.offload.expert_choice import fitting_override
from simulator.offload.expert_options import ExpertOption, expert_options
from simulator.offload.state import remaining
from simulator.parameters import parameters, rank_coordinates
from simulator.search.space import RECOMPUTE, with_keys
from simulator.sizes import format_bytes

if TYPE_CHECKING:
    import torch

PLAN_FILE = "plan.json"
MOST_DRAWN = 20_000  # maximum number of passes over all stages for which a timeline is written


@dataclass(frozen=True)
class RunPlan:
    """Plan of a job before its launch. Memory in bytes, communication in bytes per rank and step."""

    job: Job
    total_parameters: int
    active_parameters: int
    memory: list[RankMemory]
    communication: list[dict[str, int]]  # by stage
    capacity: Capacity = Capacity()  # bytes of device, host and disk that a rank may use
    attended_share: float | None = None  # of separate documents, as in simulator/flops.py; None: not known
    documents: Sequence[Lengths] | None = None  # lengths in some micro-batches, if context ranks share sequences
    hardware: Hardware | None = None  # machine of the predicted step
    step: Prediction | None = None

    @functools.cached_property
    def shared(self) -> SharedRows:
        """Sharding of a micro-batch's sequence rows over context ranks."""
        return shared_rows(self.job.config, self.documents)

    @property
    def worst(self) -> RankMemory:
        """The rank that needs the most device memory."""
        return max(self.memory, key=lambda rank: rank.total)

    @functools.cached_property
    def expert_options(self) -> list[ExpertOption]:
        """Offload targets of expert weights, the config's own first, with their memory and time."""
        arrangements = first_arrangements(self.job.config, self.memory)
        return expert_options(self.job, self.hardware, arrangements, None if self.step is None else self.step.seconds)

    @property
    def unexportable(self) -> str | None:
        """Reason why the model cannot be exported to Hugging Face; None if it can."""
        return translate.unexportable(self.job.config, self.job.vocab_size)

    @property
    def tokens(self) -> int:
        """Number of tokens in a step."""
        return self.job.config.training.global_batch_size * self.job.config.model.sequence_length

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per rank and step."""
        return derived.num_micro_batches(self.job.config, self.job.world_size)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of plan.json."""
        job, config, vocab, share = self.job, self.job.config, self.job.vocab_size, self.attended_share
        padded = padded_vocab_size(vocab, config.parallel.tensor)
        layout, step = list[dict[str, Any]](), None
        if self.step is not None and self.hardware is not None:
            step = step_as_dict(self.step, self.hardware, self.tokens)
        for each in rank_coordinates(config, job.world_size):
            layers = [number for chunk in layers_of_stage(config, each.stage) for number in chunk]
            experts: list[int] = []
            if config.moe.num_experts is not None:
                experts = PlacementMap(config.moe.num_experts, config.parallel.expert).experts_of(each.expert)
            layout.append({**asdict(each), "layers": layers, "experts": experts})
        return {
            "name": config.name,
            "world_size": job.world_size,
            "device": job.device,
            "vocab_size": vocab,
            "parameters": {"total": self.total_parameters, "active": self.active_parameters},
            "flops_per_token": training_flops_per_token(config, vocab, share),
            "flops": {
                "forward_per_token": forward_flops_per_token(config, vocab, share),
                "training_per_token": training_flops_per_token(config, vocab, share),
                "executed_per_token": executed_flops_per_token(config, padded, job.device, share, self.shared),
                "forward_operations": forward_operations(config, vocab),
            },
            "attended_share": share,
            "micro_batches": self.micro_batches,
            "memory_per_rank": [rank.as_dict() for rank in self.memory],
            "worst_rank": self.worst.rank,
            "layout": layout,
            "communication_per_step": self.communication,
            "context": {**asdict(self.shared), "sent_in_a_layer": layer_exchange(config, self.shared)},
            "predicted_step": step,
            "experts_off_device": [each.as_dict() for each in self.expert_options],
            "unexportable": self.unexportable,
        }


def make_plan(
    job: Job,
    device_memory: float | None = None,
    attended_share: float | None = None,
    documents: Sequence[Lengths] | None = None,
    hardware: Hardware | None = None,
) -> RunPlan:
    """Return the plan of a job with a validated config.

    Args:
        device_memory: bytes of a GPU, if known.
        attended_share: share of token pairs that attend (simulator/flops.py) in the corpus, if known.
        documents: lengths of the documents in some micro-batches, one list per micro-batch, if known.
        hardware: machine for which the step time is predicted.

    Raises ConfigError if no number of chunks of the MoE layers fits their memory budget.
    """
    config, step = job.config, None
    if hardware is not None and job.device == "cuda" and device_memory is None:
        device_memory = hardware["device.memory"]
    every = [p for stage in model_chunks(config) for chunk in stage for p in parameters(config, chunk, job.vocab_size)]
    shared = shared_rows(config, documents)
    capacity = rank_capacity(config, job.world_size, device_memory)
    memory = rank_memory(job, capacity=capacity)
    if hardware is not None:
        costs = measured_costs(config, job.device) if config.hardware is None else None
        step = clock.predict_step(
            job,
            hardware,
            attended_share=attended_share,
            shared=shared,
            arrangements=first_arrangements(config, memory),
            measured=None if costs is None else costs[0],
            with_spans=derived.num_micro_batches(config, job.world_size) * config.parallel.pipeline <= MOST_DRAWN,
        )
    total, active = sum(parameter.total for parameter in every), sum(parameter.active for parameter in every)
    sent = communication.bytes_per_step(job, shared)
    return RunPlan(job, total, active, memory, sent, capacity, attended_share, documents, hardware, step)


def rank_capacity(config: Config, world_size: int, device_memory: float | None) -> Capacity:
    """Return the bytes of device, host and disk that a rank may use.

    Device: `training.memory_limit_gib`, or most of `device_memory`. Host and disk: the config's budgets, or a share of
    the free bytes; unlimited for a plan of ranks that are not running.
    """
    host, disk = budgets_of_node(config, world_size)
    device = math.inf if device_memory is None else device_memory * (1 - TOLERANCE)
    if config.training.memory_limit_gib is not None:
        device = config.training.memory_limit_gib * GIB
    return Capacity(device, host.limit, 0.0 if config.memory.disk_dir is None else disk.limit)


def state_headroom(rank: RankMemory, capacity: Capacity) -> float:
    """Return the device bytes of a rank that are free for optimizer state."""
    return remaining(capacity, rank.total - rank.optimizer).device


def device_type(config: Config) -> str:
    """Return `training.device`; for auto "cuda" if this machine has a GPU, else "cpu"."""
    if config.training.device != "auto":
        return config.training.device
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "cpu"  # no driver: saves the seconds of importing torch
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def write(plan: RunPlan, run_dir: Path) -> None:
    """Write the plan to the run's folder as plan.json."""
    write_text(run_dir / PLAN_FILE, json.dumps(plan.as_dict()))


# ---------------------------------------------------------------------------------------------------------------------
# Checks against the available memory
# ---------------------------------------------------------------------------------------------------------------------


def refuse_what_cannot_fit(plan: RunPlan, device: torch.device | None = None) -> None:
    """Raise ConfigError if a rank needs more than its device's limit or the budgets of host and disk.

    The limit is `training.memory_limit_gib`, or the GPU's memory plus a tolerance. The message names all overrides that
    are needed together.
    """
    config, limit, slack = plan.job.config, math.inf, 1.0
    if config.training.memory_limit_gib is not None:
        limit = config.training.memory_limit_gib * GIB
    elif device is not None and device.type == "cuda":
        import torch

        limit, slack = float(torch.cuda.get_device_properties(device).total_memory), 1 - TOLERANCE
    elif plan.hardware is not None and plan.job.device == "cuda":
        limit, slack = plan.hardware["device.memory"], 1 - TOLERANCE
    most = limit / slack
    needs = needed_budgets(plan.job, plan.memory, plan.capacity, most)
    if needs is not None:
        plan = replace(plan, capacity=needs.capacity, memory=needs.memory)
    if plan.worst.total > most:
        raise ConfigError(out_of_memory(plan, limit, "" if needs is None else needs.keys))
    if needs is not None:
        raise ConfigError(needs.message)


def refuse_what_the_host_cannot_hold(plan: RunPlan) -> None:
    """Raise ConfigError if the ranks of this node clearly need more than its free memory.

    Call it before ranks on CPUs allocate memory. The launcher's environment variables tell which ranks are here.
    """
    launch = launched()
    first = launch.rank - (launch.local_rank or 0)
    here = plan.memory[first : first + (launch.local_world_size or plan.job.world_size)]
    offloaded = sum(each.host for each in here)
    needed, limit = sum(each.total for each in here) + offloaded, host_memory.available()
    if needed * (1 - TOLERANCE) <= limit:
        return
    kinds = ", ".join(f"{kind} {format_bytes(n)}" for kind in KINDS if (n := sum(getattr(each, kind) for each in here)))
    kinds += f", offloaded data on the host {format_bytes(offloaded)}" if offloaded else ""
    fix = fitting_overrides(plan, (limit - offloaded) / len(here))
    changes = fix.partition(" (")[0] if fix else "a smaller model (model.num_layers, model.hidden_size), or more nodes"
    ranks = "this rank needs" if len(here) == 1 else f"the {len(here)} ranks of this node need"
    model = plan.job.config.model
    raise ConfigError(
        f"model.num_layers ({model.num_layers}) and model.hidden_size ({model.hidden_size}) are too large: {ranks} "
        f"{format_bytes(needed)} ({kinds}), but only {format_bytes(limit)} of the host's memory is free. Try {changes}."
    )


def out_of_memory(plan: RunPlan, limit: float, keys: str = "") -> str:
    """Return the error message about a plan that needs more than `limit` bytes per device, with overrides that fit.

    `keys`: overrides of the budgets, without which the others do not fit.
    """
    worst, config = plan.worst, plan.job.config
    kinds = ", ".join(f"{kind} {format_bytes(getattr(worst, kind))}" for kind in KINDS if getattr(worst, kind))
    what = "training.memory_limit_gib" if config.training.memory_limit_gib is not None else "the device's memory"
    fix = fitting_overrides(plan, limit)
    advice = (
        f"Try {keys.lstrip()}{' ' * bool(keys)}{fix}."
        if fix
        else f"Neither a smaller micro-batch nor recomputation is enough; {_more_ranks(plan, limit)}."
    )
    return (
        f"training.micro_batch_size ({config.training.micro_batch_size}) needs {format_bytes(worst.total)} on rank "
        f"{worst.rank} ({kinds}), but {what} is {format_bytes(limit)}. {advice}"
    )


def fitting_overrides(plan: RunPlan, limit: float) -> str | None:
    """Return overrides with which every rank needs at most `limit` bytes; None if none were found.

    Smaller micro-batches, more recomputation, both, and more context ranks are tried.
    """
    config, size = plan.job.config, plan.job.config.training.micro_batch_size
    if max(rank.weights + rank.gradients + rank.optimizer for rank in plan.memory) > limit:
        return None  # weights, gradients and optimizer state alone exceed the limit
    smaller = [n for n in range(size, 0, -1) if size % n == 0 or config.training.global_batch_size % n == 0]
    kinds = RECOMPUTE[RECOMPUTE.index(config.training.recompute) :]
    for recompute, number in itertools.product(kinds, smaller):
        fix = [f"training.micro_batch_size={number}"] if number != size else []
        fix += [f"training.recompute={recompute}"] if recompute != config.training.recompute else []
        changed = with_keys(config, {"training.micro_batch_size": number, "training.recompute": recompute})
        if fix and first_problem(changed, plan.job.world_size) is None:
            if memory := _if_it_fits(plan, changed, limit):
                return f"{' '.join(fix)} ({format_bytes(max(rank.total for rank in memory))})"
    return _wider_context(plan, limit, kinds)


def _if_it_fits(plan: RunPlan, config: Config, limit: float) -> list[RankMemory]:
    """Return the memory of every rank with a changed config; [] if a rank exceeds `limit` or the budgets."""
    memory = rank_memory(replace(plan.job, config=config), capacity=plan.capacity)
    return memory if fits(memory, replace(plan.capacity, device=limit)) else []


def _wider_context(plan: RunPlan, limit: float, kinds: Sequence[str]) -> str | None:
    """Return a larger parallel.context that fits, with as little recomputation as possible; None without one."""
    config, own = plan.job.config, plan.job.config.parallel.context
    for recompute in kinds:
        for changed in layouts(with_keys(config, {"training.recompute": recompute}), plan.job.world_size):
            if changed.parallel.context <= own or changed.parallel.context % own:
                continue
            if memory := _if_it_fits(plan, changed, limit):
                more = f" training.recompute={recompute}" if recompute != config.training.recompute else ""
                most = format_bytes(max(rank.total for rank in memory))
                return f"parallel.context={changed.parallel.context}{more} ({most})"
    return None


def _more_ranks(plan: RunPlan, limit: float) -> str:
    """Return the advice to offload optimizer state or experts, or else to use more ranks."""
    job, config = plan.job, plan.job.config
    for target in ("host", "disk"):
        changed = with_keys(config, {"optimizer.state_device": target})
        if config.optimizer.state_device == "device" and first_problem(changed, job.world_size) is None:
            if memory := _if_it_fits(plan, changed, limit):
                most, on_host = max(rank.total for rank in memory), max(rank.host for rank in memory)
                sizes = f"{format_bytes(most)} of its device and {format_bytes(on_host)} of the host"
                return f"set optimizer.state_device={target}, so that each rank needs at most {sizes}"
    if fix := fitting_override(job, plan.capacity, limit):
        return fix
    for factor in (2, 4, 8, 16, 32, 64):
        ranks = factor * job.world_size
        if config.optimizer.distributed and first_problem(config, ranks) is None:
            memory = rank_memory(replace(job, world_size=ranks), capacity=plan.capacity)
            if (most := max(rank.total for rank in memory)) <= limit:
                return f"start {ranks} ranks, each of which needs at most {format_bytes(most)}"
    return "use more ranks, with a larger parallel.tensor, parallel.pipeline or parallel.expert"
