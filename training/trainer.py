"""The training loop. Features such as logging and checkpoints are callbacks, which this file calls in order."""

from __future__ import annotations

import contextlib
import gc
import os
import time

import torch
import torch.distributed as dist

from configs.schema import Config
from parallel import topology as topology_module
from training import status, step
from training.callbacks import default_callbacks
from training.callbacks.guard import Guard
from training.report.metrics import peak_memory_bytes
from training.resilience import recovery
from training.resilience.signals import StopSignals
from training.run import Metrics, Run, restore_callbacks
from training.starting.choices import LayoutChoice
from training.starting.run_builder import build_run


class Trainer:
    """Builds a run from its config, resumes it from a checkpoint if there is one, and takes its steps. `guard` may end
    the process and `signals` handles its signals: pass them only if the process runs nothing else. `choice`: the
    layout, if it was searched for."""

    def __init__(
        self,
        config: Config,
        guard: Guard | None = None,
        signals: StopSignals | None = None,
        choice: LayoutChoice | None = None,
    ):
        if config.training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
            # TransformerEngine reads it when its attention is built; Megatron-core refuses another value.
            os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
            torch.use_deterministic_algorithms(True)
        self.config = config
        self.callbacks = default_callbacks(config, guard, signals, choice)
        self._alone = guard is not None
        self._thaws = False

    def fit(self) -> bool:
        """Train up to step `training.steps`, from the start or from the checkpoint that `checkpoint.resume` selects.
        Returns True if all steps are done, and False if the run stopped early and can be resumed."""
        with contextlib.ExitStack() as built:
            try:
                run = build_run(self.config, self.callbacks, built)
                if run.is_last_step:
                    done = run.progress.step
                    text = f"{run.run_dir} is finished: {done} steps are done. Raise training.steps to train longer."
                    run.log(text)
                    if run.is_main:
                        status.write(run.run_dir, "finished", done, text)
                else:
                    self._take_steps(run)
            except BaseException as error:
                for callback in self.callbacks:
                    callback.on_error(error)
                raise
            finally:
                if self._thaws:
                    gc.unfreeze()
                for callback in self.callbacks:
                    callback.close()
        if run.topology.world_size > 1:
            dist.barrier()  # rank 0 may hold the store that others still talk to
        topology_module.destroy()
        return run.is_last_step

    def _start(self, run: Run) -> None:
        restore_callbacks(run)
        for callback in self.callbacks:
            callback.on_start(run)
        # Objects that exist by now live to the end. A garbage collection that visits them all would take 0.1 s in some
        # step of some rank. gc.unfreeze would also unfreeze objects that other code in this process has frozen.
        gc.collect()
        if self._alone or not gc.get_freeze_count():
            gc.freeze()
            self._thaws = True

    def _take_steps(self, run: Run) -> None:
        self._start(run)
        while not run.is_last_step and run.stop_reason is None:
            metrics = self.train_step(run)
            if metrics is not None:
                for callback in self.callbacks:
                    callback.after_step(run, metrics)
        for callback in self.callbacks:
            (callback.on_end if run.is_last_step else callback.on_stop)(run)

    def train_step(self, run: Run) -> Metrics | None:
        """Take one optimizer step on this rank's micro-batches, and return its metrics. Returns None if the step was
        rejected: its batch is then skipped, or the run has rolled back to a checkpoint."""
        run.seek()
        start, waited = time.perf_counter(), run.loader.wait_seconds
        for callback in self.callbacks:
            callback.before_step(run)
        batches, snapshot = run.loader.next_step(), run.engine.snapshot()
        result = step.gradients(run.engine, batches, run.progress.step + 1)
        rejected = run.health.validate(result.loss, result.finite, result.predicted_tokens)
        if rejected is not None:
            snapshot.roll_back()
            recovery.handle(run, batches, result, rejected)
            return None
        for callback in self.callbacks:
            callback.before_update(run, result)
        step.apply(run.engine, result)
        if result.overflowed:
            snapshot.roll_back_routers()
        run.take(result)
        seconds = time.perf_counter() - start
        return {
            "step": run.progress.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "tokens": run.tokens_per_step,
            "predicted_tokens": result.predicted_tokens,
            "tokens_per_second": run.tokens_per_step / seconds,
            "step_seconds": seconds,
            "data_wait_seconds": run.loader.wait_seconds - waited,
            "peak_memory_bytes": peak_memory_bytes(run.topology.device),
            "updated": result.updated,
            **result.extra,
        }
