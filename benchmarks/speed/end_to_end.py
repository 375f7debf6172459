"""Training of whole MoE models over links: the MoE layer of this project and Megatron-core's own, everything else the
same.

`python -m benchmarks.speed.end_to_end [--presets gpt_moe_small bert_moe_small] [--rates 500mbit 200mbit] [--precisions
fp32] [--rounds 10] [--quick] [--json] [--markdown] [key=value ...]`

Two ranks on an emulated cluster, one thread each, compute in earnest; the experts are spread over both. The variants
are models of one process: the same initial weights, batches (the embedded corpus) and dropout, DDP, sharded optimizer
and gradient clipping. They take their optimizer steps in turns, so that step i of all variants has the same data, and
their losses must agree: megatron  Megatron-core's MoELayer: SequentialMLP, the alltoall dispatcher, and a full-duplex
all_to_all_single, as our layer has r=1       our layer, each pass in one chunk auto      our layer as its planner sets
it (moe.pipeline_degree=auto); what the planning takes in each step counts
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import parallel  # noqa: F401  before Megatron-core, which warns of what is not installed
from base.errors import ConfigError
from benchmarks.kit import link, rounds
from benchmarks.kit.cluster import Cluster, ClusterError
from benchmarks.kit.tables import headline, line
from configs.compose import compose
from configs.schema import Config
from configs.validate import validate
from data.prepare import PreparedData, prepare
from parallel.topology import Topology

MEGATRON, ONE_CHUNK, AUTO, PLACED = "megatron", "r=1", "auto", "placed"
VARIANTS = (MEGATRON, ONE_CHUNK, AUTO)
NODES = 2
WARM_UP = 3  # steps in which buffers are made
# The presets' models as they are; less data a step than the presets', for two ranks with one thread each.
SIZES = ("parallel.expert=2", "training.micro_batch_size=4", "training.global_batch_size=8", "training.device=cpu")


# ---------------------------------------------------------------------------------------------------------------------
# On the ranks
# ---------------------------------------------------------------------------------------------------------------------


class _Variant:
    """A model in training, with the losses and gradient norms of its steps."""

    def __init__(
        self, name: str, config: Config, topology: Topology, vocab_size: int, batches: Sequence[Any], folder: Path
    ) -> None:
        from checkpoint.saver import Saver
        from training import engine
        from training.callbacks.moe.expert_migration import ExpertMigration
        from training.callbacks.moe.expert_planning import ExpertPlanning
        from training.resilience.health import Health
        from training.run import Run

        config = copy.deepcopy(config)
        config.moe.pipeline_degree = "auto" if name == AUTO else 1
        if name != PLACED:
            config.moe.placement.policy, config.moe.placement.extra_slots = "static", 0
        # No costs of another link, and no run folder that stays.
        config.data.cache_dir, config.run_dir = str(folder), str(folder)
        with contextlib.ExitStack() as patches:
            if name == MEGATRON:
                patches.enter_context(mock.patch.object(engine, "build_model", _build_megatron))
                # Nothing is split over tensor ranks, and Megatron-core's experts are not in the blueprint.
                patches.enter_context(mock.patch("models.parallelize.mark_tensor_parallel"))
            model = engine.Engine(config, topology, vocab_size)
        self.run = Run(
            config,
            topology,
            model,
            vocab_size,
            None,
            None,
            {},
            Saver(config, model.host_link),
            Health(config),
        )
        self.planning: Any = ExpertPlanning() if name == AUTO else ExpertMigration() if name == PLACED else None
        if self.planning is not None:
            self.planning.on_start(self.run)
        self.batches = batches
        self.losses, self.gradient_norms = list[float](), list[float]()

    def step(self) -> float:
        """Take the next optimizer step; return its seconds."""
        from training.step import train_step

        run, batches = self.run, self.batches[self.run.progress.step % len(self.batches)]
        _seed(run.config.training.seed + 1000 * run.progress.step)
        dist.barrier()
        start = time.perf_counter()
        result = train_step(run.engine, batches, run.progress.step + 1)
        run.take(result)
        if self.planning is not None:
            self.planning.after_step(run, {"placement": {}})
        seconds = time.perf_counter() - start
        self.losses.append(result.loss)
        self.gradient_norms.append(result.grad_norm)
        return seconds


_variants: dict[str, _Variant] = {}


def build(
    config: Config, prepared: PreparedData, num_steps: int, folder: str, names: Sequence[str] = VARIANTS
) -> list[int]:
    """Build these variants on this rank, and the batches of `num_steps` steps; return their parameter counts. Once
    per process."""
    from data.loader import build_data
    from parallel.topology import initialize

    topology = initialize(config)
    dist.all_to_all_single = link.all_to_all_single
    loader, _ = build_data(config, prepared, rank=topology.data.rank, world_size=topology.data.size, consumed_samples=0)
    batches = [loader.next_step() for _ in range(num_steps)]
    loader.close()
    vocab_size = config.model.vocab_size or prepared.vocab_size
    for name in names:
        _variants[name] = _Variant(name, config, topology, vocab_size, batches, Path(folder))
    return [
        sum(p.numel() for chunk in of.run.engine.bare_chunks for p in chunk.parameters()) for of in _variants.values()
    ]


def step(name: str) -> dict[str, float]:
    """Take a variant's next optimizer step; return its seconds."""
    return {"step": _variants[name].step()}


