"""Which experts a cache keeps while a model generates: those whose next use is expected soonest.

The MoE layers of a model run in a known cycle, so the layer that has just run is farthest away; caches by recent use or
by counts do not know that. Use counts age (SE-MoE, arXiv 2205.10034, algorithm 2), here in several memories: from a
short one to one of the whole generation, by passes and by tokens. Which of them tells most about the next pass depends
on model and text. So their log-odds are added up with weights that are learned while it runs: logistic regression, a
Newton step for each layer that runs. The chance p that this foretells makes the expected time of the next use: L layers
a pass, times 1 / p.

What is expected to be used latest goes first. A prompt's pass uses nearly all experts: layers that it has yet to run
count with the chance that any of its tokens chooses the expert, and layers behind it with that of decoding.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Chosen on recorded and on made-up routing: benchmarks/results/expert_caches.md.
MEMORIES = (0.3, 0.6, 0.9, 0.98)  # what a pass leaves of the counts before it; one more forgets nothing
PRIOR_PASSES = 3.0  # passes of even routing that stand before the first one
STIFFNESS = 70.0  # of the learned weights: uses that weigh as much as what they are at the start
KEPT_PER_PASS = 0.999  # of what the weights have learned, for each layer that runs
UNLIKE = 0.1  # of a prompt's tokens, those that choose unlike all before
CYCLES = 2.0  # how much the time of a layer's last run counts beside the expected wait
_LEAST = 1e-4  # chance of use, where it enters as log-odds
_NOT_CACHED = -math.inf
_EXPECTED = -1.0  # before every expected time of use


class ExpertUses:
    """Use of the experts of all MoE layers, and which of the cached ones to drop. It holds no weights and no sizes: the
    owner of the slots says what is cached.

    `layers` are the numbers of the MoE layers in the order in which a pass runs them. In each pass the owner calls, for
    each layer: `used` when the router has chosen; `expect` for what the next layer will probably use; and for what is
    missing `victims`, `drop` and `admit`. It uses what is cached first, and protects what is not yet used or on its
    way, and nothing else: what has been used is often the best victim. A call takes tens of microseconds, whatever the
    cache holds.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, top_k: int) -> None:
        self._layers, self._top_k, self._num = list(layers), top_k, num_experts
        self._row = {layer: row for row, layer in enumerate(layers)}
        num_layers, kinds = len(self._layers), len(MEMORIES) + 2
        shape = (num_layers, num_experts)
        self._prior = min(top_k / num_experts, 1 - _LEAST)
        self._prior_odds = math.log(self._prior / (1 - self._prior))
        self._rates = np.array([1 - kept for kept in MEMORIES] + [0.0])  # of an update, at least
        # share of a layer's tokens that choose an expert, by memory; the last is by tokens, the others are by passes
        self._shares_LME = np.full((num_layers, kinds, num_experts), self._prior)
        self._odds_LME = np.zeros((num_layers, kinds, num_experts))  # their log-odds, less those of even routing
        self._chance_LE = np.full(shape, self._prior)  # that a token of the next pass chooses it
        self._weights = np.full(kinds, 1 / kinds)
        self._curvature = np.eye(kinds) * STIFFNESS
        self._passes = np.zeros(num_layers)
        self._tokens = np.zeros(num_layers)
        self._last_tokens = np.ones(num_layers)  # of the pass before
        self._usual = np.ones(num_layers)  # tokens of a decoding pass
        self._counts_with = np.ones(num_layers)  # tokens of a layer's next pass, that its times stand for
        self._clock = 0.0  # layers that have run
        self._ran_at = np.arange(num_layers) - float(num_layers)
        self._expected: dict[int, list[int]] = {}  # by row
        self._cached_LE = np.zeros(shape, dtype=bool)
        self._time_LE = np.zeros(shape)  # of the expected next use
        self._value_LE = np.full(shape, _NOT_CACHED)  # the same, of cached experts
        self._latest = np.full(num_layers, _NOT_CACHED)  # the largest of each layer
        for row in range(num_layers):
            self._set_times(row, 1)

    def __contains__(self, expert: tuple[int, int]) -> bool:
        return bool(self._cached_LE[self._row[expert[0]], expert[1]])

    def __len__(self) -> int:
        return int(self._cached_LE.sum())

    def used(self, layer: int, counts: Mapping[int, int]) -> None:
        """A layer's router has chosen, for all tokens of this pass: tokens of each expert that any of them chose."""
        row = self._row[layer]
        num_tokens = max(sum(counts.values()) / self._top_k, 1)
        share_E = np.zeros(self._num)
        share_E[list(counts)] = list(counts.values())
        share_E /= num_tokens
        if self._passes[row]:
            self._learn(row, share_E)
        self._count(row, share_E, num_tokens)
        if self._counts_with[row] != num_tokens:  # a pass of another size than expected: so will its other layers be
            for later in range(row + 1, len(self._layers)):
                self._set_times(later, num_tokens)
        self._ran_at[row] = self._clock
        self._clock += 1
        self._expected.pop(row, None)
        # A long pass is a prompt's; what follows it is decoding.
        self._usual[row] = min(num_tokens, self._last_tokens[row])
        self._set_times(row, self._usual[row])
        self._last_tokens[row] = num_tokens

    def admit(self, layer: int, expert: int) -> None:
        """An expert is in the cache, or on its way into it."""
        row = self._row[layer]
        self._cached_LE[row, expert] = True
        self._value_LE[row, expert] = value = self._time_LE[row, expert]
        self._latest[row] = max(self._latest[row], value)

    def drop(self, layer: int, expert: int) -> None:
        """An expert is no longer in the cache."""
        row = self._row[layer]
        self._cached_LE[row, expert] = False
        self._value_LE[row, expert] = _NOT_CACHED
        self._latest[row] = self._value_LE[row].max()

    def expect(self, layer: int, experts: Iterable[int]) -> None:
        """A layer will probably use these when it runs next, whether they are cached, on their way, or neither. Until
        then they are victims only where nothing else is left."""
        row = self._row[layer]
        self._expected.setdefault(row, []).extend(experts)
        self._set_times(row, self._counts_with[row])

    def victims(self, count: int, protected: Collection[tuple[int, int]] = ()) -> list[tuple[int, int]]:
        """The `count` cached experts that are expected to be used latest, as (layer, expert), latest first; never a
        protected one, and fewer where no others are cached. They stay cached until `drop`."""
        touched: dict[int, tuple[Floats, float]] = {}

        def without(row: int) -> Floats:
            if row not in touched:
                touched[row] = self._value_LE[row].copy(), float(self._latest[row])
            value_E: Floats = self._value_LE[row]
            return value_E

        for layer, expert in protected:
            without(self._row[layer])[expert] = _NOT_CACHED
        for row in touched:
            self._latest[row] = self._value_LE[row].max()
        found: list[tuple[int, int]] = []
        while len(found) < count:
            row = int(self._latest.argmax())
            if self._latest[row] == _NOT_CACHED:
                break
            value_E = without(row)
            expert = int(value_E.argmax())
            found.append((self._layers[row], expert))
            value_E[expert] = _NOT_CACHED
            self._latest[row] = value_E.max()
        for row, (value_E, latest) in touched.items():
            self._value_LE[row], self._latest[row] = value_E, latest
        return found

    def _learn(self, row: int, share_E: Floats) -> None:
        """Move the weights of the memories towards what would have foretold this pass."""
        odds_ME, chance_E = self._odds_LME[row], self._chance_LE[row]
        self._curvature *= KEPT_PER_PASS
        self._curvature += (odds_ME * (chance_E * (1 - chance_E))) @ odds_ME.T
        self._curvature.flat[:: len(self._weights) + 1] += (1 - KEPT_PER_PASS) * STIFFNESS
        self._weights += np.linalg.solve(self._curvature, odds_ME @ (share_E - chance_E))

    def _count(self, row: int, share_E: Floats, num_tokens: float) -> None:
        """Age the counts of a layer, add this pass, and foretell the next one."""
        shares_ME = self._shares_LME[row]
        by_pass = np.maximum(1 / (self._passes[row] + PRIOR_PASSES), self._rates)
        shares_ME[:-1] += by_pass[:, None] * (share_E - shares_ME[:-1])
        shares_ME[-1] += num_tokens / (self._tokens[row] + num_tokens + PRIOR_PASSES) * (share_E - shares_ME[-1])
        self._passes[row] += 1
        self._tokens[row] += num_tokens
        clipped_ME = np.clip(shares_ME, _LEAST, 1 - _LEAST)
        odds_ME = self._odds_LME[row] = np.log(clipped_ME / (1 - clipped_ME)) - self._prior_odds
        self._chance_LE[row] = 1 / (1 + np.exp(-(self._weights @ odds_ME + self._prior_odds)))

    def _set_times(self, row: int, num_tokens: float) -> None:
        """The expected times of next use of a layer's experts, in a next pass of so many tokens."""
        self._counts_with[row] = num_tokens
        chance_E = self._chance_LE[row]
        if num_tokens > self._usual[row]:
            chance_E = (1 - UNLIKE) * self._shares_LME[row, -1] + UNLIKE * self._prior
        if num_tokens > 1:
            chance_E = 1 - (1 - chance_E) ** num_tokens
        time_E = CYCLES * self._ran_at[row] + len(self._layers) * (CYCLES + 1 / np.maximum(chance_E, 1e-6))
        if row in self._expected:
            time_E[self._expected[row]] = _EXPECTED
        self._time_LE[row] = time_E
        value_E = self._value_LE[row] = np.where(self._cached_LE[row], time_E, _NOT_CACHED)
        self._latest[row] = value_E.max()
