"""Runs that an earlier version has left go on bit for bit."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch

from configs.compose import load
from configs.schema import Config
from tests import distributed
from tests.tolerances import FP32_LOSS
from tests.training import helpers

OLD_RUNS = Path(__file__).parents[1] / "data" / "old_runs"
RECORDED = json.loads((OLD_RUNS / "losses.json").read_text())


def cpu_name() -> str:
    """Which CPU this is, as losses.json names the one that the losses were recorded on."""
    pairs = [
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines() if ":" in line
    ]
    facts = {key.strip(): value.strip() for key, value in pairs}
    return f"{facts.get('vendor_id')} family {facts.get('cpu family')} model {facts.get('model')}"


def unpack(name: str, folder: Path) -> Config:
    """The run folder at `folder/name`, and the config that goes on with it for five steps."""
    with tarfile.open(OLD_RUNS / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    config = load(folder / name / "config.yaml")
    config.run_dir = str(folder / name)
    config.data.corpus, config.data.cache_dir = str(OLD_RUNS / "corpus.jsonl"), str(folder / "cache")
    config.training.steps += 5
    return config


def one_thread(config: Config) -> helpers.Lines:
    torch.set_num_threads(1)  # as they were recorded
    return helpers.train(config)


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_an_old_run_goes_on_as_it_would_have(name: str, tmp_path: Path) -> None:
    recorded = RECORDED["runs"][name]
    config = unpack(name, tmp_path)
    distributed.run(one_thread, recorded["ranks"], config, timeout=helpers.TIMEOUT)
    lines = helpers.read_metrics(config.run_dir)[recorded["step"] :]
    if cpu_name() == RECORDED["cpu"] and torch.__version__.startswith(RECORDED["torch"]):
        ours = [{key: line[key] for key in ("step", "loss", "grad_norm")} for line in lines]
        assert ours == recorded["next"]
    else:
        assert helpers.largest_difference(lines, recorded["next"], "loss") < FP32_LOSS
