"""Sorted indices and traffic against their definitions."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from memory.pool import Workspace
from moe import kernels, route
from moe.kernels.ops import MAX_COLUMNS
from moe.placement_map import PlacementMap
from moe.route import MAX_BYTE, MAX_SHORT
from moe.router import LOGIT_ROWS, _choose, _Gate

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("num_tokens,degree", [(0, 3), (1, 1), (1, 4), (7, 3), (100, 8), (64, 4)])
def test_boundaries(num_tokens: int, degree: int) -> None:
    first = route.boundaries(num_tokens, degree)
    assert first[0] == 0 and first[-1] == num_tokens and len(first) == degree + 1
    sizes = [end - start for start, end in itertools.pairwise(first)]
    assert max(sizes) - min(sizes) <= 1


def test_a_token_travels_once_to_each_rank() -> None:
    # 4 experts on 2 ranks: token 0 goes to both experts of rank 0, token 1 to one of each, token 2 nowhere.
    routing_map = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)
    choice = route.choose(routing_map, None)
    sent = route.dispatch_order(choice, route.Destinations.of_primaries(choice, PlacementMap(4, 2)), [1, 2])
    # Of each rank the rows, then the assignments: of one chunk, then of two.
    assert sent.counts.tolist() == [[[2, 2, 0], [3, 3, 0]], [[2, 1, 1], [3, 1, 2]]]
    assert sent.row_tokens(4, 6).tolist() == [0, 1, 1, 3]
    assert [(code // 2, code % 2) for code in sent.packed_ids.tolist()] == [
        (0, 0),
        (0, 1),
        (1, 1),
        (0, 0),
        (1, 0),
        (1, 1),
    ]


def test_chunks_of_what_two_ranks_send() -> None:
    # Rank 0 sends rows 0 (two assignments) | 1, rank 1 sends rows 0, 1 | 2; the bar stands between the chunks.
    cut = route.ChunkOffsets(token_rows=[[1, 1], [2, 1]], assignments=[[2, 1], [2, 1]])
    rows_in_rank, slots_Q = torch.tensor([0, 0, 1, 0, 1, 2]), torch.tensor([0, 1, 0, 0, 1, 1])
    counts = torch.tensor([2, 1, 2, 1])
    shifts = torch.repeat_interleave(torch.tensor(route.received_shifts(cut)), counts)
    assert (rows_in_rank + shifts).tolist() == [0, 0, 0, 1, 2, 1]  # in their chunks
    slices = [cut.slices(cut.assignments, chunk) for chunk in (0, 1)]
    assert slices == [[slice(0, 2), slice(3, 5)], [slice(2, 3), slice(5, 6)]]
    bases = route.chunk_bases([4, 2], 2)
    assert bases == ([0, 2], [0, 4])
    of_chunk = torch.repeat_interleave(torch.tensor([base * 2 for base in bases]), counts, dim=1)
    first, second = route.make_chunks(rows_in_rank + shifts, slots_Q, [3, 2], slices, 2, of_chunk)
    assert (
        first.ids.tolist() == [0, 3, 1, 4]
        and first.token_rows.tolist() == [0, 1, 0, 2]
        and first.ends.tolist() == [2, 4]
    )
    assert first.sums.index.tolist() == [0, 2, 1, 3] and first.sums.starts.tolist() == [0, 2, 3]
    assert second.ids.tolist() == [2, 5] and second.token_rows.tolist() == [0, 1] and second.ends.tolist() == [1, 2]
    assert second.sums.index.tolist() == [0, 1] and second.first_row == 3
    route.read_ends([first, second])
    assert (first.host_ends, second.host_ends) == ([2, 4], [1, 2])


def test_returned_rows_are_added_up_in_the_order_sent() -> None:
    # Of tokens 0..3 in two chunks, to rank 0: 0, 1 | 2; to rank 1: 1 | 2, 3.
    cut, tokens = (
        route.ChunkOffsets(token_rows=[[2, 1], [1, 2]], assignments=[[2, 1], [1, 2]]),
        torch.tensor([0, 1, 2, 1, 2, 3]),
    )
    shifts = torch.repeat_interleave(torch.tensor(route.sent_shifts(cut)), torch.tensor([2, 1, 1, 2]))
    first, second = route.combine_sums(tokens, 4, cut, shifts)
    assert first.index.tolist() == [0, 1, 2] and first.starts.tolist() == [0, 1]
    assert second.index.tolist() == [0, 1, 2] and second.starts.tolist() == [0, 2]


@pytest.mark.parametrize("limit", [4, MAX_BYTE, MAX_BYTE + 1, MAX_SHORT, MAX_SHORT + 1, 100_000])
def test_stable_argsort(limit: int) -> None:
    keys = torch.randint(0, limit + 1, (5000,), generator=torch.Generator().manual_seed(limit))
    keys[::7] = limit
    assert torch.equal(route.stable_argsort(keys, limit), keys.argsort(stable=True))


def test_workspace_uses_memory_again() -> None:
    pool, like = Workspace(), torch.empty(0, dtype=torch.bfloat16)
    taken = pool.take((1000, 8), like)
    address = taken.data_ptr()
    assert pool.take((1000, 8), like).data_ptr() != address
    pool.give(taken)
    assert pool.take((990, 8), like).data_ptr() == address
    lent = pool.lend((300, 7), torch.empty(0))
    address, row = lent.data_ptr(), lent[3]
    assert lent.shape == (300, 7) and lent.dtype == torch.float32
    del lent
    gc.collect()
    other = pool.lend((300, 7), torch.empty(0))
    assert other.data_ptr() != address  # the row is still there
    del row
    gc.collect()
    assert pool.lend((300, 7), torch.empty(0)).data_ptr() == address


@pytest.mark.parametrize("passed", [False, True])
def test_the_gate_rounds_its_gradients_once(passed: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(600, 2, 64).bfloat16().requires_grad_(), torch.randn(8, 64).bfloat16().requires_grad_()
    logits_grad, experts_grad = torch.randn(600, 2, 8), torch.randn(600, 2, 64).bfloat16()
    wide_x, wide_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    outputs, wide_outputs, grads = (
        list(_Gate.apply(x, weight)),
        [wide_x @ wide_weight.t(), wide_x],
        [logits_grad, experts_grad],
    )
    count = 2 if passed else 1
    torch.autograd.backward(outputs[:count], [grad.clone() for grad in grads[:count]])
    torch.autograd.backward(wide_outputs[:count], [grad.double() for grad in grads[:count]])
    assert (outputs[0] - wide_outputs[0]).abs().max() < 1e-4
    for ours, exact in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert ours is not None and exact is not None
        rounding = (exact.bfloat16() - exact).norm()
        assert (ours - exact).norm() < 1.5 * rounding


@pytest.mark.parametrize("tokens", [0, 1, LOGIT_ROWS - 1, LOGIT_ROWS, LOGIT_ROWS + 1, 3 * LOGIT_ROWS + 5])
def test_a_routers_logits_in_blocks_of_rows(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_tiles", lambda *_: False)  # where the processor multiplies bf16
    torch.manual_seed(tokens)
    x, weight = torch.randn(tokens, 48).bfloat16(), torch.randn(8, 48).bfloat16()
    logits = _Gate.apply(x, weight)[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, (x.double() @ weight.double().t()).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [kernels.ALIGNMENT, kernels.ALIGNMENT + 8])
def test_a_routers_logits_by_tiles_and_without(hidden: int) -> None:
    torch.manual_seed(hidden)
    x, weight = torch.randn(40, hidden).bfloat16(), torch.randn(8, hidden).bfloat16()
    expected = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(_Gate.apply(x, weight)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("experts", [MAX_COLUMNS, MAX_COLUMNS + 1])
def test_the_choice_among_many_experts(experts: int) -> None:
    """The most that the compiled kernel takes, and one more: Megatron-core chooses."""
    otherwise = []

    def theirs(scores: torch.Tensor, top_k: int, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        otherwise.append(top_k)
        found = scores.topk(top_k, dim=1)
        return found.values, found.indices

    torch.manual_seed(1)
    scores = torch.stack([torch.randperm(experts) for _ in range(9)]).float() - 500  # none is there twice
    values, indices = _choose(None, scores, 6, None, None, theirs)
    in_order = scores.argsort(dim=1, descending=True)[:, :6]
    assert torch.equal(indices, in_order) and torch.equal(values, scores.gather(1, in_order))
    assert bool(otherwise) == (experts > MAX_COLUMNS or not kernels.has(scores))
