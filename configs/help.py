"""Texts that `train.py --help` (groups of presets; all keys with value, rule and meaning) and `--version` print."""

from __future__ import annotations

import importlib.metadata
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path

from configs import hardware_files
from configs.keys import get
from configs.schema import KEYS, Config
from configs.values import as_typed

WIDTH = 100  # columns
USAGE = """\
Pretrain GPT or BERT, dense or mixture-of-experts.

  python train.py                                       the quickstart experiment in one process
  python train.py experiment=gpt2_124m                  another preset
  python train.py model=gpt_tiny training.steps=50      the quickstart's training with another model
  bash launch/torchrun.sh --ranks-per-node 2 parallel.expert=2
  python train.py plan=true                             print the needs of the run, do not run
  python train.py plan=search plan_world_size=64 hardware=h100_8x     search for the fastest layout
  python train.py --cfg job --resolve                   print the composed config, do not run
  python train.py -m model=gpt_tiny,bert_tiny           one run after the other
  python train.py --config-dir FOLDER experiment=mine   use presets of your own
  python train.py --version                             versions of Mixtrain and its libraries
  python train.py --help model=gpt_tiny                 the keys below, as this command sets them

See docs/guide/configuration.md.
"""


def describe(config: Config, groups: Mapping[str, list[str]]) -> str:
    """Return the help text of `train.py --help`, with the values of a composed configuration."""
    lines = [USAGE, "Groups of presets: group=choice", ""]
    for group, choices in groups.items():
        lines += textwrap.wrap(f"{group}: {', '.join(choices)}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    machines = f"hardware: {', '.join(hardware_files.names())}"
    lines += ["", "Files of hardware figures: hardware=NAME, or hardware=PATH", ""]
    lines += textwrap.wrap(machines, WIDTH, initial_indent="  ", subsequent_indent="    ")
    lines += ["", "Keys: key=value. Each with its current value, its meaning and [its legal values]"]
    section = None
    for name, key in KEYS.items():
        if name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            lines.append("")
        lines += textwrap.wrap(
            as_typed(name, get(config, name)), WIDTH, initial_indent="  ", subsequent_indent="      "
        )
        lines += textwrap.wrap(
            f"{key.meaning} [{key.rule()}]", WIDTH, initial_indent="      ", subsequent_indent="      "
        )
    return "\n".join(lines)


def version() -> str:
    """Return the versions of Mixtrain and of the libraries that affect results, without importing the libraries."""
    path = Path(__file__).resolve().parents[1] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    found = [f"{project['name']} {project['version']}"]
    for library in ("torch", "megatron-core", "hydra-core"):
        try:
            found.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{library} is not installed")
    return "\n".join(found)
