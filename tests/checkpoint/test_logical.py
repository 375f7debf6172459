"""Logical tensors read from files are those of the model, whatever layout or format they lie in; what is missing, twice
or damaged is refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)
from configs.job import Job

# isort: split
import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from safetensors.torch import load_file, save_file

from base import checksums
from base.errors import ConfigError
from benchmarks.checks.blueprint_check import presets
from checkpoint import __main__ as command
from checkpoint import manifest, safetensors_header, state, state_file
from checkpoint.logical.names import blocks_of, lacking_weights
from checkpoint.logical.reader import LogicalReader, open_checkpoint, open_logical
from checkpoint.safetensors_header import Entry
from checkpoint.shards import ShardWriter
from configs.compose import compose, to_yaml
from configs.schema import Config
from memory.host_link import HostLink
from models import convert, folder
from models.build import build_model
from models.huggingface import translate
from models.initial_weights import initialize_weights
from models.weight_files.expected import logical_shapes
from models.weights import gather_logical
from parallel import topology
from tests import distributed
from tests.models.helpers import make_config
from tests.models.test_huggingface import FAMILIES

VOCAB_SIZE = 99  # odd: each layout pads it in its own way


def _sharded(chunks: list[torch.nn.Module]) -> list[ShardedTensor]:
    found = nested_values(load_preprocess(state.sharded_weights(chunks))[0])
    return [value for value in found if isinstance(value, ShardedTensor)]


# ---------------------------------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------------------------------


def _lacking(config: Config, vocab_size: int) -> list[str]:
    """What the names and boxes that Megatron-core gives the weights of a model on the meta device do not make up."""
    config.training.device = "cpu"
    rank_topology, meta = topology.initialize(config), torch.device("meta")
    try:
        with meta:
            chunks = build_model(config, replace(rank_topology, device=meta), vocab_size, fill=False)
        entries = [
            Entry(each.key, "F32", tuple(each.data.shape), tuple(each.global_shape), tuple(each.global_offset), 0, 0)
            for each in _sharded(chunks)
        ]
    finally:
        topology.leave_layout()
    shapes = logical_shapes(config, vocab_size)
    strangers = {block.name for entry in entries for block in blocks_of(entry)} - shapes.keys()
    return [*lacking_weights(entries, shapes), *strangers]


def _lacking_in_presets(names: list[str]) -> dict[str, list[str]]:
    found = {}
    for name in names:
        config = compose([name])
        if config.moe.layers is not None:
            config.moe.layers = [0, 1]
        config.model.num_layers = 2
        found[name] = _lacking(config, config.model.vocab_size or 1000)
    return found


def _lacking_in_families(_: Any) -> dict[str, list[str]]:
    import transformers

    found = {}
    for name, (class_name, values) in FAMILIES.items():
        hf = getattr(transformers, class_name).config_class(**values).to_dict()
        overrides = translate.read_config({**hf, "architectures": [class_name]})[2]
        found[name] = _lacking(folder.config_from(overrides), VOCAB_SIZE)
    return found


def test_names_in_checkpoints_are_those_of_every_preset_and_family() -> None:
    models = [name for name in presets() if name.startswith("model=")]
    (of_presets,) = distributed.run(_lacking_in_presets, 1, models)
    (of_families,) = distributed.run(_lacking_in_families, 1, None)
    assert of_presets == dict.fromkeys(models, []) and of_families == dict.fromkeys(FAMILIES, [])


# ---------------------------------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------------------------------

SMALL = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "sequence_length": 16}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 20}
LATENT = {"attention": "latent", "num_query_groups": None, "head_dim": 8, "rotary_head_dim": 4, "value_head_dim": 8} | {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_pp2": (4, {"model": SMALL, "parallel": {"tensor": 2, "pipeline": 2}}),
    "vpp": (
        2,
        {"model": {**SMALL, "tie_embeddings": False}, "parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    ),
    "experts": (
        4,
        {
            "model": {**SMALL, **LATENT},
            "moe": {**EXPERTS, "layers": [0, 1, 1, 1], "shared_expert_ffn_hidden_size": 12, "expert_bias": True}
            | {"router_score": "sigmoid"},
            "parallel": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2},
            "training": {"precision": "bf16"},
        },
    ),
    "bert": (
        2,
        {
            "model": {**SMALL, "family": "bert", "num_query_groups": None, "position_embedding": "learned"}
            | {"normalization": "layernorm", "norm_position": "post", "activation": "gelu", "linear_bias": True}
            | {"sentence_head": "next_sentence", "tie_embeddings": True},
            "parallel": {"tensor": 2},
        },
    ),
}


def _write(config: Config, run_dir: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of the initial weights in a layout; the weights by their logical names."""
    config.training.device = "cpu"
    rank_topology = topology.initialize(config)
    target = manifest.folder_of(run_dir, 1)
    target.mkdir(parents=True, exist_ok=True)
    try:
        chunks = build_model(config, rank_topology, VOCAB_SIZE, fill=False)
        initialize_weights(chunks, config)
        for chunk in chunks:
            for name, buffer in chunk.named_buffers():
                if name.endswith("expert_bias"):
                    buffer.copy_(torch.arange(len(buffer)) + 34.2753)  # no number of bf16
        writer, name = ShardWriter(HostLink(torch.device("cpu"))), f"rank_{rank_topology.rank:05d}.safetensors"
        writer.take([each for each in _sharded(chunks) if is_main_replica(each.replica_id)])
        sums: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(sums, (name, writer.write(target / name, threading.Event())))
        if rank_topology.rank == 0:
            _seal(target, config, dict(sums))
        torch.distributed.barrier()
        return dict(gather_logical(chunks))
    finally:
        topology.leave_layout()


