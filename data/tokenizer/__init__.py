"""Tokenizers with a common interface: sentencepiece models, given or trained here, and Hugging Face's `tokenizer.json`.

The processes that tokenize a corpus import this package, so it imports neither torch nor transformers.
"""

from data.tokenizer.base import Tokenizer
from data.tokenizer.train import train_tokenizer
from data.tokenizer.trial import expected_vocab_size, load_tokenizer, tokenizer_digest

__all__ = ["Tokenizer", "expected_vocab_size", "load_tokenizer", "tokenizer_digest", "train_tokenizer"]
