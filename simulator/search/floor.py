"""Lower bounds of the step seconds of layouts: computation per sequence row, and waiting in the pipeline.

A row takes least time in a large micro-batch, so one timing bounds all micro-batch sizes, stages and model chunks.
Exchanges of heads between context ranks are not overlapped, exchanges of keys and values overlap attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from configs import derived
from configs.schema import Config
from models.blueprint import model_chunks
from simulator.clock.hardware import Hardware
from simulator.clock.streams import least_streamed_seconds
from simulator.search.space import LayoutCell, LayoutSpace, Saving, with_keys
from simulator.search.timer import LayerKind, RowSeconds

LARGE = 2**24  # tokens of a micro-batch with which start-up times are negligible
ATTENDED = 0.5  # least share of other context ranks' rows to which a rank's queries attend

Stages = list[tuple[Counter[LayerKind], Counter[LayerKind]]]  # of each stage: layers of its first chunk, and of all


class LayoutFloor:
    """Computes lower bounds of the step seconds of layouts.

    `row_seconds`: predicts the seconds per sequence row of a config; None: all bounds are 0.
    """

    def __init__(
        self, space: LayoutSpace, hardware: Hardware, row_seconds: Callable[[Config], RowSeconds] | None
    ) -> None:
        self.space, self.hardware, self.row_seconds = space, hardware, row_seconds
        self._row_seconds: dict[Hashable, RowSeconds] = {}
        self._stages: dict[Hashable, Stages] = {}
        self._streamed: dict[Hashable, float] = {}

    def seconds(self, cell: LayoutCell, savings: list[Saving], heads: int | None = None) -> float:
        """Return a lower bound of a layout's step seconds with any of these memory savings.

        `heads`: number of context ranks that exchange heads; None: any number.
        """
        group = cell.group
        if self.row_seconds is None or (group.context > 1 and self.space.job.device == "cpu"):
            return 0.0  # a CPU computes attention differently with context ranks
        more = 0.0  # seconds per layer and micro-batch in which context ranks wait for each other
        if group.context > 1:
            config = with_keys(self.space.config, {"parallel.tensor": group.tensor})
            numbers = [heads] if heads else [n for n in range(1, group.context + 1) if group.context % n == 0]
            more = min(self._exchanged(config, cell, number) for number in numbers)
        each = self._micro_batches(cell)
        return min(self._step(cell, self._of_row(cell, saving), *each, more) for saving in savings)

    def closer(self, cell: LayoutCell, saving: Saving) -> float | None:
        """Return a lower bound of one candidate's step seconds; None if the seconds per sequence row are not predicted.

        The bound follows from the seconds per row with its micro-batch size, and from its transfers of experts.
        """
        if self.row_seconds is None:
            return None
        group = cell.group
        key = replace(group, pipeline=1), cell.heads, cell.micro, _recomputed(saving)
        if key not in self._row_seconds:
            self._row_seconds[key] = self.row_seconds(self.space.layout(cell, saving))
        seconds = self._step(cell, self._row_seconds[key], *self._micro_batches(cell), 0.0)
        return max(seconds, self.streamed(cell, [saving]))

    def streamed(self, cell: LayoutCell, savings: Sequence[Saving]) -> float:
        """Return a lower bound of step seconds from expert transfers; 0 if a saving keeps experts on the device."""
        if self.row_seconds is None or not all(each.streams for each in savings):
            return 0.0
        bounds = []
        for own, saving in {
            (each.weights_device, each.pass_order, each.state_device): each for each in savings
        }.items():
            key = cell.group, cell.chunks, cell.micro, own
            if key not in self._streamed:
                config = self.space.layout(cell, saving)
                self._streamed[key] = least_streamed_seconds(config, self.space.world_size, self.hardware)
            bounds.append(self._streamed[key])
        return min(bounds)

    def _micro_batches(self, cell: LayoutCell) -> tuple[int, int]:
        """Return the number of micro-batches per rank and step, and a rank's sequence rows per micro-batch."""
        group, config = cell.group, self.space.config
        replicas = self.space.world_size // (group.tensor * group.pipeline * group.context)
        count = config.training.global_batch_size // (replicas * cell.micro)
        return count, cell.micro * config.model.sequence_length // group.context

    def _step(self, cell: LayoutCell, row: RowSeconds, count: int, of_micro: int, more: float) -> float:
        """Return the slowest stage's seconds: all its passes, and one micro-batch's passes of the stages before it.

        `row`: seconds per sequence row. `count`: number of micro-batches, of `of_micro` sequence rows each. `more`:
        seconds to add per layer and micro-batch.
        """
        before = most = 0.0
        stages = self._of_stages(cell)
        for number, (first, every) in enumerate(stages):
            own = sum(number * row.layers[kind] for kind, number in every.items())
            own += row.before * (number == 0) + row.after * (number == len(stages) - 1)
            most = max(most, before + count * (own * of_micro + more * sum(every.values())))
            before += sum(number * row.layers[kind] for kind, number in first.items()) * of_micro
        return most

    def _of_row(self, cell: LayoutCell, saving: Saving) -> RowSeconds:
        group = cell.group
        key = group.tensor, group.sequence, group.expert, group.expert_tensor, _recomputed(saving)
        if key not in self._row_seconds:
            asked = self.space.layout(cell, saving)
            size = max(1, LARGE // asked.model.sequence_length)
            large = {"training.micro_batch_size": size, "training.global_batch_size": size * self.space.world_size}
            unshared = {"parallel.context": 1, "parallel.context_heads": None, "training.activation_offload": "none"}
            whole = {"parallel.pipeline": 1, "parallel.virtual_pipeline": None, "optimizer.state_device": "device"}
            assert self.row_seconds is not None
            plain = with_keys(asked, {**large, **unshared, **whole, "optimizer.engine": "auto"})
            self._row_seconds[key] = self.row_seconds(plain)
        return self._row_seconds[key]

    def _of_stages(self, cell: LayoutCell) -> Stages:
        key = cell.group.pipeline, cell.chunks
        if key not in self._stages:
            sizes = dict(zip(("parallel.pipeline", "parallel.virtual_pipeline"), key, strict=True))
            config = with_keys(self.space.config, sizes)
            slides, found = derived.window_pattern(config), []
            for of_stage in model_chunks(config):
                kinds = [
                    Counter((kind, slides[number]) for number, kind in enumerate(chunk.layers, chunk.first_layer))
                    for chunk in of_stage
                ]
                found.append((kinds[0], sum(kinds[1:], kinds[0].copy())))
            self._stages[key] = found
        return self._stages[key]

    def _exchanged(self, config: Config, cell: LayoutCell, heads: int) -> float:
        model, tensor, context = config.model, cell.group.tensor, cell.group.context
        if model.attention == "latent":
            return 0.0
        element, size = derived.element_size(config), derived.head_dim(config)
        queries, keys = derived.heads_of_tensor_rank(config)
        sequence_rows, node = cell.micro * model.sequence_length / context, int(self.hardware["ranks_per_node"])
        swapped = 0.0
        if heads > 1:
            width = 2 * size * (queries + max(keys, heads)) * element
            here = min(heads, max(1, node // tensor))
            swapped = 2 * sequence_rows * width * self._seconds_per_byte(heads, here) * (heads - 1) / heads
        spread = context // heads / cell.micro  # groups of ranks with exchanged heads that share one sample
        if spread <= 1:
            return swapped
        arrives = ATTENDED * model.sequence_length * (1 - 1 / spread) * 2 * size * max(keys // heads, 1) * element
        here = min(context, max(1, node // tensor))
        rate = self.hardware["products.fp32" if config.training.precision == "fp32" else "attention.half"]
        attention = 4 * size * queries * sequence_rows * model.sequence_length / rate
        return swapped + max(0.0, arrives * self._seconds_per_byte(context, here) - attention)

    def _seconds_per_byte(self, size: int, here: int) -> float:
        """Return a lower bound of the seconds per byte that a rank sends evenly to `size` - 1 others.

        `here` - 1 of the others are in its node. No other rank is assumed to use the node's network card.
        """
        inside, card = 1 / self.hardware["inside.rate"], 1 / self.hardware["between.rate"]
        away = (size - here) / (size - 1)
        return max(away * card, (1 - away) * inside)


def _recomputed(saving: Saving) -> Hashable:
    """Return the fields of a `Saving` that the seconds per sequence row depend on."""
    return saving.recompute, saving.offload, saving.degree, saving.backward_degree, saving.strategy
