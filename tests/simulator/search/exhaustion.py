"""All candidates of a space, without bounds."""

from __future__ import annotations

from dataclasses import replace

from configs.job import Job
from simulator.clock.hardware import Hardware
from simulator.search.explore import Candidate, simplicity
from simulator.search.sizer import LayoutSizer, memory_limits
from simulator.search.space import LayoutSpace, is_legal
from simulator.search.timer import LayoutTimer


def every_fitting(
    job: Job, hardware: Hardware, fixed: frozenset[str], timer: LayoutTimer
) -> tuple[int, list[Candidate]]:
    """How many candidates the rules allow, and those that fit, each timed."""
    limits = memory_limits(job.config, job.world_size, hardware)
    space = LayoutSpace(job, fixed, int(hardware["ranks_per_node"]))
    sizer = LayoutSizer(space, limits.capacity)
    number, found = 0, []
    for group in space.groups():
        for cell in space.cells(group):
            for saving in space.savings(group.expert > 1):
                asked = replace(job, config=space.layout(cell, saving))
                if not is_legal(asked.config, job.world_size):
                    continue
                number += 1
                memory = sizer.memory(cell, saving)
                if memory.device <= limits.device and memory.host <= limits.host and memory.disk <= limits.disk:
                    predicted = timer.predict(asked, hardware, sizer.arrangements(cell, saving))
                    found.append(Candidate(cell, saving, predicted, memory))
    return number, found


def best_of(found: list[Candidate]) -> Candidate:
    """The fastest, the simplest of those as fast."""
    return min(found, key=lambda each: (float(f"{each.prediction.seconds:.9g}"), *simplicity(each.cell, each.saving)))
