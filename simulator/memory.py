"""Memory that each rank needs, by kind, computed from the configuration alone.

`weights`, `gradients` and `optimizer` follow Megatron-core's DDP buffers and distributed optimizer
(simulator/buffers.py); offloaded optimizer state is arranged as in a run (simulator/offload/state.py). `activations` is
the peak of all further memory in a step: that of the micro-batches in flight and the running operation
(simulator/activations.py), or that of reducing and clipping gradients, whichever is larger. `buffers` stay allocated
from step to step: the buffer that sequence parallelism gathers into, and the table of rotary positions. Memory of a
GPU's libraries and fragmentation of its allocator are not included.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from base.ranks import launched
from base.units import MIB
from configs import derived
from configs.job import Job
from configs.rotary import switches_at
from configs.schema import Config
from memory.budgets import Budget, open_budgets
from models.blueprint import blocks, model_chunks
from models.blueprint.operation import INPUT, Block
from moe.chunk_plan import Plan
from moe.planning.inputs import replica_bytes
from optim.arrangement.buckets import Arrangement, Capacity
from optim.arrangement.experts import ExpertRecords, records_of_stage
from parallel.pipeline import layer_passes, passes
from simulator.activations import Activations
from simulator.buffers import Buffer, buffers
from simulator.layer_inputs import LayerInputPlan, layer_inputs
from simulator.memory_tape import MemoryProfile, Tape
from simulator.offload.state import OffloadPlan, least_host_bytes, remaining
from simulator.parameters import rank_coordinates, state_ranks
from simulator.sizes import FP32, Sizes

UNLIMITED = Capacity()
TOLERANCE = 0.1  # share of the planned memory; a plan is refused only if it would not fit with this much less
KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank in bytes: on the device by kind, on the host and on the disk.

    `host_activations`: layer inputs on the host. `link_activations`: bytes of layer inputs that a step copies to the
    host and back. `arrangement`: which buckets of optimizer state are on device, host or disk. `experts`: offloaded
    experts, whose device buffers count as weights and gradients.
    """

    rank: int
    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host_activations: int = 0
    link_activations: tuple[int, int] = (0, 0)
    arrangement: Arrangement | None = field(default=None, repr=False)
    experts: ExpertRecords | None = field(default=None, repr=False)

    @property
    def host_experts(self) -> int:
        """Host bytes of the weights and gradients of offloaded experts."""
        return 0 if self.experts is None else self.experts.host_bytes

    @property
    def host(self) -> int:
        """Bytes of offloaded data on the host."""
        state = 0 if self.arrangement is None else self.arrangement.host_bytes
        return self.host_activations + self.host_experts + state

    @property
    def disk(self) -> int:
        """Bytes of offloaded data on the disk."""
        state = 0 if self.arrangement is None else self.arrangement.disk_bytes
        return state + (0 if self.experts is None else self.experts.disk_bytes)

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(getattr(self, kind) for kind in KINDS)

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of this rank in plan.json."""
        numbers: dict[str, Any] = {key: getattr(self, key) for key in ("rank", "stage", *KINDS, "total")}
        numbers |= {"host": self.host, "host_activations": self.host_activations, "disk": self.disk}
        numbers["host_activations_out"], numbers["host_activations_back"] = self.link_activations
        if self.arrangement is not None:
            numbers["host_parts"] = self.arrangement.host_bytes_by_purpose
            numbers["early_share"] = self.arrangement.early_share
        if self.experts is not None:
            numbers |= {"experts": self.experts.bytes_by_purpose}
        return numbers


def first_arrangements(config: Config, memory: Sequence[RankMemory]) -> list[Arrangement | None]:
    """Return the arrangement of offloaded optimizer state on the first rank of each pipeline stage."""
    first = {rank.stage: rank.arrangement for rank in reversed(memory)}
    return [first[stage] for stage in range(config.parallel.pipeline)]


def rank_memory(job: Job, plan: Plan | None = None, capacity: Capacity = UNLIMITED) -> list[RankMemory]:
    """Return the planned memory of every rank in bytes.

    `plan`: numbers of chunks and memory strategy of the MoE layers, by default the config's. `capacity`: bytes of
    device, host and disk per rank.
    """
    config, world_size = job.config, job.world_size
    element = derived.element_size(config)
    state_bytes = 2 * FP32 + (FP32 if element < FP32 else 0)  # both moments; master weights of half precision
    activations = Activations(config, job.vocab_size, job.device, plan)
    stages = config.parallel.pipeline
    static = [buffers(job, stage) for stage in range(stages)]
    staying = [staying_bytes(config, stage) for stage in range(stages)]

    def working(host_bytes: float) -> tuple[list[int], list[LayerInputPlan]]:
        """Return, by stage, the activation bytes on the device, and the planned memory of layer inputs, of which at
        most `host_bytes` are offloaded."""
        inputs = [layer_inputs(config, world_size, stage, host_bytes) for stage in range(stages)]
        live = [activations_of_stage(config, activations, world_size, stage, inputs[stage]) for stage in range(stages)]
        alone = state_ranks(config, world_size)["dense"] == 1
        after = [after_backward_bytes(config, of_stage, job.device, alone) for of_stage in static]
        return [max(pair) for pair in zip(live, after, strict=True)], inputs

    most, leaving = working(capacity.host)
    distributed = config.optimizer.distributed

    @cache
    def optimizer(stage: int, kind: str, rank: int) -> int:
        owned = [each for buffer in static[stage][kind] for each in buffer.owned(rank if distributed else 0)]
        return sum((each.end - each.start) * state_bytes + FP32 for each in owned)

    everyone, found = list(rank_coordinates(config, world_size)), dict[int, Arrangement]()
    records = [records_of_stage(config, world_size, stage) for stage in range(stages)]
    numbers = [sum(buffer.size for kind in of_stage.values() for buffer in kind) for of_stage in static]
    weights = [n * element + (of.weights_on_device if of else 0) for n, of in zip(numbers, records, strict=True)]
    gradients = [n * FP32 + (of.grads_on_device if of else 0) for n, of in zip(numbers, records, strict=True)]
    if derived.has_own_optimizer_state(config):
        on_host = max((of.host_bytes for of in records if of), default=0)
        on_disk = max((of.disk_bytes for of in records if of), default=0)
        capacity = replace(capacity, host=max(capacity.host - on_host, 0), disk=max(capacity.disk - on_disk, 0))
        offload = OffloadPlan(job, capacity)
        others = [weights[i] + gradients[i] + most[i] + staying[i] for i in range(stages)]
        found = {each.rank: offload.of(each, others[each.stage]) for each in everyone}
        if any(plan.host for plan in leaving):  # layer inputs use the host memory that optimizer state leaves free
            most, leaving = working(max(capacity.host - max(of_rank.host_bytes for of_rank in found.values()), 0))
    result = []
    for each in everyone:
        rank, stage = each.rank, each.stage
        if rank in found:
            state = found[rank].device_bytes
        else:
            state = optimizer(stage, "dense", each.data_context) + optimizer(stage, "expert", each.expert_data)
        on_device = weights[stage], gradients[stage], state, most[stage], staying[stage]
        offloaded = leaving[stage].host, leaving[stage].link_bytes, found.get(rank), records[stage]
        result.append(RankMemory(rank, stage, *on_device, *offloaded))
    return result


def staying_bytes(config: Config, stage: int) -> int:
    """Return the bytes of buffers that stay allocated from step to step on a rank of this pipeline stage.

    These are the buffer that sequence parallelism gathers into, the slots of expert replicas, each model chunk's table
    of rotary angles, and the mask of a sliding window with dropout.
    """
    model, of_stage = config.model, model_chunks(config)[stage]
    # The widest gathered input: that of the layers split by their outputs.
    sizes = Sizes(config)
    result = sizes.tokens * model.hidden_size * sizes.element if config.parallel.sequence else 0
    if model.position_embedding == "rope":
        sets = 2 if switches_at(model.rotary_scaling) is not None and config.data.documents == "separate" else 1
        result += len(of_stage) * sets * model.sequence_length * derived.rotary_dim(config) * FP32
    if derived.attended_share(config) < 1 and model.attention_dropout > 0:
        result += model.sequence_length**2
    return result + replica_bytes(config, stage)


def after_backward_bytes(config: Config, of_stage: dict[str, list[Buffer]], device: str, alone: bool) -> int:
    """Return the bytes that reducing and clipping gradients allocate; 0 on a GPU, where nothing is copied.

    `of_stage`: the gradient buffers. On a CPU, gloo's reduce-scatter copies all gradients (in half precision not with
    a single rank, `alone`). Clipping copies one parameter's gradient at a time.
    """
    if device != "cpu":
        return 0
    every = [buffer for kind in of_stage.values() for buffer in kind]
    copied = config.optimizer.distributed and not (alone and config.training.precision != "fp32")
    all_copied = sum(buffer.size for buffer in every) if copied else 0
    largest = max((end - start for buffer in every for start, end in buffer.ranges), default=0)
    return FP32 * max(all_copied, largest if config.optimizer.clip_grad > 0 else 0)


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches in flight
# ---------------------------------------------------------------------------------------------------------------------


def activations_of_stage(
    config: Config, activations: Activations, world_size: int, stage: int, inputs: LayerInputPlan
) -> int:
    """Return the peak device bytes of activations in a pipeline stage, over all micro-batches in flight."""
    if config.training.pass_order == "by_layer":
        return _layer_wise_activations(config, activations, world_size, inputs)
    of_stage, leaving = model_chunks(config)[stage], iter(inputs.leaving)
    in_flight: list[deque[MemoryProfile]] = [deque() for _ in of_stage]
    profiled = cache(lambda chunk, leaving: activations.profile(of_stage[chunk], leaving))
    live = peak = 0
    for is_forward, chunk in passes(config, derived.num_micro_batches(config, world_size), stage):
        if is_forward:
            profile = profiled(chunk, next(leaving))
            in_flight[chunk].append(profile)
            peak = max(peak, live + profile.forward)
            live += profile.kept
        else:
            profile = in_flight[chunk].popleft()
            live -= profile.kept
            peak = max(peak, live + profile.backward)
    return peak


def _layer_wise_activations(config: Config, activations: Activations, world_size: int, inputs: LayerInputPlan) -> int:
    """Return the peak device bytes of activations in a layer-wise schedule: layer inputs plus one pass's memory.

    The head's passes follow a micro-batch's last layer; the embedding's passes run with those of the first layer.
    """
    state = derived.layer_input_bytes(config)
    ((chunk,),) = model_chunks(config)
    embedding, *layers, head = blocks(config, activations.vocab_size, chunk)
    kinds = [(kind, layer.slides) for kind, layer in zip(chunk.layers, layers, strict=True)]
    profiles = {kind: _block_profile(activations, layers[kinds.index(kind)], state) for kind in dict.fromkeys(kinds)}
    of_layers = [profiles[kind] for kind in kinds]
    before, after = _block_profile(activations, embedding, 0), _block_profile(activations, head, state)
    count = derived.num_micro_batches(config, world_size)
    of_micro_batch = activations.rotary_bytes + before.kept
    peak = 0
    for now, stored in zip(layer_passes(len(layers), count), inputs.during, strict=True):
        own, layer = of_layers[now.layer], now.layer
        in_flight = now.micro_batch + 1 if now.is_forward and layer == 0 else count
        if now.is_forward:
            takes = [own.forward - state]
            takes += [before.forward - before.kept - state] if layer == 0 else []
            takes += [after.forward, after.backward] if layer == len(layers) - 1 else []
        else:
            takes = [own.backward - 2 * state]  # its input and the gradient of its output are in the store
            if layer == 0:
                takes.append(before.backward - before.kept)
                in_flight = count - now.micro_batch
        peak = max(peak, stored + of_micro_batch * in_flight + max(takes))
    return peak


def _block_profile(activations: Activations, block: Block, state: int) -> MemoryProfile:
    """Return the memory of a single block whose input has `state` bytes.

    The block's output is freed before the backward pass; `kept` counts only the block's own tensors.
    """
    tape = Tape()
    held = {INPUT: tape.new(state)} if state else {}
    output = activations.run(tape, block.operations, held)
    if state and block.prefix:
        tape.drop(held[INPUT])
    tape.drop(output)
    forward, kept, tape.peak = tape.peak, tape.now, 0
    tape.backward(output)
    return MemoryProfile(forward, kept, tape.peak)


# ---------------------------------------------------------------------------------------------------------------------
# Budgets: found with the function that checks a plan, so that the proposed budgets are large enough
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NeededBudgets:
    """Budgets of host and disk that are large enough, and the error message about the present ones.

    `memory`: of each rank with these budgets. `keys`: overrides that set them.
    """

    capacity: Capacity
    memory: list[RankMemory]  # with these budgets
    keys: str  # overrides as typed, with a blank before each
    message: str


def budgets_of_node(config: Config, world_size: int) -> tuple[Budget, Budget]:
    """Return the budgets of host and disk memory, with the limits that they have in the run.

    For a plan of ranks that are not running, free bytes are unlimited.
    """
    host, disk, memory = Budget("memory.host_budget"), Budget("memory.disk_budget"), config.memory
    if world_size == launched().world_size:
        folder = memory.disk_dir
        if folder is not None and Path(folder).absolute() == Path(config.run_dir).absolute():
            own = Path(folder).absolute()  # may not exist before the run starts
            memory = replace(memory, disk_dir=str(next(path for path in (own, *own.parents) if path.exists())))
        open_budgets(memory, host, disk)
    else:
        host.open(config.memory.host_budget, math.inf)
        disk.open(config.memory.disk_budget, math.inf)
    return host, disk


def over_budget(memory: Sequence[RankMemory], capacity: Capacity) -> list[RankMemory]:
    """Return the ranks that offload more bytes than the host or the disk has capacity for."""
    return [rank for rank in memory if rank.host > capacity.host or rank.disk > capacity.disk]


def fits(memory: Sequence[RankMemory], capacity: Capacity) -> bool:
    """Return whether every rank has enough memory on device, host and disk."""
    return max(rank.total for rank in memory) <= capacity.device and not over_budget(memory, capacity)


def needed_budgets(
    job: Job, memory: list[RankMemory], capacity: Capacity, most: float = math.inf
) -> NeededBudgets | None:
    """Return the smallest budgets, in whole MiB, with which every rank fits; None if the present ones suffice.

    With them no rank needs more than `most` bytes of its device, if any budgets can achieve that.
    """
    if not (over := over_budget(memory, capacity)):
        return None
    config, budgets = job.config, budgets_of_node(job.config, job.world_size)
    for budget, limit in zip(budgets, (capacity.host, capacity.disk), strict=True):
        budget.limit = limit  # the free memory may have changed since the plan was made
    worst, asked = max(over, key=lambda rank: (rank.host, rank.disk)), capacity
    if config.memory.disk_dir is not None:
        disk = max(rank.disk for rank in memory)
        capacity = replace(capacity, disk=max(capacity.disk, float(math.ceil(disk / MIB) * MIB)))

    def with_host(num_mib: int) -> tuple[Capacity, list[RankMemory], bool]:
        own = replace(capacity, host=max(capacity.host, float(num_mib * MIB)))
        found = rank_memory(job, capacity=own)
        return own, found, fits(found, replace(own, device=most))

    least = math.ceil(_least_host_bytes(job, memory, capacity) / MIB)
    tried = with_host(least)
    if not tried[2]:
        endless = rank_memory(job, capacity=replace(capacity, host=math.inf))
        # layer inputs get the host memory that the fullest rank's optimizer state leaves
        inputs = max(rank.host_activations for rank in endless)
        needed = inputs + max(rank.host - rank.host_activations for rank in endless)
        low, high = least, max(least, math.ceil(needed / MIB))
        if (last := with_host(high))[2]:
            tried = last
        while high - low > 1 and last[2]:
            middle = (low + high) // 2
            found = with_host(middle)
            low, high, tried = (low, middle, found) if found[2] else (middle, high, tried)
    capacity, memory, _ = tried
    kept = ["experts"] * (worst.experts is not None)
    kept += ["optimizer state"] * (worst.arrangement is not None) + ["activations"] * (worst.host_activations > 0)
    what = f"{', '.join(kept[:-1])}{' and ' * (len(kept) > 1)}{kept[-1]} of rank {worst.rank}"
    budget_limits = zip(budgets, (capacity.host, capacity.disk), strict=True)
    raised = [(budget, int(limit)) for budget, limit in budget_limits if limit > budget.limit]
    raised.sort(key=lambda each: each[0].could_be(each[0].least(each[1])))  # budgets that are not free first
    keys = [f" {budget.key}={budget.least(num_bytes)}" for budget, num_bytes in raised]
    budget, num_bytes = raised[0]
    message = budget.error_message(num_bytes, what, "".join(keys[1:]))
    if config.optimizer.early_update == "always" and not budget.could_be(budget.least(num_bytes)):
        without = replace(config, optimizer=replace(config.optimizer, early_update="auto"))
        if not over_budget(rank_memory(replace(job, config=without), capacity=asked), asked):
            message += ". Without early updates everything fits: try optimizer.early_update=auto"
    return NeededBudgets(capacity, memory, "".join(keys), message)


def _least_host_bytes(job: Job, memory: Sequence[RankMemory], capacity: Capacity) -> float:
    """Return host bytes with which every rank fits. With state_device=auto, device and disk are filled first."""
    if job.config.optimizer.state_device != "auto":
        return max(rank.host for rank in memory)
    offload, found = OffloadPlan(job, capacity), dict[tuple[int, ...], float]()
    for rank, each in zip(memory, rank_coordinates(job.config, job.world_size), strict=True):
        others = rank.total - rank.optimizer
        key = (each.stage, each.data_context, each.expert_data, others)
        if key not in found:
            least = least_host_bytes(offload.request(each), remaining(capacity, others))
            found[key] = rank.host if least is None else rank.host_activations + least
    return max(found.values())
