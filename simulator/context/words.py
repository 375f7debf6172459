"""What a plan says of sequences that ranks share; and numbers in words, and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from simulator.context.rows import SharedRows
from simulator.context.sizes import ContextSize, context_sizes, layer_exchange
from simulator.run_plan import RunPlan

UNKNOWN = ", were samples of one document (the corpus is not prepared)"
LONG = 2**15  # tokens of a micro-batch: from here on a plan says what context ranks would do


def size(num_bytes: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes:.0f} B"


def count(number: float) -> str:
    """A number with the letter of its power of a thousand."""
    for unit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return f"{number:.3g} "


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of right-aligned columns."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    lines = [
        "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [headings, *rows]
    ]
    return "\n".join(lines)


def context_in_words(plan: RunPlan) -> str:
    """How a micro-batch's rows are shared, and which sizes of context there are; empty where samples are short and not
    shared."""
    config, shared = plan.config, plan.shared
    tokens = config.training.micro_batch_size * config.model.sequence_length
    if shared.context == 1 and tokens < LONG:
        return ""
    lines = _sharing(plan, shared, tokens) if shared.context > 1 else []
    given = config, plan.vocab_size, plan.world_size, plan.device, plan.attended_share, plan.documents
    sizes = context_sizes(*given)
    if len(sizes) > 1:
        lines += _choices(plan, sizes)
    return "\n".join(lines)


def _sharing(plan: RunPlan, shared: SharedRows, tokens: int) -> list[str]:
    sent = layer_exchange(plan.config, shared)
    who = f"they exchange heads for rows in {shared.places} place(s) of {shared.heads}"
    who = who if shared.heads > 1 else "they exchange keys and values alone"
    lines = [f"Context: {shared.context} ranks share {tokens:,} rows of a micro-batch, {shared.rows:,} each; {who}"]
    lines.append(
        f"  a rank sends {size(sum(sent.values()))} for a layer's attention and a micro-batch, forward and backward: "
        f"heads {size(sent['heads'])}, keys and values with their gradients {size(sent['rounds'])}"
    )
    if shared.places > 1 and not any(shared.of_layer):
        by = "" if shared.is_known else UNKNOWN
        lines.append(f"  documents stay whole on their places{by}: no keys and values are sent")
    elif shared.places > 1:
        low, high = min(shared.of_layer), max(shared.of_layer)
        by = ", by the documents' lengths" if plan.config.data.documents == "separate" else ""
        by = by if shared.is_known else UNKNOWN
        lines.append(
            f"  attention takes up to {shared.rounds} round(s); a place of {shared.rows * shared.heads:,} rows is sent "
            f"keys and values of {low:,.0f} to {high:,.0f} others{by}"
        )
    return lines


def _choices(plan: RunPlan, sizes: Sequence[ContextSize]) -> list[str]:
    """A table of the sizes, and which one pays."""
    timed = sizes[0].seconds is not None
    headings = ["parallel.context", "heads", "rows", "sent a layer", "B/kFLOP", "a rank needs"]
    rows = []
    fits = [each.context for each in sizes if each.memory <= plan.rooms.device]
    for each in sizes:
        row = [str(each.context), str(each.heads), f"{each.rows:,}", size(each.sent), f"{each.ratio:.3g}"]
        row.append(size(each.memory))
        if each.seconds is not None:
            row += [f"{seconds:.3g}" for seconds in each.seconds]
        marks = ["this plan"] * (each.context == plan.config.parallel.context)
        marks += ["does not fit"] * (each.context not in fits)
        rows.append([*row, f"<- {', '.join(marks)}" if marks else ""])
    headings += ["exchange s", "attention s"] if timed else []
    lines = ["Sizes of context (an exchange is for a layer's attention and a micro-batch, on one rank):"]
    lines.append(table([*headings, ""], rows))
    if fits:
        least = min((each for each in sizes if each.context in fits), key=lambda each: (each.ratio, each.context))
        that = "that fits " if math.isfinite(plan.rooms.device) else ""
        pays = f"parallel.context={least.context} pays most: no other {that}exchanges less for as much work."
    else:
        pays = "None of them fits."
    if not timed:
        pays += " Attention hides an exchange whose B/kFLOP is under 1000 x bytes/s of the link / FLOP/s of the device."
    return [*lines, f"  {pays}"]
