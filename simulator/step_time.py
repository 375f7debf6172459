"""How long a step should take, where the costs of the model's MoE layers were measured: the cache that
moe/planning/measure.py writes.

A prediction, not a bound: the MoE layers' times are moe/planning/timing.py's; all other operations are taken to run at
the rate at which the experts' products were measured, pipeline stages to be equally busy, and gradients to be reduced
at the measured link's rate, which is hidden as far as nothing. The optimizer's update and the data are left out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs import derived
from configs.schema import Config, ConfigError
from moe.chunk_plan import LayerLoad
from moe.planning.costs import CallPrediction, LayerCosts, Limits
from moe.planning.inputs import initial_plan, layer_shape, limits, moe_layers
from moe.planning.planner import Planner
from moe.planning.search import predict
from optim.arrangement.arrange import Arrangement
from optim.arrangement.planning import Bandwidths, ElementBytes, Engine, Passes, predictions
from parallel.costs.files import read_cache
from simulator.flops import executed_flops_per_token, forward_operations

TORCH_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}  # as the cache names them


# Of a GPU's node, where a run has not measured its own: the link as arXiv 2609.14306 has it, in each direction; updates
# at about the bandwidth of an HBM3 and of a share of a server's memory.
ASSUMED = Bandwidths(up=16.3e9, down=16.3e9, host=25e9, device=2e12, read=3e9, write=2e9)


@dataclass(frozen=True)
class StepPrediction:
    """Seconds of a step and what they are made of; `measured_on` is the machine of the costs."""

    step_seconds: float
    moe_seconds: float
    other_seconds: float
    reduction_seconds: float
    bubble: float  # share of a stage's time in which it waits for others
    measured_on: str
    context_seconds: float = 0.0  # of exchanges between context ranks, as if nothing hid them


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


def predict_step(
    config: Config,
    padded_vocab_size: int,
    world_size: int,
    device: str,
    sent: Mapping[str, int],
    attended_share: float | None = None,
) -> StepPrediction | None:
    """What a step should take; None without measured costs. `sent`: the bytes that a rank sends in a step, by kind;
    `attended_share` as in simulator/flops.py.

    Raises ConfigError if on some stage no plan of the MoE layers fits their memory budget, as the run does.
    """
    found = measured_costs(config, device)
    if found is None:
        return None
    layer, hardware = found
    training, load = config.training, layer_shape(config, device).even()
    micro_batches, stages = derived.num_micro_batches(config, world_size), config.parallel.pipeline
    calls = 0.0  # seconds of a rank in MoE layers, of a mean stage
    for stage in range(stages):
        if num_layers := sum(moe_layers(config, stage)):
            call = _call(config, layer, load, limits(config, device, world_size, stage))
            passes = call.forward * (2 if training.recompute == "full" else 1) + call.backward
            calls += micro_batches * num_layers * passes / stages
    rate = _rate(config, layer, device)
    forward = forward_operations(config, padded_vocab_size)
    inside = forward["experts"] + forward["shared_expert"]
    times = 4 if training.recompute == "full" else 3
    others = max(0.0, executed_flops_per_token(config, padded_vocab_size, device, attended_share) - times * inside)
    other = others * training.global_batch_size * config.model.sequence_length / world_size / rate
    chunks = config.parallel.virtual_pipeline or 1
    waiting = (stages - 1) / (micro_batches * chunks)
    reduction = (sent["gradient_reduction"] + sent["parameter_gather"]) * layer.exchange.beta
    context = sent["context_exchange"] * layer.exchange.beta
    busy = calls + other + context
    seconds = busy * (1 + waiting) + reduction
    return StepPrediction(seconds, calls, other, reduction, waiting / (1 + waiting), hardware, context)


def _call(config: Config, layer: LayerCosts, load: LayerLoad, chosen: Limits) -> CallPrediction:
    """A call of a layer by the plan that the config fixes, or by the one that a run would choose."""
    if not derived.plans_moe(config):
        return predict(layer, load, initial_plan(config))
    try:
        return predict(layer, load, Planner(layer, chosen).decide(load).plan)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def engine_seconds(tiers: Arrangement, passes: float = 0.0, rates: Bandwidths = ASSUMED) -> dict[Engine, float]:
    """Seconds of a step of one rank with each engine, whose passes take so long: a third of it forward."""
    element = ElementBytes.of(tiers)
    both = Passes(passes / 3, passes * 2 / 3, any(tiers.early), any(tiers.leaving))
    return dict(predictions(tiers.numels, tiers.tiers, element, rates, both))
