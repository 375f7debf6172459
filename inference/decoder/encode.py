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
    """Predicts masked tokens with a BERT. The constructor raises ConfigError for a model of another family."""

    def __init__(self, source: WeightSource, config: Config, topology: Topology, vocab_size: int) -> None:
        if config.model.family != "bert":
            raise ConfigError(
                f"model.family ({config.model.family}) does not fill in masked words: it continues text. Try python "
                "-m inference.generate."
            )
        super().__init__(source, config, topology, vocab_size)
        self._dense = source.small.get("lm_head.dense.weight"), source.small.get("lm_head.dense.bias")
        self._head_norm = norm(source.small, "lm_head.layer_norm", config) if self._head is not None else None

    def logits(self, texts: Sequence[torch.Tensor], positions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the logits at the n given positions of each text, fp32 `[n, V]`. texts: int64 `[s]`."""

        def step(length: int) -> Step:
            cos = sin = None
            if self._rotary is not None:
                cos, sin = self._rotary.at(length, slice(0, length), [length])
            return Step(1, length, cos, sin, is_causal=False)

        longest = max(len(text) for text in texts)
        self._reserve_together(pass_bytes(self.config, self.source, longest, len(texts), sum(map(len, positions))))
        found = self._run([text[None] for text in texts], [step(len(text)) for text in texts])
        hidden = None
        if found is not None:
            weight, bias = self._dense
            assert weight is not None and self._head_norm is not None
            masked = zip(found, lists_to_device(positions, self.device), strict=True)
            hidden = [self._head_norm(F.gelu(F.linear(each[those], weight, bias))) for each, those in masked]
        logits = self._logits(hidden, [len(those) for those in positions])
        self.source.end_pass(sum(len(text) for text in texts))
        return logits
