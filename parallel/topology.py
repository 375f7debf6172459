"""Process groups and ranks. Only this module creates them.

`initialize` joins the job, builds Megatron's process groups for the configured layout and returns a `Topology`. Ranks
are ordered with tensor parallelism fastest, then context, data and pipeline parallelism ("tp-cp-ep-dp-pp"). Expert
parallelism divides the same ranks with its own tensor size, so attention and experts may be sharded differently.
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
        """Create another process group of these ranks, for concurrent collectives. All these ranks make the call."""
        ranks = dist.get_process_group_ranks(self.group)
        timeout = timedelta(seconds=timeout_seconds)
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group


@dataclass(frozen=True)
class Topology:
    """This rank's coordinates in the layout: its position in each kind of parallelism, and the process groups."""

    rank: int  # in the job
    world_size: int  # ranks of the job
    device: torch.device  # of the tensors
    tensor: Axis  # ranks that share each dense layer
    context: Axis  # ranks that share each sequence
    data: Axis  # ranks that read different samples
    data_context: Axis  # `data` times `context`: ranks that have the same dense weights
    pipeline: Axis  # the pipeline stages
    expert: Axis  # ranks that share the experts of a layer
    expert_tensor: Axis  # ranks that share each expert
    expert_data: Axis  # ranks that have the same experts
    groups: ProcessGroupCollection  # these groups and combinations of them, as `pg_collection` of Megatron's modules
    virtual_size: int  # model chunks per pipeline rank

    @property
    def speaks_for_stage(self) -> bool:
        """Whether this rank is the one that writes or sums the values that all ranks of its pipeline stage share."""
        return self.data_context.rank == 0 and self.tensor.rank == 0


def choose_device(config: Config) -> torch.device:
    """Return this rank's device, from `training.device` and its local rank. Raises ConfigError if it has no GPU."""
    wanted = config.training.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("training.device (cuda) needs a CUDA GPU, but torch finds none. Try training.device=cpu.")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = launched().local_rank or 0
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank ({local_rank}) has no GPU: torch finds only {torch.cuda.device_count()} on this machine. "
            f"Try --nproc-per-node {torch.cuda.device_count()}."
        )
    return torch.device("cuda", local_rank)


def initialize(config: Config) -> Topology:
    """Join the job and create the process groups of the configured layout. Every rank calls it once.

    Uses torchrun's environment, or a job of one rank without it; an existing process group is kept. Seeds the random
    number generators. Raises ConfigError if the layout does not fit the number of ranks.
    """
    device = choose_device(config)
    apply_patches(device.type)
    layout = config.parallel
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before NCCL, which uses the current device
        card.leave_to_exchanges(derived.exchange_sms(config))
    if not dist.is_initialized():
        timeout = timedelta(seconds=layout.timeout_seconds)
        backend = "nccl" if device.type == "cuda" else "gloo"
        launch = launched()
        if rendezvous.is_loopback_enough(launch.world_size):
            rendezvous.use_loopback()
        store = rendezvous.job_store(launch, timeout)
        options: dict[str, Any] = {"store": store, "rank": launch.rank, "world_size": launch.world_size}
        if device.type == "cuda" and layout.early_communicators:
            # NCCL then creates the world's communicator here and splits those of the groups off it: they share its
            # buffers, and none is created at its first use in the middle of a step.
            options["device_id"] = device
        dist.init_process_group(backend, timeout=timeout, **options)
    world_size = dist.get_world_size()
    if layout.layout == "auto":
        refuse_other_layouts(config)
    model_size = model_parallel_size(config)
    if world_size % model_size != 0:
        raise ConfigError(
            f"world size ({world_size}) must be divisible by parallel.tensor x pipeline x context "
            f"({layout.tensor} x {layout.pipeline} x {layout.context} = {model_size}). "
            f"Start a multiple of {model_size} ranks."
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
        # Otherwise the first messages between two of its ranks would wait until all have created the communicator.
        dist.barrier(group=topology.context.group, device_ids=[torch.cuda.current_device()])
    # Training does not use these random states (weights: models/initial_weights.py, data order: data/samples/, dropout:
    # its own generators), but a user's callback may: ranks with different tokens get different numbers.
    seed = config.training.seed + 100 * topology.pipeline.rank + 10_000 * topology.data.rank
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return topology


def _priority_groups(config: Config) -> list[str]:
    """Return Megatron-core's names of the process groups whose NCCL kernels get high priority.

    Matmuls wait for the collectives of these groups.
    """
    is_nccl = dist.get_backend() == dist.Backend.NCCL
    return ["ep", "pp"] if is_nccl and config.parallel.priority_exchanges else []


def megatron_groups() -> ProcessGroupCollection:
    """Return the existing process groups in the form that Megatron-core's modules take."""
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


def leave_layout() -> None:
    """Destroy the process groups of the layout. The job's own process group stays."""
    parallel_state.destroy_model_parallel()


def destroy() -> None:
    """Leave the job: destroy Megatron's process groups and torch's. Can be called twice."""
    leave_layout()
    if dist.is_initialized():
        dist.destroy_process_group()
    rendezvous.forget()
