"""Event loop of a simulated step. Each resource (a device, a link) runs its tasks in order; a task starts when the
tasks that it depends on have ended."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from simulator.clock.passes import Reasons


@dataclass
class Task:
    """A simulated task, which uses one resource for some seconds.

    `after`: numbers of the tasks that it waits for. `reasons`: its seconds by reason.
    """

    resource: str
    name: str
    seconds: float
    after: Sequence[int]
    reasons: Mapping[str, float]
    overlaps_next: bool = False  # may run during the next step, which does not wait for it
    start: float = field(default=-1.0)

    @property
    def end(self) -> float:
        return self.start + self.seconds


class Loop:
    """Simulates resources, each of which runs its tasks one by one in the order in which they were added.

    A task may wait for a task that is added later.
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.queues: dict[str, list[int]] = defaultdict(list)  # numbers of each resource's tasks, in order

    def add(
        self,
        resource: str,
        name: str,
        reasons: Mapping[str, float],
        after: Sequence[int] = (),
        *,
        overlaps_next: bool = False,
    ) -> int:
        """Add a task to the end of a resource's queue and return its number."""
        number = len(self.tasks)
        self.tasks.append(Task(resource, name, sum(reasons.values()), after, reasons, overlaps_next))
        self.queues[resource].append(number)
        return number

    def wait_also(self, task: int, other: int) -> None:
        """Make an added task also depend on another task."""
        self.tasks[task].after = (*self.tasks[task].after, other)

    def run(self) -> float:
        """Simulate all tasks; return when the last one ends, in seconds, except tasks that may overlap the next step.

        Raises RuntimeError if tasks wait for each other in a cycle.
        """
        tasks, end = self.tasks, 0.0
        queues = {name: deque(queue) for name, queue in self.queues.items()}
        free = dict.fromkeys(queues, 0.0)
        # Resources whose first task waits, by the task that it waits for.
        waiting: dict[int, list[str]] = defaultdict(list)
        ready = list(queues)
        while ready:
            name = ready.pop()
            queue = queues[name]
            while queue:
                task = tasks[queue[0]]
                begin = free[name]
                for other in task.after:
                    before = tasks[other]
                    if before.start < 0:
                        waiting[other].append(name)
                        break
                    begin = max(begin, before.start + before.seconds)
                else:
                    number = queue.popleft()
                    task.start = begin
                    free[name] = begin + task.seconds
                    if not task.overlaps_next:
                        end = max(end, free[name])
                    ready += waiting.pop(number, ())
                    continue
                break
        if left := [tasks[queue[0]].name for queue in queues.values() if queue]:
            raise RuntimeError(
                f"these tasks of the predicted step wait for each other, so none can start: {', '.join(left)}"
            )
        return end

    def overlapping(self) -> dict[str, Reasons]:
        """Return the seconds by reason of each resource that has tasks which may run during the next step.

        No step can be shorter than one of the sums.
        """
        found = {task.resource: Reasons() for task in self.tasks if task.overlaps_next}
        for task in self.tasks:
            if task.resource in found:
                found[task.resource].add(task.reasons)
        return found
