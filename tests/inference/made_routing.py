"""Recordings of routing that are made up, of several kinds, each from a seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from inference.weights.routing_file import Recording, RoutedLayer, RoutingHeader

Choices = npt.NDArray[np.int64]  # experts [L, T, k] of one pass
Weights = npt.NDArray[np.float64]  # of experts, in a draw
Pass = Callable[[int], Choices]
PROMPT = 40  # tokens


class MadeRouting:
    """Draws passes of `num_layers` layers. Each kind is a method that makes a function from a pass's number to its
    choices."""

    def __init__(self, seed: int, num_layers: int, num_experts: int, top_k: int, num_passes: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape, self.top_k, self.num_passes = (num_layers, num_experts), top_k, num_passes
        self.even = np.ones(self.shape)

    def zipf(self, power: float) -> Weights:
        weights = np.arange(1, self.shape[1] + 1) ** -power
        return np.stack([self.rng.permutation(weights) for _ in range(self.shape[0])])

    def draw(self, weights: Weights, num_tokens: int = 1) -> Choices:
        noise = self.rng.gumbel(size=(self.shape[0], num_tokens, self.shape[1]))
        return np.argsort(-(np.log(weights)[:, None] + noise), axis=-1)[..., : self.top_k]

    def mixed(self, first: Choices, second: Choices, share: float) -> Choices:
        """Each choice of `first` with that probability, and what is left of `second`."""
        out = first.copy()
        for index in np.ndindex(first.shape[:2]):
            kept = [expert for expert in first[index] if self.rng.random() < share]
            out[index] = (kept + [expert for expert in second[index] if expert not in kept])[: self.top_k]
        return out

    def random(self) -> Pass:
        return lambda number: self.draw(self.even)

    def skewed(self) -> Pass:
        weights = self.zipf(1.0)
        return lambda number: self.draw(weights)

    def local(self) -> Pass:
        """Three of four choices are those of the token before."""
        last = [self.draw(self.even)]

        def next_one(number: int) -> Choices:
            last[0] = self.mixed(last[0], self.draw(self.even), 0.75)
            return last[0]

        return next_one

    def shifted(self) -> Pass:
        """In the middle all experts change their weights."""
        halves = self.zipf(1.2), self.zipf(1.2)
        return lambda number: self.draw(halves[2 * number >= self.num_passes])

    def prompts(self) -> Pass:
        """Every 25 passes a long prompt that uses nearly all experts alike; between them skewed decoding."""
        weights = self.zipf(1.0)
        return lambda number: self.draw(weights) if number % 25 else self.draw(self.even, PROMPT)

    def batch(self) -> Pass:
        """Five texts, each with its prompt."""
        weights = self.zipf(1.2)
        return lambda number: self.draw(weights, 5 if number % 50 else 5 * PROMPT)

    def topics(self) -> Pass:
        """Now and then the topic changes, and with it the weights."""
        weights, topic = [self.zipf(1.5) for _ in range(4)], [0]

        def next_one(number: int) -> Choices:
            if self.rng.random() < 0.05:
                topic[0] = int(self.rng.integers(4))
            return self.draw(weights[topic[0]])

        return next_one

    def loop(self) -> Pass:
        """The same seven tokens over and over, with some others between."""
        tokens = [self.draw(self.zipf(0.5)) for _ in range(7)]
        return lambda number: tokens[number % 7] if self.rng.random() > 0.1 else self.draw(self.even)

    def words(self) -> Pass:
        """Words of a vocabulary whose choices are partly the word's own."""
        frequency = 1 / np.arange(1, 201)
        table = self.draw(self.zipf(0.7), 200)

        def next_one(number: int) -> Choices:
            word = int(self.rng.choice(200, p=frequency / frequency.sum()))
            return self.mixed(table[:, [word]], self.draw(self.even), 0.6)

        return next_one


KINDS: dict[str, Callable[[MadeRouting], Pass]] = {
    "random": MadeRouting.random,
    "skewed": MadeRouting.skewed,
    "local": MadeRouting.local,
    "shifted": MadeRouting.shifted,
    "prompts": MadeRouting.prompts,
    "batch": MadeRouting.batch,
    "topics": MadeRouting.topics,
    "loop": MadeRouting.loop,
    "words": MadeRouting.words,
}


def made(
    kind: str, seed: int, *, num_layers: int = 4, num_experts: int = 24, top_k: int = 3, num_passes: int = 150
) -> Recording:
    """A recording of that kind; its MoE layers are every other layer of a model."""
    source = MadeRouting(seed, num_layers, num_experts, top_k, num_passes)
    next_one = KINDS[kind](source)
    header = RoutingHeader(kind, num_experts, top_k, tuple(range(1, 2 * num_layers, 2)))
    recording = Recording(header)
    for number in range(num_passes):
        choices = next_one(number)
        tokens = tuple((0, at) for at in range(choices.shape[1]))
        for layer, of_layer in zip(header.layers, choices.tolist(), strict=True):
            recording.visits.append(RoutedLayer(number, layer, tokens, tuple(map(tuple, of_layer))))
    return recording
