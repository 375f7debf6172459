"""`moe.token_budget`: chunks of at most so many tokens, each of every K-th, and what a rank can receive of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from base.errors import ConfigError
from configs import derived
from configs.compose import compose
from configs.job import Job
from configs.validate import validate
from moe import route
from moe.alltoall.flat import FlatAllToAll
from moe.chunk_plan import STRATEGIES, Plan
from moe.planning.inputs import initial_plan, limits
from tests import distributed
from tests.moe.oracle import Case, expected_on, largest_error, loop, ours, problem
from tests.tolerances import FP32_LOSS, MOE
from tests.training.helpers import largest_difference, make_config, train_on_ranks

MOE_TINY = "experiment=gpt_moe_tiny"
RANKS = 4


@pytest.mark.parametrize(
    ("budget", "words", "degrees"),
    [
        ("null", [], (1, 1)),
        (128, [], (1, 1)),
        (127, [], (2, 2)),
        (32, [], (4, 4)),
        (33, ["moe.pipeline_degree=8"], (8, 8)),
        (16, ["moe.pipeline_degree=2", "moe.backward_pipeline_degree=12"], (8, 12)),
        (1, [], (128, 128)),
        (16, ["parallel.context=2"], (4, 4)),
        (16, ["moe.pipeline_degree=auto"], (None, None)),
        (16, ["moe.pipeline_degree=auto", "moe.backward_pipeline_degree=2"], (None, 8)),
    ],
)
def test_degrees_follow_from_the_config(budget: int | str, words: list[str], degrees: tuple[Any, Any]) -> None:
    config = compose([MOE_TINY, f"moe.token_budget={budget}", *words])  # micro-batches of 2 samples of 64 tokens
    validate(config, config.parallel.context)
    assert derived.pipeline_degrees(config) == degrees
    tokens = derived.tokens_per_call(config)
    plan, allowed = initial_plan(config), limits(config, "cpu", 2, 0)
    for degree, choices in ((plan.degree, allowed.degrees), (plan.backward_degree, allowed.backward_degrees)):
        cut = route.boundaries(tokens, degree)
        assert budget == "null" or max(b - a for a, b in itertools.pairwise(cut)) <= int(budget)
        assert degree in choices and min(choices) == degree and list(choices) == sorted(set(choices))


@pytest.mark.parametrize("value", ["0", "-3", "1.5", "many", "[2]", "true"])
def test_wrong_values(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^moe\.token_budget \("):
        validate(compose([MOE_TINY, f"moe.token_budget={value}"]), 1)


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("tokens", [0, 1, 6, 7, 16])
def test_chunks_take_every_kth_token(tokens: int, stride: int) -> None:
    turns = route.strided_order(tokens, stride, torch.device("cpu")).tolist()
    assert turns == [token for first in range(stride) for token in range(first, tokens, stride)]
    if tokens % stride == 0:
        cut = route.boundaries(tokens, stride)
        assert [turns[a:b] for a, b in itertools.pairwise(cut)] == [
            list(range(i, tokens, stride)) for i in range(stride)
        ]


@pytest.mark.parametrize("routing", ["skewed", "dropped", "one_expert"])
@pytest.mark.parametrize("num_tokens", [0, 3, 12, 13])
def test_strided_chunks_on_one_rank(num_tokens: int, routing: str) -> None:
    case = Case(num_tokens, routing=routing, bias=True, activation="gelu", shared=True)
    expected = loop(case, problem(case))
    for (degree, backward), strategy in itertools.product([(1, 1), (4, 4), (3, 1), (2, 6)], STRATEGIES):
        if degree == backward or not STRATEGIES[strategy].offloads:
            found = ours(case, problem(case), Plan(degree, backward, strategy, weight_lag=1), strided=True)
            assert largest_error(found, expected) < MOE["float64"], (degree, backward, strategy)


class _Watched(FlatAllToAll):
    """An exchange that remembers the bytes of its largest receive buffer of hidden states."""

    most = 0

    def expect(self, buffer: torch.Tensor, split_sizes: Any) -> Any:
        if buffer.is_floating_point() and buffer.dim() == 2:
            self.most = max(self.most, buffer.numel() * buffer.element_size())
        return super().expect(buffer, split_sizes)


def _worst() -> list[tuple[float, int, int]]:
    """For each plan with all tokens of all ranks on one rank's experts: error, largest receive buffer, bound."""
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    assert group is not None
    found = []
    for top_k, (degree, backward), tokens in itertools.product((1, 2), ((1, 1), (4, 4), (3, 2), (2, 6)), (12, 13)):
        case = Case(tokens, top_k=top_k, routing="one_expert")
        assert problem(case, rank).routing_map[:, -2:].all(dim=0)[-1]  # all go to the last rank
        expected = expected_on(case, rank, RANKS)
        for strategy, block_rows in (("keep", None), ("communicate_recompute", None), ("keep", 4)):
            if block_rows is not None and degree != backward:
                continue
            exchange = _Watched(group)
            plan = Plan(degree, backward, strategy, weight_lag=1)
            result = ours(case, problem(case, rank), plan, exchange, rank, RANKS, block_rows=block_rows, strided=True)
            chunk = -(-tokens // min(degree, backward))
            bound = 2 * RANKS * top_k * chunk * case.hidden * case.dtype.itemsize
            found.append((largest_error(result, expected), exchange.most, bound))
    return found


def test_no_receive_buffer_is_beyond_the_bound() -> None:
    of_ranks = distributed.run(_worst, RANKS)
    for found in of_ranks:
        assert len(found) == 40
        assert max(error for error, _, _ in found) < MOE["float64"]
        assert all(0 < most <= bound // 2 for _, most, bound in found)  # the other half: what goes back
    # the rank that gets all has buffers of that size: without separate rows for assignments, of top-1
    assert any(most == bound // 2 for _, most, bound in of_ranks[-1])


def test_the_plan_prints_the_bound() -> None:
    from simulator.run_plan import make_plan
    from simulator.sizes import format_size
    from simulator.text import text

    config = make_config([MOE_TINY, "parallel.expert=2", "moe.token_budget=48", "plan=true"], 2)
    bound = 2 * 2 * config.moe.top_k * -(-128 // 3) * config.model.hidden_size * 4
    assert derived.dispatch_bound(config) == bound
    assert f"never takes more than {format_size(bound)}," in text(make_plan(Job(config, 2, 1024, "cpu")))
    alone = make_config([MOE_TINY, "plan=true"])
    assert "never takes more than" not in text(make_plan(Job(alone, 1, 1024, "cpu")))


def test_losses_are_those_without_a_budget(tmp_path: Path) -> None:
    words = [MOE_TINY, "training.steps=3", "parallel.expert=2", "moe.placement.policy=solve"]
    words += ["moe.placement.extra_slots=1", "model.num_layers=2"]
    words += ["checkpoint.at_end=false", "model.hidden_size=16"]
    plain, chunked = (
        train_on_ranks([*words, f"run_dir={tmp_path}/{budget}", f"moe.token_budget={budget}"], 2)
        for budget in ("null", 40)
    )
    assert largest_difference(chunked, plain, "loss") < FP32_LOSS
