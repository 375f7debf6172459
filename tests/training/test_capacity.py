"""Capacity, drop policies and biases give the same losses, dropped tokens and biases in every layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests import distributed
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import largest_difference, make_config
from tests.training.test_step import SAMPLES, SMALL, batches_of, build

STEPS = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "TP2+SP": (2, {"tensor": 2, "sequence": "true"}),
    "PP2": (2, {"pipeline": 2}),
    "DP2": (2, {}),
    "EP2xETP2": (4, {"tensor": 2, "sequence": "true", "expert": 2, "expert_tensor": 2}),
}
ROUTERS = {
    "biases": ["moe.router_score=sigmoid", "moe.expert_bias=true", "moe.expert_bias_rate=0.05"],
    "softmax": ["moe.top_k=3", "moe.shared_expert_ffn_hidden_size=16"],
}
LOSSES = ["aux_loss", "sequence_aux_loss", "z_loss"]
COMMON = [
    *("experiment=gpt_moe_tiny", *SMALL, f"training.global_batch_size={SAMPLES}", "training.micro_batch_size=2"),
    *("moe.num_experts=8", *(f"moe.{name}_coeff=0.01" for name in LOSSES)),
]


def take_steps(config: Any) -> tuple[list[dict[str, Any]], dict[int, list[float]]]:
    """What each step reports, and the biases of this rank's layers after the last."""
    from moe.layer import layers_of
    from training.step import train_step

    model = build(config)
    data, lines = model.topology.data, []
    for step in range(1, STEPS + 1):
        result = train_step(model, batches_of(config, step)[data.rank :: data.size], step)
        line = {"step": step, "loss": result.loss, "grad_norm": result.grad_norm, **result.extra}
        assert result.tokens_per_expert is not None
        lines.append({**line, "kept": result.tokens_per_expert.tolist(), "dropped": result.per_layer["dropped_tokens"]})
    biases = {number: layer.router.expert_bias for number, layer in layers_of(model.bare_chunks).items()}
    model.close()
    return lines, {number: bias.tolist() for number, bias in biases.items() if bias is not None}


def _train(layout: str, policy: str, router: str, factor: float) -> Any:
    ranks, sizes = LAYOUTS[layout]
    overrides = [*COMMON, *ROUTERS[router], f"moe.drop_policy={policy}", f"moe.capacity_factor={factor}"]
    overrides += [f"parallel.{name}={size}" for name, size in sizes.items()]
    return distributed.run(take_steps, ranks, make_config(overrides, ranks))


@pytest.mark.parametrize("policy,router,factor", [("probs", "biases", 0.8), ("position", "softmax", 0.6)])
def test_no_layout_drops_other_tokens(policy: str, router: str, factor: float) -> None:
    ((expected, expected_biases),) = _train("single", policy, router, factor)
    assert sum(expected[-1]["dropped"]) > 0 and (router == "softmax") == (not expected_biases)
    for layout in list(LAYOUTS)[1:]:
        biases: dict[int, list[float]] = {}
        for lines, of_rank in _train(layout, policy, router, factor):
            for key in ("loss", *LOSSES):
                assert largest_difference(lines, expected, key) < FP32_LOSS, (layout, key)
            assert largest_difference(lines, expected, "grad_norm") < FP32_GRAD_NORM, layout
            assert [line["kept"] for line in lines] == [line["kept"] for line in expected], layout
            biases |= of_rank
        assert biases == expected_biases, layout