def _seal(target: Path, config: Config, sums: dict[str, checksums.FileSum]) -> None:
    known = {"step": 1, "consumed_samples": 1, "health": None, "optimizer_steps": [1], "loss_scaler": None}
    content = {**known, **state_file.of_model(Job(config, len(sums), VOCAB_SIZE, "cpu"))}
    sums[manifest.STATE] = manifest.write_text(target / manifest.STATE, json.dumps(content))
    sums[manifest.CONFIG] = manifest.write_text(target / manifest.CONFIG, to_yaml(config))
    manifest.write(target, 1, sums)


def _equal(reader: LogicalReader, weights: dict[str, torch.Tensor]) -> None:
    assert set(reader.names()) == set(weights)
    for name, expected in weights.items():
        found = reader.get(name)
        assert found.dtype == expected.dtype == reader.dtype(name), name
        assert torch.equal(found, expected) and reader.num_bytes(name) == expected.nbytes, name
        half = len(expected) // 2  # a slice, transposed and of another type
        target = torch.empty(expected[half:].t().shape, dtype=torch.float64).t()
        reader.fill(name, target, (half, *(0 for _ in expected.shape[1:])))
        assert torch.equal(target, expected[half:].double()), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_of_any_layout(layout: str, tmp_path: Path) -> None:
    ranks, overrides = LAYOUTS[layout]
    weights = distributed.run(_write, ranks, make_config(overrides), tmp_path / "run")[0]
    for direct in (False, True):
        reader = open_logical(tmp_path / "run", direct)
        _equal(reader, weights)
        assert reader.kind == "checkpoint" and reader.vocab_size == VOCAB_SIZE
        reader.close()
    for dtype in (None, "bfloat16"):
        target = tmp_path / str(dtype)
        assert command.convert_to(tmp_path / "run", target, "weights", dtype) == 0
        held = load_file(target / folder.SINGLE_NAME)
        assert held.keys() == weights.keys()
        for name, tensor in weights.items():
            expected = tensor if dtype is None or name.endswith("expert_bias") else tensor.to(torch.bfloat16)
            assert held[name].dtype == expected.dtype and torch.equal(held[name], expected), name
        _equal(open_logical(target), held)


