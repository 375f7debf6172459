"""Dropout seeded by position: a layer's mask depends on step, micro-batch and rows, not on the order of passes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from checkpoint.state_file import draws_alike
from configs.schema import Config
from parallel.dropout import seed_of
from tests import distributed
from tests.training.helpers import make_config
from tests.training.test_step import SAMPLES, SMALL, batches_of, build

TINY = ("experiment=gpt_tiny", *SMALL, f"training.global_batch_size={SAMPLES}", "training.micro_batch_size=4")
DROPOUT = ("model.hidden_dropout=0.5", "model.attention_dropout=0.5")
PASSES = [(step, micro_batch) for step in (1, 2) for micro_batch in (0, 1)]


def test_every_component_of_the_position_makes_another_seed() -> None:
    positions = list(itertools.product((0, 1234), (1, 12), range(13), range(12), ("context 0", "context 0 tensor 0")))
    seeds = {seed_of(*position) for position in positions}
    assert len(seeds) == len(positions) and all(0 <= seed < 2**63 for seed in seeds)


def drawn(config: Config) -> dict[str, Any]:
    """Outputs of the embedding and of each layer for the same input, by (module, step, micro-batch), in several
    orders, and what computing a layer again after all passes gives."""
    from contextlib import nullcontext

    from megatron.core import tensor_parallel
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.transformer.transformer_block import TransformerBlock

    engine = build(config)
    (chunk,) = engine.bare_chunks
    (embedding,) = (module for module in chunk.modules() if isinstance(module, LanguageModelEmbedding))
    (block,) = (module for module in chunk.modules() if isinstance(module, TransformerBlock))
    tokens = batches_of(config, 1)[0]["tokens"]
    length = tokens.size(1) // (config.parallel.tensor if config.parallel.sequence else 1)
    hidden = torch.ones(length, tokens.size(0), config.model.hidden_size, requires_grad=True)

    def embed() -> torch.Tensor:
        return embedding(tokens, torch.arange(tokens.size(1)).expand(tokens.shape))

    def layer(index: int) -> torch.Tensor:
        # As Megatron-core's block runs its layers.
        with tensor_parallel.get_cuda_rng_tracker().fork() if config.parallel.sequence else nullcontext():
            return tensor_parallel.checkpoint(lambda x: block.layers[index](x, None)[0], False, hidden)

    modules = {"embedding": embed, "layer 0": lambda: layer(0), "layer 1": lambda: layer(1)}
    by_pass = [(name, *each) for each in PASSES for name in modules]
    found: dict[str, Any] = {}
    for label, order in (("by pass", by_pass), ("by layer", sorted(by_pass)), ("backwards", by_pass[::-1])):
        found[label] = {}
        for name, engine.dropout.step, micro_batch in order:
            engine.dropout.begin(micro_batch)
            found[label][name, engine.dropout.step, micro_batch] = modules[name]()
    outputs = found["by pass"]
    recomputed = []
    for layer_of in block.layers:  # what a recomputed layer gives stands at its exit in the backward pass
        layer_of.register_forward_hook(lambda _module, _inputs, output: recomputed.append(output[0].detach().clone()))
    kept = [key for key in outputs if key[0] != "embedding"]
    for key in kept:
        outputs[key].sum().backward()
    found["again"] = dict(zip(kept, recomputed, strict=True))
    return {label: {key: value.detach() for key, value in each.items()} for label, each in found.items()}


@pytest.mark.parametrize(("ranks", "layout"), [(1, ()), (2, ("parallel.tensor=2", "parallel.sequence=true"))])
def test_masks_do_not_follow_the_order_of_passes(ranks: int, layout: tuple[str, ...]) -> None:
    by_rank = distributed.run(drawn, ranks, make_config([*TINY, *DROPOUT, *layout], ranks))
    for found in by_rank:
        outputs = found["by pass"]
        for label in ("by layer", "backwards", "again"):
            assert all(torch.equal(value, outputs[key]) for key, value in found[label].items()), label
        for one, other in itertools.combinations(outputs, 2):
            assert not torch.equal(outputs[one], outputs[other]), (one, other)
    if ranks > 1:  # each rank has rows of its own
        zeros = [found["by pass"]["embedding", 1, 0] == 0 for found in by_rank]
        assert not torch.equal(*zeros)


def dropped_rows(config: Config) -> list[bool]:
    """Whether each number of the embedding's output was dropped, of the rows of this rank."""
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

    from training.step import gradients

    engine = build(config)
    (chunk,) = engine.bare_chunks
    (embedding,) = (module for module in chunk.modules() if isinstance(module, LanguageModelEmbedding))
    found: list[torch.Tensor] = []
    embedding.register_forward_hook(lambda _module, _inputs, output: found.append(output == 0))
    gradients(engine, batches_of(config, 1), 1)
    return torch.cat(found).flatten().tolist()


def test_context_ranks_draw_for_the_rows_that_they_hold() -> None:
    """As the guide says: masks that repeat, of each rank its own, so that one process has others."""
    common = [*TINY, "model.hidden_dropout=0.5"]
    config = make_config([*common, "parallel.context=2"], 2)
    first, again = (distributed.run(dropped_rows, 2, config) for _ in range(2))
    (alone,) = distributed.run(dropped_rows, 1, make_config(common))
    assert first == again and len(first[0]) == len(first[1]) == len(alone) / 2
    assert first[0] != first[1] and sorted(first[0] + first[1]) != sorted(alone)


def test_streams_fit_the_layout_that_drew_from_them() -> None:
    layout = {"world_size": 4, "tensor": 2, "sequence": True, "pipeline": 1, "virtual_pipeline": None, "context": 1}
    assert draws_alike(layout, {**layout, "virtual_pipeline": 1, "expert": 2, "timeout_seconds": 9})
    for key, other in (("world_size", 8), ("tensor", 1), ("sequence", False), ("pipeline", 2), ("context", 2)):
        assert not draws_alike(layout, {**layout, key: other}), key
