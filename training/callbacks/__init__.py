"""The callbacks of a run, one feature per file. The list below is the order in which they are called; each class names
in `follows` the classes that must precede it."""

from __future__ import annotations

from collections.abc import Sequence

from configs.derived import is_moe, limits_load, places_experts, plans_moe, replays_plans
from configs.schema import Config
from training.callbacks.checkpoints import Checkpoints
from training.callbacks.early_stop import EarlyStop
from training.callbacks.evaluation import Evaluation
from training.callbacks.guard import Guard
from training.callbacks.logging.console import ProgressLine
from training.callbacks.logging.environment import Environment
from training.callbacks.logging.external_loggers import TensorBoard, WeightsAndBiases
from training.callbacks.logging.metrics_file import MetricsFile
from training.callbacks.logging.step_numbers import GradientNorms, StepNumbers, StepTimes
from training.callbacks.loss_scale import LossScale
from training.callbacks.memory_usage import MemoryUsage
from training.callbacks.moe.expert_migration import ExpertMigration, PrimariesInOrder
from training.callbacks.moe.expert_placement import ExpertPlacement, LoadLimit
from training.callbacks.moe.expert_planning import ExpertPlanning
from training.callbacks.moe.global_aux_loss import GlobalAuxLoss
from training.callbacks.moe.moe_layers import MoELayers
from training.callbacks.moe.placement_plans import RecordedPlans, ReplayedPlans
from training.callbacks.moe.routing_trace import RoutingTrace
from training.callbacks.optimizer_offload import OptimizerOffload
from training.callbacks.predictions import ChosenLayout, PredictedStep
from training.callbacks.profile import Profile
from training.callbacks.samples import PromptSamples
from training.callbacks.stragglers import Stragglers
from training.resilience.signals import StopSignals
from training.run import Callback
from training.starting.choices import LayoutChoice


def default_callbacks(
    config: Config, guard: Guard | None = None, signals: StopSignals | None = None, choice: LayoutChoice | None = None
) -> list[Callback]:
    """Return the callbacks that a config needs, in calling order. `guard` watches for lost ranks, `signals` collects
    received signals, and `choice` is the parallel layout if a search chose it."""
    metrics_file = MetricsFile()
    checkpoints = Checkpoints(metrics_file.flush, metrics_file.sync)
    planning = ExpertPlanning() if plans_moe(config) else None
    callbacks: list[Callback] = [
        StepNumbers(),
        *([planning] if planning else []),
        *([GlobalAuxLoss()] if config.moe.global_aux_loss_coeff > 0 else []),
        *([MoELayers(planning)] if is_moe(config) else []),
        *([ExpertPlacement()] if places_experts(config) else []),
        *([ExpertMigration() if places_experts(config) else PrimariesInOrder()] if is_moe(config) else []),
        *([ReplayedPlans(checkpoints.save_now)] if replays_plans(config) else []),
        *([RecordedPlans()] if places_experts(config) and config.moe.placement.record else []),
        *([RoutingTrace()] if is_moe(config) and config.moe.placement.record else []),
        Environment(),
        OptimizerOffload(),
        Evaluation(),
        StepTimes(),
        *([ChosenLayout(choice)] if choice else []),
        *([PredictedStep()] if config.hardware is not None else []),
        GradientNorms(),
        MemoryUsage(),
        metrics_file,
        LossScale(),
        ProgressLine(),
        TensorBoard(),
        WeightsAndBiases(),
        Stragglers(),
        *([LoadLimit(checkpoints.save_now)] if limits_load(config) else []),
        checkpoints,
        PromptSamples(),
        EarlyStop(checkpoints.save_now, signals),
        *([guard] if guard else []),
        Profile(),  # last: a step's trace holds its callbacks
    ]
    check_order(callbacks)
    return callbacks


def check_order(callbacks: Sequence[Callback]) -> None:
    """Raise AssertionError if a callback precedes one of the callbacks in its `follows`, which must be called before
    it."""
    names = [type(each).__name__ for each in callbacks]
    for index, callback in enumerate(callbacks):
        later = [name for name in callback.follows if name in names[index + 1 :]]
        assert not later, f"{names[index]} must be called after {', '.join(later)}"
