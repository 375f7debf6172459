"""Rungs that train whole models: tokens per second, MFU, memory, and the GPU's work in a step."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.card.ladder import Row, Task
from configs.compose import compose
from configs.schema import Config
from configs.validate import validate

WARM_UP, LEAST_ROUNDS, MOST_ROUNDS = 3, 3, 20
OF_TIME, OF_LEFT = 0.2, 0.3  # of a rung's seconds, and of those that are left, for the rounds
MOST_GAPS = 40  # lines of a table
SMALL_ROUNDS = 2
COMMON = (
    *("parallel=single", "training.precision=bf16", "training.recompute=none", "model.hidden_dropout=0"),
    *("model.attention_dropout=0", "optimizer.schedule=constant", "optimizer.warmup_steps=0"),
)
# In place of the sizes, for a device without speed.
TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.num_query_groups=null"),
    *("model.head_dim=16", "model.ffn_hidden_size=64", "model.sequence_length=32", "model.vocab_size=512"),
    *("training.global_batch_size=2", "training.micro_batch_size=2"),
)
TINY_EXPERTS = ("moe.ffn_hidden_size=32", "moe.num_experts=8", "moe.top_k=2")


@dataclass(frozen=True)
class Case:
    """A model that is trained: its experiment, what is changed of it, and what the changes mean."""

    name: str
    overrides: tuple[str, ...]
    note: str = ""

    @property
    def files(self) -> tuple[str, str]:
        """Return the presets that it begins with, from the repository's root."""
        name = self.overrides[0].removeprefix("experiment=")
        return f"configs/experiment/{name}.yaml", f"configs/model/{name}.yaml"

    def config(self, is_small: bool, device: str, more: Sequence[str] = ()) -> Config:
        """Return the config. Raises ConfigError."""
        tiny: tuple[str, ...] = ()
        if is_small:
            has_experts = compose(list(self.overrides)).moe.num_experts is not None
            tiny = (*TINY, *(TINY_EXPERTS if has_experts else ()))
        config = compose([*self.overrides, *COMMON, *tiny, *more, f"training.device={device}"])
        config.data.vocab_size = config.model.vocab_size or config.data.vocab_size
        validate(config, 1)
        return config


def batch(samples: int, micro: int) -> tuple[str, str]:
    """Return the config keys of a step's samples and of those of a pass."""
    return f"training.global_batch_size={samples}", f"training.micro_batch_size={micro}"


# Llama 3.2 1B: 1.24 billion parameters.
LLAMA_1B = (
    *("experiment=llama3_8b", "model.num_layers=16", "model.hidden_size=2048", "model.ffn_hidden_size=8192"),
    *("model.num_attention_heads=32", "model.num_query_groups=8", "model.head_dim=64", "model.tie_embeddings=true"),
    "model.sequence_length=4096",
)
GPT2 = Case("gpt2_124m", ("experiment=gpt2_124m", *batch(64, 16)), "1,024 tokens a sample, no dropout")
LLAMA = Case("llama_1b", (*LLAMA_1B, *batch(2, 2)), "Llama 3.2 1B, 4,096 tokens a sample")
LLAMA_8B = Case(
    "llama3_8b, 4 of 32 layers",
    ("experiment=llama3_8b", "model.num_layers=4", "model.sequence_length=4096", *batch(2, 2)),
    "the embedding and the output layer are whole, so their share of the step is larger than in the whole model",
)
QWEN = Case(
    "qwen3_30b_a3b, 4 of 48 layers",
    ("experiment=qwen3_30b_a3b", "model.num_layers=4", "model.sequence_length=4096", *batch(2, 2)),
    "all 128 experts on one card; the embedding and the output layer are whole",
)
MIXTRAL = Case(
    "mixtral_8x7b, 2 of 32 layers",
    ("experiment=mixtral_8x7b", "model.num_layers=2", "model.sequence_length=4096", *batch(2, 2)),
    "all 8 experts on one card; the embedding and the output layer are whole",
)
MOE_SMALL = Case("gpt_moe_small", ("experiment=gpt_moe_small", *batch(32, 8)))


