"""Print the answer to `plan=true`, `plan=json` or `plan=search` without using a device."""

from __future__ import annotations

import json
from pathlib import Path

from base.files import spared, write_text
from base.ranks import launched, world_size
from configs.job import Job
from configs.schema import Config
from configs.validate import planned_world_size
from data.document_lengths import planned_segments, planned_share
from data.tokenizer import expected_vocab_size
from simulator import text
from simulator.offload.expert_choice import is_asked
from simulator.run_plan import device_type
from simulator.search.answer import answer_text
from simulator.search.search import search_layout
from training.starting import choices
from training.starting.machine import machine_of

SEARCH_FILE = "search.json"  # in the run's folder, like plan.json


def show(config: Config, given: frozenset[str]) -> int:
    """Print the plan that `config.plan` asks for, and return the exit status. `given`: the keys that the command line
    sets. Raises ConfigError if no layout fits."""
    ranks, vocab_size = planned_world_size(config, world_size()), expected_vocab_size(config)
    prints = launched().rank == 0
    if config.plan == "search":
        searched, why = machine_of(config)
        answer = search_layout(Job(config, ranks, vocab_size, searched.kind), searched, given)
        if not prints:
            return 0
        path = Path(config.run_dir) / SEARCH_FILE
        print(f"For {ranks} rank(s) of {searched.name} ({why}): {searched.about}\n", flush=True)
        print(answer_text(answer), flush=True)
        with spared(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(answer.as_dict()))
            print(f"\nwritten for scripts: {path}", flush=True)
        return 0
    machine = machine_of(config)[0] if config.hardware is not None else None
    if config.parallel.layout == "auto":
        machine, why = machine_of(config)
        choice = choices.searched_layout(config, given, machine, ranks)
        config = choice.config
        if prints and config.plan != "json":
            print("\n".join([f"layout: {choice.lines[0]}; {why}", *choice.lines[1:], ""]), flush=True)
    if is_asked(config):
        config, _, line = choices.decided_experts(config, given, ranks)
        machine = machine_of(config)[0]
        if prints and config.plan != "json":
            print(f"{line}\n", flush=True)
    job = Job(config, ranks, vocab_size, device_type(config) if machine is None else machine.kind)
    return text.show(job, planned_share(config), planned_segments(config), machine)
