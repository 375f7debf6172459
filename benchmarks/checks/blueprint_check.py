"""The blueprint against the models that are built: python -m benchmarks.checks.blueprint_check [--sample N] [--json]
[--markdown].

Every preset (configs/experiment and configs/model) in every layout of `LAYOUTS` that it can be split by, whatever
number of ranks that takes: for the first and the last rank of each pipeline stage the model is built on the meta
device, in a process group that only pretends to have the other ranks. Compared are names, the shape of each rank's
shard (in layout "single": the logical shape) and the parameters' order.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)
from configs.job import Job

# isort: split
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from base.errors import ConfigError
from benchmarks.kit.tables import table
from configs.compose import compose
from configs.schema import Config
from configs.validate import planned_world_size, validate
from models import blueprint
from models.build import build_model
from models.weights import logical_tensors
from parallel import topology
from simulator.parameters import TRAINED

VOCAB_SIZE = 1000  # of presets without one; not a multiple of the padding
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence": True},
    "TP4+SP": {"tensor": 4, "sequence": True},
    "TP8+SP": {"tensor": 8, "sequence": True},
    "PP2": {"pipeline": 2},
    "PP4": {"pipeline": 4},
    "PP2, VPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "PP4, VPP2": {"pipeline": 4, "virtual_pipeline": 2},
    "TP2, PP2": {"tensor": 2, "pipeline": 2},
    "TP2+SP, PP2, VPP2": {"tensor": 2, "sequence": True, "pipeline": 2, "virtual_pipeline": 2},
    "EP2": {"expert": 2},
    "EP4": {"expert": 4},
    "TP2+SP, ETP2": {"tensor": 2, "sequence": True, "expert_tensor": 2},
    "TP2+SP, EP2": {"tensor": 2, "sequence": True, "expert": 2},
    "TP2+SP, EP2, ETP2": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2},
    "TP4+SP, EP2, ETP2": {"tensor": 4, "sequence": True, "expert": 2, "expert_tensor": 2},
    "PP2, EP4": {"pipeline": 2, "expert": 4},
    "TP2+SP, PP2, EP2": {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2},
    "TP2+SP, PP2, VPP2, EP2, ETP2": {
        "tensor": 2,
        "sequence": True,
        "pipeline": 2,
        "virtual_pipeline": 2,
        "expert": 2,
        "expert_tensor": 2,
    },
}
NO_LAYOUT: dict[str, Any] = {
    "tensor": 1,
    "sequence": False,
    "pipeline": 1,
    "virtual_pipeline": None,
    "expert": 1,
    "expert_tensor": None,
}
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


Shapes = dict[str, tuple[int, ...]]  # of what a rank holds of each logical tensor


def presets() -> list[str]:
    """Every preset, as the override that chooses it."""
    return [
        f"{kind}={path.stem}" for kind in ("experiment", "model") for path in sorted((CONFIGS / kind).glob("*.yaml"))
    ]


@functools.cache
def _composed(preset: str) -> Config:
    return compose([preset, "training.device=cpu"])


def configured(preset: str, layout: str) -> tuple[Config, int] | None:
    """The preset in a layout, and a number of ranks for it; None where it cannot be split so."""
    config = copy.deepcopy(_composed(preset))
    for key, value in {**NO_LAYOUT, **LAYOUTS[layout]}.items():
        setattr(config.parallel, key, value)
    try:
        world_size = planned_world_size(config, 1)
        validate(config, world_size)
    except ConfigError:
        return None
    return config, world_size


def expected(config: Config, vocab_size: int, chunk: blueprint.ModelChunk, expert_rank: int) -> Shapes:
    """Return the shapes of a model chunk's shards by their names in the blueprint."""
    sizes, result = blueprint.axis_sizes(config), Shapes()
    for name, weight in blueprint.weights(config, vocab_size, chunk):
        local = blueprint.local_shape(weight, sizes)
        if not weight.is_expert:
            result[name] = local
            continue
        head, _, tail = name.partition(".experts.")
        for index in range(local[0]):
            result[f"{head}.experts.{expert_rank * local[0] + index}.{tail}"] = local[1:]
    return result


