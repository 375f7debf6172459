"""The fastest layout that fits: `search_layout`."""

from __future__ import annotations

from configs.schema import Config
from simulator.clock.hardware import Hardware
from simulator.search.answer import LayoutAnswer
from simulator.search.timer import LayoutTimer


def search_layout(
    config: Config,
    world_size: int,
    vocab_size: int,
    hardware: Hardware,
    fixed: frozenset[str],
    timer: LayoutTimer | None = None,
) -> LayoutAnswer:
    """The fastest layout of a config on so many ranks of this hardware, and those that come next.

    Args:
        config: a config whose values of `fixed` stay; its other keys of the layout are where the search starts, and
            need not fit so many ranks.
        fixed: dotted names of the keys that the user gave.
        timer: the clock; by default simulator/clock.

    Raises:
        ConfigError: where nothing fits: how much is missing on which tier, and the nearest change with which a layout
            fits.
    """
    raise NotImplementedError
