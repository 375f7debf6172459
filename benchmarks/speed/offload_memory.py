"""Trains a model whose optimizer state is 4 times its host budget, where no more memory is to be had: `python -m
benchmarks.speed.offload_memory [--layers 8] [--hidden 512] [--json] [key=value ...]`

Needs root and a memory cgroup that can be made. Three runs of one process on a CPU, the same model and data: without
optimizer state (nothing is updated), whose peak of memory is measured, pages of libraries and files left out, which a
cgroup need not hold; with it on the device, for the numbers;
and with it on the disk of --folder, in a cgroup that allows that peak, the host budget and 5%, which trains, saves
twice, is started again and goes on. Its losses must be those of the second, digit for digit, and its counters of host
bytes within the budget. The disk's copies, the update and the saves are real.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.kit.cgroups import MemoryCgroup
from benchmarks.kit.tables import table

MIB = 2**20
TOLERANCE = 1.05  # of what is counted
STEPS, SAVES = 6, 2
BYTES_OF_SLOTS = 64  # of the host for each parameter of the largest bucket: 48, and some room
BF16_STATE = 12  # bytes a parameter: master and both moments in fp32


def overrides(args: argparse.Namespace, run_dir: Path, steps: int) -> list[str]:
    """Of every run."""
    return [
        "model=gpt_tiny",
        f"model.num_layers={args.layers}",
        f"model.hidden_size={args.hidden}",
        f"model.ffn_hidden_size={4 * args.hidden}",
        "training.precision=bf16",
        f"training.steps={steps}",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        f"checkpoint.interval={STEPS // SAVES}",
        "checkpoint.async_save=true",
        "logging.wandb=off",
        "logging.progress=false",
        "parallel.timeout_seconds=300",
        f"run_dir={run_dir}",
        *args.overrides,
    ]


def train(words: list[str], cgroup: MemoryCgroup | None = None, mode: str = "train") -> dict[str, Any]:
    """One run as a process of its own; what it says of itself at its end. Raises RuntimeError where it failed."""
    command = [sys.executable, "-m", "benchmarks.speed.offload_memory", "--child", mode, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        timeout=1800,
        preexec_fn=None if cgroup is None else lambda: cgroup.entrance.write_text(str(os.getpid())),
    )
    if done.returncode != 0:
        killed = "" if cgroup is None or not cgroup.kills() else " (killed for memory)"
        raise RuntimeError(f"status {done.returncode}{killed}: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


class Peak:
    """The most memory without a file behind it that this process has, looked at every few milliseconds."""

    def __init__(self) -> None:
        self._most, self._is_over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(0.003):
            lines = Path("/proc/self/status").read_text().splitlines()
            kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            self._most = max(self._most, 1024 * kilobytes)

    def stop(self) -> int:
        """Bytes."""
        self._is_over.set()
        self._thread.join()
        return self._most


def child(mode: str, words: list[str]) -> None:
    """In a process of its own: train, and print its peak."""
    import optim.optimizer
    from checkpoint import state as checkpoint_state
    from configs.compose import compose
    from configs.validate import validate
    from memory.budgets import DISK, HOST
    from training import step
    from training.trainer import Trainer

    if mode == "without-state":
        # No masters, no moments, nothing of them in a checkpoint.
        optim.optimizer.build_offload = lambda *_: None  # type: ignore[assignment, return-value]
        step.apply_gradients = lambda *_: True  # type: ignore[assignment]
        checkpoint_state.optimizer_state.sharded_state = lambda *_: []  # type: ignore[assignment]
    config = compose(words)
    validate(config, 1)
    peak = Peak()
    finished = Trainer(config).fit()
    print(json.dumps({"peak": peak.stop(), "host": HOST.peak, "disk": DISK.peak, "finished": finished}))


def losses(run_dir: Path) -> list[float]:
    """Of all steps of a run."""
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All runs. Raises RuntimeError where one fails, or numbers differ."""
    off = ["optimizer.state_device=host"]
    bare = train([*overrides(args, folder / "bare", STEPS), *off], mode="without-state")
    train([*overrides(args, folder / "device", STEPS), "checkpoint.interval=0", "checkpoint.at_end=false"])
    numel = num_parameters(folder / "bare")
    state = BF16_STATE * numel
    budget = state // 4
    limit = int(TOLERANCE * (bare["peak"] + budget))
    disk = [
        "optimizer.state_device=disk",
        "optimizer.engine=host",
        f"optimizer.bucket_parameters={budget // BYTES_OF_SLOTS}",
        f"memory.disk_dir={args.folder}",
        f"memory.host_budget={budget / MIB}",
    ]
    with MemoryCgroup(limit) as cgroup:
        first = train([*overrides(args, folder / "disk", STEPS // SAVES * 2 - 1), *disk], cgroup)
        second = train([*overrides(args, folder / "disk", STEPS), *disk], cgroup)
    if losses(folder / "disk") != losses(folder / "device"):
        raise RuntimeError("the run from the disk has other losses than the one on the device")
    if max(first["host"], second["host"]) > budget:
        raise RuntimeError(f"{max(first['host'], second['host'])} bytes were kept on the host, of {budget}")
    saves = sorted(path.name for path in (folder / "disk" / "checkpoints").iterdir())
    return {
        "parameters": numel,
        "state_bytes": state,
        "host_budget": budget,
        "peak_without_state": bare["peak"],
        "limit": limit,
        "peak_with_disk": max(first["peak"], second["peak"]),
        "host_bytes": max(first["host"], second["host"]),
        "disk_bytes": second["disk"],
        "saves": saves,
        "losses_equal": True,
    }


def num_parameters(run_dir: Path) -> int:
    """Of the model that a run trained."""
    plan = json.loads((run_dir / "plan.json").read_text())
    return int(plan["parameters"]["total"] if isinstance(plan["parameters"], dict) else plan["parameters"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--folder", default=".", help="of the state; on a disk")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--child", choices=("train", "without-state"), help=argparse.SUPPRESS)
    args, words = parser.parse_known_args()
    args.overrides = words
    if args.child is not None:
        child(args.child, args.overrides)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(args, Path(folder))
    table_rows = [
        ["parameters", f"{found['parameters'] / 1e6:.1f} million"],
        ["optimizer state", f"{found['state_bytes'] / MIB:.1f} MiB"],
        ["host budget", f"{found['host_budget'] / MIB:.1f} MiB"],
        ["kept on the host at most (counted)", f"{found['host_bytes'] / MIB:.1f} MiB"],
        ["kept on the disk (counted)", f"{found['disk_bytes'] / MIB:.1f} MiB"],
        ["peak without state", f"{found['peak_without_state'] / MIB:.1f} MiB"],
        ["allowed in the cgroup", f"{found['limit'] / MIB:.1f} MiB"],
        ["peak with state on the disk", f"{found['peak_with_disk'] / MIB:.1f} MiB"],
        ["checkpoints", ", ".join(found["saves"])],
        ["losses", "those with the state on the device, digit for digit"],
    ]
    print(table(["", "measured"], table_rows, args.markdown))
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
