"""Charts over the steps, tables of validation losses by bucket, and measured memory next to the planned memory."""

from __future__ import annotations

from typing import Any

from training.report.metrics import scalars
from training.report.sources import Line, RunFiles, finite

MAX_STEPS = 2000  # points per curve
OTHER_LOSSES = (
    "aux_loss",
    "sequence_aux_loss",
    "global_aux_loss",
    "z_loss",
    "sentence_loss",
    "validation_sentence_loss",
)
# Sections in order, and their charts: (title, unit, logarithmic, [(key in metrics.jsonl, name)]). A key that ends in /
# stands for all keys with this prefix, a key with * for all that match.
Chart = tuple[str, str, bool, list[tuple[str, str]]]
CURVES: dict[str, list[Chart]] = {
    "loss": [
        (
            "Loss",
            "loss, nats",
            False,
            [
                ("loss", "training"),
                ("validation_loss", "validation"),
                ("valid/*/loss", "validation"),
                ("unigram_entropy", "unigram entropy"),
            ],
        ),
        ("Gradient norm", "gradient norm", True, [("grad_norm", "total"), ("grad_norm_by_part/", "")]),
        ("Learning rate", "learning rate", False, [("learning_rate", "learning rate")]),
        (
            "Other losses",
            "loss, nats; auxiliary: no unit",
            False,
            [
                *((key, key.replace("_", " ")) for key in OTHER_LOSSES),
                ("valid/*/sentence_loss", "sentence loss"),
            ],
        ),
    ],
    "speed": [
        ("Tokens per second", "tokens/s", False, [("tokens_per_second", "tokens per second")]),
        ("Time of a step", "seconds", False, [("step_seconds", "step"), ("step_seconds_percentiles/", "")]),
        ("Waiting for data", "seconds", False, [("data_wait_seconds", "waiting for data")]),
        ("Model FLOPs utilization", "FLOP/s, share of the peak", False, [("mfu", "MFU")]),
    ],
    "placement": [
        (
            "Load of the busiest rank",
            "assignments, divided by the mean rank's",
            False,
            [("placement/at_home", "without placement"), ("placement/placed", "with placement")],
        ),
        (
            "Gain of placement",
            "time or rows without placement, divided by those with it",
            False,
            [("placement/predicted_gain", "predicted"), ("placement/measured_gain", "measured, in rows")],
        ),
        (
            "Replicas and moves",
            "number of experts",
            False,
            [("placement/copies", "replicas that were sent"), ("placement/moved", "primaries that moved")],
        ),
    ],
    "tiers": [
        (
            "Experts' weights and gradients that a step of rank 0 moves",
            "bytes",
            False,
            [
                ("expert_tiers/up", "to the device"),
                ("expert_tiers/down", "from the device"),
                ("expert_tiers/read", "read from the disk"),
                ("expert_tiers/written", "written to the disk"),
            ],
        ),
        (
            "Waiting for experts' weights, rank 0",
            "seconds",
            False,
            [("expert_tiers/wait_seconds", "waiting for weights")],
        ),
        (
            "Experts off the device, rank 0",
            "bytes",
            False,
            [
                ("expert_tiers/weights_host", "weights, host"),
                ("expert_tiers/gradients_host", "gradients, host"),
                ("expert_tiers/staging_host", "staging, host"),
                ("expert_tiers/weights_disk", "weights, disk"),
                ("expert_tiers/gradients_disk", "gradients, disk"),
            ],
        ),
    ],
}
MISSING = {
    "Other losses": "No auxiliary losses: the model is dense, or their coefficients are 0.",
    "Model FLOPs utilization": "No MFU: the peak of this device is not known. Set logging.peak_tflops.",
}


