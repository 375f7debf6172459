"""Boxes of a global tensor, written by several ranks and read by any: each element once, or an error."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)

# isort: split
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from base.errors import ConfigError
from checkpoint import manifest
from checkpoint.shards import ShardReader, ShardWriter
from memory.host_link import HostLink

pytestmark = pytest.mark.fast

WHOLE = torch.arange(24.0).view(6, 4)


def _box(rank: int, ranks: int, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("weight", data, (0, rank, ranks))


def _written(folder: Path, ranks: int) -> Path:
    """Write a checkpoint of WHOLE, of whose rows each rank writes a shard."""
    files = {}
    for rank, shard in enumerate(WHOLE.chunk(ranks)):
        snapshot, name = ShardWriter(HostLink(torch.device("cpu"))), f"rank_{rank:05d}.safetensors"
        snapshot.take([_box(rank, ranks, shard.clone())])
        files[name] = snapshot.write(folder / name, threading.Event())
    for name in (manifest.STATE, manifest.CONFIG):
        files[name] = manifest.write_text(folder / name, "{}")
    manifest.write(folder, 1, files)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_ranks_read_what_others_wrote(ranks: int, tmp_path: Path) -> None:
    reader = ShardReader(_written(tmp_path, 3))
    for rank, shard in enumerate(WHOLE.chunk(ranks)):
        target = torch.full_like(shard, -1.0)
        reader.fill(_box(rank, ranks, target))
        assert torch.equal(target, shard)


def test_elements_that_nobody_wrote_are_an_error(tmp_path: Path) -> None:
    reader = ShardReader(_written(tmp_path, 3))
    del reader._boxes["weight"][1]
    reader.fill(_box(0, 3, torch.empty(2, 4)))
    with pytest.raises(ConfigError, match=r"holds only 16 of the 24 elements of weight that this rank needs"):
        reader.fill(_box(0, 1, torch.empty(6, 4)))


def test_a_tensor_of_another_shape_or_name_is_an_error(tmp_path: Path) -> None:
    reader = ShardReader(_written(tmp_path, 2))
    with pytest.raises(ConfigError, match=r"has weight in shape \[6, 4\], but this model needs \[6, 3\]"):
        reader.fill(_box(0, 1, torch.empty(6, 3)))
    with pytest.raises(ConfigError, match="has no tensor bias"):
        reader.fill(ShardedTensor.from_rank_offsets("bias", torch.empty(6)))
