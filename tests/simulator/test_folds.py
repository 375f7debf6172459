"""Folds over the blueprint name what they do not know, and need neither torch nor Megatron-core."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.compose import compose
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import Block, Collective, ModelOperation, Split, Tensor, Weight
from simulator import communication, flops, parameters
from simulator.activations import Activations
from tests.waits import LONG

ROOT = Path(__file__).resolve().parents[2]
STRANGE = ModelOperation("attend_far", "self_attention.far", ("state",), (Tensor("far", 8),))
SHEAR = Weight("mlp.shear.weight", (8, 8), "shear")
SIDEWAYS = Weight("mlp.side.weight", (8, 8), "matrix", (Split(0, "sideways"),))
LINEAR = ModelOperation("linear", "mlp.new", ("state",), (Tensor("new", 8),))


def _parameters(config: Config, chunk: blueprint.ModelChunk) -> Any:
    return parameters.parameters(config, chunk, 1000)


def _flops(config: Config, chunk: blueprint.ModelChunk) -> Any:
    return flops.forward_operations(config, 1000)


def _communication(config: Config, chunk: blueprint.ModelChunk) -> Any:
    return communication.micro_batch_bytes(config, 1000, chunk, "cpu")


def _memory(config: Config, chunk: blueprint.ModelChunk) -> Any:
    return Activations(config, 1000, "cpu").profile(chunk)


CASES: list[tuple[Callable[[Config, blueprint.ModelChunk], Any], ModelOperation, str]] = [
    (_flops, STRANGE, "flops does not know 'attend_far', the kind of operation of self_attention.far"),
    (_flops, replace(LINEAR, name="elsewhere"), "flops does not know 'elsewhere', the name of an operation"),
    (_memory, STRANGE, "memory does not know 'attend_far', the kind of operation of self_attention.far"),
    (
        _memory,
        replace(LINEAR, weights=(SHEAR,)),
        "memory does not know 'shear', the kind of weight of mlp.shear.weight",
    ),
    (_memory, replace(LINEAR, weights=(SIDEWAYS,)), "does not know 'sideways', the axis of mlp.side.weight"),
    (_memory, replace(LINEAR, outputs=(Tensor("new", 8, axis="up"),)), "does not know 'up', the axis of new"),
    (_memory, replace(LINEAR, outputs=(Tensor("new", 8, row_kind="pages"),)), "does not know 'pages', the rows of new"),
    (_parameters, replace(LINEAR, weights=(SHEAR,)), "parameters does not know 'shear', the kind of weight"),
    (_parameters, replace(LINEAR, weights=(SIDEWAYS,)), "does not know 'sideways', the axis of mlp.side.weight"),
    (
        _communication,
        replace(LINEAR, collectives=(Collective("shout", "tensor", Tensor("x", 8)),)),
        "communication does not know 'shout', the collective of mlp.new",
    ),
    (
        _communication,
        replace(LINEAR, collectives=(Collective("all_gather", "sideways", Tensor("x", 8)),)),
        "communication does not know 'sideways', the axis of mlp.new",
    ),
]


@pytest.mark.parametrize(("fold", "operation", "message"), CASES, ids=[case[2] for case in CASES])
def test_folds_name_what_they_do_not_know(
    monkeypatch: pytest.MonkeyPatch,
    fold: Callable[[Config, blueprint.ModelChunk], Any],
    operation: ModelOperation,
    message: str,
) -> None:
    config = compose(["experiment=gpt_tiny", "training.device=cpu"])
    chunk = blueprint.whole_model(config)
    fold(config, chunk)
    real = blueprint.blocks

    def with_one_more(*arguments: Any) -> list[Block]:
        first, layer, *others = real(*arguments)
        more = replace(layer, operations=(operation, *layer.operations), weights=(*layer.weights, *operation.weights))
        return [first, more, *others]

    monkeypatch.setattr(blueprint, "blocks", with_one_more)
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        fold(config, chunk)


PROGRAM = """
import json, sys
from configs.compose import compose
from configs.job import Job
from simulator import text
from simulator.run_plan import make_plan
plan = make_plan(Job(compose(["experiment=deepseek_v3_like"]), 256, 129280, sys.argv[1]))
text.text(plan)
print(json.dumps([name for name in ("torch", "megatron") if name in sys.modules]))
"""


def test_a_plan_needs_neither_torch_nor_megatron() -> None:
    command = [sys.executable, "-c", PROGRAM, "cuda"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONG)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == []
