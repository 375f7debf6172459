"""Eviction policy of the expert cache during generation: evict the expert whose next use is expected last.

The MoE layers of a model run in a known cycle, so the next use of the layer that has just run is farthest away. LRU and
LFU caches ignore this. The policy counts uses per pass and per token, and decays earlier counts (SE-MoE, arXiv
2205.10034, algorithm 2) at several rates. Model and text determine which rate predicts the next pass best, so the
log-odds of all rates are summed with weights that are learned online: logistic regression with one Newton step per
executed layer. The predicted probability p gives the expected time until the next use: L / p, for L layers per pass.

The pass of a prompt uses nearly all experts. For layers that this pass has not executed yet, p is the probability that
any of its tokens chooses the expert. For executed layers, p is the probability of use in a decoding pass.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Chosen on recorded and synthetic routing: benchmarks/results/expert_caches.md.
MEMORIES = (0.3, 0.6, 0.9, 0.98)  # decay of earlier counts per pass; one more memory does not decay
PRIOR_PASSES = 3.0  # passes of even routing, as a prior
STIFFNESS = 70.0  # number of uses that change the learned weights as much as the initial weights count
KEPT_PER_PASS = 0.999  # decay of the evidence for the learned weights, per executed layer
UNLIKE = 0.1  # fraction of a prompt's tokens whose choice differs from all earlier tokens
CYCLES = 2.0  # weight of the time of a layer's last run, relative to the expected wait
_LEAST = 1e-4  # probabilities of use are clipped to this before the log-odds
_NOT_CACHED = -math.inf
_EXPECTED = -1.0  # earlier than every expected time of use


class ExpertUses:
    """Statistics on the use of the experts of all MoE layers, which decide which cached experts to evict.

    The object stores neither weights nor sizes: the owner of the cache reports which experts are cached. `layers`:
    numbers of the MoE layers in the order in which a pass runs them. In each pass the owner calls, for each layer:
    `used` when the router has chosen; `expect` with the experts that the next layer will probably use; and, for missing
    experts, `victims`, `drop` and `admit`. The owner uses cached experts first, and protects only experts that are in
    flight or not used yet, because a used expert is often the best victim. A call takes tens of microseconds for any
    size of the cache.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, top_k: int) -> None:
        self._layers, self._top_k, self._num = list(layers), top_k, num_experts
        self._row = {layer: row for row, layer in enumerate(layers)}
        num_layers, kinds = len(self._layers), len(MEMORIES) + 2
        shape = (num_layers, num_experts)
        self._prior = min(top_k / num_experts, 1 - _LEAST)
        self._prior_odds = math.log(self._prior / (1 - self._prior))
        self._rates = np.array([1 - kept for kept in MEMORIES] + [0.0])  # least rate of an update
        # share of a layer's tokens that choose an expert, per memory; the last counts per token, the others per pass
        self._shares_LME = np.full((num_layers, kinds, num_experts), self._prior)
        self._odds_LME = np.zeros((num_layers, kinds, num_experts))  # their log-odds, minus those of even routing
        self._chance_LE = np.full(shape, self._prior)  # probability that a token of the next pass chooses it
        self._weights = np.full(kinds, 1 / kinds)
        self._curvature = np.eye(kinds) * STIFFNESS
        self._passes = np.zeros(num_layers)
        self._tokens = np.zeros(num_layers)
        self._last_tokens = np.ones(num_layers)  # tokens of the previous pass
        self._usual = np.ones(num_layers)  # tokens of a decoding pass
        self._counts_with = np.ones(num_layers)  # tokens of a layer's next pass, as its times assume
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
        """Record a layer's routing in this pass. counts: number of tokens of each chosen expert."""
        row = self._row[layer]
        num_tokens = max(sum(counts.values()) / self._top_k, 1)
        share_E = np.zeros(self._num)
        share_E[list(counts)] = list(counts.values())
        share_E /= num_tokens
        if self._passes[row]:
            self._learn(row, share_E)
        self._count(row, share_E, num_tokens)
        if self._counts_with[row] != num_tokens:  # this pass has another number of tokens than expected
            for later in range(row + 1, len(self._layers)):
                self._set_times(later, num_tokens)
        self._ran_at[row] = self._clock
        self._clock += 1
        self._expected.pop(row, None)
        # A long pass reads a prompt; decoding passes follow.
        self._usual[row] = min(num_tokens, self._last_tokens[row])
        self._set_times(row, self._usual[row])
        self._last_tokens[row] = num_tokens

    def admit(self, layer: int, expert: int) -> None:
        """Record that an expert is in the cache or is being loaded into it."""
        row = self._row[layer]
        self._cached_LE[row, expert] = True
        self._value_LE[row, expert] = value = self._time_LE[row, expert]
        self._latest[row] = max(self._latest[row], value)

    def drop(self, layer: int, expert: int) -> None:
        """Record that an expert has been evicted from the cache."""
        row = self._row[layer]
        self._cached_LE[row, expert] = False
        self._value_LE[row, expert] = _NOT_CACHED
        self._latest[row] = self._value_LE[row].max()

    def expect(self, layer: int, experts: Iterable[int]) -> None:
        """Record experts that a layer will probably use when it runs next, whether cached or not. Until then, they are
        evicted only after all others."""
        row = self._row[layer]
        self._expected.setdefault(row, []).extend(experts)
        self._set_times(row, self._counts_with[row])

    def victims(self, count: int, protected: Collection[tuple[int, int]] = ()) -> list[tuple[int, int]]:
        """Return the `count` cached experts to evict, as (layer, expert), latest expected use first; fewer if all
        others are protected. Statistics change only when `drop` is called."""
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
        """Update the weights of the use counts by a Newton step that improves their prediction of expert use.

        row: index of the MoE layer. share_E: fraction of the pass's tokens that chose each expert.
        """
        odds_ME, chance_E = self._odds_LME[row], self._chance_LE[row]
        self._curvature *= KEPT_PER_PASS
        self._curvature += (odds_ME * (chance_E * (1 - chance_E))) @ odds_ME.T
        self._curvature.flat[:: len(self._weights) + 1] += (1 - KEPT_PER_PASS) * STIFFNESS
        self._weights += np.linalg.solve(self._curvature, odds_ME @ (share_E - chance_E))

    def _count(self, row: int, share_E: Floats, num_tokens: float) -> None:
        """Add this pass to a layer's decaying counts of expert use, and predict each expert's use in the next pass.

        row: index of the MoE layer. share_E: fraction of the pass's `num_tokens` tokens that chose each expert.
        """
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
        """Set the expected time of the next use of each expert of a layer, if the next pass has `num_tokens` tokens.

        row: index of the MoE layer.
        """
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
