"""Decide, before anything is allocated, what the config leaves open: the layout (parallel=auto), where experts are
stored, and the order of the passes. The run's folder stores the choices for the next start.

Each rank decides by itself, from inputs that all ranks share: the config, the machine's figures and the number of
ranks. So all ranks choose the same, and parallel/topology.py refuses to start if they do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.checksums import read_summed, write_summed
from base.errors import ConfigError
from base.files import spared
from base.ranks import launched
from configs import validate
from configs.job import Job
from configs.keys import get
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
RUNNERS_UP = 2  # the number that is printed


def read_choice(path: Path, keys: Iterable[str]) -> dict[str, Any] | None:
    """Return the automatic choice that an earlier start stored in the file `path`, or None if there is no file. `keys`:
    the config keys that the choice may set. Raises ConfigError if the file was damaged or edited, since the choice
    decides how the run trains."""
    try:
        content = read_summed(path)
        values = content.get("values")
        if not isinstance(values, dict):
            raise ValueError("it has no object `values` with the chosen keys")
        if others := sorted(set(values) - set(keys)):
            others_text = ", ".join(map(str, others))
            raise ValueError(f"its values have the keys {others_text}, but may have only {', '.join(keys)}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}, which records what an earlier start chose, cannot be read ({' '.join(str(error).split())}). "
            "Restore it, or delete it so that the choice is made again."
        ) from error
    return content


# ---------------------------------------------------------------------------------------------------------------------
# Layout
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutChoice:
    """A config with the parallel layout that was chosen for `world_size` ranks. `record`: the content of
    layout_chosen.json, which includes how the layout was chosen; `lines`: the description to print; `is_kept`: whether
    an earlier start of the run chose this layout."""

    config: Config
    world_size: int
    record: dict[str, Any]
    lines: list[str]
    is_kept: bool = False


def choose_layout(config: Config, given: frozenset[str]) -> LayoutChoice | None:
    """Choose the layout of a run with parallel.layout=auto, and print it on rank 0. Returns None if the config sets the
    layout. `given`: the keys that the command line sets.

    A run keeps the layout of its earlier start if the number of ranks and the layout keys in `given` are unchanged.
    With training.elastic, the layout may use fewer ranks than were started. Raises ConfigError if no layout fits.
    """
    if config.parallel.layout != "auto":
        return None
    machine, why = machine_of(config)
    refuse_another_kind(machine, config)
    launch, earlier = launched(), read_choice(Path(config.run_dir) / LAYOUT_CHOSEN, SEARCHED)
    if earlier is not None:  # keys that the version which wrote the file did not have get their defaults
        earlier["values"] = {key: KEYS[key].fresh_default() for key in ASKED_KEYS} | earlier["values"]
        earlier = earlier if set(earlier["values"]) == set(SEARCHED) else None
    first_error: ConfigError | None = None
    for ranks in range(launch.world_size, 0, -1) if config.training.elastic else [launch.world_size]:
        try:
            reason = _reason_to_search(given, config, earlier, ranks)
            choice = _kept_layout(config, given, earlier, ranks) or searched_layout(
                config, given, machine, ranks, reason
            )
            break
        except ConfigError as error:
            first_error = first_error or error
    else:
        assert first_error is not None
        raise first_error
    if launch.rank == 0:
        print("\n".join([f"layout: {choice.lines[0]}; {why}", *choice.lines[1:]]), flush=True)
    return choice


def searched_layout(
    config: Config, given: frozenset[str], machine: Hardware, world_size: int, reason: str = ""
) -> LayoutChoice:
    """Search for the fastest layout that fits `world_size` ranks. The first of the choice's `lines` begins with
    `reason` and describes the layout. The other lines describe the runners-up and why they are slower. Raises
    ConfigError if no layout fits."""
    job = Job(config, world_size, expected_vocab_size(config), machine.kind)
    answer = search_layout(job, machine, given)
    best = answer.best
    values = {key: get(best.config, key) for key in SEARCHED}
    chosen = with_keys(config, values)
    if chosen.hardware is None:
        chosen.hardware = machine.name
    validate.validate(chosen, world_size)
    lines = [
        f"{reason}{' '.join(best.overrides) or 'the layout of the presets'} is the fastest that fits "
        f"{answer.world_size} rank(s), of {answer.counts.candidates:,} layouts: {best.prediction.seconds:.3g} s a step "
        f"predicted (back-test: {describe_back_tests(answer.errors)})"
    ]
    for layout in answer.runners_up[:RUNNERS_UP]:
        slower = layout.prediction.seconds / best.prediction.seconds - 1
        lines.append(f"  next: {' '.join(layout.overrides)}: {slower:+.0%}, {layout.why}")
    record = {"values": values, "given": _given_layout_keys(config, given), **answer.as_dict()}
    return LayoutChoice(chosen, world_size, record, lines)


def _given_layout_keys(config: Config, given: frozenset[str]) -> dict[str, Any]:
    """Return the layout keys that the command line sets, with their values."""
    return {key: get(config, key) for key in SEARCHED if key in given}


def _kept_layout(
    config: Config, given: frozenset[str], earlier: dict[str, Any] | None, world_size: int
) -> LayoutChoice | None:
    """Return the layout that an earlier start of the run chose, if the number of ranks and the layout keys of the
    command line are unchanged and the config still allows the layout; else None."""
    if earlier is None or earlier.get("world_size") != world_size:
        return None
    if earlier.get("given") != _given_layout_keys(config, given):
        return None
    try:
        chosen = with_keys(config, earlier["values"])
        validate.validate(chosen, world_size)
    except (ConfigError, TypeError):
        return None
    if chosen.hardware is None:
        chosen.hardware = earlier.get("hardware")
    differs = [as_typed(key, value) for key, value in earlier["values"].items() if value != get(config, key)]
    line = f"{' '.join(differs) or 'the layout of the presets'} is kept: this run chose it for {world_size} rank(s)"
    return LayoutChoice(chosen, world_size, earlier, [line], is_kept=True)


def _reason_to_search(given: frozenset[str], config: Config, earlier: dict[str, Any] | None, world_size: int) -> str:
    """Return the first words of the line that describes a new layout: why the earlier layout is not used; "" without an
    earlier layout."""
    if earlier is None:
        return ""
    before = earlier.get("world_size")
    if before != world_size:
        return f"searched again, for {world_size} rank(s) instead of {before}: "
    if earlier.get("given") != _given_layout_keys(config, given):
        return "searched again, because the command line sets other layout keys: "
    return "searched again, because other keys no longer allow the earlier layout: "


# ---------------------------------------------------------------------------------------------------------------------
# Offloaded experts and the order of the passes
# ---------------------------------------------------------------------------------------------------------------------


def choose_experts(config: Config, given: frozenset[str]) -> Config:
    """Return the config with moe.weights_device=auto and training.pass_order=auto replaced by a choice; `config` itself
    if neither is auto. Rank 0 prints the choice and stores it. The next start keeps it if the number of ranks is
    unchanged and the config allows it. Raises ConfigError."""
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
        if earlier is not None:
            line = f"decided again, because the number of ranks or the keys changed: {line}"
        if launch.rank == 0:
            record = {"asked": asked, "world_size": launch.world_size, "values": values, "line": line}
            with spared(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_summed(path, record)
    if launch.rank == 0:
        print(line, flush=True)
    return chosen


def decided_experts(config: Config, given: frozenset[str], world_size: int) -> tuple[Config, dict[str, Any], str]:
    """Choose for `world_size` ranks where experts are stored and in which order passes run. Returns the new config, the
    chosen values by key, and a line that describes the choice. Raises ConfigError."""
    machine, why = machine_of(config)
    if not config.plan:
        refuse_another_kind(machine, config)
    capacity = memory_limits(config, world_size, machine).capacity
    found = decide(Job(config, world_size, expected_vocab_size(config), machine.kind), machine, capacity, given)
    validate.validate(found.config, world_size)
    return found.config, found.values, f"{found.line}; {why}"


def _kept_experts(
    config: Config, asked: dict[str, Any], earlier: dict[str, Any] | None, world_size: int
) -> tuple[Config, str] | None:
    """Return the config with the choice that an earlier start made for experts and pass order, and a line that
    describes the choice. Returns None if the number of ranks or the keys that are auto (in `asked`) have changed, or if
    the choice is no longer possible."""
    if earlier is None or earlier.get("asked") != asked or earlier.get("world_size") != world_size:
        return None
    try:
        chosen = with_keys(config, earlier["values"])
        validate.validate(chosen, world_size)
    except (ConfigError, TypeError, AttributeError):
        return None
    typed = " ".join(f"{key}={value}" for key, value in earlier["values"].items())
    return chosen, f"experts: {typed} is kept: this run chose it for {world_size} rank(s)"
