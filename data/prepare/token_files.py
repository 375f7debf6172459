"""The token files of a source: created from text, or found finished and checked, or given by the user."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from base.checksums import read_summed
from base.errors import ConfigError
from base.files import writing_into
from data import lock
from data.corpus import Source
from data.digest import digest_of, file_digest
from data.indexed import IndexedTokens, documents
from data.overlap import Texts
from data.prepare.notes import other_ends, written_out
from data.prepare.prepared import Preparation, PreparedData, TokenFile, cache_key
from data.prepare.tokenize_source import tokenize_source
from data.split import split_index

SUMMARY_KEYS = ("tokens", "documents", "bytes", "bad_lines", "first_bad_lines", "sizes", "digests")  # of done.json


def add_tokenized(prepared: PreparedData, source: Source, job: Preparation) -> None:
    """Add a source of text to `prepared`. Creates its token files if they are missing."""
    folder = _folder(source, job)
    done = _find_done(folder, job, job.rebuild_damaged)
    if done is None:
        folder.mkdir(parents=True, exist_ok=True)
        with lock.hold(folder / "lock", job.config.timeout_seconds):
            done = _find_done(folder, job, job.rebuild_damaged)
            if done is None:
                with writing_into(folder):  # finished shards stay for the next run
                    tokenize_source(source, job, folder)
                done = _find_done(folder, job, False)
                assert done is not None
    for split, name in ((prepared.train, "train"), (prepared.valid, "valid")):
        split += _token_file(folder, done, name, source)
    prepared.texts.append(Texts(source.given, str(folder)))
    digests = done["digests"]
    splits = {
        name: {"tokens": done["tokens"][name], "digest": digest_of(digests[f"{name}.bin"], digests[f"{name}.idx"])}
        for name in ("train", "valid")
    }
    rule = job.documents_in_text if source.has_text_files else None
    prepared.add_identity(source, done["documents"], splits, text=done["text"], documents_in_text=rule)
    control_tokens = {int(token): count for token, count in done["control_tokens"].items()}
    if control_tokens:
        prepared.notes.append(written_out(source.name, control_tokens, job.tokenizer))
    prepared.notes += [*source.notes, *done["advice"]]
    prepared.num_documents += done["documents"]
    prepared.num_bytes += done["bytes"]
    prepared.num_bad_lines += done["bad_lines"]
    prepared.bad_lines += done["first_bad_lines"]
    if done["bad_lines"]:
        prepared.bad_lines_files.append(str(folder / "bad_lines.txt"))


def finished(source: Source, job: Preparation) -> list[TokenFile] | None:
    """Return the token files of a source's training documents, without reading tokens; None if not yet prepared."""
    if source.megatron:
        return [token_files(source, IndexedTokens(source.megatron), job.config.validation_fraction)["train"]]
    folder = _folder(source, job)
    done = _summary(folder)
    return None if done is None else _token_file(folder, done, "train", source)


def _token_file(folder: Path, done: dict[str, Any], name: str, source: Source) -> list[TokenFile]:
    """Return a list with the token file `name` (train or valid) of a prepared source; [] if the file has no tokens."""
    num_tokens = done["tokens"][name]
    prefix, weight = str(folder / name), num_tokens if source.weight is None else source.weight
    return [TokenFile(prefix, weight, num_tokens)] if num_tokens else []


def _folder(source: Source, job: Preparation) -> Path:
    """Return the folder in the cache for the token files of a source."""
    config, tokenizer = job.config, job.tokenizer
    tokenizer_hash = hashlib.sha256(tokenizer.core_bytes()).hexdigest()
    named: list[Any] = [] if tokenizer.named_eod is None else [tokenizer.named_eod]
    if tokenizer.rules:
        named.append(tokenizer.rules)
    inputs = [source.identity(), tokenizer_hash, job.family, config.text_key, config.validation_fraction, *named]
    if source.has_text_files:
        inputs.append(job.documents_in_text)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", source.name)[:40]
    return job.cache / "tokens" / f"{name}-{job.family}-{cache_key(*inputs)}"


