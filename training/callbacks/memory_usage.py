"""Report the memory in use on device, host and disk over all ranks, without an extra all-reduce."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil
import torch

from optim.state import state_bytes
from training.report.metrics import peak_memory_bytes
from training.run import Callback, Metrics, Run

STATE = {"state_device": "device", "state_host": "host", "state_disk": "disk"}
DISK_EVERY_SECONDS = 30.0  # minimum between walks through the run's folder


class MemoryUsage(Callback):
    """Adds `memory`, in bytes: `device` (in use after the step), `device_peak` and `host` (resident), each the maximum
    over ranks; `disk`, the size of the run's folder. On a CPU, `device` is the host.

    `device_peak_by_rank` is added when a rank's peak has changed. `state_device`, `state_host` and `state_disk` are
    bytes of optimizer state, as maxima over ranks. `training.activation_offload` adds `layer_inputs_device_peak` and
    `layer_inputs_host` of the step. Offloading MoE layers on a GPU adds `stayed_on_device`, the bytes that the step
    should have offloaded but that did not fit on the host.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._names: list[str] = []  # of the values that each rank measures
        self._peaks: list[int] = []
        self._disk, self._next_walk = 0, 0.0

    def on_start(self, run: Run) -> None:
        topology = run.topology
        layer_inputs = run.engine.layer_inputs
        self._names = ["device", "device_peak", "host"]
        self._names += [] if layer_inputs is None else ["layer_inputs_device_peak", "layer_inputs_host"]
        self._names += ["stayed_on_device"] if run.engine.offload_bytes else []
        columns = len(STATE) + len(self._names)
        sums = torch.zeros(topology.world_size, columns, dtype=torch.float64, device=topology.device)
        state = state_bytes(run.engine.optimizer, run.engine.bare_chunks)
        for column, target in enumerate(STATE.values()):  # it does not move
            sums[topology.rank, column].fill_(state[target])

        def measure() -> torch.Tensor:
            # One row per rank, each element set by a kernel: a copy from the host would wait for the device.
            host = self._process.memory_info().rss
            device = torch.cuda.memory_allocated(topology.device) if topology.device.type == "cuda" else host
            counted = [] if layer_inputs is None else [layer_inputs.counts.device_peak, layer_inputs.host_bytes]
            counted += [run.engine.host_link.step.stayed] if run.engine.offload_bytes else []
            values = (device, peak_memory_bytes(topology.device), host, *counted)
            for column, value in enumerate(values, start=len(STATE)):
                sums[topology.rank, column].fill_(value)
            return sums

        run.engine.sums.register("memory", measure)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        assert run.result is not None
        by_column = run.result.sums["memory"].t().tolist()
        ranks = dict(zip((*STATE, *self._names), by_column, strict=True))
        names = dict.fromkeys((*self._names[:3], *ranks))
        memory: dict[str, int | list[int]] = {name: int(max(ranks[name])) for name in names}
        if run.is_main and time.monotonic() >= self._next_walk:
            self._disk, self._next_walk = folder_bytes(run.run_dir), time.monotonic() + DISK_EVERY_SECONDS
        memory["disk"] = self._disk
        peaks = [int(value) for value in ranks["device_peak"]]
        if peaks != self._peaks:
            self._peaks = memory["device_peak_by_rank"] = peaks
        metrics["memory"] = memory


def folder_bytes(folder: Path) -> int:
    """Return the total bytes of the files under a folder, without files that are deleted meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
