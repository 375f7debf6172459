"""A machine and a clock for tests of the search: rates that are easy to reckon with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from configs import derived
from configs.job import Job
from models.blueprint import padded_vocab_size
from optim.arrangement.buckets import Arrangement
from simulator.clock.hardware import FIGURES, Figure, Hardware
from simulator.clock.prediction import Prediction
from simulator.communication import bytes_per_step
from simulator.flops import executed_flops_per_token
from simulator.search.timer import LayoutTimer

GIB = 2**30
OF_TIER = {"device": 0.0, "auto": 2e-8, "host": 4e-8, "disk": 9e-8}  # seconds a parameter
OF_ENGINE = {"auto": 0.0, "device_stream": 1e-8, "host": 2e-8, "split": 0.5e-8}
OF_STRATEGY = 0.03  # of the products, where something is not kept
VALUES = {
    "ranks_per_node": 4,
    "device.memory": 80 * GIB,
    "host.memory": 512 * GIB,
    "disk.memory": 0,
    "products.fp32": 1e12,
    "products.half": 2e12,
    "attention.half": 1e12,
    "device.rate": 1e12,
    "device.operation": 1e-6,
    "launch.operation": 1e-6,
    "products.tile": 16,
    "launch.exposed": 0.2,
    "inside.startup_2": 1e-6,
    "inside.startup_4": 2e-6,
    "inside.startup_8": 3e-6,
    "inside.rate": 1e11,
    "between.startup": 1e-5,
    "between.rate": 1e10,
    "between.shared_by": 1,
    "host.up": 1e10,
    "host.down": 1e10,
    "host.link_shared_by": 1,
    "host.rate": 1e11,
    "host.update": 1e10,
    "disk.read": 1e9,
    "disk.write": 1e9,
    "step.startup": 1e-3,
}


def machine(kind: str = "cuda", errors: tuple[dict[str, object], ...] = (), **values: float) -> Hardware:
    """With other values where they are given, by names with _ for a point."""
    by_name = VALUES | {name.replace("__", "."): value for name, value in values.items()}
    figures = {name: Figure(float(by_name.get(name, 1.0)), "made up") for name in FIGURES}
    return Hardware("made_up", kind, "a machine of the tests", figures, errors)


def _passes(job: Job, hardware: Hardware) -> dict[str, float]:
    config = job.config
    padded = padded_vocab_size(job.vocab_size, config.parallel.tensor)
    tokens = config.training.global_batch_size * config.model.sequence_length
    flops = executed_flops_per_token(config, padded, hardware.kind) * tokens / job.world_size
    sequence_rows = derived.rank_sequence_rows(config)
    efficiency = sequence_rows / (sequence_rows + 64)
    sent = bytes_per_step(job)
    exchanged = max(stage["tensor_parallel"] + stage["context_exchange"] + stage["expert_all_to_all"] for stage in sent)
    layers = {"none": 0.0, "selective": 0.05, "full": 0.3}[config.training.recompute]
    return {
        "products": flops / hardware["products.half"] / efficiency,
        "recomputed": layers * flops / hardware["products.half"] / efficiency,
        "tensor:inside": exchanged / hardware["inside.rate"],
    }


def _predict(job: Job, hardware: Hardware, arrangements: Sequence[Arrangement | None] | None = None) -> Prediction:
    config, reasons = job.config, _passes(job, hardware)
    stages, chunks = config.parallel.pipeline, config.parallel.virtual_pipeline or 1
    count = derived.num_micro_batches(config, job.world_size)
    passes = sum(reasons.values())
    reasons["bubble"] = passes * (stages - 1) / (count * chunks)
    parameters = 1e6 / config.parallel.tensor / stages
    reasons["update"] = 1e-8 * parameters if config.optimizer.state_device == "device" else 0.0
    reasons["host_update"] = parameters * (OF_TIER[config.optimizer.state_device] + OF_ENGINE[config.optimizer.engine])
    if config.training.activation_offload != "none":
        reasons["host_link"] = 0.02 * passes
    if config.moe.num_experts is not None:
        degree = config.moe.pipeline_degree
        assert isinstance(degree, int)
        reasons["expert:inside"] = passes * (0.04 * abs(math.log2(degree) - 1) / config.parallel.expert)
        reasons["expert:between"] = 0.0 if config.moe.memory_strategy == "keep" else OF_STRATEGY * passes
    return Prediction(sum(reasons.values()), reasons, hardware.name)


def _least(job: Job, hardware: Hardware) -> float:
    return sum(_passes(job, hardware).values())


SIMPLE = LayoutTimer(_predict, _least)
