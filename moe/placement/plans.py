"""Plans of placement on disk: what a run's planner answered, and a planner that answers the same again.

A file of JSON lines. A header says what the lines behind it are of, up to the next: {"format", "run", "step",
"expert_ranks", "num_experts", "slots", "homes", "last"}; each start of the run and each move of homes makes one, and
each step without calls. The other lines are calls: {"step", "layer", "call", "copies": [[expert, rank, assignments],
...], "last"}; what is not at a copy is at home. `last` is true of a step's final line. A call is one of a step's
forward passes that a backward pass follows, in its order.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs.files import SideLog, cut_steps
from configs.schema import ConfigError
from moe.placement.quotas import CopyLimits, Costs, QuotaPlanner, at_home
from moe.placement_map import Integers, PlacementMap

FORMAT = "mixtrain placement plans 2"
Copies = list[tuple[int, int, int]]  # (expert, rank, assignments)
_ADVICE = "Replay a run of the same layout, data, seed and steps"


@dataclass(frozen=True)
class PlanHeader:
    """What plans are of."""

    run: str  # its id
    step: int  # the first that it holds for
    expert_ranks: int
    num_experts: int
    slots: int  # copies that a rank may hold of a layer
    homes: Mapping[int, tuple[int, ...]]  # by MoE layer of the pipeline stage: the rank of each expert

    def line(self, last: bool) -> str:
        """The header's line in the file; `last`: no line of its step follows."""
        return json.dumps({"format": FORMAT, **asdict(self), "last": last})

    def is_like(self, other: PlanHeader) -> bool:
        """Whether it says the same of another step."""
        return asdict(self) | {"step": 0} == asdict(other) | {"step": 0}


class PlanFile:
    """What is written to. Its disk's errors are said, and end nothing."""

    def __init__(self, path: Path, run: str, after: int) -> None:
        """after: the step that the run goes on from; lines of later ones are taken out: they come again. Raises
        ConfigError where the file is another run's."""
        self.missing: str | None = None  # a line on the steps that the file lacks
        self._header: PlanHeader | None = None
        refuse_other_runs(path, run)

        def begin() -> None:
            self.missing = cut_steps(path, after)

        self._log = SideLog(path, begin)

    def append(self, header: PlanHeader, calls: Mapping[int, Sequence[Copies]]) -> None:
        """The calls of a step, by layer."""
        own = [(layer, number, copies) for layer in calls for number, copies in enumerate(calls[layer])]
        is_known = self._header is not None and header.is_like(self._header)
        lines = [] if is_known and own else [header.line(last=not own)]
        for i, (layer, number, copies) in enumerate(own, 1):
            line = {"step": header.step, "layer": layer, "call": number, "copies": copies, "last": i == len(own)}
            lines.append(json.dumps(line))
        self._log.write("\n".join(lines))
        self._header = header

    def close(self) -> None:
        self._log.close()


def refuse_other_runs(path: Path, run: str) -> None:
    """Raise ConfigError where a file begins with another run's plans. One that cannot be read is left to who writes."""
    try:
        with open(path, "rb") as stream:
            first = json.loads(stream.readline(1 << 24))
        found = first.get("run", run)
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if found != run:
        raise ConfigError(f"{path} has plans of run {found}, and this is run {run}. Move the file away.")


class Recorded:
    """A planner, and what it answered since `begin`."""

    def __init__(self, planner: QuotaPlanner) -> None:
        self.calls: list[Copies] = []
        self._planner = planner

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: CopyLimits) -> Integers:
        quotas_ER = self._planner(counts_RE, placement, costs, limits)
        away_ER = quotas_ER.copy()
        away_ER[np.arange(placement.num_experts), placement.home_ranks] = 0
        self.calls.append([(int(e), int(r), int(away_ER[e, r])) for e, r in zip(*np.nonzero(away_ER), strict=True)])
        return quotas_ER


