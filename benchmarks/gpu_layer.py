"""One MoE layer of a published model's size on GPUs, in bf16, beside Megatron-core's own.

`python -m benchmarks.gpu_layer [--shape mixtral_8x7b] [--tokens 8192] [--rounds 10] [--small] [--json]`

Alone it is one rank with all experts; under torchrun the experts are spread over all ranks, one GPU each, and every
rank has so many tokens. Sizes and router are the experiment's. Forward and backward pass of the layer, router and
shared expert included. All variants have the same weights and take turns on the same tokens; a variant's number is the
median of its rounds, each of four steps between two CUDA events, of the slowest rank. Peak memory is of one step:
weights, their gradients and what is kept in between, the tokens themselves left out. Overlap is the share of the time
of NCCL's kernels in which another kernel runs, in a profile of one step of rank 0; busy the share of the step in which
any does. Difference is the norm of the output's difference from ours in one chunk, relative to the output's.

Of DeepSeek-V3 a rank holds 32 of the 256 experts, as with expert parallelism over eight ranks: fewer ranks have fewer
experts in all.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from parallel.topology import Topology, initialize  # before Megatron-core

# isort: split
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module

from benchmarks import rounds, tables
from benchmarks.accelerator import step_flops
from benchmarks.megatron_layer import LINEAR, fill_experts, kinds_of_experts, megatron_layer
from configs import derived
from configs.compose import compose
from configs.ranks import launched
from configs.schema import Config, ConfigError
from configs.validate import validate
from models.transformer_config import transformer_config
from moe.chunk_plan import Plan
from moe.layer import MixtrainMoELayer
from moe.spec import moe_spec
from parallel import card
from training.report.metrics import peak_flops
from training.report.timeline import merged

SHAPES = ("mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3_like")
MOST_EXPERTS = 32  # of DeepSeek-V3, of a rank
DEGREES = (1, 4)  # chunks of both passes
INPUTS = 4  # other tokens in each step, as in training
WARM_UP, REPEATS = 3, 4  # steps
# In place of the experiment's sizes, for a device that is none.
SMALL = (
    *("model.hidden_size=64", "model.num_attention_heads=4", "model.num_query_groups=4", "model.head_dim=16"),
    *("moe.ffn_hidden_size=32", "moe.num_experts=8", "moe.top_k=2", "moe.num_groups=null", "moe.group_top_k=null"),
)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Variant:
    """An implementation of the layer: what prepares it for a step, its parameters, its call on [s, b, H]."""

    name: str
    layer: MoELayer
    plan: Plan | None = None

    def forward(self, hidden_sbH: torch.Tensor) -> torch.Tensor:
        if self.plan is not None:
            self.layer.plan = self.plan
        return self.layer(hidden_sbH)[0]


def make_config(shape: str, world_size: int, tokens: int, small: bool) -> Config:
    """The experiment with one layer, its experts over all ranks. Raises ConfigError."""
    composed = compose([f"experiment={shape}", "parallel=single"])
    experts = composed.moe.num_experts or 0
    if shape == "deepseek_v3_like":
        experts = min(experts, MOST_EXPERTS * world_size)
    config = compose(
        [
            *(f"experiment={shape}", "parallel=single", f"parallel.expert={world_size}"),
            *("model.num_layers=1", "moe.layers=1", f"moe.num_experts={experts}", f"model.sequence_length={tokens}"),
            *("training.micro_batch_size=1", f"training.global_batch_size={world_size}", "training.recompute=none"),
            *("training.device=cuda", "training.precision=bf16", "moe.pipeline_degree=1", "moe.memory_strategy=keep"),
            *(SMALL if small else ()),
            *(["moe.shared_expert_ffn_hidden_size=32"] if small and composed.moe.shared_expert_ffn_hidden_size else []),
        ]
    )
    validate(config, world_size)
    return config


def layer_flops(config: Config) -> float:
    """Of one rank's forward and backward pass: experts, shared expert and router."""
    moe, tokens, hidden = config.moe, derived.tokens_per_call(config), config.model.hidden_size
    routed = step_flops(tokens * moe.top_k, hidden, derived.expert_ffn_hidden_size(config))
    shared = step_flops(tokens, hidden, moe.shared_expert_ffn_hidden_size or 0)
    return routed + shared + 3 * 2.0 * tokens * hidden * (moe.num_experts or 0)


