"""Where a run's experts lie and in which order its passes come where the config leaves it open: decided before anything
is allocated, and kept by the run's folder.

Each rank decides by itself from what all of them know: the config, the machine's figures and the number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs import validate
from configs.checksums import write_summed
from configs.files import spared
from configs.keys import get
from configs.ranks import launched
from configs.schema import Config, ConfigError
from data.vocabulary import expected_vocab_size
from simulator.off_device.choice import decide, is_asked
from simulator.off_device.options import ORDER, STATE, WEIGHTS
from simulator.search.limits import capacity, memory_limits
from simulator.search.space import with_keys
from training.starting.choice_file import read_choice
from training.starting.machine import machine_of, refuse_another_kind

EXPERTS_CHOSEN = "experts_chosen.json"  # in the run's folder


def place_experts(config: Config, given: frozenset[str]) -> Config:
    """The config with moe.weights_device=auto and training.pass_order=auto replaced; the same one where neither is
    asked for. Rank 0 says it, and keeps it for the next start.

    A run that has started keeps its place for them on as many ranks, as long as the rules allow it. Raises ConfigError.
    """
    if not is_asked(config):
        return config
    launch, path = launched(), Path(config.run_dir) / EXPERTS_CHOSEN
    asked = {key: get(config, key) for key in (WEIGHTS, ORDER)}
    earlier = read_choice(path, (WEIGHTS, ORDER, STATE))
    kept = _kept(config, asked, earlier, launch.world_size)
    if kept is not None:
        chosen, line = kept
    else:
        chosen, values, line = decided(config, given, launch.world_size)
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


def decided(config: Config, given: frozenset[str], world_size: int) -> tuple[Config, dict[str, Any], str]:
    """The config for so many ranks, the values that it has got, and what to say. Raises ConfigError."""
    machine, why = machine_of(config)
    if not config.plan:
        refuse_another_kind(machine, config)
    rooms = capacity(memory_limits(config, world_size, machine))
    found = decide(config, world_size, expected_vocab_size(config), machine, rooms, given)
    validate.validate(found.config, world_size)
    return found.config, found.values, f"{found.line}; {why}"


def _kept(
    config: Config, asked: dict[str, Any], earlier: dict[str, Any] | None, world_size: int
) -> tuple[Config, str] | None:
    """The places of the run's earlier attempt and what to say, where the same was asked for as many ranks."""
    if earlier is None or earlier.get("asked") != asked or earlier.get("world_size") != world_size:
        return None
    try:
        chosen = with_keys(config, earlier["values"])
        validate.validate(chosen, world_size)
    except (ConfigError, TypeError, AttributeError):
        return None
    typed = " ".join(f"{key}={value}" for key, value in earlier["values"].items())
    return chosen, f"experts: {typed} is kept, which this run chose for {world_size} rank(s)"
