"""Every command that README, the guide and the help texts show is right as typed: TABLE says which test runs it, or
tries it dry here.

The rows of TABLE are by program, so that another example of a known one is tried as it stands. A dry run goes as far as
it can without files, ranks or a cluster: the tool's own command line is parsed, a configuration is composed and checked
for the ranks that it would have, a launch script runs with stand-ins.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs import compose
from configs.schema import Config
from launch import submit
from launch.job import compose_for
from tests.launch.test_gpu_check import OF_CHECK, OF_IMAGE
from tests.test_launch import NVIDIA_SMI, PYTHON, ROOT, Sandbox, agent_arguments, installed, parsed, sandbox
from tests.waits import LONG

__all__ = ["installed", "sandbox"]  # fixtures

GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *GUIDES,
    *sorted((ROOT / "docs" / "results").glob("*.md")),
]
SCRIPTS = ["gpu_check.sh", "quickstart.sh", "setup.sh", "test.sh", "torchrun.sh", "wheels.sh"]
# their first lines say how to use them
COMMENTED = [ROOT / "launch" / "slurm.sbatch", ROOT / "launch" / "kubernetes.yaml"]
COMMAND = re.compile(
    r"(bash launch/|(\.venv/bin/)?python (train\.py|-m )|\.venv/bin/ruff |sbatch |scancel |torchrun |pip install )"
)
GPUS = 8  # of a node, where an example does not say it

SLURM = "tests/launch/test_slurm.py::test_training_on_two_nodes_is_preempted_resumes_loses_a_rank_and_finishes"
PRETENDED_CHECK = "tests/benchmarks/test_card_on_device.py::test_rungs_run_on_the_pretended_device"
# The first row that fits a command says how it is checked: the function dry_NAME below, or a test that is elsewhere.
TABLE: list[tuple[str, str]] = [
    (r".*python -m tests\.cuda\.run ", "tests/cuda/test_trainings.py::test_any_command_runs_on_the_device"),
    (r".*python train\.py --help$", "tests/test_tools.py::test_answers_come_from_any_folder_without_torch"),
    (r"python train\.py --config-dir presets ", "tests/configs/test_compose.py::test_the_guides_preset_of_ones_own"),
    (r".*python train\.py", "train"),
    (r"bash launch/torchrun\.sh", "torchrun_sh"),
    (r"bash launch/quickstart\.sh", "quickstart"),
    (r"bash launch/setup\.sh", "setup"),
    (r"bash launch/test\.sh", "tests/test_launch.py::test_test_script_runs_everything_and_fails_if_anything_does"),
    (r"bash launch/gpu_check\.sh", "gpu_check"),
    (r"bash launch/wheels\.sh", "wheels"),
    (r"python -m tests\.cuda\.run -- bash launch/gpu_check\.sh --small", PRETENDED_CHECK),
    (r"\.venv/bin/ruff format$", "tests/test_launch.py::test_test_script_runs_everything_and_fails_if_anything_does"),
    (r".*python -m launch\.submit", "submit"),
    (r".*python -m launch\.job", "job"),
    (r"sbatch .* launch/slurm\.sbatch --", "sbatch"),
    (
        r"scancel --batch --signal=USR1 JOB$",
        "tests/launch/test_slurm.py::test_training_on_two_nodes_is_preempted_resumes_loses_a_rank_and_finishes",
    ),
    (r"torchrun ", "torchrun"),
    (r".*python -m data\.prepare --help$", "tests/test_tools.py::test_answers_come_from_any_folder_without_torch"),
    (r".*python -m data\.prepare", "prepare"),
    (r".*python -m (checkpoint\b|(checkpoint|inference|models|training|benchmarks)\.)", "tool"),
    (
        r"python -m simulator\.(fit|backtest) ",
        "tests/simulator/clock/test_fit.py::test_commands_write_a_file_and_hold_it_to_rows",
    ),
    (r"python -m tests\.cuda\.launches$", "tests/cuda/test_pretended_gpu.py::test_launches"),
    (r"python -m tests\.cuda\.matrix", "tests/cuda/test_pretended_gpu.py::test_the_matrix_says_what_is_wrong"),
    (r"python -m tests\.cuda\.fake\b", "tests/cuda/test_fake.py::test_every_preset_takes_a_step_as_planned"),
    (r"python -m tests\.durations ", "tests/test_durations.py::test_command_line"),
]

# The test that runs such a command to its end. Benchmarks have their results instead.
RUNS: list[tuple[str, str]] = [
    (r".*python -m tests\.cuda\.run ", "tests/cuda/test_trainings.py::test_any_command_runs_on_the_device"),
    (r".*train\.py --help$", "tests/test_tools.py::test_answers_come_from_any_folder_without_torch"),
    (r".*train\.py --config-dir ", "tests/configs/test_compose.py::test_the_guides_preset_of_ones_own"),
    (r".*train\.py .*plan=", "tests/simulator/test_plan.py::test_command_line_plans_without_a_cluster"),
    (r".*train\.py", "tests/training/test_console.py::test_a_run_on_a_terminal"),
    (r"bash launch/torchrun\.sh", "tests/training/test_faults.py::test_restarts_go_on_by_themselves"),
    (r"bash launch/quickstart\.sh", "tests/test_launch.py::test_quickstart_command_line"),
    (r"bash launch/setup\.sh", "tests/test_launch.py::test_setup_installs_once_and_then_calls_nothing"),
    (r"bash launch/test\.sh", "tests/test_launch.py::test_test_script_runs_everything_and_fails_if_anything_does"),
    (r"(python -m tests\.cuda\.run -- )?bash launch/gpu_check\.sh", PRETENDED_CHECK),
    (r"bash launch/wheels\.sh", "tests/test_launch.py::test_wheels_of_everything_that_is_pinned"),
    (r"\.venv/bin/ruff", "tests/test_launch.py::test_test_script_runs_everything_and_fails_if_anything_does"),
    (r".*python -m launch\.submit|scancel|sbatch", SLURM),
    (r".*python -m launch\.job", "tests/launch/test_submit.py::test_job_prints_where_it_writes_or_why_it_cannot_be"),
    (r"torchrun ", "tests/launch/test_network.py::test_a_run_on_one_node_listens_on_the_loopback_alone"),
    (r".*python -m data\.prepare", "tests/data/test_prepare.py::test_command_line"),
    (r".*python -m checkpoint(?!\.)", "tests/checkpoint/test_checkpoint.py::test_command_line"),
    (r".*python -m inference\.generate", "tests/inference/test_generate.py::test_command_line"),
    (r".*python -m inference\.evaluate", "tests/inference/test_evaluate.py::test_perplexity_of_files"),
    (r".*python -m inference\.fill_mask", "tests/inference/test_evaluate.py::test_masked_words"),
    (
        r"python -m simulator\.(fit|backtest) ",
        "tests/simulator/clock/test_fit.py::test_commands_write_a_file_and_hold_it_to_rows",
    ),
    (r".*python -m training\.report", "tests/training/test_report.py::test_command_line"),
    (r".*python -m training\.status", "tests/training/test_run_identity.py::test_status_names_the_process"),
    (r".*python -m checkpoint\.export", "tests/checkpoint/test_export.py::test_an_export_holds_its_own_files_alone"),
    (r".*python -m models\.convert", "tests/checkpoint/test_export.py::test_there_and_back_with_the_same_text"),
    (r"python -m tests\.cuda\.launches$", "tests/cuda/test_pretended_gpu.py::test_launches"),
    (r"python -m tests\.cuda\.matrix", "tests/cuda/test_pretended_gpu.py::test_the_matrix_says_what_is_wrong"),
    (r"python -m tests\.cuda\.fake\b", "tests/cuda/test_fake.py::test_every_preset_takes_a_step_as_planned"),
    (r"python -m tests\.durations ", "tests/test_durations.py::test_command_line"),
]


def commands_of_page(text: str) -> set[str]:
    """The commands in code blocks and code spans, without comments; lines that end in a backslash go on."""
    found = set()
    fenced = False
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        fenced ^= line.startswith("```")
        if fenced or line.startswith("    "):
            found.add(line.strip().removeprefix("$ "))
    found.update(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text))
    return {command for command in map(_clean, found) if command}


def commands_of_help(text: str) -> set[str]:
    """The commands in a help text: at a line's start, with a remark behind two spaces, or in code spans."""
    text = text.replace("\n  ", "\n")
    lines = [re.split(r"\s{2,}", line.strip())[0] for line in text.splitlines()]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return {command for command in map(_clean, [*lines, *spans]) if command}