# ---------------------------------------------------------------------------------------------------------------------
# Building
# ---------------------------------------------------------------------------------------------------------------------


def build(config: Config, topology: Topology) -> list[Variant]:
    """Ours in each degree, and Megatron-core's with each kind of experts; all with the same weights."""
    megatron = transformer_config(config)
    spec = moe_spec(topology.groups, LINEAR, config.model.activation, Plan())
    ours: MixtrainMoELayer = build_module(spec, config=megatron)
    ours.set_layer_number(1)
    ours.to(topology.device)
    torch.manual_seed(config.training.seed + topology.rank)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=config.model.init_std)
    shared = [parameter for name, parameter in ours.named_parameters() if not name.startswith("experts.")]
    for parameter in shared:  # which all ranks have
        dist.broadcast(parameter.data, 0)
    variants = [Variant(f"ours, {degree} chunk{'s' * (degree > 1)}", ours, Plan(degree, degree)) for degree in DEGREES]
    for kind in kinds_of_experts():
        variants.append(Variant(f"Megatron-core, {kind}", _megatron(ours, kind, topology.device)))
    return variants


def _megatron(ours: MixtrainMoELayer, kind: str, device: torch.device) -> MoELayer:
    config = copy.copy(ours.config)
    config.moe_grouped_gemm = kind != "SequentialMLP"
    config.moe_permute_fusion = kind == "TEGroupedMLP"
    layer = megatron_layer(config, kind=kind)
    layer.to(device)
    own = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("experts."):
                parameter.copy_(own[name])
    fill_experts(layer, own["experts.linear_fc1.weight"], own["experts.linear_fc2.weight"])
    return layer


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


class Steps:
    """Steps of all variants on the same tokens."""

    def __init__(self, config: Config, device: torch.device) -> None:
        shape = (derived.tokens_per_call(config), 1, config.model.hidden_size)
        self.inputs = [torch.randn(shape, device=device).bfloat16() for _ in range(INPUTS)]
        self.output_grad = torch.randn(shape, device=device).bfloat16()

    def take(self, variant: Variant, count: int = 1) -> torch.Tensor:
        """So many steps; the last output."""
        for hidden in itertools.islice(itertools.cycle(self.inputs), count):
            for parameter in variant.layer.parameters():
                parameter.grad = None
            output = variant.forward(hidden.detach().requires_grad_())
            output.backward(self.output_grad)
        return output.detach()


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Of one of `repeats` that `work` does, on the slowest rank."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor([start.elapsed_time(end) / repeats], device=torch.cuda.current_device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def time_in_turns(variants: list[Variant], steps: Steps, num_rounds: int) -> rounds.Rounds:
    """Each round begins with another variant."""
    found: dict[str, dict[str, list[float]]] = {variant.name: {"step": []} for variant in variants}
    for turn in range(num_rounds):
        first = turn % len(variants)
        for variant in variants[first:] + variants[:first]:
            took = milliseconds(functools.partial(steps.take, variant, REPEATS), REPEATS)
            found[variant.name]["step"].append(took / 1e3)
    return rounds.Rounds(found, num_rounds, 0)


def peak_bytes(variant: Variant, steps: Steps) -> int:
    """Device memory of one step: the layer's weights, and the most that the step adds to what is there before it."""
    for parameter in variant.layer.parameters():
        parameter.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    steps.take(variant)
    torch.cuda.synchronize()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in variant.layer.parameters())
    added = torch.cuda.max_memory_allocated() - before
    for parameter in variant.layer.parameters():
        parameter.grad = None
    return weights + added


def length(intervals: Iterable[Interval]) -> float:
    """Of all together, which may overlap."""
    return sum(end - start for start, end in merged(intervals))


def overlap(communication: list[Interval], computation: list[Interval]) -> float | None:
    """The share of the time of communication in which something is computed; None without communication."""
    of_both = length(communication) + length(computation) - length([*communication, *computation])
    return of_both / length(communication) if communication else None


