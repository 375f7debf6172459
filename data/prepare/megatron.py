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
    *index, held_out = split_index(
        tokens.sequence_starts,
        np.asarray(tokens.sequence_lengths),
        np.asarray(tokens.document_bounds),
        split["fraction"],
        split["rule"],
    )
    lengths = documents(*index)[1]
    splits = {}
    for blend, name, wanted in ((prepared.train, "train", ~held_out), (prepared.valid, "validation", held_out)):
        num_tokens = int(lengths[wanted].sum())
        splits[name] = {"tokens": num_tokens, "digest": digest_of(files, name, split)}
        if num_tokens:
            weight = num_tokens if source.weight is None else source.weight
            blend.append(TokenFile(source.megatron, weight, num_tokens, name, split["fraction"], split["rule"]))
    prepared.notes += source.notes
    num_documents = max(len(tokens.document_bounds) - 1, 0)
    prepared.num_documents += num_documents
    prepared.identity["sources"].append(
        source_identity(source, num_documents, splits["train"], splits["validation"], files)
    )
