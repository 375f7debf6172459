"""A step as tasks of one event loop: the pipeline's passes, states between stages, reductions, gathers and updates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from optim.arrangement.arrange import NUM_SLOTS
from parallel.pipeline import passes
from simulator.clock.loop import Loop
from simulator.clock.passes import BlockSeconds, Reasons
from simulator.clock.stages import MOST_PIECES, StageRest
from simulator.clock.streams import StreamLanes, StreamParts

# Reasons of waiting, by the resource that is waited for.
COMPUTE, NEXT, PREVIOUS, GRADIENTS = "compute", "to the next stage", "to the stage before", "between copies"


@dataclass(frozen=True)
class StepParts:
    """What a step is made of, by stage: both passes of its model chunks, and the rest. `send`: seconds in which a
    state goes to another stage, `blocks`: whether the sender waits for that."""

    chunks: Sequence[Sequence[BlockSeconds]]
    rest: Sequence[StageRest]
    send: float
    send_place: str
    blocks: bool
    beside: bool  # gradients are reduced beside the last backward pass
    gathers_beside: bool
    streams: Sequence[StreamParts | None] = ()  # experts off the device; (): of no stage
    world_size: int = 1


def _scaled(reasons: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in reasons.items()}


class Schedule:
    """The tasks of one step with so many micro-batches."""

    def __init__(self, config: Config, parts: StepParts, micro_batches: int) -> None:
        self.config, self.parts, self.micro_batches = config, parts, micro_batches
        self.stages, self.num_chunks = config.parallel.pipeline, config.parallel.virtual_pipeline or 1
        self.loop = Loop()
        # Of a pass, by (is forward, stage, chunk, micro-batch): its first task and its last.
        self._passes: dict[tuple[bool, int, int, int], tuple[int, int]] = {}
        self._lanes: dict[int, StreamLanes] = {}
        for stage in range(self.stages):
            self._stage(stage)
        self._sends()
        self.end = self.loop.run()

    def busy(self) -> Reasons:
        """Seconds by reason in which what a step of streamed experts uses most is in use: what waits for no pass uses
        the same links as what is waited for, and no step is shorter."""
        if not self._lanes:
            return Reasons()
        share = self.micro_batches / derived.num_micro_batches(self.config, self.parts.world_size)
        found = [lanes.busy(self.parts.rest[stage].jobs, share) for stage, lanes in self._lanes.items()]
        result = Reasons()
        result.add(max(found, key=lambda of: sum(of.values()), default={}))
        return result

    def _name(self, stage: int, what: str) -> str:
        return f"stage {stage}: {what}"

    def _stage(self, stage: int) -> None:
        rest, counts = self.parts.rest[stage], Counter[tuple[bool, int]]()
        gathers, jobs = self._before(stage, rest)
        tail, last_pieces = list[int](), list[int]()
        streams = self.parts.streams[stage] if self.parts.streams else None
        # by layer all micro-batches are one pass
        by_layer = streams is not None and streams.by_layer
        rounds, each = (1, self.micro_batches) if by_layer else (self.micro_batches, 1)
        order = list(passes(self.config, rounds, stage))
        if streams is not None:
            name = self._name(stage, "experts")
            self._lanes[stage] = StreamLanes(self.loop, streams, name, streams.visits(order))
        for is_forward, chunk in order:
            number = counts[is_forward, chunk]
            counts[is_forward, chunk] += 1
            seconds = self.parts.chunks[stage][chunk]
            if each > 1:
                seconds = BlockSeconds(_scaled(seconds.forward, each), _scaled(seconds.backward, each))
            if is_forward:
                waits = gathers[chunk] if number == 0 else []
                waits = [[*each, *more] for each, more in _both(waits, jobs if number == 0 and chunk == 0 else [])]
                self._pass(stage, (True, stage, chunk, number), seconds.forward, waits)
            else:
                reductions = rest.reductions[chunk] if number == rounds - 1 else ()
                # Megatron-core reduces beside the backward pass on the first stage alone: others wait for it anyway.
                beside = self.parts.beside and bool(reductions) and stage == 0
                is_last = number == rounds - 1 and chunk == 0
                pieces = MOST_PIECES if rest.early and is_last else len(reductions) if beside else 1
                waits = [[] for _ in range(pieces)]
                ends = self._pass(stage, (False, stage, chunk, number), seconds.backward, waits, number == rounds - 1)
                last_pieces = ends if is_last else last_pieces
                share = len(ends) / max(len(reductions), 1)
                after = [ends[max(int((i + 1) * share), 1) - 1] if beside else ends[-1] for i in range(len(reductions))]
                for reduced, end in zip(reductions, after, strict=True):
                    tail.append(self.loop.add(self._name(stage, GRADIENTS), "reduce gradients", reduced, [end]))
        if rest.early:  # those used last have their gradients first
            self._jobs(stage, rest, last_pieces)
        self._after(stage, rest, tail)

    def _before(self, stage: int, rest: StageRest) -> tuple[list[list[list[int]]], list[list[int]]]:
        """Gathers of weights by model chunk, and jobs of buckets, that pieces of the first passes wait for."""
        jobs = [] if rest.early else self._jobs(stage, rest)
        found: list[list[list[int]]] = []
        every: list[int] = []
        for gathers in rest.gathers:
            own = [self.loop.add(self._name(stage, GRADIENTS), "gather weights", each) for each in gathers]
            every += own
            found.append([[number] for number in own])
        if not self.parts.gathers_beside and every:
            found = [[[every[-1]]] for _ in found]
        return found, [[number] for number in jobs]

    def _jobs(self, stage: int, rest: StageRest, pieces: Sequence[int] = ()) -> list[int]:
        """Buckets' jobs, each of which waits for the one that had its slot, and with `pieces` of the backward pass for
        the one that makes its gradients; the tasks behind which the weights are there."""
        ends: list[int] = []
        there: list[int] = []
        jobs = rest.jobs[::-1] if pieces else rest.jobs
        for index, job in enumerate(jobs):
            waits = [ends[index - NUM_SLOTS]] if index >= NUM_SLOTS else []
            waits += [pieces[index * len(pieces) // len(jobs)]] if pieces else []
            weights = -1
            for resource, reason, seconds in job.parts:
                goes_on = bool(pieces) or weights >= 0 and resource == "disk"
                name = self._name(stage, resource)
                waits = [self.loop.add(name, "update a bucket", {reason: seconds}, waits, goes_on=goes_on)]
                if not (weights >= 0 and resource == "disk"):
                    weights = waits[0]
            ends.append(waits[0])
            there.append(weights)
        return there

    def _pass(
        self,
        stage: int,
        key: tuple[bool, int, int, int],
        seconds: Mapping[str, float],
        waits: Sequence[Sequence[int]],
        is_last: bool = False,
    ) -> list[int]:
        """A pass in as many pieces as there are things to wait for, or MoE layers whose experts lie off the device;
        their tasks. `is_last`: no other micro-batch comes this way."""
        name = f"{'forward' if key[0] else 'backward'} {key[3]}" + (
            f" of chunk {key[2]}" if self.num_chunks > 1 else ""
        )
        lanes, visited = self._lanes.get(stage), 0
        if lanes is not None and (visited := len(lanes.parts.layers[key[2]])):
            waits = _spread(waits, visited)
        count = max(len(waits), 1)
        part = seconds if count == 1 else _scaled(seconds, 1 / count)
        tasks = list[int]()
        for i in range(count):
            own = list(waits[i]) if waits else []
            own += lanes.begin(not key[0]) if lanes is not None and visited else []
            tasks.append(self.loop.add(self._name(stage, COMPUTE), name, part, own))
            if lanes is not None and visited:
                lanes.end(tasks[-1], not key[0], is_last)
        self._passes[key] = tasks[0], tasks[-1]
        return tasks

    def _after(self, stage: int, rest: StageRest, tail: list[int]) -> None:
        if rest.tied:
            tail = [self.loop.add(self._name(stage, GRADIENTS), "sum tied gradients", rest.tied, tail)]
        if rest.update:
            self.loop.add(self._name(stage, COMPUTE), "update", rest.update, tail)

    def _sends(self) -> None:
        """States and their gradients go from one part of the model to the next."""
        if self.stages == 1:
            return
        seconds = {f"pipeline:{self.parts.send_place}": self.parts.send}
        last = self.stages * self.num_chunks - 1
        following: dict[int, int] = {}  # the task behind one on its stage
        order: dict[str, int] = {}
        for number, task in enumerate(self.loop.tasks):
            if task.resource.endswith(COMPUTE):
                if task.resource in order:
                    following[order[task.resource]] = number
                order[task.resource] = number
        for (is_forward, stage, chunk, number), (_, end) in sorted(self._passes.items(), key=lambda item: item[1]):
            place = chunk * self.stages + stage + (1 if is_forward else -1)
            if not 0 <= place <= last:
                continue
            other = (is_forward, place % self.stages, place // self.stages, number)
            resource = self._name(stage, NEXT if is_forward else PREVIOUS)
            sent = self.loop.add(resource, "state" if is_forward else "gradient", seconds, [end])
            self.loop.wait_also(self._passes[other][0], sent)
            if self.parts.blocks and end in following:
                self.loop.wait_also(following[end], sent)

    def reasons(self) -> Reasons:
        """What the busiest stage does in the step's time, and what it waits for: adds up to `end`."""
        tasks = self.loop.tasks
        before: dict[int, int] = {}  # the task before each on its resource
        of_resource: dict[str, list[int]] = defaultdict(list)
        for number, task in enumerate(tasks):
            own = of_resource[task.resource]
            if own:
                before[number] = own[-1]
            own.append(number)
        computing = [numbers for name, numbers in of_resource.items() if name.endswith(COMPUTE)]
        result, now = Reasons(), 0.0
        for number in max(computing, key=lambda numbers: sum(tasks[number].seconds for number in numbers)):
            self._blame(number, tasks[number].start, now, before, result)
            result.add(tasks[number].reasons)
            now = tasks[number].end
        waited = [number for number, task in enumerate(tasks) if not task.goes_on]
        last = max(waited, key=lambda number: tasks[number].end)
        if tasks[last].end > now:
            self._blame(last, tasks[last].end, now, before, result, itself=True)
        return result

    def _blame(
        self,
        number: int,
        until: float,
        since: float,
        before: Mapping[int, int],
        result: Reasons,
        *,
        itself: bool = False,
    ) -> None:
        """Say what went on between `since` and `until`, when a task began, or with `itself` when it was over: go back
        along what was waited for."""
        tasks = self.loop.tasks
        while until > since:
            if not itself:
                found = [*tasks[number].after, *([before[number]] if number in before else [])]
                found = [each for each in found if tasks[each].end > since]
                if not found:
                    break
                number = max(found, key=lambda each: tasks[each].end)
            itself, task = False, tasks[number]
            start = max(task.start, since)
            lasted = min(until, task.end) - start
            if task.resource.endswith(COMPUTE):
                result["bubble"] += lasted
            elif task.seconds > 0:
                result.add(task.reasons, lasted / task.seconds)
            until = start
        if until > since:
            result["bubble"] += until - since


def _both(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """What pieces wait for, of two lists that may have other lengths: spread over the longer."""
    count = max(len(first), len(second))
    return list(zip(_spread(first, count), _spread(second, count), strict=True))


def _spread(of: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What so many pieces wait for."""
    result: list[list[int]] = [[] for _ in range(count)]
    for index, each in enumerate(of):
        result[index * count // len(of)] += each
    return result
