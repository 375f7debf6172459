"""Token files that exist already."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from configs.schema import ConfigError, DataConfig
from data.corpus import Source
from data.digest import digest_of, file_digest
from data.indexed import IndexedTokens, documents
from data.prepare.notes import other_ends
from data.prepare.prepared import PreparedData, TokenFile, source_identity
from data.split import split_index
from data.tokenizer import Tokenizer

SCANNED_AT_ONCE = 1 << 22
SCANNED_TOKENS = 1 << 28  # of foreign token files, to see whether they fit the tokenizer


def add_megatron(
    prepared: PreparedData, source: Source, config: DataConfig, family: str, tokenizer: Tokenizer, cache: Path
) -> None:
    assert source.megatron
    tokens = IndexedTokens(source.megatron)
    scanned = range(0, min(len(tokens.tokens), SCANNED_TOKENS), SCANNED_AT_ONCE)
    largest = max((int(tokens.tokens[begin : begin + SCANNED_AT_ONCE].max()) for begin in scanned), default=0)
    if largest >= tokenizer.vocab_size:
        raise ConfigError(
            f"data.tokenizer={config.tokenizer}: {source.megatron}.bin holds token {largest}, but this tokenizer has "
            f"only {tokenizer.vocab_size} tokens; give the tokenizer that made the file"
        )
    # BERT's documents are sentences without an end token.
    note = other_ends(source.megatron, tokens, tokenizer) if family == "gpt" else None
    if note is not None:
        prepared.notes.append(note)
    files = {
        suffix: file_digest(f"{source.megatron}.{suffix}", cache, config.timeout_seconds) for suffix in ("bin", "idx")
    }
    split = prepared.identity["split"]
    splits = {}
    found = token_files(source, tokens, split["fraction"])
    for blend, name in ((prepared.train, "train"), (prepared.valid, "validation")):
        splits[name] = {"tokens": found[name].num_tokens, "digest": digest_of(files, name, split)}
        if found[name].num_tokens:
            blend.append(found[name])
    prepared.notes += source.notes
    num_documents = max(len(tokens.document_bounds) - 1, 0)
    prepared.num_documents += num_documents
    prepared.identity["sources"].append(
        source_identity(source, num_documents, splits["train"], splits["validation"], files)
    )


def token_files(source: Source, tokens: IndexedTokens, fraction: float) -> dict[str, TokenFile]:
    """The terms of both splits, by name, that a source of token files gives; one may hold no token."""
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
