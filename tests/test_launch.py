"""The launch scripts, run in a copy of the repository with stand-ins for Python, pip, torchrun, nvidia-smi and Slurm.

PATH holds only the stand-ins and the few system tools that the scripts use, so nothing depends on what else is
installed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from launch import system_torch
from tests.waits import LONG, until

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch"), ROOT / ".ci" / "run"])
TOOLS = (
    "bash cat cut dirname env flock grep head mkdir mv nproc realpath rm sed sha256sum sleep sort touch tr cp "
    "basename date ls tail"
).split()

PYTHON = """#!/usr/bin/env bash
case "$*" in
    -V) echo "Python 3.12.1" ;;
    "-c import sys; sys.exit"*) exit 0 ;;
    "-c import venv, ensurepip") [[ ! -e "$SANDBOX/no-venv-module" ]] ;;
    "-c import os, sys; print(os.path.realpath(sys.prefix))") cat "$(dirname "$0")/prefix" ;;
    "-m venv "*) echo "venv${4:+ $4}" >>"$SANDBOX/log"
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && realpath "$3" >"$3/bin/prefix"
        echo "include-system-site-packages = $([[ -n ${4:-} ]] && echo true || echo false)" >"$3/pyvenv.cfg" ;;
    "-c import importlib.util as u, os; "*) cat "$SANDBOX/torch-is-in" ;;
    "launch/system_torch.py "*) echo "torch==2.11.0" ;;
    "-m pip --version") ;;
    "-m pip wheel "* | "-m pip download "*) echo "pip ${*:3}" >>"$SANDBOX/log" ;;
    "-m pip install "*) echo "pip ${*:3}" >>"$SANDBOX/log"
        while [[ -e "$SANDBOX/pip-waits" ]]; do sleep 0.05; done
        [[ ! -e "$SANDBOX/pip-fails" ]] || { echo "ERROR: no such package" >&2; exit 1; } ;;
    "train.py --cfg job --package moe"*) cat "$SANDBOX/moe.yaml" ;;
    "-m launch.agent "*) echo "$PWD $PYTHONPATH $PYTHONSAFEPATH" >"$SANDBOX/where"
        printf '%s\\n' "OMP_NUM_THREADS=$OMP_NUM_THREADS" "${@:3}" >>"$SANDBOX/agent"
        exit "$(cat "$SANDBOX/agent-status")" ;;
    "-m launch.job "*) echo "${*:3}" >>"$SANDBOX/job"; cat "$SANDBOX/described" ;;
    *) echo "stand-in python: what is $*?" >&2; exit 99 ;;
esac
"""
SHIM = "#!/usr/bin/env bash\necho 'command not found' >&2\nexit 127\n"


class Sandbox:
    """A copy of the scripts, the stand-ins on PATH, and a log of what was called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.repo = root / "repo"
        self.bin = root / "bin"
        self.bin.mkdir()
        (self.repo / "launch").mkdir(parents=True)
        for name in (
            "setup.sh",
            "quickstart.sh",
            "torchrun.sh",
            "count_gpus.sh",
            "slurm.sbatch",
            "test.sh",
            "gpu_check.sh",
            "wheels.sh",
            "system_torch.py",
            "constraints.txt",
            "missing_wheels.py",
        ):
            shutil.copy(ROOT / "launch" / name, self.repo / "launch")
        shutil.copy(ROOT / "pyproject.toml", self.repo)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"this machine lacks {tool}"
            (self.bin / tool).symlink_to(found)
        self.env = {"PATH": str(self.bin), "SANDBOX": str(root), "HOME": str(root)}

    def put(self, name: str, text: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)  # it may be a link to the machine's own tool, which writing would replace
        path.write_text(text)
        path.chmod(0o755)

    def start(self, script: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.repo / "launch" / script), *arguments],
            cwd=self.root,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *arguments, **env)
        out, err = process.communicate(timeout=LONG)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def log(self) -> list[str]:
        """Return the changes requested from the stand-in Python since the last call."""
        path = self.root / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    box = Sandbox(tmp_path)
    box.put("python3.12", PYTHON)
    return box


