"""A training step as tasks of an event loop: passes, transfers between pipeline stages, reductions, gathers and
updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from configs import derived
from configs.schema import Config
from optim.arrangement.buckets import NUM_STAGES
from parallel.pipeline import passes
from simulator.clock.loop import Loop
from simulator.clock.passes import BlockSeconds, Reasons
from simulator.clock.stages import MOST_TASKS, StageRest
from simulator.clock.streams import ExpertStreams, StreamSeconds

# Resources of a stage; traces have these names.
COMPUTE, NEXT, PREVIOUS, GRADIENTS = "compute", "to the next stage", "to the stage before", "between copies"


@dataclass(frozen=True)
class StepWork:
    """Seconds of all work of a step by pipeline stage, from which the step's tasks are simulated."""

    chunks: Sequence[Sequence[BlockSeconds]]  # passes of each model chunk
    rest: Sequence[StageRest]
    send: float  # seconds to send hidden states to another stage
    send_link: str
    send_blocks: bool  # the sender waits until the transfer has ended
    overlaps_reductions: bool  # of gradients, with the last backward pass
    overlaps_gathers: bool  # of weights, with the first forward pass
    streams: Sequence[StreamSeconds | None] = ()  # of offloaded experts; (): no stage has any
    world_size: int = 1


def _scaled(reasons: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in reasons.items()}


