"""Text to tokens: trains or takes the tokenizer, tokenizes in parallel, writes Megatron's .bin/.idx files into
data.cache_dir.

`python -m data.prepare --help` says how to do it ahead of training; training does the same on first use.

Everything is written to a temporary name and renamed. Work is cut into parts, so a run that was killed continues where
it was. What exists is found by a key: a hash of the corpus's files (path, size, time of change), the tokenizer and the
settings. Processes that need the same data at once take turns at a file lock: the first does the work, the others find
it done.
"""

from data.prepare.prepared import PreparedData, TokenFile
from data.prepare.run import find_prepared, prepare

__all__ = [
    "PreparedData",
    "TokenFile",
    "find_prepared",
    "prepare",
]