@pytest.fixture
def installed(sandbox: Sandbox) -> Sandbox:
    """A sandbox whose set-up has run; its stand-in for Python notes how the agent is called."""
    assert sandbox.run("setup.sh").returncode == 0
    (sandbox.root / "agent-status").write_text("0")
    (sandbox.root / "described").write_text("runs/some name\n")
    (sandbox.root / "moe.yaml").write_text("# @package moe\nnum_experts: 8\ntop_k: 2\nplacement:\n  policy: static\n")
    sandbox.put("nproc", "#!/usr/bin/env bash\necho 6\n")
    sandbox.log()
    return sandbox


def agent_arguments(box: Sandbox) -> list[str]:
    return (box.root / "agent").read_text().splitlines()


def pip_line(*extras: str) -> str:
    names = f"[{','.join(extras)}]" if extras else ""
    return f"pip install -qq --disable-pip-version-check --constraint launch/constraints.txt --editable .{names}"


# --- all scripts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, timeout=LONG).stderr == b""


@pytest.mark.parametrize("script", ["setup.sh", "quickstart.sh", "test.sh", "torchrun.sh", "gpu_check.sh", "wheels.sh"])
def test_script_has_a_help_text_and_does_nothing_else(sandbox: Sandbox, script: str) -> None:
    result = sandbox.run(script, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(f"Usage: bash launch/{script}")
    assert sandbox.log() == []


def test_constraints_agree_with_the_direct_pins() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "launch" / "constraints.txt").read_text().splitlines() if "==" in line
    )
    direct = re.findall(r'"([a-z0-9-]+)==([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert len(direct) > 15
    assert {name: version for name, version in direct if pins.get(name, version) != version} == {}
    assert pins["torch"] == "2.13.0"


# --- setup.sh --------------------------------------------------------------------------------------------------------


def test_setup_installs_once_and_then_calls_nothing(sandbox: Sandbox) -> None:
    first = sandbox.run("setup.sh")
    assert (first.returncode, first.stderr) == (0, "")
    assert sandbox.log() == ["venv", pip_line()]
    (sandbox.bin / "python3.12").unlink()
    (sandbox.repo / ".venv" / "bin" / "python").write_text("#!/usr/bin/env bash\necho called >>$SANDBOX/log\n")
    second = sandbox.run("setup.sh")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert sandbox.log() == []


@pytest.mark.parametrize("file", ["pyproject.toml", "launch/constraints.txt"])
def test_setup_installs_again_when_the_pins_change(sandbox: Sandbox, file: str) -> None:
    sandbox.run("setup.sh", "--extra", "dev")
    sandbox.log()
    with (sandbox.repo / file).open("a") as stream:
        stream.write("# changed\n")
    assert sandbox.run("setup.sh").returncode == 0
    assert sandbox.log() == [pip_line("dev")]


def test_setup_leaves_the_environment_of_another_clone_alone(sandbox: Sandbox) -> None:
    assert sandbox.run("setup.sh").returncode == 0
    theirs, other = sandbox.repo / ".venv", sandbox.root / "other"
    other.mkdir()
    theirs.rename(other / ".venv")
    stamp = other / ".venv" / ".setup-complete"
    stamp.write_text(stamp.read_text().replace(str(sandbox.repo), str(other)))
    theirs.symlink_to(other / ".venv")
    before = {path: path.stat().st_mtime_ns for path in (other / ".venv").rglob("*")}
    sandbox.log()
    result = sandbox.run("setup.sh")
    assert result.returncode == 0 and "a link to that of another clone, which is not changed" in result.stdout
    assert sandbox.log() == ["venv", pip_line()] and not theirs.is_symlink()
    assert before == {path: path.stat().st_mtime_ns for path in (other / ".venv").rglob("*")}


def test_setup_refuses_an_extra_that_is_none(sandbox: Sandbox) -> None:
    """pip would go on without it, and say nothing."""
    result = sandbox.run("setup.sh", "--extra", "evl")
    expected = "setup: --extra evl: there is no such extra; it is one of cuda, peers, eval, dev\n"
    assert (result.returncode, result.stderr) == (1, expected)
    assert sandbox.log() == []


def test_setup_adds_extras_to_those_that_are_there(sandbox: Sandbox) -> None:
    sandbox.run("setup.sh", "--extra", "dev")
    sandbox.run("setup.sh", "--extra", "cuda", "--no-build-isolation", "-v")
    sandbox.run("setup.sh", "--extra", "dev", "--extra", "cuda")
    assert sandbox.log() == ["venv", pip_line("dev"), pip_line("cuda", "dev") + " --no-build-isolation -v"]


def test_setup_remakes_what_was_killed(sandbox: Sandbox) -> None:
    (sandbox.root / "pip-waits").touch()
    process = sandbox.start("setup.sh")
    until(lambda: (sandbox.root / "log").exists() and "pip" in (sandbox.root / "log").read_text(), "pip")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=LONG)
    (sandbox.root / "pip-waits").unlink()
    (sandbox.repo / ".venv" / "half-made").touch()
    sandbox.log()
    result = sandbox.run("setup.sh")
    assert result.returncode == 0 and "interrupted" in result.stdout
    assert sandbox.log() == ["venv", pip_line()]
    assert not (sandbox.repo / ".venv" / "half-made").exists()


