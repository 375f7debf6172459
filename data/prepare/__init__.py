"""Text to tokens: train or open the tokenizer, tokenize in parallel, write Megatron's .bin/.idx files into
data.cache_dir.

`python -m data.prepare --help` describes how to do this ahead of training; training does the same on first use.

Everything is written to a temporary name and renamed. Work is cut into shards, so a run that was killed continues where
it stopped. Finished work is found by a key: a hash of the corpus's files (path, size, time of change), the tokenizer
and the settings. Processes that need the same data at once take a file lock in turns: the first does the work, and the
others find its result.
"""

from data.prepare.prepared import PreparedData, TokenFile
from data.prepare.run import find_prepared, prepare

__all__ = ["PreparedData", "TokenFile", "find_prepared", "prepare"]
