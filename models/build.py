"""Builds this rank's model chunks for the configured layout, with initial weights. Needs initialized process groups."""

from __future__ import annotations

from types import ModuleType

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)

# isort: split
import torch

from configs.schema import Config
from models import bert, gpt
from models.blueprint import model_chunks, padded_vocab_size, weights
from models.feed_forward import tile_feed_forward
from models.initial_weights import initialize_weights
from models.loss.output_layer import become_output_layer
from models.specs import block_spec, resolve_backend
from models.transformer_config import transformer_config
from moe.layer import hand_rows_to_routers, layers_of
from parallel.topology import Topology

FAMILIES: dict[str, ModuleType] = {"gpt": gpt, "bert": bert}


def family_module(config: Config) -> ModuleType:
    """Return the module models.gpt or models.bert, which has the functions `forward`, `loss` and `logits`."""
    return FAMILIES[config.model.family]


def build_model(
    config: Config, topology: Topology, vocab_size: int, *, fill: bool = True, streams: bool = False
) -> list[torch.nn.Module]:
    """Build this rank's model chunks (`parallel.virtual_pipeline` of them, or one) on its device, with initial weights
    and without wrappers.

    `vocab_size` is without padding; padding changes neither loss nor gradients. Without `fill` the weights are
    uninitialized memory, which the caller fills. `streams`: experts are offloaded, and the caller fills their weights.
    Raises ConfigError.
    """
    family, device, pipeline = family_module(config), topology.device, topology.pipeline
    backend = resolve_backend(config, device)
    megatron = transformer_config(config, backend)
    num_chunks = config.parallel.virtual_pipeline or 1
    chunks = []
    # torch's own layers draw initial values, which are overwritten below; the state of the global generator must not
    # depend on the number of such layers on this rank.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for index in range(num_chunks):
            vp_stage = index if num_chunks > 1 else None
            chunk = family.build_chunk(
                config,
                megatron,
                topology,
                block_spec(config, topology, megatron, backend, vp_stage, streams),
                padded_vocab_size(vocab_size, topology.tensor.size),
                pre_process=pipeline.rank == 0 and index == 0,
                post_process=pipeline.is_last and index == num_chunks - 1,
                vp_stage=vp_stage,
            )
            blueprint = model_chunks(config)[pipeline.rank][index]
            chunk.blueprint_weights = dict(weights(config, vocab_size, blueprint))  # for models/weights.py
            chunks.append(chunk.to(device))
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.to(megatron.params_dtype)
        for layer in layers_of([chunk]).values():
            layer.experts.stand_in(device)
        if chunk.post_process:
            become_output_layer(chunk.output_layer, vocab_size, config.training.token_tile)
        if config.training.recompute == "full" and config.training.token_tile is not None:
            tile_feed_forward(chunk, config.training.token_tile)
    if topology.context.size > 1:
        hand_rows_to_routers(chunks)
    if fill:
        initialize_weights(chunks, config)
    return chunks