def test_two_setups_at_once_install_once(sandbox: Sandbox) -> None:
    (sandbox.root / "pip-waits").touch()
    first = sandbox.start("setup.sh")
    until(lambda: (sandbox.root / "log").exists() and "pip" in (sandbox.root / "log").read_text(), "pip")
    second = sandbox.start("setup.sh")
    assert second.stdout is not None
    assert "another set-up is running" in second.stdout.readline()
    (sandbox.root / "pip-waits").unlink()
    first.communicate(timeout=LONG)
    second.communicate(timeout=LONG)
    assert (first.returncode, second.returncode) == (0, 0)
    assert sandbox.log() == ["venv", pip_line()]


def test_setup_takes_the_first_python_that_works(sandbox: Sandbox) -> None:
    (sandbox.bin / "python3.12").rename(sandbox.bin / "python3.11")
    sandbox.put("python3.12", SHIM)
    result = sandbox.run("setup.sh")
    assert result.returncode == 0
    assert f"{sandbox.bin}/python3.11" in result.stdout


def test_setup_without_a_python_says_so_in_one_line(sandbox: Sandbox) -> None:
    sandbox.put("python3.12", SHIM)
    result = sandbox.run("setup.sh")
    assert result.returncode == 1
    assert result.stderr.startswith("setup: no Python 3.11 or 3.12 found") and result.stderr.count("\n") == 1
    assert not (sandbox.repo / ".venv").exists()


def test_setup_without_the_venv_module_says_so_in_one_line(sandbox: Sandbox) -> None:
    (sandbox.root / "no-venv-module").touch()
    result = sandbox.run("setup.sh")
    assert result.returncode == 1
    assert "has no venv module" in result.stderr and result.stderr.count("\n") == 1


def test_setup_with_a_named_python_that_does_not_run_keeps_what_is_there(sandbox: Sandbox) -> None:
    sandbox.put("python3.99", SHIM)
    sandbox.run("setup.sh")
    sandbox.log()
    result = sandbox.run("setup.sh", "python3.99")
    assert result.returncode == 1
    assert "python3.99 is not a Python 3.11 or 3.12" in result.stderr and result.stderr.count("\n") == 1
    assert (sandbox.repo / ".venv" / "bin" / "python").exists()
    assert sandbox.log() == []


def test_setup_takes_a_python_from_where_it_is_called(sandbox: Sandbox) -> None:
    (sandbox.root / "own").mkdir()
    (sandbox.bin / "python3.12").rename(sandbox.root / "own" / "python")
    result = sandbox.run("setup.sh", "own/python")
    assert (result.returncode, sandbox.log()) == (0, ["venv", pip_line()]), result.stderr


def test_setup_goes_on_after_pip_failed(sandbox: Sandbox) -> None:
    (sandbox.root / "pip-fails").touch()
    result = sandbox.run("setup.sh")
    assert result.returncode == 1
    assert result.stderr.splitlines()[0] == "ERROR: no such package"
    assert result.stderr.splitlines()[1].startswith("setup: pip could not install")
    (sandbox.root / "pip-fails").unlink()
    assert sandbox.run("setup.sh").returncode == 0
    assert sandbox.log() == ["venv", pip_line(), pip_line()]


def test_setup_remakes_an_environment_that_was_moved(sandbox: Sandbox) -> None:
    sandbox.run("setup.sh")
    sandbox.log()
    sandbox.repo = sandbox.repo.rename(sandbox.root / "elsewhere")
    result = sandbox.run("setup.sh")
    assert result.returncode == 0 and "another folder" in result.stdout
    assert sandbox.log() == ["venv", pip_line()]


