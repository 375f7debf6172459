"""What Mixtrain does on this machine's GPUs, in one file: tests, training speed, MoE layers.

`python -m benchmarks.gpu_check [--minutes 10] [--experiments ...] [--shapes ...] [--results DIR] [--small] [--json]`

Runs the tests marked `gpu`, training of the experiments (benchmarks/throughput.py) and one MoE layer of each shape
beside Megatron-core's own (benchmarks/gpu_layer.py), and writes `gpu-NAME.md`, NAME from the device's. Each step is a
process of its own with its share of the minutes; what a step leaves over goes to the next ones. A step that fails, or
whose time is up, stands in the file with its last lines, and the others run all the same. The exit status is 0 if all
went well, 1 if a step did not, and 2 where there is no GPU. `bash launch/gpu_check.sh` sets `.venv` up first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
EXPERIMENTS = ("gpt2_124m", "gpt_moe_small")
SHAPES = ("mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3_like")
MOST_RANKS = 8
STEPS = {"gpt2_124m": 15, "gpt_moe_small": 60}  # of half a million tokens, and of 33 thousand
MFU, SHARE_OF_PEAK = 0.40, 0.50  # what we expect of gpt2_124m, and of a layer of Mixtral's size
GENEROUS = 1.5  # a step may take so many times its share of the time that is left
LAST_WORDS = 15.0  # seconds that a step has to say how far it came
PRETENDED = "pretended"  # the name of the device of tests/cuda
NO_GPU = (
    "gpu_check: no GPU: torch {torch} sees none here. A machine with an NVIDIA GPU, its driver and a CUDA build of "
    "torch was expected; where the system's Python has such a torch, use --system-torch"
)
# For a device without speed.
SMALL = (
    *("model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "model.ffn_hidden_size=64"),
    *("model.sequence_length=32", "model.vocab_size=null", "training.global_batch_size=2"),
    "training.micro_batch_size=1",
)
SMALL_TESTS = ("tests/models/test_gpu.py::test_gpu_gives_the_losses_of_the_cpu[gpt]",)


@dataclasses.dataclass(frozen=True)
class Step:
    """A process, its part of the time, and where the file has it."""

    kind: str  # tests, training or layer
    name: str
    command: list[str]
    share: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a step ended. `answer` is the JSON object on its last line, where it has one."""

    step: Step
    status: str  # "well", or what happened
    seconds: float
    output: list[str]
    answer: dict[str, Any] | None

    @property
    def went_well(self) -> bool:
        return self.status == "well"


# ---------------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """What this machine has, as a process that may import torch sees it."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: dict[str, Any] = {"count": count, "torch": torch.__version__, "python": sys.version.split()[0]}
    if count:
        from parallel.megatron.startup import transformer_engine_fault

        properties = torch.cuda.get_device_properties(0)
        fault = transformer_engine_fault()
        found |= {
            "name": torch.cuda.get_device_name(0),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": torch.version.cuda or "none",
            "transformer_engine": "installed" if fault is None else f"no: {fault}",
            "commit": _first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        }
    return found


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else "unknown"


def make_steps(count: int, experiments: Sequence[str], shapes: Sequence[str], small: bool) -> list[Step]:
    """What is run on so many GPUs, in order: first each layer on one of them, at last on all together."""
    python = [sys.executable, "-m"]
    tests = SMALL_TESTS if small else tuple(sorted(str(path.relative_to(ROOT)) for path in tests_for_gpus()))
    steps = [Step("tests", "tests marked gpu", [*python, "pytest", "-m", "gpu", "-q", *tests], 4.0)]
    ranks = 1
    while 2 * ranks <= min(count, MOST_RANKS):
        ranks *= 2
    for name in experiments:
        overrides = ["training.precision=bf16", *(SMALL if small else ())]
        if name == "gpt_moe_small":
            overrides.append(f"parallel.expert={ranks}")
        options = ["--experiments", name, "--ranks", str(ranks), "--steps", str(3 if small else STEPS.get(name, 15))]
        command = [*python, "benchmarks.throughput", *options, "--json", "--", *overrides]
        steps.append(Step("training", f"training of {name} on {ranks} GPU(s)", command, 1.2))
    for size in sorted({1, ranks}):
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "-m"] if size > 1 else []
        for shape in shapes:
            sizes = ["--small", "--tokens", "64", "--rounds", "2"] if small else []
            command = [*python, *launcher, "benchmarks.gpu_layer", "--shape", shape, "--json", *sizes]
            steps.append(Step("layer", f"layer of {shape} on {size} GPU(s)", command, 1.2))
    return steps


