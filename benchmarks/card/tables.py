"""The results as Markdown: a section for each kind of card, a table for each kind of rung."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.card import records
from benchmarks.card.ladder import Row
from benchmarks.card.records import Record, Records
from benchmarks.kit.tables import table

NONE = "No card has climbed the ladder yet.\n"
MEANINGLESS = ("CPU", "pretended")  # devices whose times mean nothing
Cell = Callable[[Row], str]


def _number(name: str, shown: str, scale: float = 1.0) -> Cell:
    def cell(row: Row) -> str:
        value = row.get(name)
        if not isinstance(value, (int, float)):
            return "-" if value is None else str(value)
        return format(value if scale == 1.0 else scale * value, shown)

    return cell


def _text(name: str) -> Cell:
    return lambda row: str(row.get(name, ""))


# Title, the key that its rows alone have, and headings with cells.
TABLES: tuple[tuple[str, str, tuple[tuple[str, Cell], ...]], ...] = (
    (
        "Training",
        "tokens_s",
        (
            ("model", _text("model")),
            ("system", _text("system")),
            ("tokens a step", _number("tokens", ",d")),
            ("step s", _number("step_s", ".4f")),
            ("tokens/s", _number("tokens_s", ",.0f")),
            ("TFLOP/s", _number("tflops", ".1f")),
            ("MFU", _number("mfu", ".1%")),
            ("peak GiB", _number("peak_gib", ".2f")),
            ("busy", _number("busy", ".1%")),
            ("launches a layer", _number("launches_a_layer", ".0f")),
            ("what", _text("note")),
        ),
    ),
    (
        "Rivals' time by ours, in turns",
        "ratio_of",
        (
            ("model", _text("model")),
            ("system", _text("ratio_of")),
            ("their time by ours", _number("their_time_by_ours", ".3f")),
            ("two standard errors", _number("two_errors", ".3f")),
        ),
    ),
    (
        "One MoE layer",
        "layer",
        (
            ("layer", _text("layer")),
            ("system", _text("system")),
            ("ms", _number("ms", ".3f")),
            ("TFLOP/s", _number("tflops", ".1f")),
            ("MFU", _number("mfu", ".1%")),
            ("their time by ours", _number("their_time_by_ours", ".3f")),
            ("peak GiB", _number("peak_gib", ".2f")),
            ("busy", _number("busy", ".1%")),
            ("kernels", _number("kernels", "d")),
            ("difference", _number("difference", ".1e")),
        ),
    ),
    (
        "Kernels with most time",
        "kernel",
        (
            ("model", _text("model")),
            ("kernel", lambda row: f"`{row['kernel'][:90]}`"),
            ("calls", _number("calls", "d")),
            ("ms", _number("ms", ".2f")),
            ("share", _number("share", ".1%")),
        ),
    ),
    (
        "Gaps of more than 20 microseconds",
        "line",
        (
            ("model", _text("model")),
            ("launched by", lambda row: f"`{row['line']}`"),
            ("before", lambda row: f"`{row['before'][:60]}`"),
            ("gaps", _number("gaps", "d")),
            ("ms", _number("ms", ".2f")),
            ("longest µs", _number("longest_us", ".0f")),
        ),
    ),
    (
        "Copies of pinned memory",
        "copies",
        (("copies", _text("copies")), ("GB/s", _number("gb_s", ".1f")), ("MiB", _number("mib", ".0f"))),
    ),
    (
        "Kept on the host",
        "off_device",
        (
            ("model", _text("model")),
            ("what", _text("off_device")),
            ("step s", _number("step_s", ".4f")),
            ("all on the device s", _number("resident_s", ".4f")),
            ("GB up", _number("gb_up", ".2f")),
            ("GB down", _number("gb_down", ".2f")),
            ("bound s", _number("bound_s", ".4f")),
            ("over the bound", _number("over_bound", "+.1%")),
            ("peak GiB", _number("step_peak_gib", ".2f")),
        ),
    ),
    (
        "The clock",
        "clock_s",
        (
            ("model", _text("model")),
            ("used", _text("used")),
            ("measured s", _number("measured_s", ".4f")),
            ("clock s", _number("clock_s", ".4f")),
            ("error", _number("error", "+.1%")),
            ("with figures as stated", _number("error_as_stated", "+.1%")),
        ),
    ),
    (
        "Generation",
        "decode_tokens_s",
        (
            ("model", _text("model")),
            ("weights on the device", _number("share_on_device", ".0%")),
            ("batch", _number("batch", "d")),
            ("prompt", _number("prompt", "d")),
            ("first token s", _number("prefill_s", ".3f")),
            ("tokens/s after it", _number("decode_tokens_s", ",.1f")),
        ),
    ),
    (
        "The longest context",
        "length",
        (
            ("system", _text("system")),
            ("what", _text("what")),
            ("row", _text("row")),
            ("tokens", _number("length", ",d")),
            ("peak GiB", _number("peak", ".2f", 2.0**-30)),
            ("step s", lambda row: f"{row['seconds'][-1]:.2f}" if row.get("seconds") else "-"),
            ("tokens/s", _number("tokens_per_second", ",.0f")),
        ),
    ),
)


def page(kept: Records) -> str:
    """Return all results, by kind of card."""
    cards = list(dict.fromkeys(record.card for record in kept))
    return "\n".join(_section(card, [record for record in kept if record.card == card]) for card in cards) or NONE


def _section(card: str, found: Sequence[Record]) -> str:
    last = found[-1].machine
    about = ", ".join(f"{name} {last[name]}" for name in sorted(last) if name != "device")
    lines = [f"## {card}", "", f"{about}."]
    if card.startswith(MEANINGLESS) or card.endswith("tiny sizes"):
        lines += ["", "**Every time here is meaningless.**"]
    tested = [row for record in found for row in record.rows if "test" in row]
    if tested:
        outcomes = {row["test"]: row["outcome"] for row in tested}
        counts = {each: list(outcomes.values()).count(each) for each in sorted(set(outcomes.values()))}
        lines += ["", f"Tests marked gpu: {', '.join(f'{count} {name}' for name, count in counts.items())}."]
    good = [row for record in found if record.status == records.WELL for row in record.rows]
    for title, key, columns in TABLES:
        titled = [row for row in good if key in row]
        if titled:
            headings, cells = (
                [heading for heading, _ in columns],
                [[cell(row) for _, cell in columns] for row in titled],
            )
            lines += ["", f"### {title}", "", table(headings, cells, markdown=True)]
    ends = [
        [each.rung, each.status, each.commit, each.renews or "", f"{each.seconds:.0f}", each.note] for each in found
    ]
    headings = ["rung", "ended", "commit", "renews", "seconds", "note"]
    lines += ["", "### Rungs", "", table(headings, [[_escaped(cell) for cell in row] for row in ends], markdown=True)]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
