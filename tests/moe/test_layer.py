"""The whole layer against Megatron-core's own with the same weights, and inside models."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module

from benchmarks.kit.megatron_layer import LINEAR, expert_gradients, fill_experts, megatron_layer
from models.transformer_config import transformer_config
from moe.chunk_plan import Plan
from moe.layer import MixtrainMoELayer, moe_spec
from parallel.megatron import apply_patches
from parallel.topology import initialize
from tests.distributed import RankError, run
from tests.models.helpers import make_config, random_batch, relative_error, run_model
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS, MOE

SMALL: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "sequence_length": 12,
    },
    "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "aux_loss_coeff": 0.01, "z_loss_coeff": 0.001},
}
SHARED = {"moe": {"shared_expert_ffn_hidden_size": 16}}


def _against_megatron(overrides: list[dict[str, Any]], plan: Plan) -> float:
    config = make_config(SMALL, *overrides)
    topology = initialize(config)
    apply_patches("cpu")
    megatron = transformer_config(config)
    theirs = megatron_layer(megatron)
    ours = build_module(moe_spec(topology.groups, LINEAR, config.model.activation, plan), config=megatron)
    assert isinstance(ours, MixtrainMoELayer) and isinstance(ours, MoELayer)
    ours.set_layer_number(1)
    with torch.no_grad():
        torch.manual_seed(7)
        for name, parameter in theirs.named_parameters():
            if not name.startswith("experts."):
                torch.nn.init.normal_(parameter, std=0.3)
                ours.get_parameter(name).copy_(parameter)
        torch.manual_seed(topology.rank if config.parallel.expert_tensor != 2 else 0)
        for weight in (ours.experts.linear_fc1.weight, ours.experts.linear_fc2.weight):
            torch.nn.init.normal_(weight, std=0.3)
    fill_experts(theirs, ours.experts.linear_fc1.weight, ours.experts.linear_fc2.weight)
    torch.manual_seed(100 + topology.rank)
    x, output_grad = torch.randn(2, 6, 2, 32)
    worst, results = 0.0, []
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        output, bias = layer(leaf)
        assert bias is None
        output.backward(output_grad)
        results.append([output.detach(), leaf.grad])
    assignments = list(zip(*results, strict=True))
    for name, parameter in theirs.named_parameters():
        if not name.startswith("experts."):
            assignments.append((parameter.grad, ours.get_parameter(name).grad))
    own = [ours.experts.linear_fc1.weight.grad, ours.experts.linear_fc2.weight.grad]
    assignments.extend(zip(expert_gradients(theirs), own, strict=True))
    for expected, actual in assignments:
        worst = max(worst, relative_error(actual, expected))
    return worst


@pytest.mark.parametrize(
    "world_size,overrides",
    [
        (1, []),
        (1, [SHARED]),
        (1, [{"model": {"activation": "gelu"}, "moe": {"capacity_factor": 1.0}}]),
        (1, [{"moe": {"top_k": 1, "normalize_top_k": False}}]),
        (2, [{"parallel": {"expert": 2}}]),
        (2, [{"parallel": {"expert": 2}}, SHARED]),
        (2, [{"parallel": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}}, SHARED]),
        (2, [{"parallel": {"tensor": 2, "sequence": True}}, SHARED]),
        (4, [{"parallel": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}}]),
    ],
    ids=["one", "shared", "gelu_capacity", "top1", "ep2", "ep2_shared", "tp2_ep2", "tp2_etp2", "ep2_etp2"],
)
@pytest.mark.parametrize("plan", [Plan(), Plan(3, 2, "recompute")], ids=["whole", "chunks"])
def test_megatrons_layer_with_the_same_weights_agrees(
    world_size: int, overrides: list[dict[str, Any]], plan: Plan
) -> None:
    assert max(run(_against_megatron, world_size, overrides, plan)) < MOE["float32"]


def _run(overrides: list[dict[str, Any]]) -> dict[str, Any]:
    return run_model(make_config(SMALL, *overrides), 131, random_batch(131, num_samples=8, length=12))


# The load-balancing loss depends on how a batch is cut into micro-batches, which differs between these layouts.
MODEL = {"moe": {"shared_expert_ffn_hidden_size": 16, "aux_loss_coeff": 0.0}}
CHUNKS = {"moe": {"pipeline_degree": 3, "backward_pipeline_degree": 2, "memory_strategy": "recompute"}}


@pytest.mark.parametrize(
    "parallel,recompute,world_size",
    [({}, "none", 1), ({"expert": 2}, "full", 2), ({"pipeline": 2, "expert": 2}, "full", 4)],
    ids=["one", "ep2_recompute", "pp2_ep2_recompute"],
)
def test_chunks_change_nothing_in_a_model(parallel: dict[str, Any], recompute: str, world_size: int) -> None:
    expected = run(_run, 1, [MODEL])[0]
    for result in run(_run, world_size, [MODEL, CHUNKS, {"parallel": parallel, "training": {"recompute": recompute}}]):
        assert result["loss"] == pytest.approx(expected["loss"], rel=FP32_LOSS)
        for name, gradient in expected["gradients"].items():
            assert relative_error(result["gradients"][name], gradient) < FP32_GRAD_NORM, name


def _run_on_two_nodes(overrides: list[dict[str, Any]]) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % 2)  # as torchrun says it on each node
    return _run(overrides)


@pytest.mark.parametrize("degrees", [{}, CHUNKS], ids=["whole", "chunks"])
def test_hierarchical_exchange_changes_nothing_in_a_model(degrees: dict[str, Any]) -> None:
    expected = run(_run, 1, [MODEL])[0]
    layout = {"parallel": {"expert": 4}, "moe": {"all_to_all": "hierarchical"}}
    for result in run(_run_on_two_nodes, 4, [MODEL, degrees, layout]):
        assert result["loss"] == pytest.approx(expected["loss"], rel=FP32_LOSS)
        for name, gradient in expected["gradients"].items():
            assert relative_error(result["gradients"][name], gradient) < FP32_GRAD_NORM, name


def test_hierarchical_exchange_needs_nodes() -> None:
    with pytest.raises(RankError) as caught:
        run(_run, 2, [MODEL, {"parallel": {"expert": 2}, "moe": {"all_to_all": "hierarchical"}}])
    assert "moe.all_to_all (hierarchical)" in str(caught.value.__cause__) and "flat" in str(caught.value.__cause__)


def _gates() -> float:
    config = make_config(SMALL, {"training": {"precision": "bf16"}})
    groups = initialize(config).groups
    apply_patches("cpu")
    megatron = transformer_config(config)
    router = build_module(moe_spec(groups, LINEAR, "swiglu", Plan()), config=megatron).router
    torch.nn.init.normal_(router.weight)
    results = []
    for gating in (router.gating, super(type(router), router).gating):
        torch.manual_seed(1)
        x, grad = torch.randn(300, 2, 32).bfloat16().requires_grad_(), torch.randn(300, 2, 8)
        router.weight.grad = None
        logits = gating(x)
        assert logits.dtype == torch.float32
        logits.backward(grad)
        results.append([logits.detach(), x.grad, router.weight.grad])
    return max(relative_error(ours.float(), theirs.float()) for ours, theirs in zip(*results, strict=True))


def test_the_gate_is_megatrons() -> None:
    assert run(_gates, 1)[0] < MOE["bfloat16"]  # one bf16 rounding of another order of sums
