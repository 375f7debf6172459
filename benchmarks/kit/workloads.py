"""Routing counts without a router: Megatron-LM's imbalance workloads, and popularity that stays, drifts, bursts or
jumps.

Everything depends on the name, the seed and the size alone. Counts are by step: [1, M, R, E], of one layer, by
micro-batch, rank whose tokens they are, and expert; each token has top_k different experts.

W0 to W7 are made anew from the definition of NVIDIA/Megatron-LM#7488 (benchmarks/moe/token_imbalance, 2026-09). From
there: a step's tokens depend on (workload, seed, step); the hot set is a quarter of the experts, at least top_k, the
first ones; where there is one, three tokens of four choose from it, evenly, and every fourth from all.

* W0: tokens take the experts in turns.   * W1, W2: the hot set; both names have one construction, as there.
* W3: the hot set is every other expert.  * W4: all choose from all; ranks have unequally many tokens.
* W5: the upper half of the experts.      * W6: the hot set moves on by its width every 3 steps.
* W7: in every fourth step, every other token chooses from the hot set, else all from all.

Ours: the random numbers; that the tokens of a step are one list, cut into micro-batches and in each into ranks (there
every rank has the same list); that in W4 rank r has r + 1 parts of a micro-batch (there only padding differs). Its
README's figures of W3 (max/mean 1.28 at 8 experts, top 2) are not those of its code (1.75), which we follow.

The others draw each rank's counts from a popularity of the experts, which is log-normal or Zipf's. `NAME@RATIO` widens
or narrows it until the busiest rank is to have RATIO times the mean, homes in order, at the first micro-batch. Where
the random numbers do not allow it, others are drawn.

* steady: it stays.   * zipf: it stays, and falls with the place in a random order of the experts.
* drifting: its logarithm is an AR(1) process from micro-batch to micro-batch (rho 0.95).
* bursty: one micro-batch in eight, an expert at random is 8 times as popular as it was.
* jumping: one micro-batch in eight, all of it is drawn anew.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from base.errors import ConfigError
from moe.placement_map import Integers

Floats = NDArray[np.float64]
MEGATRON = tuple(f"W{number}" for number in range(8))
POPULARITIES = ("steady", "zipf", "drifting", "bursty", "jumping")
DRIFT = 0.95
EVERY = 8  # micro-batches from a burst or jump to the next, on average
BURST = 8.0  # times as popular
ATTEMPTS = 100
WIDEST = 50.0  # standard deviation of a log-normal popularity


@dataclass(frozen=True)
class Size:
    """Sizes of the counts."""

    ranks: int = 4
    experts: int = 32
    top_k: int = 2
    tokens: int = 1024  # of a rank in a micro-batch, W4: on average
    micro_batches: int = 8
    seed: int = 0


def is_workload(name: str) -> bool:
    """Whether `counts` knows this name."""
    kind, at, ratio = name.partition("@")
    return name in MEGATRON or (kind in POPULARITIES and (not at or ratio.replace(".", "", 1).isdigit()))


def counts(name: str, size: Size, steps: int) -> Iterator[Integers]:
    """Yield the counts of each step [1, M, R, E]. Raises ConfigError if no popularity has the ratio."""
    if name in MEGATRON:
        for step in range(steps):
            yield _cut(name, routing(name, size, step), size)[None]
        return
    kind, _, ratio = name.partition("@")
    rng = _rng(name, size.seed)
    popularity = _popularities(kind, size, float(ratio) if ratio else None, rng)
    for _ in range(steps):
        yield np.stack([_draw(next(popularity), size, rng) for _ in range(size.micro_batches)])[None]


def routing(name: str, size: Size, step: int) -> Integers:
    """Return the experts of all tokens of a step [N, K], one of W0 to W7."""
    experts, top_k = size.experts, size.top_k
    tokens = np.arange(size.micro_batches * size.ranks * size.tokens)
    if name == "W0":
        return (tokens[:, None] * top_k + np.arange(top_k)) % experts
    width = max(top_k, experts // 4)
    hot, everyone, choose_hot = np.arange(width), np.arange(experts), tokens % 4 > 0
    if name == "W3" and experts // 2 >= top_k:
        hot = everyone[::2]
    elif name == "W4":
        choose_hot[:] = False
    elif name == "W5" and experts - experts // 2 >= top_k:
        hot, choose_hot = everyone[experts // 2 :], np.ones_like(choose_hot)
    elif name == "W6":
        hot = (hot + step // 3 * width) % experts
    elif name == "W7":
        choose_hot = (tokens % 2 == 0) & (step % 4 == 3)
    rng = _rng(name, size.seed, step)
    result = np.empty((len(tokens), top_k), dtype=np.int64)
    for chosen, pool in ((choose_hot, hot), (~choose_hot, everyone)):
        result[chosen] = pool[_distinct(int(chosen.sum()), top_k, len(pool), rng)]
    return result


def _rng(name: str, *numbers: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(name.encode()), *numbers])


def _distinct(num_rows: int, number: int, of: int, rng: np.random.Generator) -> Integers:
    """Draw distinct numbers below `of`, uniformly (Floyd's method): [num_rows, number]."""
    result = np.empty((num_rows, number), dtype=np.int64)
    for index in range(number):
        last = of - number + index
        draw = rng.integers(0, last + 1, num_rows)
        taken = (result[:, :index] == draw[:, None]).any(1)
        result[:, index] = np.where(taken, last, draw)
    return result


def _cut(name: str, ids: Integers, size: Size) -> Integers:
    """Return the counts [M, R, E] of the tokens of a step, in order."""
    shares = np.arange(1, size.ranks + 1) if name == "W4" else np.ones(size.ranks, dtype=np.int64)
    ends = size.ranks * size.tokens * shares.cumsum() // shares.sum()
    result = np.empty((size.micro_batches, size.ranks, size.experts), dtype=np.int64)
    for batch, chosen in zip(result, np.split(ids, size.micro_batches)):
        for rank, own in enumerate(np.split(chosen, ends[:-1])):
            batch[rank] = np.bincount(own.ravel(), minlength=size.experts)
    return result


def _popularities(kind: str, size: Size, ratio: float | None, rng: np.random.Generator) -> Iterator[Floats]:
    """By micro-batch: the share of the assignments [E] that each expert is to have, 1 / top_k at most."""

    def fresh() -> Floats:
        return -np.log(rng.permutation(size.experts) + 1.0) if kind == "zipf" else rng.standard_normal(size.experts)

    logs = fresh()
    scale: float | None = 1.0
    if ratio is not None:
        for _ in range(ATTEMPTS):
            if (scale := _scale(logs, ratio, size)) is not None:
                break
            logs = fresh()
    if scale is None:
        raise ConfigError(
            f"{kind}@{ratio:g}: no popularity of {size.experts} experts, top {size.top_k}, is that unequal on "
            f"{size.ranks} ranks; try a smaller ratio"
        )
    while True:
        now = scale * logs
        if kind == "bursty" and rng.random() < 1 / EVERY:
            now[rng.integers(size.experts)] += np.log(BURST)
        yield _shares(now, size.top_k)
        if kind == "drifting":
            logs = DRIFT * logs + np.sqrt(1 - DRIFT**2) * rng.standard_normal(size.experts)
        elif kind == "jumping" and rng.random() < 1 / EVERY:
            logs = fresh()


def _shares(logs: Floats, top_k: int) -> Floats:
    """Return a popularity with the sum 1, and none above 1 / top_k: a token has an expert once."""
    shares = np.exp(logs - logs.max())
    shares /= shares.sum()
    for _ in range(top_k):  # each round fixes one more at the bound, or none
        full = shares >= 1 / top_k
        shares[full] = 1 / top_k
        if not full.all():
            shares[~full] *= (1 - full.sum() / top_k) / shares[~full].sum()
    return shares


def _scale(logs: Floats, ratio: float, size: Size) -> float | None:
    """Return the spread of logarithms for that max/mean over ranks; None if there is none."""

    def of(scale: float) -> float:
        loads = _shares(scale * logs, size.top_k).reshape(size.ranks, -1).sum(1)
        return float(loads.max() * size.ranks)

    low, high = 0.0, 0.1
    while of(high) < ratio:
        low, high = high, high * 1.1
        if high > WIDEST:
            return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if of(middle) >= ratio else (middle, high)
    return high


def _draw(shares: Floats, size: Size, rng: np.random.Generator) -> Integers:
    """Return the counts [R, E] of each rank's tokens: top_k assignments each, no expert twice in a token, so none
    above the tokens."""
    drawn = rng.multinomial(size.tokens * size.top_k, shares, size.ranks)
    for row in drawn:
        while (over := int((row - size.tokens).clip(0).sum())) > 0:
            np.minimum(row, size.tokens, out=row)
            left = np.where(row < size.tokens, shares + 1e-9, 0)
            row += rng.multinomial(over, left / left.sum())
    return drawn
