"""How long a step of any config should take on a hardware: a prediction, without a run.

A layer is timed once per kind and shape, a stage is the sum of its layers, the pipeline runs over passes
(schedule.py). Costs of MoE layers that were measured on this machine are used where they are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from configs import derived
from configs.schema import Config
from models import blueprint
from moe.planning.costs import LayerCosts
from optim.arrangement.arrange import Arrangement
from parallel.pipeline import offloaded_layer_inputs
from simulator.clock.axes import PIPELINE, groups, send
from simulator.clock.experts import ExpertCalls
from simulator.clock.hardware import Hardware
from simulator.clock.passes import BlockSeconds, PassClock, Reasons
from simulator.clock.prediction import PlannedSpan, Prediction
from simulator.clock.schedule import Schedule, StepParts
from simulator.clock.stages import StageRest, rates, stage_rest
from simulator.clock.streams import StreamParts, stream_parts
from simulator.clock.work import MIXTRAIN, BlockWork, Fold, Recipe
from simulator.context.rows import SharedRows, shared_rows

KEPT_WORKS = 4096  # blocks whose work is remembered
_works: OrderedDict[Any, BlockWork] = OrderedDict()


class StepClock:
    """A config's step on a hardware. Raises ConfigError where no plan of the MoE layers fits their budget."""

    def __init__(
        self,
        config: Config,
        world_size: int,
        vocab_size: int,
        hardware: Hardware,
        *,
        attended_share: float | None = None,
        shared: SharedRows | None = None,
        recipe: Recipe = MIXTRAIN,
        measured: LayerCosts | None = None,
    ) -> None:
        """attended_share, shared: as in simulator/flops.py; recipe: of another trainer; measured: costs of the MoE
        layers, where they were measured on this hardware."""
        self._measured = measured
        self.config, self.world_size, self.vocab_size = config, world_size, vocab_size
        self.hardware, self.recipe = hardware, recipe
        self.groups = groups(config, world_size, int(hardware["ranks_per_node"]))
        self.clock = PassClock(config, hardware, self.groups)
        self.shared = shared or shared_rows(config)
        self._fold = Fold(config, hardware.kind, self.shared, attended_share, recipe)
        self._key = _key(config, vocab_size, hardware.kind, attended_share, shared, recipe)
        self._calls: ExpertCalls | None = None
        self._seconds: dict[Any, BlockSeconds] = {}
        self.micro_batches = derived.num_micro_batches(config, world_size)

    def chunks(self) -> list[list[BlockSeconds]]:
        """Seconds of both passes of each stage's model chunks, by reason."""
        slides = derived.window_pattern(self.config)
        result = []
        for stage, parts in enumerate(blueprint.parts(self.config)):
            of_stage = []
            for part in parts:
                forward, backward = Reasons(), Reasons()
                for name, number in self._blocks(part, slides).items():
                    seconds = self._block(name, part, stage)
                    forward.add(seconds.forward, number)
                    backward.add(seconds.backward, number)
                of_stage.append(BlockSeconds(forward, backward))
            result.append(of_stage)
        return result

    def _blocks(self, part: blueprint.Part, slides: Sequence[int]) -> Counter[tuple[Any, ...]]:
        """How many blocks of each kind a part has."""
        found: Counter[tuple[Any, ...]] = Counter()
        if part.is_first:
            found["embedding", part.is_last] += 1
        for number, is_moe in enumerate(part.layers, part.first_layer):
            found["layer", is_moe, bool(slides[number])] += 1
        if part.is_last:
            found["head", part.is_first] += 1
        return found

    def _block(self, name: tuple[Any, ...], part: blueprint.Part, stage: int) -> BlockSeconds:
        key = (*name, stage if derived.plans_moe(self.config) else 0)
        if key not in self._seconds:
            work = self._work(name)
            calls = None
            if work.forward.moe:
                self._calls = self._calls or self._expert_calls()
                calls = self._calls.of(work, stage)
            seconds = self.clock.block(work, calls)
            self._seconds[key] = self._with_layer_inputs(seconds, stage) if name[0] == "layer" else seconds
        return self._seconds[key]

    def _expert_calls(self) -> ExpertCalls:
        """Seconds of MoE layers' calls."""
        return ExpertCalls(self.config, self.world_size, self.hardware, self.groups, self.clock, self._measured)

    def _work(self, name: tuple[Any, ...]) -> BlockWork:
        key = (name, self._key)
        if key not in _works:
            config = self.config
            if name[0] == "layer":
                block = replace(blueprint.layer(config, bool(name[1])), slides=name[2])
            elif name[0] == "embedding":
                first = blueprint.Part((), True, name[1])
                block = blueprint.blocks(config, self.vocab_size, first)[0]
            else:
                block = blueprint.blocks(config, self.vocab_size, blueprint.Part((), name[1], True))[-1]
            _works[key] = self._fold.block(block)
            while len(_works) > KEPT_WORKS:
                _works.popitem(last=False)
        return _works[key]

    def _with_layer_inputs(self, block: BlockSeconds, stage: int) -> BlockSeconds:
        """A layer whose input goes to the host and comes back while others compute."""
        if self.config.training.activation_offload == "none":
            return block
        count = derived.layer_input_bytes(self.config)
        of = rates(self.hardware, self.world_size)
        forward, backward = Reasons(block.forward), Reasons(block.backward)
        if not offloaded_layer_inputs(self.config, self.world_size, stage, float("inf")):
            return block
        # To the host and back, in each direction at once.
        ways = ((count, 0), (0, count))
        if self.config.training.pass_order == "by_layer":  # each pass reads its input; gradients go there and back
            ways = ((count, count), (count, 2 * count))
        for seconds, (down, up) in zip((forward, backward), ways, strict=True):
            seconds["host_link"] += max(0.0, max(down / of.down, up / of.up) - sum(seconds.values()))
        return BlockSeconds(forward, backward)

    def predict(self, arrangements: Sequence[Arrangement | None] | None = None, with_spans: bool = False) -> Prediction:
        """The step. `arrangements`: of optimizer state in tiers by stage, where they are known."""
        config = self.config
        rest = stage_rest(
            config, self.vocab_size, self.world_size, self.hardware, self.groups, self.recipe, arrangements
        )
        seconds, reasons, spans = self._steps(self._parts(rest), with_spans)
        reasons["step"] += self.hardware["step.startup"]
        return Prediction(
            seconds + self.hardware["step.startup"],
            {name: value for name, value in reasons.items() if value > 0},
            self.hardware.name,
            tuple(spans),
        )

    def _parts(self, rest: Sequence[StageRest]) -> StepParts:
        config = self.config
        beside = self.recipe.reduces_beside and config.parallel.overlap_grad_reduce
        state = derived.layer_input_bytes(config)
        return StepParts(
            self.chunks(),
            rest,
            send(self.hardware, self.groups[PIPELINE], state) if config.parallel.pipeline > 1 else 0.0,
            self.groups[PIPELINE].place,
            config.parallel.virtual_pipeline is None,
            beside,
            derived.overlap_param_gather(config) and self.recipe.reduces_beside,
            self._streams(),
            self.world_size,
        )

    def _streams(self) -> list[StreamParts | None]:
        """Experts off the device, by stage; [] where there are none."""
        if not derived.streams_experts(self.config):
            return []
        stages = range(self.config.parallel.pipeline)
        return [stream_parts(self.config, self.world_size, stage, self.hardware, self.groups) for stage in stages]

    def _steps(self, parts: StepParts, with_spans: bool) -> tuple[float, Reasons, list[PlannedSpan]]:
        """Many micro-batches are as few and a period of the pipeline, again and again."""
        stages, number = self.config.parallel.pipeline, self.micro_batches
        few = 2 * stages + (number - 2 * stages) % stages
        spans: list[PlannedSpan] = []
        by_layer = bool(parts.streams) and self.config.training.pass_order == "by_layer"
        if number <= few + stages or with_spans or by_layer:
            first = Schedule(self.config, parts, number)
            end, result, busy = first.end, first.reasons(), first.busy()
            if with_spans:
                spans = [PlannedSpan(task.resource, task.name, task.start, task.seconds) for task in first.loop.tasks]
        else:
            first, second = (Schedule(self.config, parts, count) for count in (few, few + stages))
            periods = (number - few) / stages
            end, result, busy = first.end + periods * (second.end - first.end), Reasons(), Reasons()
            for found, of_first, of_second in (
                (result, first.reasons(), second.reasons()),
                (busy, first.busy(), second.busy()),
            ):
                found.add(of_first, 1.0 - periods)
                found.add(of_second, periods)
        # What goes on beside the next step takes its time in each, and so does what uses the same links.
        beside = max(first.loop.beside().values(), key=lambda of: sum(of.values()), default={})
        for longest in (busy, beside):
            if (least := sum(longest.values())) > end:
                result.add(longest, (least - end) / least)
                end = least
        return end, result, spans