def thin(metrics: list[Line], most: int = MAX_STEPS) -> list[Line]:
    """Return at most `most` of the lines of metrics: the first, the last, and from each window of steps the lines with
    the lowest loss, the highest loss and the longest step time."""
    if len(metrics) <= most:
        return metrics
    losses, times = ([finite(line.get(key)) or 0.0 for line in metrics] for key in ("loss", "step_seconds"))
    count, keep = (most - 2) // 3, {0, len(metrics) - 1}
    for i in range(count):
        window = range(i * len(metrics) // count, (i + 1) * len(metrics) // count)
        keep |= {
            min(window, key=losses.__getitem__),
            max(window, key=losses.__getitem__),
            max(window, key=times.__getitem__),
        }
    return [metrics[j] for j in sorted(keep)]


def plain(line: Line) -> dict[str, float | None]:
    """Return the numbers of a line of metrics by flat name, with None in place of numbers that are not finite."""
    return {name: finite(value) for name, value in scalars(line).items()}


def chart_of(
    chart: Chart, flat: list[dict[str, float | None]], curves: dict[str, list[float | None]]
) -> dict[str, Any]:
    """Return the description of one chart for the report page's script. Adds the chart's series to `curves`, from the
    metrics of all steps in `flat`."""
    title, unit, logarithmic, keys = chart
    series: list[dict[str, str]] = []
    for key, name in keys:
        before, star, after = key.partition("*")
        names = [key]
        if star or key.endswith("/"):
            every = {found for line in flat for found in line}
            names = sorted(found for found in every if found.startswith(before) and found.endswith(after))
        for found in names:
            if any(line.get(found) is not None for line in flat):
                curves[found] = [line.get(found) for line in flat]
                own = found[len(before) : len(found) - len(after)]
                shown = f"{name}: {own}" if star else name or own.replace("_", " ")
                series.append({"key": found, "name": shown})
    missing = None if series else MISSING.get(title, f"No {title.lower()} in metrics.jsonl.")
    return {"title": title, "unit": unit, "log": logarithmic, "series": series, "missing": missing}


# ---------------------------------------------------------------------------------------------------------------------
# Validation losses by bucket
# ---------------------------------------------------------------------------------------------------------------------

# Suffixes of keys in metrics.jsonl, the head of the column of buckets, and what the table shows.
TABLES = (
    ("loss_by_position", "Position", "position in the document's piece, or in the sample where documents are joined"),
    ("loss_by_length", "Length", "length of the document's piece in tokens"),
)


def buckets_of(metrics: list[Line]) -> list[dict[str, Any]]:
    """Return tables of the validation losses by position and by length, if the metrics have them. A table has one row
    per bucket (a range of positions or lengths) and one column for the last evaluation of each corpus."""
    tables = []
    for end, head, what in TABLES:
        last: dict[str, tuple[int, dict[str, float]]] = {}
        for line in metrics:
            for key, values in line.items():
                if key.endswith(end) and isinstance(values, dict):
                    text = key.split("/")[1] if key.startswith("valid/") else "validation"
                    last[text] = line["step"], values
        if not last:
            continue
        names = {name for _, values in last.values() for name in values}
        ordered = sorted(names, key=lambda name: int(first) if (first := name.partition("-")[0]).isdigit() else 0)
        table_rows = [[name, *(finite(values.get(name)) for _, values in last.values())] for name in ordered]
        heads = [head, *(f"{text}, step {step:,}" for text, (step, _) in last.items())]
        tables.append({"title": f"Validation loss by {what}, nats", "heads": heads, "rows": table_rows})
    return tables


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------

KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")  # of planned memory
STATE = [
    ("memory/state_device", "optimizer state, device"),
    ("memory/state_host", "optimizer state, host"),
    ("memory/state_disk", "optimizer state, disk"),
    ("memory/layer_inputs_device_peak", "layer inputs, device, peak"),
    ("memory/layer_inputs_host", "layer inputs, host"),
]


def memory_of(
    source: RunFiles, flat: list[dict[str, float | None]], curves: dict[str, list[float | None]]
) -> dict[str, Any]:
    """Return the report's charts of memory and optimizer state over the steps, and one row per rank with its measured
    peak and planned bytes. Adds the charts' series to `curves`, from the metrics of all steps in `flat`."""
    keys = [
        ("memory/device_peak", "device, peak"),
        ("memory/device", "device, in use"),
        ("memory/host", "host"),
        ("memory/disk", "disk: the run's folder"),
    ]
    if not any(line.get("memory/device_peak") is not None for line in flat):
        keys = [("peak_memory_bytes", "device, peak")]

    def chart_of_bytes(title: str, keys: list[tuple[str, str]]) -> dict[str, Any]:
        keys = [(key, name) for key, name in keys if any(line.get(key) for line in flat)]  # an unused tier has no curve
        return chart_of((title, "bytes", False, keys), flat, curves)

    peaks: dict[int, float] = {}
    for line in source.metrics:
        peaks.update(enumerate((line.get("memory") or {}).get("device_peak_by_rank") or []))
    if not peaks and source.metrics and finite(source.metrics[-1].get("peak_memory_bytes")) is not None:
        peaks[0] = source.metrics[-1]["peak_memory_bytes"]
    kinds = [kind for kind in KINDS if any(kind in rank for rank in source.memory_plan)]
    planned = {
        rank["rank"]: {**{kind: finite(rank.get(kind)) for kind in kinds}, "total": rank["total"]}
        for rank in source.memory_plan
    }
    missing = None
    if not planned:
        missing = (
            "No plan.json in the run's folder: only measured peaks are shown. python train.py plan=true prints a plan."
        )
    elif source.plan_device == "cpu":
        missing = (
            "On a CPU the measured peak is that of the whole process, with Python and its libraries; the plan has "
            "only the model."
        )
    return {
        "chart": chart_of_bytes("Memory on device, host and disk, of the rank with the most", keys),
        "state": chart_of_bytes("State on device, host and disk, of the rank with the most", STATE),
        "kinds": kinds,
        "ranks": [{"rank": i, "peak": peaks.get(i), "plan": planned.get(i)} for i in sorted({*peaks, *planned})],
        "missing": missing,
    }
