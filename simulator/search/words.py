"""The answer of a search in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simulator.clock.output.words import held_to
from simulator.clock.prediction import REASONS, Prediction
from simulator.search.answer import LayoutAnswer, LayoutMemory, SearchedLayout, TooLargeChoice

GIB, MIB = 2**30, 2**20

# What a share of a step does, by the reasons of simulator/clock/prediction.py.
VERBS = {
    "products": "is matrix products and attention",
    "recomputed": "computes layers again",
    "memory": "only reads and writes memory",
    "launches": "waits for the host to start operations",
    "tensor": "waits for tensor ranks %s",
    "context": "waits for context ranks %s",
    "expert": "waits for expert ranks %s",
    "pipeline": "waits for states of other pipeline stages %s",
    "bubble": "has nothing to do while the pipeline fills and drains",
    "imbalance": "waits for a slower stage",
    "gradients": "reduces gradients %s",
    "weights": "gathers updated weights %s",
    "update": "is the optimizer's update on the device",
    "host_update": "is the optimizer's update on the host",
    "host_link": "waits for the link to the host",
    "disk": "waits for the disk",
    "step": "is what a step takes beside its passes",
}
WHERE = {"inside": "inside a node", "between": "between nodes"}


def text(answer: LayoutAnswer) -> str:
    """Lines for people: the best layout with what to type, the runners-up with why they lose, and the counts."""
    counts, limits = answer.counts, answer.limits
    lines = [
        f"Fastest layout of {answer.world_size} ranks on {answer.hardware} "
        f"(back-test: {held_to(answer.errors)}; a rank may take {size(limits.device)}, {limits.device_name}, and "
        f"{size(limits.host)} of the host)",
        *_layout(answer.best, answer.errors),
    ]
    for number, layout in enumerate(answer.runners_up, 1):
        choices = f" (the best found with {' or '.join(layout.choices)})" if layout.choices else ""
        lines += ["", f"Runner-up {number}{choices}: {layout.why}", *_layout(layout, answer.errors)]
    if answer.too_large:
        lines += ["", "Nothing that was looked at fits with:"]
        lines += [f"  {each.choice}: {size(each.short)} more than {_limit(answer, each)}" for each in answer.too_large]
    left = f", {counts.left:,} left, no more than {counts.near:.1%} faster" if counts.near else ""
    lines += [
        "",
        f"{counts.candidates:,} candidates: {counts.bounded_by_time:,} dropped by a bound of their time, "
        f"{counts.bounded_by_memory:,} by one of their memory, {counts.too_large:,} too large, {counts.timed:,} timed"
        + left,
    ]
    return "\n".join(lines)


def _limit(answer: LayoutAnswer, choice: TooLargeChoice) -> str:
    limits = answer.limits
    return {"device": limits.device_name, "host": limits.host_name}.get(choice.tier, "memory.disk_budget")


def _layout(layout: SearchedLayout, errors: Sequence[Mapping[str, Any]]) -> list[str]:
    seconds = seconds_text(layout.prediction.seconds, errors)
    return [
        f"  {seconds} a step, {layout.tokens_per_second:,.0f} tokens/s, a rank needs {memory_text(layout.memory)}",
        f"  {' '.join(layout.overrides) or 'the layout that was given'}",
    ]


def seconds_text(seconds: float, errors: Sequence[Mapping[str, Any]]) -> str:
    """Predicted seconds, with the back-test's error beside them."""
    worst = worst_error(errors)
    return f"{seconds:.4g} s ({'not held to measured steps' if worst is None else f'+-{worst:.1f}%'})"


def worst_error(errors: Sequence[Mapping[str, Any]]) -> float | None:
    """The largest mean absolute error of the back-tests, in percent; None where there are none."""
    return max((float(error["mean_absolute_error_percent"]) for error in errors), default=None)


def memory_text(memory: LayoutMemory) -> str:
    """Bytes by tier."""
    more = [("host", memory.host), ("disk", memory.disk)]
    return f"{size(memory.device)}" + "".join(f" and {size(number)} of the {name}" for name, number in more if number)


def why_slower(loser: Prediction, best: Prediction) -> str:
    """Why a layout loses: of what takes it longer than the best, what takes most longer."""
    names = dict.fromkeys([*loser.reasons, *best.reasons])
    longer = {name: loser.reasons.get(name, 0.0) - best.reasons.get(name, 0.0) for name in names}
    name = max(longer, key=lambda each: longer[each], default="")
    slower = loser.seconds / best.seconds - 1
    if slower < 5e-4 or not name or longer[name] <= 0:
        return "as fast, and splits the model over more dimensions or keeps less"
    own = loser.reasons[name]
    if own / loser.seconds <= best.reasons.get(name, 0.0) / best.seconds:  # no larger share, but of a longer step
        base, _, where = name.partition(":")
        what = REASONS.get(base, base)
        what = what % WHERE.get(where, "") if "%s" in what else what
        return f"{slower:.1%} slower: {longer[name]:.3g} s more for {what} ({own:.3g} s of the step)"
    return (
        f"{slower:.1%} slower: {own / loser.seconds:.1%} of the step {verb(name)} "
        f"({best.reasons.get(name, 0.0) / best.seconds:.1%} of the best's)"
    )


def verb(name: str) -> str:
    """What the step does in the seconds of a reason."""
    base, _, where = name.partition(":")
    found = VERBS.get(base, f"is {base}")
    return found % WHERE.get(where, "") if "%s" in found else found


def size(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.1f} MiB"
