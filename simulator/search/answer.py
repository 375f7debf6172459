"""Answer of a layout search and its text: the fastest layout that fits, the runners-up, and why these are slower."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from configs.schema import Config
from simulator.clock.prediction import UNTESTED, Prediction, describe_back_tests, describe_reason
from simulator.search.sizer import LayoutMemory, MemoryLimits
from simulator.sizes import format_bytes

# Sentence ends for reasons of simulator/clock/prediction.py, to follow "21% of the step".
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
    "gradients": "reduces gradients %s",
    "weights": "gathers updated weights %s",
    "update": "is the optimizer's update on the device",
    "host_update": "is the optimizer's update on the host",
    "host_link": "waits for the link to the host",
    "disk": "waits for the disk",
    "step": "is the fixed time of a step",
}


@dataclass(frozen=True)
class SearchedLayout:
    """A layout that fits the memory, with its predicted step.

    `overrides`: to add to the search's command line. `why`: why it is slower than the best layout; "" for the best.
    `choices`: overrides with which it is the fastest layout found.
    """

    config: Config = field(repr=False)
    overrides: list[str]
    prediction: Prediction
    memory: LayoutMemory
    tokens_per_second: float
    why: str = ""
    choices: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of this layout in search.json."""
        return {
            "overrides": self.overrides,
            "step_seconds": self.prediction.seconds,
            "tokens_per_second": self.tokens_per_second,
            "reasons": dict(self.prediction.reasons),
            "memory_bytes": {"device": self.memory.device, "host": self.memory.host, "disk": self.memory.disk},
            "why": self.why,
            "choices": list(self.choices),
        }


@dataclass(frozen=True)
class SearchCounts:
    """Numbers of layouts in a search, with the names that search.json uses.

    `candidates`: allowed by the rules. `bounded_by_time`, `bounded_by_memory`: excluded by a lower bound. `too_large`:
    excluded after their memory was counted. `timed`: fit and were timed. `left`: not examined, because they are faster
    than the best by at most the share `near`.
    """

    candidates: int
    bounded_by_time: int
    bounded_by_memory: int
    too_large: int
    timed: int
    left: int = 0
    near: float = 0.0


@dataclass(frozen=True)
class TooLargeChoice:
    """An override with which no examined layout fits; the closest exceeds the capacity of `target` by `short` bytes."""

    choice: str
    short: float
    target: str


@dataclass(frozen=True)
class LayoutAnswer:
    """The best layout of a search and the runners-up.

    A runner-up is the fastest layout found that differs from the best in one choice. `too_large`: choices with which
    nothing fits. `errors`: results of back-tests of the hardware's figures.
    """

    best: SearchedLayout
    runners_up: list[SearchedLayout]
    counts: SearchCounts
    limits: MemoryLimits
    hardware: str
    world_size: int
    errors: tuple[Mapping[str, Any], ...] = ()
    too_large: tuple[TooLargeChoice, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the content of search.json."""
        limits = {name: getattr(self.limits, name) for name in ("device", "host", "disk")}
        return {
            "hardware": self.hardware,
            "back_tests": [dict(error) for error in self.errors],
            "world_size": self.world_size,
            "limits_bytes": {name: None if math.isinf(limit) else limit for name, limit in limits.items()},
            "counts": asdict(self.counts),
            "best": self.best.as_dict(),
            "runners_up": [layout.as_dict() for layout in self.runners_up],
            "too_large": [
                {"choice": each.choice, "short_bytes": each.short, "tier": each.target} for each in self.too_large
            ],
        }


def answer_text(answer: LayoutAnswer) -> str:
    """Return the text of the answer: the best layout with its overrides, the runners-up, and the counts."""
    counts, limits = answer.counts, answer.limits
    lines = [
        f"Fastest layout of {answer.world_size} ranks on {answer.hardware} "
        f"(back-test: {describe_back_tests(answer.errors)}; a rank may take {format_bytes(limits.device)}, "
        f"{limits.device_name}, and {format_bytes(limits.host)} of the host)",
        *_layout(answer.best, answer.errors),
    ]
    for number, layout in enumerate(answer.runners_up, 1):
        choices = f" (the best found with {' or '.join(layout.choices)})" if layout.choices else ""
        lines += ["", f"Runner-up {number}{choices}: {layout.why}", *_layout(layout, answer.errors)]
    if answer.too_large:
        names = {"device": limits.device_name, "host": limits.host_name, "disk": "memory.disk_budget"}
        lines += ["", "No layout that was tried fits with:"]
        lines += [
            f"  {each.choice}: {format_bytes(each.short)} more than {names[each.target]}" for each in answer.too_large
        ]
    left = f", {counts.left:,} left, no more than {counts.near:.1%} faster" if counts.near else ""
    lines += [
        "",
        f"{counts.candidates:,} candidates: {counts.bounded_by_time:,} dropped by a bound of their time, "
        f"{counts.bounded_by_memory:,} by one of their memory, {counts.too_large:,} too large, {counts.timed:,} timed"
        + left,
    ]
    return "\n".join(lines)


def _layout(layout: SearchedLayout, errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the two lines about a layout; the error after its seconds is the back-tests' largest mean error."""
    worst = max((float(error["mean_absolute_error_percent"]) for error in errors), default=None)
    seconds = f"{layout.prediction.seconds:.4g} s ({UNTESTED if worst is None else f'+-{worst:.1f}%'})"
    memory = format_bytes(layout.memory.device)
    for name, number in (("host", layout.memory.host), ("disk", layout.memory.disk)):
        memory += f" and {format_bytes(number)} of the {name}" if number else ""
    return [
        f"  {seconds} a step, {layout.tokens_per_second:,.0f} tokens/s, a rank needs {memory}",
        f"  {' '.join(layout.overrides) or 'the layout that was given'}",
    ]


def why_slower(loser: Prediction, best: Prediction) -> str:
    """Return why a layout is slower than the best layout: the reason for most of the additional seconds."""
    names = dict.fromkeys([*loser.reasons, *best.reasons])
    longer = {name: loser.reasons.get(name, 0.0) - best.reasons.get(name, 0.0) for name in names}
    name = max(longer, key=lambda each: longer[each], default="")
    slower = loser.seconds / best.seconds - 1
    if slower < 5e-4 or not name or longer[name] <= 0:
        return "as fast, and splits the model over more dimensions or keeps less"
    own, share_of_best = loser.reasons[name], best.reasons.get(name, 0.0) / best.seconds
    if own / loser.seconds <= share_of_best:  # not a larger share, but of a longer step
        what = describe_reason(name)
        return f"{slower:.1%} slower: {longer[name]:.3g} s more for {what} ({own:.3g} s of the step)"
    verb = describe_reason(name, VERBS)
    return f"{slower:.1%} slower: {own / loser.seconds:.1%} of the step {verb} ({share_of_best:.1%} of the best's)"