def tests_for_gpus() -> list[Path]:
    """The files whose tests are marked `gpu`."""
    return list((ROOT / "tests").rglob("test_gpu.py"))


def run(step: Step, seconds: float) -> Outcome:
    """Run a step for at most so long, in a session of its own, of which nothing is left."""
    before = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returned = process.wait(timeout=seconds)
            status = "well" if returned == 0 else f"status {returned}"
        except subprocess.TimeoutExpired:
            status = f"its time was up after {seconds:.0f} s"
            process.send_signal(signal.SIGINT)  # pytest then writes how far it came
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=LAST_WORDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    answer = None
    if status == "well" and lines and lines[-1].startswith("{"):
        answer = json.loads(lines[-1])
    elif status == "well" and step.kind != "tests":
        status = "no answer on its last line"
    return Outcome(step, status, time.monotonic() - before, lines, answer)


def run_all(steps: Sequence[Step], seconds: float) -> list[Outcome]:
    """All steps within so many seconds; one for which no time is left is not begun."""
    end = time.monotonic() + seconds
    outcomes = []
    for i, step in enumerate(steps):
        left = end - time.monotonic()
        if left <= 0:
            outcomes.append(Outcome(step, "not begun: the time was up", 0.0, [], None))
        else:
            share = step.share / sum(other.share for other in steps[i:])
            outcomes.append(run(step, min(left, GENEROUS * share * left)))
        print(f"gpu_check: {step.name}: {outcomes[-1].status}, {outcomes[-1].seconds:.0f} s", flush=True)
    return outcomes


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def expectations(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """What we expect, the figure and whether it holds; a step without figures leaves its rows out."""
    rows = []

    def expect(what: str, figure: float | None, least: float, shown: str) -> None:
        holds = "no figure" if figure is None else "held" if figure >= least else "missed"
        rows.append([what, "-" if figure is None else format(figure, shown), holds])

    for outcome in outcomes:
        for row in (outcome.answer or {}).get("rows", []):
            if outcome.step.kind == "training" and row["experiment"] == "gpt2_124m":
                expect(f"gpt2_124m at {MFU:.0%} MFU or more", row["mfu"], MFU, ".1%")
        if outcome.step.kind == "layer" and outcome.answer is not None:
            ours = [row for row in outcome.answer["rows"] if row["ours"]]
            best = max(ours, key=lambda row: row["tflops"])
            name = outcome.step.name
            if "mixtral" in name:
                what = f"{name} at {SHARE_OF_PEAK:.0%} of the card's peak or more"
                expect(what, best["share_of_peak"], SHARE_OF_PEAK, ".1%")
            expect(f"{name}: not slower than {best['fastest_of_megatron']} (speed)", best["speedup"], 1.0, ".2f")
    return rows


def document(found: dict[str, Any], outcomes: Sequence[Outcome], command: str) -> str:
    """The file, in Markdown."""
    from benchmarks.throughput import HEADINGS as OF_TRAINING
    from benchmarks.throughput import cells as of_training

    meaningless = ["", "## Pretended device: every figure is meaningless"] if found["name"] == PRETENDED else []
    machine = [
        ["GPUs", f"{found['count']} x {found['name']}, {found['memory_gib']} GiB, capability {found['capability']}"],
        ["driver", found["driver"]],
        ["torch", f"{found['torch']}, CUDA {found['cuda']}, Python {found['python']}"],
        ["TransformerEngine", found["transformer_engine"]],
        ["commit", found["commit"]],
        ["date", datetime.datetime.now(datetime.UTC).date().isoformat()],
        ["command", f"`{command}`"],
    ]
    parts = [f"# On {found['name']}", *meaningless, "", tables.table(["what", "is"], machine, markdown=True)]
    expected = expectations(outcomes)
    if expected and not meaningless:
        parts += ["", "## Expected", "", tables.table(["expectation", "figure", "holds"], expected, markdown=True)]
    for outcome in outcomes:
        if outcome.step.kind == "tests":
            parts += ["", "## Tests marked gpu", "", *_block(test_lines(outcome.output))]
    trained = [row for outcome in _answered(outcomes, "training") for row in outcome["rows"]]
    if trained:
        rows = [of_training(row) for row in trained]
        parts += ["", "## Training in bf16", "", tables.table(OF_TRAINING, rows, markdown=True)]
    parts += _layers(_answered(outcomes, "layer"))
    ends = [[outcome.step.name, outcome.status, f"{outcome.seconds:.0f}"] for outcome in outcomes]
    parts += ["", "## Steps", "", tables.table(["step", "ended", "seconds"], ends, markdown=True)]
    for outcome in outcomes:
        if not outcome.went_well and outcome.output:
            parts += ["", f"Last lines of {outcome.step.name}:", "", *_block(outcome.output[-25:])]
    return "\n".join(parts) + "\n"


def _answered(outcomes: Sequence[Outcome], kind: str) -> list[dict[str, Any]]:
    return [outcome.answer for outcome in outcomes if outcome.step.kind == kind and outcome.answer is not None]


def _layers(answers: Sequence[dict[str, Any]]) -> list[str]:
    from benchmarks.gpu_layer import HEADINGS, cells

    if not answers:
        return []
    text = """\
One MoE layer, forward and backward pass in bf16, router included. Medians of rounds in which all take turns; `speed` is
relative to the fastest of Megatron-core's in the same rounds. Peak memory is of one step: weights, gradients and what
is kept in between. `overlap`: share of the time of NCCL's kernels in which another one runs; `busy`: share of the step
in which any does. `difference`: norm of the output's difference from ours in one chunk, relative to its norm."""
    parts = ["", "## One layer", "", text]
    for answer in answers:
        rows = [cells(row) for row in answer["rows"]]
        parts += ["", f"{answer['sizes']}:", "", tables.table(HEADINGS, rows, markdown=True)]
    return parts


def test_lines(output: Sequence[str]) -> list[str]:
    """pytest's own summary: each test that did not pass, with its reason, and the last line."""
    marks = ("FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
    last = [line for line in output if re.search(r"\d+ (passed|failed|skipped|error|deselected)", line)][-1:]
    return [*(line for line in output if line.startswith(marks)), *(line.strip("= ") for line in last)] or [
        "no summary"
    ]


def _block(lines: Sequence[str]) -> list[str]:
    return ["```", *(line.replace("```", "'''") for line in lines), "```"]


def file_name(device: str) -> str:
    """Where the results of a device stand."""
    return f"gpu-{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-')}.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything")
    parser.add_argument("--experiments", nargs="*", choices=EXPERIMENTS, default=EXPERIMENTS)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=SHAPES)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the file")
    parser.add_argument("--small", action="store_true", help="tiny sizes and one test, for a device without speed")
    parser.add_argument("--facts", action="store_true", help="print what this machine has as JSON, and stop")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.minutes > 0:
        parser.error(f"--minutes {arguments.minutes:g}: must be more than 0, such as 10")
    if arguments.facts:
        print(json.dumps(facts()))
        return 0
    # Not in this process, which would hold memory of a GPU all the while.
    asked = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--facts"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(asked.stdout.splitlines()[-1])
    if not found["count"]:
        print(NO_GPU.format(**found), file=sys.stderr)
        return 2
    print(f"gpu_check: {found['count']} x {found['name']}, torch {found['torch']}", flush=True)
    steps = make_steps(found["count"], arguments.experiments, arguments.shapes, arguments.small)
    outcomes = run_all(steps, 60 * arguments.minutes)
    path = arguments.results / file_name(found["name"])
    path.parent.mkdir(parents=True, exist_ok=True)
    command = f"bash launch/gpu_check.sh --minutes {arguments.minutes:g}{' --small' * arguments.small}"
    text = document(found, outcomes, command)
    path.write_text(text)
    print(f"\n{text}\ngpu_check: written to {path}")
    if arguments.json:
        answers = [
            {"step": outcome.step.name, "status": outcome.status, **(outcome.answer or {})} for outcome in outcomes
        ]
        print(json.dumps({"machine": found, "steps": answers}))
    return 0 if all(outcome.went_well for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
