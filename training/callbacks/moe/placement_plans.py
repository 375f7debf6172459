"""Plans of placement, recorded and replayed."""

from __future__ import annotations

from pathlib import Path

from configs.files import writing
from moe.layer import layers_of
from moe.placement.live import LayerPlacement
from moe.placement.plans import PlanFile, Recorded, Replayed, read_plans
from training.run import Callback, Metrics, Run
from training.step import StepResult


def plan_file(run: Run) -> str:
    """The name of the file of this rank's pipeline stage and expert group: each group plans for itself."""
    return f"placement_{run.topology.pipeline.rank}_{run.topology.expert_data.rank}.plans"


class RecordedPlans(Callback):
    """Writes each training call's plan to `placement_STAGE_GROUP.plans`, a few bytes for each copy."""

    def __init__(self) -> None:
        self._file: PlanFile | None = None

    def on_start(self, run: Run) -> None:
        self._planners: dict[int, Recorded] = {}
        for number, placement in _placements(run).items():
            placement.planner = self._planners[number] = Recorded(placement.planner)
        self._path = run.run_dir / plan_file(run)
        topology = run.topology
        if self._planners and topology.expert.rank == 0 and topology.expert_tensor.rank == 0:
            self._open(run)

    def _open(self, run: Run) -> None:
        with writing(self._path):
            self._file = PlanFile(self._path, after=run.progress.step)

    def before_step(self, run: Run) -> None:
        for planner in self._planners.values():
            planner.calls.clear()

    def before_update(self, run: Run, result: StepResult) -> None:
        """Others may run passes once more after this."""
        self._calls = {number: list(planner.calls) for number, planner in self._planners.items()}

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._file is not None:
            with writing(self._path):
                for number, calls in self._calls.items():
                    self._file.append(run.progress.step, number, calls)

    def on_rollback(self, run: Run) -> None:
        if self._file is not None:
            self._file.close()
            self._open(run)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ReplayedPlans(Callback):
    """Has every training call planned as a folder's files say."""

    def on_start(self, run: Run) -> None:
        """Raises ConfigError."""
        folder, placements = run.config.moe.placement.replay, _placements(run)
        assert folder is not None
        path = Path(folder) / plan_file(run)
        plans = read_plans(path) if placements else {}
        self._planners: list[Replayed] = []
        for number, placement in placements.items():
            self._planners.append(Replayed(path, number, plans.get(number, {})))
            placement.planner = self._planners[-1]

    def before_step(self, run: Run) -> None:
        for planner in self._planners:
            planner.begin(run.progress.step + 1)

    def before_update(self, run: Run, result: StepResult) -> None:
        for planner in self._planners:
            planner.begin(None)


def _placements(run: Run) -> dict[int, LayerPlacement]:
    layers = sorted(layers_of(run.engine.bare_chunks).items())
    return {number: layer.placement for number, layer in layers if layer.placement is not None}
