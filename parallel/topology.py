"""The one owner of process groups and ranks.

`initialize` joins the job, builds Megatron's process groups for the configured layout and returns a `Topology`: who
this rank is. Ranks are laid out tensor-fastest, then context, data, pipeline ("tp-cp-ep-dp-pp"); expert parallelism
folds over the same ranks with its own tensor size, so attention and experts may be split differently.
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

from configs import derived
from configs.derived import expert_tensor_size, model_parallel_size
from configs.ranks import launched
from configs.schema import Config, ConfigError
from parallel import card
from parallel.liveness import loopback, rendezvous
from parallel.refusal import refuse_other_layouts


@dataclass(frozen=True)
class Axis:
    """One kind of parallelism as this rank sees it: its rank among the `size` processes of `group`."""

    rank: int
    size: int
    group: dist.ProcessGroup

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def another_group(self, timeout_seconds: int) -> dist.ProcessGroup:
        """A group of the same processes, for exchanges that go on beside others. A collective call of theirs."""
        ranks = dist.get_process_group_ranks(self.group)
        timeout = timedelta(seconds=timeout_seconds)
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group


@dataclass(frozen=True)
class Topology:
    """This rank's place in the layout. `rank` and `world_size` count the whole job; `device` is where tensors live.

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
        """Whether this rank writes or adds what all ranks of its pipeline stage know: one of each stage does."""
        return self.data_context.rank == 0 and self.tensor.rank == 0


def choose_device(config: Config) -> torch.device:
    """The device of this rank, from `training.device` and torchrun's local rank. Raises ConfigError without CUDA."""
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
    random number states follow from `training.seed` and its place. Raises ConfigError when the world does not fit.
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
        if loopback.is_enough(launch.world_size):
            loopback.use()
        place: dict[str, Any] = {
            "store": rendezvous.job_store(launch, timeout),
            "rank": launch.rank,
            "world_size": launch.world_size,
        }
        if device.type == "cuda" and layout.early_communicators:
            # NCCL then sets the world's communicator up here and splits the groups' off it: they share its buffers,
            # and none is set up at its first use, in the middle of a step, by ranks that come there one after another.
            place["device_id"] = device
        dist.init_process_group(backend, timeout=timeout, **place)
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
        # The first messages between two of its ranks would else wait for the others to set the communicator up.
        dist.barrier(group=topology.context.group, device_ids=[torch.cuda.current_device()])
    _seed_random_numbers(config, topology)
    return topology


def _priority_groups(config: Config) -> list[str]:
    """Megatron-core's names of the groups whose kernels NCCL starts before others that wait: those of exchanges that
    products stand waiting for. gloo has no such thing."""
    is_nccl = dist.get_backend() == dist.Backend.NCCL
    return ["ep", "pp"] if is_nccl and config.parallel.priority_exchanges else []


def megatron_groups() -> ProcessGroupCollection:
    """The process groups that exist now, as Megatron-core's modules take them. Everyone else has them from
    `Topology.groups`."""
    return ProcessGroupCollection.use_mpu_process_groups()


def _topology(device: torch.device, virtual_size: int) -> Topology:
    groups = megatron_groups()
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        tensor=_axis(groups.tp),
        context=_axis(groups.cp),
        data=_axis(groups.dp),
        data_context=_axis(groups.dp_cp),
        pipeline=_axis(groups.pp),
        expert=_axis(groups.ep),
        expert_tensor=_axis(groups.expt_tp),
        expert_data=_axis(groups.expt_dp),
        groups=groups,
        virtual_size=virtual_size,
    )


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(group.rank(), group.size(), group)


def _seed_random_numbers(config: Config, topology: Topology) -> None:
    # No training of ours draws from these: weights come from models/initial_weights.py, the data order from
    # data/samples/, and dropout seeds its own generators. A callback of a user's own may: ranks
    # that hold different tokens get different numbers.
    place = 100 * topology.pipeline.rank + 10_000 * topology.data.rank
    torch.manual_seed(config.training.seed + place)
    tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed + place, force_reset_rng=True)


def leave_layout() -> None:
    """Destroy the groups of the layout; the job's own process group stays."""
    parallel_state.destroy_model_parallel()


def destroy() -> None:
    """Leave the job: destroy Megatron's groups and torch's. Safe to call twice."""
    leave_layout()
    if dist.is_initialized():
        dist.destroy_process_group()
    rendezvous.forget()
