"""Record the small runs of tests/data/old_runs anew: `python -m tests.record_runs FOLDER`.

For each run: train up to a checkpoint, pack the run folder, then train five more steps and write their losses and
gradient norms to losses.json. tests/training/test_old_runs.py resumes from the packed folders.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch

from tests import distributed
from tests.training import helpers
from tests.training.test_old_runs import OLD_RUNS, cpu_name, one_thread

SHAPE = (
    "data.vocab_size=320",
    "data.num_workers=1",
    "data.validation_fraction=0.1",
    "model.hidden_size=4",
    "model.num_attention_heads=1",
    "model.num_layers=2",
    "model.sequence_length=32",
    "optimizer.decay_steps=100",
    "optimizer.warmup_steps=0",
    "training.global_batch_size=8",
    "training.micro_batch_size=2",
)
GPT = ("experiment=gpt_tiny", "optimizer.lr=1e-3")
# name: (ranks, step of the checkpoint, overrides)
RUNS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "dense": (1, 6, GPT),
    "bert": (1, 6, ("experiment=bert_tiny", "optimizer.lr=1e-3", "model.sentence_head=next_sentence")),
    "moe": (
        4,
        6,
        (
            "experiment=gpt_moe_tiny",
            "optimizer.lr=1e-3",
            "moe.num_experts=4",
            "moe.ffn_hidden_size=4",
            "moe.aux_loss_coeff=0.01",
            "moe.z_loss_coeff=0.001",
            "parallel.pipeline=2",
            "parallel.expert=2",
        ),
    ),
    "spike": (
        1,
        12,
        (
            "experiment=gpt_tiny",
            "optimizer.lr=2e-5",
            "training.spike=skip",
            "training.spike_factor=1.0002",
            "checkpoint.interval=12",
        ),
    ),
    "dropout": (
        2,
        6,
        (
            "experiment=gpt_tiny",
            "optimizer.lr=4e-3",
            "model.hidden_dropout=0.1",
            "model.attention_dropout=0.1",
            "parallel.pipeline=2",
        ),
    ),
}
FURTHER = 5  # steps after the checkpoint


def record(name: str, folder: Path) -> dict[str, Any]:
    """Train run `name` under `folder`, pack it, and return its entry of losses.json."""
    ranks, step, overrides = RUNS[name]
    own = [
        f"name={name}",
        f"run_dir={folder / name}",
        f"data.corpus={OLD_RUNS / 'corpus.jsonl'}",
        f"data.cache_dir={folder / 'cache'}",
    ]
    for steps in (step, step + FURTHER):
        config = helpers.make_config([*overrides, *SHAPE, *own, f"training.steps={steps}"], ranks)
        distributed.run(one_thread, ranks, config, timeout=helpers.TIMEOUT)
        if steps == step:
            with tarfile.open(folder / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(folder / name, name)
    lines = helpers.read_metrics(folder / name)[step:]
    return {
        "ranks": ranks,
        "step": step,
        "next": [{key: line[key] for key in ("step", "loss", "grad_norm")} for line in lines],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.record_runs", description=str(__doc__).split("\n\n")[1])
    parser.add_argument("folder", type=Path, help="an empty folder for the archives and losses.json")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    try:
        runs = {name: record(name, folder) for name in RUNS}
    finally:
        distributed.shutdown()
    found = {"commit": commit.strip(), "torch": torch.__version__.split("+")[0], "cpu": cpu_name(), "runs": runs}
    (folder / "losses.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
