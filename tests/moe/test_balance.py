"""The load-balancing loss over the global batch: its value and its gradient against the formula and Megatron-core's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests import distributed
from tests.tolerances import MOE
from tests.training.helpers import make_config

LAYER, EXPERTS, TOP_K, COEFFICIENT = 1, 4, 2, 0.3
CHOICES = [[40, 30, 20, 10], [7, 1, 0, 24]]
SIZES = ["model.hidden_size=16", "model.num_layers=2", "moe.aux_loss_coeff=0", "moe.z_loss_coeff=0"]


def _router_and_balance(*overrides: str) -> tuple[Any, Any]:
    from models.build import build_model
    from moe.balance import GlobalBalance
    from parallel import topology

    config = make_config(["experiment=gpt_moe_tiny", *SIZES, f"moe.global_aux_loss_coeff={COEFFICIENT}", *overrides], 1)
    chunks = build_model(config, topology.initialize(config), 256)
    balance = GlobalBalance(chunks, [0, 1], EXPERTS, torch.device("cpu"))
    router = chunks[0].decoder.layers[LAYER].mlp.router
    return router.train(), balance


def _scores(router: Any, x: torch.Tensor) -> torch.Tensor:
    logits = x.reshape(-1, x.size(-1)) @ router.weight.t()
    if router.score_function == "softmax":
        return logits.softmax(dim=-1)
    scores = logits.sigmoid()
    return scores / scores.sum(dim=-1, keepdim=True)


def _compare(overrides: list[str]) -> dict[str, Any]:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func

    from moe.balance import values

    router, balance = _router_and_balance(*overrides)
    balance.follow(torch.tensor(CHOICES, dtype=torch.float64))
    x = torch.randn(12, 3, 16, generator=torch.Generator().manual_seed(1))
    router(x)  # of the step before
    balance.begin()
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([0.5]))  # of one of two micro-batches
    for half in (x[:6], x[6:]):
        probs, _ = router(half)
        (0 * probs.sum()).backward()
    grad, router.weight.grad = router.weight.grad.clone(), None
    counted = balance.take().clone()
    with torch.no_grad():  # an evaluation, and the first pass of a recomputation
        router(x)
    router.eval()(x)
    untouched = torch.equal(balance.take(), counted)

    scores = _scores(router, x)
    f = torch.tensor(CHOICES[LAYER]) / sum(CHOICES[LAYER])
    (COEFFICIENT * EXPERTS * (f * scores.mean(dim=0)).sum()).backward()
    counts = torch.zeros_like(scores).scatter(1, scores.topk(TOP_K, dim=1).indices, 1).sum(dim=0)
    theirs = switch_load_balancing_loss_func(scores.double(), counts.double(), len(scores), TOP_K, EXPERTS, 1.0)
    return {
        "gradient": float((grad - router.weight.grad).norm() / router.weight.grad.norm()),
        "value": float(values(counted[:, [LAYER]])[0]) / float(theirs) - 1,
        "counts": (counted[0, LAYER].tolist(), counts.tolist()),
        "untouched": untouched,
        "buffers": [name for name, _ in router.named_buffers() if "expert_bias" not in name],
    }


@pytest.mark.parametrize(
    "overrides",
    [[], ["moe.router_score=sigmoid", "moe.expert_bias=true"], ["moe.capacity_factor=0.5"]],
    ids=["softmax", "sigmoid and bias", "capacity"],
)
def test_formula_and_megatrons_loss_of_the_whole_batch(overrides: list[str]) -> None:
    found = distributed.run(_compare, 1, overrides)[0]
    assert found["gradient"] < MOE["float32"] and abs(found["value"]) < MOE["float32"]
    assert found["counts"][0] == found["counts"][1]  # all choices, also those that capacity drops
    assert found["untouched"] and not [name for name in found["buffers"] if "global" in name or "ga_" in name]


def _roll_back() -> list[list[list[float]]]:
    from training.callbacks.moe.global_aux_loss import GlobalAuxLoss

    callback, run, seen = GlobalAuxLoss(), mock.Mock(), []
    _, callback._balance = _router_and_balance()
    callback.load_state_dict({"choices": CHOICES})
    assert callback.state_dict() == {"choices": CHOICES}
    for kept in ({"global_aux_loss": callback.state_dict()}, {}):
        run.progress.callbacks = kept
        callback.on_rollback(run)
        seen.append(callback._balance._shares.tolist())
    assert callback.state_dict() == {}
    return seen


def test_a_rollback_follows_the_checkpoint_again() -> None:
    with_state, without = distributed.run(_roll_back, 1)[0]
    assert with_state[0] == pytest.approx([0.4, 0.3, 0.2, 0.1]) and with_state[1][3] == 0.75
    assert without == [[0.25] * EXPERTS] * 2
