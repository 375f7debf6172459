"""A trained model used on the pretended device or on the CPU, under a memory budget: what the rank of a test runs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from base.units import MIB
from inference.decoder import Decoder
from inference.fill_mask import fill_masks
from inference.generation import Sampling, generate
from inference.open_model import OpenModel, open_model
from inference.scoring import log_likelihoods_of
from inference.weights.file_weights import FileWeights
from inference.weights.loader import HostCopies
from memory.budgets import HOST
from tests.cuda import runs
from tests.cuda.pretended.observed import OBSERVED, Mutant

PROMPTS = [[5, 7, 9, 11], [3, 90], [8, 1, 2, 3, 4, 5, 6]]
TEXT = [(7 * i) % 97 for i in range(20)]
NEW_TOKENS = 4
GREEDY, DRAWN = Sampling(), Sampling(1.0, seed=3)
MASK, MASKED = 4, [[2, 4, 17, 5], [9, 8, 4, 4, 11, 30]]  # a BERT's texts

Waits = Counter[tuple[str, str]]  # by kind and place


@dataclass
class Used:
    """What came of it: the tokens that follow PROMPTS, log-probabilities of TEXT, or for a BERT those of its guesses;
    and what the device saw of the second generation's prefill, and of each token after it."""

    tokens: list[list[int]] = field(default_factory=list)
    numbers: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    prefill: Waits = field(default_factory=Counter)
    each_token: list[Waits] = field(default_factory=list)
    drawn: list[list[int]] = field(default_factory=list)  # with a seed
    each_drawn: list[Waits] = field(default_factory=list)
    scoring: Waits = field(default_factory=Counter)
    worker_waits: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    pinned: Counter[str] = field(default_factory=Counter)  # pieces of memory that passes pinned, by place
    faults: list[str] = field(default_factory=list)
    left_out: int = 0
    streams: tuple[bool, bool] = False, False  # units, experts
    bytes_read: list[int] = field(default_factory=list)  # so far, after each of three uses
    host_bytes: Counter[str] = field(default_factory=Counter)  # counted under the host's budget


def on_cpu(folder: Path, share: float | None, batch_size: int) -> tuple[float | None, Used]:
    """`use`, and its budget in MiB: room for what is needed beside the weights, for one unit and one expert, and for a
    share of the rest; None: for all."""
    budget = None if share is None else _budget(folder, share, batch_size)
    return budget, _use("cpu", folder, budget, batch_size)


def _budget(folder: Path, share: float, batch_size: int) -> float:
    with open_model(folder, device="cpu") as model:
        _first_use(model, batch_size)
        sizes, other = model.weights.sizes, model.weights._other
    least = sizes.small + max(size for _, size in sizes.units) + sizes.expert
    return float(other + least + share * (sizes.total - least)) / MIB


def use(
    folder: Path, budget: float | None, batch_size: int, early: bool, mutant: Mutant | None, host_copies: bool
) -> Used:
    """Generate twice and score a text twice on the device, or fill in masks twice, with a budget of so many MiB.
    `batch_size`: texts of a batch. `host_copies`: the host keeps copies of streamed weights."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(runs.pretended(mutant, early))
        if mutant is not None:  # its faults are looked at, not what came of them
            stack.enter_context(mock.patch.object(FileWeights, "check_finite"))
        if not host_copies:
            stack.enter_context(mock.patch.object(HostCopies, "add", lambda *_: None))
        used = _use("cuda", folder, budget, batch_size, draws=mutant is None)  # from what is no number nobody can draw
    used.faults, used.left_out = sorted(OBSERVED.faults), mutant.left_out if mutant else 0
    return used


def _first_use(model: OpenModel, batch_size: int) -> None:
    if model.config.model.family == "bert":
        _guesses(model)
    else:
        _generate(model.decoder(), batch_size)
        _scores(model.decoder())


def _use(device: str, folder: Path, budget: float | None, batch_size: int, draws: bool = True) -> Used:
    used = Used(worker_waits=OBSERVED.worker_waits)
    with open_model(folder, device=device, budget=budget) as model:
        weights = model.weights
        _first_use(model, batch_size)
        used.bytes_read.append(weights.loader.bytes_read)
        OBSERVED.pinned.clear()
        with _waits_of_passes(weights) as passes:
            if model.config.model.family == "bert":
                used.numbers = _guesses(model)
                used.scoring = passes[-1]
            else:
                decoder = model.decoder()
                used.tokens = _generate(decoder, batch_size)
                used.prefill, *used.each_token = passes[: NEW_TOKENS if batch_size >= len(PROMPTS) else None]
                used.bytes_read.append(weights.loader.bytes_read)
                before = len(passes)
                used.drawn = _generate(decoder, 1, PROMPTS[:1], DRAWN) if draws else []
                used.each_drawn = passes[before + 1 :]
                used.numbers = _scores(decoder)
                used.scoring = passes[-1]
        used.bytes_read.append(weights.loader.bytes_read)
        used.pinned = Counter(OBSERVED.pinned)
        assert weights.plan is not None
        used.streams = weights.plan.ring_bytes > 0, weights.streams_experts
        used.host_bytes = Counter(HOST.held)
    return used


@contextlib.contextmanager
def _waits_of_passes(weights: FileWeights) -> Iterator[list[Waits]]:
    """The host's waits since the last pass, at the end of each."""
    passes: list[Waits] = []
    end_pass, before = weights.end_pass, Counter(OBSERVED.waits)

    def counted(num_tokens: int) -> None:
        nonlocal before
        end_pass(num_tokens)
        passes.append(OBSERVED.waits - before)
        before = Counter(OBSERVED.waits)

    with mock.patch.object(weights, "end_pass", counted):
        yield passes


def _generate(
    decoder: Decoder, batch_size: int, prompts: list[list[int]] = PROMPTS, sampling: Sampling = GREEDY
) -> list[list[int]]:
    return [found.tokens for found in generate(decoder, prompts, NEW_TOKENS, sampling, batch_size=batch_size)]


def _scores(decoder: Decoder) -> torch.Tensor:
    return log_likelihoods_of(decoder, [TEXT], 8, 4, 2)[0]


def _guesses(model: OpenModel) -> torch.Tensor:
    found = fill_masks(model, MASKED, MASK, 5)
    return torch.tensor([[guess.token, guess.probability] for text in found for masked in text for guess in masked])
