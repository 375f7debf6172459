"""A user of owned parameters: it takes a few ordinary weights of a model out of Megatron-core's buffers, whole or in
parts over the data parallel ranks. Without it, or with it, a training comes to the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors import safe_open

from configs.schema import Config
from tests.training.test_step import batches_of, build

MATRIX, VECTOR = "decoder.layers.0.mlp.linear_fc2", "decoder.layers.0.input_layernorm"
Numbers = list[tuple[float, float, bool]]  # of each step: loss, gradient norm, whether the weights were changed


@dataclass(frozen=True)
class Training:
    """A training on this rank. `user`: none, whole, narrow (whole, with a gradient in bf16) or part."""

    config: Config
    user: str = "none"
    folder: Path | None = None  # that checkpoints are written below
    resume: Path | None = None


class _Gathered(torch.autograd.Function):
    """The whole matrix from its parts [R / ranks, C]; backward the sum of all ranks' gradients, in fp32, goes to the
    owner by itself."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.shard, ctx.group = shard, group
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard.detach(), group=group)
        return torch.cat(shards)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        whole = grads[0].float()
        dist.all_reduce(whole, group=ctx.group)
        ctx.shard.owned.add_grad(whole.chunk(ctx.group.size())[ctx.group.rank()])
        return None, None


def take(chunk: torch.nn.Module, group: dist.ProcessGroup, user: str) -> None:
    """Own the chunk's MATRIX, of which this rank keeps its part, and VECTOR."""
    from parallel.owned import ShardBox, own

    layer = chunk.get_submodule(MATRIX)
    if user in ("whole", "narrow"):
        own(layer.weight, group, grad_dtype=torch.float32 if user == "whole" else torch.bfloat16)
    else:
        whole = layer.weight.detach()
        shard = torch.nn.Parameter(whole.chunk(group.size())[group.rank()].clone())
        for name, value in vars(layer.weight).items():  # Megatron's marks
            setattr(shard, name, value)
        layer.weight = shard
        own(shard, None, box=ShardBox(tuple(whole.shape), (group.rank() * len(shard), 0)))

        def gather(module: torch.nn.Module, *_: Any) -> None:
            vars(module)["weight"] = _Gathered.apply(shard, group)  # hides the parameter

        def forget(module: torch.nn.Module, *_: Any) -> None:
            del vars(module)["weight"]

        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(forget)
    own(chunk.get_submodule(VECTOR).weight, group)


@contextlib.contextmanager
def taking(user: str) -> Iterator[None]:
    """Inside, some parameters of each engine's first pipeline stage are owned."""
    from models.build import build_model

    def build_and_take(config: Config, topology: Any, vocab_size: int, *, streams: bool) -> list[torch.nn.Module]:
        chunks = build_model(config, topology, vocab_size, streams=streams)
        if user != "none" and topology.pipeline.rank == 0:
            take(chunks[0], topology.data_context.group, user)
        return chunks

    with mock.patch("training.engine.build_model", build_and_take):
        yield


def train(training: Training, first: int, last: int) -> Numbers:
    """Take the steps [first, last], and save then."""
    from checkpoint.saver import Saver
    from training.progress import Progress, load, state
    from training.step import train_step

    with taking(training.user):
        engine = build(training.config)
    if training.resume is not None:
        assert load(engine, training.resume).step == first - 1
    data, found = engine.topology.data, []
    for step in range(first, last + 1):
        result = train_step(engine, batches_of(training.config, step)[data.rank :: data.size], step)
        found.append((result.loss, result.grad_norm, result.updated))
    engine.synchronize()
    if training.folder is not None:
        saver = Saver(training.config, engine.host_link)
        text = state(engine, Progress(last, 0), {})
        saver.start(engine.chunks, engine.optimizer, text, checkpoint_of(training, last))
        saver.finish()
    engine.close()
    return found


def checkpoint_of(training: Training, step: int) -> Path:
    """Where a training's checkpoint is."""
    assert training.folder is not None
    return training.folder / f"step_{step:07d}"


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's global tensors, of whose elements each is in one box; without random number states."""
    from checkpoint import safetensors_header

    whole: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name, entry in safetensors_header.read(path).items():
                if entry.key.startswith("random."):
                    continue
                value = file.get_tensor(name)
                value = value[(None,) * (len(entry.global_shape) - value.dim())]
                slices = tuple(slice(o, o + n) for o, n in zip(entry.offset, value.shape, strict=True))
                whole.setdefault(entry.key, torch.zeros(entry.global_shape, dtype=value.dtype))[slices] = value
                filled.setdefault(entry.key, torch.zeros(entry.global_shape))[slices] += 1
    assert all((count == 1).all() for count in filled.values())
    return whole


def differences(one: Path, other: Path) -> list[str]:
    """Names of tensors of two checkpoints that are not the same bits."""
    ours, theirs = contents(one), contents(other)
    both = ours.keys() & theirs.keys()
    return sorted((ours.keys() ^ theirs.keys()) | {name for name in both if not torch.equal(ours[name], theirs[name])})


def largest(ours: Numbers, theirs: Numbers, index: int) -> float:
    """The largest relative difference of a number over the steps that were taken."""
    taken = [(a[index], b[index]) for a, b in zip(ours, theirs, strict=True) if b[2]]
    return max(abs(a - b) / abs(b) for a, b in taken)