SYSTEM_PIP = pip_line().replace("launch/constraints.txt", ".venv/constraints.txt")


def test_setup_around_the_systems_torch_keeps_it(sandbox: Sandbox) -> None:
    (sandbox.root / "torch-is-in").write_text("/usr/lib/python3/dist-packages\n")
    result = sandbox.run("setup.sh", "--system-torch")
    assert (result.returncode, result.stderr) == (0, "")
    assert sandbox.log() == ["venv --system-site-packages", SYSTEM_PIP]
    assert (sandbox.repo / ".venv" / "constraints.txt").read_text() == "torch==2.11.0\n"
    for arguments in ([], ["--system-torch"]):
        sandbox.run("setup.sh", *arguments)
    assert sandbox.log() == []
    sandbox.run("setup.sh", "--extra", "dev")
    assert sandbox.log() == [SYSTEM_PIP + "[dev]"]


def test_setup_remakes_an_environment_with_a_torch_of_its_own(sandbox: Sandbox) -> None:
    sandbox.run("setup.sh")
    (sandbox.root / "torch-is-in").write_text("/usr/lib/python3/dist-packages\n")
    sandbox.log()
    result = sandbox.run("setup.sh", "--system-torch")
    assert result.returncode == 0 and "it has a torch of its own" in result.stdout
    assert sandbox.log() == ["venv --system-site-packages", SYSTEM_PIP]


@pytest.mark.parametrize("named", [[], ["python3.12"]])
def test_setup_around_a_torch_that_is_not_there_says_so_in_one_line(sandbox: Sandbox, named: list[str]) -> None:
    result = sandbox.run("setup.sh", *named, "--system-torch")
    assert result.returncode == 1
    assert "which --system-torch takes" in result.stderr and result.stderr.count("\n") == 1
    assert sandbox.log() == []


def test_setup_installs_from_a_folder_of_wheels_alone(sandbox: Sandbox) -> None:
    folder = sandbox.root / "my wheels"  # where the caller stands
    folder.mkdir()
    (folder / "torch-2.13.0-py3-none-any.whl").touch()
    result = sandbox.run("setup.sh", "--wheels", "my wheels", "--extra", "dev")
    assert (result.returncode, result.stderr) == (0, "")
    assert sandbox.log() == ["venv", f"{pip_line('dev')} --no-index --find-links {folder}"]


@pytest.mark.parametrize("wheels", [[], ["nowhere"], ["empty"]])
def test_setup_without_wheels_says_so_in_one_line(sandbox: Sandbox, wheels: list[str]) -> None:
    (sandbox.root / "empty").mkdir()
    result = sandbox.run("setup.sh", "--wheels", *wheels)
    assert result.returncode == 1
    assert "bash launch/wheels.sh DIR" in result.stderr and result.stderr.count("\n") == 1
    assert sandbox.log() == []


@pytest.mark.parametrize("without_torch", [False, True])
def test_wheels_of_everything_that_is_pinned(sandbox: Sandbox, without_torch: bool) -> None:
    sandbox.put("python3", PYTHON)
    result = sandbox.run("wheels.sh", "out", "--python", "3.11", *["--without-torch"] * without_torch)
    assert (result.returncode, result.stderr) == (0, "")
    built, downloaded = (line.split() for line in sandbox.log())
    assert built[:2] == ["pip", "wheel"] and built[-1].startswith("antlr4-python3-runtime==")
    assert downloaded[:2] == ["pip", "download"] and "3.11" in downloaded and str(sandbox.root / "out") in downloaded
    pinned = [line for line in (ROOT / "launch" / "constraints.txt").read_text().splitlines() if "==" in line]
    of_torch = [line for line in pinned if re.match("torch==|triton==|nvidia-|cuda-", line)]
    wanted = set(pinned) - {built[-1]} - (set(of_torch) if without_torch else set())
    assert len(of_torch) > 10 and {word for word in downloaded if "==" in word} == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the folder to fill"),
        (["a", "b"], "give one folder only, not both a and b"),
        (["a", "--python", "3.13"], "--python=3.13 must be 3.11 or 3.12"),
        (["a", "--torch"], "unknown option --torch"),
    ],
)
def test_wheels_refuses_wrong_options(sandbox: Sandbox, arguments: list[str], message: str) -> None:
    result = sandbox.run("wheels.sh", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"wheels.sh: {message}") and result.stderr.count("\n") == 1


