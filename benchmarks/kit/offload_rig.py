"""A virtual accelerator for the optimizer's tiers: a model whose passes sleep for their time, the real engine beside
them, and a link that is held to a rate.

Megatron-core's DDP with overlap, the optimizer and its tiers are what a training runs, over real parameters in bf16.
The accelerator's part uses no core and leaves the host's memory alone: passes sleep, gradients are written once, their
norm is said and not computed, and what the device would update it sleeps for. So numbers mean nothing with an engine
that updates on the device. Copies over the link are real copies, each made to last as long as the link would take
(emulated); the host's update and the disk are real.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)

# isort: split
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from benchmarks.kit.accelerator import Clock
from configs.compose import compose
from configs.schema import Config
from memory.budgets import open_budgets
from memory.copy_stream import CopyStream
from memory.host_link import HostLink
from optim.offload.optimizer import OffloadedOptimizer, offload_of
from optim.optimizer import apply_gradients, begin_step, build_optimizer, prepare_gradients
from parallel import topology as topology_module
from parallel.megatron.ddp import release
from parallel.topology import Topology

CLIP = 1.0
NORMS = {False: 0.5 * CLIP, True: 1.25 * CLIP}  # of a step that is not clipped, and of one that is


@dataclass(frozen=True)
class Sizes:
    """Of the model: layers of four matrices and two vectors, each layer a bucket of DDP's and one of the tiers'."""

    layers: int = 16
    width: int = 296  # 12 width^2 parameters a layer

    @property
    def matrices(self) -> list[tuple[int, int]]:
        width = self.width
        return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]

    @property
    def bucket(self) -> int:
        """Parameters of a layer's matrices, the largest bucket."""
        return sum(num_rows * columns for num_rows, columns in self.matrices)