def predict_step(
    config: Config,
    world_size: int,
    vocab_size: int,
    hardware: Hardware,
    *,
    attended_share: float | None = None,
    shared: SharedRows | None = None,
    arrangements: Sequence[Arrangement | None] | None = None,
    measured: LayerCosts | None = None,
    with_spans: bool = False,
) -> Prediction:
    """Seconds of a step of a checked config on so many ranks, and what they are spent on.

    attended_share, shared: as in simulator/flops.py and communication.py; arrangements: of optimizer state in tiers, of
    a rank of each stage; measured: costs of MoE layers on this hardware, where they are known. With spans the whole
    step is simulated, else its repeating part once.
    """
    clock = StepClock(
        config, world_size, vocab_size, hardware, attended_share=attended_share, shared=shared, measured=measured
    )
    return clock.predict(arrangements, with_spans)


def least_seconds(config: Config, world_size: int, vocab_size: int, hardware: Hardware) -> float:
    """No more than `predict_step`: the passes of the busiest stage."""
    clock = StepClock(config, world_size, vocab_size, hardware)
    of_stage = (
        sum(sum(chunk.forward.values()) + sum(chunk.backward.values()) for chunk in chunks) for chunks in clock.chunks()
    )
    return clock.micro_batches * max(of_stage)


def _key(config: Config, vocab_size: int, device: str, *rest: Any) -> Any:
    """All that a block's work depends on."""
    parallel, training = config.parallel, config.training
    layout = (
        parallel.tensor,
        parallel.sequence,
        parallel.context,
        derived.context_heads(config),
        parallel.expert,
        derived.expert_tensor_size(config),
        parallel.pipeline > 1,
    )
    trained = training.micro_batch_size, training.recompute, training.token_tile, training.precision
    return repr(config.model), repr(config.moe), config.data.documents, vocab_size, device, layout, trained, rest
