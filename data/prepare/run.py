"""Make tokenizer and token files of all sources, or find them done."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from configs.rules.values import wrong_validation_corpora
from configs.schema import ConfigError, DataConfig
from data import overlap, shared_documents
from data.corpus import Source, naming_validation, parse_corpus, parse_validation
from data.corpus.text import RULES
from data.indexed import IndexedTokens
from data.prepare.megatron import add_megatron, token_files
from data.prepare.prepared import PreparedData, TokenFile
from data.prepare.tokenized import add_tokenized, finished
from data.prepare.trained_tokenizer import find_tokenizer, tokenizer_path
from data.tokenizer import load_tokenizer

SPLIT_RULE = "alike"  # the name of the rule of data/split.py in a run's identity


def prepare(
    config: DataConfig,
    family: str,
    show_progress: bool = True,
    rebuild_damaged: bool = False,
    documents_in_text: str | None = None,
) -> PreparedData:
    """Make tokenizer and token files for `config`, or find them done. family: gpt | bert.

    Any number of processes may call it at once, with the same arguments (only the one that works shows progress).
    `documents_in_text`: as the run that goes on has it; None: the config's. `rebuild_damaged`: make token files anew
    whose size is not what was written; else that is an error. Raises ConfigError for what is wrong with the config, a
    file or the cache, also for terms of data.corpus that hold the same text, RuntimeError when a worker process dies,
    TimeoutError when another process does not finish within data.timeout_seconds.
    """
    _check(config, family)
    rule = config.documents_in_text if documents_in_text is None else documents_in_text
    sources, of_validation = parse_corpus(config.corpus), parse_validation(config.validation_corpora)
    cache = Path(config.cache_dir).expanduser().absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={config.cache_dir}: cannot make this folder ({error.strerror}); give one that can be "
            "written"
        ) from error
    if config.validation_fraction:
        overlap.refuse(overlap.find(sources, sources, cache, config.timeout_seconds))
    for name, texts in of_validation.items():
        overlap.refuse_validation(name, overlap.find(texts, sources, cache, config.timeout_seconds))
    tokenizer = find_tokenizer(config, sources, cache, rule, show_progress)
    for note in tokenizer.notes() if show_progress else ():
        print(f"note: {note}", file=sys.stderr, flush=True)
    if family == "bert":
        _ = tokenizer.cls, tokenizer.sep, tokenizer.mask  # an error now rather than in the workers
    prepared = PreparedData(tokenizer.path, tokenizer.vocab_size, family)
    if config.documents_in_text != RULES[0] and not any(
        source.has_text_files for some in (sources, *of_validation.values()) for source in some
    ):
        prepared.notes.append(
            f"data.documents_in_text={config.documents_in_text} has no effect: data.corpus holds no .txt, .raw or "
            ".tokens"
        )
    split = {"rule": SPLIT_RULE, "fraction": config.validation_fraction}
    prepared.identity = {"tokenizer": tokenizer.digest, "split": split, "sources": []}

    def add(to: PreparedData, some: list[Source], settings: DataConfig, documents: str) -> None:
        for source in some:
            if source.megatron:
                add_megatron(to, source, settings, family, tokenizer, cache)
            else:
                add_tokenized(to, source, settings, family, tokenizer, cache, documents, show_progress, rebuild_damaged)

    add(prepared, sources, config, rule)
    prepared.notes += shared_documents.check_terms(prepared.texts, cache)
    whole = dataclasses.replace(config, validation_fraction=0.0)
    for name, texts in of_validation.items():
        part = PreparedData(tokenizer.path, tokenizer.vocab_size, family)
        part.identity = {"split": {"rule": "hash", "fraction": 0.0}, "sources": []}
        with naming_validation(name):
            add(part, texts, whole, config.documents_in_text)
        prepared.add_validation(name, part)
        prepared.notes += shared_documents.check_validation(name, part.texts, prepared.texts, cache)
    for files in (prepared.train, prepared.valid, *prepared.validation.values()):
        total = sum(file.weight for file in files)
        for file in files:
            file.weight /= total
    return prepared


def find_prepared(config: DataConfig, family: str) -> list[TokenFile] | None:
    """The blend that a fresh run trains on, where `prepare` has made it; None where something is still to be done.

    Nothing is made, written or checked. Raises ConfigError for a corpus or a tokenizer that is not there.
    """
    sources, cache = parse_corpus(config.corpus), Path(config.cache_dir).expanduser().absolute()
    path = tokenizer_path(config, sources, cache, config.documents_in_text)
    if config.tokenizer == "sentencepiece" and not path.exists():
        return None
    tokenizer = load_tokenizer(path, tried=config.tokenizer == "sentencepiece")
    found = list[TokenFile]()
    for source in sources:
        if source.megatron:
            tokens = IndexedTokens(source.megatron)
            own: list[TokenFile] | None = [token_files(source, tokens, config.validation_fraction)["train"]]
        else:
            own = finished(source, config, family, tokenizer, cache)
        if own is None:
            return None
        found += [file for file in own if file.num_tokens]
    return found or None


def _check(config: DataConfig, family: str) -> None:
    if family not in ("gpt", "bert"):
        raise ConfigError(f"model.family={family}: must be gpt or bert")
    if not 0 <= config.validation_fraction < 1:
        raise ConfigError(
            f"data.validation_fraction={config.validation_fraction}: must be at least 0 and below 1, for example 0.02"
        )
    if config.documents_in_text not in RULES:
        raise ConfigError(f"data.documents_in_text={config.documents_in_text}: must be one of {', '.join(RULES)}")
    if (wrong := wrong_validation_corpora(config.validation_corpora)) is not None:
        raise ConfigError(f"data.validation_corpora={config.validation_corpora}: {wrong}")
    if config.num_workers is not None and config.num_workers < 1:
        raise ConfigError(f"data.num_workers={config.num_workers}: must be at least 1, or null for all cores")
