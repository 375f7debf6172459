"""launch/submit.py and launch/job.py without a Slurm: what is refused, and the line that would be run."""

from __future__ import annotations

import re

import pytest

from base.errors import ConfigError
from launch import job, submit
from tests.configs import advice

pytestmark = pytest.mark.fast

TINY = ["experiment=gpt_moe_tiny", "training.global_batch_size=64", "training.micro_batch_size=1"]


@pytest.mark.parametrize(
    ("options", "world_sizes", "line"),
    [
        ([], [8], []),
        (["--nodes", "2"], [16], ["--nodes=2"]),
        (["-N", "1-2", "--ranks-per-node", "4"], [4, 8], ["--nodes=1-2"]),
        (
            ["--nodes=4", "--gpus-per-node=h200:4", "--time", "1:00:00"],
            [16],
            ["--nodes=4", "--gpus-per-node=h200:4", "--time", "1:00:00"],
        ),
        (["--gpus-per-node", "0", "--account=a b"], [1], ["--gpus-per-node=0", "--account=a b"]),
    ],
)
def test_sbatch_line(options: list[str], world_sizes: list[int], line: list[str]) -> None:
    request = submit.prepare([*options, "--", *TINY])
    assert request.world_sizes == world_sizes
    assert request.run_dirs == ["runs/gpt_moe_tiny"]
    own = ["--ranks-per-node", "4"] if "--ranks-per-node" in options else []
    assert request.line == ["sbatch", *line, "launch/slurm.sbatch", *own, "--", *TINY]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "3", "--", *TINY], r"^training.global_batch_size \(64\) must be divisible by .*\(24\)\. Try "),
        (["--nodes", "1-3", "--", *TINY], r"^training.global_batch_size \(64\) must be divisible by .*\(24\)\. Try "),
        (["--", *TINY, "parallel.tensor=3"], r"^parallel.tensor \(3\) must divide .*Try "),
        (["--", *TINY, "parallel.tensr=2"], "parallel.tensr.*parallel.tensor"),
        (["--nodes", "two", "--"], r"^--nodes \(two\) must be a whole number of at least 1\. Try --nodes 1$"),
        (["--nodes", "4-2", "--"], r"^--nodes \(2\) must be a whole number of at least 4"),
        (["--ranks-per-node", "0", "--"], r"^--ranks-per-node \(0\) must be a whole number of at least 1"),
        (["--array", "7-3", "--"], r"^--array \(7-3\) must be numbers and ranges"),
        (["--nodes", "2", "training.steps=5"], "must come after `--`"),
        (["--nodes"], "Try python -m launch.submit --help"),
    ],
)
def test_impossible_requests_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        submit.prepare(arguments)


@pytest.mark.parametrize(
    ("options", "typed"),
    [
        (["--nodes", "two"], TINY),
        (["--nodes", "4-2"], TINY),
        (["--ranks-per-node", "0"], TINY),
        (["--array", "7-3"], TINY),
        (["--nodes", "3"], TINY),
        ([], [*TINY, "parallel.tensor=3"]),
        ([], [*TINY, "optimizer.lrr=0.01"]),
        ([], [*TINY, "data.vocab_size=319"]),
    ],
)
def test_what_is_advised_is_taken(options: list[str], typed: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        submit.prepare([*options, "--", *typed])
    option = re.search(r"Try (--[a-z-]+ \S+)$", str(caught.value))
    tries = [(option[1].split(), typed)] if option else []
    for fixes in [] if option else advice.split(str(caught.value))[1]:
        if not fixes[0].startswith("WORLD_SIZE="):
            tries.append((options, [*(typed if options else typed[:-1]), *fixes]))  # the last one was wrong
    assert tries, caught.value
    for front, back in tries:
        assert submit.prepare([*front, "--", *back]).world_sizes


def test_elastic_config_is_not_refused_for_the_ranks_that_it_leaves_out() -> None:
    assert submit.prepare(["--nodes", "3", "--", *TINY, "training.elastic=true"]).world_sizes == [24]


def test_a_layout_that_will_be_searched_for_need_not_fit_the_preset() -> None:
    """The preset's layout takes 32 ranks at least; a key that is typed has to go with the model all the same."""
    assert job.compose_for(["experiment=mixtral_8x7b", "parallel=auto"], 8).parallel.layout == "auto"
    with pytest.raises(ConfigError, match=r"world_size \(8\)"):
        job.compose_for(["experiment=mixtral_8x7b"], 8)
    with pytest.raises(ConfigError, match=r"parallel.tensor \(3\) must divide"):
        job.compose_for(["experiment=mixtral_8x7b", "parallel=auto", "parallel.tensor=3"], 8)


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("3", [3]), ("0-3", [0, 1, 2, 3]), ("0-15:4", [0, 4, 8, 12]), ("1,3,5-6%2", [1, 3, 5, 6]), ("5,0-1", [0, 1, 5])],
)
def test_tasks_of_an_array(text: str, tasks: list[int]) -> None:
    assert submit._array_tasks(text) == tasks


