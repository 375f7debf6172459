"""Rungs with one MoE layer of a published model's size, in bf16, next to Megatron-core's own and transformers' experts.

Sizes and router are the experiment's, all experts on this card (of DeepSeek-V3 32 of 256, as with expert parallelism
over eight). Forward and backward pass of the layer, router and shared expert included. All variants have the same
weights and take turns on the same tokens; a variant's time is the median of its rounds, each of four steps between two
CUDA events. Peak memory is of one step: weights, their gradients and what is kept in between, the tokens themselves
left out. Busy: the share of a step in which any kernel runs, of a profile. Difference: the norm of the output's
difference from ours in one chunk, relative to that of the output.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parallel.topology import Topology  # before Megatron-core

# isort: split
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module

from benchmarks.card.kernels import traced
from benchmarks.card.ladder import Task
from benchmarks.card.sides import device_of, joined
from benchmarks.kit import rounds
from benchmarks.kit.accelerator import step_flops
from benchmarks.kit.megatron_layer import LINEAR, SEQUENTIAL, fill_experts, kinds_of_experts, megatron_layer
from configs import derived
from configs.compose import compose
from configs.schema import Config
from configs.validate import validate
from models.transformer_config import transformer_config
from moe.chunk_plan import Plan
from moe.layer import MixtrainMoELayer, moe_spec
from training.report.metrics import peak_flops

SHAPES = ("mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3_like")
MOST_EXPERTS = 32  # of DeepSeek-V3, of a rank
DEGREES = (1, 4)  # chunks of both passes
INPUTS = 4  # other tokens in each step, as in training
WARM_UP, REPEATS = 3, 4  # steps
TOKENS, SMALL_TOKENS = 8192, 64
ROUNDS, SMALL_ROUNDS, OF_TIME = 10, 2, 0.5  # at most; of the rung's seconds
# In place of the experiment's sizes, for a device that is none.
SMALL = (
    *("model.hidden_size=64", "model.num_attention_heads=4", "model.num_query_groups=4", "model.head_dim=16"),
    *("moe.ffn_hidden_size=32", "moe.num_experts=8", "moe.top_k=2", "moe.num_groups=null", "moe.group_top_k=null"),
)


@dataclass(frozen=True)
class Variant:
    """An implementation of the layer: what prepares it for a step, its parameters, its call on [s, b, H]."""

    name: str
    layer: torch.nn.Module
    plan: Plan | None = None

    def forward(self, hidden_sbH: torch.Tensor) -> torch.Tensor:
        if self.plan is not None:
            self.layer.plan = self.plan  # type: ignore[assignment]
        output = self.layer(hidden_sbH)
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found


def make_config(shape: str, is_small: bool, device: str) -> Config:
    """The experiment with one layer and all its experts on one card. Raises ConfigError."""
    composed = compose([f"experiment={shape}", "parallel=single"])
    experts = composed.moe.num_experts or 0
    if shape == "deepseek_v3_like":
        experts = min(experts, MOST_EXPERTS)
    tokens = SMALL_TOKENS if is_small else TOKENS
    has_shared = composed.moe.shared_expert_ffn_hidden_size is not None
    config = compose(
        [
            *(f"experiment={shape}", "parallel=single", f"training.device={device}"),
            *("model.num_layers=1", "moe.layers=1", f"moe.num_experts={experts}", f"model.sequence_length={tokens}"),
            *("training.micro_batch_size=1", "training.global_batch_size=1", "training.recompute=none"),
            *("training.precision=bf16", "moe.pipeline_degree=1", "moe.memory_strategy=keep"),
            *(SMALL if is_small else ()),
            *(["moe.shared_expert_ffn_hidden_size=32"] if is_small and has_shared else []),
        ]
    )
    validate(config, 1)
    return config


def layer_flops(config: Config) -> float:
    """Return the floating-point operations of a forward and backward pass: experts, shared expert and router."""
    moe, tokens, hidden = config.moe, derived.tokens_per_call(config), config.model.hidden_size
    routed = step_flops(tokens * moe.top_k, hidden, derived.expert_ffn_hidden_size(config))
    shared = step_flops(tokens, hidden, moe.shared_expert_ffn_hidden_size or 0)
    return routed + shared + 3 * 2.0 * tokens * hidden * (moe.num_experts or 0)


# ---------------------------------------------------------------------------------------------------------------------
# Building
# ---------------------------------------------------------------------------------------------------------------------


def build(config: Config, topology: Topology) -> list[Variant]:
    """Return our layer in each degree, and Megatron-core's with each kind of experts; all with the same weights."""
    megatron = transformer_config(config)
    spec = moe_spec(topology.groups, LINEAR, config.model.activation, Plan())
    ours: MixtrainMoELayer = build_module(spec, config=megatron)
    ours.set_layer_number(1)
    ours.to(topology.device)
    torch.manual_seed(config.training.seed + topology.rank)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=config.model.init_std)
    variants = [Variant(f"ours, {degree} chunk{'s' * (degree > 1)}", ours, Plan(degree, degree)) for degree in DEGREES]
    # Megatron-core makes grouped experts on a GPU alone.
    for kind in kinds_of_experts() if topology.device.type == "cuda" else [SEQUENTIAL]:
        variants.append(Variant(f"Megatron-core, {kind}", _megatron(ours, kind, topology.device)))
    if (theirs := _transformers(ours, config)) is not None:
        variants.append(Variant("transformers, grouped_mm", theirs))
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


