"""All candidates of a space, without bounds."""

from __future__ import annotations

from configs.schema import Config
from simulator.clock.hardware import Hardware
from simulator.search.explore import Candidate, simplicity
from simulator.search.sizer import LayoutSizer, memory_limits
from simulator.search.space import LayoutSpace, is_legal
from simulator.search.timer import LayoutTimer


def every_fitting(
    config: Config, world_size: int, vocab_size: int, hardware: Hardware, fixed: frozenset[str], timer: LayoutTimer
) -> tuple[int, list[Candidate]]:
    """How many candidates the rules allow, and those that fit, each timed."""
    limits = memory_limits(config, world_size, hardware)
    space = LayoutSpace(config, world_size, fixed, hardware.kind, int(hardware["ranks_per_node"]))
    sizer = LayoutSizer(space, vocab_size, limits.capacity)
    number, found = 0, []
    for group in space.groups():
        for cell in space.cells(group):
            for saving in space.savings(group.expert > 1):
                asked = space.layout(cell, saving)
                if not is_legal(asked, world_size):
                    continue
                number += 1
                memory = sizer.memory(cell, saving)
                if memory.device <= limits.device and memory.host <= limits.host and memory.disk <= limits.disk:
                    predicted = timer.predict(asked, world_size, vocab_size, hardware, sizer.arrangements(cell, saving))
                    found.append(Candidate(cell, saving, predicted, memory))
    return number, found


def best_of(found: list[Candidate]) -> Candidate:
    """The fastest, the simplest of those as fast."""
    return min(found, key=lambda each: (float(f"{each.prediction.seconds:.9g}"), *simplicity(each.cell, each.saving)))