class Layer(torch.nn.Module):
    """Takes its time."""

    def __init__(self, sizes: Sizes, clock: Clock, forward: float, backward: float):
        super().__init__()
        self.clock, self.seconds = clock, (forward, backward)
        shapes = [*sizes.matrices, (sizes.width,), (sizes.width,)]
        for index, shape in enumerate(shapes):
            weight = torch.nn.Parameter(torch.full(shape, 0.5, dtype=torch.bfloat16))
            self.register_parameter(f"weight{index}", weight)
        self.weights = list(self.parameters())
        # Gradients that autograd hands on, and nobody reads: what counts is in DDP's buffer.
        self.unread = torch.zeros(max(weight.numel() for weight in self.weights), dtype=torch.bfloat16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Pass.apply(self, hidden, *self.weights)
        return result


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, hidden: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        layer.clock.work(layer.seconds[0])
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, hidden_grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        layer = ctx.layer
        layer.clock.work(layer.seconds[1])
        grads = []
        for weight in layer.weights:
            weight.grad_added_to_main_grad, weight.grad_is_old = True, False
            grads.append(layer.unread[: weight.numel()].view(weight.shape))
        return None, hidden_grad, *grads


class Model(MegatronModule):
    """Layers one after the other."""

    def __init__(self, sizes: Sizes, forward: float, backward: float):
        settings = TransformerConfig(num_layers=sizes.layers, hidden_size=8, num_attention_heads=1, bf16=True)
        super().__init__(settings)
        clock, count = Clock(1.0), sizes.layers
        self.layers = torch.nn.ModuleList(Layer(sizes, clock, forward / count, backward / count) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Rig:
    """A training of the model, step by step."""

    def __init__(self, sizes: Sizes, passes: tuple[float, float], topology: Topology, overrides: Sequence[str]):
        """passes: seconds of the forward and of the backward pass."""
        self.sizes, self.passes = sizes, passes
        config = config_of(sizes, overrides)
        open_budgets(config.memory)
        model = Model(sizes, *passes)
        for parameter in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            bucket_size=sizes.bucket + 2 * sizes.width,
        )
        self.chunk = DistributedDataParallel(model.config, settings, model, pg_collection=topology.groups)
        self.host_link = HostLink(topology.device, config.parallel.timeout_seconds)
        self.optimizer = build_optimizer(config, topology, [self.chunk], self.host_link)
        self.set_gradients()

    @property
    def tiers(self) -> OffloadedOptimizer:
        tiers = offload_of(self.optimizer)
        assert tiers is not None
        return tiers

    def set_gradients(self) -> None:
        """What all steps have; a clipped one scales it in place."""
        for buffer in self.chunk.buffers:
            buffer.grad_data.fill_(1e-3)

    def link(self, rate: float, device_rate: float) -> None:
        """Hold the link to so many bytes per second each way, and what the device updates to its own."""
        jobs = self.tiers.jobs
        self.host_link.up.rate = self.host_link.down.rate = rate
        clock, element = Clock(1.0), 2 * self.tiers.layout.bytes_per_element + 6

        def virtual(index: int, *_: Any, **__: Any) -> Any:
            return lambda: clock.work(self.tiers.buckets[index].numel * element / device_rate)

        jobs._device_update = virtual  # type: ignore[method-assign]

    def step(self, clipped: bool = False) -> None:
        """As training/step.py takes it, but for the norm."""
        self._pass_through()
        apply_gradients(self.optimizer, NORMS[clipped])

    def passes_alone(self, count: int = 5) -> tuple[float, float]:
        """Median seconds of the forward and of the backward pass of steps that update nothing."""
        times = [self._pass_through(passive=True) for _ in range(count)]
        forward, backward = zip(*times, strict=True)
        return statistics.median(forward), statistics.median(backward)

    def _pass_through(self, passive: bool = False) -> tuple[float, float]:
        begin = time.perf_counter()
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        begin_step(self.optimizer, passive)
        loss = self.chunk(torch.zeros(1, requires_grad=True)).sum()
        middle = time.perf_counter()
        loss.backward()
        self.chunk.finish_grad_sync()
        prepare_gradients(self.optimizer)
        return middle - begin, time.perf_counter() - middle

    def steps(self, count: int, clipped: Sequence[bool] = (False,)) -> float:
        """Seconds of a step, after one more; the last one's update is what the first one's was beside."""
        self.step(clipped[0])
        before = time.perf_counter()
        for index in range(count):
            self.step(clipped[index % len(clipped)])
        seconds = (time.perf_counter() - before) / count
        self.tiers.synchronize()
        for stream in self.host_link.all:
            stream.submit(lambda: None).wait()
        if (problem := self.tiers.problem()) is not None:
            raise RuntimeError(problem)
        return seconds

    def close(self) -> None:
        self.host_link.close()
        self.tiers.close()
        release([self.chunk])


def config_of(sizes: Sizes, overrides: Sequence[str]) -> Config:
    """The quickstart's keys are of no matter here, but for those of the optimizer."""
    return compose(
        [
            "model=gpt_tiny",
            "training.precision=bf16",
            "training.device=cpu",
            "parallel.overlap_grad_reduce=true",
            f"optimizer.bucket_parameters={-(-sizes.bucket // 4096) * 4096}",
            f"optimizer.clip_grad={CLIP}",
            *overrides,
        ]
    )


def join() -> Topology:
    """A world of one."""
    return topology_module.initialize(compose(["model=gpt_tiny", "training.device=cpu"]))


@contextlib.contextmanager
def timeline(rig: Rig) -> Iterator[list[tuple[str, float, float]]]:
    """Inside, what each stream does is listed: (its name, begin, end), without what a rate adds."""
    jobs: list[tuple[str, float, float]] = []
    streams = rig.host_link.all

    def listed(stream: CopyStream) -> Any:
        submit = stream.submit

        def listing(work: Any, *rest: Any, **named: Any) -> Any:
            def timed() -> None:
                begin = time.perf_counter()
                work()
                jobs.append((stream.name, begin, time.perf_counter()))

            return submit(timed, *rest, **named)

        return listing

    for stream in streams:
        stream.submit = listed(stream)  # type: ignore[method-assign]
    try:
        yield jobs
    finally:
        for stream in streams:
            del stream.submit  # type: ignore[method-assign]
