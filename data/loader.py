"""Loaders of a data-parallel rank: they make micro-batches from prepared token files, some steps ahead, in a thread."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from base.errors import ConfigError
from configs.schema import Config
from data.corpus.sources import naming_validation
from data.prepare import PreparedData, TokenFile
from data.samples import BertSamples, GPTSamples
from data.split import LEAST_TAIL, LINE_REACH
from data.tokenizer import load_tokenizer

PREPARED = "prepared"  # key under which a micro-batch contains the tensors that are computed from it ahead
HELD_OUT = ""  # stands for the held-out documents of data.corpus among the names of validation corpora
TIMEOUT_SECONDS = 600.0  # for the micro-batches of a step; then the storage is assumed to be unreachable

Finish = Callable[[dict[str, Any]], dict[str, Any]]


class Samples(Protocol):
    """A data set whose samples are read by number, as a batch of arrays."""

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]: ...


class Loader:
    """The micro-batches of each optimizer step for one data-parallel rank.

    Step t uses samples [t * global, (t + 1) * global), counted from `consumed_samples`; micro-batch j of data-parallel
    rank d is the (j * world + d)-th run of `micro_batch_size` of these samples. So the set of micro-batches is the same
    for every number of ranks, and so is every loss that is a mean over a micro-batch.

    prefetch: number of steps that a thread prepares ahead; 0 prepares each step in the caller. num_steps: number of
    steps after which the loader ends; None for no end. finish: function that the thread applies to each micro-batch.
    wait_seconds: total time for which `next_step` has waited. Call `close` at the end.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        consumed_samples: int = 0,
        prefetch: int = 4,
        num_steps: int | None = None,
        finish: Finish | None = None,
    ):
        if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % (micro_batch_size * world_size):
            raise ConfigError(
                f"training.global_batch_size={global_batch_size} must be a multiple of training.micro_batch_size "
                f"({micro_batch_size}) times data-parallel ranks ({world_size}), for example "
                f"{micro_batch_size * world_size}"
            )
        assert 0 <= rank < world_size, (rank, world_size)
        self.consumed_samples = consumed_samples  # by the steps that next_step has returned
        self.wait_seconds = 0.0
        self._samples = samples
        self._global, self._micro = global_batch_size, micro_batch_size
        self._rank, self._world = rank, world_size
        self._steps_left = num_steps
        self._finish = finish
        self._closed = threading.Event()
        self._queue: queue.Queue[list[dict[str, Any]] | BaseException] = queue.Queue(maxsize=max(1, prefetch))
        self._thread: threading.Thread | None = None
        if prefetch > 0:
            arguments = (consumed_samples, num_steps)
            self._thread = threading.Thread(target=self._produce, args=arguments, name="loader", daemon=True)
            self._thread.start()

    def next_step(self) -> list[dict[str, Any]]:
        """Return the micro-batches of the next step. Raises the errors of the loader's thread, and StopIteration after
        the last step."""
        if self._closed.is_set():
            raise RuntimeError("next_step was called after the loader was closed. Make a new loader.")
        if self._steps_left == 0:
            raise StopIteration
        begin = time.perf_counter()
        try:
            first = self.consumed_samples
            made = self._make(first) if self._thread is None else self._queue.get(timeout=TIMEOUT_SECONDS)
        except queue.Empty:
            raise TimeoutError(
                f"no batch was read within {TIMEOUT_SECONDS} s. Check that the storage of data.cache_dir is reachable"
            ) from None
        if isinstance(made, BaseException):
            self.close()
            raise made
        self.wait_seconds += time.perf_counter() - begin
        self.consumed_samples += self._global
        if self._steps_left is not None:
            self._steps_left -= 1
        return made

    def close(self) -> None:
        """Stop the thread. Further calls do nothing."""
        self._closed.set()
        if self._thread is not None:
            with contextlib.suppress(queue.Empty):
                while True:  # a full queue would block the thread
                    self._queue.get_nowait()
            self._thread.join(timeout=10)

    def _make(self, first_sample: int) -> list[dict[str, Any]]:
        step = []
        first, end = first_sample + self._rank * self._micro, first_sample + self._global
        for begin in range(first, end, self._world * self._micro):
            arrays = self._samples.batch(range(begin, begin + self._micro))
            batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
            step.append(batch if self._finish is None else self._finish(batch))
        return step

    def _produce(self, first_sample: int, num_steps: int | None) -> None:
        made: list[dict[str, Any]] | BaseException
        for number in itertools.count() if num_steps is None else range(num_steps):
            if self._closed.is_set():
                return
            try:
                made = self._make(first_sample + number * self._global)
            except BaseException as error:  # next_step raises it in the caller
                made = error
            while not self._closed.is_set():
                with contextlib.suppress(queue.Full):
                    self._queue.put(made, timeout=0.1)
                    break
            if isinstance(made, BaseException):
                return


