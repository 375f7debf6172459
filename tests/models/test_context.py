"""Context parallelism: one sequence over several ranks computes what one process computes, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run
from tests.models.helpers import make_config, random_batch, run_model
from tests.models.test_separate import LATENT, LONGROPE, MODEL, MOE, PIECES, SEPARATE, VOCAB_SIZE, batch_of

Overrides = dict[str, dict[str, Any]]
GPT = {"model": {**MODEL["model"], "attention_dropout": 0.0, "hidden_dropout": 0.0}}
BERT = {"model": {"family": "bert", "sentence_head": "next_sentence"}}
MODELS: dict[str, list[Overrides]] = {
    "multi_head": [],
    "grouped": [{"model": {"num_query_groups": 2}}],
    "one_key_head": [{"model": {"num_query_groups": 1}}],
    "learned": [{"model": {"position_embedding": "learned"}}],
    "latent": [LATENT],
    "longrope": [{"model": {"rotary_scaling": LONGROPE}}],
    "window": [{"model": {"sliding_window": 4}}],
    "moe": [MOE],
    "bert": [BERT],
}
CONTEXTS: dict[str, tuple[int, Overrides]] = {
    "2": (2, {"parallel": {"context": 2, "context_heads": 1}}),
    "2 by heads": (2, {"parallel": {"context": 2, "context_heads": 2}}),
    "4": (4, {"parallel": {"context": 4, "context_heads": 1}}),
    "4, 2 by heads": (4, {"parallel": {"context": 4, "context_heads": 2}}),
    "4 by heads": (4, {"parallel": {"context": 4, "context_heads": 4}}),
    "2 with tp2 and sp": (4, {"parallel": {"context": 2, "tensor": 2, "sequence": True}}),
    "2 with pp2": (4, {"parallel": {"context": 2, "pipeline": 2}}),
    "2 with dp2": (4, {"parallel": {"context": 2}}),
}


def compare(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert results[0]["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    found = {name: grad for result in results for name, grad in result["gradients"].items()}
    assert found.keys() == alone["gradients"].keys()
    for name, grad in alone["gradients"].items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("documents", ["joined", "separate"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_context_ranks_compute_what_one_process_does(context: str, model: str, documents: str) -> None:
    changes = [GPT, *MODELS[model]]
    batch = random_batch(VOCAB_SIZE, 4, 24) if model == "bert" or documents == "joined" else batch_of(PIECES)
    if model == "bert" and documents == "separate":
        pytest.skip("BERT knows no documents")
    changes += [SEPARATE] if documents == "separate" else []
    ranks, layout = CONTEXTS[context]
    alone = run(run_model, 1, make_config(*changes), VOCAB_SIZE, batch)[0]
    results = run(run_model, ranks, make_config(*changes, layout), VOCAB_SIZE, batch)
    compare(results, alone)
    for result in results:
        if result["logits"] is not None and result["data_rank"] == 0:
            whole = alone["logits"][: len(result["logits"])]
            torch.testing.assert_close(result["logits"], whole, rtol=1e-4, atol=1e-5)