def built(job: Job, rank: int) -> tuple[list[list[str]], list[Shapes], int, int]:
    """Build a rank's model chunks. Return the parameters' names and the shapes of the shards of each; the rank's
    pipeline stage and its expert rank."""
    hook = sys.excepthook  # which torch wraps each time
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.world_size)
    try:
        run_topology = topology.initialize(job.config)
        meta = torch.device("meta")
        with meta:
            chunks = build_model(job.config, replace(run_topology, device=meta), job.vocab_size, fill=False)
        shards = [{item.name: tuple(item.local.shape) for item in logical_tensors([chunk])} for chunk in chunks]
        return (
            [[name for name, _ in chunk.named_parameters()] for chunk in chunks],
            shards,
            run_topology.pipeline.rank,
            run_topology.expert.rank,
        )
    finally:
        topology.destroy()
        sys.excepthook = hook


def compare(config: Config, world_size: int) -> Iterator[str]:
    """Yield a line for each difference between the blueprint and the built model."""
    vocab_size, per_stage = config.model.vocab_size or VOCAB_SIZE, world_size // config.parallel.pipeline
    of_stages = blueprint.model_chunks(config)
    for rank in sorted(
        {stage * per_stage + at for stage in range(config.parallel.pipeline) for at in (0, per_stage - 1)}
    ):
        names, shards, stage, expert_rank = built(Job(config, world_size, vocab_size, "cpu"), rank)
        for index, (chunk, local_names, of_chunk) in enumerate(zip(of_stages[stage], names, shards, strict=True)):
            where = f"rank {rank} of {world_size}, chunk {index}"
            ours = expected(config, vocab_size, chunk, expert_rank)
            for name in sorted(ours.keys() | of_chunk.keys()):
                if ours.get(name) != of_chunk.get(name):
                    yield f"{where}: {name}: blueprint {ours.get(name)}, model {of_chunk.get(name)}"
            order = [
                _local_name(name, chunk, weight)
                for name, weight in blueprint.weights(config, vocab_size, chunk)
                if TRAINED[weight.kind]
            ]
            if order != local_names:
                first = next(
                    (pair for pair in zip(order, local_names, strict=False) if pair[0] != pair[1]),
                    (len(order), len(local_names)),
                )
                yield f"{where}: parameters in another order: {first[0]} in the blueprint, {first[1]} in the model"


def _local_name(name: str, chunk: blueprint.ModelChunk, weight: blueprint.Weight) -> str:
    if weight.is_copy:
        return "output_layer.weight"
    head, dot, rest = name.partition(".layers.")
    number, _, tail = rest.partition(".")
    return f"{head}.layers.{int(number) - chunk.first_layer}.{tail}" if dot else name


def main() -> int:
    """Print what was compared; exit status 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=1, help="every N-th of the pairs alone")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--markdown", action="store_true", help="a table for benchmarks/results")
    arguments = parser.parse_args()
    wrong: list[str] = []
    start = time.perf_counter()
    pairs = [(preset, layout) for preset in presets() for layout in LAYOUTS]
    counts: dict[str, list[int]] = {preset: [0, 0] for preset in presets()}
    for preset, layout in pairs[:: arguments.sample]:
        found = configured(preset, layout)
        if found is None:
            continue
        config, world_size = found
        differences = list(compare(config, world_size))
        counts[preset][0] += 1
        counts[preset][1] += bool(differences)
        wrong += [f"{preset}, {layout}: {difference}" for difference in differences]
    table_rows = [[preset, str(of), str(bad)] for preset, (of, bad) in counts.items()]
    seconds = time.perf_counter() - start
    print(table(["preset", "layouts compared", "differ"], table_rows, arguments.markdown))
    compared = sum(of for of, _ in counts.values())
    print(f"\n{compared} of {len(pairs[:: arguments.sample])} pairs can be split so; {seconds:.0f} s")
    print("\n".join(wrong[:50]))
    if arguments.json:
        print(json.dumps({"compared": compared, "differ": sum(bad for _, bad in counts.values()), "seconds": seconds}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
