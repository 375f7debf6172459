"""Curves over the steps."""

from __future__ import annotations

from typing import Any

from training.report.metrics import scalars
from training.report.sources import Line, finite

MAX_STEPS = 2000  # points of a curve
# Sections in order, and their charts: (title, unit, logarithmic, [(key in metrics.jsonl, name)]). A key that ends in /
# stands for all keys that begin so, one with * for all that match.
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
                (key, key.replace("_", " "))
                for key in (
                    "aux_loss",
                    "sequence_aux_loss",
                    "global_aux_loss",
                    "z_loss",
                    "sentence_loss",
                    "validation_sentence_loss",
                )
            ]
            + [("valid/*/sentence_loss", "sentence loss")],
        ),
    ],
    "speed": [
        ("Tokens per second", "tokens/s", False, [("tokens_per_second", "tokens per second")]),
        (
            "Time of a step",
            "seconds",
            False,
            [("step_seconds", "step"), ("step_seconds_percentiles/", "")],
        ),
        ("Waiting for data", "seconds", False, [("data_wait_seconds", "waiting for data")]),
        ("Model FLOPs utilization", "FLOP/s, share of the peak", False, [("mfu", "MFU")]),
    ],
    "placement": [
        (
            "Load of the busiest rank",
            "assignments, by the mean rank's",
            False,
            [("placement/at_home", "experts at home"), ("placement/placed", "placed")],
        ),
        (
            "Gain of placement",
            "time or rows without by with it",
            False,
            [("placement/predicted_gain", "predicted"), ("placement/measured_gain", "measured, in rows")],
        ),
        (
            "Copies and moves",
            "number of experts",
            False,
            [("placement/copies", "copies that travelled"), ("placement/moved", "homes that moved")],
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
    """At most so many lines: the first and the last, and of each stretch those of least and greatest loss and of
    longest time."""
    if len(metrics) <= most:
        return metrics
    stretches = (most - 2) // 3
    keep = {0, len(metrics) - 1}
    for i in range(stretches):
        stretch = range(i * len(metrics) // stretches, (i + 1) * len(metrics) // stretches)
        keep.add(min(stretch, key=lambda j: finite(metrics[j].get("loss")) or 0.0))
        keep.add(max(stretch, key=lambda j: finite(metrics[j].get("loss")) or 0.0))
        keep.add(max(stretch, key=lambda j: finite(metrics[j].get("step_seconds")) or 0.0))
    return [metrics[j] for j in sorted(keep)]


def plain(line: Line) -> dict[str, float | None]:
    return {name: finite(value) for name, value in scalars(line).items()}


def chart_of(
    chart: Chart, flat: list[dict[str, float | None]], curves: dict[str, list[float | None]]
) -> dict[str, Any]:
    """One chart's series; puts their numbers into `curves`."""
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