def _find_done(folder: Path, job: Preparation, rebuild_damaged: bool) -> dict[str, Any] | None:
    """Return the summary of a prepared source, with the current digests of its files; None if it must be prepared. A
    damaged file counts as missing with `rebuild_damaged`, else raises ConfigError."""
    done = _summary(folder)
    if done is None:
        return None
    written, done["digests"] = done["digests"], {}
    for name, size in done["sizes"].items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else None
        if actual == size:
            done["digests"][name] = file_digest(path, job.cache, job.config.timeout_seconds)
            if done["digests"][name] == written[name]:
                continue
        if rebuild_damaged:
            return None
        found = "has other content" if actual == size else f"has {actual} bytes, not {size}"
        found = "is missing" if actual is None else found
        raise ConfigError(
            f"data.cache_dir: file {path} was damaged after it was written: it {found}. Delete {folder}, or run "
            "`python -m data.prepare` with the same data settings to create it again"
        )
    if rebuild_damaged:
        try:
            for name in ("train", "valid"):
                IndexedTokens(folder / name)
        except ConfigError:
            return None
    return done


def _summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary (done.json) of a prepared source, or None if it is missing or damaged."""
    try:
        done = read_summed(folder / "done.json")
    except (FileNotFoundError, ValueError):  # missing or damaged: the work is done again
        return None
    return done if all(key in done for key in SUMMARY_KEYS) else None  # otherwise the file is something else


SCANNED_AT_ONCE = 1 << 22
SCANNED_TOKENS = 1 << 28  # tokens of a user's file that are read to check whether it fits the tokenizer


def add_megatron(prepared: PreparedData, source: Source, job: Preparation) -> None:
    """Add a source of the user's token files to `prepared`. Raises ConfigError if they do not fit the tokenizer."""
    assert source.megatron
    config, tokenizer = job.config, job.tokenizer
    tokens = IndexedTokens(source.megatron)
    scanned = range(0, min(len(tokens.tokens), SCANNED_TOKENS), SCANNED_AT_ONCE)
    largest = max((int(tokens.tokens[begin : begin + SCANNED_AT_ONCE].max()) for begin in scanned), default=0)
    if largest >= tokenizer.vocab_size:
        raise ConfigError(
            f"data.tokenizer={config.tokenizer}: {source.megatron}.bin contains token {largest}, but this tokenizer "
            f"has only {tokenizer.vocab_size} tokens. Give the tokenizer that created the file"
        )
    # Documents of BERT are sentences without an end token.
    note = other_ends(source.megatron, tokens, tokenizer) if job.family == "gpt" else None
    if note is not None:
        prepared.notes.append(note)
    paths = {suffix: f"{source.megatron}.{suffix}" for suffix in ("bin", "idx")}
    files = {suffix: file_digest(path, job.cache, config.timeout_seconds) for suffix, path in paths.items()}
    split = prepared.identity["split"]
    splits = {}
    found = token_files(source, tokens, split["fraction"])
    for blend, key, name in ((prepared.train, "train", "train"), (prepared.valid, "valid", "validation")):
        splits[key] = {"tokens": found[name].num_tokens, "digest": digest_of(files, name, split)}
        if found[name].num_tokens:
            blend.append(found[name])
    prepared.notes += source.notes
    num_documents = max(len(tokens.document_bounds) - 1, 0)
    prepared.num_documents += num_documents
    prepared.add_identity(source, num_documents, splits, files=files)


def token_files(source: Source, tokens: IndexedTokens, fraction: float) -> dict[str, TokenFile]:
    """Divide a user's token file into training and validation documents. Returns a TokenFile for each, by split."""
    assert source.megatron
    index = (tokens.sequence_starts, np.asarray(tokens.sequence_lengths), np.asarray(tokens.document_bounds))
    *index_of_split, held_out = split_index(*index, fraction)
    lengths = documents(*index_of_split)[1]
    found = {}
    for name, wanted in (("train", ~held_out), ("validation", held_out)):
        num_tokens = int(lengths[wanted].sum())
        weight = num_tokens if source.weight is None else source.weight
        found[name] = TokenFile(source.megatron, weight, num_tokens, name, fraction)
    return found