def test_pins_around_the_systems_torch_leave_its_own_dependencies_out() -> None:
    lines = [
        "# pins",
        "torch==2.13.0",
        "triton==3.7.1",
        "nvidia-nccl-cu13==2.29.7",
        "numpy==2.4.6",
        "",
        "Jinja2==3.1.6",
    ]
    requires = ["jinja2", "nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'", "typing-extensions>=4.10"]
    assert system_torch.constraints(lines, "2.11.0+cu130", requires) == ["numpy==2.4.6", "torch==2.11.0+cu130"]
    done = subprocess.run(
        [sys.executable, "launch/system_torch.py", "launch/constraints.txt"], cwd=ROOT, capture_output=True, text=True
    )
    pins = dict(line.split("==") for line in done.stdout.splitlines())
    assert pins["torch"] == metadata.version("torch") and {"megatron-core", "numpy"} < pins.keys()
    assert not pins.keys() & {"triton", "setuptools", "sympy", "filelock"}
    allowed = [".".join(map(str, version)) for version in (system_torch.OLDEST, system_torch.NEWEST_EXCLUDED)]
    assert f'"torch>={allowed[0]},<{allowed[1]}"' in (ROOT / "pyproject.toml").read_text()


# --- test.sh ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tested(installed: Sandbox) -> Sandbox:
    """A sandbox whose ruff, mypy and pytest write down how they are called; one fails where NAME-fails is there."""
    folder = installed.repo / ".venv" / "bin"
    fails = 'exit "$([[ -e "$SANDBOX/$NAME-fails" ]] && echo 1 || echo 0)"'
    for tool in ("ruff", "mypy"):
        fake = f'#!/usr/bin/env bash\nNAME={tool}\necho "{tool} $*" >>"$SANDBOX/log"\n{fails}\n'
        (folder / tool).write_text(fake)
        (folder / tool).chmod(0o755)
    marker = f'"-m pytest"* | "-m tests.lanes"*) NAME=pytest; echo "${{*:2}}" >>"$SANDBOX/log"; {fails} ;;\n'
    (folder / "python").write_text(PYTHON.replace('case "$*" in\n', f'case "$*" in\n    {marker}'))
    return installed


CHECKS = ["ruff check", "ruff format --check", "mypy "]


@pytest.mark.parametrize("failing", [None, "ruff", "mypy", "pytest"])
def test_test_script_runs_everything_and_fails_if_anything_does(tested: Sandbox, failing: str | None) -> None:
    if failing is not None:
        (tested.root / f"{failing}-fails").touch()
    result = tested.run("test.sh", "-k", "some name")
    assert result.returncode == (0 if failing is None else 1)
    assert tested.log() == [pip_line("dev"), *CHECKS, "pytest -k some name"]
    if failing is not None:
        assert re.search(rf"FAILED.*\[{failing}", result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ([], "tests.lanes"),
        (["--fast", "-x"], "tests.lanes -m fast -x"),
        (["--durations", "some folder"], "tests.lanes --durations some folder"),
        (["tests/test_packages.py", "-x"], "pytest tests/test_packages.py -x"),
    ],
    ids=["all", "fast", "durations", "a file"],
)
def test_test_script_runs_all_and_the_fast_tests_in_lanes(tested: Sandbox, arguments: list[str], runs: str) -> None:
    assert tested.run("test.sh", *arguments).returncode == 0
    assert [line.rstrip() for line in tested.log()[-1:]] == [runs]


# --- quickstart.sh ---------------------------------------------------------------------------------------------------

NVIDIA_SMI = '#!/usr/bin/env bash\nfor i in 0 1 2 3 4 5 6 7; do echo "GPU $i: NVIDIA H200 (UUID: GPU-$i)"; done\n'
NVIDIA_SMI_WITHOUT_DRIVER = "#!/usr/bin/env bash\necho 'NVIDIA-SMI has failed'\nexit 9\n"


