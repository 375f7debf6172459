"""Prediction of a step: its seconds, the reasons they are spent on, and texts that describe both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simulator.clock.hardware import Hardware

# Texts for reasons: what the seconds are spent on. `%s` is replaced by a text of LINKS.
REASONS: dict[str, str] = {
    "products": "matrix products and attention",
    "recomputed": "layers that are computed again",
    "memory": "operations that only read and write memory",
    "launches": "the device waiting for the host to start operations",
    "tensor": "waiting for tensor ranks %s",
    "context": "waiting for context ranks %s",
    "expert": "waiting for expert ranks %s",
    "pipeline": "waiting for states of other pipeline stages %s",
    "bubble": "stages with nothing to do while the pipeline fills and drains",
    "gradients": "reducing gradients %s",
    "weights": "gathering updated weights %s",
    "update": "the optimizer's update on the device",
    "host_update": "the optimizer's update on the host",
    "host_link": "the link to the host",
    "disk": "the disk",
    "step": "the fixed time of a step",
}
LINKS = {"inside": "inside a node", "between": "between nodes"}
LEAST_SHARE = 0.01  # reasons with a smaller share of the step are not shown
UNTESTED = "not held to measured steps"


@dataclass(frozen=True)
class PlannedSpan:
    """A task of a resource, from second `start` of a step. `track`: such as "stage 0: compute" or "stage 0: disk"."""

    track: str
    name: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a step. `reasons` splits them along the step's critical path of work and waiting."""

    seconds: float
    reasons: Mapping[str, float]  # seconds by name in REASONS, with ":inside" or ":between" for reasons with a link
    hardware: str
    spans: tuple[PlannedSpan, ...] = field(default=(), repr=False)  # only with `with_spans`


def describe_reason(name: str, texts: Mapping[str, str] = REASONS) -> str:
    """Return the text of a key of `Prediction.reasons`, worded to follow a share such as "21% of the step: "."""
    reason, _, link = name.partition(":")
    text = texts.get(reason, reason)
    return text.replace("%s", LINKS[link]) if link else text.replace(" %s", "")


def reason_shares(prediction: Prediction) -> list[tuple[float, str]]:
    """Return (share of the step, text of the reason) pairs, largest first, without shares below LEAST_SHARE."""
    total = prediction.seconds or 1.0
    found = [(seconds / total, describe_reason(name)) for name, seconds in prediction.reasons.items()]
    return sorted(((share, text) for share, text in found if share >= LEAST_SHARE), key=lambda pair: -pair[0])


def describe_back_tests(errors: tuple[Mapping[str, Any], ...]) -> str:
    """Return a text about the back-tests of hardware figures (`Hardware.errors`), to show next to a prediction.

    Back-tests on the steps of the fit itself count only if there are no others.
    """
    others = [error for error in errors if not error.get("fitted_to")]
    return "; ".join(map(_describe_back_test, others or errors)) if errors else UNTESTED


def _describe_back_test(error: Mapping[str, Any]) -> str:
    mean = error.get("mean_absolute_error_percent")
    of = error.get("of") or error.get("rows") or error.get("source")
    if mean is None:
        return ", ".join(f"{key} {value}" for key, value in error.items())
    count = error.get("count")
    measured = f" in {count:,} measured steps" if isinstance(count, int) else " in measured steps"
    return f"mean error {mean:.3g}%{measured}{f' ({of})' if of else ''}"


def describe_step(prediction: Prediction, hardware: Hardware, tokens: int) -> str:
    """Return the lines about a predicted step of `tokens` tokens: its time, its reasons and the back-tests' error."""
    reasons = "; ".join(f"{share:.0%} {text}" for share, text in reason_shares(prediction))
    return (
        f"Step time on {hardware.name}: predicted {prediction.seconds:.3g} s, {tokens / prediction.seconds:,.0f} "
        f"tokens/s; back-test: {describe_back_tests(hardware.errors)}.\n"
        f"  {hardware.name}: {hardware.about}\n"
        f"  of the step {reasons}"
    )


def step_as_dict(prediction: Prediction, hardware: Hardware, tokens: int) -> dict[str, Any]:
    """Return the entry of a predicted step in plan.json."""
    return {
        "hardware": hardware.name,
        "step_seconds": prediction.seconds,
        "tokens_per_second": tokens / prediction.seconds,
        "reasons": {name: {"seconds": s, "means": describe_reason(name)} for name, s in prediction.reasons.items()},
        "back_tests": [dict(error) for error in hardware.errors],
        "back_test": describe_back_tests(hardware.errors),
    }
