"""The tokenizer of a configuration: given by its path, or trained on a sample of the corpus."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from base import progress
from base.errors import ConfigError
from configs.schema import DataConfig
from data import lock
from data.corpus import BadLine, File, Source, plan_shards, read_span, unpack
from data.prepare.notes import SHOWN_BAD_LINES, no_documents
from data.prepare.prepared import cache_key
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

TRAINING_SAMPLE_BYTES = 1 << 25  # bytes of text on which a tokenizer is trained


def tokenizer_path(config: DataConfig, sources: list[Source], cache: Path, documents_in_text: str) -> Path:
    """Return the path of the configured tokenizer, which may still have to be trained."""
    if config.tokenizer != "sentencepiece":
        return Path(config.tokenizer).expanduser().absolute()
    text_sources = [source for source in sources if source.files]
    rule = [documents_in_text] if any(source.has_text_files for source in text_sources) else []
    key = cache_key([source.identity() for source in text_sources], config.vocab_size, config.text_key, *rule)
    return cache / "tokenizers" / f"sentencepiece-{config.vocab_size}-{key}.model"


def find_tokenizer(
    config: DataConfig, sources: list[Source], cache: Path, documents_in_text: str, show_progress: bool
) -> Tokenizer:
    """Open the configured tokenizer, after training it if necessary."""
    path = tokenizer_path(config, sources, cache, documents_in_text)
    if config.tokenizer != "sentencepiece":
        return load_tokenizer(path)
    text_sources = [source for source in sources if source.files]
    if not text_sources:
        raise ConfigError(
            "data.tokenizer=sentencepiece: no tokenizer can be trained, because data.corpus contains only token files. "
            "Give the tokenizer that created them, for example data.tokenizer=path/to/tokenizer.model"
        )
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with lock.hold(path.with_suffix(".lock"), config.timeout_seconds):
            if not path.exists():
                if show_progress:
                    progress.begin(f"Training a sentencepiece tokenizer of {config.vocab_size} pieces")
                begin = time.monotonic()
                files = [file for source in text_sources for file in source.files]
                names = "+".join(source.name for source in text_sources)
                texts = _training_texts(files, names, config.text_key, documents_in_text, path.parent)
                note = train_tokenizer(texts, config.vocab_size, path)
                if note:
                    print(f"note: {note}", file=sys.stderr, flush=True)
                if show_progress:
                    print(f"Trained it in {time.monotonic() - begin:.1f} s: {path}", file=sys.stderr, flush=True)
    return load_tokenizer(path, tried=True)


def _training_texts(
    files: list[File], names: str, text_key: str, documents_in_text: str, scratch: Path
) -> Iterator[str]:
    """Yield the documents of random spans of the corpus, about TRAINING_SAMPLE_BYTES in all, drawn with a fixed seed.
    Raises ConfigError if there are no documents."""
    num_bad, bad, any_text = 0, [], False
    with tempfile.TemporaryDirectory(dir=scratch, prefix="sample-") as folder:
        plain = [file for file in files if not file.compression]
        packed = [file for file in files if file.compression]
        random.Random(0).shuffle(packed)
        unpacked: dict[str, str] = {}
        budget = TRAINING_SAMPLE_BYTES
        for file in packed:
            if budget <= 0:
                break
            unpacked[file.path] = f"{folder}/{len(unpacked)}"
            unpack(file.path, unpacked[file.path], limit=budget)
            budget -= os.path.getsize(unpacked[file.path])
        readable = [*plain, *(file for file in packed if file.path in unpacked)]
        spans = [span for shard in plan_shards(readable, unpacked, documents_in_text) for span in shard]
        random.Random(1).shuffle(spans)
        budget = TRAINING_SAMPLE_BYTES
        for span in spans:
            if budget <= 0:
                break
            budget -= span.size
            for item in read_span(span, text_key):
                if isinstance(item, BadLine):
                    num_bad += 1
                    bad += [str(item)] if num_bad <= SHOWN_BAD_LINES else []
                else:
                    any_text = True
                    yield item.text
        if not any_text:
            raise ConfigError(no_documents(names, num_bad, bad))
