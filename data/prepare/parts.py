"""Tokenize a source part by part, and merge the parts into the files of train and validation."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from configs.checksums import write_summed
from configs.files import sync, write_text
from configs.schema import ConfigError, DataConfig
from data import shared_documents
from data.corpus import Source, plan_parts
from data.digest import file_digest
from data.indexed import token_dtype, write_index
from data.prepare.advice import advice
from data.prepare.bad_lines import SHOWN_BAD_LINES, no_documents
from data.prepare.part_index import DocumentTokens, Index, PartTokens, read_index
from data.prepare.workers import run_jobs
from data.split import DocumentSplit, cut_document, cut_place, split_documents
from data.tokenizer import Tokenizer

COPIED_TOKENS = 1 << 22  # at once


def tokenize(
    source: Source,
    config: DataConfig,
    family: str,
    tokenizer: Tokenizer,
    folder: Path,
    cache: Path,
    documents_in_text: str,
    show_progress: bool,
) -> None:
    """Unpack, tokenize the parts that are not there yet, and merge them. Called by one process at a time."""
    parts_dir, unpacked_dir = folder / "parts", folder / "unpacked"
    parts_dir.mkdir(exist_ok=True)
    unpacked_dir.mkdir(exist_ok=True)
    for leftover in [*parts_dir.glob("*.tmp*"), *unpacked_dir.glob("*.tmp*")]:
        leftover.unlink(missing_ok=True)

    packed = {file.path: str(unpacked_dir / f"{i:06d}") for i, file in enumerate(source.files) if file.compression}
    settings = {"tokenizer": tokenizer.path, "text_key": config.text_key, "family": family}
    workers = config.num_workers or len(os.sched_getaffinity(0))
    jobs = [
        {"unpack": path, "out": out, "size": os.path.getsize(path)}
        for path, out in packed.items()
        if not os.path.exists(out)
    ]
    run_jobs(jobs, settings, workers, config.timeout_seconds, "unpacking", 0, show_progress)

    parts = plan_parts(source.files, packed, documents_in_text)
    if not parts:
        raise ConfigError(no_documents(source.name, 0, []))
    outs = [parts_dir / f"{i:06d}.npz" for i in range(len(parts))]
    sizes = [sum(span.size for span in part) for part in parts]
    missing = [i for i, out in enumerate(outs) if not out.exists()]
    jobs = [{"spans": [astuple(span) for span in parts[i]], "out": str(outs[i]), "size": sizes[i]} for i in missing]
    ready = sum(sizes) - sum(sizes[i] for i in missing)
    run_jobs(jobs, settings, workers, config.timeout_seconds, "tokenizing", ready, show_progress)

    index = read_index(outs, family, source.name)
    split = split_documents(index.hashes, index.tokens(), config.validation_fraction, source.is_stdlib, index.texts)
    (folder / "done.json").unlink(missing_ok=True)
    done = _merge(outs, index, folder, tokenizer, family, split)
    if not done["documents"]:
        shutil.rmtree(folder)
        raise ConfigError(no_documents(source.name, done["bad_lines"], done["first_bad_lines"]))
    done["text"] = xxhash.xxh3_128_hexdigest(index.texts.tobytes())  # whatever the documents' tokens and their split
    done["advice"] = advice(source, packed, documents_in_text, done["documents"])
    done["sizes"] |= shared_documents.write(folder, index.texts, split.held_out, split.cuts)
    done["digests"] = {name: file_digest(folder / name, cache, config.timeout_seconds) for name in done["sizes"]}
    write_summed(folder / "done.json", done)
    shutil.rmtree(parts_dir)
    shutil.rmtree(unpacked_dir)


def _merge(
    parts: list[Path], index: Index, folder: Path, tokenizer: Tokenizer, family: str, split: DocumentSplit
) -> dict[str, Any]:
    """Put the documents into train and valid files. Returns the summary, with the sizes of what was written."""
    dtype = token_dtype(tokenizer.vocab_size)
    lengths, counts, held_out = index.lengths, index.counts, split.held_out
    tokens = PartTokens(parts, dtype)
    assert len(tokens) == lengths.sum(dtype=np.int64), folder
    end_at: set[int] = set()  # tokens, of all parts, behind which a document ends that had no end there
    grown: list[int] = []  # their sequences
    bounds = index.bounds()
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    for number in reversed(split.cuts):  # from the last, so that the numbers of the others stay
        place, first, before = (
            _cut_place(tokens, index, number, split.tail, tokenizer),
            int(bounds[number]),
            len(lengths),
        )
        starts, lengths, bounds = cut_document(starts, lengths, bounds, number, place)
        held_out = np.insert(held_out, number + 1, True)
        if family == "gpt":  # a document is one sequence, which ends with end-of-document
            end_at.add(int(starts[first]) + place)
            grown = [first, *(sequence + len(lengths) - before for sequence in grown)]
    counts = np.diff(bounds)
    in_valid = np.repeat(held_out, counts)
    # Runs of sequences that go to the same file, in tokens; most documents go to train, so there are few.
    changes = np.flatnonzero(np.diff(in_valid))
    ends = [*np.cumsum(lengths, dtype=np.int64)[changes].tolist(), len(tokens)]
    if grown:
        lengths = lengths.copy()
        lengths[grown] += 1
    names = ("train", "valid")
    with contextlib.ExitStack() as stack:
        bins = {name: stack.enter_context(open(folder / f"{name}.bin.tmp", "wb")) for name in names}
        begin, wanted = 0, bool(len(in_valid) and in_valid[0])
        for end in ends:
            file = bins["valid" if wanted else "train"]
            for place in range(begin, end, COPIED_TOKENS):
                file.write(tokens.read(place, min(place + COPIED_TOKENS, end)).data)
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


def _cut_place(tokens: PartTokens, index: Index, number: int, tail: int, tokenizer: Tokenizer) -> int:
    """Where document `number` is made two, of which the second has about `tail` tokens."""
    bounds = index.bounds()
    first, last = int(bounds[number]), int(bounds[number + 1])
    begin = int(index.lengths[:first].sum(dtype=np.int64))
    of_document = index.lengths[first:last]
    content = DocumentTokens(tokens, begin, int(of_document.sum(dtype=np.int64)))
    return cut_place(of_document, tail, content, (tokenizer.line_ends(), tokenizer.word_starts()))
