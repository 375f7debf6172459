"""Tokenization of a source, shard by shard, and the merge of the shards into the token files of train and valid."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from base.checksums import write_summed
from base.errors import ConfigError
from base.files import sync, write_text
from data import overlap
from data.corpus import Source, plan_shards
from data.digest import file_digest
from data.indexed import token_dtype, write_index
from data.prepare.notes import SHOWN_BAD_LINES, advice, no_documents
from data.prepare.prepared import Preparation
from data.prepare.worker_pool import run_jobs
from data.split import DocumentSplit, cut_document, cut_position, split_documents
from data.tokenizer import Tokenizer

COPIED_TOKENS = 1 << 22  # tokens that are copied at once
MOST_TOKENS = 2**31 - 1  # tokens of a sequence, whose length has 32 bits in an .idx file


def tokenize_source(source: Source, job: Preparation, folder: Path) -> None:
    """Decompress the files of a source, tokenize the shards that are missing, and merge all shards into `folder`. Only
    one process at a time may call this for a folder."""
    config, tokenizer = job.config, job.tokenizer
    shards_dir, unpacked_dir = folder / "parts", folder / "unpacked"
    shards_dir.mkdir(exist_ok=True)
    unpacked_dir.mkdir(exist_ok=True)
    for leftover in [*shards_dir.glob("*.tmp*"), *unpacked_dir.glob("*.tmp*")]:
        leftover.unlink(missing_ok=True)

    packed = {file.path: str(unpacked_dir / f"{i:06d}") for i, file in enumerate(source.files) if file.compression}
    settings = {"tokenizer": tokenizer.path, "text_key": config.text_key, "family": job.family}
    workers = config.num_workers or len(os.sched_getaffinity(0))
    to_unpack = [(path, out) for path, out in packed.items() if not os.path.exists(out)]
    jobs = [{"unpack": path, "out": out, "size": os.path.getsize(path)} for path, out in to_unpack]
    run_jobs(jobs, settings, workers, config.timeout_seconds, "unpacking", 0, job.show_progress)

    shards = plan_shards(source.files, packed, job.documents_in_text)
    if not shards:
        raise ConfigError(no_documents(source.name, 0, []))
    outs = [shards_dir / f"{i:06d}.npz" for i in range(len(shards))]
    sizes = [sum(span.size for span in shard) for shard in shards]
    missing = [i for i, out in enumerate(outs) if not out.exists()]
    jobs = [{"spans": [astuple(span) for span in shards[i]], "out": str(outs[i]), "size": sizes[i]} for i in missing]
    ready = sum(sizes) - sum(sizes[i] for i in missing)
    run_jobs(jobs, settings, workers, config.timeout_seconds, "tokenizing", ready, job.show_progress)

    index = read_index(outs, job.family, source.name)
    split = split_documents(index.hashes, index.tokens(), config.validation_fraction, source.is_stdlib, index.texts)
    (folder / "done.json").unlink(missing_ok=True)
    done = _merge(outs, index, folder, tokenizer, job.family, split)
    if not done["documents"]:
        shutil.rmtree(folder)
        raise ConfigError(no_documents(source.name, done["bad_lines"], done["first_bad_lines"]))
    done["text"] = xxhash.xxh3_128_hexdigest(index.texts.tobytes())  # independent of the tokens and the split
    done["advice"] = advice(source, packed, job.documents_in_text, done["documents"])
    done["sizes"] |= overlap.write_texts(folder, index.texts, split.held_out, split.cuts)
    done["digests"] = {name: file_digest(folder / name, job.cache, config.timeout_seconds) for name in done["sizes"]}
    write_summed(folder / "done.json", done)
    shutil.rmtree(shards_dir)
    shutil.rmtree(unpacked_dir)


@dataclass
class DocumentIndex:
    """The lengths and hashes of all documents of a source.

    lengths int32 [n]: tokens of each sequence. counts int64 [d]: sequences of each document. hashes uint64 [d]: of the
    documents' names. texts uint64 [d]: hashes of the documents' texts.
    """

    lengths: np.ndarray
    counts: np.ndarray
    hashes: np.ndarray
    texts: np.ndarray
    num_bytes: int
    bad_lines: list[str]
    control_tokens: Counter[int]  # special tokens in the texts

    def bounds(self) -> np.ndarray:
        """Return the number of each document's first sequence, then the number of all sequences: int64 [d + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])

    def tokens(self) -> np.ndarray:
        """Return the number of tokens of each document: int64 [d]."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])
        return np.diff(ends[self.bounds()])


def read_index(shards: list[Path], family: str, name: str) -> DocumentIndex:
    """Return the index of all documents in a source's shards. Documents that span shards are joined. Raises ConfigError
    for a document that is too long."""
    lengths, counts, hashes = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    texts = [np.zeros(0, np.uint64)]
    text_hash = xxhash.xxh3_64()  # of the text so far of a document that spans several shards
    num_bytes, bad, control = 0, list[str](), Counter[int]()
    for shard in shards:
        arrays = np.load(io.BytesIO(shard.read_bytes()))  # an array is decoded when it is used
        own_lengths, own_counts = arrays["sequence_lengths"], arrays["sequences_per_document"]
        own_hashes, own_texts = arrays["hashes"], arrays["texts"]
        num_bytes += int(arrays["num_bytes"])
        bad += arrays["bad_lines"].tolist()
        control.update(dict(arrays["control_tokens"].tolist()))
        if arrays["goes_on"]:
            if family == "gpt":  # a document is one sequence
                before = next(array for array in reversed(lengths) if len(array))
                joined = int(before[-1]) + int(own_lengths[0])
                if joined > MOST_TOKENS:
                    raise ConfigError(
                        f"data.documents_in_text=file: a document of {name} has at least {joined:,} tokens, but may "
                        f"have at most {MOST_TOKENS:,}. Divide its file, or set data.documents_in_text=blank_line or "
                        "line"
                    )
                before[-1], own_lengths = joined, own_lengths[1:]
            else:
                next(array for array in reversed(counts) if len(array))[-1] += own_counts[0]
            text_hash.update(arrays["head"])
            next(array for array in reversed(texts) if len(array))[-1] = text_hash.intdigest()
            own_counts, own_hashes, own_texts = own_counts[1:], own_hashes[1:], own_texts[1:]
        if len(tail := arrays["tail"]):
            text_hash = xxhash.xxh3_64(tail)
        lengths.append(own_lengths)
        counts.append(own_counts)
        hashes.append(own_hashes)
        texts.append(own_texts)
    join = np.concatenate
    return DocumentIndex(join(lengths), join(counts), join(hashes), join(texts), num_bytes, bad, control)


class ShardTokens:
    """The concatenated tokens of a source's shards, which are read on demand."""

    def __init__(self, shards: list[Path], dtype: type[np.generic]):
        self._files = [shard.with_suffix(".bin") for shard in shards]
        self._dtype = np.dtype(dtype)
        sizes = [file.stat().st_size // self._dtype.itemsize for file in self._files]
        self._ends = np.cumsum(np.array(sizes, dtype=np.int64))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, begin: int, end: int, offset: int = 0) -> np.ndarray:
        """Return tokens [begin, end), counted from token `offset` of the concatenation."""
        begin, end = begin + offset, end + offset
        found = [np.zeros(0, self._dtype)]
        number = int(np.searchsorted(self._ends, begin, side="right"))
        while begin < end:
            stop = min(end, int(self._ends[number]))
            first = begin - (int(self._ends[number - 1]) if number else 0)
            skipped = first * self._dtype.itemsize
            found.append(np.fromfile(self._files[number], self._dtype, count=stop - begin, offset=skipped))
            begin, number = stop, number + 1
        return np.concatenate(found)


