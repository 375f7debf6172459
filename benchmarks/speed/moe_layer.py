"""One MoE layer's cost against other implementations and against the dense layer with the same activated FLOPs.

`python -m benchmarks.speed.moe_layer [--shapes 8:2:1024 32:4:256] [--dtypes fp32 bf16] [--rounds 7] [--peers ...]
[--separate] [--json]`

One rank and one thread; forward and backward of 4096 tokens, hidden 512, SwiGLU, router included. In every round all
candidates take turns on the same new tokens, and CPU time counts, which other work on the machine disturbs least. All
share one process. With `--separate` each has its own, which is kinder to those that allocate large tensors in every
step, the dense layer first of all: alone, its allocator learns to keep them; beside others it gives them back to the
system and pays for the page faults again. A candidate's number is the median of its rounds; its ratio is the median
over the rounds of its time by the dense layer's in the same round. Skewed: the router's logits are offset by -4 e / (E
- 1) for expert e.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

HIDDEN, TOKENS, SKEW = 512, 4096, 4.0
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
PEERS = ("dense", "mixtrain", "megatron_allgather", "megatron_alltoall", "hf_eager", "hf_grouped_mm", "deepspeed")
SHAPES = ("8:2:1024", "32:4:256", "128:8:128")
WARM_UP = 3  # steps
TIMEOUT_SECONDS = 300.0  # for one candidate's answer

Step = Callable[[], None]


def _start_process_group() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from parallel.megatron import apply_patches

    apply_patches("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(expert_tensor_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _stepper(module: Any, x: Any, output_grad: Any, call: Callable[[Any], Any]) -> Step:
    # Each step has other tokens, as in training: so the experts' counts change, and kernels are compiled for new sizes.
    inputs = itertools.cycle(x)

    def step() -> None:
        leaf = next(inputs).detach().requires_grad_()
        for parameter in module.parameters():
            parameter.grad = None
        call(leaf).backward(output_grad)

    return step


def _dense(width: int, dtype: Any, x: Any, output_grad: Any) -> Step:
    import torch
    from torch.nn import functional as F

    class Dense(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = torch.nn.Linear(HIDDEN, 2 * width, bias=False, dtype=dtype)
            self.fc2 = torch.nn.Linear(width, HIDDEN, bias=False, dtype=dtype)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            gate, up = self.fc1(hidden).chunk(2, dim=-1)
            return self.fc2(F.silu(gate) * up)

    module = Dense()
    return _stepper(module, x, output_grad, module)


def _megatron_config(experts: int, top_k: int, width: int, dtype: Any, dispatcher: str) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        ffn_hidden_size=width,
        moe_ffn_hidden_size=width,
        num_moe_experts=experts,
        moe_router_topk=top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=dispatcher,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        expert_tensor_parallel_size=1,
    )


def _skew_megatron(layer: Any, offsets: Any) -> None:
    gating = layer.router.gating
    layer.router.gating = lambda hidden: gating(hidden) + offsets


def _megatron(
    dispatcher: str, experts: int, top_k: int, width: int, dtype: Any, offsets: Any, x: Any, output_grad: Any
) -> Step:
    from benchmarks.kit.megatron_layer import megatron_layer

    layer = megatron_layer(_megatron_config(experts, top_k, width, dtype, dispatcher))
    _skew_megatron(layer, offsets)
    return _stepper(layer, x, output_grad, lambda hidden: layer(hidden.view(TOKENS, 1, HIDDEN))[0].view(TOKENS, HIDDEN))


def _mixtrain(experts: int, top_k: int, width: int, dtype: Any, offsets: Any, x: Any, output_grad: Any) -> Step:
    from megatron.core.transformer.spec_utils import build_module

    from benchmarks.kit.megatron_layer import LINEAR
    from moe.chunk_plan import Plan
    from moe.layer import moe_spec
    from parallel.topology import megatron_groups

    layer = build_module(
        moe_spec(megatron_groups(), LINEAR, "swiglu", Plan()),
        config=_megatron_config(experts, top_k, width, dtype, "alltoall"),
    )
    layer.set_layer_number(1)
    _skew_megatron(layer, offsets)
    return _stepper(layer, x, output_grad, lambda hidden: layer(hidden.view(TOKENS, 1, HIDDEN))[0].view(TOKENS, HIDDEN))


def _huggingface(
    implementation: str, experts: int, top_k: int, width: int, dtype: Any, offsets: Any, x: Any, output_grad: Any
) -> Step:
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=width, num_local_experts=experts, num_experts_per_tok=top_k
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    block.to(dtype)
    _skew_linear_router(block.gate, offsets.to(dtype))

    def call(hidden: torch.Tensor) -> torch.Tensor:
        output = block(hidden.view(1, TOKENS, HIDDEN))
        return (output[0] if isinstance(output, tuple) else output).view(TOKENS, HIDDEN)

    return _stepper(block, x, output_grad, call)


def _skew_linear_router(gate: Any, offsets: Any) -> None:
    """Offset the logits of Hugging Face's or DeepSpeed's router, which computes them with torch's `linear` and no
    bias."""
    from torch.nn import functional as F

    forward = gate.forward

    def skewed(*args: Any) -> Any:
        linear = F.linear
        F.linear = lambda inputs, weight, bias=None: linear(inputs, weight, offsets)
        try:
            return forward(*args)
        finally:
            F.linear = linear

    gate.forward = skewed


def _deepspeed(experts: int, top_k: int, width: int, dtype: Any, offsets: Any, x: Any, output_grad: Any) -> Step:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from torch.nn import functional as F

    class Expert(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = torch.nn.Linear(HIDDEN, 2 * width, bias=False)
            self.fc2 = torch.nn.Linear(width, HIDDEN, bias=False)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            gate, up = self.fc1(hidden).chunk(2, dim=-1)
            return self.fc2(F.silu(gate) * up)

    deepspeed.init_distributed(dist_backend="gloo")
    settings: dict[str, Any] = {
        "capacity_factor": 1.25,
        "drop_tokens": False,
        "use_rts": False,
        "top2_2nd_expert_sampling": False,
    }
    layer = MoE(HIDDEN, Expert(), num_experts=experts, ep_size=1, k=top_k, **settings)
    layer.set_deepspeed_parallelism()
    layer.to(dtype)
    _skew_linear_router(layer.deepspeed_moe.gate, offsets)
    return _stepper(layer, x, output_grad, lambda hidden: layer(hidden.view(1, TOKENS, HIDDEN))[0].view(TOKENS, HIDDEN))


def _build(name: str, experts: int, top_k: int, width: int, dtype: Any, offsets: Any, x: Any, output_grad: Any) -> Step:
    if name == "dense":
        return _dense(top_k * width, dtype, x, output_grad)
    if name.startswith("megatron_"):
        return _megatron(name.removeprefix("megatron_"), experts, top_k, width, dtype, offsets, x, output_grad)
    if name.startswith("hf_"):
        return _huggingface(name.removeprefix("hf_"), experts, top_k, width, dtype, offsets, x, output_grad)
    return {"mixtrain": _mixtrain, "deepspeed": _deepspeed}[name](experts, top_k, width, dtype, offsets, x, output_grad)


def available(name: str) -> bool:
    """Whether the package that a candidate comes from is installed."""
    package = {"hf": "transformers", "deepspeed": "deepspeed"}.get(name.split("_")[0])
    return package is None or importlib.util.find_spec(package) is not None


@dataclass(frozen=True)
class Setting:
    """A measured setting: the layer's sizes, its precision, how the router chooses, and how many inputs to draw."""

    experts: int
    top_k: int
    width: int
    dtype: str
    skewed: bool
    rounds: int