def is_final() -> bool:
    """Whether the planned model has tried its plans."""
    planning = _variants[AUTO].planning
    assert planning is not None
    return planning.is_final


def course() -> dict[str, dict[str, list[float]]]:
    """Return the loss and the gradient norm of each step so far, by variant."""
    return {
        "loss": {name: variant.losses for name, variant in _variants.items()},
        "gradient_norm": {name: variant.gradient_norms for name, variant in _variants.items()},
    }


def plans() -> list[dict[str, Any]]:
    """Return the current plans of the layers of the planned model."""
    from moe.layer import layers_of

    return [dataclasses.asdict(layer.plan) for layer in layers_of(_variants[AUTO].run.engine.bare_chunks).values()]


def _seed(seed: int) -> None:
    # All variants draw the same dropout masks in a step, and ranks, which hold different tokens, different ones.
    from megatron.core import tensor_parallel

    torch.manual_seed(seed + dist.get_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(seed + dist.get_rank(), force_reset_rng=True)


def _build_megatron(
    config: Config, topology: Topology, vocab_size: int, *, streams: bool = False
) -> list[torch.nn.Module]:
    """Build the model as this project does, then replace our layers by Megatron-core's with the same weights."""
    from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes

    from models.build import build_model
    from moe.layer import MixtrainMoELayer

    chunks = build_model(config, topology, vocab_size, streams=streams)
    for chunk in chunks:
        for parent in list(chunk.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, MixtrainMoELayer):
                    setattr(parent, name, _megatron_layer(module))
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunks


def _megatron_layer(ours: Any) -> torch.nn.Module:
    from benchmarks.kit.megatron_layer import fill_experts, megatron_layer

    theirs = megatron_layer(ours.config, ours.layer_number)
    own = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.data = parameter.data.to(ours.config.params_dtype)
            if not name.startswith("experts."):
                parameter.copy_(own[name])
    fill_experts(theirs, own["experts.linear_fc1.weight"], own["experts.linear_fc2.weight"])
    return theirs


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def make_config(preset: str, precision: str, overrides: Sequence[str]) -> Config:
    """The preset with the benchmark's sizes, and `overrides` on top. Raises ConfigError, also for a linear bias, which
    both layers lack."""
    config = compose([f"experiment={preset}", *SIZES, f"training.precision={precision}", *overrides])
    validate(config, NODES)
    if config.moe.num_experts is None:
        raise ConfigError(f"experiment ({preset}) must be a mixture of experts. Try gpt_moe_small")
    if config.model.linear_bias:
        raise ConfigError(
            "model.linear_bias (true) must be false here: Megatron-core's experts are copied without. Try false"
        )
    return config


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference of two runs' losses (or gradient norms), relative to `theirs`; ValueError for other
    lengths."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def measure(cluster: Cluster, config: Config, prepared: PreparedData, num_rounds: int) -> dict[str, Any]:
    """Train all variants of one model in turns; return a row of the table."""
    num_batches = WARM_UP + num_rounds + rounds.MAX_DROPPED * (num_rounds + 1) + 1
    with tempfile.TemporaryDirectory() as folder:
        parameters = cluster.call(build, config, prepared, num_batches, folder)
        while not all(cluster.call(is_final)):
            cluster.call(step, AUTO)
        result = rounds.measure(cluster, step, {name: (name,) for name in VARIANTS}, num_rounds, warm_up=WARM_UP)
    of_steps = cluster.call(course)[0]
    num_steps = len(of_steps["loss"][MEGATRON])  # the planned model has taken more, while it tried plans
    of_steps = {
        what: {name: of_variant[:num_steps] for name, of_variant in values.items()} for what, values in of_steps.items()
    }
    differences = {
        what: {name: largest_difference(values[name], values[MEGATRON]) for name in (ONE_CHUNK, AUTO)}
        for what, values in of_steps.items()
    }
    return {
        "preset": config.name,
        "precision": config.training.precision,
        "rate": cluster.rate,
        "model": dataclasses.asdict(config.model),
        "moe": dataclasses.asdict(config.moe),
        "tokens_per_rank": config.training.global_batch_size // cluster.world_size * config.model.sequence_length,
        "parameters_per_rank": parameters[0][0],
        "rounds": result.num_rounds,
        "rounds_dropped": result.num_dropped,
        "seconds": {name: result.median(name, "step") for name in VARIANTS},
        "all_seconds": {name: result.seconds[name]["step"] for name in VARIANTS},
        "speedup": {name: result.speedup(name, "step", MEGATRON) for name in VARIANTS},
        "steps": num_steps,
        "course": of_steps,
        "difference": differences,
        "plans": cluster.call(plans)[0],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Printing
# ---------------------------------------------------------------------------------------------------------------------

HEADINGS = (
    "preset", "precision", "link", "measured", "megatron s", "r=1 s", "auto s", "r=1 speedup", "auto speedup",
    "steps", "loss", "gradient", "chunks",
)  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    chosen = sorted({(plan["degree"], plan["backward_degree"]) for plan in row["plans"]})
    return [
        row["preset"],
        row["precision"],
        row["rate"],
        f"{row['link_bits_per_second'] / 1e6:.0f} Mbit/s",
        *(f"{row['seconds'][name]:.3f}" for name in VARIANTS),
        *(f"{row['speedup'][name]:.3f}" for name in (ONE_CHUNK, AUTO)),
        str(row["steps"]),
        *(f"{max(row['difference'][what].values()):.1e}" for what in ("loss", "gradient_norm")),
        " or ".join(f"{forward}+{backward}" for forward, backward in chosen),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--presets", nargs="+", default=["gpt_moe_small", "bert_moe_small"], help="experiments")
    parser.add_argument("--rates", nargs="+", default=["500mbit", "200mbit"], help="of the links")
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--rounds", type=int, default=10, help="optimizer steps that count")
    parser.add_argument("--quick", action="store_true", help="the first preset and link with two layers, two rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments, overrides = parser.parse_known_args()
    if any("=" not in text or text.startswith("-") for text in overrides):
        parser.error(f"{' '.join(overrides)}: overrides are key=value")
    if arguments.quick:
        arguments.presets, arguments.rates, arguments.rounds = arguments.presets[:1], arguments.rates[:1], 2
        overrides = ["model.num_layers=2", *overrides]
    today = datetime.datetime.now(datetime.UTC).date()
    print(
        f"{today}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}; {NODES} nodes of one rank "
        f"with one thread; medians of {arguments.rounds} steps in turns; speedups over Megatron-core's layer; loss and "
        "gradient's norm: our models' largest relative difference from it over all steps\n"
    )
    print(headline(HEADINGS, arguments.markdown), flush=True)
    found = []
    try:
        for preset in arguments.presets:
            for precision in arguments.precisions:
                config = make_config(preset, precision, overrides)
                prepared = prepare(config.data, config.model.family, show_progress=False)
                for rate in arguments.rates:
                    with Cluster(NODES, rate) as cluster:
                        row = {"link_bits_per_second": link.measured_rate(cluster)}
                        row |= measure(cluster, config, prepared, arguments.rounds)
                    found.append(row)
                    print(line(_cells(row), HEADINGS, arguments.markdown), flush=True)
    except (ValueError, RuntimeError, ClusterError) as error:
        print(f"end_to_end: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"rows": found}))
    return 0


if __name__ == "__main__":
    from benchmarks.speed import end_to_end  # under the name by which ranks find its functions

    sys.exit(end_to_end.main())
