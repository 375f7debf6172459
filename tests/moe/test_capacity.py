"""Which assignments are kept against a plain loop, and what the router counts before it drops."""

from __future__ import annotations

import math
from typing import Any

import torch

from moe.capacity import LAST_TURN, keep
from tests import distributed
from tests.training.helpers import make_config

RANKS = 3
CASES = 60
# Few, so that many are equal; two are neighbours in fp32.
PROBS = (0.0, 0.1, 0.1 + 2.0**-27, 0.25, 0.5, math.nan)


def _loop(probs: torch.Tensor, chosen: torch.Tensor, capacity: int, policy: str) -> torch.Tensor:
    kept = torch.zeros_like(chosen)
    for expert in range(chosen.size(1)):
        tokens = chosen[:, expert].nonzero().flatten().tolist()
        if policy == "probs":
            row = probs[:, expert].tolist()
            tokens.sort(key=lambda token: -math.inf if math.isnan(row[token]) else -row[token])
        kept[tokens[:capacity], expert] = True
    return kept


def _differing() -> list[tuple[int, str]]:
    """Cases in which this rank's part is not the loop's, alone and among ranks."""
    group, rank, wrong = torch.distributed.group.WORLD, torch.distributed.get_rank(), []
    draw = torch.Generator().manual_seed(1)
    for number in range(CASES):
        tokens, experts = (int(torch.randint(1, most, (), generator=draw)) for most in (10, 6))
        shape = tokens * RANKS, experts
        probs = torch.tensor(PROBS)[torch.randint(0, len(PROBS), shape, generator=draw)]
        chosen = torch.rand(shape, generator=draw) < 0.6
        capacity = int(torch.randint(1, tokens * RANKS + 2, (), generator=draw))
        own = slice(rank * tokens, (rank + 1) * tokens)
        for policy in ("position", "probs"):
            expected = _loop(probs, chosen, capacity, policy)
            alone = keep(probs, chosen, capacity, policy)
            among = keep(probs[own], chosen[own], capacity, policy, group)
            if not torch.equal(alone, expected) or not torch.equal(among, expected[own]):
                wrong.append((number, policy))
            if number % 2:  # tokens in any order over the ranks, with turns from the first to LAST_TURN
                turns = torch.randperm(len(probs), generator=draw)
                turns[turns == len(probs) - 1] = LAST_TURN
                order = turns.argsort()
                expected = torch.empty_like(chosen)
                expected[order] = _loop(probs[order], chosen[order], capacity, policy)
                alone = keep(probs, chosen, capacity, policy, None, turns)
                among = keep(probs[own], chosen[own], capacity, policy, group, turns[own])
                if not torch.equal(alone, expected) or not torch.equal(among, expected[own]):
                    wrong.append((number, f"{policy} by turns"))
    return wrong


def test_what_is_kept_is_what_a_loop_keeps() -> None:
    assert distributed.run(_differing, RANKS) == [[]] * RANKS


def test_the_first_tokens_are_kept_among_equals() -> None:
    chosen = torch.ones(1000, 3, dtype=torch.bool)
    for policy in ("position", "probs"):
        kept = keep(torch.full((1000, 3), 0.5), chosen, 77, policy)
        assert kept[:77].all() and not kept[77:].any()


def test_a_turn_never_outweighs_a_probability() -> None:
    """The last turn that there is, with the next greater number, beside the first turn."""
    chosen, turns = torch.ones(2, 1, dtype=torch.bool), torch.tensor([0, LAST_TURN])
    probs = torch.tensor([[0.1], [0.1 + 2.0**-27]])
    assert keep(probs, chosen, 1, "probs", None, turns).flatten().tolist() == [False, True]
    assert keep(probs[:1].expand(2, 1), chosen, 1, "probs", None, turns).flatten().tolist() == [True, False]
    assert keep(probs, chosen, 1, "position", None, turns).flatten().tolist() == [True, False]


def _counted() -> dict[str, Any]:
    from models.build import build_model
    from parallel import topology

    wanted = ["moe.router_score=sigmoid", "moe.expert_bias=true", "moe.capacity_factor=0.5", "moe.drop_policy=position"]
    config = make_config(["experiment=gpt_moe_tiny", "model.hidden_size=16", "model.num_layers=1", *wanted])
    chunks = build_model(config, topology.initialize(config), 256)
    router = chunks[0].decoder.layers[0].mlp.router.train()
    x = torch.randn(20, 2, 16, generator=torch.Generator().manual_seed(1))
    _, kept = router(x)
    with torch.no_grad():
        router(x)  # an evaluation
        scores = (x.flatten(0, 1) @ router.weight.t()).sigmoid()
    chosen = torch.zeros_like(kept).scatter(1, scores.topk(router.topk, dim=1).indices, True)
    most = math.ceil(40 * router.topk / kept.size(1) * 0.5)
    counted = router.local_tokens_per_expert.tolist()
    return {
        "counted": (counted, chosen.sum(dim=0).tolist()),
        "kept": (kept.tolist(), (chosen & (chosen.cumsum(dim=0) <= most)).tolist()),
        "dropped": int(chosen.sum() - kept.sum()),
    }


def test_biases_follow_what_was_chosen() -> None:
    (found,) = distributed.run(_counted, 1)
    assert found["counted"][0] == found["counted"][1] and found["dropped"] > 0
    assert found["kept"][0] == found["kept"][1]