@pytest.mark.parametrize(
    ("nvidia_smi", "visible", "experts", "ranks", "expert_parallel", "threads"),
    [
        (None, None, "8", 2, 2, 3),
        (NVIDIA_SMI_WITHOUT_DRIVER, None, "8", 2, 2, 3),
        (None, None, "null", 2, 1, 3),
        (None, None, "3", 2, 1, 3),
        (NVIDIA_SMI, None, "8", 8, 8, 1),
        (NVIDIA_SMI, None, "12", 8, 4, 1),
        (NVIDIA_SMI, "0,3,5", "6", 3, 3, 2),
        (NVIDIA_SMI, "", "8", 2, 2, 3),
    ],
    ids=["cpu", "no-driver", "dense", "3-experts", "8-gpus", "12-experts", "3-visible", "none-visible"],
)
def test_quickstart_command_line(
    installed: Sandbox,
    nvidia_smi: str | None,
    visible: str | None,
    experts: str,
    ranks: int,
    expert_parallel: int,
    threads: int,
) -> None:
    if nvidia_smi is not None:
        installed.put("nvidia-smi", nvidia_smi)
    (installed.root / "moe.yaml").write_text(f"# @package moe\nnum_experts: {experts}\ntop_k: 2\n")
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    samples = -(-8 // ranks)
    result = installed.run("quickstart.sh", "training.steps=5", "name=a b", **env)
    assert (result.returncode, result.stderr) == (0, "")
    assert agent_arguments(installed) == [
        f"OMP_NUM_THREADS={threads}",
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        "0",
        "--standalone",
        "--",
        f"parallel.expert={expert_parallel}",
        f"training.micro_batch_size={samples}",
        f"training.global_batch_size={samples * ranks}",
        "training.steps=5",
        "name=a b",
    ]


def test_quickstart_ends_with_the_status_of_the_run(installed: Sandbox) -> None:
    (installed.root / "agent-status").write_text("7")
    assert installed.run("quickstart.sh").returncode == 7


def test_quickstart_reads_the_real_config() -> None:
    """The line that quickstart.sh looks for is what train.py prints."""
    command = [sys.executable, "train.py", "--cfg", "job", "--package", "moe"]
    for override, line in (("moe.num_experts=12", "num_experts: 12"), ("moe.num_experts=null", "num_experts: null")):
        result = subprocess.run([*command, override], cwd=ROOT, capture_output=True, text=True, timeout=LONG)
        assert result.returncode == 0, result.stderr
        assert line in result.stdout.splitlines()


# --- torchrun.sh and slurm.sbatch ------------------------------------------------------------------------------------


def parsed(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The options as torchrun reads them, and the overrides."""
    from torch.distributed.run import parse_args

    separator = arguments.index("--")
    return vars(parse_args([*arguments[:separator], "train.py"])), arguments[separator + 1 :]


def test_torchrun_on_one_node(installed: Sandbox) -> None:
    result = installed.run(
        "torchrun.sh", "--ranks-per-node", "4", "--max-restarts", "2", "model=gpt_tiny", "parallel.tensor=2"
    )
    assert result.returncode == 0, result.stderr
    threads, *arguments = agent_arguments(installed)
    options, overrides = parsed(arguments)
    assert threads == "OMP_NUM_THREADS=1"
    assert options["standalone"] and options["nproc_per_node"] == "4" and options["max_restarts"] == 2
    assert overrides == ["model=gpt_tiny", "parallel.tensor=2"]


def test_torchrun_stays_in_the_callers_folder(installed: Sandbox) -> None:
    assert (
        installed.run("torchrun.sh", "--ranks-per-node", "2", "data.corpus=mine.txt", PYTHONPATH="/theirs").returncode
        == 0
    )
    assert (installed.root / "where").read_text() == f"{installed.root} {installed.repo}:/theirs 1\n"


@pytest.mark.parametrize(("visible", "ranks"), [(None, "8"), ("0,3,5", "3"), ("", "1")])
def test_torchrun_counts_the_gpus_that_it_may_use(installed: Sandbox, visible: str | None, ranks: str) -> None:
    installed.put("nvidia-smi", NVIDIA_SMI)
    assert (
        installed.run("torchrun.sh", **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})).returncode == 0
    )
    assert parsed(agent_arguments(installed)[1:])[0]["nproc_per_node"] == ranks


@pytest.mark.parametrize("node_rank", [0, 1])
@pytest.mark.parametrize("num_nodes", ["2", "1:2"])
def test_torchrun_on_several_nodes(installed: Sandbox, num_nodes: str, node_rank: int) -> None:
    installed.put("nvidia-smi", NVIDIA_SMI)
    result = installed.run(
        "torchrun.sh",
        *("--num-nodes", num_nodes, "--node-rank", str(node_rank), "--master-addr", "node-a", "--master-port", "1234"),
        *("--job-id", "j1", "--log-dir", "logs", "--", "training.steps=5"),
    )
    assert result.returncode == 0, result.stderr
    options, overrides = parsed(agent_arguments(installed)[1:])
    assert (options["nnodes"], options["nproc_per_node"]) == (num_nodes, "8")
    assert (options["rdzv_backend"], options["rdzv_endpoint"], options["rdzv_id"]) == ("c10d", "node-a:1234", "j1")
    assert str(options["rdzv_conf"]).startswith(f"is_host={1 - node_rank},")
    assert options["log_dir"] == str(installed.root / "logs")
    assert overrides == ["training.steps=5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-nodes", "2"], "--num-nodes=2 needs --master-addr"),
        (
            ["--num-nodes", "2", "--node-rank", "2", "--master-addr", "a"],
            "--node-rank=2 must be below --num-nodes=2; try --node-rank 1",
        ),
        (["--num-nodes", "two"], "--num-nodes=two is neither a number nor a range such as 2:4"),
        (["--num-nodes", "4:2"], "--num-nodes=4:2 must go from fewer to more nodes; try --num-nodes 2:4"),
        (["--num-nodes", "2", "--master-addr", "a", "--min-ranks", "1"], "--min-ranks=1 works on one node only"),
        (["--ranks-per-node", "4", "--min-ranks", "5"], "--min-ranks=5 must be between 1 and --ranks-per-node=4"),
        (["--num-nodes", "0"], "--num-nodes=0 must be at least 1"),
        (["--ranks-per-node", "0"], "--ranks-per-node=0 must be at least 1"),
        (["--max-restarts"], "--max-restarts needs a value"),
        (["--nodes", "2"], "unknown option --nodes"),
    ],
)
def test_torchrun_refuses_wrong_options(installed: Sandbox, arguments: list[str], message: str) -> None:
    result = installed.run("torchrun.sh", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"torchrun.sh: {message}") and result.stderr.count("\n") == 1
    assert not (installed.root / "agent").exists()


def test_torchrun_without_a_set_up_names_it(sandbox: Sandbox) -> None:
    result = sandbox.run("torchrun.sh")
    assert result.returncode == 2
    assert "run bash launch/setup.sh there first" in result.stderr


def slurm_variables(box: Sandbox) -> dict[str, str]:
    return {
        "SLURM_SUBMIT_DIR": str(box.repo),
        "SLURM_JOB_ID": "61234",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_RESTART_COUNT": "1",
    }


SCONTROL = """#!/usr/bin/env bash
case "$*" in
    "show hostnames"*) printf 'node-a\\nnode-b\\n' ;;
    "--oneliner show node node-a") echo "NodeName=node-a Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=node-a" ;;
    *) echo "scontrol $*" >>"$SANDBOX/log" ;;
