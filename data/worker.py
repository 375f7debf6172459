"""A process that decompresses files and tokenizes shards for data.prepare: `python -m data.worker`, never started by
hand.

It reads one JSON object per line from standard input, first the settings and then the jobs, and answers each job with
one line on standard output. It is a new interpreter: not a fork of a process with threads and locks, without the
caller's main module, and without torch, so that it starts within a tenth of a second. It ends when its input ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from base.errors import ConfigError
from base.exit_handler import end_with_caller
from data.corpus import read_span, unpack
from data.corpus.documents import BadLine, Document, Span, document_hash
from data.corpus.sentences import split_sentences
from data.indexed import token_dtype
from data.tokenizer import Tokenizer, load_tokenizer


def tokenize_shard(tokenizer: Tokenizer, spans: list[Span], text_key: str, family: str, out: Path) -> dict[str, Any]:
    """Tokenize the documents of a shard into `out` (.npz) and its .bin file, atomically. Returns the number of tokens
    under the key `tokens`."""
    shard = _TokenizedShard(tokenizer, family)
    for span in spans:
        by_line = span.by_line or span.format == "stdlib" or span.name.lower().endswith(".py")
        for item in read_span(span, text_key):
            if isinstance(item, BadLine):
                shard.bad_lines.append(str(item))
            else:
                shard.add(item, by_line)
    return {"tokens": shard.write(out)}


class _TokenizedShard:
    """Collects the tokenized documents of a shard, and writes them to two files.

    The .bin file contains the tokens. The .npz file, which is written last and marks the shard as complete, contains
    sequence_lengths [n], sequences_per_document [d], hashes [d] (of the documents' names), texts [d] (hashes of their
    texts), control_tokens [c, 2] (special tokens in the texts, and their counts), goes_on (whether the first document
    continues the last document of the previous shard), and head and tail: the text of that first document, and of a
    last document that continues in the next shard, which the hashes of complete documents need. GPT: one sequence per
    document, which ends with end-of-document. BERT: one sequence per sentence.
    """

    def __init__(self, tokenizer: Tokenizer, family: str):
        self._tokenizer, self._family = tokenizer, family
        self._end_of_document = np.array([tokenizer.eod], dtype=np.int32)
        self._is_control = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._is_control[list(tokenizer.control_tokens())] = True
        self._arrays: list[np.ndarray] = []
        self._lengths: list[int] = []
        self._counts: list[int] = []
        self._hashes: list[int] = []
        self._texts: list[int] = []
        self.bad_lines: list[str] = []
        self._num_bytes = 0
        self._control: Counter[int] = Counter()
        self._goes_on = False
        self._text_hash = xxhash.xxh3_64()  # of the current document's text so far
        self._head, self._tail = bytearray(), bytearray()

    def add(self, document: Document, by_line: bool) -> None:
        """Add a document, or the next segment of a document. by_line: each of its lines is a sentence."""
        joins = not document.begins and bool(self._hashes)
        self._goes_on |= not document.begins and not self._hashes
        if self._family == "bert":
            sentences = split_sentences(document.text, by_line)
            sequences = [ids for ids in self._tokenizer.encode_batch(sentences) if ids]
            ids = np.array(list(chain.from_iterable(sequences)), dtype=np.int32)
            self._arrays.append(ids)
            self._lengths.extend(map(len, sequences))
            new = len(sequences)
        else:
            ids = self._tokenizer.encode_array(document.text)
            self._arrays.extend((ids, self._end_of_document) if document.ends else (ids,))
            new, length = int(not joins), len(ids) + document.ends
            if joins:
                self._lengths[-1] += length
            else:
                self._lengths.append(length)
        self._control.update(ids[self._is_control[ids]].tolist())
        text = document.text.encode("utf-8")
        if joins:
            self._counts[-1] += new
            self._text_hash.update(text)
            self._texts[-1] = self._text_hash.intdigest()
        else:
            self._counts.append(new)
            self._hashes.append(document_hash(document.name))
            self._text_hash = xxhash.xxh3_64(text)
            self._texts.append(self._text_hash.intdigest())
        if self._goes_on and len(self._hashes) == 1:
            self._head += text
        elif document.ends:
            self._tail.clear()
        else:
            self._tail += text
        self._num_bytes += len(text)

    def write(self, out: Path) -> int:
        """Write the .npz file `out` and its .bin file, and return the number of tokens."""
        dtype = token_dtype(self._tokenizer.vocab_size)
        tokens = np.concatenate(self._arrays).astype(dtype) if self._arrays else np.zeros(0, dtype)
        temporary = out.with_name(f"{out.name}.tmp{os.getpid()}")
        temporary.write_bytes(tokens.data)
        temporary.rename(out.with_suffix(".bin"))
        with open(temporary, "wb") as file:
            np.savez(
                file,
                sequence_lengths=np.array(self._lengths, dtype=np.int32),
                sequences_per_document=np.array(self._counts, dtype=np.int64),
                hashes=np.array(self._hashes, dtype=np.uint64),
                texts=np.array(self._texts, dtype=np.uint64),
                num_bytes=np.array(self._num_bytes),
                bad_lines=np.array(self.bad_lines, dtype=np.str_),
                control_tokens=np.array(sorted(self._control.items()), dtype=np.int64).reshape(-1, 2),
                goes_on=np.array(self._goes_on),
                head=np.frombuffer(self._head, dtype=np.uint8),
                tail=np.frombuffer(self._tail, dtype=np.uint8),
            )
        temporary.rename(out)
        return len(tokens)


def main() -> None:
    """Run the jobs that arrive on standard input, one after the other."""
    end_with_caller()  # on other systems than Linux, this process ends with its input
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C and closes this process's input
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of libraries out of the replies
    first = sys.stdin.readline()
    if not first:  # the caller has ended already
        return
    settings = json.loads(first)
    tokenizer = load_tokenizer(settings["tokenizer"], tried=True) if settings["tokenizer"] else None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if "unpack" in job:
                unpack(job["unpack"], job["out"])
                reply: dict[str, Any] = {}
            else:
                assert tokenizer is not None
                spans = [Span(*fields) for fields in job["spans"]]
                reply = tokenize_shard(tokenizer, spans, settings["text_key"], settings["family"], Path(job["out"]))
        except ConfigError as error:
            reply = {"error": str(error), "config": True}
        except OSError as error:  # such as a full disk: the caller needs no traceback
            reply = {"error": error.strerror or str(error), "errno": error.errno, "file": error.filename}
        try:
            replies.write(json.dumps({"job": job["job"], **reply}) + "\n")
            replies.flush()
        except BrokenPipeError:  # the caller has ended
            os._exit(1)


if __name__ == "__main__":
    main()
