"""From config and prepared files to the loaders of one data-parallel rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import torch

from configs.schema import Config, ConfigError
from data.corpus import naming_validation
from data.loader import Finish, Loader, Samples, finished
from data.prepare import PreparedData, TokenFile
from data.samples import BertSamples, GPTSamples
from data.split import LEAST_PIECE, LINE_REACH
from data.tokenizer import load_tokenizer
from data.validation import EachOnce, check_validation_corpora

HELD_OUT = ""  # the validation documents of data.corpus, among the names of validation corpora


def build_data(
    config: Config,
    prepared: PreparedData,
    *,
    rank: int,
    world_size: int,
    consumed_samples: int,
    pin: bool = False,
    on_host: Finish | None = None,
    on_validation: Finish | None = None,
) -> tuple[Loader, dict[str, Callable[[], Loader]]]:
    """The training loader, which continues after `consumed_samples`, and functions that make a validation loader: of
    what is held out of the corpus, under HELD_OUT, and of each validation corpus, under its name.

    rank, world_size: of the data-parallel group. pin: batches in pinned memory, for a run on a GPU. on_host: called
    with each micro-batch, where that is made; on_validation: with each of validation. Each validation loader gives the
    same training.eval_batches global batches, or each sample of a validation corpus once where it has fewer. Raises
    ConfigError for damaged files, too little data, or a vocabulary that does not fit.
    """
    _check_vocabulary(config, prepared)
    training = config.training

    def loader(samples: Samples, consumed: int, num_steps: int | None, prepare: Finish | None) -> Loader:
        return Loader(
            samples,
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            rank=rank,
            world_size=world_size,
            consumed_samples=consumed,
            prefetch=config.data.prefetch,
            num_steps=num_steps,
            finish=functools.partial(finished, prepare=prepare, pin=pin),
        )

    @functools.cache
    def held_out() -> GPTSamples | BertSamples:
        return _samples(config, prepared, prepared.valid, shuffle=False)

    @functools.cache
    def corpus(name: str) -> EachOnce:
        with naming_validation(name):
            samples = _samples(config, prepared, prepared.validation[name], shuffle=False)
        return EachOnce(samples, training.global_batch_size, training.eval_batches)

    def of_corpus(name: str) -> Loader:
        return loader(corpus(name), 0, corpus(name).num_steps, on_validation)

    makers: dict[str, Callable[[], Loader]] = {name: functools.partial(of_corpus, name) for name in prepared.validation}
    if config.data.validation_fraction > 0:
        makers = {HELD_OUT: lambda: loader(held_out(), 0, training.eval_batches, on_validation), **makers}
    if training.eval_interval:  # an error now rather than at the first evaluation
        if HELD_OUT in makers:
            _check_validation(config, prepared)
            held_out()
        check_validation_corpora(config, prepared)
        for name in prepared.validation:
            corpus(name)
    train_loader = loader(_samples(config, prepared, prepared.train, shuffle=True), consumed_samples, None, on_host)
    return train_loader, makers


def _check_vocabulary(config: Config, prepared: PreparedData) -> None:
    size = config.model.vocab_size
    if size is not None and size < prepared.vocab_size:
        raise ConfigError(
            f"model.vocab_size={size}: the tokenizer {prepared.tokenizer_path} has {prepared.vocab_size} tokens, and "
            "the model must have at least as many; model.vocab_size=null takes the tokenizer's"
        )
    if prepared.family != config.model.family:
        raise ConfigError(
            f"model.family={config.model.family}: the data was prepared for {prepared.family}; prepare it for this "
            "family"
        )


def _check_validation(config: Config, prepared: PreparedData) -> None:
    """Raise ConfigError, with a fraction that works, where validation is less than one sample."""
    fraction = config.data.validation_fraction
    needed = config.model.sequence_length + 1 if config.model.family == "gpt" else 2 * LEAST_PIECE
    for source in prepared.identity.get("sources", ()):
        valid = source["valid"]["tokens"]
        total = source["train"]["tokens"] + valid
        enough = valid >= needed or (valid > 0 and config.model.family != "gpt")  # any sentence is a sample of BERT
        if enough or (valid == 0 and prepared.valid):
            continue
        works = math.ceil((needed + LINE_REACH) / total * 1000) / 1000
        has = (
            f"data.validation_fraction ({fraction}) leaves {valid:,} of the {total:,} tokens of {source['name']} for "
            "validation, "
        )
        if total * (1 - works) < needed + LINE_REACH:
            longest = max(1, total // 2 - LINE_REACH - 1)
            raise ConfigError(
                f"{has}and a sample takes {needed:,}: too little text for training and validation. Try "
                f"model.sequence_length={longest}, or training.eval_interval=0"
            )
        raise ConfigError(
            f"{has}and a sample takes {needed:,}. Try data.validation_fraction={works}, or training.eval_interval=0"
        )


def _samples(config: Config, prepared: PreparedData, files: list[TokenFile], shuffle: bool) -> GPTSamples | BertSamples:
    model, seed = config.model, config.training.seed
    if model.family == "gpt":
        separate = config.data.documents == "separate"
        return GPTSamples(files, model.sequence_length, seed, shuffle, prepared.vocab_size, separate)
    return BertSamples(
        files,
        load_tokenizer(prepared.tokenizer_path, tried=True),
        model.sequence_length,
        seed,
        model.sentence_head,
        config.data.mask_probability,
        config.data.short_sequence_probability,
        shuffle,
    )


def label_counts(steps: Iterable[list[dict[str, torch.Tensor]]], vocab_size: int) -> torch.Tensor:
    """How often each token is to be predicted: int64 [vocab_size], over the labels with loss_mask above 0. Ranks may
    sum theirs."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for step in steps:
        for batch in step:
            counts += torch.bincount(batch["labels"][batch["loss_mask"] > 0].flatten(), minlength=vocab_size)
    return counts


def entropy(counts: torch.Tensor) -> float:
    """Entropy in nats of the distribution that `counts` [n] are drawn from, by its frequencies."""
    frequencies = counts[counts > 0].double() / counts.sum()
    return float(-(frequencies * frequencies.log()).sum())


def unigram_entropy(loader: Loader, vocab_size: int) -> float:
    """Entropy in nats of the unigram distribution of the label tokens that a finite loader gives: the loss of the best
    model that ignores its input. Closes the loader."""
    steps = []
    try:
        while True:
            steps.append(loader.next_step())
    except StopIteration:
        return entropy(label_counts(steps, vocab_size))
    finally:
        loader.close()
