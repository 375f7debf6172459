"""The micro-batches of this data-parallel rank, made ahead in a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from configs.schema import ConfigError

PREPARED = "prepared"  # what is made of a micro-batch ahead, beside it
TIMEOUT_SECONDS = 600.0  # for a step's micro-batches, before the storage is taken to be gone


Finish = Callable[[dict[str, Any]], dict[str, Any]]


class Samples(Protocol):
    """GPTSamples or BertSamples."""

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]: ...


class Loader:
    """Steps of micro-batches for one data-parallel rank.

    Step t uses samples [t * global, (t + 1) * global), counted from `consumed_samples`; its micro-batch j on
    data-parallel rank d is the (j * world + d)-th run of `micro_batch_size` of them. So the set of micro-batches, and
    with it every loss that is a mean over one, is the same for every number of ranks.

    `prefetch` steps are made ahead in a thread (0: none, in the caller). `num_steps`: end after that many (None:
    never). `finish`: what becomes of a micro-batch where it is made. `wait_seconds`: how long `next_step` has waited
    for data, in all. `close` when done.
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
                f"training.global_batch_size={global_batch_size}: must be a multiple of training.micro_batch_size "
                f"({micro_batch_size}) x data-parallel ranks ({world_size}); {micro_batch_size * world_size} works"
            )
        assert 0 <= rank < world_size, (rank, world_size)
        self.consumed_samples = consumed_samples  # by the steps that next_step has given out
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
        """The micro-batches of the next step, in order. Raises what went wrong in the thread, StopIteration after
        num_steps."""
        if self._closed.is_set():
            raise RuntimeError("the loader is closed")
        if self._steps_left == 0:
            raise StopIteration
        begin = time.perf_counter()
        if self._thread is None:
            step = self._make(self.consumed_samples)
        else:
            try:
                found = self._queue.get(timeout=TIMEOUT_SECONDS)
            except queue.Empty:
                raise TimeoutError(
                    f"no batch within {TIMEOUT_SECONDS} s; is the storage that holds data.cache_dir reachable?"
                ) from None
            if isinstance(found, BaseException):
                self.close()
                raise found
            step = found
        self.wait_seconds += time.perf_counter() - begin
        self.consumed_samples += self._global
        if self._steps_left is not None:
            self._steps_left -= 1
        return step

    def close(self) -> None:
        """End the thread. May be called more than once."""
        self._closed.set()
        if self._thread is not None:
            while True:  # a full queue would hold the thread
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    break
            self._thread.join(timeout=10)

    def _make(self, first_sample: int) -> list[dict[str, Any]]:
        step = []
        for begin in range(
            first_sample + self._rank * self._micro, first_sample + self._global, self._world * self._micro
        ):
            arrays = self._samples.batch(range(begin, begin + self._micro))
            batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
            step.append(batch if self._finish is None else self._finish(batch))
        return step

    def _produce(self, first_sample: int, num_steps: int | None) -> None:
        made: list[dict[str, Any]] | BaseException
        while not self._closed.is_set() and num_steps != 0:
            try:
                made = self._make(first_sample)
            except BaseException as error:  # whatever it is, next_step raises it in the caller
                made = error
            while not self._closed.is_set():
                try:
                    self._queue.put(made, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(made, BaseException):
                return
            first_sample += self._global
            num_steps = None if num_steps is None else num_steps - 1


def finished(batch: dict[str, Any], prepare: Finish | None, pin: bool) -> dict[str, Any]:
    """A micro-batch with what `prepare` makes of it; `pin`: in pinned memory, what both share once."""
    moved: dict[int, Any] = {}

    def place(value: Any) -> Any:
        if not pin or not isinstance(value, torch.Tensor):
            return value
        if id(value) not in moved:
            moved[id(value)] = value.pin_memory()
        return moved[id(value)]

    prepared = batch if prepare is None else prepare(batch)
    found = {name: place(value) for name, value in batch.items()}
    if prepared is not batch:
        found[PREPARED] = {name: place(value) for name, value in prepared.items()}
    return found