class Schedule:
    """Simulated tasks of one step with `micro_batches` micro-batches. The constructor runs the simulation."""

    def __init__(self, config: Config, step: StepWork, micro_batches: int) -> None:
        self.config, self.step, self.micro_batches = config, step, micro_batches
        self.stages, self.num_chunks = config.parallel.pipeline, config.parallel.virtual_pipeline or 1
        self.loop = Loop()
        # First and last task of each pass, by (is forward, stage, chunk, micro-batch).
        self._passes: dict[tuple[bool, int, int, int], tuple[int, int]] = {}
        self._streams: dict[int, ExpertStreams] = {}
        for stage in range(self.stages):
            self._stage(stage)
        self._sends()
        self.end = self.loop.run()

    def busy(self) -> Reasons:
        """Return the seconds by reason of the resource that offloaded experts use most; a step cannot be shorter.

        The simulated tasks alone do not ensure this: no pass waits for some of the tasks that share a link.
        """
        if not self._streams:
            return Reasons()
        share = self.micro_batches / derived.num_micro_batches(self.config, self.step.world_size)
        found = [Reasons(streams.busy(self.step.rest[stage].jobs, share)) for stage, streams in self._streams.items()]
        return max(found, key=lambda of: sum(of.values()))

    def _name(self, stage: int, what: str) -> str:
        return f"stage {stage}: {what}"

    def _stage(self, stage: int) -> None:
        """Add the tasks of a pipeline stage, except transfers to other stages."""
        rest, counts = self.step.rest[stage], Counter[tuple[bool, int]]()
        gathers, jobs = self._before(stage, rest)
        tail, last_tasks = list[int](), list[int]()
        streams = self.step.streams[stage] if self.step.streams else None
        # in a layer-wise schedule all micro-batches are one pass
        layer_wise = streams is not None and streams.layer_wise
        rounds, each = (1, self.micro_batches) if layer_wise else (self.micro_batches, 1)
        order = list(passes(self.config, rounds, stage))
        if streams is not None:
            name = self._name(stage, "experts")
            self._streams[stage] = ExpertStreams(self.loop, streams, name, streams.visits(order))
        for is_forward, chunk in order:
            number = counts[is_forward, chunk]
            counts[is_forward, chunk] += 1
            seconds = self.step.chunks[stage][chunk]
            if each > 1:
                seconds = BlockSeconds(_scaled(seconds.forward, each), _scaled(seconds.backward, each))
            if is_forward:
                of_gathers = gathers[chunk] if number == 0 else []
                of_jobs = jobs if number == 0 and chunk == 0 else []
                count = max(len(of_gathers), len(of_jobs))
                both = zip(_spread(of_gathers, count), _spread(of_jobs, count), strict=True)
                waits = [[*one, *other] for one, other in both]
                self._pass(stage, (True, stage, chunk, number), seconds.forward, waits)
            else:
                reductions = rest.reductions[chunk] if number == rounds - 1 else ()
                # Megatron-core reduces during the backward pass only on the first stage: others wait for it anyway.
                overlaps = self.step.overlaps_reductions and bool(reductions) and stage == 0
                is_last = number == rounds - 1 and chunk == 0
                count = MOST_TASKS if rest.early and is_last else len(reductions) if overlaps else 1
                waits = [[] for _ in range(count)]
                ends = self._pass(stage, (False, stage, chunk, number), seconds.backward, waits, number == rounds - 1)
                last_tasks = ends if is_last else last_tasks
                share = len(ends) / max(len(reductions), 1)
                for i, reduced in enumerate(reductions):
                    end = ends[max(int((i + 1) * share), 1) - 1] if overlaps else ends[-1]
                    tail.append(self.loop.add(self._name(stage, GRADIENTS), "reduce gradients", reduced, [end]))
        if rest.early:  # the gradients of the buckets that are used last are computed first
            self._jobs(stage, rest, last_tasks)
        if rest.tied:
            tail = [self.loop.add(self._name(stage, GRADIENTS), "sum tied gradients", rest.tied, tail)]
        if rest.update:
            self.loop.add(self._name(stage, COMPUTE), "update", rest.update, tail)

    def _before(self, stage: int, rest: StageRest) -> tuple[list[list[list[int]]], list[list[int]]]:
        """Return the tasks that a stage's first forward passes wait for: weight gathers by chunk, bucket updates."""
        jobs = [] if rest.early else self._jobs(stage, rest)
        found, every = list[list[list[int]]](), list[int]()
        for gathers in rest.gathers:
            own = [self.loop.add(self._name(stage, GRADIENTS), "gather weights", each) for each in gathers]
            every += own
            found.append([[number] for number in own])
        if not self.step.overlaps_gathers and every:
            found = [[[every[-1]]] for _ in found]
        return found, [[number] for number in jobs]

    def _jobs(self, stage: int, rest: StageRest, backward: Sequence[int] = ()) -> list[int]:
        """Add the updates of offloaded optimizer-state buckets; return the task that completes each bucket's weights.

        An update waits for a free staging buffer and, if `backward` has tasks (of a backward pass), for the one that
        computes its gradients.
        """
        ends, weights_ends = list[int](), list[int]()
        jobs = rest.jobs[::-1] if backward else rest.jobs
        for index, job in enumerate(jobs):
            waits = [ends[index - NUM_STAGES]] if index >= NUM_STAGES else []
            waits += [backward[index * len(backward) // len(jobs)]] if backward else []
            weights = -1
            for resource, reason, seconds in job.steps:
                overlaps_next = bool(backward) or weights >= 0 and resource == "disk"
                name = self._name(stage, resource)
                waits = [self.loop.add(name, "update a bucket", {reason: seconds}, waits, overlaps_next=overlaps_next)]
                if not (weights >= 0 and resource == "disk"):
                    weights = waits[0]
            ends.append(waits[0])
            weights_ends.append(weights)
        return weights_ends

    def _pass(
        self,
        stage: int,
        key: tuple[bool, int, int, int],
        seconds: Mapping[str, float],
        waits: Sequence[Sequence[int]],
        is_last: bool = False,
    ) -> list[int]:
        """Add a pass as consecutive tasks, and return them.

        There is one task per element of `waits` (the tasks that it waits for), or one per MoE layer with offloaded
        experts. `key`: (is forward, stage, model chunk, micro-batch). `is_last`: whether this is the model chunk's last
        pass in this direction in the step.
        """
        name = f"{'forward' if key[0] else 'backward'} {key[3]}"
        name += f" of chunk {key[2]}" if self.num_chunks > 1 else ""
        streams, visited = self._streams.get(stage), 0
        if streams is not None and (visited := len(streams.seconds.layers[key[2]])):
            waits = _spread(waits, visited)
        count = max(len(waits), 1)
        share = seconds if count == 1 else _scaled(seconds, 1 / count)
        tasks = list[int]()
        for i in range(count):
            own = list(waits[i]) if waits else []
            own += streams.begin(not key[0]) if streams is not None and visited else []
            tasks.append(self.loop.add(self._name(stage, COMPUTE), name, share, own))
            if streams is not None and visited:
                streams.end(tasks[-1], not key[0], is_last)
        self._passes[key] = tasks[0], tasks[-1]
        return tasks

    def _sends(self) -> None:
        """Add the transfers of hidden states and their gradients between consecutive model chunks."""
        if self.stages == 1:
            return
        seconds = {f"pipeline:{self.step.send_link}": self.step.send}
        last = self.stages * self.num_chunks - 1
        following = dict(pair for queue in self._computing() for pair in pairwise(queue))
        for (is_forward, stage, chunk, number), (_, end) in sorted(self._passes.items(), key=lambda item: item[1]):
            next_chunk = chunk * self.stages + stage + (1 if is_forward else -1)
            if not 0 <= next_chunk <= last:
                continue
            other = (is_forward, next_chunk % self.stages, next_chunk // self.stages, number)
            resource = self._name(stage, NEXT if is_forward else PREVIOUS)
            sent = self.loop.add(resource, "state" if is_forward else "gradient", seconds, [end])
            self.loop.wait_also(self._passes[other][0], sent)
            if self.step.send_blocks and end in following:
                self.loop.wait_also(following[end], sent)

    def _computing(self) -> list[list[int]]:
        """Return the numbers of the tasks that each pipeline stage's device computes, in order."""
        return [queue for name, queue in self.loop.queues.items() if name.endswith(COMPUTE)]

    def reasons(self) -> Reasons:
        """Return the seconds for which the busiest stage computes or waits, by reason; their sum is the step's end."""
        tasks = self.loop.tasks
        # The previous task on a task's resource.
        before = {number: earlier for queue in self.loop.queues.values() for earlier, number in pairwise(queue)}
        result, now = Reasons(), 0.0
        for number in max(self._computing(), key=lambda queue: sum(tasks[number].seconds for number in queue)):
            self._add_waiting(number, tasks[number].start, now, before, result)
            result.add(tasks[number].reasons)
            now = tasks[number].end
        waited = [number for number, task in enumerate(tasks) if not task.overlaps_next]
        last = max(waited, key=lambda number: tasks[number].end)
        if tasks[last].end > now:
            self._add_waiting(last, tasks[last].end, now, before, result, itself=True)
        return result

    def _add_waiting(
        self, number: int, until: float, since: float, before: Mapping[int, int], result: Reasons, itself: bool = False
    ) -> None:
        """Add the reasons why a stage waits between seconds `since` and `until` to `result`.

        They are found by following the tasks that task `number` waited for. `until` is the start of that task, or its
        end if `itself` is set. `before`: by task, the previous task of its resource.
        """
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


def _spread(of: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Distribute lists of tasks to wait for over the `count` tasks of a pass, in order."""
    result: list[list[int]] = [[] for _ in range(count)]
    for index, each in enumerate(of):
        result[index * count // len(of)] += each
    return result
