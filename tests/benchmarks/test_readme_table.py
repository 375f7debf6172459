"""What README and the guides show can be typed one after the other in one clone: runs and folders have names of their
own. The benchmark that types the tasks finds all of them, and a run that trained nothing fails it."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict

import pytest

from benchmarks.checks import readme_table
from configs.compose import compose
from tests.distributed import ROOT
from tests.test_commands import COMMAND, GUIDES

pytestmark = pytest.mark.fast

README, INDEX = ((ROOT / name).read_text() for name in ("README.md", "docs/README.md"))
TASKS = [*readme_table.tasks_of_readme(README), *readme_table.tasks_of_index(INDEX)]
TAKES = r"--(ranks-per-node|max-restarts|num-nodes|node-rank|master-addr|nodes|time|array|gpus-per-node|config-dir) \S+"


def typed() -> list[str]:
    """The commands of the tasks, then those of the code blocks of README and the guides, in order."""
    commands = [row.command for row in TASKS if row.command is not None]
    for page in [README, *(guide.read_text() for guide in GUIDES)]:
        page = re.sub(r"\s*\\\n\s*", " ", page)
        commands += [line.strip() for line in page.splitlines() if line.startswith("    ") and COMMAND.match(line[4:])]
    return [re.sub(r"\s+#.*", "", command).removeprefix(".venv/bin/") for command in commands]


def overrides_of(command: str) -> list[str]:
    """The config's keys of a command that trains, but for weights that another command makes."""
    words = shlex.split(re.sub(TAKES, "", command.partition(" -- ")[2] or command))
    return [word for word in words if "=" in word and not word.startswith("checkpoint.weights=")]


def without_steps(overrides: list[str]) -> list[str]:
    return sorted(word for word in overrides if not word.startswith("training.steps="))


def test_tasks_have_commands_that_can_be_typed() -> None:
    shown = README.partition("\n## Tasks\n")[2]
    assert len({row.want for row in TASKS[:13]}) == shown.count("\n    # ") == 12
    assert len(TASKS) == 13 + INDEX.count("\n| ") - INDEX.count("\n| I want to ")
    assert all(re.match(r"(python|bash) ", row.command) for row in TASKS if row.command is not None)
    assert sum(readme_table.trains(row.command or "") for row in TASKS) == 10
    for row in TASKS:
        for file_names in re.findall(r"(?:corpus=|--files )(.+?)(?: name=|$)", row.command or ""):
            assert all((ROOT / word).exists() for word in file_names.split()), row.command


def test_every_run_has_a_name_of_its_own() -> None:
    """Another command for the same folder would say "finished" and train nothing; more steps of the same go on."""
    runs: dict[str, list[list[str]]] = defaultdict(list)
    for command in filter(readme_table.trains, typed()):
        if "--config-dir" in command or "N train.py" in command:
            continue  # a folder of the user's; a synopsis
        overrides = overrides_of(command)
        config = compose(overrides)
        others = runs[config.run_dir]
        assert all(without_steps(overrides) == without_steps(other) for other in others), (command, config.run_dir)
        others.append(overrides)
    assert len(runs) > 15


def test_every_folder_that_is_made_has_a_name_of_its_own() -> None:
    """A folder that is there is refused, unless the command is the one that made it."""
    made: dict[str, set[str]] = defaultdict(set)
    for command in typed():
        found = re.search(r"-m (?:checkpoint convert|checkpoint\.export|models\.convert \w+) (\S+) (\S+)", command)
        if found is not None and found[1] != found[1].upper():
            made[found[2]].add(re.sub(r" --dtype .*", "", command))
    assert {"hf_folder", "imported"} <= made.keys()
    assert {folder: commands for folder, commands in made.items() if len(commands) > 1} == {}


@pytest.mark.parametrize("page", ["README.md", "docs/README.md", *(f"docs/guide/{guide.name}" for guide in GUIDES)])
def test_nothing_that_is_shown_stands_for_a_path(page: str) -> None:
    shown = [line for line in (ROOT / page).read_text().splitlines() if line.startswith(("    ", "| "))]
    assert [line for line in shown if re.search(r"path/to|\ba\.txt|\bcorpus\.jsonl", line)] == []


GPT = "gpt: gpt, cpu, 1 rank; vocabulary 512; 1.9 MFLOP per token; steps {} to {} of 512 tokens; writing to {}\n"
TRAIN = "python train.py model=gpt_tiny"


@pytest.mark.parametrize(
    ("command", "status", "output", "ok"),
    [
        (TRAIN, 0, GPT.format(0, 3, "runs/new") + "step 3/3 | loss 1.0\n", True),
        (TRAIN, 0, GPT.format(5, 9, "runs/old") + "step 9/9 | loss 1.0\n", True),
        (TRAIN, 0, GPT.format(5, 5, "runs/old") + "finished\n", False),
        (TRAIN, 0, GPT.format(2, 9, "runs/old") + "step 9/9 | loss 1.0\n", False),
        (TRAIN, 0, GPT.format(0, 3, "runs/new") + "step 2/3 | loss 1.0\n", False),
        (TRAIN, 1, GPT.format(0, 3, "runs/new") + "step 3/3 | loss 1.0\n", False),
        ("python train.py --help", 0, "keys\n", True),
        ("python -m checkpoint ls runs/quickstart", 2, "error: it is not there\n", False),
    ],
)
def test_the_outcome_of_a_row_is_checked(command: str, status: int, output: str, ok: bool) -> None:
    assert readme_table.verdict(command, status, output, {"runs/old 5"})[0] == ok
