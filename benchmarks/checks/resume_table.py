"""Real starts in a used folder with one key changed: goes on bit for bit, says what differs, or refuses, as the schema
says.

    python -m benchmarks.checks.resume_table [--starts 30] [--seed 1] [--json]

A run of three steps is made for a dense, a MoE and a BERT model. Each start takes a copy of one of them, changes one
key, and asks for five steps: with `checkpoint.resume=auto` in the copy, from its checkpoint by path into a new folder,
or by that path a second time. Every third start goes through launch/torchrun.sh with a rank killed after it has resumed
and started again. free: steps 4 and 5 have the losses of the undisturbed run, bit for bit (within rounding for another
layout or order of sums). say: one line and an event name the key. refuse: status 2, the key in the last line, and not a
byte of the folder changed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.changes import on_resume
from configs.compose import compose
from configs.keys import get
from configs.schema import KEYS, Config
from configs.show import show
from configs.validate import validate
from tests.tolerances import FP32_LOSS

REPOSITORY = Path(__file__).parents[2]
MODELS = ("gpt_tiny", "gpt_moe_tiny", "bert_tiny")
RESUME_MODES = ("auto", "path", "same path again")
STEPS, STOP = 5, 3
TIMEOUT = 300
# Free keys whose other value computes the same in another order.
ROUNDS = (
    "parallel.",
    "training.recompute",
    "moe.",
    "optimizer.distributed",
    "training.deterministic",
    "model.backend",
    "training.micro_batch_size",
)
# What decides of the start itself, ends the run or takes hours.
LEFT_OUT = (
    "name",
    "run_dir",
    "plan",
    "plan_world_size",
    "parallel.layout",
    "checkpoint.resume",
    "checkpoint.weights",
    "checkpoint.accept_changes",
)
VALUES: dict[str, Any] = {
    "data.corpus": "CORPUS2",
    "data.validation_corpora": {"readme": "README.md"},
    "data.tokenizer": "TOKENIZER2",
    "data.cache_dir": "CACHE2",
    "training.steps": STEPS + 2,
    "training.time_limit_minutes": 30.0,
    "training.memory_limit_gib": 8.0,
    "training.profile.steps": [5],
    "training.profile.ranks": [0],
    "sample.prompts": ["loss"],
    "logging.wandb": "offline",
    "logging.wandb_project": "other",
    "training.device": "cpu",
    "hardware": "cpu_emulated",
    "model.backend": "portable",
    "data.text_key": "body",
    "model.sequence_length": 32,
    "data.vocab_size": 350,
}


@dataclass(frozen=True)
class Case:
    key: str
    value: Any
    model: str
    way: str
    restarted: bool


def base(model: str, root: Path) -> list[str]:
    return [
        *(
            f"experiment={model}",
            "model.num_layers=2",
            f"data.corpus={root}/corpus",
            "data.vocab_size=340",
            f"data.cache_dir={root}/cache",
        ),
        *(
            "logging.tensorboard=false",
            "logging.wandb=off",
            "logging.progress=false",
            "sample.prompts=[]",
            "training.eval_interval=0",
        ),
        *(
            "training.device=auto",
            "checkpoint.interval=1",
            "checkpoint.keep=0",
            "training.global_batch_size=4",
            "data.num_workers=1",
        ),
        *("training.dry_run=false", "checkpoint.async_save=false"),
    ]


def other_value(config: Config, name: str) -> Any:
    """A legal value of a key that is not the config's; None where there is none on one process."""
    key, value = KEYS[name], get(config, name)
    if name in VALUES:
        return VALUES[name]
    candidates: list[Any] = [choice for choice in key.choices if choice != value]
    if bool in key.kinds:
        candidates.append(not value)
    elif int in key.kinds:
        candidates += [(value or 0) + 1, (value or 0) * 2, 2]
    elif float in key.kinds:
        candidates += [(value or 0.1) / 2, (value or 1.0) * 1.5]
    return candidates


