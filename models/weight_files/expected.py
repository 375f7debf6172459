"""Names and shapes of a model's logical weights, from its config, and a check that boxes cover a matrix. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from configs.schema import Config
from models.blueprint import weights, whole_model

EXPERTS = ".mlp.experts."  # precedes the number of a routed expert
# Endings of names of weights that stay in fp32 in every precision: a router adds them to its scores, which are fp32.
FP32_NAMES = ("router.expert_bias",)
Box = tuple[int, int, int, int]  # of a matrix: first row, first column, end of the rows, end of the columns


def logical_shapes(config: Config, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every logical weight by its name, in the order of Megatron-core's modules. Each routed expert
    has its own entries."""
    found: dict[str, tuple[int, ...]] = {}
    for name, weight in weights(config, vocab_size, whole_model(config)):
        if weight.is_expert:
            layer, _, rest = name.partition(EXPERTS)
            found |= {f"{layer}{EXPERTS}{expert}.{rest}": weight.shape[1:] for expert in range(weight.shape[0])}
        else:
            found[name] = weight.shape
    return found


def wrong_cover(boxes: Iterable[Box], num_rows: int, num_columns: int) -> str | None:
    """Return an error text if boxes (rectangles of a matrix) do not cover each of its elements exactly once, else
    None."""
    active: list[Box] = []
    covered = 0
    for box in sorted(box for box in boxes if box[0] < box[2] and box[1] < box[3]):
        if box[0] < 0 or box[1] < 0 or box[2] > num_rows or box[3] > num_columns:
            shape = f"[{num_rows}, {num_columns}]"
            return f"rows {box[0]} to {box[2]} and columns {box[1]} to {box[3]} are outside its shape {shape}"
        active = [other for other in active if other[2] > box[0]]
        if any(box[1] < other[3] and other[1] < box[3] for other in active):
            return f"row {box[0]} is stored twice"
        active.append(box)
        covered += (box[2] - box[0]) * (box[3] - box[1])
    total = num_rows * num_columns
    return None if covered == total else f"only {covered} of its {total} numbers are stored"
