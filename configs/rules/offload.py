"""Rules of offloaded optimizer state, experts' weights and activations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from base.units import MIB
from configs import derived
from configs.rules.problem import Problem
from configs.schema import Config


def optimizer_state(config: Config, world_size: int) -> Iterator[Problem]:
    optimizer, device = config.optimizer, config.optimizer.state_device
    for key, value, default in (
        ("optimizer.state_device", device, "device"),
        ("optimizer.moment_dtype", optimizer.moment_dtype, "fp32"),
    ):
        if value != default and not optimizer.distributed:
            rule = f"must be {default} if optimizer.distributed is false"
            yield Problem(key, rule, {"optimizer.distributed": True}, default)
    if optimizer.early_update == "always" and not config.parallel.overlap_grad_reduce:
        rule = "needs parallel.overlap_grad_reduce=true: an early update needs gradients that are reduced early"
        yield Problem("optimizer.early_update", rule, {"parallel.overlap_grad_reduce": True}, "auto")
    if config.training.deterministic and device != "device" and optimizer.engine in ("auto", "split"):
        rule = f"must be false if optimizer.engine is {optimizer.engine}, which depends on measured times"
        yield Problem("training.deterministic", rule, False, {"optimizer.engine": "device_stream"})
    if device == "disk" and config.memory.disk_dir is None:
        # The run's own folder exists before the state is written.
        rule = "must be set to a folder for optimizer.state_device=disk"
        yield Problem("memory.disk_dir", rule, config.run_dir, {"optimizer.state_device": "host"})


def expert_weights(config: Config, world_size: int) -> Iterator[Problem]:
    """Yield the problems of MoE layers whose experts' weights are offloaded."""
    weights, state = config.moe.weights_device, config.optimizer.state_device
    below = {"host": ["host", "disk"], "disk": ["disk"]}.get(weights)
    if not derived.is_moe(config) or below is None:
        return
    if state not in below:
        targets = " or ".join(below)
        rule = f"must be {targets}: with moe.weights_device={weights}, optimizer state must not be on a faster device"
        yield Problem("optimizer.state_device", rule, *below, {"moe.weights_device": "device"})
    if config.training.precision == "fp16":
        rule = f"must be fp32 or bf16 for moe.weights_device={weights}: offloaded experts support no loss scaling"
        yield Problem("training.precision", rule, "bf16", {"moe.weights_device": "device"})
    if "disk" in (weights, state) and config.memory.disk_dir is None:
        rule = "must be set to a folder for moe.weights_device=disk"
        yield Problem("memory.disk_dir", rule, config.run_dir)


def activations(config: Config, world_size: int) -> Iterator[Problem]:
    offload = config.training.activation_offload
    if offload != "none" and config.training.recompute != "full":
        rule = f"needs training.recompute ({config.training.recompute}) to be full, which stores only layer inputs"
        yield Problem("training.activation_offload", rule, {"training.recompute": "full"}, "none")
    size = derived.layer_input_bytes(config)
    if not isinstance(offload, str) and offload * MIB < size:
        rule = f"must be at least {size / MIB:.3g} MiB, the size of one layer's input"
        yield Problem("training.activation_offload", rule, "auto", math.ceil(size / MIB))
