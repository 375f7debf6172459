"""Which rank is where, for several layouts, and what a world that does not fit is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from base.errors import ConfigError
from configs.schema import Config, MoEConfig, ParallelConfig, TrainingConfig
from parallel import topology
from tests import distributed


def make_config(**sizes: Any) -> Config:
    return Config(parallel=ParallelConfig(**sizes), moe=MoEConfig(num_experts=4), training=TrainingConfig(device="cpu"))


AXES = ("tensor", "context", "data", "data_context", "pipeline", "expert", "expert_tensor", "expert_data")


def coordinates_of_rank(config: Config) -> dict[str, Any]:
    """What this rank's topology says: scalars, and of each axis (rank, size, ranks of its group)."""
    found = topology.initialize(config)
    axes = {name: getattr(found, name) for name in AXES}
    return {
        "rank": found.rank,
        "world_size": found.world_size,
        "device": found.device,
        "speaks": found.speaks_for_stage,
        "axes": {name: (axis.rank, axis.size, dist.get_process_group_ranks(axis.group)) for name, axis in axes.items()},
        "megatron": [found.groups.tp, found.groups.cp, found.groups.dp]
        == [axes[name].group for name in ("tensor", "context", "data")],
    }


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
    sizes, groups, coordinates = LAYOUTS[layout]
    results = distributed.run(coordinates_of_rank, 4, make_config(**sizes))
    assert {name: results[0]["axes"][name][2] for name in groups} == groups
    found = [result["axes"] for result in results]
    assert [tuple(axes[name][0] for name in ("tensor", "pipeline", "data", "expert")) for axes in found] == coordinates
    for i, result in enumerate(results):
        assert (result["rank"], result["world_size"], result["device"]) == (i, 4, torch.device("cpu")) and result[
            "megatron"
        ]
        for rank, size, ranks in result["axes"].values():
            assert size == len(ranks) and ranks[rank] == i
        assert result["axes"]["context"] == (0, 1, [i]) and result["axes"]["data_context"] == result["axes"]["data"]
    first = found[0]
    assert 4 == first["tensor"][1] * first["pipeline"][1] * first["data"][1]
    # One rank of each stage speaks for it.
    speakers = [axes["pipeline"][0] for axes, result in zip(found, results, strict=True) if result["speaks"]]
    assert sorted(speakers) == list(range(first["pipeline"][1]))


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
        distributed.run(coordinates_of_rank, 3, make_config(tensor=2))
    assert isinstance(caught.value.__cause__, ConfigError)
    assert "world size (3) must be divisible by parallel.tensor x pipeline x context (2 x 1 x 1 = 2)" in str(
        caught.value.__cause__
    )


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"training.device \(cuda\) needs a CUDA GPU.*Try training.device=cpu"):
        topology.choose_device(Config(training=TrainingConfig(device="cuda")))
    assert topology.choose_device(Config(training=TrainingConfig(device="auto"))) == torch.device("cpu")


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        ConfigError, match=r"local rank \(2\) has no GPU: torch finds only 2 on this machine. Try --nproc-per-node 2"
    ):
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