def _serve(connection: Connection) -> None:
    """A process with candidates: builds (name, setting) when told to, and answers each name with a step's CPU
    seconds."""
    import torch

    torch.set_num_threads(1)
    _start_process_group()
    steps: dict[str, Step] = {}
    while (request := connection.recv()) is not None:
        if isinstance(request, str):
            before = time.process_time()
            steps[request]()
            connection.send(time.process_time() - before)
            continue
        name, setting = request
        steps.pop(name, None)
        gc.enable()
        gc.collect()
        dtype = getattr(torch, DTYPES[setting.dtype])
        torch.manual_seed(0)
        *x, output_grad = (torch.randn(TOKENS, HIDDEN).to(dtype) for _ in range(setting.rounds + WARM_UP + 1))
        offsets = torch.linspace(0.0, -SKEW, setting.experts) if setting.skewed else torch.zeros(setting.experts)
        steps[name] = _build(name, setting.experts, setting.top_k, setting.width, dtype, offsets, x, output_grad)
        for _ in range(WARM_UP):
            steps[name]()  # allocates, and chooses kernels
        gc.collect()
        gc.disable()
        connection.send(0.0)


class _Process:
    """A process that runs candidates."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, request: object) -> float:
        """Send a request and wait for the answer. Raises RuntimeError if none comes."""
        self._connection.send(request)
        try:
            if self._connection.poll(TIMEOUT_SECONDS):
                return float(self._connection.recv())
        except EOFError:
            pass
        raise RuntimeError(f"a benchmark process gave no answer to {request!r} within {TIMEOUT_SECONDS} s, or ended")

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            with contextlib.suppress(BrokenPipeError):
                self._connection.send(None)
            self._process.join(5)
            self._process.kill()


def measure(setting: Setting, processes: dict[str, _Process]) -> list[dict[str, Any]]:
    """Return one row per candidate: median CPU milliseconds of a step, and the median ratio to the dense layer's in
    the same round."""
    names = list(processes)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        processes[name].ask((name, setting))
    for i in range(setting.rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(processes[name].ask(name))
    return [
        {
            "experts": setting.experts,
            "top_k": setting.top_k,
            "ffn": setting.width,
            "dtype": setting.dtype,
            "routing": "skewed" if setting.skewed else "balanced",
            "layer": name,
            "cpu_ms": statistics.median(times) * 1e3,
            "min_cpu_ms": min(times) * 1e3,
            "to_dense": statistics.median(own / dense for own, dense in zip(times, seconds["dense"], strict=True)),
        }
        for name, times in seconds.items()
    ]


def _line(row: dict[str, Any]) -> str:
    setting = (
        f"{row['experts']:>7} {row['top_k']:>3} {row['ffn']:>5} {row['dtype']:>5} {row['routing']:<9} "
        f"{row['layer']:<19}"
    )
    return f"{setting} {row['cpu_ms']:>8.1f} {row['min_cpu_ms']:>8.1f} {row['to_dense']:>8.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="experts:top_k:ffn")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--routings", nargs="+", default=["balanced", "skewed"], choices=["balanced", "skewed"])
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--separate", action="store_true", help="a process for each candidate")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import torch

    names = [name for name in PEERS if (name in arguments.peers or name == "dense") and available(name)]
    missing = [name for name in arguments.peers if not available(name)]
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, 1 thread, {TOKENS} tokens, hidden "
        f"{HIDDEN}"
    )
    if missing:
        print(f"not installed: {', '.join(missing)}")
    print(
        f"{'experts':>7} {'top':>3} {'ffn':>5} {'dtype':>5} {'routing':<9} {'layer':<19} {'CPU ms':>8} {'lowest':>8} "
        f"{'/ dense':>8}"
    )
    table_rows = []
    common = [] if arguments.separate else [_Process()]
    processes = {name: common[0] if common else _Process() for name in names}
    try:
        for shape, dtype, routing in itertools.product(arguments.shapes, arguments.dtypes, arguments.routings):
            experts, top_k, width = (int(number) for number in shape.split(":"))
            for row in measure(Setting(experts, top_k, width, dtype, routing == "skewed", arguments.rounds), processes):
                table_rows.append(row)
                print(_line(row), flush=True)
    finally:
        for process in common or processes.values():
            process.close()
    if arguments.json:
        print(
            json.dumps(
                {
                    "torch": torch.__version__,
                    "tokens": TOKENS,
                    "hidden": HIDDEN,
                    "rounds": arguments.rounds,
                    "separate": arguments.separate,
                    "rows": table_rows,
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