def measure(task: Task, case: Case, rivals: Sequence[str] = ()) -> None:
    """Show a row for Mixtrain and for each rival, which take turns, and one for each ratio of their times."""
    from benchmarks.card import sides
    from benchmarks.card.plain import LlamaSizes
    from simulator.flops import training_flops_per_token
    from training.report.metrics import peak_flops

    device = sides.device_of()
    config = case.config(task.is_small, device.type)
    tokens = config.training.global_batch_size * config.model.sequence_length
    flops_of_step = tokens * training_flops_per_token(config, sides.vocabulary(config))
    peak = peak_flops(config, device)
    with contextlib.ExitStack() as stack:
        run_topology = stack.enter_context(sides.joined(config))
        meter = Meter(device)
        warm_up = 1 if task.is_small else WARM_UP
        made = [meter.built(stack.enter_context, sides.mixtrain(config, run_topology), warm_up)]
        for system in rivals:
            side = sides.rival(system, config, llama_sizes(config, LlamaSizes), task.is_small)
            made.append(meter.built(stack.enter_context, side, warm_up))
        seconds, losses = in_turns(made, device, task)
        for i, side in enumerate(made):
            note = "; ".join(filter(None, (case.note, side.notes)))
            row: Row = {"system": side.system, "model": case.name, "note": note}
            row |= {"tokens": tokens, "step_s": statistics.median(seconds[i]), "rounds": len(seconds[i])}
            row |= {"tokens_s": tokens / row["step_s"], "tflops": flops_of_step / row["step_s"] / 1e12}
            row |= {"mfu": flops_of_step / row["step_s"] / peak if peak else None}
            row |= {"peak_gib": meter.peak(side), "loss": losses[i], **meter.profiled(side, config)}
            task.show(row)
        for i, side in enumerate(made[1:], 1):
            task.show({"model": case.name, **ratio(side.system, seconds[i], seconds[0])})


def llama_sizes(config: Config, kind: Any) -> Any:
    """Return the sizes of a Llama for a rival."""
    model = config.model
    return kind(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
        vocab_size=model.vocab_size,
        rotary_base=model.rotary_base,
        norm_epsilon=model.norm_epsilon,
    )


def ratio(system: str, theirs: Sequence[float], ours: Sequence[float]) -> Row:
    """Return the median of the rounds' ratios of times, and twice its standard error."""
    from benchmarks.kit.rounds import standard_error

    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    middle, error = statistics.median(ratios), standard_error(ratios)
    return {"ratio_of": system, "their_time_by_ours": middle, "two_errors": 2 * error}


def in_turns(made: Sequence[Any], device: Any, task: Task) -> tuple[list[list[float]], list[float]]:
    """Return the seconds of each side's steps, and its last loss; another side begins each round."""
    from benchmarks.card.sides import wait_for

    seconds: list[list[float]] = [[] for _ in made]
    losses = [0.0] * len(made)
    began = time.monotonic()
    budget = min(OF_TIME * task.seconds, OF_LEFT * (task.end - began))
    most = SMALL_ROUNDS if task.is_small else MOST_ROUNDS
    for turn in range(most):
        if turn >= LEAST_ROUNDS and time.monotonic() - began > budget:
            break
        for i in (*range(turn % len(made), len(made)), *range(turn % len(made))):
            wait_for(device)
            before = time.perf_counter()
            losses[i] = made[i].step()
            wait_for(device)
            seconds[i].append(time.perf_counter() - before)
    return seconds, losses


class Meter:
    """Memory and kernels of sides that share a device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._held: dict[int, int] = {}

    def built(self, enter: Any, made: Any, warm_up: int) -> Any:
        """Enter a side's context, take its first steps, and remember the memory that it then holds on the device."""
        before = self._allocated()
        side = enter(made)
        for _ in range(warm_up):
            side.step()
        self._held[id(side)] = self._allocated() - before
        return side

    def peak(self, side: Any) -> float | None:
        """Return the GiB of device memory in a step, without the memory of other sides; None on a CPU."""
        import torch

        if self._device.type != "cuda":
            return None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        side.step()
        torch.cuda.synchronize()
        others = sum(size for key, size in self._held.items() if key != id(side))
        return (torch.cuda.max_memory_allocated() - others) / 2**30

    def profiled(self, side: Any, config: Config) -> Row:
        """Return the busy share of a step, and the kernels launched per layer and pass; None if no kernels are seen."""
        from benchmarks.card.kernels import traced
        from configs import derived

        found = traced(side.step, with_stack=False)
        passes = derived.num_micro_batches(config, 1) * config.model.num_layers
        return {"busy": found.busy, "launches_a_layer": found.count / passes if found.kernels else None}

    def _allocated(self) -> int:
        import torch

        gc.collect()
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else 0


def trace(task: Task, case: Case) -> None:
    """Show the twenty kernels with most time, and each gap of more than 20 microseconds with the line behind it."""
    from benchmarks.card import sides
    from benchmarks.card.kernels import traced

    device = sides.device_of()
    config = case.config(task.is_small, device.type)
    with sides.joined(config) as run_topology, sides.mixtrain(config, run_topology) as side:
        for _ in range(1 if task.is_small else WARM_UP):
            side.step()
        alone = traced(side.step, with_stack=False)  # the tracer of Python's calls makes gaps of its own
        found = traced(side.step, with_stack=True)
    if not found.kernels:
        task.show({"model": case.name, "note": "the profiler sees no kernels here"})
        return
    task.show({"model": case.name, "busy": alone.busy, "kernels": alone.count, "note": case.note})
    for row in alone.longest(20):
        task.show({"model": case.name, **row})
    for row in found.gaps()[:MOST_GAPS]:
        task.show({"model": case.name, **row})
