"""Files of placement plans: a run's planner records its answers, and a later run replays them.

A file of JSON lines. A header describes the lines up to the next header: {"format", "run", "step", "expert_ranks",
"num_experts", "slots", "homes", "last"}. It is written at each start of the run, after each migration, and for each
step without calls. The other lines are calls: {"step", "layer", "call", "copies": [[expert, rank, assignments], ...],
"last"}. `homes` are the ranks of the primaries, `copies` the assignments of replicas. Primaries compute all other
assignments. `last` is true in the final line of a step. Calls are a step's forward passes that have a backward pass, in
order.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from base.errors import ConfigError
from base.files import SideLog, cut_steps
from moe.chunk_plan import stored_fields
from moe.placement.quotas import Costs, QuotaPlanner, ReplicaLimits, at_primaries
from moe.placement_map import Integers, PlacementMap

FORMAT = "mixtrain placement plans 2"
ReplicaQuotas = list[tuple[int, int, int]]  # (expert, rank, assignments)
_ADVICE = (
    "Replay plans only with the layout, data, seed, training.steps and moe.placement.interval of the recorded run, or "
    "set moe.placement.replay=null to plan anew"
)


@dataclass(frozen=True)
class PlanHeader:
    """A header in a file of placement plans: the run, layout and primary ranks to which the following plans apply."""

    run: str  # run id
    step: int  # first step to which the header applies
    expert_ranks: int
    num_experts: int
    replica_slots: int  # replicas of a layer that a rank may hold
    primaries: Mapping[int, tuple[int, ...]]  # primary rank of each expert, by MoE layer of the pipeline stage

    def line(self, last: bool) -> str:
        """Return the header as a line of JSON; `last`: it is the final line of its step."""
        fields = stored_fields(self, {"replica_slots": "slots", "primaries": "homes"})
        return json.dumps({"format": FORMAT, **fields, "last": last})


class PlanFile:
    """Writer of a file of placement plans. Disk errors are reported and do not end the run."""

    def __init__(self, path: Path, run: str, after: int) -> None:
        """Open the file for a run that continues after step `after`; later steps in the file are removed.

        Raises ConfigError if the file belongs to a different run.
        """
        self.missing: str | None = None  # message about steps that the file lacks
        self._header: PlanHeader | None = None
        try:
            with open(path, "rb") as stream:
                found = json.loads(stream.readline(1 << 24)).get("run", run)
        except (OSError, ValueError, AttributeError, RecursionError):
            found = run  # the functions below handle an unreadable file
        if found != run:
            raise ConfigError(f"{path} has the plans of run {found}, and this is run {run}. Move the file away.")

        def begin() -> None:
            self.missing = cut_steps(path, after)

        self._log = SideLog(path, begin)

    def append(self, header: PlanHeader, calls: Mapping[int, Sequence[ReplicaQuotas]]) -> None:
        """Append the plans of a step; `calls`: for each layer, the assignments of replicas in each call."""
        own = [(layer, number, replicas) for layer in calls for number, replicas in enumerate(calls[layer])]
        is_known = self._header is not None and replace(header, step=0) == replace(self._header, step=0)
        lines = [] if is_known and own else [header.line(last=not own)]
        for i, (layer, number, replicas) in enumerate(own, 1):
            line = {"step": header.step, "layer": layer, "call": number, "copies": replicas, "last": i == len(own)}
            lines.append(json.dumps(line))
        self._log.write("\n".join(lines))
        self._header = header

    def close(self) -> None:
        self._log.close()


class RecordedPlanner:
    """Wrapper of a placement planner that records the assignments of replicas, call by call, in `calls`."""

    def __init__(self, planner: QuotaPlanner) -> None:
        self.calls: list[ReplicaQuotas] = []
        self._planner = planner

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
        quotas_ER = self._planner(counts_RE, placement, costs, limits)
        away_ER = np.where(placement.is_primary_ER, 0, quotas_ER)
        self.calls.append([(int(e), int(r), int(away_ER[e, r])) for e, r in zip(*np.nonzero(away_ER), strict=True)])
        return quotas_ER


class ReplayedPlanner:
    """A placement planner that returns the recorded plans of a layer; between steps primaries compute everything."""

    def __init__(self, path: Path, layer: int, calls: dict[int, list[ReplicaQuotas]]) -> None:
        """`calls`: the recorded plans of each step, in the order of its calls."""
        self._path, self._layer, self._calls = path, layer, calls
        self._step: int | None = None
        self._next = 0

    def begin(self, step: int | None) -> None:
        """Set the training step of the next calls; None for calls between steps, such as those of an evaluation."""
        self._step, self._next = step, 0

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
        """Return the recorded quotas [E, R] of the next call. Raises ConfigError if they are missing or do not fit."""
        if self._step is None:
            return at_primaries(counts_RE, placement)
        calls = self._calls.get(self._step, [])
        number = self._next % max(len(calls), 1)  # a repeated pass, in search of a value that is not finite
        self._next += 1
        where = f"moe.placement.replay: {self._path}: step {self._step}, layer {self._layer}, call {number}"
        if number >= len(calls):
            raise ConfigError(f"{where} is not in the file. {_ADVICE}.")
        quotas_ER = at_primaries(counts_RE, placement)
        for expert, rank, assignments in calls[number]:
            if rank == placement.primary_ranks[expert]:
                raise ConfigError(
                    f"{where} has a replica of expert {expert} on the rank of its primary, {rank}; expected a "
                    f"different rank. {_ADVICE}."
                )
            quotas_ER[expert, placement.primary_ranks[expert]] -= assignments
            quotas_ER[expert, rank] += assignments
        if (quotas_ER < 0).any():
            expert = int(np.argwhere(quotas_ER < 0)[0, 0])
            raise ConfigError(
                f"{where} gives replicas of expert {expert} more assignments than the expert has "
                f"({counts_RE[:, expert].sum()}). {_ADVICE}."
            )
        return quotas_ER


@dataclass
class Plans:
    """The content of a file of placement plans."""

    path: Path
    calls: dict[int, dict[int, list[ReplicaQuotas]]] = field(default_factory=dict)  # by layer and step
    headers: list[PlanHeader] = field(default_factory=list)  # sorted by step

    def header(self, step: int) -> PlanHeader | None:
        """Return the header that applies to a step; None for a step before the first header."""
        behind = bisect_right(self.headers, step, key=lambda header: header.step)
        return self.headers[behind - 1] if behind else None

    def problem(self, own: PlanHeader, last: int, calls: int) -> str | None:
        """Return an error text if the plans do not fit a run, else None.

        `own`: the run's header, with its first step. `last`: its last step. `calls`: calls of a layer per step.
        """
        where = f"moe.placement.replay: {self.path}"
        for step in range(own.step, last + 1):
            recorded = self.header(step)
            if recorded is not None:
                for name, field_name in _KEYS.items():
                    theirs, ours = getattr(recorded, field_name), getattr(own, field_name)
                    if theirs > ours if field_name == "replica_slots" else theirs != ours:
                        differs = f"{name}={theirs}, but this run has {ours}"
                        return f"{where}: step {step} was recorded with {differs}. {_ADVICE}."
                if list(recorded.primaries) != list(own.primaries):
                    layers = f"{list(recorded.primaries)}, but this run has {list(own.primaries)}"
                    return f"{where}: step {step} was recorded with the MoE layers {layers}. {_ADVICE}."
                if step == own.step and (text := self.primaries_differ(own)) is not None:
                    return text
            for layer in own.primaries:
                found = self.calls.get(layer, {}).get(step, [])
                if len(found) != calls:
                    if not found:
                        return f"{where}: step {step}, layer {layer}, call 0 is not in the file. {_ADVICE}."
                    number_of = f"was recorded with {len(found)} calls, but this run has {calls}"
                    return f"{where}: step {step}, layer {layer} {number_of}. {_ADVICE}."
                for number, replicas in enumerate(found):
                    if (why := _out_of_range(replicas, own)) is not None:
                        return f"{where}: step {step}, layer {layer}, call {number}: {why}. {_ADVICE}."
        return None

    def primaries_differ(self, own: PlanHeader) -> str | None:
        """Return an error text if the primary ranks of `own` differ from those recorded for its step, else None."""
        recorded = self.header(own.step)
        if recorded is None:
            return None
        for layer, primaries in own.primaries.items():
            if recorded.primaries[layer] != primaries:
                expert = next(e for e, (a, b) in enumerate(zip(recorded.primaries[layer], primaries)) if a != b)
                return (
                    f"moe.placement.replay: {self.path}: step {own.step}, layer {layer}: the primary of "
                    f"expert {expert} was on rank {recorded.primaries[layer][expert]}, but is on rank "
                    f"{primaries[expert]} in this run; plans apply only to equal primaries. {_ADVICE}."
                )
        return None


_KEYS = {
    "parallel.expert": "expert_ranks",
    "moe.num_experts": "num_experts",
    "moe.placement.extra_slots": "replica_slots",
}


def read_plans(path: Path) -> Plans:
    """Read a file of placement plans, except an incomplete last line. Raises ConfigError if the file is not valid."""
    plans = Plans(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"moe.placement.replay ({path}) cannot be read: {error.strerror}. Set it to a folder with the "
            "placement_*.plans files of a run with the same layout, or to null to plan anew."
        ) from None
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        try:
            _read_line(plans, json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = str(error) if isinstance(error, _InvalidLine) else "it must be a JSON object with a plan's fields"
            raise ConfigError(
                f"moe.placement.replay ({path}) is damaged, or not a file that moe.placement.record=true wrote: line "
                f"{number}: {why}. Record the plans again with moe.placement.record=true."
            ) from None
    if not plans.calls:
        raise ConfigError(
            f"moe.placement.replay ({path}) has no plans: it was cut off, or nothing was recorded. "
            "Record the plans again with moe.placement.record=true."
        )
    return plans


class _InvalidLine(ValueError):
    """An invalid line in a file of placement plans; the message is the reason."""


def _read_line(plans: Plans, line: dict[str, Any]) -> None:
    if "format" in line:
        plans.headers.append(_header(line, plans.headers))
        return
    step, layer, call = (_integer(line[name]) for name in ("step", "layer", "call"))
    replicas = [(_integer(expert), _integer(rank), _integer(number)) for expert, rank, number in line["copies"]]
    calls = plans.calls.setdefault(layer, {}).setdefault(step, [])
    if call != len(calls):
        raise _InvalidLine(f"step {step}, layer {layer}: call ({call}) must be {len(calls)}, the next number")
    header = plans.header(step)
    if header is None:
        raise _InvalidLine(f"there is no header for step {step} before it")
    if layer not in header.primaries:
        raise _InvalidLine(f"layer ({layer}) must be one of {list(header.primaries)}")
    if (why := _out_of_range(replicas, header)) is not None:
        raise _InvalidLine(why)
    if expert := next((f"{e}" for e, rank, _ in replicas if header.primaries[layer][e] == rank), None):
        raise _InvalidLine(f"expert {expert} has a replica on the rank of its primary; expected a different rank")
    calls.append(replicas)


def _header(line: dict[str, Any], before: Sequence[PlanHeader]) -> PlanHeader:
    if line["format"] != FORMAT:
        raise _InvalidLine(f"its format ({line['format']}) must be {FORMAT}, which this version reads")
    names = ("step", "expert_ranks", "num_experts", "slots")
    step, ranks, experts, replica_slots = (_integer(line[name]) for name in names)
    primaries = {int(layer): tuple(_integer(rank) for rank in of_layer) for layer, of_layer in line["homes"].items()}
    if min(step, ranks, experts, replica_slots) < 1 or experts % ranks:
        raise _InvalidLine(
            f"step ({step}), expert_ranks ({ranks}), num_experts ({experts}) and slots ({replica_slots}) must be "
            "at least 1, and num_experts a multiple of expert_ranks"
        )
    even = Counter(dict.fromkeys(range(ranks), experts // ranks))
    if not primaries or any(Counter(of_layer) != even for of_layer in primaries.values()):
        raise _InvalidLine(
            f"homes must give each of the {ranks} ranks {experts // ranks} of the {experts} experts, in every layer"
        )
    found = PlanHeader(str(line["run"]), step, ranks, experts, replica_slots, primaries)
    if before and found.run != before[0].run:
        raise _InvalidLine(f"its run ({found.run}) must be that of the first header ({before[0].run})")
    if before and found.step < before[-1].step:
        raise _InvalidLine(f"its step ({step}) must be at least {before[-1].step}")
    return found


def _out_of_range(replicas: ReplicaQuotas, header: PlanHeader) -> str | None:
    for expert, rank, assignments in replicas:
        for name, value, low, high in (
            ("expert", expert, 0, header.num_experts - 1),
            ("rank", rank, 0, header.expert_ranks - 1),
            ("assignments", assignments, 1, _MOST),
        ):
            if not low <= value <= high:
                return f"{name} ({value}) must be from {low} to {high}"
    if len({replica[:2] for replica in replicas}) < len(replicas):
        return "a replica is listed twice"
    most, limit = max(Counter(rank for _, rank, _ in replicas).values(), default=0), header.replica_slots
    return f"a rank has {most} replicas; expected at most {limit}" if most > limit else None


_MOST = 2**48  # assignments: sums of them stay in 64 bits


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise _InvalidLine(f"{value!r} must be an integer")
    return value