def _merge(
    shards: list[Path], index: DocumentIndex, folder: Path, tokenizer: Tokenizer, family: str, split: DocumentSplit
) -> dict[str, Any]:
    """Write the documents of all shards to the token files of train and valid. Returns the summary for done.json."""
    dtype = token_dtype(tokenizer.vocab_size)
    tokens = ShardTokens(shards, dtype)
    assert len(tokens) == index.lengths.sum(dtype=np.int64), folder
    lengths, counts, held_out, cut_sequences = _cut(tokens, index, split, tokenizer)
    in_valid = np.repeat(held_out, counts)
    ends_of_sequences = np.cumsum(lengths, dtype=np.int64)
    # Ends, in tokens, of runs of sequences for the same file. Most documents are for train, so there are few runs.
    changes = np.flatnonzero(np.diff(in_valid))
    ends = [*ends_of_sequences[changes].tolist(), len(tokens)]
    end_at: set[int] = set()  # positions after which the first half of a cut document needs an end token
    if family == "gpt" and cut_sequences:  # a document is one sequence, which ends with end-of-document
        end_at.update(ends_of_sequences[cut_sequences].tolist())
        lengths = lengths.copy()
        lengths[cut_sequences] += 1
    names = ("train", "valid")
    with contextlib.ExitStack() as stack:
        bins = {name: stack.enter_context(open(folder / f"{name}.bin.tmp", "wb")) for name in names}
        begin, wanted = 0, bool(len(in_valid) and in_valid[0])
        for end in ends:
            file = bins["valid" if wanted else "train"]
            for position in range(begin, end, COPIED_TOKENS):
                file.write(tokens.read(position, min(position + COPIED_TOKENS, end)).data)
            if end in end_at:
                file.write(np.array([tokenizer.eod], dtype).data)
            begin, wanted = end, not wanted
    written = {}
    for name, wanted in (("train", False), ("valid", True)):
        chosen = lengths[in_valid == wanted]
        written[name] = int(chosen.sum(dtype=np.int64))
        bounds = np.concatenate([np.zeros(1, np.int64), counts[held_out == wanted].cumsum()])
        write_index(folder / f"{name}.idx.tmp", dtype, chosen, bounds)
    files = [f"{name}.{suffix}" for name in names for suffix in ("bin", "idx")]
    for written_file in files:
        sync(folder / f"{written_file}.tmp")
        os.rename(folder / f"{written_file}.tmp", folder / written_file)
    write_text(folder / "bad_lines.txt", "".join(f"{line}\n" for line in index.bad_lines))
    return {
        "tokens": written,
        "documents": len(index.hashes),
        "bytes": index.num_bytes,
        "bad_lines": len(index.bad_lines),
        "first_bad_lines": index.bad_lines[:SHOWN_BAD_LINES],
        "control_tokens": dict(index.control_tokens),
        "sizes": {file: (folder / file).stat().st_size for file in files},
    }


def _cut(
    tokens: ShardTokens, index: DocumentIndex, split: DocumentSplit, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Cut each document in `split.cuts` into a training document and a validation document. Returns the sequences'
    lengths in tokens, each document's number of sequences, whether each document is held out, and the last sequence of
    the training part of each cut document."""
    lengths, held_out, bounds = index.lengths, split.held_out, index.bounds()
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    marks = (tokenizer.line_ends(), tokenizer.word_starts()) if split.cuts else None
    cut_sequences: list[int] = []
    for number in reversed(split.cuts):  # backwards, so that the numbers of the remaining documents stay valid
        first, last, before = int(bounds[number]), int(bounds[number + 1]), len(lengths)
        read = functools.partial(tokens.read, offset=int(starts[first]))
        position = cut_position(lengths[first:last], split.tail, read, marks)
        starts, lengths, bounds = cut_document(starts, lengths, bounds, number, position)
        held_out = np.insert(held_out, number + 1, True)
        cut_sequences = [int(bounds[number + 1]) - 1, *(n + len(lengths) - before for n in cut_sequences)]
    return lengths, np.diff(bounds), held_out, cut_sequences
