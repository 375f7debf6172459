"""One rank's steps of a case without numbers: where its host waits, and how many bytes it needs beside what the plan
says."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from configs import derived
from configs.job import Job
from configs.schema import Config
from moe.planning.inputs import initial_plan, moe_layers
from parallel import topology
from parallel.pipeline import layers_of_stage
from simulator.run_plan import make_plan
from tests.cuda import sync_points
from tests.cuda.fake import device
from tests.cuda.fake.cases import VOCAB_SIZE, Case
from tests.cuda.fake.live import LIVE
from tests.cuda.fake.reads import reads
from tests.cuda.pretended.observed import OBSERVED
from training.engine import Engine
from training.starting.dry_run import made_up_batches
from training.step import train_step


@dataclass(frozen=True)
class Found:
    """Of one rank: bytes, and the host's waits in a step by kind and place."""

    case: Case
    rank: int
    stage: int
    layout: str
    layers: list[str]  # of each model chunk: the kinds of its layers
    peak: int
    planned: int
    activations: int  # of the peak what the plan has for nothing else
    planned_activations: int
    waits: dict[str, int]
    expected_waits: dict[str, int]
    grouped_products: int
    expected_grouped_products: int

    @property
    def ratio(self) -> float:
        return self.peak / self.planned

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio}


def measure(case: Case, rank: int) -> Found:
    """Build rank `rank`'s part of the model, and take two steps; the second is what counts, as the optimizer's state
    comes with the first."""
    config = case.config()
    vocab_size = config.model.vocab_size or VOCAB_SIZE
    planned = make_plan(Job(config, case.world_size, vocab_size, "cuda")).memory[rank]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
    sys.excepthook = sys.__excepthook__  # torch's puts the rank before each line, for each process group once more
    device.READS.clear()
    device.READS.update(reads(config))
    OBSERVED.start(None)
    LIVE.forget()
    try:
        # In the engine's own thread for a device no mode is entered.
        with device.Device(), torch.autograd.set_multithreading_enabled(False):
            ranks = topology.initialize(config)
            engine = Engine(config, ranks, vocab_size)
            batches = made_up_batches(config, derived.num_micro_batches(config, case.world_size), vocab_size)
            batches = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
            train_step(engine, batches[: _fewest(config)], 1)
            gc.collect()
            LIVE.restart()
            OBSERVED.waits.clear()
            device.GROUPED_PRODUCTS.clear()
            train_step(engine, batches, 2)
            engine.close()
    finally:
        topology.destroy()
    calls = sum(moe_layers(config, planned.stage)) * len(batches)
    return Found(
        case,
        rank,
        planned.stage,
        _layout(config, ranks),
        _layers(config, planned.stage),
        LIVE.peak,
        planned.total,
        LIVE.peak - (planned.total - planned.activations),
        planned.activations,
        _by_name(OBSERVED.waits),
        _by_name(_expected_waits(config, calls)),
        device.GROUPED_PRODUCTS.total(),
        _expected_grouped_products(config) * calls,
    )


def _fewest(config: Config) -> int:
    """Micro-batches that the schedule can do with."""
    return config.parallel.pipeline if config.parallel.virtual_pipeline else 1


def _forwards(config: Config) -> int:
    """How often a layer's forward pass runs for each backward pass."""
    return 2 if config.training.recompute == "full" else 1


def _expected_waits(config: Config, calls: int) -> Counter[tuple[str, str]]:
    """Return the waits that tests/cuda/sync_points.py lists for a step with `calls` calls of MoE layers."""
    exchanged = sync_points.HIERARCHICAL if config.moe.all_to_all == "hierarchical" else sync_points.FLAT
    per_layer = {
        **(exchanged if config.parallel.expert > 1 else {}),
        **({} if config.training.precision == "bf16" else sync_points.LOOP_LOCAL),
    }
    return sync_points.waits(per_layer, calls * _forwards(config))


def _expected_grouped_products(config: Config) -> int:
    """Of a call: two in each chunk of a forward pass, two for the input gradients and two for the weights'; one more
    where the preactivations are computed again."""
    if config.training.precision != "bf16":
        return 0
    plan = initial_plan(config)
    again = "recompute" in plan.memory_strategy
    return 2 * plan.degree * _forwards(config) + (4 + again) * plan.backward_degree


def _by_name(waits: Counter[tuple[str, str]]) -> dict[str, int]:
    return {f"{kind}, {where}": count for (kind, where), count in sorted(waits.items()) if count}


def _layout(config: Config, ranks: topology.Topology) -> str:
    parallel = config.parallel
    sizes = [
        ("TP", ranks.tensor.size, "+SP" if parallel.sequence else ""),
        ("PP", ranks.pipeline.size, ""),
        ("VPP", ranks.virtual_size, ""),
        ("EP", ranks.expert.size, ""),
        ("ETP", ranks.expert_tensor.size if derived.is_moe(config) else 1, ""),
        ("DP", ranks.data.size, ""),
    ]
    text = " ".join(f"{name}{size}{more}" for name, size, more in sizes if size > 1) or "one rank"
    return f"{text}, {config.training.precision}, micro-batches of {config.training.micro_batch_size}"


def _layers(config: Config, stage: int) -> list[str]:
    kinds = ["MoE" if is_moe else "dense" for is_moe in derived.moe_layer_pattern(config)]
    return ["+".join(kinds[layer] for layer in chunk) for chunk in layers_of_stage(config, stage)]
