"""Attention over slices against one masked softmax in fp64, forward and backward; how slices are made."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models.attention import kernels, mask_slices
from models.attention.kernels import ALIGNED, FLASH_WIDTH, SUMS_ALIGNED
from models.attention.mask_slices import ANTI_CAUSAL, CAUSAL, FULL, SHORT, SHORT_BACKWARD, Slices
from models.attention.sequence_rows import document_slices, padding_slices
from models.attention.slice_attention import SlicePlan, attend
from tests.cuda.pretended import attention as pretended
from tests.tolerances import SLICES

pytestmark = pytest.mark.fast

SCALE = 0.4
# s, b, query heads, key heads, channels of keys, channels of values
SHAPES = [(17, 3, 4, 2, 8, 8), (33, 1, 2, 1, 5, 3), (12, 2, 2, 2, 3, 6), (150, 1, 2, 2, 8, 8)]
DTYPES = {getattr(torch, name): tolerance for name, tolerance in SLICES.items()}


def slices_of(*columns_of_slices: tuple[int, int, int, int, int, int]) -> Slices:
    """Return slices of kind, sample, first query row and number, first key row and number of each."""
    return Slices(*np.array(columns_of_slices, np.int64).T.copy())


def positions_of(b: int, s: int, seed: int = 1) -> np.ndarray:
    """Return positions of tokens in segments of random lengths, `[b, s]`."""
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(b):
        lengths = random.choice([1, 1, 2, 3, 5, 11], s)
        samples.append(np.concatenate([np.arange(length) for length in lengths])[:s])
    return np.stack(samples)


def attended(found: Slices, b: int, s: int) -> torch.Tensor:
    """Return which pairs count, bool `[b, s, s]`; none is in two slices."""
    mask = torch.zeros(b, s, s, dtype=torch.bool)
    for kind, sample, query, queries, key, keys in zip(*(column.tolist() for column in found.columns)):
        block = torch.ones(queries, keys, dtype=torch.bool)
        block = {FULL: block, CAUSAL: block.tril(), ANTI_CAUSAL: block.triu()}[kind]
        square = mask[sample, query : query + queries, key : key + keys]
        assert not (square & block).any()
        square |= block
    return mask


def plain(inputs: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """`attend` by its definition; a row without a key gives zeros."""
    query, key, value = inputs
    times = query.size(2) // key.size(2)
    key, value = key.repeat_interleave(times, 2), value.repeat_interleave(times, 2)
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * SCALE
    weights = torch.softmax(scores.masked_fill(~mask[:, None], -torch.inf), -1).nan_to_num(0.0)
    return torch.einsum("bnqk,kbnd->qbnd", weights, value)


def deviation(found: Slices, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> float:
    """The largest of the output and of the gradients, relative to their largest number."""
    s, b, heads, groups, channels, of_values = shape
    generator = torch.Generator().manual_seed(s)

    def draw(number: int, width: int) -> torch.Tensor:
        return torch.randn(s, b, number, width, generator=generator).to(device, dtype).requires_grad_()

    inputs = draw(heads, channels), draw(groups, channels), draw(groups, of_values)
    output = attend(*inputs, SlicePlan(found, s, b), SCALE)
    grad = torch.randn(output.shape, generator=generator).to(device, dtype)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    expected = plain(exact, attended(found, b, s).to(device))
    ours = [output, *torch.autograd.grad(output, inputs, grad)]
    theirs = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    assert all(each.dtype == dtype and bool(each.isfinite().all()) for each in ours)
    return max(
        ((mine.double() - other).abs().max() / other.abs().max().clamp(min=1.0)).item()
        for mine, other in zip(ours, theirs)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 2, 5, 16, 140])
@pytest.mark.parametrize("shape", SHAPES)
def test_documents_and_windows(shape: tuple[int, ...], window: int | None, dtype: torch.dtype) -> None:
    s, b = shape[:2]
    positions = np.arange(s)[None] if s == 150 else positions_of(b, s)
    found = mask_slices.of_documents(positions)
    if window is not None:
        found = mask_slices.windowed(found, window)
    mask = attended(found, b, s)
    assert mask.sum() == found.pairs
    row_numbers, columns = torch.arange(s)[:, None], torch.arange(s)
    reach = torch.from_numpy(positions)[:, :, None].clamp(max=(window or s) - 1)
    assert torch.equal(mask, (columns <= row_numbers) & (columns >= row_numbers - reach))
    assert deviation(found, shape, dtype) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [SHORT - 1, SHORT, SHORT_BACKWARD - 1, SHORT_BACKWARD])
def test_rows_from_which_half_precision_is_computed_in_its_own_kind(queries: int, dtype: torch.dtype) -> None:
    """In fp32 below; in between the forward pass in half precision and the backward pass in fp32."""
    found = slices_of((CAUSAL, 0, 0, queries, 0, queries), (FULL, 0, 0, queries, queries, 3))
    assert deviation(found, (queries + 3, 1, 2, 1, 8, 6), dtype) < DTYPES[dtype]


@pytest.mark.parametrize(
    ("queries", "channels", "dtype"),
    [
        *((queries, ALIGNED, torch.float32) for queries in (SUMS_ALIGNED - 1, SUMS_ALIGNED, SUMS_ALIGNED + 1)),
        *((SUMS_ALIGNED - 1, ALIGNED + 1, dtype) for dtype in (torch.float32, torch.bfloat16)),
        *((20, width, torch.bfloat16) for width in (ALIGNED, FLASH_WIDTH - 1, FLASH_WIDTH, FLASH_WIDTH + 1)),
        (SUMS_ALIGNED + 1, FLASH_WIDTH + 1, torch.float16),
    ],
)
def test_what_the_kernels_of_cuda_are_given(
    queries: int, channels: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins compute what CUDA's kernels would: what we put around them, on both sides of their sizes."""
    calls, takes_launches = Counter[str](), kernels.takes_launches

    def call(operation: Any) -> Any:
        def counted(*given: Any, **options: Any) -> Any:
            calls[pretended.KERNELS[operation].__name__] += 1
            return pretended.KERNELS[operation](*given, **options)

        return counted

    names = {operation: operation._qualified_op_name.removeprefix("aten::") for operation in pretended.KERNELS}
    monkeypatch.setattr(kernels, "aten", SimpleNamespace(**{name: call(each) for each, name in names.items()}))
    monkeypatch.setattr(kernels, "_on_cpu", kernels._efficient)
    monkeypatch.setattr(kernels, "_on_cpu_backward", kernels._efficient_backward)

    def on_cuda(query: torch.Tensor, width: int) -> bool:
        stand_in: Any = SimpleNamespace(is_cuda=True, dtype=query.dtype, size=query.size)
        return takes_launches(stand_in, width)

    monkeypatch.setattr(kernels, "takes_launches", on_cuda)
    found = slices_of((CAUSAL, 0, 0, queries, 0, queries), (FULL, 0, 0, queries, queries, 3))
    flash = dtype != torch.float32 and channels <= FLASH_WIDTH
    of_values = channels - 2 if flash else channels  # the other stand-in takes no other
    assert deviation(found, (queries + 3, 1, 4, 2, channels, of_values), dtype) < DTYPES[dtype]
    assert set(calls) == ({"_flash", "_flash_backward"} if flash else {"_efficient", "_efficient_backward"})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_any_slices(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows in several slices, of equal shapes too; rows and keys in none."""
    found = slices_of(
        (FULL, 0, 0, 4, 5, 2),
        (FULL, 0, 0, 4, 7, 2),
        (FULL, 0, 2, 5, 9, 1),
        (CAUSAL, 0, 0, 3, 0, 3),
        (FULL, 0, 6, 1, 0, 4),
    )
    plan = SlicePlan(found, shape[0], shape[1])
    (own,) = plan.rounds
    assert plan.queries.is_shared and own.keys.is_shared and plan.queries.is_mixed
    assert not plan.queries.is_written and not own.keys.is_written
    assert deviation(found, shape, dtype) < DTYPES[dtype]


def test_padding_is_no_key() -> None:
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0, 5:] = mask[2, 1:] = False
    found = padding_slices(mask).found
    assert torch.equal(attended(found, 3, 12), mask[:, None].expand(3, 12, 12))
    assert deviation(found, (12, 3, 2, 1, 4, 4), torch.float32) < DTYPES[torch.float32]


def test_slices_have_rows() -> None:
    for wrong in ((FULL, 0, 0, 0, 0, 3), (FULL, 0, 0, 3, 0, 0)):
        with pytest.raises(
            ValueError, match=f"query rows and key rows, but the smallest has {wrong[3]} query rows and {wrong[5]} key"
        ):
            slices_of(wrong)
    with pytest.raises(ValueError, match="as many query rows as key rows, not 3 and 4"):
        slices_of((CAUSAL, 0, 0, 3, 0, 4))


def test_launches_are_few_and_share_no_rows() -> None:
    assert len(mask_slices.of_documents(positions_of(4, 300)).launches()) == 1
    sliding = mask_slices.windowed(mask_slices.of_documents(positions_of(4, 300)), 4)
    assert len(sliding.launches()) == 3  # blocks, what lies before them, and what ends within a block
    several = slices_of((FULL, 0, 0, 4, 5, 2), (FULL, 0, 2, 5, 9, 1), (FULL, 0, 8, 2, 5, 1), (FULL, 1, 0, 4, 5, 2))
    assert sorted(len(launch) for launch in several.launches()) == [2, 2]
    for launch in [*sliding.launches(), *several.launches()]:
        for sample, first, number in ((1, 2, 3), (1, 4, 5)):
            columns = [launch.columns[i].tolist() for i in (sample, first, number)]
            slice_rows = [(j, row) for j, begin, length in zip(*columns) for row in range(begin, begin + length)]
            assert len(slice_rows) == len(set(slice_rows))


def test_a_micro_batch_has_one_plan() -> None:
    batch = document_slices(torch.from_numpy(positions_of(2, 50)))
    assert batch.plan(None) is batch.plan(None) is batch.plan(50) and batch.plan(3) is batch.plan(3)
    assert batch.plan(3) is not batch.plan(None)


def test_demands_of_the_kernels_of_cuda() -> None:
    query, key = torch.zeros(5, 4, 64, dtype=torch.bfloat16), torch.zeros(5, 2, 64, dtype=torch.bfloat16)
    kernels.check(query, key, key, flash=True)
    kernels.check(*(each.repeat(1, 1, 4) for each in (query, key, key)), flash=True)
    kernels.check(query[..., :8], key[..., :8], key[..., :8], flash=True)
    for wrong, demand in (
        ((query, key, key[..., :32]), "values with as many channels as keys"),
        ((query[..., :20], key[..., :20], key[..., :20]), "multiples of 8"),
        ((query.float(), key.float(), key.float()), "bf16 or fp16"),
        ((query, key, key.float()), "query, key and value of one dtype"),
        (tuple(torch.zeros(5, heads, 264, dtype=torch.bfloat16) for heads in (4, 2, 2)), "at most 256 channels"),
        ((query[:, :3], key, key), "a number of query heads that the number of key heads divides"),
    ):
        with pytest.raises(kernels.KernelDemandError, match=demand):
            kernels.check(*wrong, flash=True)
    with pytest.raises(kernels.KernelDemandError, match="as many key heads as query heads"):
        heads, groups = (each.transpose(0, 1)[None] for each in (query, key))
        kernels.check(heads, groups, groups, flash=False)