class Replayed:
    """Answers the calls of one layer's steps as a file has them; between steps all are at home."""

    def __init__(self, path: Path, layer: int, calls: dict[int, list[Copies]]) -> None:
        """calls: by step."""
        self._path, self._layer, self._calls = path, layer, calls
        self._step: int | None = None
        self._next = 0

    def begin(self, step: int | None) -> None:
        """The next calls are those of a step, or of none."""
        self._step, self._next = step, 0

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: CopyLimits) -> Integers:
        """Raises ConfigError where the file does not have the call, or its plan is not one of these counts."""
        if self._step is None:
            return at_home(counts_RE, placement)
        calls = self._calls.get(self._step, [])
        number = self._next % max(len(calls), 1)  # passes may come once more, to find what is not finite in them
        self._next += 1
        where = f"moe.placement.replay: {self._path}: step {self._step}, layer {self._layer}, call {number}"
        if number >= len(calls):
            raise ConfigError(f"{where} is not there. {_ADVICE}.")
        quotas_ER = at_home(counts_RE, placement)
        for expert, rank, assignments in calls[number]:
            if rank == placement.home_ranks[expert]:
                raise ConfigError(f"{where} has a copy of expert {expert} on its home, rank {rank}. {_ADVICE}.")
            quotas_ER[expert, placement.home_ranks[expert]] -= assignments
            quotas_ER[expert, rank] += assignments
        if (quotas_ER < 0).any():
            expert = int(np.argwhere(quotas_ER < 0)[0, 0])
            raise ConfigError(
                f"{where} has more assignments at copies of expert {expert} than there are "
                f"({counts_RE[:, expert].sum()}). {_ADVICE}."
            )
        return quotas_ER


@dataclass
class Plans:
    """What a file holds."""

    path: Path
    calls: dict[int, dict[int, list[Copies]]] = field(default_factory=dict)  # by layer and step
    headers: list[PlanHeader] = field(default_factory=list)  # by step

    def header(self, step: int) -> PlanHeader | None:
        """Return the header of a step's calls; None for a step before the first header."""
        behind = bisect_right(self.headers, step, key=lambda header: header.step)
        return self.headers[behind - 1] if behind else None

    def problem(self, own: PlanHeader, last: int, calls: int) -> str | None:
        """Why a run that goes on at the step of `own` cannot take its steps up to `last` as the file has them, each
        with so many calls of a layer; None where it can as far as that is known before the steps."""
        where = f"moe.placement.replay: {self.path}"
        for step in range(own.step, last + 1):
            said = self.header(step)
            if said is not None:
                for name, field_name in _KEYS.items():
                    theirs, ours = getattr(said, field_name), getattr(own, field_name)
                    if theirs > ours if field_name == "slots" else theirs != ours:
                        return f"{where}: step {step} is of {name}={theirs}, and this run of {ours}. {_ADVICE}."
                if list(said.homes) != list(own.homes):
                    layers = f"{list(said.homes)}, and here they are {list(own.homes)}"
                    return f"{where}: step {step} is of the MoE layers {layers}. {_ADVICE}."
                if step == own.step and (text := self.other_homes(own)) is not None:
                    return text
            for layer in own.homes:
                found = self.calls.get(layer, {}).get(step, [])
                if len(found) != calls:
                    if not found:
                        return f"{where}: step {step}, layer {layer}, call 0 is not there. {_ADVICE}."
                    return f"{where}: step {step}, layer {layer} has {len(found)} calls, and here {calls}. {_ADVICE}."
                for number, copies in enumerate(found):
                    if (why := _out_of_range(copies, own)) is not None:
                        return f"{where}: step {step}, layer {layer}, call {number}: {why}. {_ADVICE}."
        return None

    def other_homes(self, own: PlanHeader) -> str | None:
        """Why the step of `own` cannot be taken with these homes; None where it can."""
        said = self.header(own.step)
        for layer, homes in own.homes.items() if said is not None else ():
            assert said is not None
            if said.homes[layer] != homes:
                expert = next(number for number, (a, b) in enumerate(zip(said.homes[layer], homes)) if a != b)
                return (
                    f"moe.placement.replay: {self.path}: step {own.step}, layer {layer}: expert {expert} was at home "
                    f"on rank {said.homes[layer][expert]}, and here on rank {homes[expert]}: plans are of other homes. "
                    f"{_ADVICE}, and the same moe.placement.interval."
                )
        return None