@pytest.mark.parametrize(
    ("overrides", "added", "run_dir"),
    [
        ([], ["name='gpt_moe_tiny_3'"], "runs/gpt_moe_tiny_3"),
        (["name=it's"], ["name='it\\'s_3'"], "runs/it's_3"),
        (["run_dir=out/a"], ["name='gpt_moe_tiny_3'", "run_dir='out/a_3'"], "out/a_3"),
        (["run_dir='out/${name}'"], ["name='gpt_moe_tiny_3'"], "out/gpt_moe_tiny_3"),
        (
            ["name='seed${oc.env:SLURM_ARRAY_TASK_ID}'", "training.seed='${oc.env:SLURM_ARRAY_TASK_ID}'"],
            [],
            "runs/seed3",
        ),
    ],
)
def test_task_of_an_array_has_a_name_of_its_own(overrides: list[str], added: list[str], run_dir: str) -> None:
    quoted = [text.replace("name=it's", 'name="it\'s"') for text in overrides]
    found = job.make_scheduled_run([*TINY, *quoted], 1, array_task=3)
    assert (found.overrides, found.config.run_dir) == (added, run_dir)


def test_array_names_the_folders_of_its_tasks() -> None:
    request = submit.prepare(["--array", "1-9:4", "--gpus-per-node=0", "--", *TINY])
    assert request.run_dirs == ["runs/gpt_moe_tiny_1", "runs/gpt_moe_tiny_9"]
    assert request.line == ["sbatch", "--gpus-per-node=0", "--array=1-9:4", "launch/slurm.sbatch", "--", *TINY]


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert submit.main(["--nodes", "2", "--dry-run", "--", *TINY, "name=a b"]) == 0
    said, line = capsys.readouterr().out.splitlines()
    assert said == "submit: 16 ranks; run runs/a b"
    assert line == f"sbatch --nodes=2 launch/slurm.sbatch -- {' '.join(TINY)} 'name=a b'"

    assert submit.main(["--nodes", "2", "--", *TINY]) == 1
    assert "sbatch is not on PATH here: nothing was submitted" in capsys.readouterr().err

    assert submit.main(["--nodes", "3", "--", *TINY]) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == ""
        and captured.err.startswith("config error: training.global_batch_size (64)")
        and captured.err.count("\n") == 1
    )

    assert submit.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("Submit a training to Slurm")


def test_job_prints_where_it_writes_or_why_it_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert job.main(["--world-size", "2", "--array-task", "4", "--", *TINY]) == 0
    assert capsys.readouterr().out == "runs/gpt_moe_tiny_4\nname='gpt_moe_tiny_4'\n"
    assert job.main(["--world-size", "3", "--", *TINY]) == 2
    assert capsys.readouterr().err.startswith("config error: training.global_batch_size (64)")
