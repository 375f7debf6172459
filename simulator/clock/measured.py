"""Costs of MoE layers that were measured on this machine: the cache that moe/planning/measure.py writes."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs import derived
from configs.schema import Config
from moe.planning.costs import LayerCosts
from moe.planning.inputs import layer_shape
from parallel.costs.files import read_cache

TORCH_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}  # as the cache names them


def measured_costs(config: Config, device: str) -> tuple[LayerCosts, str] | None:
    """The newest measured costs of this config's MoE layers, and on what they were measured; None if there are none."""
    if not derived.is_moe(config):
        return None
    shared = (config.moe.shared_expert_ffn_hidden_size or 0) // config.parallel.tensor
    wanted = {
        "shape": asdict(layer_shape(config, device)),
        "dtype": TORCH_DTYPES[config.training.precision],
        "activation": config.model.activation,
        "bias": config.model.linear_bias,
        "shared_width": shared,
        "group_size": config.parallel.expert,
    }
    files = sorted(
        Path(config.data.cache_dir, "costs").glob("costs_*.json"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    for path in files:
        try:
            key: dict[str, Any] = json.loads(path.read_text())["key"]
        except (OSError, ValueError, KeyError, TypeError):
            logging.getLogger(__name__).warning("cannot read measured costs from %s", path)
            continue
        if not isinstance(key, dict) or any(key.get(name) != value for name, value in wanted.items()):
            continue
        values = read_cache(path, key)
        if values is not None:
            hardware = key.get("gpu") or key.get("processor") or key.get("device")
            return LayerCosts.from_dict(values), f"{hardware}, {key.get('threads')} thread(s)"
    return None


def measured_rates(config: Config, device: str) -> tuple[float, float] | None:
    """Bytes a second of an exchange and operations a second of the experts' products, as measured; None if they were
    not."""
    found = measured_costs(config, device)
    return None if found is None else (1 / found[0].exchange.beta, _rate(config, found[0], device))


def _rate(config: Config, layer: LayerCosts, device: str) -> float:
    load, matrices = layer_shape(config, device).even(), 3 if config.model.activation == "swiglu" else 2
    return 2 * matrices * load.hidden_size * load.width * load.assignments / layer.forward(load.assignments)
