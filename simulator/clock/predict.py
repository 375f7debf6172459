"""Prediction of the seconds of a training step for any config and hardware, without a run.

A layer is timed once per kind and shape, a pipeline stage is the sum of its layers, and schedule.py simulates the
pipeline. Measured costs of MoE layers can replace costs derived from the hardware's figures.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from configs import derived
from configs.job import Job
from configs.schema import Config
from models import blueprint
from moe.planning.costs import LayerCosts
from optim.arrangement.buckets import Arrangement
from parallel.pipeline import offloaded_layer_inputs
from simulator.clock.axes import PIPELINE, groups, send
from simulator.clock.experts import ExpertCalls
from simulator.clock.hardware import Hardware
from simulator.clock.passes import MIXTRAIN, BlockSeconds, BlockWork, Fold, PassClock, Reasons, Recipe
from simulator.clock.prediction import PlannedSpan, Prediction
from simulator.clock.schedule import Schedule, StepWork
from simulator.clock.stages import rates, stage_rest
from simulator.clock.streams import StreamSeconds, stream_seconds
from simulator.context.shared_rows import SharedRows, shared_rows

KEPT_WORKS = 4096  # blocks whose work is cached
_works: OrderedDict[Any, BlockWork] = OrderedDict()


class StepClock:
    """Predicts the step of a job on some hardware. Raises ConfigError if no number of chunks fits moe.memory_budget."""

    def __init__(
        self,
        job: Job,
        hardware: Hardware,
        *,
        attended_share: float | None = None,
        shared: SharedRows | None = None,
        recipe: Recipe = MIXTRAIN,
        measured: LayerCosts | None = None,
    ) -> None:
        """Prepare the prediction of a job's step on some hardware.

        `attended_share`: token pairs whose attention is computed, divided by those of one-document samples without a
        sliding window. `shared`: sharding of sequences over context ranks, if known. `recipe`: properties of the
        training framework. `measured`: costs of MoE layers measured on this hardware.
        """
        config = job.config
        self.job, self.config, self.hardware, self.recipe, self._measured = job, config, hardware, recipe, measured
        self.groups = groups(config, job.world_size, int(hardware["ranks_per_node"]))
        self.clock = PassClock(config, hardware, self.groups)
        self.shared = shared or shared_rows(config)
        self._fold = Fold(config, hardware.kind, self.shared, attended_share, recipe)
        self._key = _key(config, job.vocab_size, hardware.kind, attended_share, shared, recipe)
        self._seconds: dict[Any, BlockSeconds] = {}
        self.micro_batches = derived.num_micro_batches(config, job.world_size)

    def chunks(self) -> list[list[BlockSeconds]]:
        """Return the seconds of each model chunk's forward and backward pass by reason, per pipeline stage."""
        slides = derived.window_pattern(self.config)
        result: list[list[BlockSeconds]] = []
        for stage, chunks in enumerate(blueprint.model_chunks(self.config)):
            result.append([])
            for chunk in chunks:
                forward, backward = Reasons(), Reasons()
                for name, number in self._blocks(chunk, slides).items():
                    seconds = self._block(name, stage)
                    forward.add(seconds.forward, number)
                    backward.add(seconds.backward, number)
                result[-1].append(BlockSeconds(forward, backward))
        return result

    def _blocks(self, chunk: blueprint.ModelChunk, slides: Sequence[int]) -> Counter[tuple[Any, ...]]:
        """Return the number of blocks (embedding, layer, head) of each kind in a model chunk.

        `slides`: for each layer of the model, whether it has a sliding window.
        """
        found: Counter[tuple[Any, ...]] = Counter()
        if chunk.is_first:
            found["embedding", chunk.is_last] += 1
        for number, is_moe in enumerate(chunk.layers, chunk.first_layer):
            found["layer", is_moe, bool(slides[number])] += 1
        if chunk.is_last:
            found["head", chunk.is_first] += 1
        return found

    def _block(self, name: tuple[Any, ...], stage: int) -> BlockSeconds:
        key = (*name, stage if derived.plans_moe(self.config) else 0)
        if key not in self._seconds:
            work = self._work(name)
            calls = self._expert_calls.of(work, stage) if work.forward.moe else None
            seconds = self.clock.block(work, calls)
            self._seconds[key] = self._with_layer_inputs(seconds, stage) if name[0] == "layer" else seconds
        return self._seconds[key]

    @cached_property
    def _expert_calls(self) -> ExpertCalls:
        return ExpertCalls(self.config, self.job.world_size, self.hardware, self.groups, self.clock, self._measured)

    def _work(self, name: tuple[Any, ...]) -> BlockWork:
        key = (name, self._key)
        if key not in _works:
            config = self.config
            if name[0] == "layer":
                block = replace(blueprint.layer(config, bool(name[1])), slides=name[2])
            elif name[0] == "embedding":
                first = blueprint.ModelChunk((), True, name[1])
                block = blueprint.blocks(config, self.job.vocab_size, first)[0]
            else:
                block = blueprint.blocks(config, self.job.vocab_size, blueprint.ModelChunk((), name[1], True))[-1]
            _works[key] = self._fold.block(block)
            while len(_works) > KEPT_WORKS:
                _works.popitem(last=False)
        return _works[key]

    def _with_layer_inputs(self, block: BlockSeconds, stage: int) -> BlockSeconds:
        """Return a layer's seconds, plus the time by which copying its offloaded input takes longer than computing."""
        config, world_size = self.config, self.job.world_size
        if config.training.activation_offload == "none":
            return block
        if not offloaded_layer_inputs(config, world_size, stage, float("inf")):
            return block
        count, of = derived.layer_input_bytes(config), rates(self.hardware, world_size)
        forward, backward = Reasons(block.forward), Reasons(block.backward)
        # Bytes (to the host, to the device) of each pass; both directions transfer at the same time.
        transfers = ((count, 0), (0, count))
        if config.training.pass_order == "by_layer":  # each pass reads its input, and gradients are copied, too
            transfers = ((count, count), (count, 2 * count))
        for seconds, (down, up) in zip((forward, backward), transfers, strict=True):
            seconds["host_link"] += max(0.0, max(down / of.down, up / of.up) - sum(seconds.values()))
        return BlockSeconds(forward, backward)

    def predict(self, arrangements: Sequence[Arrangement | None] | None = None, with_spans: bool = False) -> Prediction:
        """Return the predicted step. `arrangements`: of offloaded optimizer state, one per pipeline stage, if known."""
        config, pipeline = self.config, self.groups[PIPELINE]
        rest = stage_rest(self.job, self.hardware, self.groups, self.recipe, arrangements)
        streams: list[StreamSeconds | None] = []
        if derived.streams_experts(config):
            streams = [
                stream_seconds(config, self.job.world_size, stage, self.hardware, self.groups)
                for stage in range(config.parallel.pipeline)
            ]
        state = derived.layer_input_bytes(config)
        step = StepWork(
            self.chunks(),
            rest,
            send(self.hardware, pipeline, state) if config.parallel.pipeline > 1 else 0.0,
            pipeline.link,
            config.parallel.virtual_pipeline is None,
            self.recipe.overlaps_reductions and config.parallel.overlap_grad_reduce,
            derived.overlap_param_gather(config) and self.recipe.overlaps_reductions,
            streams,
            self.job.world_size,
        )
        seconds, reasons, spans = self._simulate(step, with_spans)
        reasons["step"] += self.hardware["step.startup"]
        return Prediction(
            seconds + self.hardware["step.startup"],
            {name: value for name, value in reasons.items() if value > 0},
            self.hardware.name,
            tuple(spans),
        )

    def _simulate(self, step: StepWork, with_spans: bool) -> tuple[float, Reasons, list[PlannedSpan]]:
        """Return seconds, reasons and spans of a step; the pipeline's period is extrapolated to many micro-batches."""
        stages, number = self.config.parallel.pipeline, self.micro_batches
        few = 2 * stages + (number - 2 * stages) % stages
        spans: list[PlannedSpan] = []
        layer_wise = bool(step.streams) and self.config.training.pass_order == "by_layer"
        if number <= few + stages or with_spans or layer_wise:
            first = Schedule(self.config, step, number)
            end, result, busy = first.end, first.reasons(), first.busy()
            if with_spans:
                spans = [PlannedSpan(task.resource, task.name, task.start, task.seconds) for task in first.loop.tasks]
        else:
            first, second = (Schedule(self.config, step, count) for count in (few, few + stages))
            periods = (number - few) / stages
            end, result, busy = first.end + periods * (second.end - first.end), Reasons(), Reasons()
            for found, of_first, of_second in (
                (result, first.reasons(), second.reasons()),
                (busy, first.busy(), second.busy()),
            ):
                found.add(of_first, 1.0 - periods)
                found.add(of_second, periods)
        # Work that overlaps the next step, and other work on the same links, cannot take longer than a step.
        overlapping = max(first.loop.overlapping().values(), key=lambda of: sum(of.values()), default=Reasons())
        for longest in (busy, overlapping):
            if (least := sum(longest.values())) > end:
                result.add(longest, (least - end) / least)
                end = least
        return end, result, spans


