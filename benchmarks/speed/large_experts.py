"""Trains a GPT-MoE whose experts' records are larger than this machine's memory: `python -m
benchmarks.speed.large_experts [--folder DIR] [--layers 14] [--experts 16] [--width 3584] [--json]`.

Weights, gradients and state of the experts lie on the disk of --folder; passes go by layer. Three steps are taken
without a stop. Then the same command, with a checkpoint after the second step, is killed with SIGKILL in the third,
started again, and must end with the losses and gradient norms of the first, digit for digit. At its end the run
continues a text, and so does `inference.generate` from the checkpoint, in a memory budget. The folder needs room for
the records and one checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.speed.expert_memory import metrics, records_of
from configs.compose import compose
from optim.arrangement.buckets import GRAD_BYTES
from optim.arrangement.experts import state_bytes_per_weight

GIB = 2**30
STEPS, SAVED = 3, 2
PROMPT = "def run("


def words_of(args: argparse.Namespace, run_dir: Path) -> list[str]:
    """What all runs share."""
    return [
        "model=gpt_moe_tiny",
        f"model.num_layers={args.layers}",
        f"model.hidden_size={args.hidden}",
        f"model.num_attention_heads={args.hidden // 64}",
        "model.sequence_length=256",
        "model.tie_embeddings=false",
        f"moe.num_experts={args.experts}",
        "moe.top_k=2",
        f"moe.ffn_hidden_size={args.width}",
        "training.precision=bf16",
        "training.recompute=full",
        "training.pass_order=by_layer",
        "training.micro_batch_size=2",
        "training.global_batch_size=4",
        f"training.steps={STEPS}",
        "moe.weights_device=disk",
        "optimizer.state_device=disk",
        "optimizer.moment_dtype=bf16",
        f"memory.disk_dir={args.folder}",
        f"memory.host_budget={args.budget}",
        f"memory.disk_budget={args.disk_budget}",
        "sample.num_tokens=8",
        f"sample.prompts=['{PROMPT}']",
        "logging.progress=false",
        "checkpoint.at_end=false",
        f"run_dir={run_dir}",
        *args.overrides,
    ]


class Watched:
    """A training as a process, whose memory is looked at: the most of it that no file stands behind, and all of it."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.begin, self.peak = time.perf_counter(), 0
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "train.py", *words], stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        status = Path(f"/proc/{self.process.pid}/status")
        while self.process.poll() is None:
            try:
                lines = status.read_text().splitlines()
            except OSError:
                return
            kilobytes = [int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
            self.peak = max(self.peak, 1024 * max(kilobytes, default=0))
            time.sleep(0.05)

    def wait(self, timeout: float) -> float:
        """Seconds that it took. Raises RuntimeError where it failed."""
        status = self.process.wait(timeout)
        if status != 0:
            raise RuntimeError(f"status {status}: {Path(self._log.name).read_text().strip().splitlines()[-1:]}")
        return time.perf_counter() - self.begin

    def kill(self) -> None:
        """At once, with all that it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def killed_in_step(words: list[str], run_dir: Path, timeout: float) -> Watched:
    """A training that is killed once its checkpoint is in place and the next step is under way."""
    run = Watched(words, run_dir.with_suffix(".killed.log"))
    saved = run_dir / "checkpoints" / f"step_{SAVED:07d}"
    deadline = time.monotonic() + timeout
    while not saved.is_dir():
        if run.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("no checkpoint came to be")
        time.sleep(0.2)
    time.sleep(3.0)
    if run.process.poll() is not None:
        raise RuntimeError("it had ended before it was killed: give it larger sizes")
    run.kill()
    if len((run_dir / "metrics.jsonl").read_text().splitlines()) >= STEPS:
        raise RuntimeError("all steps were over before it was killed: give it larger sizes")
    return run


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All runs."""
    whole, stopped = args.folder / "whole", args.folder / "stopped"
    config = compose(words_of(args, whole))
    of = records_of(config)
    numel = of.num_layers * sum(of.numels)
    undisturbed = Watched(words_of(args, whole), args.folder / "whole.log")  # started again, it has nothing to do
    seconds = undisturbed.wait(args.timeout)
    saves = [f"checkpoint.interval={SAVED}", "checkpoint.keep=1", "checkpoint.async_save=false"]
    words = [*words_of(args, stopped), *saves]
    killed = killed_in_step(words, stopped, args.timeout)
    again = Watched(words, args.folder / "again.log")
    again_seconds = again.wait(args.timeout)
    said = subprocess.run(
        [
            *(sys.executable, "-m", "inference.generate", "--checkpoint", str(stopped), "--prompt", PROMPT),
            *("--max-tokens", "8", "--memory-budget", str(args.budget)),
        ],
        capture_output=True,
        text=True,
        timeout=args.timeout,
    )
    lines = [json.loads(line) for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    return {
        "parameters_of_experts": numel,
        "records": numel * (of.weight_bytes + GRAD_BYTES + state_bytes_per_weight(config)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "peak": max(undisturbed.peak, killed.peak, again.peak),
        "seconds": [seconds, again_seconds],
        "step_seconds": [each["step_seconds"] for each in lines],
        "same": metrics(whole) == metrics(stopped),
        "losses": [each["loss"] for each in lines],
        "generated": said.returncode == 0,
        "said": repr((said.stdout if said.returncode == 0 else said.stderr)[-300:]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="an empty folder on a disk with room for all; none: a temporary one"
    )
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--budget", type=int, default=6000, help="MiB of the host")
    parser.add_argument("--disk-budget", type=int, default=39000, help="MiB of the disk for records")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of a run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = (args.folder or Path(temporary)).resolve()
        args.folder.mkdir(parents=True, exist_ok=True)
        found = measure(args)
    print(
        f"{found['parameters_of_experts'] / 1e9:.2f}e9 parameters of experts, records {found['records'] / 1e9:.1f} GB, "
        f"memory {found['memory'] / 1e9:.1f} GB, peak of a run {found['peak'] / 1e9:.2f} GB"
    )
    print(f"steps {found['step_seconds']} s; killed and started again: {'the same' if found['same'] else 'DIFFERENT'}")
    print(f"generated: {found['generated']}: {found['said']}")
    if args.json:
        print(json.dumps(found))
    return 0 if found["same"] and found["generated"] else 1


if __name__ == "__main__":
    sys.exit(main())
