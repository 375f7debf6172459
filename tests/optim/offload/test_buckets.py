"""Buckets hold each element once, cut where the update's bits stay, and the update does not depend on the cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from optim.arrangement.buckets import CUT, cut
from optim.offload.kernel import SCRATCH, State, UpdateScalars, adamw
from optim.offload.records import RecordLayout

pytestmark = pytest.mark.fast

RATES = UpdateScalars(lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8)


@dataclass(frozen=True)
class Owned:
    start: int
    end: int
    bucket_key: int = 0
    reduced_at_step_end: bool = False
    order: int = 0


SLICES = [
    Owned(0, 3 * CUT + 5, order=0),
    Owned(7, 100, reduced_at_step_end=True, order=1),
    Owned(123, 123 + 2 * CUT, order=2),
    Owned(0, 50, bucket_key=1, order=3),
    Owned(10, 40, order=4),
    Owned(0, 60, reduced_at_step_end=True, order=5),
]


@pytest.mark.parametrize("limit", [1, CUT, 2 * CUT, 2 * CUT + 1, 2**24])
def test_cut(limit: int) -> None:
    buckets = cut(SLICES, limit)
    most = max(limit // CUT, 1) * CUT
    found: dict[int, list[tuple[int, int]]] = {}
    for bucket in buckets:
        assert bucket.numel <= most
        offset = 0
        for span in bucket.slice_spans:
            owned = SLICES[span.index]
            assert span.offset == offset and owned.reduced_at_step_end == bucket.reduced_at_step_end
            assert owned.bucket_key == SLICES[bucket.slice_spans[0].index].bucket_key
            # A cut is a multiple of CUT from the slice's start, whose rest is the last piece.
            assert (span.start - owned.start) % CUT == 0
            assert span.end == owned.end or (span.end - owned.start) % CUT == 0
            offset += span.end - span.start
            found.setdefault(span.index, []).append((span.start, span.end))
        assert bucket.numel == offset and bucket.order == min(SLICES[span.index].order for span in bucket.slice_spans)
    assert [bucket.order for bucket in buckets] == sorted(bucket.order for bucket in buckets)
    for index, owned in enumerate(SLICES):
        ends = [owned.start, *(end for _, end in found[index])]
        assert [start for start, _ in found[index]] == ends[:-1] and ends[-1] == owned.end


def test_one_bucket_of_a_place_where_all_fits() -> None:
    assert [len(bucket.slice_spans) for bucket in cut(SLICES, 2**24)] == [3, 2, 1]


@pytest.mark.parametrize(
    ("layout", "per_element"),
    [
        (RecordLayout(True, torch.float32), 12),
        (RecordLayout(True, torch.bfloat16), 10),
        (RecordLayout(False, torch.float32), 8),
        (RecordLayout(False, torch.bfloat16), 6),
    ],
)
def test_a_record_is_all_of_its_kinds(layout: RecordLayout, per_element: int) -> None:
    numel = 11
    record = torch.zeros(per_element * numel, dtype=torch.uint8)
    assert layout.bytes_per_element == per_element
    kinds = layout.split(record, numel)
    assert [(kind, flat.dtype, flat.numel()) for kind, flat in kinds.items()] == [
        (kind, dtype, numel) for kind, dtype in layout.kinds.items()
    ]
    for flat in kinds.values():
        flat.fill_(1)
    assert sum(flat.nbytes for flat in kinds.values()) == record.numel()
    assert all(bool((flat == 1).all()) for flat in layout.split(record, numel).values())  # none lies over another


def _steps(numel: int, starts: list[int], moment: torch.dtype) -> list[torch.Tensor]:
    """Masters and moments after three updates of pieces that begin there."""
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(numel, generator=generator)
    exp_avg, exp_avg_sq = torch.zeros(numel, dtype=moment), torch.zeros(numel)
    scratch = torch.empty(SCRATCH)
    for step in (1.0, 2.0, 3.0):
        grad = torch.randn(numel, generator=generator)
        spans = [slice(a, b) for a, b in zip(starts, [*starts[1:], numel], strict=True)]
        state = State(*([flat[span] for span in spans] for flat in (master, exp_avg, exp_avg_sq)))
        adamw(state, [grad[span] for span in spans], torch.tensor(step), [RATES] * len(spans), scratch)
    return [master, exp_avg, exp_avg_sq]


@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
def test_the_cut_changes_no_bit(moment: torch.dtype) -> None:
    numel = SCRATCH + 3 * CUT + 13
    whole = _steps(numel, [0], moment)
    for starts in ([0, CUT], list(range(0, numel, CUT)), [0, 2 * CUT, SCRATCH + CUT]):
        for ours, theirs in zip(_steps(numel, starts, moment), whole, strict=True):
            assert torch.equal(ours, theirs)


def test_a_moment_in_bf16_is_rounded_once_a_step() -> None:
    numel = CUT + 3
    master, exp_avg, exp_avg_sq = _steps(numel, [0], torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    expected, rounded, square = torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)
    for step in (1, 2, 3):
        grad = torch.randn(numel, generator=generator)
        wide = torch.lerp(rounded, grad, 1 - RATES.beta1)
        square = RATES.beta2 * square + (1 - RATES.beta2) * grad * grad
        denominator = square.sqrt() / (1 - RATES.beta2**step) ** 0.5 + RATES.epsilon
        expected = expected * (1 - RATES.lr * RATES.weight_decay)
        expected -= RATES.lr / (1 - RATES.beta1**step) * wide / denominator
        rounded = wide.bfloat16().float()
    assert exp_avg.dtype == torch.bfloat16 and exp_avg_sq.dtype == torch.float32
    # The kernel's products are fused: a bf16 number may fall on the other side.
    assert float((exp_avg.float() - rounded).abs().max()) <= 2.0**-7 * float(rounded.abs().max())
    assert float((exp_avg.float() != rounded).float().mean()) < 0.01
    assert torch.allclose(exp_avg_sq, square, rtol=1e-5) and torch.allclose(master, expected, rtol=1e-4, atol=1e-6)
