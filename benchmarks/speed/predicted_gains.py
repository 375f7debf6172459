"""Predicted gains of the planner's degrees over many MoE layers, in the manner of PipeMoE (Shi et al., INFOCOM 2023).

`python -m benchmarks.speed.predicted_gains [--json] [--markdown]`

Predictions, not measurements: every time is evaluated from alpha-beta models with the constants that PipeMoE's authors
published with their code (Fragile-azalea/PipeMoE, solver.py): RTX 2080 Ti in fp32, startup 1.5e-4 s of a matrix product
and 1.49e-13 s per multiply-add (3.73e-14 times 4, as they count); all-to-all over 100 Gbit/s InfiniBand, startup and
seconds per byte for 16, 32 and 64 GPUs. The paper evaluates 174 layers, whose list is not published; so here is the
full product of typical batches, lengths, hidden sizes and their multiples, GPUs, top-k and capacity factors, without
the layers that do not fit the card's 11 GiB. One expert a GPU, balanced.

Gains over one chunk, over two chunks everywhere (FasterMoE), and over the constant degree of 1, 2, 4, 8 that is best
over all layers (what a tuned constant, as in Tutel, can reach at most). Once for this project's schedule, forward and
backward, weight gradients included; once for PipeMoE's own order, forward, by its closed form.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moe.chunk_plan import LayerLoad, Plan
from moe.planning.costs import DEGREES, LayerCosts, Limits
from moe.planning.planner import best_plan, predict, weight_lags
from parallel.costs.models import NOTHING, Curve, Line


def closed_form_seconds(exchange: Line, compute: Line, size: float, work: float, degree: int) -> float:
    """PipeMoE's time of a forward pass in its order: all dispatches, then all combines as their chunks are computed.

    `size` bytes are exchanged each way and `work` is computed, in `degree` equal chunks. It has four cases: one chunk;
    communication takes longer throughout (dispatch never waits for computation); computation does; or the chunks'
    computation is longer, but over before all that must be sent first is sent.
    """
    send, experts = exchange.alpha + exchange.beta * size / degree, compute.alpha + compute.beta * work / degree
    if degree == 1:
        return 2 * send + experts
    if send >= experts or degree * experts < 2 * (degree - 1) * send:
        return 2 * degree * send
    return 2 * send + degree * experts


def closed_form_degree(exchange: Line, compute: Line, size: float, work: float, max_degree: int) -> int:
    """The degree from 1 to `max_degree` with the least `closed_form_seconds`, the lowest of equals, without trying them
    all.

    Where communication takes longer, time grows with the degree, so the lowest degree of each such range is its best;
    where computation does, time falls until sqrt(2 * exchange time / startup of computation) and grows beyond. So the
    best stands at that number or where the cases meet. (The authors' program rounds their roots, which can lead out of
    the case's range, and divides by the difference of startups whatever its sign.)
    """
    a, b = exchange.alpha, exchange.beta * size
    e, f = compute.alpha, compute.beta * work
    roots: list[float] = []
    if e > 0:
        roots.append(math.sqrt(2 * b / e))
    if a != e:  # a + b / r = e + f / r
        roots.append((f - b) / (a - e))
    # r (e + f / r) = 2 (r - 1) (a + b / r)
    square, linear, constant = 2 * a - e, 2 * b - 2 * a - f, -2 * b
    if square == 0:
        if linear != 0:
            roots.append(-constant / linear)
    elif (inside := linear * linear - 4 * square * constant) >= 0:
        roots.extend((-linear + sign * math.sqrt(inside)) / (2 * square) for sign in (1.0, -1.0))
    around = [math.floor(min(max(root, 0.0), max_degree)) + step for root in roots for step in (-1, 0, 1, 2)]
    candidates = {degree for degree in (1, 2, max_degree, *around) if 1 <= degree <= max_degree}
    return min(candidates, key=lambda degree: (closed_form_seconds(exchange, compute, size, work, degree), degree))


GEMM = Line(1.5e-4, 3.73e-14)  # over 4 times the multiply-adds of one matrix product, as the authors count
# over bytes, by GPUs
ALL_TO_ALL = {16: Line(5.70e-4, 2.96e-10), 32: Line(2.09e-4, 3.55e-10), 64: Line(7.83e-4, 3.84e-10)}
FLOAT = 4  # bytes
CARD = 11 * 2**30  # bytes of an RTX 2080 Ti
CONSTANTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Layer:
    """PipeMoE's parameters: B, L, M, H, P, k, f."""

    batch: int  # samples per GPU
    length: int
    hidden: int
    ffn: int
    gpus: int
    top_k: int
    capacity: float  # 1.2: room for 1.2 times the even share, all of it sent and computed

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def token_rows(self) -> int:
        """Rows that a GPU sends and computes."""
        return int(self.top_k * self.capacity * self.tokens)

    def fits(self) -> bool:
        """Expert with gradient and Adam's two moments, and the layer's activations (MPipeMoE's count: 4 T M + T H,
        twice)."""
        states = 4 * 2 * self.hidden * self.ffn
        activations = 2 * self.token_rows * (4 * self.hidden + self.ffn)
        return FLOAT * (states + activations) <= CARD

    def load(self) -> LayerLoad:
        return LayerLoad(
            tokens=self.tokens,
            token_rows=self.token_rows,
            away_rows=self.token_rows,  # the published times are for all bytes, a GPU's own among them
            assignments=self.token_rows,
            hidden_size=self.hidden,
            hidden_columns=self.ffn,
            width=self.ffn,
            element_size=FLOAT,
        )

    def products(self) -> Line:
        """The time of the expert's two matrix products over rows."""
        return Line(2 * GEMM.alpha, 2 * GEMM.beta * 4 * self.hidden * self.ffn)

    def costs(self) -> LayerCosts:
        """As the published models have it: nothing but all-to-alls and matrix products, which do not slow each other
        down."""
        line = self.products()
        experts = Curve((1.0, 2.0), (line(1), line(2)))
        return LayerCosts(
            exchange=ALL_TO_ALL[self.gpus],
            gather=NOTHING,
            combine_sum=NOTHING,
            forward=experts,
            recompute=experts,
            input_gradients=experts,
            weight_gradients=experts,
        )


def all_layers() -> list[Layer]:
    """The grid, without what does not fit the card."""
    grid = itertools.product(
        (1, 2, 4, 8), (512, 1024, 2048), (1024, 2048, 4096), (1, 2, 4), (16, 32, 64), (1, 2), (1.0, 1.2)
    )
    layers = [Layer(batch, length, hidden, times * hidden, *rest) for batch, length, hidden, times, *rest in grid]  # type: ignore[arg-type]
    return [layer for layer in layers if layer.fits()]


def own_times(layer: Layer) -> tuple[dict[int, float], float, int]:
    """This project's schedule: seconds of both passes by constant degree (best lag), of the planner's choice, and its
    degree."""
    costs, load = layer.costs(), layer.load()

    def seconds(plan: Plan) -> float:
        prediction = predict(costs, load, plan)
        return prediction.forward + prediction.backward

    constant = {
        degree: min(seconds(Plan(degree, degree, "keep", lag)) for lag in weight_lags(degree)) for degree in CONSTANTS
    }
    plan = best_plan(costs, load, Limits(strategies=("keep",))).plan
    return constant, seconds(plan), plan.degree


def pipemoe_times(layer: Layer) -> tuple[dict[int, float], float, int]:
    """PipeMoE's order, forward: the same by its closed form."""
    exchange, compute = ALL_TO_ALL[layer.gpus], layer.products()
    size = layer.token_rows * layer.hidden * FLOAT

    def seconds(degree: int) -> float:
        return closed_form_seconds(exchange, compute, size, layer.token_rows, degree)

    degree = closed_form_degree(exchange, compute, size, layer.token_rows, max(DEGREES))
    return {constant: seconds(constant) for constant in CONSTANTS}, seconds(degree), degree


def summarize(
    layers: Sequence[Layer], times_of: Callable[[Layer], tuple[dict[int, float], float, int]]
) -> dict[str, Any]:
    """Predicted gains (time of the constant by time of the choice) over all layers, and how often each degree is
    chosen."""
    times = [times_of(layer) for layer in layers]
    mean = {
        degree: statistics.fmean(constant[degree] / planned for constant, planned, _ in times) for degree in CONSTANTS
    }
    best = min(CONSTANTS, key=lambda degree: mean[degree])
    gains = {}
    for name, degree in (
        ("one chunk", 1),
        ("two chunks (FasterMoE)", 2),
        (f"best constant ({best}; Tutel at most)", best),
    ):
        ratios = sorted(constant[degree] / planned for constant, planned, _ in times)
        gains[name] = {
            "mean": statistics.fmean(ratios),
            "median": statistics.median(ratios),
            "largest": ratios[-1],
            "smallest": ratios[0],
            "share_over_5_percent": statistics.fmean(ratio > 1.05 for ratio in ratios),
        }
    degrees = Counter(degree for *_, degree in times)
    return {
        "predicted_gain_over": gains,
        "predicted_degrees": {str(degree): degrees[degree] for degree in sorted(degrees)},
    }


def table(title: str, summary: dict[str, Any], markdown: bool) -> str:
    """The gains of one schedule as text or Markdown."""
    head = ["predicted gain over", "mean", "median", "smallest", "largest", "layers over 1.05"]
    table_rows = [
        [
            name,
            *(f"{gain[key]:.3f}" for key in ("mean", "median", "smallest", "largest")),
            f"{gain['share_over_5_percent']:.0%}",
        ]
        for name, gain in summary["predicted_gain_over"].items()
    ]
    chosen = "Predicted best degrees (forward): " + ", ".join(
        f"{degree} ({count})" for degree, count in summary["predicted_degrees"].items()
    )
    if markdown:
        lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in table_rows), "", chosen + "."])
    widths = [max(len(row[i]) for row in [head, *table_rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *table_rows]
    ]
    return "\n".join([title, *lines, chosen])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    layers = all_layers()
    titles = {
        "own": f"Prediction: this schedule, forward and backward, {len(layers)} layers",
        "pipemoe": f"Prediction: PipeMoE's order, forward, {len(layers)} layers",
    }
    summaries = {"own": summarize(layers, own_times), "pipemoe": summarize(layers, pipemoe_times)}
    print("\n\n".join(table(titles[name], summary, arguments.markdown) for name, summary in summaries.items()))
    if arguments.json:
        print(json.dumps({"kind": "prediction", "layers": len(layers), **summaries}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
