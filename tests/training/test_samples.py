"""The presets end well as a user types them, and every layout continues a prompt with the same words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import distributed
from tests.training.helpers import make_config

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    "TP2+SP": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "PP2": (2, ["parallel.pipeline=2"]),
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "EP2": (2, ["parallel.expert=2"]),
}


@pytest.mark.parametrize("model", ["gpt_tiny", "gpt_moe_tiny", "bert_tiny", "bert_moe_tiny"])
def test_a_preset_runs_to_its_end(model: str, data: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "train.py", f"model={model}", f"run_dir={tmp_path}", "training.steps=2", "training.eval_batches=1"]
    quiet = ["logging.wandb=off", "sample.num_tokens=4", *data]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *quiet], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert ("greedy continuation" in done.stdout) == model.startswith("gpt")
    assert "below the unigram entropy" in done.stdout


def _continuation(overrides: list[str], ranks: int) -> str:
    from training.generate import continue_text
    from training.trainer import Trainer

    run = Trainer(make_config(overrides, ranks))._build()
    try:
        return continue_text(run, "def run(self", 12, temperature=0.0) + "|" + continue_text(run, "", 6, temperature=1.0, top_p=0.9)
    finally:
        run.loader.close()
        run.model.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_continues_a_prompt_alike(layout: str, data: list[str], tmp_path: Path) -> None:
    ranks, overrides = LAYOUTS[layout]
    common = ["model=gpt_moe_tiny", f"run_dir={tmp_path}", *data]
    alone = distributed.run(_continuation, 1, common, 1)
    assert distributed.run(_continuation, ranks, [*common, *overrides], ranks) == alone * ranks
