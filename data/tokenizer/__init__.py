"""Tokenizers behind one interface: sentencepiece models, taken or trained here, and Hugging Face `tokenizer.json`.

torch and transformers are not imported: the processes that tokenize import this package.
"""

from data.tokenizer.base import CLS, EOD, MASK, PAD, SEP, Tokenizer
from data.tokenizer.train import train_tokenizer
from data.tokenizer.trial import load_tokenizer, tokenizer_digest

__all__ = [
    "CLS",
    "EOD",
    "MASK",
    "PAD",
    "SEP",
    "Tokenizer",
    "load_tokenizer",
    "tokenizer_digest",
    "train_tokenizer",
]
