"""A prediction of the clock in words, always with what the hardware's figures are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.clock.hardware import Hardware
from simulator.clock.prediction import REASONS, Prediction

PLACES = {"inside": "inside a node", "between": "between nodes"}
LEAST_SHARE = 0.01  # of a step, that is named
UNTESTED = "not held to measured steps"


def reason_in_words(name: str) -> str:
    """What a key of `Prediction.reasons` means, as it reads on from "21% of the step: "."""
    reason, _, place = name.partition(":")
    words = REASONS[reason]
    return words % PLACES[place] if place else words.replace(" %s", "")


def shares(prediction: Prediction) -> list[tuple[float, str]]:
    """Shares of the step and their reasons in words, largest first; what is below LEAST_SHARE is left out."""
    total = prediction.seconds or 1.0
    found = [(seconds / total, reason_in_words(name)) for name, seconds in prediction.reasons.items()]
    return sorted(((share, words) for share, words in found if share >= LEAST_SHARE), key=lambda part: -part[0])


def held_to(errors: tuple[Mapping[str, Any], ...]) -> str:
    """What back-tests found of figures (`Hardware.errors`), to be said beside each prediction with them: by steps that
    they were not fitted to, where there are such."""
    others = [error for error in errors if not error.get("fitted_to")]
    return "; ".join(map(_of_a_test, others or errors)) if errors else UNTESTED


def _of_a_test(error: Mapping[str, Any]) -> str:
    mean = error.get("mean_absolute_error_percent")
    of = error.get("of") or error.get("rows") or error.get("source")
    if mean is None:
        return ", ".join(f"{key} {value}" for key, value in error.items())
    count = error.get("count")
    measured = f" in {count:,} measured steps" if isinstance(count, int) else " in measured steps"
    return f"mean error {mean:.3g}%{measured}{f' ({of})' if of else ''}"


def step_in_words(prediction: Prediction, hardware: Hardware, tokens: int) -> str:
    """Lines on a predicted step of so many tokens: its time, what it is spent on, and the back-test's error."""
    parts = "; ".join(f"{share:.0%} {words}" for share, words in shares(prediction))
    return (
        f"Step time on {hardware.name}: predicted {prediction.seconds:.3g} s, {tokens / prediction.seconds:,.0f} "
        f"tokens/s; back-test: {held_to(hardware.errors)}.\n"
        f"  {hardware.name}: {hardware.about}\n"
        f"  of the step {parts}"
    )


def step_as_dict(prediction: Prediction, hardware: Hardware, tokens: int) -> dict[str, Any]:
    """The same for JSON."""
    return {
        "hardware": hardware.name,
        "step_seconds": prediction.seconds,
        "tokens_per_second": tokens / prediction.seconds,
        "reasons": {name: {"seconds": s, "means": reason_in_words(name)} for name, s in prediction.reasons.items()},
        "back_tests": [dict(error) for error in hardware.errors],
        "back_test": held_to(hardware.errors),
    }
