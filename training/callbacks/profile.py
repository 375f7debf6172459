"""Write traces of chosen steps on chosen ranks, for Perfetto, chrome://tracing and the report's timeline."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from megatron.core.transformer.attention import Attention
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from base.files import spared
from checkpoint.saver import Saver
from parallel import trace
from parallel.megatron.ddp import functions_of_a_step
from training import step
from training.run import Callback, Metrics, Run

FOLDER = "traces"


def trace_path(run_dir: Path, step: int, rank: int) -> Path:
    """Return the path of the trace file of one step on one rank."""
    return run_dir / FOLDER / f"step_{step:07d}_rank_{rank:05d}.json.gz"


class Profile(Callback):
    """Writes one trace file for each step in `training.profile.steps` on each rank in `training.profile.ranks`.

    A trace lasts from the end of the previous step's callbacks to the end of this step's callbacks: data, forward,
    backward, update, evaluation and checkpoint. Therefore this must be the last callback in the list.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._names = contextlib.ExitStack()  # undoes what names the phases of a traced step
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
            step = run.progress.step + 1  # not the profiler's own count, since a run may go back to a checkpoint
            if step in chosen:
                return ProfilerAction.RECORD_AND_SAVE
            # The previous step is recorded, too, and discarded: a profiler's first step includes its start.
            return ProfilerAction.WARMUP if step + 1 in chosen else ProfilerAction.NONE

        def write(profiler: Any) -> None:
            if self._done in chosen:  # not if an error interrupted the step
                path = trace_path(run.run_dir, self._done, run.topology.rank)
                with spared(path):
                    try:
                        profiler.export_chrome_trace(str(path))
                    except OSError:
                        path.unlink(missing_ok=True)
                        raise

        on_gpu = run.topology.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
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
        """Make the phases of the next step appear by name in the trace, if that step is traced."""
        self._names.close()
        if run.progress.step + 1 in self._chosen:
            # Phases of a step that other modules and Megatron-core run, with their names in the trace.
            phases = (
                (run.loader, "next_step", "data"),
                (step, "evaluate", "evaluation"),
                *functions_of_a_step(run.engine.chunks),
                (step, "prepare_gradients", "gradient norm"),
                (step, "apply_gradients", "optimizer"),
                (Saver, "start", "checkpoint"),
                (Saver, "finish", "checkpoint"),
            )
            self._names.enter_context(trace.recording(*phases))
            modules = (module for chunk in run.engine.bare_chunks for module in chunk.modules())
            for module in (module for module in modules if isinstance(module, Attention)):
                module.forward = trace.with_backward("attention")(module.forward)
                self._names.callback(delattr, module, "forward")

    def close(self) -> None:
        self._names.close()
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
