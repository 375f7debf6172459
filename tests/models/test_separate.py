"""Separate documents: a packed batch against its segments one by one, each through a model of joined documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from configs.schema import Config
from models import gpt
from models.build import build_model
from models.weights import gather_logical
from parallel.topology import initialize
from tests.distributed import run
from tests.models.helpers import Batch, gradient, make_config, random_batch, run_model

VOCAB_SIZE, LENGTH = 90, 24
SEPARATE = {"data": {"documents": "separate"}}
MODEL = {"model": {"sequence_length": LENGTH, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4}}
# Lengths of the document segments of four samples: one giant, single tokens, and others.
SEGMENTS = [[24], [1, 1, 1, 5, 1, 15], [1] * 24, [7, 7, 3, 7]]
LATENT = {
    "model": {
        "attention": "latent",
        "num_query_groups": None,
        "head_dim": 8,
        "rotary_head_dim": 4,
        "value_head_dim": 6,
        "kv_lora_rank": 12,
        "q_lora_rank": 16,
    }
}
MOE = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 6,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.5, 3.0, 6.0, 12.0],
}
MODELS: dict[str, list[dict[str, Any]]] = {
    "multi_head": [],
    "grouped": [{"model": {"num_query_groups": 2}}],
    "one_key_head": [{"model": {"num_query_groups": 1}}],
    "qk_norm": [{"model": {"qk_norm": True, "num_query_groups": 2}}],
    "learned": [{"model": {"position_embedding": "learned"}}],
    "latent": [LATENT],
    "latent_longrope": [LATENT, {"model": {"rotary_head_dim": 8, "rotary_scaling": LONGROPE}}],
    "yarn": [{"model": {"rotary_scaling": YARN}}],
    "longrope": [{"model": {"rotary_scaling": LONGROPE}}],
    "window": [{"model": {"sliding_window": 4}}],
    "window_later": [{"model": {"sliding_window": 5, "sliding_window_from": 1, "num_query_groups": 2}}],
    "moe": [MOE],
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True}),
    "pp2": (2, {"pipeline": 2}),
}
RECOMPUTE = {name: {"training": {"recompute": name}} for name in ("selective", "full")}


def batch_of(segments: list[list[int]]) -> Batch:
    batch = random_batch(VOCAB_SIZE, len(segments), LENGTH)
    batch["positions"] = torch.stack([torch.cat([torch.arange(length) for length in each]) for each in segments])
    last = torch.cat([batch["positions"][:, 1:] == 0, torch.ones(len(segments), 1, dtype=torch.bool)], dim=1)
    batch["loss_mask"] = (~last).float()
    return batch


def one_by_one(config: Config, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of the segments, each alone."""
    chunks = build_model(config, initialize(config), VOCAB_SIZE)
    wrapped = DistributedDataParallel(
        chunks[0].config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunks[0]
    )
    count, total = batch["loss_mask"].sum(), 0.0
    for row, positions in enumerate(batch["positions"]):
        begins = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for begin, end in zip(begins, begins[1:]):
            segment = {key: batch[key][row : row + 1, begin:end] for key in ("tokens", "labels", "loss_mask")}
            loss, _ = gpt.loss(gpt.forward(wrapped, segment), segment)
            (loss / count).backward()
            total += loss.item()
    return total / count.item(), dict(gather_logical(chunks, gradient))


def compare(packed: dict[str, Any], loss: float, gradients: dict[str, torch.Tensor]) -> None:
    assert packed["loss"] == pytest.approx(loss, rel=1e-6)
    for name, grad in gradients.items():
        torch.testing.assert_close(packed["gradients"][name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_separate_is_one_by_one(name: str) -> None:
    changes = [MODEL, *MODELS[name]]
    batch = batch_of(SEGMENTS)
    loss, gradients = run(one_by_one, 1, make_config(*changes), batch)[0]
    packed = run(run_model, 1, make_config(*changes, SEPARATE), VOCAB_SIZE, batch)[0]
    compare(packed, loss, gradients)


@pytest.mark.parametrize("name", ["grouped", "window", "latent"])
def test_separate_in_bf16(name: str) -> None:
    changes = [MODEL, *MODELS[name], {"training": {"precision": "bf16"}}]
    batch = batch_of(SEGMENTS)
    loss, _ = run(one_by_one, 1, make_config(*changes), batch)[0]
    packed = run(run_model, 1, make_config(*changes, SEPARATE), VOCAB_SIZE, batch)[0]
    assert packed["loss"] == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("name", ["window_later", "latent"])
@pytest.mark.parametrize("kind", RECOMPUTE)
def test_separate_under_recompute(kind: str, name: str) -> None:
    changes = [MODEL, *MODELS[name]]
    batch = batch_of(SEGMENTS)
    loss, gradients = run(one_by_one, 1, make_config(*changes), batch)[0]
    packed = run(run_model, 1, make_config(*changes, SEPARATE, RECOMPUTE[kind]), VOCAB_SIZE, batch)[0]
    compare(packed, loss, gradients)


@pytest.mark.parametrize("model", ["grouped", "latent", "learned"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_separate_in_layouts(layout: str, model: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    changes = [MODEL, *MODELS[model]]
    batch = batch_of(SEGMENTS)
    loss, gradients = run(one_by_one, 1, make_config(*changes), batch)[0]
    results = run(run_model, ranks, make_config(*changes, SEPARATE, {"parallel": parallel}), VOCAB_SIZE, batch)
    merged = {name: grad for result in results for name, grad in result["gradients"].items()}
    compare({"loss": results[0]["loss"], "gradients": merged}, loss, gradients)
