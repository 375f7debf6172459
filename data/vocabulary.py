"""The size of a run's vocabulary before there is a corpus."""

from __future__ import annotations

from configs.schema import Config
from data.tokenizer import load_tokenizer


def expected_vocab_size(config: Config) -> int:
    """The model's size of the vocabulary, the tokenizer's, or the one that a tokenizer will be trained to."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    if config.data.tokenizer == "sentencepiece":
        return config.data.vocab_size
    return load_tokenizer(config.data.tokenizer).vocab_size
