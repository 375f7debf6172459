"""Traces of chosen steps on chosen ranks, for Perfetto or chrome://tracing and for the timeline of the report."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from checkpoint.saver import Saver
from configs.files import spared
from optim import update
from parallel import trace
from parallel.megatron.ddp import functions_of_a_step
from training import step
from training.run import Callback, Metrics, Run

FOLDER = "traces"


def trace_path(run_dir: Path, step: int, rank: int) -> Path:
    """Where the trace of a step on a rank lies."""
    return run_dir / FOLDER / f"step_{step:07d}_rank_{rank:05d}.json.gz"


class Profile(Callback):
    """Writes a file for each step of `training.profile.steps` on each rank of `training.profile.ranks`.

    A trace reaches from the end of the callbacks of the step before to the end of this step's: data, forward, backward,
    update, evaluation, checkpoint. The last callback of the list, therefore. Other steps, and other ranks, run as if it
    were not there.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._names: contextlib.ExitStack | None = None
        self._done = 0  # the last step that was finished

    def on_start(self, run: Run) -> None:
        settings, first = run.config.training.profile, run.progress.step + 1
        chosen = {step for step in settings.steps if first <= step <= run.config.training.steps}
        ranks = range(run.topology.world_size) if settings.ranks == "all" else settings.ranks
        if not chosen or run.topology.rank not in ranks:
            return
        with spared(run.run_dir / FOLDER):
            (run.run_dir / FOLDER).mkdir(exist_ok=True)

        def action(index: int) -> ProfilerAction:
            step = run.progress.step + 1  # not the profiler's own count: a run may go back to a checkpoint
            if step in chosen:
                return ProfilerAction.RECORD_AND_SAVE
            # The step before is recorded too and thrown away: a profiler's first step pays for its start.
            return ProfilerAction.WARMUP if step + 1 in chosen else ProfilerAction.NONE

        def write(profiler: Any) -> None:
            if self._done in chosen:  # not where an error cuts a step off
                path = trace_path(run.run_dir, self._done, run.topology.rank)
                with spared(path):
                    try:
                        profiler.export_chrome_trace(str(path))
                    except OSError:
                        path.unlink(missing_ok=True)
                        raise

        activities = [ProfilerActivity.CPU]
        if run.topology.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._chosen, self._last = chosen, max(chosen)
        self._profiler = profile(activities=activities, schedule=action, on_trace_ready=write)
        self._profiler.start()
        self._name(run)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._profiler is None:
            return
        self._done = run.progress.step
        self._profiler.step()
        self._done = 0
        if run.progress.step >= self._last:
            self.close()
        else:
            self._name(run)

    def _name(self, run: Run) -> None:
        """Name what the next step does if it is traced, and nothing otherwise."""
        if self._names is not None:
            self._names.close()
            self._names = None
        if run.progress.step + 1 in self._chosen:
            self._names = contextlib.ExitStack()
            self._names.enter_context(trace.recording(*_foreign(run)))
            for module in _attention(run):
                module.forward = trace.with_backward("attention")(module.forward)
                self._names.callback(delattr, module, "forward")

    def close(self) -> None:
        if self._names is not None:
            self._names.close()
            self._names = None
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()


def _attention(run: Run) -> list[torch.nn.Module]:
    return [module for chunk in run.engine.bare_chunks for module in chunk.modules() if isinstance(module, Attention)]


def _foreign(run: Run) -> list[tuple[Any, str, str]]:
    """What else a step does, here and in Megatron-core, and its names."""
    return [
        (run.loader, "next_step", "data"),
        (step, "evaluate", "evaluation"),
        *functions_of_a_step(run.engine.chunks),
        (update, "prepare", "gradient norm"),
        (update, "apply", "optimizer"),
        (Saver, "start", "checkpoint"),
        (Saver, "finish", "checkpoint"),
    ]
