"""The fastest layout that fits: `search_layout`."""

from __future__ import annotations

from configs.schema import Config
from simulator.clock.hardware import Hardware
from simulator.search.answer import LayoutAnswer, MemoryLimits
from simulator.search.clock_timer import clock_timer
from simulator.search.explore import LayoutExplorer
from simulator.search.floor import LayoutFloor
from simulator.search.impossible import Asked, refusal
from simulator.search.limits import capacity, memory_limits
from simulator.search.memory import LayoutSizer
from simulator.search.runners import ranked, searched_layout
from simulator.search.space import LayoutSpace
from simulator.search.timer import LayoutTimer

NEAR = 1e-3  # share of a step's seconds by which no layout that was left is faster


def search_layout(
    config: Config,
    world_size: int,
    vocab_size: int,
    hardware: Hardware,
    fixed: frozenset[str],
    timer: LayoutTimer | None = None,
    near: float = NEAR,
) -> LayoutAnswer:
    """The fastest layout of a config on so many ranks of this hardware, and those that come next.

    Args:
        config: a config whose values of `fixed` stay; its other keys of the layout are where the search starts, and
            need not fit so many ranks.
        fixed: dotted names of the keys that the user gave.
        timer: the clock; by default simulator/clock.
        near: a share of the best's seconds; what could be faster by no more is left. 0: the best is exact.

    Raises:
        ConfigError: where nothing fits: how much is missing on which tier, and the nearest change with which a layout
            fits.
    """
    if timer is None:
        timer = clock_timer()
    limits = memory_limits(config, world_size, hardware)
    explorer = layout_explorer(config, world_size, vocab_size, hardware, fixed, timer, limits, near)
    explorer.run()
    if explorer.best is None:
        raise refusal(Asked(config, world_size, vocab_size, hardware, fixed))
    counts = explorer.counts()
    found, too_large = ranked(explorer, explorer.best)
    (best, _), *_ = found
    layouts = [searched_layout(explorer, each, config, best, choices) for each, choices in found]
    return LayoutAnswer(
        layouts[0], layouts[1:], counts, limits, hardware.name, world_size, hardware.errors, tuple(too_large)
    )


def layout_explorer(
    config: Config,
    world_size: int,
    vocab_size: int,
    hardware: Hardware,
    fixed: frozenset[str],
    timer: LayoutTimer,
    limits: MemoryLimits,
    near: float = 0.0,
) -> LayoutExplorer:
    """All candidates, of which none was looked at."""
    space = LayoutSpace(config, world_size, fixed, hardware.kind, int(hardware["ranks_per_node"]))
    rows = timer.rows
    return LayoutExplorer(
        space,
        LayoutSizer(space, vocab_size, capacity(limits)),
        limits,
        lambda asked, lie: timer.predict(asked, world_size, vocab_size, hardware, lie),
        lambda asked: timer.least(asked, world_size, vocab_size, hardware),
        LayoutFloor(
            space, hardware, None if rows is None else lambda asked: rows(asked, world_size, vocab_size, hardware)
        ),
        near,
    )