esac
"""
SRUN = (
    "#!/usr/bin/env bash\nwhile [[ $1 == -* ]]; do shift; done\nfor SLURM_NODEID in 0 1; do export SLURM_NODEID; "
    '"$@"; done\n'
)


@pytest.mark.parametrize("array", [False, True])
def test_slurm_job_starts_torchrun_on_every_node(installed: Sandbox, array: bool) -> None:
    installed.put("scontrol", SCONTROL)
    installed.put("srun", SRUN)
    variables = slurm_variables(installed) | {"SLURM_GPUS_ON_NODE": "4"}
    if array:
        variables |= {"SLURM_ARRAY_JOB_ID": "61230", "SLURM_ARRAY_TASK_ID": "3"}
        (installed.root / "described").write_text("runs/a b_3\nname='a b_3'\n")
    result = installed.run("slurm.sbatch", "--max-restarts", "2", "--", "model=gpt_tiny", "name=a b", **variables)
    assert (result.returncode, result.stderr) == (0, "")
    assert (
        installed.root / "job"
    ).read_text() == f"--world-size 8 {'--array-task 3 ' * array}-- model=gpt_tiny name=a b\n"
    lines = agent_arguments(installed)
    second = lines.index("OMP_NUM_THREADS=1", 1)
    job, run_dir = ("61230_3", "runs/a b_3") if array else ("61234", "runs/some name")
    for node, arguments in enumerate((lines[1:second], lines[second + 1 :])):
        options, overrides = parsed(arguments)
        assert (options["nnodes"], options["nproc_per_node"], options["max_restarts"]) == ("2", "4", 2)
        assert options["rdzv_endpoint"] == f"10.0.0.1:{10000 + 61234 % 20000}"
        assert options["rdzv_id"] == f"slurm-{job}-1"
        assert str(options["rdzv_conf"]).startswith(f"is_host={1 - node},")
        assert options["log_dir"] == str(installed.repo / run_dir / f"logs/{job}/attempt_1")
        assert overrides == ["model=gpt_tiny", "name=a b", *(["name='a b_3'"] if array else [])]


def test_slurm_job_refuses_an_option_of_sbatch_after_the_script(installed: Sandbox) -> None:
    result = installed.run("slurm.sbatch", "--time", "1:00", **slurm_variables(installed))
    assert result.returncode == 2 and "unknown option --time: options of sbatch go before the script" in result.stderr


def test_slurm_job_ends_with_the_status_of_the_run(installed: Sandbox) -> None:
    installed.put("scontrol", SCONTROL)
    installed.put("srun", "#!/usr/bin/env bash\nexit 3\n")
    assert installed.run("slurm.sbatch", **slurm_variables(installed)).returncode == 3
    assert installed.log() == []


def test_slurm_job_ends_with_the_line_of_the_node_that_failed_first(installed: Sandbox) -> None:
    installed.put("scontrol", SCONTROL)
    srun = """#!/usr/bin/env bash
