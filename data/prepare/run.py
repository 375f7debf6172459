"""Make tokenizer and token files of all sources, or find them done."""

from __future__ import annotations

import sys
from pathlib import Path

from configs.schema import ConfigError, DataConfig
from data.corpus import parse_corpus
from data.corpus.earlier import RULE as EARLIER
from data.corpus.text import RULES
from data.prepare.megatron import add_megatron
from data.prepare.prepared import PreparedData
from data.prepare.tokenized import add_tokenized
from data.prepare.trained_tokenizer import find_tokenizer


def prepare(
    config: DataConfig,
    family: str,
    show_progress: bool = True,
    rebuild_damaged: bool = False,
    split_rule: str = "exact",
    documents_in_text: str | None = None,
) -> PreparedData:
    """Make tokenizer and token files for `config`, or find them done. family: gpt | bert.

    Any number of processes may call it at once, with the same arguments (only the one that works shows progress).
    `split_rule`: how validation is chosen (data/split.py); a run goes on with the one that its data have, before
    `exact` that was `hash`. `documents_in_text`: as the run that goes on has it; None: the config's. `rebuild_damaged`:
    make token files anew whose size is not what was written; else that is an error. Raises ConfigError for what is
    wrong with the config, a file or the cache, RuntimeError when a worker process dies, TimeoutError when another
    process does not finish within data.timeout_seconds.
    """
    _check(config, family)
    rule = config.documents_in_text if documents_in_text is None else documents_in_text
    sources = parse_corpus(config.corpus, rule == EARLIER)
    cache = Path(config.cache_dir).expanduser().absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={config.cache_dir}: cannot make this folder ({error.strerror}); give one that can be "
            "written"
        ) from error
    tokenizer = find_tokenizer(config, sources, cache, rule, show_progress)
    for note in tokenizer.notes() if show_progress else ():
        print(f"note: {note}", file=sys.stderr, flush=True)
    if family == "bert":
        _ = tokenizer.cls, tokenizer.sep, tokenizer.mask  # an error now rather than in the workers
    prepared = PreparedData(tokenizer.path, tokenizer.vocab_size, family)
    split = {"rule": split_rule, "fraction": config.validation_fraction}
    if config.documents_in_text != RULES[0] and not any(source.has_text_files for source in sources):
        prepared.notes.append(
            f"data.documents_in_text={config.documents_in_text} has no effect: data.corpus holds no .txt, .raw or "
            ".tokens"
        )
    prepared.identity = {"tokenizer": tokenizer.digest, "split": split, "sources": []}
    if tokenizer.earlier_digest != tokenizer.digest:
        prepared.identity["tokenizer_before"] = tokenizer.earlier_digest
    for source in sources:
        if source.megatron:
            add_megatron(prepared, source, config, family, tokenizer, cache)
        else:
            add_tokenized(prepared, source, config, family, tokenizer, cache, rule, show_progress, rebuild_damaged)
    for files in (prepared.train, prepared.valid):
        total = sum(file.weight for file in files)
        for file in files:
            file.weight /= total
    return prepared


def _check(config: DataConfig, family: str) -> None:
    if family not in ("gpt", "bert"):
        raise ConfigError(f"model.family={family}: must be gpt or bert")
    if not 0 <= config.validation_fraction < 1:
        raise ConfigError(
            f"data.validation_fraction={config.validation_fraction}: must be at least 0 and below 1, for example 0.02"
        )
    if config.documents_in_text not in RULES:
        raise ConfigError(f"data.documents_in_text={config.documents_in_text}: must be one of {', '.join(RULES)}")
    if config.num_workers is not None and config.num_workers < 1:
        raise ConfigError(f"data.num_workers={config.num_workers}: must be at least 1, or null for all cores")