def _clean(line: str) -> str | None:
    # a synopsis
    if COMMAND.match(line) is None or re.search(r"\[(SBATCH|OPTION|KEY|PYTEST|--array-task)|\w\\?\|\w", line):
        return None
    return re.sub(r"\s+#.*", "", line).strip()


def all_commands() -> dict[str, str]:
    """Each command, and where it stands."""
    found: dict[str, str] = {}
    for page in PAGES:
        found |= dict.fromkeys(commands_of_page(page.read_text()), page.name)
    for path in COMMENTED:
        found |= dict.fromkeys(commands_of_help(re.sub(r"^#", "", path.read_text(), flags=re.M)), path.name)
    for name in SCRIPTS:
        done = subprocess.run(
            ["bash", str(ROOT / "launch" / name), "--help"], capture_output=True, text=True, timeout=LONG
        )
        found |= dict.fromkeys(commands_of_help(done.stdout), f"{name} --help")
    return found


def check_of(command: str) -> str | None:
    """Return the entry of a command in TABLE."""
    return next((check for pattern, check in TABLE if re.match(pattern, command)), None)


def run_of(command: str) -> str | None:
    """The test that runs it, by RUNS."""
    return next((test for pattern, test in RUNS if re.match(pattern, command)), None)


def exists(test: str) -> bool:
    path, _, name = test.partition("::")
    return f"\ndef {name}(" in (ROOT / path).read_text()


