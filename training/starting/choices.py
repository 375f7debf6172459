"""Choices that a run makes before anything is allocated, where its config leaves them open: the layout (parallel=auto),
where experts are stored and in which order the passes run. The run's folder keeps them for the next start.

Each rank decides by itself from what all ranks know: the config, the machine's figures and the number of ranks. So all
choose the same, and parallel/topology.py refuses to start where they did not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.checksums import read_summed, write_summed
from base.errors import ConfigError
from base.files import spared
from base.ranks import launched
from configs import validate
from configs.keys import get, put
from configs.schema import KEYS, Config
from configs.searched import ASKED_KEYS, SEARCHED
from configs.values import as_typed
from data.tokenizer import expected_vocab_size
from simulator.clock.hardware import Hardware
from simulator.clock.prediction import describe_back_tests
from simulator.offload.expert_choice import decide, is_asked
from simulator.offload.expert_options import ORDER, STATE, WEIGHTS
from simulator.search.search import search_layout
from simulator.search.sizer import memory_limits
from simulator.search.space import with_keys
from training.starting.machine import machine_of, refuse_another_kind

LAYOUT_CHOSEN, EXPERTS_CHOSEN = "layout_chosen.json", "experts_chosen.json"  # in the run's folder
RUNNERS_UP = 2  # that are printed


def read_choice(path: Path, keys: Iterable[str]) -> dict[str, Any] | None:
    """Read the choice of an earlier start, whose `values` are of some of these keys; None where there is none.

    Raises ConfigError for a file that was damaged or changed by hand, since it decides what is trained with.
    """
    try:
        content = read_summed(path)
        values = content.get("values")
        others = sorted(set(values) - set(keys)) if isinstance(values, dict) else ["no values"]
        if others:
            raise ValueError(f"it names {', '.join(map(str, others))}, which is none of its keys")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read ({' '.join(str(error).split())}). Put it back, or delete it to have the choice "
            "made anew."
        ) from error
    return content


# ---------------------------------------------------------------------------------------------------------------------
# Layout
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutChoice:
    """A config with the layout that was chosen for `world_size` ranks. `record`: the content of LAYOUT_CHOSEN, with how
    it was chosen; `lines`: the description to print; `is_kept`: whether it is the layout of the run's earlier
    attempt."""

    config: Config
    world_size: int
    record: dict[str, Any]
    lines: list[str]
    is_kept: bool = False


def choose_layout(config: Config, given: frozenset[str]) -> LayoutChoice | None:
    """Choose the layout of a run with parallel.layout=auto, and print it on rank 0; None for a run whose layout is
    given.

    A run that has started keeps its layout on the same number of ranks, as long as the command line's keys (`given`)
    allow it. With training.elastic the layout may use fewer ranks than were started. Raises ConfigError where nothing
    fits.
    """
    if config.parallel.layout != "auto":
        return None
    machine, why = machine_of(config)
    refuse_another_kind(machine, config)
    launch, earlier = launched(), read_choice(Path(config.run_dir) / LAYOUT_CHOSEN, SEARCHED)
    if earlier is not None:  # keys that the version which wrote the file did not have get their defaults
        earlier["values"] = {key: KEYS[key].fresh_default() for key in ASKED_KEYS} | earlier["values"]
        earlier = earlier if set(earlier["values"]) == set(SEARCHED) else None
    choice: LayoutChoice | None = None
    first_error: ConfigError | None = None
    for ranks in range(launch.world_size, 0, -1):
        choice = _kept_layout(config, given, earlier, ranks)
        if choice is not None:
            break
        try:
            choice = searched_layout(config, given, machine, ranks, _reason_to_search(given, config, earlier, ranks))
            break
        except ConfigError as error:
            first_error = first_error or error
            if not config.training.elastic:
                break
    if choice is None:
        assert first_error is not None
        raise first_error
    if launch.rank == 0:
        print("\n".join([f"layout: {choice.lines[0]}; {why}", *choice.lines[1:]]), flush=True)
    return choice


def searched_layout(
    config: Config, given: frozenset[str], machine: Hardware, world_size: int, reason: str = ""
) -> LayoutChoice:
    """Search for the fastest layout that fits `world_size` ranks. Its first line begins with `reason`; the others are
    of the runners-up, with why they lose. Raises ConfigError where nothing fits."""
    answer = search_layout(config, world_size, expected_vocab_size(config), machine, given)
    best = answer.best
    values = {key: get(best.config, key) for key in SEARCHED}
    chosen = copy.deepcopy(config)
    for key, value in values.items():
        put(chosen, key, value)
    if chosen.hardware is None:
        chosen.hardware = machine.name
    validate.validate(chosen, world_size)
    lines = [
        f"{reason}{' '.join(best.overrides) or 'the one of the presets'} is the fastest that fits {answer.world_size} "
        f"rank(s), of {answer.counts.candidates:,} layouts: {best.prediction.seconds:.3g} s a step predicted "
        f"(back-test: {describe_back_tests(answer.errors)})"
    ]
    for layout in answer.runners_up[:RUNNERS_UP]:
        slower = layout.prediction.seconds / best.prediction.seconds - 1
        lines.append(f"  next: {' '.join(layout.overrides)}: {slower:+.0%}, {layout.why}")
    record = {"values": values, "given": _given_layout_keys(config, given), **answer.as_dict()}
    return LayoutChoice(chosen, world_size, record, lines)


def _given_layout_keys(config: Config, given: frozenset[str]) -> dict[str, Any]:
    """Return the layout's keys of the command line with their values."""
    return {key: get(config, key) for key in SEARCHED if key in given}


