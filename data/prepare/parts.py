"""Tokenize a source part by part, and merge the parts into the files of train and validation."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from configs.files import sync, write_text
from configs.schema import ConfigError, DataConfig
from data.corpus import Source, plan_parts
from data.digest import file_digest
from data.indexed import token_dtype, write_index
from data.prepare.bad_lines import SHOWN_BAD_LINES, no_documents
from data.prepare.workers import run_jobs
from data.split import Split, cut_document, cut_place, split_documents
from data.tokenizer import Tokenizer


def tokenize(
    source: Source,
    config: DataConfig,
    family: str,
    tokenizer: Tokenizer,
    folder: Path,
    cache: Path,
    rule: str,
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

    parts = plan_parts(source.files, packed)
    if not parts:
        raise ConfigError(no_documents(source.name, 0, []))
    outs = [parts_dir / f"{i:06d}.npz" for i in range(len(parts))]
    sizes = [sum(span.size for span in part) for part in parts]
    missing = [i for i, out in enumerate(outs) if not out.exists()]
    jobs = [{"spans": [astuple(span) for span in parts[i]], "out": str(outs[i]), "size": sizes[i]} for i in missing]
    ready = sum(sizes) - sum(sizes[i] for i in missing)
    run_jobs(jobs, settings, workers, config.timeout_seconds, "tokenizing", ready, show_progress)

    hashes, lengths = _documents(outs)
    split = split_documents(hashes, lengths, config.validation_fraction, rule, source.is_stdlib)
    target = folder if split.by_hash else folder / "exact"
    target.mkdir(exist_ok=True)
    (target / "done.json").unlink(missing_ok=True)
    done = _merge(outs, target, tokenizer, family, split)
    if not done["documents"]:
        shutil.rmtree(folder)
        raise ConfigError(no_documents(source.name, done["bad_lines"], done["first_bad_lines"]))
    done["text"] = _text_digest(outs)
    done["digests"] = {name: file_digest(target / name, cache, config.timeout_seconds) for name in done["sizes"]}
    write_text(target / "done.json", json.dumps(done, indent=1))
    shutil.rmtree(parts_dir)
    shutil.rmtree(unpacked_dir)


def _text_digest(parts: list[Path]) -> str | None:
    """Of the text of all documents, whatever their tokens and their split; None where an earlier version has made a
    part."""
    digest = xxhash.xxh3_128()
    for part in parts:
        arrays = _load(part)
        if "texts" not in arrays:
            return None
        digest.update(arrays["texts"].tobytes())
    return digest.hexdigest()


def _documents(parts: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Hash and length in tokens of every document of the parts."""
    hashes, lengths = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for part in parts:
        arrays = _load(part)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(arrays["sequence_lengths"], dtype=np.int64)])
        hashes.append(arrays["hashes"])
        lengths.append(
            np.diff(ends[np.concatenate([np.zeros(1, np.int64), np.cumsum(arrays["sequences_per_document"])])])
        )
    return np.concatenate(hashes), np.concatenate(lengths)


def _merge(parts: list[Path], folder: Path, tokenizer: Tokenizer, family: str, split: Split) -> dict[str, Any]:
    """Concatenate the parts into train and valid files. Returns the summary, with the sizes of what was written."""
    dtype = token_dtype(tokenizer.vocab_size)
    names = ("train", "valid")
    lengths: dict[str, list[np.ndarray]] = {name: [] for name in names}
    counts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    bad: list[str] = []
    control: Counter[int] = Counter()
    first = num_bytes = 0
    with contextlib.ExitStack() as stack:
        bins = {name: stack.enter_context(open(folder / f"{name}.bin.tmp", "wb")) for name in names}
        for part in parts:
            arrays = _load(part)
            per_document, per_sequence = arrays["sequences_per_document"], arrays["sequence_lengths"]
            tokens = np.fromfile(part.with_suffix(".bin"), dtype)
            assert len(tokens) == per_sequence.sum(dtype=np.int64), part
            in_valid = split.held_out[first : first + len(per_document)]
            first += len(in_valid)
            if split.cut is not None and first - len(in_valid) <= split.cut < first:
                number = split.cut - first + len(in_valid)
                tokens, per_sequence, per_document = _cut(
                    tokens, per_sequence, per_document, number, split.tail, tokenizer, family
                )
                in_valid = np.insert(in_valid, number + 1, True)
            sequence_in_valid = np.repeat(in_valid, per_document)
            for name, wanted in (("train", False), ("valid", True)):
                lengths[name].append(per_sequence[sequence_in_valid == wanted])
                counts[name].append(per_document[in_valid == wanted])
            # Runs of sequences that go to the same file, in tokens; most documents go to train, so there are few.
            changes = np.flatnonzero(np.diff(sequence_in_valid)) + 1
            ends = [*np.cumsum(per_sequence)[changes - 1].tolist(), len(tokens)]
            begin, wanted = 0, bool(len(sequence_in_valid) and sequence_in_valid[0])
            for end in ends:
                bins["valid" if wanted else "train"].write(tokens[begin:end].data)
                begin, wanted = end, not wanted
            num_bytes += int(arrays["num_bytes"])
            bad += arrays["bad_lines"].tolist()
            if "control_tokens" in arrays:  # not in a part of an earlier version
                control.update(dict(arrays["control_tokens"].tolist()))
    for name in names:
        bounds = np.concatenate([np.zeros(1, np.int64), *counts[name]]).cumsum()
        write_index(folder / f"{name}.idx.tmp", dtype, np.concatenate(lengths[name]), bounds)
    files = [f"{name}.{suffix}" for name in names for suffix in ("bin", "idx")]
    for file in files:
        sync(folder / f"{file}.tmp")
        os.rename(folder / f"{file}.tmp", folder / file)
    write_text(folder / "bad_lines.txt", "".join(f"{line}\n" for line in bad))
    return {
        "tokens": {name: int(sum(int(part.sum(dtype=np.int64)) for part in lengths[name])) for name in names},
        "documents": first,
        "bytes": num_bytes,
        "bad_lines": len(bad),
        "first_bad_lines": bad[:SHOWN_BAD_LINES],
        "control_tokens": dict(control),
        "sizes": {file: (folder / file).stat().st_size for file in files},
    }


def _cut(
    tokens: np.ndarray,
    per_sequence: np.ndarray,
    per_document: np.ndarray,
    number: int,
    tail: int,
    tokenizer: Tokenizer,
    family: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of a part in which document `number` is made two, of which the second has about `tail` tokens."""
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(per_document)])
    starts = np.cumsum(per_sequence, dtype=np.int64) - per_sequence
    first, last = int(bounds[number]), int(bounds[number + 1])
    begin = int(starts[first])
    content = tokens[begin : begin + int(per_sequence[first:last].sum())]
    place = cut_place(per_sequence[first:last], tail, content, (tokenizer.line_ends(), tokenizer.word_starts()))
    _, per_sequence, bounds = cut_document(starts, per_sequence, bounds, number, place)
    if family == "gpt":  # a document is one sequence, which ends with end-of-document
        tokens = np.insert(tokens, begin + place, tokenizer.eod)
        per_sequence[first] += 1
    return tokens, per_sequence, np.diff(bounds)


def _load(part: Path) -> Any:
    """The arrays of a part, each read when it is asked for."""
    return np.load(io.BytesIO(part.read_bytes()))
