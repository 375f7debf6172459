"""Which rank is where, for several layouts, and what a world that does not fit is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from configs.schema import Config, ConfigError, MoEConfig, ParallelConfig, TrainingConfig
from parallel import topology
from tests import distributed


def make_config(**sizes: Any) -> Config:
    return Config(parallel=ParallelConfig(**sizes), moe=MoEConfig(num_experts=4), training=TrainingConfig(device="cpu"))


def place(config: Config) -> dict[str, Any]:
    from megatron.core import parallel_state

    found = topology.initialize(config)
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "expert": parallel_state.get_expert_model_parallel_group(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_group(),
        "expert_data": parallel_state.get_expert_data_parallel_group(),
    }
    return {"topology": found, "groups": {name: dist.get_process_group_ranks(group) for name, group in groups.items()}}


# For each layout of 4 ranks the groups of rank 0, and (tensor, pipeline, data, expert) of every rank.
LAYOUTS = {
    "data": ({}, {"data": [0, 1, 2, 3], "expert_data": [0, 1, 2, 3], "expert": [0]}, [(0, 0, i, 0) for i in range(4)]),
    "tensor, pipeline": (
        {"tensor": 2, "pipeline": 2},
        {"tensor": [0, 1], "pipeline": [0, 2], "data": [0], "expert_tensor": [0, 1]},
        [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)],
    ),
    "tensor, data": (
        {"tensor": 2},
        {"tensor": [0, 1], "data": [0, 2], "expert_tensor": [0, 1], "expert_data": [0, 2]},
        [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (1, 0, 1, 0)],
    ),
    "pipeline, expert": (
        {"pipeline": 2, "expert": 2},
        {"pipeline": [0, 2], "data": [0, 1], "expert": [0, 1], "expert_data": [0]},
        [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 0), (0, 1, 1, 1)],
    ),
    "tensor, expert folded": (
        {"tensor": 2, "expert": 2},
        {"tensor": [0, 1], "data": [0, 2], "expert": [0, 1], "expert_tensor": [0], "expert_data": [0, 2]},
        [(0, 0, 0, 0), (1, 0, 0, 1), (0, 0, 1, 0), (1, 0, 1, 1)],
    ),
    "tensor, expert split": (
        {"tensor": 2, "expert": 2, "expert_tensor": 2},
        {"tensor": [0, 1], "data": [0, 2], "expert": [0, 2], "expert_tensor": [0, 1], "expert_data": [0]},
        [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 1, 1), (1, 0, 1, 1)],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_layout(layout: str) -> None:
    sizes, groups, places = LAYOUTS[layout]
    results = distributed.run(place, 4, make_config(**sizes))
    assert {name: results[0]["groups"][name] for name in groups} == groups
    found = [result["topology"] for result in results]
    assert [(t.tensor_rank, t.pipeline_rank, t.data_rank, t.expert_rank) for t in found] == places
    assert [t.rank for t in found] == [0, 1, 2, 3] and {t.device for t in found} == {torch.device("cpu")}
    first = found[0]
    assert first.world_size == 4 == first.tensor_size * first.pipeline_size * first.data_size
    assert first.expert_data_size == len(results[0]["groups"]["expert_data"])
    assert [t.is_first_stage for t in found] == [t.pipeline_rank == 0 for t in found]
    assert [t.is_last_stage for t in found] == [t.pipeline_rank == t.pipeline_size - 1 for t in found]


def random_numbers(config: Config) -> tuple[list[float], list[float]]:
    from megatron.core import tensor_parallel

    topology.initialize(config)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        own = torch.rand(3).tolist()
    return torch.rand(3).tolist(), own


def test_dropout_streams() -> None:
    """Tensor ranks share the common stream and have one of their own each; other places draw other numbers."""
    results = distributed.run(random_numbers, 4, make_config(tensor=2))
    common, own = [result[0] for result in results], [result[1] for result in results]
    assert common[0] == common[1] != common[2] == common[3]
    assert len({tuple(numbers) for numbers in own}) == 4


def test_world_that_does_not_fit() -> None:
    with pytest.raises(distributed.RankError) as caught:
        distributed.run(place, 3, make_config(tensor=2))
    assert isinstance(caught.value.__cause__, ConfigError)
    assert "world size (3) must be divisible by parallel.tensor x pipeline x context (2 x 1 x 1 = 2)" in str(caught.value.__cause__)


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"training.device \(cuda\) needs a CUDA GPU.*Try training.device=cpu"):
        topology.choose_device(Config(training=TrainingConfig(device="cuda")))
    assert topology.choose_device(Config(training=TrainingConfig(device="auto"))) == torch.device("cpu")


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"local rank \(2\) has no GPU of its own: torch sees 2 here. Try --nproc-per-node 2"):
        topology.choose_device(Config())
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert topology.choose_device(Config()) == torch.device("cuda", 1)
    assert topology.choose_device(Config(training=TrainingConfig(device="cpu"))) == torch.device("cpu")


def initialize_and_leave(config: Config) -> bool:
    topology.initialize(config)
    topology.destroy()
    topology.destroy()
    return dist.is_initialized()


def test_destroy_twice() -> None:
    assert distributed.run(initialize_and_leave, 2, make_config()) == [False, False]
