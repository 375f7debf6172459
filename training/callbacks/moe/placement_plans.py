"""Record placement plans (which rank computes which replicas in each call), and replay recorded plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from base.errors import ConfigError
from configs.derived import may_save, num_micro_batches
from moe.layer import layers_of
from moe.placement.live import LayerPlacement
from moe.placement.plans import PlanFile, PlanHeader, Plans, RecordedPlanner, ReplayedPlanner, read_plans
from parallel.joint_errors import raise_together, raised_together
from training.resilience import events
from training.resilience.health import RejectedRun
from training.run import Callback, Metrics, Run
from training.step import StepResult


def plan_file(run: Run) -> str:
    """Return the name of the file with the plans of this rank's pipeline stage and expert parallel group."""
    return f"placement_{run.topology.pipeline.rank}_{run.topology.expert_data.rank}.plans"


class RecordedPlans(Callback):
    """Writes the placement plan of each training call to `placement_STAGE_GROUP.plans`, in a few bytes per replica."""

    follows = ("ReplayedPlans",)

    def __init__(self) -> None:
        self._file: PlanFile | None = None

    def on_start(self, run: Run) -> None:
        """Start recording. Raises ConfigError on every rank if an existing plan file belongs to another run."""
        self._planners: dict[int, RecordedPlanner] = {}
        for number, placement in _placements(run).items():
            placement.planner = self._planners[number] = RecordedPlanner(placement.planner)
        topology = run.topology
        self._writes = bool(self._planners) and topology.expert.rank == 0 and topology.expert_tensor.rank == 0
        with raised_together():
            self._open(run)

    def _open(self, run: Run) -> None:
        if self._writes:
            self._file = PlanFile(run.run_dir / plan_file(run), str(run.facts["run"]), run.progress.step)
            if self._file.missing is not None:
                events.log(run.run_dir, events.INCOMPLETE, self._file.missing)

    def before_step(self, run: Run) -> None:
        for planner in self._planners.values():
            planner.calls.clear()
        self._header = _header(run)  # experts may migrate before the step is written

    def before_update(self, run: Run, result: StepResult) -> None:
        """Copy the recorded calls of this step now, because later callbacks may repeat passes."""
        self._calls = {number: list(planner.calls) for number, planner in self._planners.items()}

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._file is not None:
            self._file.append(self._header, self._calls)

    def on_rollback(self, run: Run) -> None:
        self.close()
        self._open(run)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ReplayedPlans(Callback):
    """Replays the placement plan of every training call from the files of a folder. Files of several runs, or files
    that do not fit this run, are an error on all ranks before the first step. If experts migrate differently than in
    the recorded run, the error is raised at that step. `save_now` writes a checkpoint."""

    def __init__(self, save_now: Callable[[Run], None]) -> None:
        self._save_now = save_now

    def on_start(self, run: Run) -> None:
        """Read the recorded plans. Raises ConfigError on every rank if the files do not fit the run."""
        folder, placements = run.config.moe.placement.replay, _placements(run)
        assert folder is not None
        path = Path(folder) / plan_file(run)
        self._plans = Plans(path)
        with raised_together():
            if placements:
                self._plans = read_plans(path)
                calls = num_micro_batches(run.config, run.topology.world_size)
                if problem := self._plans.problem(_header(run), run.config.training.steps, calls):
                    raise ConfigError(problem)
        own_headers = [(str(path), each.run, each.step) for each in self._plans.headers]
        everywhere: list[list[tuple[str, str, int]]] = [[] for _ in range(run.topology.world_size)]
        dist.all_gather_object(everywhere, own_headers)
        files = {run_id: name for each in everywhere for name, run_id, _ in each}
        if len(files) > 1:
            texts = " and ".join(f"{name} is of run {run_id}" for run_id, name in sorted(files.items()))
            raise ConfigError(
                f"moe.placement.replay ({folder}) must have files of a single run, but {texts}. Set it to a folder "
                "with the files of one run."
            )
        # Steps at which the experts' primary ranks may differ from those of the plans, on any rank.
        self._header_steps = {step for each in everywhere for _, _, step in each}
        self._planners: list[ReplayedPlanner] = []
        for number, placement in placements.items():
            placement.planner = planner = ReplayedPlanner(path, number, self._plans.calls.get(number, {}))
            self._planners.append(planner)

    def before_step(self, run: Run) -> None:
        """Compare the experts' primary ranks with the recorded ones. If they differ on any rank, save the run and raise
        RejectedRun on every rank."""
        step, interval = run.progress.step + 1, run.config.moe.placement.interval
        if step in self._header_steps or (interval > 0 and run.progress.step % interval == 0):
            try:
                raise_together(self._plans.primaries_differ(_header(run)))
            except ConfigError as error:
                if run.progress.step > 0 and may_save(run.config):
                    self._save_now(run)
                raise RejectedRun(str(error), run.progress.step) from error
        for planner in self._planners:
            planner.begin(step)

    def before_update(self, run: Run, result: StepResult) -> None:
        for planner in self._planners:
            planner.begin(None)


def _header(run: Run) -> PlanHeader:
    """Return the header of the next step's placement plans: run id, step, numbers of expert parallel ranks, experts and
    replica slots, and each expert's primary rank."""
    config, placements = run.config, _placements(run)
    primaries = {number: tuple(placement.map.primary_ranks.tolist()) for number, placement in placements.items()}
    experts, replica_slots = config.moe.num_experts or 0, config.moe.placement.extra_slots
    step = run.progress.step + 1
    return PlanHeader(str(run.facts["run"]), step, config.parallel.expert, experts, replica_slots, primaries)


def _placements(run: Run) -> dict[int, LayerPlacement]:
    layers = sorted(layers_of(run.engine.bare_chunks).items())
    return {number: layer.placement for number, layer in layers if layer.placement is not None}
