"""One event loop: tasks in the order of what carries them out, each when those before it there and those that it waits
for are over."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Task:
    """Work of a resource. `after`: numbers of tasks that must be over; `reasons`: its seconds, taken apart."""

    resource: str
    name: str
    seconds: float
    after: Sequence[int]
    reasons: Mapping[str, float]
    goes_on: bool = False  # beside the next step, which does not wait for it
    start: float = field(default=-1.0)

    @property
    def end(self) -> float:
        return self.start + self.seconds


class Loop:
    """Tasks are added in the order in which their resource carries them out; they may wait for later ones of other
    resources."""

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
        goes_on: bool = False,
    ) -> int:
        """Put a task at the end of a resource's queue; its number."""
        number = len(self.tasks)
        self.tasks.append(Task(resource, name, sum(reasons.values()), after, reasons, goes_on))
        self._queues[resource].append(number)
        return number

    def wait_also(self, task: int, other: int) -> None:
        """Let a task that was added wait for another."""
        self.tasks[task].after = (*self.tasks[task].after, other)

    def run(self) -> float:
        """Start every task; when the last is over that the next step waits for. Raises RuntimeError where tasks wait
        for each other."""
        tasks, end = self.tasks, 0.0
        queues = {name: deque(queue) for name, queue in self._queues.items()}
        free = dict.fromkeys(queues, 0.0)
        waiting: dict[int, list[str]] = defaultdict(list)  # heads of queues by what they wait for
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
                    if not task.goes_on:
                        end = max(end, free[name])
                    ready += waiting.pop(number, ())
                    continue
                break
        left = [tasks[queue[0]].name for queue in queues.values() if queue]
        if left:
            raise RuntimeError(f"tasks wait for each other: {', '.join(left)}")
        return end

    def beside(self) -> dict[str, dict[str, float]]:
        """By reason, what each resource has to do in a step of which a part goes on beside the next one: no step is
        shorter than that."""
        found: dict[str, dict[str, float]] = {}
        for name in {task.resource for task in self.tasks if task.goes_on}:
            total = found.setdefault(name, {})
            for task in self.tasks:
                if task.resource == name:
                    for reason, seconds in task.reasons.items():
                        total[reason] = total.get(reason, 0.0) + seconds
        return found
