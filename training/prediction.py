"""How long a step should take, where the costs of the model's MoE layers were measured: the cache that moe/measure.py writes.

A prediction, not a bound: the MoE layers' times are moe/planner.py's; all other operations are taken to run at the rate at which the
experts' products were measured, pipeline stages to be equally busy, and gradients to be reduced at the measured link's rate, which
is hidden as far as nothing. The optimizer's update and the data are left out.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs import derived
from configs.schema import Config, ConfigError
from moe.plan import STRATEGIES
from moe.planner import LayerCosts, Limits, best_plan, predict
from parallel import costs
from training.activations import moe_plan, moe_shape
from training.flops import executed_flops_per_token, forward_operations

DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step and what they are made of; `measured_on` is the machine of the costs."""

    step_seconds: float
    moe_seconds: float
    other_seconds: float
    reduction_seconds: float
    bubble: float  # share of a stage's time in which it waits for others
    measured_on: str


def measured_costs(config: Config, device: str) -> tuple[LayerCosts, str] | None:
    """The newest measured costs of this config's MoE layers, and on what they were measured; None if there are none."""
    if not derived.is_moe(config):
        return None
    shared = (config.moe.shared_expert_ffn_hidden_size or 0) // config.parallel.tensor
    wanted = {
        "shape": asdict(moe_shape(config, device)),
        "dtype": DTYPES[config.training.precision],
        "activation": config.model.activation,
        "bias": config.model.linear_bias,
        "shared_width": shared,
        "group_size": config.parallel.expert,
    }
    files = sorted(Path(config.data.cache_dir, "costs").glob("costs_*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        try:
            key: dict[str, Any] = json.loads(path.read_text())["key"]
        except (OSError, ValueError, KeyError, TypeError):
            logging.getLogger(__name__).warning("cannot read measured costs from %s", path)
            continue
        if not isinstance(key, dict) or any(key.get(name) != value for name, value in wanted.items()):
            continue
        values = costs.read_cache(path, key)
        if values is not None:
            hardware = key.get("gpu") or key.get("processor") or key.get("device")
            return LayerCosts.from_dict(values), f"{hardware}, {key.get('threads')} thread(s)"
    return None


def predict_step(
    config: Config, padded_vocab_size: int, world_size: int, device: str, reduced: int, live_calls: int = 1
) -> Prediction | None:
    """What a step should take; None without measured costs. `reduced` are the bytes that a rank sends to reduce gradients.

    Raises ConfigError if no plan of the MoE layers fits their memory budget.
    """
    found = measured_costs(config, device)
    if found is None:
        return None
    layer, hardware = found
    moe, training = config.moe, config.training
    load = moe_shape(config, device).even()
    if derived.plans_moe(config):
        degree, backward = derived.pipeline_degrees(config)
        names = tuple(n for n, s in STRATEGIES.items() if device != "cpu" or not s.offloads)
        chosen = Limits(
            **({} if degree is None else {"degrees": (degree,)}),
            **({} if backward is None else {"backward_degrees": (backward,)}),
            strategies=names if moe.memory_strategy == "auto" else (moe.memory_strategy,),
            memory_budget=None if moe.memory_budget is None else int(moe.memory_budget * 2**20),
            live_calls=live_calls,
        )
        try:
            call = best_plan(layer, load, chosen).prediction
        except ValueError as error:
            raise ConfigError(str(error)) from None
    else:
        call = predict(layer, load, moe_plan(config))
    micro_batches, stages = derived.num_micro_batches(config, world_size), config.parallel.pipeline
    calls = micro_batches * sum(derived.moe_layer_pattern(config)) / stages
    passes = call.forward * (2 if training.recompute == "full" else 1) + call.backward
    matrices = 3 if config.model.activation == "swiglu" else 2
    rate = 2 * matrices * load.hidden_size * load.width * load.pairs / layer.forward(load.pairs)
    forward = forward_operations(config, padded_vocab_size)
    inside = forward["experts"] + forward["shared_expert"]
    times = 4 if training.recompute == "full" else 3
    others = max(0.0, executed_flops_per_token(config, padded_vocab_size, device) - times * inside)
    other = others * training.global_batch_size * config.model.sequence_length / world_size / rate
    chunks = config.parallel.virtual_pipeline or 1
    waiting = (stages - 1) / (micro_batches * chunks)
    reduction = reduced * layer.exchange.beta
    busy = calls * passes + other
    return Prediction(busy * (1 + waiting) + reduction, calls * passes, other, reduction, waiting / (1 + waiting), hardware)