def legal(overrides: list[str], name: str, ranks: int) -> Any:
    config = compose(overrides)
    values = other_value(config, name)
    for value in values if isinstance(values, list) and name not in VALUES else [values]:
        try:
            validate(compose([*overrides, f"{name}={show(value)}"]), ranks)
        except ValueError:
            continue
        if value != get(config, name):
            return value
    return None


def cases(root: Path, count: int, seed: int) -> list[Case]:
    """A random choice of keys, the meanings in equal parts, the models and ways in turn."""
    rng = random.Random(seed)
    by_meaning: dict[str, list[str]] = {"free": [], "say": [], "refuse": []}
    for name, key in KEYS.items():
        if not key.architecture and name not in LEFT_OUT:
            by_meaning[key.on_resume].append(name)
    found: list[Case] = []
    for names in by_meaning.values():
        rng.shuffle(names)
    while len(found) < count and any(by_meaning.values()):
        for names in by_meaning.values():
            while names and len(found) < count:
                name, number = names.pop(), len(found)
                model = (
                    "gpt_moe_tiny"
                    if name.startswith("moe.")
                    else "bert_tiny"
                    if "bert" in KEYS[name].meaning
                    else rng.choice(MODELS)
                )
                value = legal(base(model, root), name, 1)
                if value is not None:
                    found.append(
                        Case(name, value, model, RESUME_MODES[number // 3 % 3], (number // 9 + number) % 3 == 0)
                    )
                    break
    return found


def write_inputs(root: Path) -> None:
    rng = random.Random(0)
    words = "loss step token layer rank expert train batch river stone paper light north south".split()
    for folder, count in (("corpus", 30), ("CORPUS2", 31)):
        (root / folder).mkdir()
        for i in range(count):
            (root / folder / f"{i:02}.txt").write_text(" ".join(rng.choice(words) for _ in range(500)) + ".")


def command(overrides: list[str], restarts: int = 0) -> list[str]:
    if restarts:
        return [
            "bash",
            str(REPOSITORY / "launch" / "torchrun.sh"),
            "--ranks-per-node",
            "1",
            "--max-restarts",
            str(restarts),
            "--",
            *overrides,
        ]
    return [sys.executable, str(REPOSITORY / "train.py"), *overrides]


def start(overrides: list[str], run_dir: Path, restarted: bool) -> tuple[int, str]:
    """Status and output of a start; `restarted`: its rank is killed once it has taken a step, and the launcher starts
    it again."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = command([*overrides, f"run_dir={run_dir}"], restarts=1 if restarted else 0)
    process = subprocess.Popen(
        words,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        if restarted:
            deadline = time.monotonic() + TIMEOUT
            while process.poll() is None and time.monotonic() < deadline and last_step(run_dir) < STOP + 1:
                time.sleep(0.02)
            if process.poll() is None:
                kill_rank(run_dir)
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return 124, output
    return process.returncode, output


def kill_rank(run_dir: Path) -> None:
    try:
        os.kill(json.loads((run_dir / "run.json").read_text())["pid"], signal.SIGKILL)
    except ProcessLookupError:
        pass  # it was done


def last_step(run_dir: Path) -> int:
    try:
        return len((run_dir / "metrics.jsonl").read_text().splitlines()) + (
            0 if (run_dir / "copied").exists() else STOP
        )
    except OSError:
        return 0


def losses(run_dir: Path) -> dict[int, float]:
    lines = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def contents(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != "job.lock"}


def problem_of(case: Case, root: Path) -> str:
    """What is wrong with how the start went; empty where nothing is."""
    overrides = [*base(case.model, root), f"training.steps={STEPS}"]
    before = compose([*base(case.model, root), f"training.steps={STEPS}", "optimizer.decay_steps=50"])
    source, run_dir = root / case.model, root / "start"
    shutil.rmtree(run_dir, ignore_errors=True)
    value = str(root / case.value) if case.value in ("CORPUS2", "CACHE2") else case.value
    if case.value == "TOKENIZER2":
        value = str(root / "CORPUS2.model")
    changed = [*overrides, "optimizer.decay_steps=50", f"{case.key}={show(value)}"]
    checkpoint = source / "checkpoints" / f"step_{STOP:07}"
    if case.way == "auto":
        shutil.copytree(source, run_dir)
        (run_dir / "copied").touch()
    else:
        changed.append(f"checkpoint.resume={checkpoint}")
    if case.way == "same path again":
        same = [*overrides, "optimizer.decay_steps=50", f"checkpoint.resume={checkpoint}", f"training.steps={STOP + 1}"]
        status, output = start(same, run_dir, False)
        if status != 0:
            return f"the first start by path ended with {status}: {output[-300:]}"
    known = contents(run_dir) if run_dir.exists() else {}
    meaning = on_resume(case.key, before, compose(changed))
    # no text of these corpora has a key: the data are the same
    meaning = "say" if meaning == "refuse" and case.key == "data.text_key" else meaning
    status, output = start(changed, run_dir, case.restarted and meaning != "refuse")
    last = output.rstrip().rsplit("\n", 1)[-1]
    if meaning == "refuse":
        if status != 2 or case.key not in last:
            return f"status {status}, last line: {last}"
        now = contents(run_dir) if run_dir.exists() else {}
        return "" if now == known else f"refused, but {sorted(set(now) ^ set(known)) or 'a file'} changed"
    if status != 0:
        return f"status {status}, last line: {last}"
    if meaning == "say":
        event = [
            json.loads(line)
            for line in (run_dir / "events.jsonl").read_text().splitlines()
            if "settings_changed" in line
        ]
        return (
            ""
            if case.key in output and event and case.key in event[0]["settings"]
            else f"nobody said {case.key}: {output[-300:]}"
        )
    ours, theirs = losses(run_dir), losses(root / f"{case.model}-undisturbed")
    tolerance = FP32_LOSS if case.key.startswith(ROUNDS) else 0.0
    wrong = [
        step for step in (STOP + 1, STOP + 2) if not abs(ours[step] - theirs[step]) <= tolerance * abs(theirs[step])
    ]
    return f"steps {wrong} differ: {ours}, {theirs}" if wrong else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    table_rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="resume-table-") as folder:
        root = Path(folder)
        write_inputs(root)
        from data.tokenizer import train_tokenizer

        train_tokenizer(
            (path.read_text() for path in sorted((root / "CORPUS2").iterdir())[:20]), 340, root / "CORPUS2.model"
        )
        chosen = cases(root, options.starts, options.seed)
        for model in dict.fromkeys(case.model for case in chosen):
            for name, steps in ((model, STOP), (f"{model}-undisturbed", STEPS)):
                status, output = start(
                    [*base(model, root), "optimizer.decay_steps=50", f"training.steps={steps}"], root / name, False
                )
                assert status == 0, output
        for case in chosen:
            problem = problem_of(case, root)
            table_rows.append({**asdict(case), "on_resume": KEYS[case.key].on_resume, "problem": problem})
            launcher = "torchrun.sh, killed" if case.restarted else "train.py"
            result, on_resume = "WRONG" if problem else "ok", KEYS[case.key].on_resume
            columns = f"{result:<6}{on_resume:<8}{case.way:<17}{launcher:<21}{case.model:<14}"
            print(f"{columns}{case.key}={show(case.value)} {problem}", flush=True)
    wrong = sum(bool(row["problem"]) for row in table_rows)
    print(f"{len(table_rows)} starts, {wrong} wrong; {dict(Counter(row['on_resume'] for row in table_rows))}")
    if options.json:
        print(json.dumps({"seed": options.seed, "rows": table_rows}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
