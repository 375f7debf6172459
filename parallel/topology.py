"""The one owner of process groups and ranks.

`initialize` joins the job, builds Megatron's process groups for the configured layout and returns a `Topology`: who this
rank is. Ranks are laid out tensor-fastest, then context, data, pipeline ("tp-cp-ep-dp-pp"); expert parallelism folds over
the same ranks with its own tensor size, so attention and experts may be split differently.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from parallel.megatron import apply_patches  # before Megatron-core: see parallel/megatron/startup.py

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from configs.derived import expert_tensor_size, model_parallel_size
from configs.schema import Config, ConfigError
from parallel import loopback, meeting


@dataclass(frozen=True)
class Topology:
    """This rank's place in the layout. Sizes and ranks are counts of processes; `device` is where tensors live."""

    rank: int
    world_size: int
    device: torch.device
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    virtual_size: int
    data_rank: int
    data_size: int
    expert_rank: int
    expert_size: int
    expert_data_size: int

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding (chunk 0 of the first pipeline rank)."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Computes the loss (last chunk of the last pipeline rank)."""
        return self.pipeline_rank == self.pipeline_size - 1


def choose_device(config: Config) -> torch.device:
    """The device of this rank, from `training.device` and torchrun's local rank. Raises ConfigError without CUDA."""
    wanted = config.training.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("training.device (cuda) needs a CUDA GPU, and torch sees none here. Try training.device=cpu.")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank ({local_rank}) has no GPU of its own: torch sees {torch.cuda.device_count()} here. "
            f"Try --nproc-per-node {torch.cuda.device_count()}."
        )
    return torch.device("cuda", local_rank)


def initialize(config: Config) -> Topology:
    """Join the job and build the groups of the configured layout; every rank calls it once.

    Uses torchrun's environment, or a world of one without it; keeps a process group that exists already. The seed of
    every rank's dropout follows from `training.seed` and its place. Raises ConfigError when the world does not fit.
    """
    device = choose_device(config)
    apply_patches(device.type)
    layout = config.parallel
    if not dist.is_initialized():
        timeout = timedelta(seconds=layout.timeout_seconds)
        backend = "nccl" if device.type == "cuda" else "gloo"
        has_place = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        rank, world_size = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if has_place else (0, 1)
        if loopback.is_enough(world_size):
            loopback.use()
        if meeting.launcher_holds_store() or world_size > 1:
            fresh = meeting.fresh_store if meeting.launcher_holds_store() else loopback.own_store
            store = fresh(rank, world_size, timeout)
            place = {} if store is None else {"store": store, "rank": rank, "world_size": world_size}
            dist.init_process_group(backend, timeout=timeout, **place)
        else:
            # Nobody else to meet, so nothing has to listen.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world_size = dist.get_world_size()
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
    )
    _seed_random_numbers(config)
    return Topology(
        rank=dist.get_rank(),
        world_size=world_size,
        device=device,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=layout.tensor,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=layout.pipeline,
        virtual_size=layout.virtual_pipeline or 1,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=layout.expert,
        expert_data_size=parallel_state.get_expert_data_parallel_world_size(),
    )


def _seed_random_numbers(config: Config) -> None:
    # Only dropout draws from these: weights come from models/initialize.py, data order from data/samples.py. Ranks that
    # hold different tokens need different masks, so the place in pipeline and data parallelism enters the seed; tensor
    # and expert ranks get theirs from Megatron's tracker.
    place = 100 * parallel_state.get_pipeline_model_parallel_rank() + 10_000 * parallel_state.get_data_parallel_rank()
    torch.manual_seed(config.training.seed + place)
    tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed + place, force_reset_rng=True)


def destroy() -> None:
    """Leave the job: destroy Megatron's groups and torch's. Safe to call twice."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
