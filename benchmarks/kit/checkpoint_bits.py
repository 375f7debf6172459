"""Two checkpoints beside each other, bit by bit, whatever layouts and tiers wrote them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from checkpoint import manifest, safetensors_header


def checkpoint_differences(ours: Path, theirs: Path) -> tuple[int, list[str]]:
    """How many tensors two checkpoints hold, and the names of those that are not the same bits."""
    one, other = checkpoint_tensors(ours), checkpoint_tensors(theirs)
    differ = sorted(one.keys() ^ other.keys())
    for name in sorted(one.keys() & other.keys()):
        a, b = one[name], other[name]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(_bits(a), _bits(b)):
            differ.append(name)
    return len(one), differ


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The global tensors of a checkpoint, put together from all ranks' files. Raises ValueError where it is not whole,
    or OSError."""
    found: dict[str, torch.Tensor] = {}
    for name in manifest.read(folder):
        if not name.endswith(safetensors_header.SUFFIX):
            continue
        with safe_open(folder / name, framework="pt") as stream:
            for key, entry in safetensors_header.read(folder / name).items():
                shard = stream.get_tensor(key)
                whole = found.setdefault(entry.key, torch.zeros(entry.global_shape, dtype=shard.dtype))
                box = (1,) * (len(entry.global_shape) - shard.dim()) + tuple(shard.shape)
                whole[tuple(slice(o, o + n) for o, n in zip(entry.offset, box, strict=True))] = shard.view(box)
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
