"""The loop. Features are callbacks; this file only joins the rooms and calls them in order."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs import files
from configs.compose import to_yaml
from configs.derived import is_moe, plans_moe
from configs.ranks import world_size
from configs.schema import Config
from data.build import build_data
from data.prepare import prepare
from data.tokenizer import load_tokenizer
from parallel import topology as topology_module
from training import checkpoint, dry_run, kept_tokenizer, manifest, plan, recovery, resume, start, status
from training.callbacks.checkpoints import Checkpoints
from training.callbacks.early_stop import EarlyStop
from training.callbacks.environment import Environment
from training.callbacks.evaluation import Evaluation
from training.callbacks.expert_planning import ExpertPlanning
from training.callbacks.gradient_parts import GradientParts
from training.callbacks.guard import Guard
from training.callbacks.loss_scale import LossScale
from training.callbacks.memory_tiers import MemoryTiers
from training.callbacks.metrics_file import MetricsFile
from training.callbacks.moe_layers import MoELayers
from training.callbacks.profile import Profile
from training.callbacks.progress import Progress as ProgressLine
from training.callbacks.samples import Samples
from training.callbacks.step_times import StepTimes
from training.callbacks.stragglers import Stragglers
from training.callbacks.tensorboard import TensorBoard
from training.callbacks.weights_and_biases import WeightsAndBiases
from training.flops import training_flops_per_token
from training.health import Health, SkippedSamples, kept_state
from training.metrics import expert_load, peak_flops, peak_memory_bytes
from training.run import Callback, Metrics, Run
from training.signals import StopSignals
from training.start import Start
from training.state_file import in_words
from training.step import Model


class Trainer:
    """Builds a run from its config, resumes it if there is something to resume, and takes its steps.

    guard, signals: of a process that is this run's alone; they may end it, and take its signals.
    """

    def __init__(self, config: Config, guard: Guard | None = None, signals: StopSignals | None = None):
        if config.training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
            torch.use_deterministic_algorithms(True)
        self.config = config
        self._claim: resume.Claim | None = None  # keeps other jobs out of the run's folder
        metrics_file = MetricsFile()
        self._health, self._checkpoints = Health(config), Checkpoints(metrics_file.flush, metrics_file.sync)
        planning = ExpertPlanning() if plans_moe(config) else None
        self.callbacks: list[Callback] = [
            *([planning] if planning else []),
            *([MoELayers(planning)] if is_moe(config) else []),  # these add to the metrics that the next ones write
            Environment(),
            Evaluation(),
            StepTimes(),
            GradientParts(),
            MemoryTiers(),
            metrics_file,
            LossScale(),  # a step without an update is on record
            ProgressLine(),
            TensorBoard(),
            WeightsAndBiases(),
            Stragglers(),
            self._checkpoints,  # a checkpoint's step is already on record
            Samples(),
            EarlyStop(self._checkpoints.save_now, signals),
            *([guard] if guard else []),
            Profile(),  # last: a step's trace holds its callbacks
        ]

    def fit(self) -> bool:
        """Train to `training.steps`, from the checkpoint that `checkpoint.resume` names or from the start.

        Returns whether all steps are done; else the run stopped early, and goes on when it is started again.
        """
        run: Run | None = None
        try:
            run = self._build()
            if run.is_last_step:
                text = f"{run.run_dir} is finished: {run.progress.step} steps are done. Raise training.steps to go on."
                run.say(text)
                if run.is_main:
                    status.write(run.run_dir, "finished", run.progress.step, text)
            else:
                self._take_steps(run)
        except BaseException as error:
            for callback in self.callbacks:
                callback.on_error(error)
            raise
        finally:
            gc.unfreeze()
            for callback in self.callbacks:
                callback.close()
            if run is not None:
                run.loader.close()
                run.model.close()
            self._release()
        if run.topology.world_size > 1:
            dist.barrier()  # rank 0 may hold the store that others still talk to
        topology_module.destroy()
        return run.is_last_step

    def _start(self, run: Run) -> None:
        for callback in self.callbacks:
            callback.on_start(run)
        # What exists by now lives to the end: a collection that looks through all of it takes 0.1 s, on some rank in some step.
        gc.collect()
        gc.freeze()

    def _take_steps(self, run: Run) -> None:
        self._start(run)
        while not run.is_last_step and run.stop_reason is None:
            metrics = self.train_step(run)
            if metrics is not None:
                for callback in self.callbacks:
                    callback.after_step(run, metrics)
        for callback in self.callbacks:
            if run.is_last_step:
                callback.on_end(run)
            else:
                callback.on_stop(run)

    def train_step(self, run: Run) -> Metrics | None:
        """One optimizer step: this rank's micro-batches, forward and backward, update, and the step's metrics.

        None where the step was refused: its batch is passed over, or the run has gone back to a checkpoint.
        """
        run.seek()
        start, waited = time.perf_counter(), run.loader.wait_seconds
        batches = run.loader.next_step()
        result = run.model.train_step(batches, run.progress.step + 1, self._health.judge)
        if result.refusal is not None:
            recovery.handle(run, self._health, batches, result, self._checkpoints, self._rolled_back)
            return None
        self._health.taken(result.loss, run.progress.step + 1, result.updated)
        run.progress.step += 1
        run.progress.consumed_samples += self.config.training.global_batch_size
        seconds = time.perf_counter() - start
        metrics: Metrics = {
            "step": run.progress.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "tokens": run.tokens_per_step,
            "tokens_per_second": run.tokens_per_step / seconds,
            "step_seconds": seconds,
            "data_wait_seconds": run.loader.wait_seconds - waited,
            "peak_memory_bytes": peak_memory_bytes(run.topology.device),
            "updated": result.updated,
            **result.extra,
        }
        if self._peak_flops is not None:
            metrics["mfu"] = self._flops_per_token * metrics["tokens_per_second"] / (self._peak_flops * run.topology.world_size)
        run.result, run.tokens_per_expert = result, result.tokens_per_expert
        if result.tokens_per_expert is not None:
            metrics["tokens_per_expert"] = expert_load(result.tokens_per_expert)
        return metrics

    def _rolled_back(self, run: Run) -> None:
        for callback in self.callbacks:
            callback.on_rollback(run)

    def _build(self) -> Run:
        config = self.config
        is_main = int(os.environ.get("RANK", "0")) == 0
        device = topology_module.choose_device(config)  # a wrong device is told before a corpus is prepared
        early = start.find(config, manifest.problem_with)  # every byte is read once all ranks are there
        start.check_tokenizer(config, early)
        data_config = start.data_config(config, early)
        # Before a corpus is tokenized, and before any rank of this node has taken its memory.
        expected = plan.expected_vocab_size(dataclasses.replace(config, data=data_config))
        self._plan = plan.make_plan(config, world_size(), expected, device.type)
        if device.type == "cpu":
            plan.refuse_what_the_host_cannot_hold(self._plan)
        show_progress, rule = is_main and config.logging.progress, start.split_rule(early)
        prepared = prepare(data_config, config.model.family, show_progress, split_rule=rule)
        if is_main and prepared.num_bad_lines:
            listed = ", ".join(prepared.bad_lines_files)
            print(f"data: {prepared.num_bad_lines} bad lines were left out, listed in {listed}; first {prepared.bad_lines[0]}", flush=True)
        tokenizer = load_tokenizer(prepared.tokenizer_path)
        vocab_size = config.model.vocab_size or tokenizer.vocab_size
        topology = topology_module.initialize(config)
        for callback in self.callbacks:
            callback.on_join(topology)
        self._claim = resume.claim(Path(config.run_dir))
        beginning = resume.find(config, vocab_size, prepared.identity)
        folder = beginning.start.checkpoint
        for callback in self.callbacks:
            callback.on_claim(0 if folder is None else int(folder.name[5:]))
        if (self._plan.vocab_size, self._plan.device) != (vocab_size, topology.device.type):
            self._plan = plan.make_plan(config, topology.world_size, vocab_size, topology.device.type)
        plan.refuse_what_cannot_fit(self._plan, topology.device)
        model = Model(config, topology, vocab_size)
        progress = checkpoint.Progress()
        if folder is not None:
            progress = checkpoint.load(model, folder)
            kept, line = kept_state(progress.health, progress.step, folder)
            self._health.resume(kept)
            if line is not None and topology.rank == 0:
                print(line, flush=True)
        elif config.checkpoint.weights is not None:
            model.load_weights(Path(config.checkpoint.weights), vocab_size)
        skipped = SkippedSamples.load(Path(config.run_dir), beginning.start.origin)

        def data(consumed: int) -> Any:
            return build_data(config, prepared, rank=topology.data_rank, world_size=topology.data_size, consumed_samples=consumed)

        loader, make_validation_loader = data(progress.consumed_samples)
        if topology.rank == 0:
            resume.say(config, beginning, progress.step)
        self._flops_per_token = training_flops_per_token(config, vocab_size)
        self._peak_flops = peak_flops(config, topology.device)
        run = Run(
            config, topology, model, vocab_size, tokenizer, loader, make_validation_loader, progress, skipped=skipped, health=self._health
        )
        run.make_loader = lambda consumed: data(consumed)[0]
        run.claim, run.facts = self._claim, {"run": beginning.start.record.id, "data": prepared.identity}
        self._describe(run, beginning.start)
        if dry_run.wanted(config, topology.device):
            dry_run.first_batch(model, self._plan)
        return run

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def _describe(self, run: Run, begun: Start) -> None:
        if self._claim is None:
            return
        files.write_text(run.run_dir / "config.yaml", to_yaml(self.config))
        plan.write(self._plan, run.run_dir)
        kept_tokenizer.keep(run.run_dir, run.tokenizer)
        self._claim.keep(begun.record)
        print(
            f"{self.config.name}: {self.config.model.family}, {run.topology.device.type}, "
            f"{in_words({'world_size': run.topology.world_size, **vars(self.config.parallel)})}; "
            f"vocabulary {run.vocab_size}; {self._flops_per_token / 1e6:.1f} MFLOP per token; steps {run.progress.step} to "
            f"{self.config.training.steps} of {run.tokens_per_step} tokens; writing to {run.run_dir}",
            flush=True,
        )
