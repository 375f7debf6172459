"""Dropout whose masks depend on step, layer and tokens, but never on earlier random draws.

Before a layer runs, its random generators are seeded with (seed of the run, step, layer, micro-batch in the global
batch, token rows of this rank). So a resume, another order of passes and recomputation give the same mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)

# isort: split
import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer

from configs import derived
from configs.schema import Config
from parallel.megatron.random_state import PASS_KEY, set_current_pass
from parallel.topology import Topology


class Dropout:
    """Seeds the random generators of dropout in a rank's model chunks. `step`: the step of the next passes."""

    def __init__(self, config: Config, topology: Topology, bare_chunks: Sequence[torch.nn.Module]):
        self.step = 0
        self._seed, self._data = config.training.seed, topology.data
        self._is_cut = config.parallel.sequence  # tensor ranks have different tokens between attention and feed-forward
        # Keys of the seeds that all tensor ranks of these tokens share, and of this rank's own seeds.
        self._shared_key = f"context {topology.context.rank}"
        self._own_key = f"{self._shared_key} tensor {topology.tensor.rank}"
        on_gpu = topology.device.type == "cuda"
        self._generator = torch.cuda.default_generators[topology.device.index] if on_gpu else torch.default_generator
        for module in (module for chunk in bare_chunks for module in chunk.modules()):
            if derived.has_dropout(config) and isinstance(module, (LanguageModelEmbedding, TransformerLayer)):
                layer = module.layer_number if isinstance(module, TransformerLayer) else 0  # from 1, in the whole model
                module.register_forward_pre_hook(partial(self._enter, layer))

    def begin(self, micro_batch: int) -> None:
        """Set the micro-batch of the next pass (of this rank, counted from 0), for the seeds of its dropout."""
        # Its index in the global batch, the same in every layout: see data/loader.py.
        set_current_pass((self.step, micro_batch * self._data.size + self._data.rank))

    def _enter(self, layer: int, module: torch.nn.Module, _inputs: Any) -> None:
        if not module.training:
            return
        tracker = tensor_parallel.get_cuda_rng_tracker()
        step, micro_batch = tracker.get_states()[PASS_KEY]
        own = seed_of(self._seed, step, layer, micro_batch, self._own_key)
        with tracker.fork():  # attention of this rank's heads, and embeddings of its tokens, use the tracker
            self._generator.manual_seed(own)
        shared = seed_of(self._seed, step, layer, micro_batch, self._shared_key)
        self._generator.manual_seed(own if self._is_cut else shared)


def seed_of(seed: int, step: int, layer: int, micro_batch: int, row_key: str) -> int:
    """Return the seed of a layer's dropout in one forward pass, in [0, 2^63).

    layer: 0 for the embedding. row_key: text that identifies the tokens, so that others get another seed.
    """
    digest = hashlib.blake2b(f"{seed} {step} {layer} {micro_batch} {row_key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