# ---------------------------------------------------------------------------------------------------------------------
# What is not whole
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("logical") / "run"
    model = {**SMALL, "num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 2}
    config = make_config({"model": {**model, "tie_embeddings": False}, "parallel": {"tensor": 2}})
    distributed.run(_write, 2, config, path)
    return path


Entries = dict[str, Entry]


def _rewrite(run_dir: Path, rank: int, edit: Callable[[Entries], object]) -> Path:
    """Change what a rank's file says of its boxes, and the manifest with it."""
    target = manifest.folder_of(run_dir, 1)
    path = target / f"rank_{rank:05d}.safetensors"
    header, entries = safetensors_header.read_all(path)
    body = path.read_bytes()[header.body :]
    edit(entries)
    content, start, bodies = [], 0, []
    for entry in entries.values():
        end = start + entry.end - entry.start
        bodies.append(body[entry.start : entry.end])
        content.append(replace(entry, start=start, end=end))
        start = end
    path.write_bytes(safetensors_header.encode(content) + b"".join(bodies))
    names = [file.name for file in target.iterdir() if file.name != manifest.MANIFEST]
    manifest.write(target, 1, {name: checksums.sum_of(target / name) for name in names})
    return target


def _named(entries: Entries, key: str) -> str:
    return next(name for name, entry in entries.items() if entry.key == key)


HEAD, NORM = "output_layer.weight", "decoder.final_layernorm.weight"
QKV = "decoder.layers.self_attention.linear_qkv.weight"  # as the checkpoint calls it
DAMAGES: dict[str, tuple[Callable[[Entries], object], str, str]] = {
    "missing": (lambda found: found.pop(_named(found, NORM)), f"no tensor {NORM}", f"lack the weight {NORM}"),
    "half": (
        lambda found: found.pop(_named(found, QKV)),
        r"tensor decoder.layers.0.self_attention.linear_qkv.weight of .* is not stored exactly once",
        f"of the .* elements of {QKV}",
    ),
    "twice": (
        lambda found: found.update(again=found[_named(found, NORM)]),
        f"tensor {NORM} of .* is not stored exactly once: row 0 is stored twice",
        f"of the .* elements of {NORM}",
    ),
    "renamed": (
        lambda found: found.update({"x": replace(found.pop(_named(found, NORM)), key="decoder.last.weight")}),
        f"no tensor {NORM}",
        f"lack the weight {NORM}",
    ),
    "shape": (
        lambda found: found.update(
            {
                name: replace(entry, shape=(32, 2), global_shape=(32, 2), offset=(0, 0))
                for name, entry in found.items()
                if entry.key == NORM
            }
        ),
        rf"{NORM} in shape \[32, 2\], but its config calls for \[64\]",
        rf"{NORM} in shape \[32, 2\]",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_weight_that_is_not_there_once_is_refused_by_name(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, says, verify_says = DAMAGES[name]
    shutil.copytree(checkpoint, tmp_path / "run")
    target = _rewrite(tmp_path / "run", 0, edit)
    with pytest.raises(ConfigError, match=says):
        open_checkpoint(target)
    assert command.main(["verify", str(tmp_path / "run")]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{target}: ") and re.search(verify_says, line), line


def test_a_file_that_is_cut_or_deleted_while_it_is_open(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "run")
    reader = open_logical(tmp_path / "run")
    (first, second) = sorted(reader.folder.glob("*.safetensors"))
    expected = reader.get(HEAD)
    first.unlink()
    assert torch.equal(reader.get(HEAD), expected)
    os.truncate(second, 2000)
    with pytest.raises(ConfigError) as error:
        for name in reader.names():
            reader.get(name)
    assert f"{second} cannot be read: it was cut" in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("tensor ")


def test_a_box_must_lie_inside(checkpoint: Path) -> None:
    reader = open_logical(checkpoint)
    for size, at in (((2, 64), (98, 0)), ((1,), (0,)), ((1, 1), (-1, 0)), ((1, 65), (0, 0))):
        with pytest.raises(ValueError, match=f"outside {HEAD}"):
            reader.fill(HEAD, torch.empty(size), at)


# ---------------------------------------------------------------------------------------------------------------------
# Other folders
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(checkpoint: Path) -> Path:
    """`weights` and `hf` of the same model."""
    path = checkpoint.parent
    assert command.convert_to(checkpoint, path / "weights", "weights", None) == 0
    assert command.convert_to(checkpoint, path / "hf", "huggingface", None) == 0
    return path


def test_every_kind_of_folder_has_the_same_tensors(folders: Path, checkpoint: Path, tmp_path: Path) -> None:
    weights = load_file(folders / "weights" / folder.SINGLE_NAME)
    for kind, path in (("checkpoint", checkpoint), ("weights", folders / "weights"), ("huggingface", folders / "hf")):
        reader = open_logical(path)
        _equal(reader, weights)
        assert (reader.kind, reader.main_dtype, reader.vocab_size) == (kind, torch.float32, VOCAB_SIZE)
        assert reader.config.training.precision == "fp32"
    convert.export_folder(folders / "weights", tmp_path / "hf")
    one, other = (sorted((path / "hf").iterdir()) for path in (folders, tmp_path))
    of_two_steps = {path.name for path in other}
    assert {path.name for path in one} == of_two_steps
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, other))


def _change(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / folder.SINGLE_NAME)
    change(tensors)
    save_file(tensors, path / folder.SINGLE_NAME, {"format": "pt"})


THEIR_NORM = "model.norm.weight"
WRONG_FOLDERS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "nan": ("hf", lambda path: _change(path, lambda t: t[THEIR_NORM].fill_(float("nan"))), f"{THEIR_NORM} holds NaN"),
    "inf": ("weights", lambda path: _change(path, lambda t: t[HEAD][-1].fill_(float("inf"))), f"{HEAD} holds NaN"),
    "missing": ("hf", lambda path: _change(path, lambda t: t.pop(THEIR_NORM)), f"no tensor {THEIR_NORM}"),
    "missing_ours": ("weights", lambda path: _change(path, lambda t: t.pop(NORM)), f"no tensor {NORM}"),
    "shape": (
        "weights",
        lambda path: _change(path, lambda t: t.update({NORM: torch.ones(3)})),
        f"tensor {NORM} of .* has shape \\[3\\], but its config calls for \\[64\\]",
    ),
    "cut": (
        "hf",
        lambda path: os.truncate(path / folder.SINGLE_NAME, (path / folder.SINGLE_NAME).stat().st_size - 3),
        "not a complete safetensors file",
    ),
}


@pytest.mark.parametrize("name", WRONG_FOLDERS)
def test_verify_says_what_is_wrong_with_a_folder(
    name: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, damage, says = WRONG_FOLDERS[name]
    path = Path(shutil.copytree(folders / kind, tmp_path / kind))
    assert command.main(["verify", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: good\n"
    damage(path)
    (path / checksums.FOLDER_SUMS).unlink(missing_ok=True)  # as whoever edits a folder does
    assert command.main(["verify", str(path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path}: ") and re.search(says, line), line
