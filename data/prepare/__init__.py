"""Tokenization of a corpus: train or open the tokenizer, tokenize in parallel, write Megatron's .bin/.idx files to
data.cache_dir.

`python -m data.prepare --help` describes how to do this ahead of training; otherwise training does it at its first
start.

Every file is written under a temporary name and renamed. The work is divided into shards, so a run that was killed
continues where it stopped. Finished work is found by a key: a hash of the corpus's files (path, size, time), the
tokenizer and the settings. If several processes need the same data at once, a file lock lets one process do the work,
and the others use its result.
"""

from data.prepare.prepared import PreparedData, TokenFile
from data.prepare.run import find_prepared, prepare

__all__ = ["PreparedData", "TokenFile", "find_prepared", "prepare"]
