"""Building one process's model: padding of the vocabulary, recompute, precision, backends, refused configs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import param_is_not_shared
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import Float16Module

from base.errors import ConfigError
from configs.schema import Config
from models.blueprint import ends, padded_vocab_size
from models.build import build_model, family_module
from models.specs import backend_line, resolve_backend
from parallel.topology import initialize
from tests.distributed import run
from tests.models.helpers import gradient, make_config, random_batch, run_model
from tests.models.test_layouts import BERT, BERT_MOE, GPT_MOE, SMALL, Overrides
from tests.tolerances import BF16_LOSS, FP32_GRAD_NORM, FP32_LOSS
from tests.waits import LONG

VOCAB_SIZE = 131
DROPOUT: Overrides = {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}}
ALL_LOSSES: Overrides = {
    "moe": {"aux_loss_coeff": 0.01, "sequence_aux_loss_coeff": 0.01, "z_loss_coeff": 0.001, "capacity_factor": 1.0}
}
SIGMOID: Overrides = {
    "moe": {
        "num_experts": 8,
        "router_score": "sigmoid",
        "expert_bias": True,
        "num_groups": 4,
        "group_top_k": 2,
        "routed_scaling_factor": 2.5,
    }
}


def _run(overrides: list[dict[str, Any]], multiple: int = 128) -> dict[str, Any]:
    before, ends.VOCAB_MULTIPLE = ends.VOCAB_MULTIPLE, multiple
    try:
        return run_model(make_config(SMALL, *overrides), VOCAB_SIZE, random_batch(VOCAB_SIZE, num_samples=4, length=12))
    finally:
        ends.VOCAB_MULTIPLE = before


@pytest.mark.parametrize("overrides", [[GPT_MOE], [BERT]], ids=["gpt_moe", "bert"])
def test_padding_of_the_vocabulary_changes_nothing(overrides: list[dict[str, Any]]) -> None:
    exact, padded = (run(_run, 1, overrides, multiple)[0] for multiple in (VOCAB_SIZE, 512))
    # Other sizes may take another path through a matrix product, so the last bits are free.
    assert padded["loss"] == pytest.approx(exact["loss"], rel=FP32_LOSS)
    for name, grad in exact["gradients"].items():
        torch.testing.assert_close(padded["gradients"][name], grad, rtol=FP32_GRAD_NORM, atol=1e-8)


def _gradient_of_padding() -> float:
    config = make_config(SMALL, {"model": {"tie_embeddings": False}})
    chunk = build_model(config, initialize(config), VOCAB_SIZE)[0]
    batch = random_batch(VOCAB_SIZE, 2, 12)
    family = family_module(config)
    family.loss(family.forward(chunk, batch), batch)[0].backward()
    weight = chunk.output_layer.weight
    assert weight.shape[0] == 256 and weight[VOCAB_SIZE:].abs().max() == 0 and weight.grad[:VOCAB_SIZE].abs().max() > 0
    return weight.grad[VOCAB_SIZE:].abs().max().item()


def test_padding_rows_are_zero_and_get_no_gradient() -> None:
    assert run(_gradient_of_padding, 1)[0] == 0


def test_padded_vocab_size() -> None:
    assert [padded_vocab_size(size, tensor) for size, tensor in [(1, 1), (128, 1), (129, 1), (129, 2), (50257, 4)]] == [
        128,
        128,
        256,
        256,
        50688,
    ]


@pytest.mark.parametrize("overrides", [[GPT_MOE, ALL_LOSSES, DROPOUT], [BERT, DROPOUT]], ids=["gpt_moe", "bert"])
@pytest.mark.parametrize("world_size,layout", [(1, {}), (2, {"tensor": 2, "sequence": True})], ids=["one", "tp2"])
def test_recompute_gives_the_same_gradients(
    overrides: list[dict[str, Any]], world_size: int, layout: dict[str, Any]
) -> None:
    kept, selective, full = (
        run(_run, world_size, [*overrides, {"parallel": layout, "training": {"recompute": kind}}])[0]
        for kind in ("none", "selective", "full")
    )
    for other in (selective, full):
        assert other["loss"] == kept["loss"]
        for name, grad in kept["gradients"].items():
            torch.testing.assert_close(other["gradients"][name], grad, rtol=1e-5, atol=1e-9)


def test_router_variants_reach_every_parameter() -> None:
    result = run(_run, 1, [GPT_MOE, SIGMOID, ALL_LOSSES, {"training": {"deterministic": True}}])[0]
    bias = "decoder.layers.0.mlp.router.expert_bias"
    assert result["weights"][bias].dtype == torch.float32 and result["weights"][bias].shape == (8,)
    assert all(grad.abs().max() > 0 for name, grad in result["gradients"].items() if name.endswith("router.weight"))


def _half_precision_loss(precision: str, overrides: list[dict[str, Any]]) -> float:
    config = make_config(SMALL, *overrides, {"training": {"precision": precision}})
    chunk = build_model(config, initialize(config), VOCAB_SIZE)[0]
    assert all(parameter.dtype == chunk.config.params_dtype for parameter in chunk.parameters())
    model = Float16Module(chunk.config, chunk) if precision != "fp32" else chunk
    family, batch = family_module(config), random_batch(VOCAB_SIZE, 4, 12)
    loss, extra = family.loss(family.forward(model, batch), batch)
    (loss + sum(extra.values())).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in chunk.parameters())
    assert loss.dtype == torch.float32
    return loss.item() / batch["loss_mask"].sum().item()


@pytest.mark.parametrize("overrides", [[GPT_MOE], [BERT_MOE]], ids=["gpt_moe", "bert_moe"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision: str, overrides: list[dict[str, Any]]) -> None:
    expected = run(_half_precision_loss, 1, "fp32", overrides)[0]
    assert run(_half_precision_loss, 1, precision, overrides)[0] == pytest.approx(expected, rel=BF16_LOSS)


def _squared_gradient_norm(layout: dict[str, Any]) -> float:
    # As Megatron's optimizer counts it: shared and duplicated parameters once.
    config = make_config(SMALL, GPT_MOE, {"parallel": layout})
    recorded: list[list[torch.nn.Module]] = []
    run_model(config, VOCAB_SIZE, random_batch(VOCAB_SIZE, 4, 12), recorded.append)
    counted = [
        p
        for chunk in recorded[0]
        for p in chunk.parameters()
        if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)
    ]
    return sum(gradient(p).double().square().sum().item() for p in counted)


def test_tensor_parallel_marks_count_each_gradient_once() -> None:
    expected = run(_squared_gradient_norm, 1, {})[0]
    split = run(_squared_gradient_norm, 2, {"tensor": 2, "sequence": True})
    assert sum(split) == pytest.approx(expected, rel=FP32_GRAD_NORM)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_backend_choice() -> None:
    config = Config()
    assert resolve_backend(config, CPU) == "portable" and backend_line(config, CPU) is None
    config.model.backend = "transformer_engine"
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        resolve_backend(config, CPU)
    with pytest.raises(ConfigError, match=r"transformer-engine is not installed\. Try model\.backend=portable"):
        resolve_backend(config, GPU)


def import_megatron_beside(folder: str) -> subprocess.CompletedProcess[str]:
    """With a TransformerEngine in `folder`, on a machine that seems to have a GPU."""
    code = (
        "import torch; torch.cuda.is_available = lambda: True\n"
        "import parallel.megatron\n"
        "from megatron.core.extensions import transformer_engine\n"
        "from configs.schema import Config\nfrom models.specs import backend_line, resolve_backend\n"
        "gpu = torch.device('cuda', 0)\n"
        "print(resolve_backend(Config(), gpu)); print(backend_line(Config(), gpu))\n"
    )
    environment = {**os.environ, "PYTHONPATH": folder}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LONG)


@pytest.mark.parametrize("error", ["FileNotFoundError('libtransformer_engine.so')", "AssertionError('no library')"])
def test_a_transformer_engine_that_cannot_be_imported_is_named(tmp_path: Path, error: str) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}\n")
    done = import_megatron_beside(str(tmp_path))
    kind, _, message = error.partition("(")
    assert done.stdout.splitlines() == [
        "portable",
        f"model.backend: portable, without TransformerEngine: its import failed ({kind}: {message[1:-2]})",
    ], done.stderr
