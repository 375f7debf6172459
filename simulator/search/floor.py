"""Seconds that no layout of a group is below: what its rows take at best, and what the pipeline waits.

A row of a large micro-batch takes least, so one timing of it bounds all micro-batch sizes, stages and model chunks.
Context ranks exchange heads while nothing is computed, and keys and values beside attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from configs import derived
from configs.schema import Config
from models.blueprint import parts
from simulator.clock.hardware import Hardware
from simulator.clock.streams import least_streamed_seconds
from simulator.search.space import LayoutCell, LayoutSpace, Saving, with_keys
from simulator.search.timer import LayerKind, RowSeconds

LARGE = 2**24  # tokens of a micro-batch, about, beside which start-ups are nothing
ATTENDED = 0.5  # of the rows elsewhere, that a place's queries attend to at least

Stages = list[tuple[Counter[LayerKind], Counter[LayerKind]]]  # by stage: layers of its first chunk, and of all


class LayoutFloor:
    """Bounds of a space's layouts; 0 where nothing is known of rows."""

    def __init__(self, space: LayoutSpace, hardware: Hardware, rows: Callable[[Config], RowSeconds] | None) -> None:
        self.space, self.hardware, self.rows = space, hardware, rows
        self._rows: dict[Hashable, RowSeconds] = {}
        self._stages: dict[Hashable, Stages] = {}
        self._streamed: dict[Hashable, float] = {}

    def seconds(self, cell: LayoutCell, savings: list[Saving], heads: int | None = None) -> float:
        """No more than the least of a layout's savings; with `heads` ranks that exchange heads, else any number."""
        group = cell.group
        if self.rows is None or (group.context > 1 and self.space.kind == "cpu"):
            return 0.0  # a CPU's attention with context ranks is another one
        more = self._context_seconds(cell, heads) if group.context > 1 else 0.0
        each = self._micro_batches(cell)
        return min(self._step(cell, self._of_row(cell, saving), *each, more) for saving in savings)

    def closer(self, cell: LayoutCell, saving: Saving) -> float | None:
        """No more than the seconds of one candidate, by the rows of its micro-batch and what it moves of experts; None
        where nothing is known."""
        if self.rows is None:
            return None
        group = cell.group
        key = replace(group, pipeline=1), cell.heads, cell.micro, _saved(saving)
        if key not in self._rows:
            self._rows[key] = self.rows(self.space.layout(cell, saving))
        return max(self._step(cell, self._rows[key], *self._micro_batches(cell), 0.0), self.streamed(cell, [saving]))

    def streamed(self, cell: LayoutCell, savings: Sequence[Saving]) -> float:
        """No more than what a layout's savings move of experts off the device takes; 0 where one has them there."""
        if self.rows is None or not all(each.streams for each in savings):
            return 0.0
        found = {(each.weights_device, each.pass_order, each.state_device): each for each in savings}
        return min(self._moved(cell, own, each) for own, each in found.items())

    def _moved(self, cell: LayoutCell, own: Hashable, saving: Saving) -> float:
        key = cell.group, cell.chunks, cell.micro, own
        if key not in self._streamed:
            config = self.space.layout(cell, saving)
            self._streamed[key] = least_streamed_seconds(config, self.space.world_size, self.hardware)
        return self._streamed[key]

    def _micro_batches(self, cell: LayoutCell) -> tuple[int, int]:
        """How many there are, and the rows of one."""
        group, config = cell.group, self.space.config
        copies = self.space.world_size // (group.tensor * group.pipeline * group.context)
        count = config.training.global_batch_size // (copies * cell.micro)
        return count, cell.micro * config.model.sequence_length // group.context

    def _step(self, cell: LayoutCell, row: RowSeconds, count: int, of_micro: int, more: float) -> float:
        """All passes of a stage, and one of each stage before it, forward until its first and backward after its
        last."""
        before = most = 0.0
        stages = self._of_stages(cell)
        for number, (first, every) in enumerate(stages):
            own = sum(number * row.layers[kind] for kind, number in every.items())
            own += row.before * (number == 0) + row.behind * (number == len(stages) - 1)
            most = max(most, before + count * (own * of_micro + more * sum(every.values())))
            before += sum(number * row.layers[kind] for kind, number in first.items()) * of_micro
        return most

    def _of_row(self, cell: LayoutCell, saving: Saving) -> RowSeconds:
        group = cell.group
        split = group.tensor, group.sequence, group.expert, group.expert_tensor
        key = (*split, _saved(saving))
        if key not in self._rows:
            asked = self.space.layout(cell, saving)
            size = max(1, LARGE // asked.model.sequence_length)
            large = {"training.micro_batch_size": size, "training.global_batch_size": size * self.space.world_size}
            apart = {"parallel.context": 1, "parallel.context_heads": None, "training.activation_offload": "none"}
            whole = {"parallel.pipeline": 1, "parallel.virtual_pipeline": None, "optimizer.state_device": "device"}
            assert self.rows is not None
            self._rows[key] = self.rows(with_keys(asked, {**large, **apart, **whole, "optimizer.engine": "auto"}))
        return self._rows[key]

    def _of_stages(self, cell: LayoutCell) -> Stages:
        key = cell.group.pipeline, cell.chunks
        if key not in self._stages:
            config = with_keys(
                self.space.config, {"parallel.pipeline": cell.group.pipeline, "parallel.virtual_pipeline": cell.chunks}
            )
            slides, found = derived.window_pattern(config), []
            for of_stage in parts(config):
                kinds = [
                    Counter((kind, slides[number]) for number, kind in enumerate(part.layers, part.first_layer))
                    for part in of_stage
                ]
                found.append((kinds[0], sum(kinds[1:], kinds[0].copy())))
            self._stages[key] = found
        return self._stages[key]

    def _context_seconds(self, cell: LayoutCell, heads: int | None) -> float:
        """What context ranks wait for each other in a layer, with a micro-batch."""
        config = with_keys(self.space.config, {"parallel.tensor": cell.group.tensor})
        numbers = [heads] if heads else [n for n in range(1, cell.group.context + 1) if cell.group.context % n == 0]
        return min(self._exchanged(config, cell, number) for number in numbers)

    def _exchanged(self, config: Config, cell: LayoutCell, heads: int) -> float:
        model, tensor, context = config.model, cell.group.tensor, cell.group.context
        if model.attention == "latent":
            return 0.0
        element, size = derived.element_size(config), derived.head_dim(config)
        queries, keys = derived.heads_of_tensor_rank(config)
        rows, node = cell.micro * model.sequence_length / context, int(self.hardware["ranks_per_node"])
        swapped = 0.0
        if heads > 1:
            width = 2 * size * (queries + max(keys, heads)) * element
            here = min(heads, max(1, node // tensor))
            swapped = 2 * rows * width * self._a_byte(heads, here) * (heads - 1) / heads
        places = context // heads
        spread = places / cell.micro  # places that a sample lies on
        if spread <= 1:
            return swapped
        arrives = ATTENDED * model.sequence_length * (1 - 1 / spread) * 2 * size * max(keys // heads, 1) * element
        here = min(context, max(1, node // tensor))
        attention = 4 * size * queries * rows * model.sequence_length / self._attention_rate(config)
        return swapped + max(0.0, arrives * self._a_byte(context, here) - attention)

    def _attention_rate(self, config: Config) -> float:
        return self.hardware["products.fp32" if config.training.precision == "fp32" else "attention.half"]

    def _a_byte(self, size: int, here: int) -> float:
        """Seconds of a byte of what a rank sends to others alike, at least: the cards are its own."""
        inside, card = 1 / self.hardware["inside.rate"], 1 / self.hardware["between.rate"]
        away = (size - here) / (size - 1)
        return max(away * card, (1 - away) * inside)


def _saved(saving: Saving) -> Hashable:
    """What of it a row's seconds depend on."""
    return saving.recompute, saving.offload, saving.degree, saving.backward_degree, saving.strategy
