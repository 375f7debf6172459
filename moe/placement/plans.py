"""Plans of placement on disk: what a run's planner answered, and a planner that answers the same again.

A file of JSON lines, each one call's: {"step", "layer", "call", "copies": [[expert, rank, assignments], ...]}; what is
not at a copy is at home. A call is one of a step's forward passes that a backward pass follows, in its order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from configs.schema import ConfigError
from moe.placement.map import Integers, PlacementMap
from moe.placement.quotas import Costs, Limits, Planner, at_home

Copies = list[tuple[int, int, int]]  # (expert, rank, assignments)


class PlanFile:
    """What is written to."""

    def __init__(self, path: Path, after: int) -> None:
        """after: the step that the run goes on from; lines of later ones are taken out: they come again. Raises
        OSError."""
        kept = []
        if path.exists():
            kept = [line for line in path.read_text().splitlines(True) if json.loads(line)["step"] <= after]
        self._stream: IO[str] = open(path, "w")
        self._stream.writelines(kept)

    def append(self, step: int, layer: int, calls: Sequence[Copies]) -> None:
        """Raises OSError."""
        for number, copies in enumerate(calls):
            self._stream.write(json.dumps({"step": step, "layer": layer, "call": number, "copies": copies}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class Recorded:
    """A planner, and what it answered since `begin`."""

    def __init__(self, planner: Planner) -> None:
        self.calls: list[Copies] = []
        self._planner = planner

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: Limits) -> Integers:
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

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: Limits) -> Integers:
        """Raises ConfigError where the file does not have the call, or its plan is not one of these counts."""
        if self._step is None:
            return at_home(counts_RE, placement)
        calls, number = self._calls.get(self._step, []), self._next
        self._next += 1
        where = f"{self._path}: step {self._step}, layer {self._layer}, call {number}"
        if number >= len(calls):
            raise ConfigError(f"moe.placement.replay: {where} is not there. Replay a run of the same layout and steps.")
        quotas_ER = at_home(counts_RE, placement)
        for expert, rank, assignments in calls[number]:
            quotas_ER[expert, placement.home_ranks[expert]] -= assignments
            quotas_ER[expert, rank] += assignments
        if (quotas_ER < 0).any():
            raise ConfigError(
                f"moe.placement.replay: {where} has more assignments than there are. Replay a run of the same data, "
                "seed and layout."
            )
        return quotas_ER


def read_plans(path: Path) -> dict[int, dict[int, list[Copies]]]:
    """By layer and step. Raises ConfigError for a file that is none."""
    found: dict[int, dict[int, list[Copies]]] = {}
    try:
        for text in path.read_text().splitlines():
            line = json.loads(text)
            copies = [(int(expert), int(rank), int(number)) for expert, rank, number in line["copies"]]
            found.setdefault(int(line["layer"]), {}).setdefault(int(line["step"]), []).append(copies)
    except OSError as error:
        raise ConfigError(f"moe.placement.replay ({path}) cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"moe.placement.replay ({path}) is no file of plans, as moe.placement.record=true writes it."
        ) from None
    return found
