"""A process that unpacks files and tokenizes parts for data.prepare: `python -m data.worker`, never started by hand.

It reads one JSON object per line from standard input, first the settings and then one job after the other, and answers
each with one line on standard output. It is a fresh interpreter, neither forked from a process that may hold threads
and locks nor importing the caller's main module, and it imports no torch, so that it starts in a tenth of a second. It
ends when its input does.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from configs.schema import ConfigError
from data.corpus import BadLine, Span, document_hash, read_span, split_sentences, unpack
from data.indexed import token_dtype
from data.tokenizer import Tokenizer, load_tokenizer


def tokenize_part(tokenizer: Tokenizer, spans: list[Span], text_key: str, family: str, out: Path) -> dict[str, Any]:
    """Tokenize the documents of a part and write them to `out` (.npz) and beside it (.bin), atomically. Returns its
    counts.

    The .bin holds the tokens; the .npz, which is written last and says that the part is complete, sequence_lengths [n],
    sequences_per_document [d], hashes [d] (of the documents' names), texts [d] (hashes of what they hold),
    control_tokens [c, 2] (special tokens that the texts hold, and how often), goes_on (whether the first document
    belongs to the last one of the part before), and head and tail: the text of that first document, and of another that
    goes on in the next part, from which the hashes of the whole are made.
    GPT: one sequence per document, which ends with end-of-document. BERT: a sequence per sentence.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    end_of_document = np.array([tokenizer.eod], dtype=np.int32)
    arrays: list[np.ndarray] = []
    lengths: list[int] = []
    counts: list[int] = []
    hashes: list[int] = []
    texts: list[int] = []
    bad: list[str] = []
    num_bytes = 0
    is_control = np.zeros(tokenizer.vocab_size, dtype=bool)
    is_control[list(tokenizer.control_tokens())] = True
    control: Counter[int] = Counter()
    goes_on = False
    text_hash = xxhash.xxh3_64()  # of the document so far
    head, tail = bytearray(), bytearray()
    for span in spans:
        by_line = span.by_line or span.format == "stdlib" or span.name.lower().endswith(".py")
        for item in read_span(span, text_key):
            if isinstance(item, BadLine):
                bad.append(str(item))
                continue
            joins = not item.begins and bool(hashes)
            goes_on |= not item.begins and not hashes
            if family == "bert":
                sequences = [ids for ids in tokenizer.encode_batch(split_sentences(item.text, by_line)) if ids]
                ids = np.array(list(chain.from_iterable(sequences)), dtype=np.int32)
                arrays.append(ids)
                lengths.extend(map(len, sequences))
                new = len(sequences)
            else:
                ids = tokenizer.encode_array(item.text)
                arrays.extend((ids, end_of_document) if item.ends else (ids,))
                new, length = int(not joins), len(ids) + item.ends
                if joins:
                    lengths[-1] += length
                else:
                    lengths.append(length)
            control.update(ids[is_control[ids]].tolist())
            if joins:
                counts[-1] += new
            else:
                counts.append(new)
                hashes.append(document_hash(item.name))
            text = item.text.encode("utf-8")
            if joins:
                text_hash.update(text)
                texts[-1] = text_hash.intdigest()
            else:
                text_hash = xxhash.xxh3_64(text)
                texts.append(text_hash.intdigest())
            if goes_on and len(hashes) == 1:
                head += text
            elif item.ends:
                tail.clear()
            else:
                tail += text
            num_bytes += len(text)
    tokens = np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)
    temporary = out.with_name(f"{out.name}.tmp{os.getpid()}")
    temporary.write_bytes(tokens.data)
    temporary.rename(out.with_suffix(".bin"))
    with open(temporary, "wb") as file:
        np.savez(
            file,
            sequence_lengths=np.array(lengths, dtype=np.int32),
            sequences_per_document=np.array(counts, dtype=np.int64),
            hashes=np.array(hashes, dtype=np.uint64),
            texts=np.array(texts, dtype=np.uint64),
            num_bytes=np.array(num_bytes),
            bad_lines=np.array(bad, dtype=np.str_),
            control_tokens=np.array(sorted(control.items()), dtype=np.int64).reshape(-1, 2),
            goes_on=np.array(goes_on),
            head=np.frombuffer(head, dtype=np.uint8),
            tail=np.frombuffer(tail, dtype=np.uint8),
        )
    temporary.rename(out)
    return {"tokens": len(tokens)}


def _end_with_caller() -> None:
    """Be killed when the caller's main thread ends, however it ends: Linux's PR_SET_PDEATHSIG. Elsewhere the input's
    end does it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


def main() -> None:
    _end_with_caller()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller gets it too, and ends this process by closing its input
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the replies
    first = sys.stdin.readline()
    if not first:  # the caller has gone already
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
                reply = tokenize_part(tokenizer, spans, settings["text_key"], settings["family"], Path(job["out"]))
        except ConfigError as error:
            reply = {"error": str(error), "config": True}
        except OSError as error:  # disk full, no permission: no traceback needed
            reply = {"error": error.strerror or str(error), "errno": error.errno, "file": error.filename}
        try:
            replies.write(json.dumps({"job": job["job"], **reply}) + "\n")
            replies.flush()
        except BrokenPipeError:  # the caller has gone, and nobody wants to read of it
            os._exit(1)


if __name__ == "__main__":
    main()
