"""Event loop of a simulated step. Each resource (a device, a link) runs its tasks in order; a task starts when the
tasks that it depends on have ended."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Task:
    """A task of one resource. `after`: numbers of the tasks that must end before it starts; `reasons`: its seconds by
    reason."""

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
    """Simulates tasks on resources. Each resource runs its tasks in the order of `add`; a task may depend on a task of
    another resource that is added afterwards."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._queues: dict[str, deque[int]] = defaultdict(deque)

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
        self._queues[resource].append(number)
        return number

    def wait_also(self, task: int, other: int) -> None:
        """Make an added task depend on another task, too."""
        self.tasks[task].after = (*self.tasks[task].after, other)

    def run(self) -> float:
        """Start every task, and return the second at which the last task ends that the next step must wait for.

        Raises RuntimeError if tasks wait for each other in a cycle.
        """
        tasks, end = self.tasks, 0.0
        queues = {name: deque(queue) for name, queue in self._queues.items()}
        free = dict.fromkeys(queues, 0.0)
        waiting: dict[int, list[str]] = defaultdict(
            list
        )  # resources whose first task waits, by the task that it waits for
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
        left = [tasks[queue[0]].name for queue in queues.values() if queue]
        if left:
            raise RuntimeError(f"tasks wait for each other: {', '.join(left)}")
        return end

    def overlapping(self) -> dict[str, dict[str, float]]:
        """Return the seconds by reason of each resource that has tasks overlapping the next step. A step cannot be
        shorter than the sum of any of them."""
        found: dict[str, dict[str, float]] = {}
        for name in {task.resource for task in self.tasks if task.overlaps_next}:
            total = found.setdefault(name, {})
            for task in self.tasks:
                if task.resource == name:
                    for reason, seconds in task.reasons.items():
                        total[reason] = total.get(reason, 0.0) + seconds
        return found
