"""What the ladder's rungs count: kernels and gaps of a trace, operations of a layer, a rival that is the same model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.card import layers, plain
from benchmarks.card.kernels import Trace
from benchmarks.card.training import LLAMA, QWEN, llama_sizes

pytestmark = pytest.mark.fast


def event(kind: str, name: str, start: float, length: float, **others: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, **others}


def launched(
    name: str, at: float, start: float, length: float, number: int, kind: str = "kernel"
) -> list[dict[str, Any]]:
    arguments = {"args": {"correlation": number}}
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, 1.0, tid=7, **arguments),
        event(kind, name, start, length, **arguments),
    ]


EVENTS = [
    {"ph": "M", "name": "process_name"},
    event("python_function", "models/build.py(12): forward", 0.0, 200.0, tid=7),
    event("python_function", "torch/nn/modules/linear.py(5): forward", 10.0, 20.0, tid=7),
    event("python_function", "moe/route.py(30): counts", 100.0, 50.0, tid=7),
    event("python_function", "other.py(1): thread", 100.0, 50.0, tid=8),
    *launched("gemm", 11.0, 20.0, 30.0, 1),
    *launched("gemm", 12.0, 40.0, 20.0, 2),  # at once with the first
    *launched("copy", 13.0, 60.0, 5.0, 3, "gpu_memcpy"),
    *launched("sort", 110.0, 115.0, 10.0, 4),  # the device waits for the host: 50 microseconds
    *launched("gemm", 160.0, 140.0, 10.0, 5),
]


def test_a_trace_says_what_runs_and_who_was_late() -> None:
    trace = Trace.read(EVENTS)
    assert trace.count == 4  # the copy is none
    assert trace.busy == pytest.approx((45 + 10 + 10) / 130)
    gemm, sort, host_copy = trace.longest(20)
    assert (gemm["kernel"], gemm["calls"], gemm["ms"], gemm["share"]) == (
        "gemm",
        3,
        pytest.approx(0.06),
        pytest.approx(0.8),
    )
    assert [sort["kernel"], host_copy["kernel"]] == ["sort", "copy"] and len(trace.longest(1)) == 1
    (gap,) = trace.gaps()
    assert gap == {"line": "moe/route.py(30): counts", "before": "sort", "gaps": 1, "ms": 0.05, "longest_us": 50.0}
    assert [each["line"] for each in trace.gaps(10.0)] == ["moe/route.py(30): counts", "models/build.py(12): forward"]


def test_a_trace_without_kernels_says_so() -> None:
    trace = Trace.read(EVENTS[:5])
    assert (trace.busy, trace.count, trace.longest(20), trace.gaps()) == (None, 0, [], [])


def test_sizes_and_operations_are_those_of_the_published_models() -> None:
    mixtral = layers.make_config("mixtral_8x7b", False, "cpu")
    assert (mixtral.model.hidden_size, mixtral.moe.num_experts, mixtral.moe.ffn_hidden_size) == (4096, 8, 14336)
    # Forward and twice as many backward: three matrices of each of two experts, and the router, two for each product.
    assert layers.layer_flops(mixtral) == 3 * 2 * 8192 * (2 * 3 * 4096 * 14336 + 4096 * 8)
    deepseek = layers.make_config("deepseek_v3_like", False, "cpu")
    assert deepseek.moe.num_experts == 32
    assert layers.layer_flops(deepseek) == 3 * 2 * 8192 * ((8 + 1) * 3 * 7168 * 2048 + 7168 * 32)
    assert layers.make_config("qwen3_30b_a3b", False, "cpu").moe.num_experts == 128


def test_models_have_their_published_sizes() -> None:
    llama = LLAMA.config(False, "cpu")
    sizes = llama_sizes(llama, plain.LlamaSizes)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in plain.PlainLlama(sizes).parameters())
    assert parameters == 1_235_814_400  # of Llama 3.2 1B, as its card says
    assert (llama.model.sequence_length, llama.training.recompute) == (4096, "none")
    qwen = QWEN.config(False, "cpu")
    assert (qwen.model.num_layers, qwen.moe.num_experts, qwen.moe.top_k) == (4, 128, 8)


def test_the_plain_script_is_the_model_of_transformers() -> None:
    from benchmarks.card.sides import _loss_of_transformers, _transformers

    config = LLAMA.config(True, "cpu")
    sizes = llama_sizes(config, plain.LlamaSizes)
    theirs, ours = _transformers(sizes, config, True), plain.PlainLlama(sizes)
    plain.draw(theirs)
    ours.load_state_dict(theirs.state_dict())
    tokens, labels = torch.randint(0, 512, (2, 2, 32), generator=torch.Generator().manual_seed(1))
    losses = [_loss_of_transformers(theirs)(tokens, labels), ours(tokens, labels)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)
