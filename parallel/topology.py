"""Process groups and ranks, which only this module creates.

`initialize` joins the job, builds Megatron's process groups for the configured layout and returns a `Topology`: this
rank's coordinates and groups. Ranks are laid out tensor-fastest, then context, data, pipeline ("tp-cp-ep-dp-pp");
expert parallelism folds over the same ranks with its own tensor size, so attention and experts may be split
differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from parallel.megatron import apply_patches  # before Megatron-core: see parallel/megatron/startup.py

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from base.errors import ConfigError
from base.ranks import launched
from configs import derived
from configs.derived import expert_tensor_size, model_parallel_size
from configs.schema import Config
from parallel import card
from parallel.joint_errors import refuse_other_layouts
from parallel.liveness import rendezvous


@dataclass(frozen=True)
class Axis:
    """This rank's position in one kind of parallelism: its rank among the `size` processes of `group`."""

    rank: int
    size: int
    group: dist.ProcessGroup

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def another_group(self, timeout_seconds: int) -> dist.ProcessGroup:
        """Create a group of the same processes, for concurrent exchanges. A collective call of these processes."""
        ranks = dist.get_process_group_ranks(self.group)
        timeout = timedelta(seconds=timeout_seconds)
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group


@dataclass(frozen=True)
class Topology:
    """This rank's coordinates in the layout. `rank` and `world_size` are the job's; `device` holds the tensors.

    Attributes:
        tensor: ranks that share each dense layer.
        context: ranks that share each sequence.
        data: ranks that read different samples.
        data_context: `data` times `context`: ranks that hold the same dense weights.
        pipeline: the stages.
        expert: ranks that share the experts of a layer.
        expert_tensor: ranks that share each expert.
        expert_data: ranks that hold the same experts.
        groups: the same groups, and products of them, under Megatron-core's names. Its modules take them as
            `pg_collection`.
        virtual_size: model chunks of each pipeline rank.
    """

    rank: int
    world_size: int
    device: torch.device
    tensor: Axis
    context: Axis
    data: Axis
    data_context: Axis
    pipeline: Axis
    expert: Axis
    expert_tensor: Axis
    expert_data: Axis
    groups: ProcessGroupCollection
    virtual_size: int

    @property
    def speaks_for_stage(self) -> bool:
        """Whether this rank writes or adds values that all ranks of its pipeline stage have: one of each stage does."""
        return self.data_context.rank == 0 and self.tensor.rank == 0


def choose_device(config: Config) -> torch.device:
    """Return the device of this rank, from `training.device` and torchrun's local rank. Raises ConfigError without
    CUDA."""
    wanted = config.training.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("training.device (cuda) needs a CUDA GPU, and torch sees none here. Try training.device=cpu.")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = launched().local_rank or 0
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank ({local_rank}) has no GPU of its own: torch sees {torch.cuda.device_count()} here. "
            f"Try --nproc-per-node {torch.cuda.device_count()}."
        )
    return torch.device("cuda", local_rank)


def initialize(config: Config) -> Topology:
    """Join the job and build the groups of the configured layout; every rank calls it once.

    Uses torchrun's environment, or a world of one without it; keeps a process group that exists already. Every rank's
    random number states depend on `training.seed` and its coordinates. Raises ConfigError if the layout does not fit
    the world.
    """
    device = choose_device(config)
    apply_patches(device.type)
    layout = config.parallel
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before NCCL, which takes the current one
        card.leave_to_exchanges(derived.exchange_sms(config))
    if not dist.is_initialized():
        timeout = timedelta(seconds=layout.timeout_seconds)
        backend = "nccl" if device.type == "cuda" else "gloo"
        launch = launched()
        if rendezvous.is_loopback_enough(launch.world_size):
            rendezvous.use_loopback()
        options: dict[str, Any] = {
            "store": rendezvous.job_store(launch, timeout),
            "rank": launch.rank,
            "world_size": launch.world_size,
        }
        if device.type == "cuda" and layout.early_communicators:
            # NCCL then sets the world's communicator up here and splits the groups' off it: they share its buffers, and
            # none is set up at its first use, in the middle of a step, which ranks reach at different times.
            options["device_id"] = device
        dist.init_process_group(backend, timeout=timeout, **options)
    world_size = dist.get_world_size()
    if layout.layout == "auto":
        refuse_other_layouts(config)
    model_size = model_parallel_size(config)
    if world_size % model_size != 0:
        raise ConfigError(
            f"world size ({world_size}) must be divisible by parallel.tensor x pipeline x context "
            f"({layout.tensor} x {layout.pipeline} x {layout.context} = {model_size})."
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=expert_tensor_size(config),
        distributed_timeout_minutes=max(1, -(-layout.timeout_seconds // 60)),
        create_gloo_process_groups=False,
        high_priority_stream_groups=_priority_groups(config),
    )
    topology = _topology(device, layout.virtual_pipeline or 1)
    if layout.context > 1 and dist.get_backend() == dist.Backend.NCCL:
        # Otherwise the first messages between two of its ranks would wait for the others to set the communicator up.
        dist.barrier(group=topology.context.group, device_ids=[torch.cuda.current_device()])
    _seed_random_numbers(config, topology)
    return topology


def _priority_groups(config: Config) -> list[str]:
    """Return Megatron-core's names of groups whose NCCL kernels have priority: products wait for their exchanges.

    gloo has no priorities.
    """
    is_nccl = dist.get_backend() == dist.Backend.NCCL
    return ["ep", "pp"] if is_nccl and config.parallel.priority_exchanges else []


def megatron_groups() -> ProcessGroupCollection:
    """Return the existing process groups in the form of Megatron-core's modules; others read `Topology.groups`."""
    return ProcessGroupCollection.use_mpu_process_groups()


def _topology(device: torch.device, virtual_size: int) -> Topology:
    groups = megatron_groups()

    def axis(group: dist.ProcessGroup) -> Axis:
        return Axis(group.rank(), group.size(), group)

    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        tensor=axis(groups.tp),
        context=axis(groups.cp),
        data=axis(groups.dp),
        data_context=axis(groups.dp_cp),
        pipeline=axis(groups.pp),
        expert=axis(groups.ep),
        expert_tensor=axis(groups.expt_tp),
        expert_data=axis(groups.expt_dp),
        groups=groups,
        virtual_size=virtual_size,
    )


def _seed_random_numbers(config: Config, topology: Topology) -> None:
    # Our trainings do not use these states: weights are drawn by models/initial_weights.py, the data order by
    # data/samples/, and dropout seeds its own generators. A user's callback may: ranks that hold different tokens get
    # different numbers.
    seed = config.training.seed + 100 * topology.pipeline.rank + 10_000 * topology.data.rank
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def leave_layout() -> None:
    """Destroy the groups of the layout; the job's own process group stays."""
    parallel_state.destroy_model_parallel()


def destroy() -> None:
    """Leave the job: destroy Megatron's groups and torch's. Safe to call twice."""
    leave_layout()
    if dist.is_initialized():
        dist.destroy_process_group()
    rendezvous.forget()
