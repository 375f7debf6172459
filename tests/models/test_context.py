"""Context parallelism: one sequence over several ranks computes what one process computes, gradients included.

benchmarks/checks/context_parity.py meets every pair of options; here every model meets some layouts, and every layout
models.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.distributed import run
from tests.models.helpers import Batch, make_config, random_batch, run_model
from tests.models.test_separate import LATENT, LONGROPE, MODEL, MOE, SEGMENTS, SEPARATE, VOCAB_SIZE, batch_of

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
    "2 with tp2": (4, {"parallel": {"context": 2, "tensor": 2}}),
}


def compare(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert results[0]["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    found = {name: grad for result in results for name, grad in result["gradients"].items()}
    assert found.keys() == alone["gradients"].keys()
    for name, grad in alone["gradients"].items():
        torch.testing.assert_close(
            found[name], grad, rtol=1e-4, atol=1e-6, msg=functools.partial("{}: {}".format, name)
        )


EVERY = 3  # of the layouts, for each model; the next model begins with the next layout


def cases() -> Iterator[tuple[str, str, str]]:
    """Layout, model and documents: joined and separate in turns, and joined alone for BERT."""
    # There the tensor ranks sum the gradient of a latent, which is not contiguous: a part of a concatenation's.
    yield "2 with tp2", "latent", "joined"
    layouts = [name for name in CONTEXTS if name != "2 with tp2"]
    for i, model in enumerate(MODELS):
        for turn, layout in enumerate(layouts[i % EVERY :: EVERY]):
            yield layout, model, "separate" if model != "bert" and (i + turn) % 2 else "joined"


def batch_for(documents: str, data: int = 1) -> Batch:
    """Return three joined samples per micro-batch, of which two cp_ranks must cut one; with separate documents,
    segments of four samples."""
    return random_batch(VOCAB_SIZE, 6 * data, 24) if documents == "joined" else batch_of(SEGMENTS)


def changes_of(model: str, documents: str) -> list[Overrides]:
    return [GPT, *MODELS[model], *([SEPARATE] if documents == "separate" else [])]


@functools.cache
def computed_alone(model: str, documents: str, data: int) -> dict[str, Any]:
    """Return the results of one process."""
    config = make_config(*changes_of(model, documents))
    return run(run_model, 1, config, VOCAB_SIZE, batch_for(documents, data))[0]


@pytest.mark.parametrize(("context", "model", "documents"), cases())
def test_context_ranks_compute_what_one_process_does(context: str, model: str, documents: str) -> None:
    ranks, layout = CONTEXTS[context]
    data = 2 if context == "2 with dp2" else 1
    alone = computed_alone(model, documents, data)
    config = make_config(*changes_of(model, documents), layout)
    results = run(run_model, ranks, config, VOCAB_SIZE, batch_for(documents, data))
    compare(results, alone)
    for result in results:
        if result["logits"] is not None and result["data_rank"] == 0:
            whole = alone["logits"][: len(result["logits"])]
            torch.testing.assert_close(result["logits"], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.fast
def test_every_model_layout_and_kind_of_documents_is_met() -> None:
    layouts, models, documents = (set(each) for each in zip(*cases()))
    assert layouts == set(CONTEXTS) and models == set(MODELS) and documents == {"joined", "separate"}
