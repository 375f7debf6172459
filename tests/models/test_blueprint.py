"""The blueprint is the model that is built; folds name what they do not know of it; it needs neither torch nor
Megatron-core."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks import blueprint_check
from configs.compose import compose
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import INPUT, TENSOR, ModelOperation, Split, Weight, block, local_shape
from tests.waits import LONG

ROOT = Path(__file__).resolve().parents[2]
# Of all pairs, which benchmarks/checks/blueprint_check.py compares: every experiment and every layout.
SAMPLE = {
    "bert_base": ("TP2+SP", "PP4"),
    "bert_large": ("TP8+SP",),
    "bert_moe_small": ("EP4", "PP2, EP4"),
    "bert_moe_tiny": ("TP2+SP, EP2", "PP2, VPP2"),
    "bert_small": ("TP2", "TP2, PP2"),
    "bert_tiny": ("single", "PP4"),
    "deepseek_v3_like": ("TP2+SP, PP2, EP2",),
    "gpt2_124m": ("single", "TP4+SP"),
    "gpt_moe_small": ("TP4+SP, EP2, ETP2", "TP2+SP, ETP2"),
    "gpt_moe_tiny": ("TP2+SP, PP2, VPP2, EP2, ETP2", "TP2+SP, EP2, ETP2"),
    "gpt_small": ("TP2, PP2", "PP2"),
    "gpt_tiny": ("PP2, VPP2", "TP2+SP"),
    "llama3_8b": ("PP4, VPP2",),
    "mixtral_8x7b": ("EP2",),
    "quickstart": ("TP2+SP, PP2, VPP2", "TP2+SP, EP2"),
    "qwen3_30b_a3b": ("PP2, EP4",),
}


def test_sample_has_every_experiment_and_every_layout() -> None:
    assert {f"experiment={name}" for name in SAMPLE} == {
        name for name in blueprint_check.presets() if name.startswith("experiment")
    }
    assert {layout for layouts in SAMPLE.values() for layout in layouts} == set(blueprint_check.LAYOUTS)


@pytest.mark.parametrize("experiment", SAMPLE)
def test_blueprint_is_what_is_built(experiment: str) -> None:
    for layout in SAMPLE[experiment]:
        found = blueprint_check.configured(f"experiment={experiment}", layout)
        assert found is not None, layout
        assert list(blueprint_check.compare(*found)) == []


def test_a_mixture_of_experts_with_biases() -> None:
    """No preset has a router with a bias."""
    found = blueprint_check.configured("experiment=gpt_moe_tiny", "TP2+SP, EP2")
    assert found is not None
    found[0].model.linear_bias = found[0].model.qkv_bias = True
    assert list(blueprint_check.compare(*found)) == []


def test_a_difference_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = blueprint_check.configured("experiment=gpt_moe_tiny", "TP2+SP, EP2")
    assert found is not None and list(blueprint_check.compare(*found)) == []
    real = blueprint.weights

    def changed(*arguments: Any) -> Iterator[tuple[str, Weight]]:
        listed = list(real(*arguments))
        by_name = dict(listed)
        router = by_name["decoder.layers.1.mlp.router.weight"]
        for name, weight in listed:
            yield name, replace(router, splits=(Split(0, TENSOR),)) if weight is router else weight

    monkeypatch.setattr(blueprint, "weights", changed)
    assert any("router.weight: blueprint" in difference for difference in blueprint_check.compare(*found))


@pytest.mark.parametrize("preset", ["bert_moe_tiny", "deepseek_v3_like", "llama3_8b"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence", [False, True])
def test_operations_name_tensors_that_are_there(preset: str, recompute: str, sequence: bool) -> None:
    config = compose(
        [
            f"experiment={preset}",
            "parallel.tensor=2",
            f"parallel.sequence={sequence}",
            f"training.recompute={recompute}",
        ]
    )

    def check(operations: Sequence[ModelOperation], there: set[str]) -> set[str]:
        held = set(there)
        for operation in operations:
            outputs = {tensor.name for tensor in operation.outputs}
            assert {*operation.inputs, *operation.passes} <= there, operation
            assert {*operation.saved, *operation.frees} <= there | outputs, operation
            assert not outputs & there, operation
            if operation.body:
                assert outputs <= check(operation.body, set(operation.inputs)), operation
            there, held = there | outputs, (held | outputs) - set(operation.frees)
        return held

    for chunk in (chunk for stage in blueprint.model_chunks(config) for chunk in stage):
        for each in blueprint.blocks(config, 1000, chunk):
            check(each.operations, {INPUT})


def test_what_is_not_known_is_named() -> None:
    weight = Weight("mlp.linear_fc3.weight", (8, 8), "matrix", (Split(0, "sideways"),))
    with pytest.raises(ValueError, match=r"does not know 'sideways', the axis of mlp\.linear_fc3\.weight"):
        local_shape(weight, blueprint.axis_sizes(Config()))
    with pytest.raises(ValueError, match=r"does not know 'mlp\.linear_fc3\.weight', the name of a weight"):
        block("", [ModelOperation("column_linear", "mlp.linear_fc3", weights=(weight,))], ["self_attention"])


def test_neither_torch_nor_megatron_is_needed() -> None:
    program = (
        "import sys, models.blueprint; print([name for name in ('torch', 'megatron', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=LONG)
    assert result.stdout.strip() == "[]", result.stderr
