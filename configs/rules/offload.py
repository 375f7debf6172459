"""Rules of offloaded optimizer state, experts' weights and activations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from configs import derived
from configs.rules.problem import Fix, Problem, set_to
from configs.schema import Config


def optimizer_state(config: Config, world_size: int) -> Iterator[Problem]:
    optimizer, device = config.optimizer, config.optimizer.state_device
    for key, value, default in (
        ("optimizer.state_device", device, "device"),
        ("optimizer.moment_dtype", optimizer.moment_dtype, "fp32"),
    ):
        if value != default and not optimizer.distributed:
            fixes: list[Fix] = [{"optimizer.distributed": True}, {key: default}]
            yield Problem(key, f"must be {default} while optimizer.distributed is false", fixes)
    if optimizer.early_update == "always" and not config.parallel.overlap_grad_reduce:
        rule = "needs parallel.overlap_grad_reduce (false): only gradients that are reduced early can be used early"
        yield Problem(
            "optimizer.early_update", rule, [{"parallel.overlap_grad_reduce": True}, {"optimizer.early_update": "auto"}]
        )
    if config.training.deterministic and device != "device" and optimizer.engine in ("auto", "split"):
        rule = f"needs an engine that no clock chooses, and optimizer.engine is {optimizer.engine}"
        yield Problem(
            "training.deterministic", rule, [{"training.deterministic": False}, {"optimizer.engine": "device_stream"}]
        )
    if device == "disk" and config.memory.disk_dir is None:
        # The run's own folder exists before the state is written.
        fixes = [*set_to("memory.disk_dir", [config.run_dir]), {"optimizer.state_device": "host"}]
        yield Problem("memory.disk_dir", "must be a folder for optimizer.state_device=disk", fixes)


def expert_weights(config: Config, world_size: int) -> Iterator[Problem]:
    """Rules of experts with offloaded weights."""
    weights, state = config.moe.weights_device, config.optimizer.state_device
    below = {"host": ["host", "disk"], "disk": ["disk"]}.get(weights)
    if not derived.is_moe(config) or below is None:
        return
    if state not in below:
        targets = " or ".join(below)
        rule = f"must be {targets}: state lies on the tier of the weights (moe.weights_device={weights}) or below"
        fixes: list[Fix] = [*set_to("optimizer.state_device", below), {"moe.weights_device": "device"}]
        yield Problem("optimizer.state_device", rule, fixes)
    if config.training.precision == "fp16":
        rule = "must be fp32 or bf16 where experts' weights lie off the device: no loss scale is taken out there"
        yield Problem("training.precision", rule, [{"training.precision": "bf16"}, {"moe.weights_device": "device"}])
    if "disk" in (weights, state) and config.memory.disk_dir is None:
        rule = "must be a folder for moe.weights_device=disk"
        yield Problem("memory.disk_dir", rule, set_to("memory.disk_dir", [config.run_dir]))


def activations(config: Config, world_size: int) -> Iterator[Problem]:
    offload = config.training.activation_offload
    if offload != "none" and config.training.recompute != "full":
        rule = f"needs training.recompute ({config.training.recompute}) to be full: it keeps the inputs of layers alone"
        yield Problem(
            "training.activation_offload",
            rule,
            [{"training.recompute": "full"}, {"training.activation_offload": "none"}],
        )
    size = derived.layer_input_bytes(config)
    if not isinstance(offload, str) and offload * 2**20 < size:
        yield Problem(
            "training.activation_offload",
            f"must hold at least one layer's input, {size / 2**20:.3g} MiB",
            [{"training.activation_offload": "auto"}, {"training.activation_offload": math.ceil(size / 2**20)}],
        )
