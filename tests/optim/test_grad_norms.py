"""Gradient norms by part are exact, however large a tensor is."""

from __future__ import annotations

import math

import pytest
import torch

from configs.schema import Config
from optim.grad_norms import digits, rounded
from parallel.megatron.optimizer import members
from parallel.norms import BLOCK, tensor_norms
from tests.training.test_step import on_one_rank, small


@pytest.mark.parametrize("shape", [(), (1,), (BLOCK,), (3, BLOCK + 1), (1000, 2000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    tensors = [(torch.randn(shape, generator=generator) ** 3).to(dtype) for _ in range(3)]
    tensors.append(tensors[0].t() if len(shape) == 2 else torch.zeros(2))
    exact = [float(tensor.double().norm()) for tensor in tensors]
    assert tensor_norms(tensors).tolist() == pytest.approx(exact, rel=1e-13)


def measured_and_exact(config: Config) -> tuple[float, dict[str, float], dict[str, float]]:
    """The norm and the norms by part of heavy-tailed gradients, and the exact squares of the embedding and of the
    rest."""
    from parallel import topology
    from training.engine import Engine

    model = Engine(config, topology.initialize(config), 16384)
    norms = model.norms
    generator = torch.Generator().manual_seed(0)
    (member,) = members(model.optimizer)
    exact: dict[str, float] = {}
    for main in member.get_parameters():
        main.grad = torch.randn(main.shape, generator=generator) ** 5
    for chunk in model.bare_chunks:
        for name, parameter in chunk.named_parameters():
            component = "embedding" if "embedding" in name else "rest"
            exact[component] = exact.get(component, 0.0) + float(
                getattr(parameter, "main_param", parameter).grad.double().square().sum()
            )
    return norms.take(norms.squares()), norms.by_component, exact


def test_norms_of_a_large_embedding() -> None:
    """torch's own norm of this many heavy-tailed numbers is off by 1e-5 and more on a CPU."""
    overrides = ["model.hidden_size=128", "optimizer.distributed=false"]
    norm, by_component, exact = on_one_rank(measured_and_exact, small("gpt_tiny", *overrides))
    assert norm == pytest.approx(sum(exact.values()) ** 0.5, rel=1e-6)
    assert by_component["embedding"] == pytest.approx(exact["embedding"] ** 0.5, rel=1e-6)


def test_digits_add_up_to_the_same_bits_in_any_order() -> None:
    generator = torch.Generator().manual_seed(4)
    squares = 10.0 ** (40 * torch.rand(3000, dtype=torch.float64, generator=generator) - 25)
    sums = set()
    for _ in range(20):
        order = torch.randperm(len(squares), generator=generator)
        sums.add(tuple(digits(squares)[order].cumsum(0)[-1].tolist()))
    assert len(sums) == 1
    assert sum(next(iter(sums))) == pytest.approx(math.fsum(squares.tolist()), rel=1e-15)
    assert len({float(squares[torch.randperm(len(squares), generator=generator)].cumsum(0)[-1]) for _ in range(20)}) > 1
    overflowed = torch.tensor([math.inf, 1.0], dtype=torch.float64)
    assert not math.isfinite(float(digits(overflowed).sum()))


@pytest.mark.parametrize("norm", [0.7275848984718323, 1e-30, 3e20, 1.0, 0.0])
def test_a_norm_forgets_how_its_squares_were_added_up(norm: float) -> None:
    assert rounded(norm) == pytest.approx(norm, rel=2e-10)
    assert rounded(norm * (1 + 2e-16)) == rounded(norm * (1 - 2e-16)) == rounded(rounded(norm))
    assert rounded(float("inf")) == float("inf")