def _kept_layout(
    config: Config, given: frozenset[str], earlier: dict[str, Any] | None, world_size: int
) -> LayoutChoice | None:
    """The layout of the run's earlier attempt, if it was chosen for the same number of ranks and the same keys of the
    command line, and the rules still allow it."""
    if earlier is None or earlier.get("world_size") != world_size:
        return None
    if earlier.get("given") != _given_layout_keys(config, given):
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


def _reason_to_search(given: frozenset[str], config: Config, earlier: dict[str, Any] | None, world_size: int) -> str:
    """Describe why an earlier choice is not kept, for the start of a line; empty where there is none."""
    if earlier is None:
        return ""
    before = earlier.get("world_size")
    if before != world_size:
        return f"searched again, for {world_size} rank(s) in place of {before}: "
    if earlier.get("given") != _given_layout_keys(config, given):
        return "searched again, as the command line has other keys of the layout: "
    return "searched again, as other keys forbid the earlier one: "


# ---------------------------------------------------------------------------------------------------------------------
# Offloaded experts and the order of the passes
# ---------------------------------------------------------------------------------------------------------------------


def choose_experts(config: Config, given: frozenset[str]) -> Config:
    """Return the config with moe.weights_device=auto and training.pass_order=auto replaced; the same object where
    neither is auto. Rank 0 prints the choice, and keeps it for the next start.

    A run that has started keeps its choice on the same number of ranks, as long as the rules allow it. Raises
    ConfigError.
    """
    if not is_asked(config):
        return config
    launch, path = launched(), Path(config.run_dir) / EXPERTS_CHOSEN
    asked = {key: get(config, key) for key in (WEIGHTS, ORDER)}
    earlier = read_choice(path, (WEIGHTS, ORDER, STATE))
    kept = _kept_experts(config, asked, earlier, launch.world_size)
    if kept is not None:
        chosen, line = kept
    else:
        chosen, values, line = decided_experts(config, given, launch.world_size)
        again = "decided again, as ranks or keys are others: " if earlier is not None else ""
        line = f"{again}{line}"
        if launch.rank == 0:
            record = {"asked": asked, "world_size": launch.world_size, "values": values, "line": line}
            with spared(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_summed(path, record)
    if launch.rank == 0:
        print(line, flush=True)
    return chosen


def decided_experts(config: Config, given: frozenset[str], world_size: int) -> tuple[Config, dict[str, Any], str]:
    """Decide for `world_size` ranks: the config, its new values by key, and a line on them. Raises ConfigError."""
    machine, why = machine_of(config)
    if not config.plan:
        refuse_another_kind(machine, config)
    capacity = memory_limits(config, world_size, machine).capacity
    found = decide(config, world_size, expected_vocab_size(config), machine, capacity, given)
    validate.validate(found.config, world_size)
    return found.config, found.values, f"{found.line}; {why}"


def _kept_experts(
    config: Config, asked: dict[str, Any], earlier: dict[str, Any] | None, world_size: int
) -> tuple[Config, str] | None:
    """The config with the choice of the run's earlier attempt, and a line that describes it, if the same was asked for
    on the same number of ranks."""
    if earlier is None or earlier.get("asked") != asked or earlier.get("world_size") != world_size:
        return None
    try:
        chosen = with_keys(config, earlier["values"])
        validate.validate(chosen, world_size)
    except (ConfigError, TypeError, AttributeError):
        return None
    typed = " ".join(f"{key}={value}" for key, value in earlier["values"].items())
    return chosen, f"experts: {typed} is kept, which this run chose for {world_size} rank(s)"