folder="runs/some name/logs/61234/attempt_1"
mkdir -p "$folder"
echo "9.5 [rank 3] the job ends: rank 0 is dead" >"$folder/end_node-a"
echo "9.125 [rank 0] config error: some.key (3) must be 4" >"$folder/end_node-b"
echo "srun: error: node-b: task 1: Exited with exit code 2" >&2
exit 2
"""
    installed.put("srun", srun)
    result = installed.run("slurm.sbatch", **slurm_variables(installed))
    assert (result.returncode, result.stderr.splitlines()[-1]) == (2, "[rank 0] config error: some.key (3) must be 4")


WARNED_SRUN = """#!/usr/bin/env bash
trap 'mkdir -p "runs/some name/checkpoints/step_0000012"; exit {status}' USR1
echo up >>$SANDBOX/log
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("status", "end"), [(75, ["scontrol requeue 61234"]), (1, ["scontrol requeue 61234"]), (0, []), (2, [])]
)
def test_slurm_job_that_was_warned_is_queued_again_if_there_is_more_to_do(
    installed: Sandbox, status: int, end: list[str]
) -> None:
    installed.put("scontrol", SCONTROL)
    installed.put("squeue", "#!/usr/bin/env bash\necho N/A\n")
    installed.put("srun", WARNED_SRUN.replace("{status}", str(status)))
    process = installed.start("slurm.sbatch", **slurm_variables(installed))
    until(lambda: (installed.root / "log").exists(), "srun")
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == status, out + err
    assert installed.log() == ["up", *end]
    assert not end or f"stopped early (status {status}) with step 12 saved" in out


def test_slurm_job_whose_ranks_do_not_stop_is_queued_again_in_time(installed: Sandbox) -> None:
    """Twenty seconds before the time limit what still runs is ended; here that moment has passed."""
    installed.put("scontrol", SCONTROL)
    installed.put("squeue", f"#!/usr/bin/env bash\necho {time.strftime('%Y-%m-%dT%H:%M:%S')}\n")
    srun = WARNED_SRUN.replace("USR1", "TERM").replace("{status}", "143").replace("echo up", "trap '' USR1; echo up")
    installed.put("srun", srun)
    process = installed.start("slurm.sbatch", **slurm_variables(installed))
    until(lambda: (installed.root / "log").exists(), "srun")
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=LONG)
    assert "the ranks did not stop in time" in out, out + err
    assert installed.log() == ["up", "scontrol requeue 61234"]