_KEYS = {"parallel.expert": "expert_ranks", "moe.num_experts": "num_experts", "moe.placement.extra_slots": "slots"}


def read_plans(path: Path) -> Plans:
    """Every line but one that a kill cut off. Raises ConfigError for a file that is none, with the line."""
    plans = Plans(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"moe.placement.replay ({path}) cannot be read: {error.strerror}.") from None
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        try:
            _take(plans, json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = str(error) if isinstance(error, _Wrong) else "it is none"
            raise ConfigError(
                f"moe.placement.replay ({path}) is no file of plans, as moe.placement.record=true writes it: line "
                f"{number}: {why}."
            ) from None
    if not plans.calls:
        raise ConfigError(f"moe.placement.replay ({path}) has no plan: it was cut off, or nothing was recorded.")
    return plans


class _Wrong(ValueError):
    """What is wrong with a line, in words."""


def _take(plans: Plans, line: dict[str, Any]) -> None:
    if "format" in line:
        plans.headers.append(_header(line, plans.headers))
        return
    step, layer, call = (_integer(line[name]) for name in ("step", "layer", "call"))
    copies = [(_integer(expert), _integer(rank), _integer(number)) for expert, rank, number in line["copies"]]
    calls = plans.calls.setdefault(layer, {}).setdefault(step, [])
    if call != len(calls):
        raise _Wrong(f"step {step}, layer {layer}: call {call} follows {len(calls)} calls")
    header = plans.header(step)
    if header is None:
        raise _Wrong(f"no header of step {step} is before it")
    if layer not in header.homes:
        raise _Wrong(f"layer ({layer}) must be one of {list(header.homes)}")
    if (why := _out_of_range(copies, header)) is not None:
        raise _Wrong(why)
    if expert := next((f"{e}" for e, rank, _ in copies if header.homes[layer][e] == rank), None):
        raise _Wrong(f"expert {expert} has a copy on its home")
    calls.append(copies)


def _header(line: dict[str, Any], before: Sequence[PlanHeader]) -> PlanHeader:
    if line["format"] != FORMAT:
        raise _Wrong(f"its format ({line['format']}) is not the one that this version reads ({FORMAT})")
    names = ("step", "expert_ranks", "num_experts", "slots")
    step, ranks, experts, slots = (_integer(line[name]) for name in names)
    homes = {int(layer): tuple(_integer(rank) for rank in of_layer) for layer, of_layer in line["homes"].items()}
    if min(step, ranks, experts, slots) < 1 or experts % ranks:
        raise _Wrong("its header has numbers that no run has")
    even = Counter(dict.fromkeys(range(ranks), experts // ranks))
    if not homes or any(Counter(of_layer) != even for of_layer in homes.values()):
        raise _Wrong(f"its homes are none of {experts} experts on {ranks} ranks")
    found = PlanHeader(str(line["run"]), step, ranks, experts, slots, homes)
    if before and found.run != before[0].run:
        raise _Wrong(f"it is of run {found.run}, and what is before it of run {before[0].run}")
    if before and found.step < before[-1].step:
        raise _Wrong(f"its step ({step}) must be at least {before[-1].step}")
    return found


def _out_of_range(copies: Copies, header: PlanHeader) -> str | None:
    for expert, rank, assignments in copies:
        for name, value, low, high in (
            ("expert", expert, 0, header.num_experts - 1),
            ("rank", rank, 0, header.expert_ranks - 1),
            ("assignments", assignments, 1, _MOST),
        ):
            if not low <= value <= high:
                return f"{name} ({value}) must be from {low} to {high}"
    if len({copy[:2] for copy in copies}) < len(copies):
        return "a copy stands there twice"
    most = max(Counter(rank for _, rank, _ in copies).values(), default=0)
    return f"a rank has {most} copies, and {header.slots} slots" if most > header.slots else None


_MOST = 2**48  # assignments: sums of them stay in 64 bits


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise _Wrong(f"{value!r} must be a number")
    return value
