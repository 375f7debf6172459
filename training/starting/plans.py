"""What `plan=true`, `plan=json` and `plan=search` print; nothing of it touches a device."""

from __future__ import annotations

import json
from pathlib import Path

from configs.files import spared, write_text
from configs.ranks import launched, world_size
from configs.schema import Config
from configs.validate import planned_world_size
from data.pieces import planned_pieces, planned_share
from data.vocabulary import expected_vocab_size
from simulator import text
from simulator.off_device.choice import is_asked
from simulator.search import words
from simulator.search.search import search_layout
from training.starting import experts_choice, layout_choice
from training.starting.machine import machine_of

SEARCH_FILE = "search.json"  # in the run's folder, beside plan.json


def show(config: Config, given: frozenset[str]) -> int:
    """Print what is asked for; the exit status. `given`: the keys of the command line. Raises ConfigError where
    nothing fits."""
    ranks, vocab_size = planned_world_size(config, world_size()), expected_vocab_size(config)
    if config.plan == "search":
        return _search(config, given, ranks, vocab_size)
    machine = machine_of(config)[0] if config.hardware is not None else None
    if config.parallel.layout == "auto":
        machine, why = machine_of(config)
        choice = layout_choice.searched(config, given, machine, ranks)
        config = choice.config
        if launched().rank == 0 and config.plan != "json":
            print("\n".join([f"layout: {choice.lines[0]}; {why}", *choice.lines[1:], ""]), flush=True)
    if is_asked(config):
        config, _, line = experts_choice.decided(config, given, ranks)
        machine = machine_of(config)[0]
        if launched().rank == 0 and config.plan != "json":
            print(f"{line}\n", flush=True)
    return text.show(config, ranks, vocab_size, planned_share(config), planned_pieces(config), machine)


def _search(config: Config, given: frozenset[str], ranks: int, vocab_size: int) -> int:
    """Search, print the answer and write it for scripts."""
    machine, why = machine_of(config)
    answer = search_layout(config, ranks, vocab_size, machine, given)
    if launched().rank != 0:
        return 0
    path = Path(config.run_dir) / SEARCH_FILE
    print(f"For {ranks} rank(s) of {machine.name} ({why}): {machine.about}\n", flush=True)
    print(words.text(answer), flush=True)
    with spared(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(answer.as_dict()))
        print(f"\nwritten for scripts: {path}", flush=True)
    return 0
