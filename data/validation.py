"""The samples of a validation corpus: so many global batches, or each sample once where there are fewer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from configs.schema import Config, ConfigError
from data.prepare import PreparedData
from data.samples import BertSamples, GPTSamples


class EachOnce:
    """Samples for at most `num_batches` global batches. Where a corpus has fewer, each of its samples counts once: the
    last batch is filled up with samples whose loss_mask is 0.

    num_steps: the global batches. So the loss is of the same tokens in every layout, and in every evaluation.
    """

    def __init__(self, samples: GPTSamples | BertSamples, global_batch_size: int, num_batches: int):
        sizes = [file.num_samples for file in samples.files]
        self._samples, self.num_samples = samples, min(sum(sizes), num_batches * global_batch_size)
        self.num_steps = math.ceil(self.num_samples / global_batch_size)
        if sum(sizes) <= num_batches * global_batch_size:
            samples.blend = _InOrder(sizes)

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The samples' batch, in which those past the corpus's end count for nothing."""
        arrays = self._samples.batch([i % self.num_samples for i in indices])
        arrays["loss_mask"][[i >= self.num_samples for i in indices]] = 0.0
        return arrays


class _InOrder:
    """All samples of one file after the other, where a Blend would take some of them again before others."""

    def __init__(self, sizes: Sequence[int]):
        self._ends = np.cumsum(sizes)

    def locate(self, i: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, i, side="right"))
        return file, i - (int(self._ends[file - 1]) if file else 0)


def check_validation_corpora(config: Config, prepared: PreparedData) -> None:
    """Raise ConfigError for a validation corpus of less than one sample, with the numbers."""
    if config.model.family != "gpt":
        return  # any sentence is a sample of BERT
    needed = config.model.sequence_length + 1
    for name, files in prepared.validation.items():
        for file in files:
            if file.num_tokens < needed:
                raise ConfigError(
                    f"data.validation_corpora: {name} has {file.num_tokens:,} tokens in {file.prefix}.bin, and a "
                    f"sample takes {needed:,} (model.sequence_length + 1). Give it more text, or leave it out"
                )
