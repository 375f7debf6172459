"""Preparation of a configuration's data: tokenizer and token files of all sources are created, or found finished."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from base.errors import ConfigError
from configs.rules.values import wrong_validation_corpora
from configs.schema import DataConfig
from data import overlap
from data.corpus import Source, parse_corpus, parse_validation
from data.corpus.sources import naming_validation
from data.corpus.text import RULES
from data.prepare.prepared import Preparation, PreparedData, TokenFile
from data.prepare.token_files import add_megatron, add_tokenized, finished
from data.prepare.trained_tokenizer import find_tokenizer, tokenizer_path
from data.tokenizer import load_tokenizer

SPLIT_RULE = "alike"  # name of the rule of data/split.py in a run's identity


def prepare(
    config: DataConfig,
    family: str,
    show_progress: bool = True,
    rebuild_damaged: bool = False,
    documents_in_text: str | None = None,
) -> PreparedData:
    """Create the tokenizer and the token files for `config`, or find them finished. family: gpt or bert.

    Several processes may call this at once with the same arguments; only the process that works shows progress.
    documents_in_text: the rule of the resumed run; None uses the configuration's. rebuild_damaged: create damaged token
    files again rather than raise an error. Raises ConfigError for a wrong setting, file or cache, and for
    sources of data.corpus that contain the same text; RuntimeError if a worker process dies; TimeoutError if another
    process does not finish within data.timeout_seconds.
    """
    _check(config, family)
    rule = config.documents_in_text if documents_in_text is None else documents_in_text
    sources, of_validation = parse_corpus(config.corpus), parse_validation(config.validation_corpora)
    cache = _cache_folder(config)
    if config.validation_fraction:
        overlap.refuse(overlap.find(sources, sources, cache, config.timeout_seconds))
    for name, corpus in of_validation.items():
        overlap.refuse_validation(name, overlap.find(corpus, sources, cache, config.timeout_seconds))
    tokenizer = find_tokenizer(config, sources, cache, rule, show_progress)
    for note in tokenizer.notes() if show_progress else ():
        print(f"note: {note}", file=sys.stderr, flush=True)
    if family == "bert":
        _ = tokenizer.cls, tokenizer.sep, tokenizer.mask  # raise the error now rather than in the workers

    def add(to: PreparedData, some: list[Source], job: Preparation) -> None:
        for source in some:
            (add_megatron if source.megatron else add_tokenized)(to, source, job)

    prepared = PreparedData(tokenizer.path, tokenizer.vocab_size, family)
    has_text_files = any(source.has_text_files for some in (sources, *of_validation.values()) for source in some)
    if config.documents_in_text != RULES[0] and not has_text_files:
        prepared.notes.append(
            f"data.documents_in_text={config.documents_in_text} has no effect, because data.corpus contains no .txt, "
            ".raw or .tokens files"
        )
    split = {"rule": SPLIT_RULE, "fraction": config.validation_fraction}
    prepared.identity = {"tokenizer": tokenizer.digest, "split": split, "sources": []}
    add(prepared, sources, Preparation(config, family, tokenizer, cache, rule, show_progress, rebuild_damaged))
    prepared.notes += overlap.check_terms(prepared.texts, cache)
    whole = dataclasses.replace(config, validation_fraction=0.0)
    job = Preparation(whole, family, tokenizer, cache, config.documents_in_text, show_progress, rebuild_damaged)
    for name, corpus in of_validation.items():
        validation = PreparedData(tokenizer.path, tokenizer.vocab_size, family)
        validation.identity = {"split": {"rule": "hash", "fraction": 0.0}, "sources": []}
        with naming_validation(name):
            add(validation, corpus, job)
        prepared.add_validation(name, validation)
        prepared.notes += overlap.check_validation(name, validation.texts, prepared.texts, cache)
    for files in (prepared.train, prepared.valid, *prepared.validation.values()):
        total = sum(file.weight for file in files)
        for file in files:
            file.weight /= total
    return prepared


def find_prepared(config: DataConfig, family: str) -> list[TokenFile] | None:
    """Return the token files that a new run would train on; None if they are not all prepared. Creates and checks no
    files. Raises ConfigError for a missing corpus or tokenizer."""
    sources, cache = parse_corpus(config.corpus), Path(config.cache_dir).expanduser().absolute()
    path = tokenizer_path(config, sources, cache, config.documents_in_text)
    if config.tokenizer == "sentencepiece" and not path.exists():
        return None
    tokenizer = load_tokenizer(path, tried=config.tokenizer == "sentencepiece")
    job = Preparation(config, family, tokenizer, cache, config.documents_in_text)
    found = list[TokenFile]()
    for source in sources:
        own = finished(source, job)
        if own is None:
            return None
        found += [file for file in own if file.num_tokens]
    return found or None


def _cache_folder(config: DataConfig) -> Path:
    cache = Path(config.cache_dir).expanduser().absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={config.cache_dir} cannot be created ({error.strerror}). Choose a folder that can be "
            "written to"
        ) from error
    return cache


def _check(config: DataConfig, family: str) -> None:
    if family not in ("gpt", "bert"):
        raise ConfigError(f"model.family={family} must be gpt or bert")
    if not 0 <= config.validation_fraction < 1:
        raise ConfigError(
            f"data.validation_fraction={config.validation_fraction} must be at least 0 and below 1, for example 0.02"
        )
    if config.documents_in_text not in RULES:
        raise ConfigError(f"data.documents_in_text={config.documents_in_text} must be one of {', '.join(RULES)}")
    if (wrong := wrong_validation_corpora(config.validation_corpora)) is not None:
        raise ConfigError(f"data.validation_corpora={config.validation_corpora} {wrong}")
    if config.num_workers is not None and config.num_workers < 1:
        raise ConfigError(f"data.num_workers={config.num_workers} must be at least 1, or null for all cores")
