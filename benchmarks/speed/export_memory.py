"""Takes models out of checkpoints and folders where no more memory is to be had than two of their tensors need: `python
-m benchmarks.speed.export_memory [--layers 4] [--folder FOLDER] [--json]`

Needs root and a memory cgroup that can be made; else it says so and measures nothing. Two models with random weights
are made, each at least 4 times what its commands may take beside the process: a mixture of experts in a checkpoint of
two ranks, whose experts lie in stacks, and a GPT-2, whose queries, keys and values are one transposed matrix in its
Hugging Face folder. Each command runs first on a tiny model of the same kind, twice, in a cgroup without a limit, for
the peak of the process; then on the model, in a cgroup that allows the lower peak, twice the largest tensor and 64 MiB.
Pages of files and dirty pages count in both. Some tensors of what was written are compared with what was made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from base import checksums
from benchmarks.kit.cgroups import CgroupOutcome, MemoryCgroup, can_limit_memory, drop_page_cache, run_in
from benchmarks.kit.tables import table
from checkpoint import manifest, safetensors_header, state_file
from checkpoint.safetensors_header import Entry
from configs.architecture import description
from configs.compose import to_yaml
from configs.job import Job
from configs.schema import Config
from models import convert, folder
from models.weight_files.expected import logical_shapes

MIB = 2**20
HEADROOM = 64 * MIB  # beside the process and two tensors
LEAST = 4  # times that, in weights
VOCAB_SIZE = 16384
TIMEOUT = 900
EXPERTS = ".mlp.experts."
MOE: dict[str, Any] = {
    "model": {"num_attention_heads": 8, "num_query_groups": 2, "vocab_size": VOCAB_SIZE},
    "moe": {"num_experts": 16, "top_k": 2},
}
GPT2: dict[str, Any] = {
    "model": {
        "num_attention_heads": 8,
        "vocab_size": VOCAB_SIZE,
        "position_embedding": "learned",
        "normalization": "layernorm",
        "activation": "gelu_tanh",
        "linear_bias": True,
    }
}
# Of the columns of these each of two ranks has half, of other matrices' rows.
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def made(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The weights that every model here has under a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


def config_of(kind: Mapping[str, Any], layers: int, hidden: int) -> Config:
    """A model of a kind, whose experts and feed-forward layers grow with `hidden`."""
    model = {**kind["model"], "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": 4 * hidden}
    moe = {**kind["moe"], "ffn_hidden_size": hidden} if "moe" in kind else {"num_experts": None}
    return folder.config_from({"model": model, "moe": moe})


def write_checkpoint(config: Config, run_dir: Path) -> None:
    """A checkpoint as two ranks write it that split every matrix and have half of the experts each."""
    target = manifest.folder_of(run_dir, 1)
    target.mkdir(parents=True)
    shapes = logical_shapes(config, VOCAB_SIZE)
    sums = {}
    for rank in range(2):
        path = target / f"rank_{rank:05d}{safetensors_header.SUFFIX}"
        shards = list(_shards(shapes, rank))
        with path.open("wb") as stream:
            stream.write(safetensors_header.encode(entry for entry, _ in shards))
            for entry, names in shards:
                for name in names:
                    box = tuple(slice(o, o + n) for o, n in zip(entry.offset, entry.shape))[-len(shapes[name]) :]
                    stream.write(memoryview(made(name, shapes[name])[box].contiguous().view(-1).numpy()).cast("B"))
        sums[path.name] = checksums.sum_of(path)
    model = state_file.of_model(Job(config, 2, VOCAB_SIZE, "cpu"))
    state = {"step": 1, "consumed_samples": 1, "health": None, "optimizer_steps": [1], "loss_scaler": None, **model}
    sums[manifest.STATE] = manifest.write_text(target / manifest.STATE, json.dumps(state))
    sums[manifest.CONFIG] = manifest.write_text(target / manifest.CONFIG, to_yaml(config))
    manifest.write(target, 1, sums)


def _shards(shapes: dict[str, tuple[int, ...]], rank: int) -> list[tuple[Entry, list[str]]]:
    """What a rank writes: boxes, and the logical weights in each."""
    found: list[tuple[Entry, list[str]]] = []
    at = 0
    stacks: dict[str, list[str]] = {}
    for name in shapes:
        layer, _, rest = name.partition(EXPERTS)
        key = f"{layer}{EXPERTS}experts.{rest.partition('.')[2]}" if rest else name
        stacks.setdefault(key, []).append(name)
    for key, names in stacks.items():
        shape = shapes[names[0]]
        if EXPERTS in key:
            half = len(names) // 2
            box, whole, offset = (half, *shape), (2 * half, *shape), (rank * half, *(0 for _ in shape))
            names = names[rank * half : (rank + 1) * half]
        elif len(shape) == 1 or "router" in key:
            if rank == 1:
                continue
            box, whole, offset = shape, shape, tuple(0 for _ in shape)
        else:
            dim = 1 if key.endswith(COLUMNS) else 0
            box = tuple(size // 2 if d == dim else size for d, size in enumerate(shape))
            whole, offset = shape, tuple(rank * size // 2 if d == dim else 0 for d, size in enumerate(shape))
        end = at + 4 * torch.Size(box).numel()
        found.append((Entry(key, "F32", box, whole, offset, at, end), names))
        at = end
    return found


def write_weights(config: Config, target: Path) -> None:
    """A folder of logical weights."""
    specs = [
        folder.TensorSpec(name, torch.float32, shape) for name, shape in logical_shapes(config, VOCAB_SIZE).items()
    ]
    writer = folder.Writer(target, specs)
    for spec in specs:
        writer.add(spec.name, made(spec.name, spec.shape))
    writer.close()
    folder.write_config(target, description(config, VOCAB_SIZE), {"bos_token_id": 0, "eos_token_id": 0})


@dataclass(frozen=True)
class Sources:
    """The folders that commands read, and the largest of their tensors and all of them in bytes."""

    run: Path
    weights: Path
    huggingface: Path
    largest: int
    total: int  # of the smaller model


def make(path: Path, layers: int, hidden: int) -> Sources:
    """Both models in all their forms."""
    experts, dense = config_of(MOE, layers, hidden), config_of(GPT2, 4 * layers, hidden)
    write_checkpoint(experts, path / "run")
    write_weights(dense, path / "weights")
    convert.export_folder(path / "weights", path / "hf")
    sizes = [
        [4 * torch.Size(shape).numel() for shape in logical_shapes(config, VOCAB_SIZE).values()]
        for config in (experts, dense)
    ]
    return Sources(
        path / "run", path / "weights", path / "hf", max(map(max, sizes)), min(sum(of_model) for of_model in sizes)
    )


def commands(sources: Sources, out: Path) -> dict[str, list[str]]:
    """Every command, by what it does."""
    checkpoint, models = "checkpoint", "models.convert"
    run, weights, hf = map(str, (sources.run, sources.weights, sources.huggingface))
    return {
        "export a checkpoint": [f"{checkpoint}.export", run, str(out / "exported")],
        "export it to Hugging Face": [checkpoint, "convert", run, str(out / "hf"), "--to", "huggingface"],
        "export it to Hugging Face in bf16": [
            *(checkpoint, "convert", run, str(out / "bf16"), "--to", "huggingface", "--dtype", "bfloat16")
        ],
        "verify it": [checkpoint, "verify", run],
        "import a Hugging Face folder": [models, "import", hf, str(out / "imported")],
        "verify it there": [checkpoint, "verify", hf],
        "export a folder of weights": [models, "export", weights, str(out / "back")],
    }


def run(words: list[str], limit: int | None) -> CgroupOutcome:
    """Run one in a cgroup, with nothing of its folders in the kernel's cache, but with the libraries there."""
    with MemoryCgroup(limit) as memory:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        return run_in([sys.executable, "-m", *words], memory, timeout=TIMEOUT, env=environment)


