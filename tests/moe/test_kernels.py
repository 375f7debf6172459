"""The compiled kernels against torch in double precision, and what happens where they can't be compiled."""

from __future__ import annotations

import functools
import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from moe import kernels, route
from moe.experts import blocks
from moe.experts.weights import Slab
from moe.kernels import compiler, shared_object
from moe.kernels.ops import MAX_COLUMNS
from tests.tolerances import MOE

pytestmark = pytest.mark.fast

LACKING = "no C++ compiler here, or the processor (or what torch may use of it) lacks "
ELEMENTWISE = pytest.mark.skipif(not kernels.has(torch.empty(0)), reason="no C++ compiler here")
BLOCKS = pytest.mark.skipif(
    not kernels.has_tiles(torch.empty(0, dtype=torch.bfloat16), 32, 32), reason=f"{LACKING}AVX512_BF16"
)


def _relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm().clamp_min(1e-300))


def _close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return _relative(result, expected.double()) < 1e-6


def _activated(activation: str, hidden: torch.Tensor) -> torch.Tensor:
    if activation == "swiglu":
        gate, up = hidden.chunk(2, dim=1)
        return F.silu(gate) * up
    return F.gelu(hidden, approximate="tanh" if activation == "gelu_tanh" else "none")


@ELEMENTWISE
@pytest.mark.parametrize("dtype", shared_object.SUFFIXES)
@pytest.mark.parametrize("activation", shared_object.ACTIVATIONS)
def test_activations_and_their_gradients_equal_torchs_in_double_precision(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for num_rows, width in itertools.product((0, 1, 5, 300), (1, 15, 16, 17, 96)):
        # The tails too: beyond what the exponential and erf are computed for.
        hidden = (torch.randn(num_rows, blocks.hidden_factor(activation) * width) * torch.rand(num_rows, 1) * 40).to(
            dtype
        )
        grad, pair_weights = torch.randn(num_rows, width).to(dtype), torch.rand(num_rows)
        out, activated = torch.empty_like(hidden), torch.empty_like(grad)
        value = blocks.activate(activation, hidden, torch.empty_like(grad))
        weight_grad = blocks.activate_backward(activation, hidden, grad.clone(), pair_weights, out, activated)
        exact, exact_weights = hidden.double().requires_grad_(), pair_weights.double().requires_grad_()
        expected = _activated(activation, exact)
        weighted = expected * exact_weights.unsqueeze(1)
        weighted.backward(grad.double())
        tolerance = MOE[str(dtype).removeprefix("torch.")]
        assignments = ((value, expected), (activated, weighted), (out, exact.grad), (weight_grad, exact_weights.grad))
        for result, reference in assignments:
            assert reference is not None
            assert _relative(result, reference.detach()) < tolerance, (activation, dtype, num_rows, width)


@ELEMENTWISE
@pytest.mark.parametrize("dtype", shared_object.SUFFIXES)
def test_sums_of_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for columns, counts in itertools.product((1, 16, 63, 64, 200), ((0, 3, 1, 0), (2,) * 50)):
        source, index = torch.randn(9, columns).to(dtype), torch.randint(9, (sum(counts),))
        weights = torch.rand(len(index))
        starts = torch.tensor(list(itertools.accumulate((0, *counts[:-1]))))
        for given in (None, weights):
            result = route.add_up(source, route.Sum(index, starts), given)
            factors = (torch.ones_like(weights) if given is None else given).double().unsqueeze(1)
            expected = torch.stack(
                [rows_of_sum.sum(dim=0) for rows_of_sum in (source.double()[index] * factors).split(counts)]
            )
            assert _relative(result, expected) < MOE[str(dtype).removeprefix("torch.")]


@ELEMENTWISE
def test_the_greatest_of_each_row_are_those_that_torch_finds() -> None:
    torch.manual_seed(1)
    nan, infinite = float("nan"), float("inf")
    for num_rows, columns in ((0, 4), (1, 1), (300, 7), (40, 32), (9, 257), (2, MAX_COLUMNS)):
        scores = torch.randn(num_rows, columns) * 10.0 ** torch.randint(-40, 38, (num_rows, columns))
        for k in {1, min(2, columns), min(8, columns), columns}:
            found = kernels.top_k(scores, k)
            assert torch.equal(scores.gather(1, found), scores.topk(k, dim=1).values)
            assert all(len(set(row)) == k for row in found.tolist())
    scores = torch.tensor(
        [
            [1.0, 2.0, 2.0, 0.0],
            [-infinite, nan, infinite, 5.0],
            [-infinite, -infinite, -infinite, -infinite],
            [nan, -nan, nan, nan],
        ]
    )
    assert kernels.top_k(scores, 3).tolist() == [[1, 2, 0], [1, 2, 3], [0, 1, 2], [0, 1, 2]]


@BLOCKS
@pytest.mark.parametrize("num_experts", [1, 8, 32, 40])
def test_a_routers_logits_are_exact_in_fp32(num_experts: int) -> None:
    torch.manual_seed(1)
    for tokens, size in ((1, 32), (5, 64), (200, 512)):
        x, weight = torch.randn(tokens, size).bfloat16(), torch.randn(num_experts, size).bfloat16()
        assert _relative(kernels.gate(x, weight), x.double() @ weight.double().t()) < 1e-6


@BLOCKS
def test_torchs_counter_sees_the_blocks() -> None:
    weights, block = _block(random.Random(0), "swiglu", 40, 64, 32, False)
    with FlopCounterMode(display=False) as counter:
        _run(weights, block, keep=False)
    # rows by 16; forward, and twice both gradients, for which fc1 is computed again
    assert counter.get_total_flops() == 2 * 48 * (7 * 64 * 64 + 5 * 64 * 32)


@ELEMENTWISE
@pytest.mark.parametrize("dtype", shared_object.SUFFIXES)
def test_numbers_that_are_none_stay_so(dtype: torch.dtype) -> None:
    hidden = torch.zeros(4, 64).to(dtype)
    hidden[1, 3], hidden[2, 40] = float("nan"), float("inf")
    value = blocks.activate("gelu", hidden, torch.empty_like(hidden))
    assert value[1, 3].isnan() and value[2, 40].isinf() and value.isfinite().sum() == value.numel() - 2


def _block(
    rng: random.Random,
    activation: str,
    num_rows: int,
    size: int,
    width: int,
    bias: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Slab, list[torch.Tensor]]:
    outer = blocks.hidden_factor(activation) * width
    drawn = [
        torch.randn(2, outer, size) / size**0.5,
        torch.randn(2, size, width) / width**0.5,
        torch.randn(2, outer),
        torch.randn(2, size),
    ]
    fc1, fc2, fc1_bias, fc2_bias = (each.to(dtype) for each in drawn)
    weights = Slab(fc1, fc2, fc1_bias if bias else None, fc2_bias if bias else None, activation)
    source, output_grad = (torch.randn(max(num_rows // 2, 3), size).to(dtype) for _ in range(2))
    index = [torch.tensor(rng.choices(range(len(source)), k=num_rows)) for _ in range(2)]
    return weights, [source, output_grad, *index, torch.rand(num_rows)]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)  # what is not written shows


def _run(weights: Slab, block: list[torch.Tensor], keep: bool) -> list[torch.Tensor]:
    source, output_grad, token_rows, output_rows, pair_weights = block
    size, width, outer = source.size(1), weights.fc2.size(2), weights.fc1.size(1)
    sizes = len(token_rows), size, width, outer
    matrices = weights.fc1, weights.fc1_bias, weights.fc2, weights.fc2_bias, weights.activation

    dtype, tiled = source.dtype, source.dtype is torch.bfloat16

    def scratch(num_bytes: Callable[..., int], *variant: bool) -> torch.Tensor:
        most = len(token_rows) * 4 * 2 * (size + width + outer)  # in fp32
        # NaN, as any bytes of it
        return torch.full((num_bytes(*sizes, *variant) if tiled else most,), 255, dtype=torch.uint8)

    which = [1, 0, len(token_rows), 0], 16 if tiled else 1
    hidden, output = (
        _empty(len(token_rows), outer, dtype=dtype) if keep else None,
        _empty(len(token_rows), size, dtype=dtype),
    )
    kernels.forward_blocks(*which, source, token_rows, *matrices, hidden, output, scratch(kernels.forward_bytes))
    results = (
        _empty(len(token_rows), outer, dtype=dtype),
        _empty(len(token_rows), width, dtype=dtype),
        _empty(len(token_rows), dtype=torch.float32),
        _empty(len(token_rows), size, dtype=dtype),
    )
    inputs, memory = (source, token_rows, output_grad, output_rows), scratch(kernels.backward_bytes, not keep, False)
    kernels.backward_blocks(*which, *inputs, pair_weights, *matrices, hidden, *results, None, None, memory)
    gradients = _empty(2, outer, size, dtype=dtype), _empty(2, size, width, dtype=dtype)
    kernels.weights_blocks(*which, *inputs, *results[:2], *gradients, scratch(kernels.weights_bytes))
    # All gradients at once are the same.
    together = [torch.full_like(each, float("nan")) for each in (*results[2:], *gradients)]
    memory = scratch(kernels.backward_bytes, not keep, True)
    kernels.backward_blocks(
        *which, *inputs, pair_weights, *matrices, hidden, *(None, None) if tiled else results[:2], *together, memory
    )
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(together, (*results[2:], *gradients), strict=True)
    )
    assert all(each[0].isnan().all() for each in gradients)  # the other expert's
    return [output, *results[2:], *(each[1] for each in gradients)]


def _expected(weights: Slab, block: list[torch.Tensor]) -> list[torch.Tensor]:
    source, output_grad, token_rows, output_rows, pair_weights = block
    tensors = [source[token_rows], pair_weights, weights.fc1[1], weights.fc2[1]]
    x, column, fc1, fc2 = (tensor.double().requires_grad_() for tensor in tensors)
    biases = [None if bias is None else bias[1].double() for bias in (weights.fc1_bias, weights.fc2_bias)]
    output = F.linear(_activated(weights.activation, F.linear(x, fc1, biases[0])), fc2, biases[1])
    (output * column.unsqueeze(1)).backward(output_grad[output_rows].double())
    return [output.detach(), *(tensor.grad for tensor in (column, x, fc1, fc2) if tensor.grad is not None)]


def _has_products() -> bool:
    """Whether our own product is compiled, which the fp32 block functions take where torch's BLAS is made for
    others."""
    loaded = shared_object.loaded()
    return loaded is not None and bool(loaded.mixtrain_has_products())


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """`out` [m, n] (+)= `left` [m, k] times `right` [k, n] in fp32; one of the factors may be a transposed view."""
    orders = [int(not factor.is_contiguous()) for factor in (left, right)]
    shared_object.call("multiply_float", *orders, *out.shape, left.size(1), left, right, out, int(add))


@pytest.mark.skipif(not _has_products(), reason=f"{LACKING}AVX-512")
@pytest.mark.parametrize("threads", [1, 3])
def test_products_of_any_sizes_and_orders(threads: int) -> None:
    rng, before = random.Random(threads), torch.get_num_threads()
    torch.manual_seed(threads)
    torch.set_num_threads(threads)
    try:
        for case in range(60):
            m, n, k = (rng.choice((1, 7, 8, 31, 32, 33, rng.randint(1, 700))) for _ in range(3))
            left, right, memory = torch.randn(m, k), torch.randn(k, n), torch.randn(m + 1, n)
            out, expected, beyond = memory[:m], left.double() @ right.double(), memory[m].clone()
            left = left.t().contiguous().t() if case % 3 == 1 and min(m, k) > 1 else left
            right = right.t().contiguous().t() if case % 3 == 2 and min(k, n) > 1 else right
            expected = expected + out.double() if case % 2 else expected
            _multiply(left, right, out, add=bool(case % 2))
            assert (out.double() - expected).abs().max() < 1e-6 * (k + 1), (m, n, k, case)
            assert torch.equal(memory[m], beyond)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", shared_object.SUFFIXES)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_equal_torch_in_double_precision(seed: int, dtype: torch.dtype) -> None:
    if not kernels.has_blocks(torch.empty(0, dtype=dtype), 32, 32):
        pytest.skip(f"{LACKING}AVX512_BF16")
    rng, step = random.Random(seed), 32 if dtype is torch.bfloat16 else 7
    torch.manual_seed(seed)
    for activation, bias in itertools.product(shared_object.ACTIVATIONS, (False, True)):
        sizes = rng.choice((9, 16, 33, 64, 130, 257, 700)), step * rng.randint(1, 40), step * rng.randint(1, 40)
        weights, block = _block(rng, activation, *sizes, bias, dtype)
        kept = _run(weights, block, keep=True)
        for result, expected in zip(kept, _expected(weights, block), strict=True):
            assert _relative(result, expected) < MOE[str(dtype).removeprefix("torch.")], (activation, sizes, bias)
        # What is computed again, and how many threads share it, changes nothing (but that BLAS may add in another
        # order).
        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            again = _run(weights, block, keep=False)
        finally:
            torch.set_num_threads(threads)
        assert all(map(torch.equal if dtype is torch.bfloat16 else _close, kept, again)), (activation, sizes, bias)


@BLOCKS
def test_later_blocks_add_to_an_experts_gradients() -> None:
    weights, block = _block(random.Random(0), "swiglu", 40, 64, 32, False)
    source, output_grad, token_rows, output_rows, _ = block
    hidden_grad, activated = torch.randn(40, 64).bfloat16(), torch.randn(40, 32).bfloat16()
    gradients = _empty(1, 64, 64), _empty(1, 64, 32)
    scratch = torch.empty(kernels.weights_bytes(40, 64, 32, 64), dtype=torch.uint8)
    for add in (0, 1):
        kernels.weights_blocks(
            [0, 0, 40, add],
            16,
            source,
            token_rows,
            output_grad,
            output_rows,
            hidden_grad,
            activated,
            *gradients,
            scratch,
        )
    assert _relative(gradients[0][0], 2 * hidden_grad.double().t() @ source[token_rows].double()) < MOE["bfloat16"]
    assert _relative(gradients[1][0], 2 * output_grad[output_rows].double().t() @ activated.double()) < MOE["bfloat16"]


def test_a_build_is_made_once_and_whole(tmp_path: Path) -> None:
    if not kernels.has(torch.empty(0)):
        pytest.skip("no C++ compiler here")
    made = compiler.compile_library(compiler.SOURCE, tmp_path, compiler.FLAGS)
    assert [path.name for path in tmp_path.iterdir()] == [made.name]
    before = made.stat().st_mtime_ns
    again = compiler.compile_library(compiler.SOURCE, tmp_path, compiler.FLAGS)
    assert again == made and made.stat().st_mtime_ns == before


def test_kernels_keep_to_the_processor_that_torch_keeps_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a variable of torch's shows an older processor on any machine."""
    monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")
    assert [compiler.flags_for(each) == compiler.FLAGS for each in ("AVX512", "AVX2", "DEFAULT")] == [
        True,
        False,
        False,
    ]
    monkeypatch.setattr(compiler.platform, "machine", lambda: "aarch64")  # whose compilers do not know the flag
    assert compiler.flags_for("DEFAULT") == compiler.FLAGS
    assert _has_products() <= ("AVX512" in torch.backends.cpu.get_cpu_capability())


def test_a_change_of_any_source_file_makes_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = compiler.SOURCE.parent
    sources = [path.name for path in (*folder.glob("*.cpp"), *folder.glob("*.h"))]
    included = {
        line.split('"')[1]
        for name in sources
        for line in (folder / name).read_text().splitlines()
        if line.startswith('#include "')
    }
    assert included == {name for name in sources if name != "kernels.cpp"}
    for name in sources:
        shutil.copy(folder / name, tmp_path)
    monkeypatch.setattr(compiler, "SOURCE", tmp_path / "kernels.cpp")
    seen = {compiler.fingerprint("1")}
    for name in sources:
        with (tmp_path / name).open("a") as file:
            file.write("// changed\n")
        seen.add(compiler.fingerprint("1"))
    assert len(seen) == 1 + len(sources)
    assert compiler.fingerprint("2") not in seen


def test_without_a_compiler_torch_does_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no C++\n")
    torch.manual_seed(0)
    hidden = torch.randn(7, 64)
    expected = blocks.activate("swiglu", hidden, torch.empty(7, 32)).clone()
    for change in (
        lambda: monkeypatch.setenv("PATH", str(tmp_path)),
        lambda: monkeypatch.setattr(shared_object, "SOURCE", broken),
    ):
        with monkeypatch.context():
            change()
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
            monkeypatch.setattr(shared_object, "loaded", functools.cache(shared_object.loaded.__wrapped__))
            caplog.clear()
            assert not kernels.has(hidden)
            assert (
                "the CPU kernels for experts cannot be compiled or loaded" in caplog.text and len(caplog.records) == 1
            )
            torch.testing.assert_close(
                blocks.activate("swiglu", hidden, torch.empty(7, 32)), expected, rtol=1e-5, atol=1e-6
            )
        monkeypatch.undo()