COMMANDS = all_commands()


def test_every_command_stands_in_the_table_with_a_test_that_exists() -> None:
    assert len(COMMANDS) > 40
    assert {command: location for command, location in COMMANDS.items() if check_of(command) is None} == {}
    for pattern, check in TABLE:
        if "::" in check:
            assert exists(check), check
        else:
            assert f"dry_{check}" in globals(), check
        assert any(re.match(pattern, command) for command in COMMANDS) or check == "prepare", (
            f"no command is like {pattern}"
        )


def test_every_program_has_a_test_that_runs_it() -> None:
    ours = {command: location for command, location in COMMANDS.items() if " -m benchmarks." not in command}
    assert {command: location for command, location in ours.items() if run_of(command) is None} == {}
    for pattern, test in RUNS:
        assert exists(test), test
        assert any(re.match(pattern, command) for command in ours), f"no command is like {pattern}"


@pytest.mark.parametrize("command", ["python -m training.unknown runs/quickstart", "bash launch/unknown.sh"])
def test_a_command_without_a_test_is_found(command: str) -> None:
    assert commands_of_page(f"| do it | `{command}` |") == {command}
    assert run_of(command) is None


@pytest.mark.parametrize("command", [command for command in COMMANDS if "::" not in (check_of(command) or "::")])
def test_command_as_it_is_typed(
    command: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = re.sub(r"\s\.\.\.(?=\s|$)", "", command)
    check: Callable[..., None] = globals()[f"dry_{check_of(command)}"]
    check(shlex.split(text), request, monkeypatch)


def dry_train(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed and checked as train.py does, for one process."""
    arguments = words[words.index("train.py") + 1 :]
    folder = request.getfixturevalue("tmp_path")
    monkeypatch.chdir(folder)
    if "checkpoint.weights=imported" in arguments:
        # a folder of `models.convert import` is another test's
        monkeypatch.setattr(compose, "compose", lambda *_: Config())
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as end:
        compose.run(lambda config, given: 0)
    message = request.getfixturevalue("capsys").readouterr().err
    promised = re.search(re.escape(shlex.join(words)) + r"\n    (config error: .*)", PAGES[0].read_text())
    assert (end.value.code, message) == ((0, "") if promised is None else (2, f"{promised[1]}\n"))


def ranks_of(options: dict[str, Any]) -> int:
    return int(options["nproc_per_node"]) * int(options["nnodes"].split(":")[0])


def dry_torchrun_sh(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real script, with stand-ins for Python and for a node's GPUs; then the configuration for all ranks."""
    box: Sandbox = request.getfixturevalue("installed")
    if len(words) > 2:
        box.put("nvidia-smi", f"#!/usr/bin/env bash\nfor i in {{1..{GPUS}}}; do echo GPU $i: a; done\n")
    result = box.run("torchrun.sh", *words[2:])
    assert (result.returncode, result.stderr) == (0, "")
    options, overrides = parsed(agent_arguments(box)[1:])
    compose_for(overrides, ranks_of(options))


def dry_quickstart(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    box: Sandbox = request.getfixturevalue("installed")
    assert box.run("quickstart.sh", *words[2:]).returncode == 0
    options, overrides = parsed(agent_arguments(box)[1:])
    compose_for(overrides, ranks_of(options))


def dry_gpu_check(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for a GPU: the options are handed to the program, which takes them."""
    box: Sandbox = request.getfixturevalue("sandbox")
    box.put("python3.12", PYTHON.replace('case "$*" in\n', f'case "$*" in\n{OF_CHECK}{OF_IMAGE}'))
    box.put("nvidia-smi", NVIDIA_SMI)
    (box.root / "torch-is-in").write_text("here\n")
    (box.root / "wheels").mkdir()
    (box.root / "wheels" / "a.whl").touch()
    result = box.run("gpu_check.sh", *words[2:])
    assert (result.returncode, result.stderr) == (7, "")
    handed = (box.root / "options").read_text().splitlines()
    dry_tool(["-m", "benchmarks.card", *handed], request, monkeypatch)


def dry_wheels(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    box: Sandbox = request.getfixturevalue("sandbox")
    box.put("python3", PYTHON)
    assert box.run("wheels.sh", *words[2:]).returncode == 0


def dry_submit(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = words[words.index("launch.submit") + 1 :]
    if not arguments:  # prose names the tool
        return
    assert submit.main(["--dry-run", *arguments]) == 0, request.getfixturevalue("capsys").readouterr().err


def dry_job(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.import_module("launch.job").main(words[words.index("launch.job") + 1 :]) == 0


def dry_sbatch(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the line that `launch.submit` makes of the same options."""
    script, dashes = words.index("launch/slurm.sbatch"), words.index("--")
    made = submit.prepare([*words[1:script], "--", *words[dashes + 1 :]])
    assert sorted(made.line) == sorted(words)


def dry_torchrun(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import parse_args

    assert (
        parse_args([word.replace("N", "2") if word == "N" else word for word in words[1:]]).training_script
        == "train.py"
    )


class Parsed(BaseException):
    """The command line was understood."""


def dry_tool(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool's own parser takes the line; nothing is done. A tool alone, as prose names it, need only be there."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)  # that of a tool's own commands
            _, rest = parse(self, *arguments, **options)
        assert not any(word.startswith("-") or "=" not in word for word in rest), rest  # overrides alone may be left
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
    name = words[words.index("-m") + 1]
    path = ROOT.joinpath(*name.split("."))
    if words[-1] == name:
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
        return
    module = importlib.import_module(f"{name}.__main__" if path.is_dir() else name)
    monkeypatch.setattr(sys, "argv", [name, *words[words.index(name) + 1 :]])
    with pytest.raises(Parsed):
        module.main()


def dry_prepare(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("data.prepare.command").parse_arguments(words[words.index("data.prepare") + 1 :])


def dry_setup(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for Python and pip."""
    box: Sandbox = request.getfixturevalue("sandbox")
    (box.root / "torch-is-in").write_text("here\n")
    if "--wheels" in words:
        (box.root / words[words.index("--wheels") + 1]).mkdir()
        (box.root / words[words.index("--wheels") + 1] / "a.whl").touch()
    result = box.run("setup.sh", *words[2:])
    assert (result.returncode, result.stderr) == (0, "")


def test_nothing_asks_a_registry_for_our_name() -> None:
    """A registry's package of that name is a stranger's: extras are installed from the clone by the setup command."""
    files = [path for kind in ("py", "md", "sh", "yaml", "sbatch") for path in ROOT.glob(f"[!.]*/**/*.{kind}")]
    for path in [*files, *ROOT.glob("*.md"), ROOT / "Dockerfile"]:
        if path != Path(__file__):
            assert re.search(r"pip3? install [^|&;]*mixtrain", path.read_text(), re.I) is None, path
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "Private :: Do Not Upload" in project["classifiers"]  # registries refuse what has this
    assert importlib.import_module("inference.evaluate").HARNESS in COMMANDS  # the error's advice, tried here


def test_help_texts_of_the_tools_show_commands_that_they_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the texts written by hand are checked; argparse derives those of options from them."""
    shown = {}
    for name in (
        "launch.submit",
        "launch.job",
        "data.prepare.command",
        "models.convert",
        "inference.generate",
        "inference.evaluate",
    ):
        with contextlib.suppress(SystemExit):
            importlib.import_module(name).main(["--help"])
        shown[name] = commands_of_help(capsys.readouterr().out)
    assert len(shown["launch.submit"]) == 2
    for command in set().union(*shown.values()):
        assert check_of(command) is not None, command
    for command in shown["launch.submit"]:
        assert command in {line.removeprefix(".venv/bin/") for line in COMMANDS}, (
            f"{command} stands in the README too, where it is tried"
        )
