"""Keeps who chose which experts while a model generates: --record-routing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from configs import derived
from configs.schema import ConfigError
from inference.open_model import OpenModel
from inference.weights.routing_file import FLAG, RoutingHeader, RoutingWriter


class _Recorder:
    def __init__(self, writer: RoutingWriter) -> None:
        self._writer, self._pass = writer, -1

    def begin_pass(self) -> None:
        self._pass += 1

    def add(self, layer: int, tokens: list[tuple[int, int]], experts: list[list[int]]) -> None:
        self._writer.write(self._pass, layer, tokens, experts)


@contextlib.contextmanager
def recorded(model: OpenModel, path: Path | None) -> Iterator[None]:
    """Have the first rank write what all tokens choose to a new file; nothing without one. Raises ConfigError for a
    dense model, and with pipeline stages, of which none has all layers."""
    if path is None:
        yield
        return
    layers = tuple(layer for layer, is_moe in enumerate(derived.moe_layer_pattern(model.config)) if is_moe)
    if not layers:
        raise ConfigError(f"{FLAG} ({path}) needs a model with experts, and {model.source} has none.")
    layout = model.config.parallel
    if layout.pipeline > 1:
        ranks, experts = layout.expert * layout.pipeline, model.config.moe.num_experts or 0
        advice = "fewer ranks" if experts % ranks else f"parallel.pipeline=1 parallel.expert={ranks}"
        raise ConfigError(f"parallel.pipeline ({layout.pipeline}) must be 1 with {FLAG}. Try {advice}.")
    if model.topology.rank > 0:
        yield
        return
    header = RoutingHeader(str(model.source), model.config.moe.num_experts or 0, model.config.moe.top_k, layers)
    with RoutingWriter(path, header) as writer:
        model.weights.record = _Recorder(writer)
        try:
            yield
        finally:
            model.weights.record = None
