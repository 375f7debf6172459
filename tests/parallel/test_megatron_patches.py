"""The patches of Megatron-core: for one version and one device type, and nothing beside what they name."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import distributed
from tests.waits import LONG

on_one_rank = distributed.run


def apply_to(version: str) -> None:
    import megatron.core

    from parallel import megatron as patches

    real, applied = megatron.core.__version__, patches._applied
    megatron.core.__version__, patches._applied = version, None
    try:
        patches.apply_patches("cpu")
    finally:
        megatron.core.__version__, patches._applied = real, applied


def test_another_version_is_refused() -> None:
    with pytest.raises(distributed.RankError) as caught:
        on_one_rank(apply_to, 1, "0.17.0")
    error = caught.value.__cause__
    assert isinstance(error, RuntimeError)
    assert "megatron-core 0.17.0 is installed" in str(error) and "0.16.1" in str(error)


def second_device_type() -> str:
    from parallel.megatron import apply_patches

    apply_patches("cpu")
    apply_patches("cpu")
    apply_patches()
    with pytest.raises(RuntimeError) as caught:
        apply_patches("cuda")
    return str(caught.value)


def test_one_device_type_in_a_process() -> None:
    assert "already patched for cpu" in on_one_rank(second_device_type, 1)[0]


def look_around() -> dict[str, Any]:
    """What the CPU adapter changes in torch.cuda, and the functions of the listed Megatron modules that still name
    CUDA."""
    import importlib

    from parallel.megatron import apply_patches, cpu

    def snapshot() -> dict[str, tuple[int, int]]:
        names = {**vars(torch.cuda), "Tensor.cuda": torch.Tensor.cuda}
        return {name: (id(value), id(getattr(value, "__code__", None))) for name, value in names.items()}

    modules = [importlib.import_module(f"megatron.core.{name}") for name in cpu.MODULES]
    before = snapshot()
    apply_patches("cpu")
    after = snapshot()
    left = []
    for module in modules:
        for function in cpu._functions(module):
            left += [
                function.__qualname__ for code in walk(function.__code__) if "cuda" in (*code.co_names, *code.co_consts)
            ]
    return {"changed": [name for name in after if before.get(name) != after[name]], "left": left}


def walk(code: types.CodeType) -> list[types.CodeType]:
    return [code, *(inner for value in code.co_consts if isinstance(value, types.CodeType) for inner in walk(value))]


def test_torch_cuda_is_left_alone() -> None:
    # In a process of its own: those of the pool are patched already.
    code = "import json; from tests.parallel.test_megatron_patches import look_around; print(json.dumps(look_around()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=distributed.ROOT, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"changed": [], "left": []}


LOADED = """
import sys, torch
real = torch.compile
import ENTRY
assert torch.compile is real and "megatron.core" in sys.modules
print([name for name in ("wandb", "torch.utils.tensorboard", "torch._inductor") if name in sys.modules])
import wandb  # can be had by those who ask for it
print(wandb.__version__)
"""


# The first as training/resilience/job.py has it.
@pytest.mark.parametrize("entry", ["training.callbacks.guard, training.trainer", "inference.open_model"])
def test_starts_without_what_it_may_not_use(entry: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.replace("ENTRY", entry)],
        cwd=distributed.ROOT,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", version("wandb")]


def test_compiled_once_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from parallel.megatron import startup

    compiled: list[tuple[str, dict[str, Any]]] = []

    def compile_it(function: Any, **options: Any) -> Any:
        compiled.append((function.__name__, options))
        return lambda *args: ("compiled", function(*args))

    class Sample:
        @startup.compiled_when_called
        def add(self, a: int, b: int) -> int:
            """Sum."""
            return a + b

        @startup.compiled_when_called(dynamic=True)
        def less(self, a: int, b: int) -> int:
            return a - b

    monkeypatch.setattr(torch, "compile", compile_it)
    assert compiled == [] and Sample.add.__doc__ == "Sum."
    assert [Sample().add(1, 2), Sample().add(3, 4)] == [("compiled", 3), ("compiled", 7)]
    assert Sample().less(5, 2) == ("compiled", 3)
    assert compiled == [("add", {}), ("less", {"dynamic": True})]


def test_rewriting_code() -> None:
    from parallel.megatron.cpu import _rewrite_code

    def sample(device: str = "cuda") -> list[Any]:
        def inner() -> str:
            return "cuda"

        return [inner(), ("cuda", 1), "cuda:0", "torch.cuda.HalfTensor", device]

    assert sample("x") == ["cuda", ("cuda", 1), "cuda:0", "torch.cuda.HalfTensor", "x"]
    rewritten = types.FunctionType(_rewrite_code(sample.__code__, {}), {})
    assert rewritten("x") == ["cpu", ("cpu", 1), "cuda:0", "torch.HalfTensor", "x"]

    def current() -> Any:
        return torch.cuda.current_device

    renamed = types.FunctionType(_rewrite_code(current.__code__, {"cuda": "cpu"}), {"torch": torch})
    assert renamed() is torch.cpu.current_device and current() is torch.cuda.current_device


def gather_rows(sizes: list[int]) -> tuple[list[float], list[float]]:
    from megatron.core.tensor_parallel import mappings

    from parallel.megatron import apply_patches

    apply_patches("cpu")
    rank = dist.get_rank()
    matrix_rows = torch.full((sizes[rank], 2), float(rank + 1))
    uneven = mappings._gather_along_first_dim(matrix_rows, dist.group.WORLD, sizes)
    assert uneven.shape == (sum(sizes), 2)
    even = mappings._gather_along_first_dim(torch.full((2, 2), float(rank)), dist.group.WORLD)
    return uneven[:, 0].tolist(), even[:, 0].tolist()


@pytest.mark.parametrize("sizes", [[1, 3, 2], [0, 2, 0], [2, 2, 2]])
def test_uneven_gather(sizes: list[int]) -> None:
    expected = [float(rank + 1) for rank, size in enumerate(sizes) for _ in range(size)]
    for uneven, even in distributed.run(gather_rows, 3, sizes):
        assert uneven == expected
        assert even == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def gradient_norms() -> tuple[float, float, float]:
    from megatron.core.optimizer import clip_grads

    from parallel.megatron import apply_patches

    apply_patches("cpu")
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) ** 3 for shape in ((4_000_000,), (1500, 3), (7,), ())]
    exact = sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5
    plain = float(torch.norm(torch.stack([torch.norm(tensor) for tensor in tensors])))
    ours, _ = clip_grads.l2_norm_impl(65536, None, [tensors], False)
    assert ours.shape == (1,) and ours.dtype == torch.float32
    return exact, plain, float(ours)


def test_gradient_norm_of_large_tensors() -> None:
    exact, plain, ours = on_one_rank(gradient_norms, 1)[0]
    assert ours == pytest.approx(exact, rel=1e-6)
    assert abs(plain / exact - 1) > abs(ours / exact - 1)  # why the patch is there


def gather_many(rounds: int, asynchronous: bool) -> list[list[float]]:
    """What two parameter buffers hold after `rounds` gathers of both, as Megatron's DDP asks for them."""
    from megatron.core.distributed import param_and_grad_buffer

    from parallel.megatron import apply_patches

    apply_patches("cpu")
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    buffers = [torch.zeros(count * size, dtype=torch.bfloat16) for count in (64, 4096)]
    for round_ in range(rounds):
        pending = []
        for buffer in buffers:
            own = buffer.chunk(size)[rank].fill_(round_ % 100 + rank)
            with param_and_grad_buffer._coalescing_manager(group, async_ops=asynchronous) as block:
                param_and_grad_buffer.dist_all_gather_func(buffer, own, group=group, async_op=asynchronous)
            pending.append(block)
        for block in pending:
            block.wait()
    return [[float(chunk[0]) for chunk in buffer.chunk(size)] for buffer in buffers]


@pytest.mark.parametrize(("ranks", "rounds", "asynchronous"), [(1, 10_000, True), (2, 3_000, True), (2, 200, False)])
def test_many_parameter_gathers(ranks: int, rounds: int, asynchronous: bool) -> None:
    expected = [float((rounds - 1) % 100 + rank) for rank in range(ranks)]
    for held in distributed.run(gather_many, ranks, rounds, asynchronous):
        assert held == [expected, expected]
