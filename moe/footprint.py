"""The memory of one call of a layer over several ranks: its schedule's buffers, one by one, without computing anything.

Everything follows moe/schedule.py, moe/memory.py and moe/experts.py; tests hold the result to what a tracker of live tensors
counts. Bytes on the busiest rank, beyond the layer's input, weights and their gradients. What is offloaded is elsewhere. Chunks are taken
to be equal: with random routing what is measured is 0.98 to 1.002 of this.
"""

from __future__ import annotations

from moe import blocks
from moe.blocks import SPARE_ROWS
from moe.plan import AHEAD, DEPTH, MAX_IN_FLIGHT, WHOLE, Load, Strategy

INDEX_BYTES = 170  # of a pair: who goes where, in all the forms that both passes need
SETTLED = 10  # chunks after which each looks like the one before


def kept_bytes(load: Load, strategy: Strategy) -> int:
    """What lives from the forward to the backward pass."""
    rows = load.rows * load.hidden_size if strategy.rows == "keep" else 0
    hidden = (load.pairs + _spare(load)) * load.hidden_columns if strategy.hidden == "keep" else 0
    return (rows + hidden) * load.element_size + load.pairs * INDEX_BYTES


def forward_bytes(load: Load, strategy: Strategy, degree: int) -> int:
    """The most that the forward pass has beside that."""
    sizes, ledger = _Sizes(load, degree), _Ledger()
    received = 0 if strategy.rows == "keep" else sizes.rows
    offloaded = sizes.hidden if strategy.hidden == "offload" else 0
    scratch = blocks.forward_scratch(load, sizes.block, strategy.hidden == "recompute")
    ledger.fly(0)  # codes and weights of the pairs
    arrivals = ledger.take_ahead(received, AHEAD, degree, 0)
    ledger.send(sizes.away, min(DEPTH, degree))
    for i in range(min(degree, SETTLED)):
        if i + DEPTH < degree:
            ledger.send(sizes.away)
        arrivals = ledger.take_ahead(received, i + AHEAD, degree, arrivals)
        ledger.take(offloaded)
        ledger.use(scratch, sizes.expert_rows)
        ledger.take(sizes.expert_rows + sizes.rows)  # the experts' output and its sums
        ledger.give(sizes.expert_rows)
        ledger.answer(sizes.rows)
        ledger.give(offloaded + received)
        ledger.add_up_at_home(sizes, keep=DEPTH)
    ledger.add_up_at_home(sizes)
    return ledger.peak * load.element_size


def backward_bytes(load: Load, strategy: Strategy, degree: int, weight_lag: int, same: bool) -> int:
    """The most that the backward pass has beside that; `same`: the forward pass had as many chunks."""
    sizes, ledger = _Sizes(load, degree), _Ledger()
    tensors = 2 if strategy.rows == "communicate" else 1  # that travel: gradients, and the rows again
    fetched = (sizes.rows if strategy.rows == "offload" else 0) + (sizes.hidden if strategy.hidden == "offload" else 0)
    regrouped = 0 if same or strategy.hidden != "keep" else sizes.pairs * load.hidden_columns + 16 * load.pairs // load.element_size
    scratch = blocks.input_scratch(load, sizes.block, strategy.hidden == "recompute")
    work = sizes.work + sizes.rows * (1 if strategy.rows == "keep" else 2)  # until the weight gradients are computed
    later = 0

    def weight_gradients(keep: int) -> None:
        nonlocal later
        while later > keep:
            ledger.use(blocks.weight_scratch(load, sizes.block), 0)
            ledger.give(work)
            later -= 1

    arrivals = ledger.take_ahead(tensors * sizes.rows, AHEAD, degree, 0)
    ledger.send(sizes.away, tensors * min(DEPTH, degree))
    ledger.take(fetched)
    for i in range(min(degree, SETTLED + weight_lag)):
        if i + DEPTH < degree:
            ledger.send(sizes.away, tensors)
        if i + 1 < degree:
            ledger.take(fetched)
        arrivals = ledger.take_ahead(tensors * sizes.rows, i + AHEAD, degree, arrivals)
        ledger.take(regrouped + sizes.expert_rows + sizes.work)
        ledger.use(scratch, 0)
        ledger.take(sizes.rows)  # sums
        ledger.give(sizes.expert_rows)
        ledger.answer(sizes.rows)
        ledger.give(regrouped + (sizes.hidden if strategy.hidden == "offload" else 0))
        later += 1
        if i + 1 == degree:
            ledger.fly(0)  # gradients of the pairs' weights
        weight_gradients(weight_lag)
        ledger.add_up_at_home(sizes, keep=DEPTH)
    weight_gradients(0)
    ledger.add_up_at_home(sizes)
    return ledger.peak * load.element_size


def _spare(load: Load) -> int:
    return SPARE_ROWS if load.block < WHOLE else 0


class _Sizes:
    """Numbers in the buffers of one chunk."""

    def __init__(self, load: Load, degree: int) -> None:
        self.pairs = -(-load.pairs // degree)
        self.rows = -(-load.rows // degree) * load.hidden_size
        self.away = -(-load.away_rows // degree) * load.hidden_size
        self.block = min(self.pairs, load.block, -(-load.expert_pairs // degree))
        spare = _spare(load)
        self.expert_rows = (self.pairs + spare) * load.hidden_size
        self.hidden = (self.pairs + spare) * load.hidden_columns
        self.work = (self.pairs + spare) * (load.hidden_columns + load.width)
        self.output = load.tokens * load.hidden_size
        # A part of it that is not added up in its place, as it is on the host.
        self.part = self.output // degree if degree > 1 and load.block == WHOLE else 0


class _Ledger:
    """What is in use, and the most that was."""

    def __init__(self) -> None:
        self._now = self.peak = 0
        self._flying: list[int] = []
        self._answers, self._has_result = 0, False

    def take(self, amount: int) -> None:
        self._now += amount
        self.peak = max(self.peak, self._now)

    def give(self, amount: int) -> None:
        self._now -= amount

    def use(self, amount: int, beside: int) -> None:
        """Take and give back at once, `beside` something that is in use only now too."""
        self.peak = max(self.peak, self._now + amount + beside)

    def take_ahead(self, amount: int, last: int, degree: int, taken: int) -> int:
        """Receive buffers up to chunk `last`, where `taken` are there; returns how many are there then."""
        wanted = min(last + 1, degree)
        self.take(amount * (wanted - taken))
        return wanted

    def send(self, amount: int, times: int = 1) -> None:
        """Take a send buffer, and start an exchange of it."""
        for _ in range(times):
            self.take(amount)
            self.fly(amount)

    def fly(self, amount: int) -> None:
        """Start an exchange; the oldest that are on their way are over."""
        self._flying.append(amount)
        while len(self._flying) > MAX_IN_FLIGHT:
            self._now -= self._flying.pop(0)

    def answer(self, amount: int) -> None:
        """Sums that are there set out, and there is room for those that come home."""
        self.take(amount)
        self.fly(amount)
        self._answers += 1

    def add_up_at_home(self, sizes: _Sizes, keep: int = 0) -> None:
        """All answers but `keep` become their parts of the result, which exists from the first on."""
        while self._answers > keep:
            self.take(0 if self._has_result else sizes.output)
            self.use(sizes.part, 0)
            self._has_result = True
            self.give(sizes.rows)
            self._answers -= 1
