"""The encoder: it computes the logits of a BERT, in which every token attends to all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from base.errors import ConfigError
from configs.schema import Config
from inference.decoder.linear import norm
from inference.decoder.step import Step
from inference.decoder.transformer import Transformer, pass_bytes
from inference.weights.source import WeightSource
from memory.transfer import lists_to_device
from parallel.topology import Topology


class Encoder(Transformer):
    """A BERT that predicts masked tokens. The constructor raises ConfigError for a different model family."""

    def __init__(self, source: WeightSource, config: Config, topology: Topology, vocab_size: int) -> None:
        if config.model.family != "bert":
            raise ConfigError(
                f"model.family ({config.model.family}) must be bert to predict masked words. Try python -m "
                "inference.generate, which continues text."
            )
        super().__init__(source, config, topology, vocab_size)
        self._dense = source.small.get("lm_head.dense.weight"), source.small.get("lm_head.dense.bias")
        self._head_norm = norm(source.small, "lm_head.layer_norm", config) if self._head is not None else None

    def logits(self, texts: Sequence[torch.Tensor], positions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the logits at the n given positions of each text, fp32 `[n, V]`. texts: int64 `[s]`."""
        lengths = [len(text) for text in texts]
        num_logits = sum(map(len, positions))
        self._reserve_together(pass_bytes(self.config, self.source, max(lengths), len(texts), num_logits))
        angles = [self._angles(n, slice(0, n), [n]) for n in lengths]
        steps = [Step(1, n, cos, sin, is_causal=False) for n, (cos, sin) in zip(lengths, angles, strict=True)]
        found = self._run([text[None] for text in texts], steps)
        hidden = None
        if found is not None:
            weight, bias = self._dense
            assert weight is not None and self._head_norm is not None
            masked = zip(found, lists_to_device(positions, self.device), strict=True)
            hidden = [self._head_norm(F.gelu(F.linear(each[those], weight, bias))) for each, those in masked]
        logits = self._logits(hidden, [len(those) for those in positions])
        self.source.end_pass(sum(lengths))
        return logits