def wrong_tensors(out: Path, config: Config) -> int:
    """How many of some tensors that were written are others than those made."""
    shapes = logical_shapes(config, VOCAB_SIZE)
    with safe_open(out / "model.safetensors", framework="pt") as file:
        names = sorted(shapes)[:: max(1, len(shapes) // 20)]
        return sum(not file.get_tensor(name).equal(made(name, shapes[name])) for name in names)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="of the mixture of experts; GPT-2 has 4 times as many")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="on a disk with 6 GB of room; default: the temporary one")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    reason = can_limit_memory()
    if reason is not None:
        print(f"nothing is measured: {reason}")
        return
    table_rows, found = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path = Path(name)
        tiny, large = make(path / "tiny", 1, 64), make(path / "large", options.layers, options.hidden)
        allowed = 2 * large.largest + HEADROOM
        assert large.total >= LEAST * allowed, f"{large.total / MIB:.0f} MiB of weights, {allowed / MIB:.0f} allowed"
        drop_page_cache(path)
        for (what, small), big in zip(commands(tiny, path / "warm").items(), commands(large, path / "out").values()):
            run(small, None)  # now the libraries are in the kernel's cache
            bases = [run(commands(tiny, path / f"small{number}")[what], None) for number in range(2)]
            assert all(base.status == 0 and base.peak_bytes for base in bases), bases[0].stderr[-2000:]
            base_bytes = min(base.peak_bytes or 0 for base in bases)
            outcome = run(big, base_bytes + allowed)
            assert outcome.peak_bytes is not None
            if outcome.status != 0:
                print(outcome.stderr[-2000:], file=sys.stderr)
            found.append(
                {
                    "command": what,
                    "process_bytes": base_bytes,
                    "limit_bytes": base_bytes + allowed,
                    "peak_bytes": outcome.peak_bytes,
                    "peak_held_bytes": outcome.peak_held_bytes,
                    "seconds": outcome.seconds,
                    "ran": outcome.verdict(),
                }
            )
            shown = [base_bytes, base_bytes + allowed, outcome.peak_bytes, outcome.peak_held_bytes or 0]
            table_rows.append(
                [what, *(f"{size / MIB:.0f}" for size in shown), f"{outcome.seconds:.1f}", outcome.verdict()]
            )
        wrong = wrong_tensors(path / "out" / "exported", config_of(MOE, options.layers, options.hidden))
        wrong += wrong_tensors(path / "out" / "imported", config_of(GPT2, 4 * options.layers, options.hidden))
    head = ["command", "process MiB", "limit MiB", "peak MiB", "held MiB", "seconds", "ended"]
    print(table(head, table_rows, options.markdown))
    print(
        f"largest tensor {large.largest / MIB:.0f} MiB, weights of the smaller model {large.total / MIB:.0f} MiB, "
        f"{large.total / allowed:.1f} times what is allowed beside the process; {wrong} tensors are wrong"
    )
    if options.json:
        print(json.dumps({"largest_bytes": large.largest, "weights_bytes": large.total, "wrong": wrong, "rows": found}))


if __name__ == "__main__":
    main()