def _transformers(ours: MixtrainMoELayer, config: Config) -> torch.nn.Module | None:
    """Return transformers' block of the same family with our weights, its experts by torch's grouped product; None for
    a family with another router."""
    import transformers

    moe, sizes = config.moe, {"hidden_size": config.model.hidden_size, "num_experts_per_tok": config.moe.top_k}
    width = derived.expert_ffn_hidden_size(config)
    if config.name == "mixtral_8x7b":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        settings = transformers.MixtralConfig(**sizes, num_local_experts=moe.num_experts, intermediate_size=width)
    elif config.name == "qwen3_30b_a3b":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        settings = transformers.Qwen3MoeConfig(
            **sizes, num_experts=moe.num_experts, moe_intermediate_size=width, norm_topk_prob=True
        )
    else:
        return None
    settings._experts_implementation = "grouped_mm"
    own = dict(ours.named_parameters())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        block: torch.nn.Module = Block(settings)
    finally:
        torch.set_default_dtype(before)
    block.to(own["router.weight"].device)
    with torch.no_grad():
        named = dict(block.named_parameters())
        named["gate.weight"].copy_(own["router.weight"])
        named["experts.gate_up_proj"].copy_(own["experts.linear_fc1.weight"])
        named["experts.down_proj"].copy_(own["experts.linear_fc2.weight"])
    return block


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
        """Take `count` steps; return the last output."""
        for hidden in itertools.islice(itertools.cycle(self.inputs), count):
            for parameter in variant.layer.parameters():
                parameter.grad = None
            output = variant.forward(hidden.detach().requires_grad_())
            output.backward(self.output_grad)
        return output.detach()


def milliseconds(work: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Return the milliseconds of one of the `repeats` of `work`."""
    if device.type != "cuda":
        before = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - before) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def time_in_turns(variants: list[Variant], steps: Steps, task: Task, device: torch.device) -> rounds.Rounds:
    """Time all variants in rounds, each of which begins with another variant."""
    found: dict[str, dict[str, list[float]]] = {variant.name: {"step": []} for variant in variants}
    began, turn = time.monotonic(), 0
    most = SMALL_ROUNDS if task.is_small else ROUNDS
    while turn < most and (turn < SMALL_ROUNDS or time.monotonic() - began < OF_TIME * task.seconds):
        first = turn % len(variants)
        for variant in variants[first:] + variants[:first]:
            took = milliseconds(functools.partial(steps.take, variant, REPEATS), REPEATS, device)
            found[variant.name]["step"].append(took / 1e3)
        turn += 1
    return rounds.Rounds(found, turn, 0)


def peak_bytes(variant: Variant, steps: Steps, device: torch.device) -> int | None:
    """Return the device memory of one step: the layer's weights, and the most that the step adds to the allocated
    memory; None on a CPU."""
    if device.type != "cuda":
        return None
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


def measure_shape(task: Task, shape: str) -> None:
    """Show a row for each variant of the layer, and one for the speed of our fastest next to each of the others."""
    config = make_config(shape, task.is_small, device_of().type)
    with joined(config) as topology:
        _measure(task, config, topology)


def _measure(task: Task, config: Config, topology: Topology) -> None:
    variants, steps, device = build(config, topology), Steps(config, topology.device), topology.device
    reference = steps.take(variants[0])
    differences = {}
    for variant in variants:
        steps.take(variant, 1 if task.is_small else WARM_UP)
        output = steps.take(variant)  # of the first tokens again
        differences[variant.name] = ((output - reference).float().norm() / reference.float().norm()).item()
    peaks = {variant.name: peak_bytes(variant, steps, device) for variant in variants}
    times = time_in_turns(variants, steps, task, device)
    flops, peak = layer_flops(config), peak_flops(config, device)
    ours = [variant.name for variant in variants if variant.plan is not None]
    fastest = min(ours, key=lambda name: times.median(name, "step"))
    for variant in variants:
        seconds, held = times.median(variant.name, "step"), peaks[variant.name]
        found = traced(functools.partial(steps.take, variant), with_stack=False)
        task.show(
            {
                "layer": config.name,
                "system": variant.name,
                "sizes": description(config),
                "ms": 1e3 * seconds,
                "tflops": flops / seconds / 1e12,
                "mfu": flops / seconds / peak if peak else None,
                "peak_gib": None if held is None else held / 2**30,
                "busy": found.busy,
                "kernels": found.count if found.kernels else None,
                "difference": differences[variant.name],
                "their_time_by_ours": None if variant.plan else times.speedup(fastest, "step", variant.name),
            }
        )


def description(config: Config) -> str:
    """Return the measured sizes in one line."""
    moe = config.moe
    shared = f", a shared one of {moe.shared_expert_ffn_hidden_size}" if moe.shared_expert_ffn_hidden_size else ""
    return (
        f"hidden {config.model.hidden_size}, {moe.num_experts} experts of width "
        f"{derived.expert_ffn_hidden_size(config)}, top {moe.top_k}{shared}; {derived.tokens_per_call(config)} tokens"
    )