def finish_batch(batch: dict[str, Any], prepare: Finish | None, pin: bool) -> dict[str, Any]:
    """Return a micro-batch together with the tensors that `prepare` computes from it. pin: use pinned memory."""
    pinned: dict[int, Any] = {}

    def pin_memory(value: Any) -> Any:
        if not pin or not isinstance(value, torch.Tensor):
            return value
        if id(value) not in pinned:
            pinned[id(value)] = value.pin_memory()
        return pinned[id(value)]

    prepared = batch if prepare is None else prepare(batch)
    found = {name: pin_memory(value) for name, value in batch.items()}
    if prepared is not batch:
        found[PREPARED] = {name: pin_memory(value) for name, value in prepared.items()}
    return found


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
    """Return the training loader, continuing after `consumed_samples`, and functions that create validation loaders.

    Keys of these functions: HELD_OUT, for the held-out documents of the corpus, and the names of the validation
    corpora. rank, world_size: of the data-parallel group. pin: put batches into pinned memory, for a run on a GPU.
    on_host, on_validation: functions that are called with each micro-batch of training or validation in the loader's
    thread. Each validation loader returns the same training.eval_batches global batches, or each sample of a smaller
    validation corpus once. Raises ConfigError for damaged files, too little data, or a vocabulary that does not fit.
    """
    _check_prepared(config, prepared)
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
            finish=functools.partial(finish_batch, prepare=prepare, pin=pin),
        )

    @functools.cache
    def held_out() -> GPTSamples | BertSamples:
        return make_samples(config, prepared, prepared.valid, shuffle=False)

    @functools.cache
    def corpus(name: str) -> ValidationSamples:
        with naming_validation(name):
            samples = make_samples(config, prepared, prepared.validation[name], shuffle=False)
        return ValidationSamples(samples, training.global_batch_size, training.eval_batches)

    def of_corpus(name: str) -> Loader:
        return loader(corpus(name), 0, corpus(name).num_steps, on_validation)

    makers: dict[str, Callable[[], Loader]] = {name: functools.partial(of_corpus, name) for name in prepared.validation}
    if config.data.validation_fraction > 0:
        makers = {HELD_OUT: lambda: loader(held_out(), 0, training.eval_batches, on_validation), **makers}
    if training.eval_interval:  # raise errors now rather than at the first evaluation
        if HELD_OUT in makers:
            _check_validation(config, prepared)
            held_out()
        _check_validation_corpora(config, prepared)
        for name in prepared.validation:
            corpus(name)
    train_loader = loader(make_samples(config, prepared, prepared.train, shuffle=True), consumed_samples, None, on_host)
    return train_loader, makers


def _check_prepared(config: Config, prepared: PreparedData) -> None:
    """Raise ConfigError if the prepared data does not fit the model's vocabulary or family."""
    size = config.model.vocab_size
    if size is not None and size < prepared.vocab_size:
        raise ConfigError(
            f"model.vocab_size={size} must be at least {prepared.vocab_size}, the vocabulary size of the tokenizer "
            f"{prepared.tokenizer_path}, or null to equal it"
        )
    if prepared.family != config.model.family:
        raise ConfigError(
            f"model.family={config.model.family} must be {prepared.family}, for which the data was prepared. Change "
            f"it, or prepare the data with model.family={config.model.family}"
        )


def _check_validation(config: Config, prepared: PreparedData) -> None:
    """Raise ConfigError, with a fraction that works, if a source's held-out documents are shorter than one sample."""
    fraction = config.data.validation_fraction
    needed = config.model.sequence_length + 1 if config.model.family == "gpt" else 2 * LEAST_TAIL
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
                f"{has}but a sample needs {needed:,}: the text is too short for training and validation. Try "
                f"model.sequence_length={longest}, or training.eval_interval=0"
            )
        raise ConfigError(
            f"{has}but a sample needs {needed:,}. Try data.validation_fraction={works}, or training.eval_interval=0"
        )


def make_samples(
    config: Config, prepared: PreparedData, files: list[TokenFile], shuffle: bool
) -> GPTSamples | BertSamples:
    """Return the samples of token files for the configured model family. shuffle: use a random order."""
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
    """Return how often each token id is a label with a loss_mask above 0 in the micro-batches of `steps`, int64
    [vocab_size]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for step in steps:
        for batch in step:
            counts += torch.bincount(batch["labels"][batch["loss_mask"] > 0].flatten(), minlength=vocab_size)
    return counts


def entropy(counts: torch.Tensor) -> float:
    """Return the entropy in nats of counts [n]; for labels, the loss of the best model that ignores its input."""
    frequencies = counts[counts > 0].double() / counts.sum()
    return float(-(frequencies * frequencies.log()).sum())


class ValidationSamples:
    """The samples of a validation corpus, for at most `num_batches` global batches.

    If the corpus has fewer samples, each counts once, and the last batch is padded with samples whose loss_mask is 0.
    So the loss covers the same tokens in every layout and evaluation. num_steps: the number of global batches.
    """

    def __init__(self, samples: GPTSamples | BertSamples, global_batch_size: int, num_batches: int):
        sizes = [file.num_samples for file in samples.files]
        self._samples, self.num_samples = samples, min(sum(sizes), num_batches * global_batch_size)
        self.num_steps = math.ceil(self.num_samples / global_batch_size)
        if sum(sizes) <= num_batches * global_batch_size:
            samples.blend = _InOrder(sizes)

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the batch with the samples `indices`. Samples past the end of the corpus have a loss_mask of 0."""
        arrays = self._samples.batch([i % self.num_samples for i in indices])
        arrays["loss_mask"][[i >= self.num_samples for i in indices]] = 0.0
        return arrays


class _InOrder:
    """A blend that goes through its files one after the other, so that it repeats no sample before all were used."""

    def __init__(self, sizes: Sequence[int]):
        self._ends = np.cumsum(sizes)

    def locate(self, i: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, i, side="right"))
        return file, i - (int(self._ends[file - 1]) if file else 0)


def _check_validation_corpora(config: Config, prepared: PreparedData) -> None:
    """Raise ConfigError if a validation corpus has fewer tokens than one sample."""
    if config.model.family != "gpt":
        return  # any sentence is a sample of BERT
    needed = config.model.sequence_length + 1
    for name, files in prepared.validation.items():
        for file in files:
            if file.num_tokens < needed:
                raise ConfigError(
                    f"data.validation_corpora: {name} has {file.num_tokens:,} tokens in {file.prefix}.bin, but a "
                    f"sample needs {needed:,} (model.sequence_length + 1). Add text to the corpus, or leave it out"
                )