def predict_step(
    job: Job,
    hardware: Hardware,
    *,
    attended_share: float | None = None,
    shared: SharedRows | None = None,
    arrangements: Sequence[Arrangement | None] | None = None,
    measured: LayerCosts | None = None,
    with_spans: bool = False,
) -> Prediction:
    """Return the predicted step of a job with a validated config on hardware, whose `kind` replaces `job.device`.

    Args:
        attended_share: token pairs whose attention is computed, divided by those of one-document samples without a
            sliding window. None: from the config.
        shared: sharding of sequences over context ranks, if the documents' lengths are known.
        arrangements: arrangement of offloaded optimizer state on one rank of each pipeline stage.
        measured: costs of MoE layers measured on this hardware, if known.
        with_spans: simulate the whole step and return its spans; otherwise its repeating part is simulated only once.
    """
    clock = StepClock(job, hardware, attended_share=attended_share, shared=shared, measured=measured)
    return clock.predict(arrangements, with_spans)


def least_seconds(job: Job, hardware: Hardware) -> float:
    """Return a lower bound of the seconds of a step: the forward and backward passes of the busiest pipeline stage."""
    clock = StepClock(job, hardware)
    of_stage = (
        sum(sum(chunk.forward.values()) + sum(chunk.backward.values()) for chunk in chunks) for chunks in clock.chunks()
    )
    return clock.micro_batches * max(of_stage)


def _key(config: Config, vocab_size: int, device: str, *rest: Any) -> Any:
    """Return a cache key with everything that a block's work depends on."""
    parallel, training = config.parallel, config.training
    sizes = derived.context_heads(config), derived.expert_tensor_size(config), parallel.expert
    layout = parallel.tensor, parallel.sequence, parallel.context, *sizes, parallel.pipeline > 1
    trained = training.micro_batch_size, training.recompute, training.token_tile, training.precision
    return repr(config.model), repr(config.moe), config.data.documents, vocab_size, device, layout, trained, rest
