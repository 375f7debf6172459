"""The layout of a run with parallel=auto: searched for before anything is allocated, and kept by the run's folder.

Each rank chooses by itself from what all of them know: the config, the machine's figures and the number of ranks. So
all choose the same, and parallel/topology.py refuses where they did not.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import validate
from configs.keys import get, put
from configs.ranks import launched
from configs.schema import KEYS, Config, ConfigError
from configs.searched import ASKED_KEYS, SEARCHED
from configs.values import as_typed
from data.vocabulary import expected_vocab_size
from simulator.clock.hardware import Hardware
from simulator.clock.output.words import held_to
from simulator.search.answer import LayoutAnswer
from simulator.search.search import search_layout
from training.starting.choice_file import read_choice
from training.starting.machine import machine_of, refuse_another_kind

CHOSEN = "layout_chosen.json"  # in the run's folder
RUNNERS_UP = 2  # that are said


@dataclass(frozen=True)
class LayoutChoice:
    """A config with its layout, for `world_size` ranks. `record`: what CHOSEN holds, how it was chosen; `lines`: what
    to say of it; `is_kept`: whether it is that of the run's earlier attempt."""

    config: Config
    world_size: int
    record: dict[str, Any]
    lines: list[str]
    is_kept: bool = False


def choose(config: Config, given: frozenset[str]) -> LayoutChoice | None:
    """The choice of a run with parallel.layout=auto, None for a run whose layout is given. Rank 0 says it.

    A run that has started keeps its layout on as many ranks, as long as the command line's keys allow it. Raises
    ConfigError where nothing fits.
    """
    if config.parallel.layout != "auto":
        return None
    machine, why = machine_of(config)
    refuse_another_kind(machine, config)
    launch = launched()
    choice = _for_ranks(config, given, machine, launch.world_size)
    if launch.rank == 0:
        print("\n".join([f"layout: {choice.lines[0]}; {why}", *choice.lines[1:]]), flush=True)
    return choice


def _for_ranks(config: Config, given: frozenset[str], machine: Hardware, started: int) -> LayoutChoice:
    """The choice for all ranks that were started, or with training.elastic for the most that have a layout."""
    earlier = _read(Path(config.run_dir))
    first: ConfigError | None = None
    for ranks in range(started, 0, -1):
        kept = _kept(config, given, earlier, ranks)
        if kept is not None:
            return kept
        try:
            return searched(config, given, machine, ranks, _why_anew(given, config, earlier, ranks))
        except ConfigError as error:
            first = first or error
            if not config.training.elastic:
                break
    assert first is not None
    raise first


def searched(
    config: Config, given: frozenset[str], machine: Hardware, world_size: int, again: str = ""
) -> LayoutChoice:
    """Search for the layout. Raises ConfigError where nothing fits."""
    answer = search_layout(config, world_size, expected_vocab_size(config), machine, given)
    values = {key: get(answer.best.config, key) for key in SEARCHED}
    chosen = with_layout(config, values, machine)
    validate.validate(chosen, world_size)
    record = {"values": values, "given": _given(config, given), **answer.as_dict()}
    return LayoutChoice(chosen, world_size, record, [f"{again}{lines_of(answer)[0]}", *lines_of(answer)[1:]])


def with_layout(config: Config, values: dict[str, Any], machine: Hardware) -> Config:
    """The config with a layout, and with the machine that it was chosen for."""
    chosen = copy.deepcopy(config)
    for key, value in values.items():
        put(chosen, key, value)
    if chosen.hardware is None:
        chosen.hardware = machine.name
    return chosen


def lines_of(answer: LayoutAnswer) -> list[str]:
    """What was chosen, and the next ones with why they lose, a line each."""
    best = answer.best
    lines = [
        f"{' '.join(best.overrides) or 'the one of the presets'} is the fastest that fits {answer.world_size} rank(s), "
        f"of {answer.counts.candidates:,} layouts: {best.prediction.seconds:.3g} s a step predicted (back-test: "
        f"{held_to(answer.errors)})"
    ]
    for layout in answer.runners_up[:RUNNERS_UP]:
        slower = layout.prediction.seconds / best.prediction.seconds - 1
        lines.append(f"  next: {' '.join(layout.overrides)}: {slower:+.0%}, {layout.why}")
    return lines


def _given(config: Config, given: frozenset[str]) -> dict[str, Any]:
    """The layout's keys of the command line."""
    return {key: get(config, key) for key in SEARCHED if key in given}


def _read(run_dir: Path) -> dict[str, Any] | None:
    content = read_choice(run_dir / CHOSEN, SEARCHED)
    if content is not None:  # of a version without them
        content["values"] = {key: KEYS[key].fresh_default() for key in ASKED_KEYS} | content["values"]
    return content if content is not None and set(content["values"]) == set(SEARCHED) else None


def _kept(
    config: Config, given: frozenset[str], earlier: dict[str, Any] | None, world_size: int
) -> LayoutChoice | None:
    """The layout of the run's earlier attempt, where it was for as many ranks and these keys, and is legal still."""
    if earlier is None or earlier.get("world_size") != world_size or earlier.get("given") != _given(config, given):
        return None
    chosen = copy.deepcopy(config)
    try:
        for key, value in earlier["values"].items():
            put(chosen, key, value)
        validate.validate(chosen, world_size)
    except (ConfigError, TypeError):
        return None
    if chosen.hardware is None:
        chosen.hardware = earlier.get("hardware")
    differs = [as_typed(key, value) for key, value in earlier["values"].items() if value != get(config, key)]
    line = f"{' '.join(differs) or 'that of the presets'} is kept, which this run chose for {world_size} rank(s)"
    return LayoutChoice(chosen, world_size, earlier, [line], is_kept=True)


def _why_anew(given: frozenset[str], config: Config, earlier: dict[str, Any] | None, world_size: int) -> str:
    """Why an earlier choice is not kept, for the begin of a line; empty where there is none."""
    if earlier is None:
        return ""
    before = earlier.get("world_size")
    if before != world_size:
        return f"searched again, for {world_size} rank(s) in place of {before}: "
    if earlier.get("given") != _given(config, given):
        return "searched again, as the command line has other keys of the layout: "
    return "searched again, as other keys forbid the earlier one: "
