"""Runs that an earlier commit has left resume bit for bit."""

from __future__ import annotations

import functools
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def uses_all_of_it() -> bool:
    """Whether torch computes as it did where the losses were recorded, and is not told to keep to an older CPU."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "ONEDNN_MAX_CPU_ISA" not in os.environ


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


TARGETS: dict[str, dict[str, Any]] = {
    "host": {"state_device": "host", "engine": "host"},
    "device_stream": {"state_device": "host", "engine": "device_stream"},
    "disk": {"state_device": "disk"},
}


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[dict[str, Any]]]:
    """The metrics of five more steps of an old run, with its state on an offload target."""

    @functools.cache
    def run(name: str, target: str) -> list[dict[str, Any]]:
        config = unpack(name, tmp_path_factory.mktemp(target))
        if target != "device":
            config.optimizer.distributed, config.optimizer.bucket_parameters = True, 4096
            config.memory.disk_dir = config.run_dir
            for key, value in TARGETS[target].items():
                setattr(config.optimizer, key, value)
        distributed.run(one_thread, RECORDED["runs"][name]["ranks"], config, timeout=helpers.TIMEOUT)
        lines = helpers.read_metrics(config.run_dir)[RECORDED["runs"][name]["step"] :]
        return [{key: line[key] for key in ("step", "loss", "grad_norm")} for line in lines]

    return run


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_an_old_run_goes_on_as_it_would_have(name: str, gone_on: Callable[[str, str], list[dict[str, Any]]]) -> None:
    ours, recorded = gone_on(name, "device"), RECORDED["runs"][name]["next"]
    if cpu_name() == RECORDED["cpu"] and uses_all_of_it() and torch.__version__.startswith(RECORDED["torch"]):
        assert ours == recorded
    else:
        assert helpers.largest_difference(ours, recorded, "loss") < FP32_LOSS


# Each run under one tier, in turns; the first one under all.
WITH_TARGETS = [(name, list(TARGETS)[number % len(TARGETS)]) for number, name in enumerate(RECORDED["runs"])]
WITH_TARGETS += [(WITH_TARGETS[0][0], target) for target in TARGETS if target != WITH_TARGETS[0][1]]


@pytest.mark.parametrize(("name", "target"), WITH_TARGETS)
def test_an_old_run_resumes_with_offloaded_state(
    name: str, target: str, gone_on: Callable[[str, str], list[dict[str, Any]]]
) -> None:
    assert gone_on(name, target) == gone_on(name, "device")