def profile(work: Callable[[], Any]) -> tuple[float | None, float | None]:
    """The overlap of communication with computation in `work`, and the share of its time in which the GPU is busy;
    None where the profiler sees no kernels."""
    from torch import profiler

    torch.cuda.synchronize()
    if profiler.ProfilerActivity.CUDA not in profiler.supported_activities():
        work()  # the other ranks do it too
        return None, None
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    events = [
        event
        for event in found.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    kernels = [(event.name, (event.time_range.start, event.time_range.end)) for event in events]
    communication = [interval for name, interval in kernels if name.startswith("nccl")]
    computation = [interval for name, interval in kernels if not name.startswith(("nccl", "Memcpy", "Memset"))]
    if not computation:
        return None, None
    everything = merged(interval for _, interval in kernels)
    return overlap(communication, computation), length(everything) / (everything[-1][1] - everything[0][0])


def measure(config: Config, topology: Topology, num_rounds: int) -> list[dict[str, Any]]:
    """A row of each variant."""
    variants, steps = build(config, topology), Steps(config, topology.device)
    reference = steps.take(variants[0])
    differences = {}
    for variant in variants:
        steps.take(variant, WARM_UP)
        output = steps.take(variant)  # of the first tokens again
        differences[variant.name] = ((output - reference).float().norm() / reference.float().norm()).item()
    peaks = {variant.name: peak_bytes(variant, steps) for variant in variants}
    times = time_in_turns(variants, steps, num_rounds)
    theirs = [variant.name for variant in variants if variant.plan is None]
    fastest = min(theirs, key=lambda name: times.median(name, "step"))
    flops, peak = layer_flops(config), peak_flops(config, topology.device)
    rows = []
    for variant in variants:
        seconds = times.median(variant.name, "step")
        hidden, busy = profile(functools.partial(steps.take, variant))
        rows.append(
            {
                "variant": variant.name,
                "ours": variant.plan is not None,
                "milliseconds": 1e3 * seconds,
                "tflops": flops / seconds / 1e12,
                "share_of_peak": flops / seconds / peak if peak else None,
                "speedup": times.speedup(variant.name, "step", fastest),
                "fastest_of_megatron": fastest,
                "peak_gib": peaks[variant.name] / 2**30,
                "overlap": hidden,
                "busy": busy,
                "difference": differences[variant.name],
            }
        )
    return rows


HEADINGS = ("layer", "ms", "TFLOP/s", "of peak", "speed", "peak GiB", "overlap", "busy", "difference")


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table under HEADINGS; `speed` is relative to the fastest of Megatron-core's."""
    shares = ["-" if row[name] is None else f"{row[name]:.0%}" for name in ("share_of_peak", "overlap", "busy")]
    return [
        row["variant"],
        f"{row['milliseconds']:.2f}",
        f"{row['tflops']:.1f}",
        shares[0],
        f"{row['speedup']:.2f}",
        f"{row['peak_gib']:.2f}",
        *shares[1:],
        f"{row['difference']:.1e}",
    ]


def description(config: Config, world_size: int) -> str:
    """The sizes of what is measured, in one line."""
    moe = config.moe
    shared = f", a shared one of {moe.shared_expert_ffn_hidden_size}" if moe.shared_expert_ffn_hidden_size else ""
    return (
        f"{config.name}: hidden {config.model.hidden_size}, {moe.num_experts} experts of width "
        f"{derived.expert_ffn_hidden_size(config)}, top {moe.top_k}{shared}; {world_size} rank(s) of "
        f"{derived.tokens_per_call(config)} tokens"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a device without speed")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        config = make_config(arguments.shape, launched().world_size, arguments.tokens, arguments.small)
    except ConfigError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU, and torch sees none here")
    card.set_environment(config)  # as a training has it
    topology = initialize(config)
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        rows = measure(config, topology, arguments.rounds)
        if topology.rank == 0:
            print(description(config, topology.world_size))
            print(tables.table(HEADINGS, [cells(row) for row in rows], markdown=False))
            if arguments.json:
                sizes = description(config, topology.world_size)
                print(json.dumps({"sizes": sizes, "ranks": topology.world_size, "rows": rows}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
