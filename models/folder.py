"""Folders of safetensors: a streaming reader and writer, and the folder of logical weights with its config.yaml.

Both Hugging Face folders and ours hold `model.safetensors`, or parts of at most PART_BYTES with an index. Tensors pass one
at a time, and the writer keeps at most one part in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from configs import derived
from configs.schema import Config, ConfigError
from models.weights import gather_logical, load_logical

PART_BYTES = 2 * 1024**3
INDEX_NAME = "model.safetensors.index.json"
FORMAT = "mixtrain-weights-1"


class Reader:
    """Reads tensors by name from a folder's model.safetensors or its parts. Raises ConfigError where they are missing or broken."""

    def __init__(self, folder: Path) -> None:
        # Folders may keep a second copy in another format beside these (consolidated.safetensors).
        index, single = folder / INDEX_NAME, folder / "model.safetensors"
        if index.is_file():
            paths = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        elif single.is_file():
            paths = [single]
        else:
            raise ConfigError(f"folder {folder} must hold model.safetensors or {INDEX_NAME} and its parts.")
        self.folder = folder
        try:
            self._files = [safe_open(path, framework="pt") for path in paths]
        except Exception as error:  # safetensors raises its own SafetensorError and OSError, with the path in neither
            raise ConfigError(f"folder {folder} holds a broken safetensors file ({error}); copy it again.") from error
        self._file_of = {name: file for file in self._files for name in file.keys()}

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def dtype(self, name: str) -> torch.dtype:
        """The type of the tensor called `name`, without reading it."""
        return self._file_of[name].get_slice(name)[:0].dtype

    def get(self, name: str) -> torch.Tensor:
        """The tensor called `name`, on the host. Raises ConfigError if there is none."""
        if name not in self._file_of:
            raise ConfigError(f"folder {self.folder} has no tensor {name}: it was written for another model.")
        return self._file_of[name].get_tensor(name)


class Writer:
    """Collects tensors and writes a part whenever `part_bytes` are full; `close` numbers the parts and writes the index."""

    def __init__(self, folder: Path, part_bytes: int = PART_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.part_bytes = part_bytes
        self._part: dict[str, torch.Tensor] = {}
        self._part_size = 0
        self._parts: list[list[str]] = []
        self._total_size = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor (copied to the host)."""
        size = tensor.numel() * tensor.element_size()
        if self._part and self._part_size + size > self.part_bytes:
            self._flush()
        self._part[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._part_size += size
        self._total_size += size

    def close(self) -> None:
        """Write what is left, the final file names and the index."""
        self._flush()
        count = len(self._parts)
        if count == 1:
            self._path(0).rename(self.folder / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self._parts):
            final = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._path(i).rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total_size}, "weight_map": weight_map}
        (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _flush(self) -> None:
        if self._part:
            save_file(self._part, self._path(len(self._parts)), metadata={"format": "pt"})
            self._parts.append(list(self._part))
            self._part, self._part_size = {}, 0

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part}.safetensors"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes the name `folder` only when the block ends well. Raises ConfigError if that is in use."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"output folder {folder} must be new or empty. Try another name.")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.replace(folder)


def save_logical_folder(
    chunks: Sequence[torch.nn.Module], folder: str | Path, config: Config, vocab_size: int, dtype: torch.dtype | None = None
) -> None:
    """Write the logical weights of all ranks' `chunks` and their config.yaml to a new folder, as `dtype` (None: as they are); every
    rank calls it, rank 0 writes."""
    if dist.get_rank() != 0:
        for _ in gather_logical(chunks):
            pass
        dist.barrier()
        return
    with new_folder(Path(folder)) as partial:
        writer = Writer(partial)
        for name, tensor in gather_logical(chunks):
            writer.add(name, tensor if dtype is None else tensor.to(dtype))
        writer.close()
        write_config(partial, description(config, vocab_size))
    dist.barrier()


def load_logical_folder(chunks: Sequence[torch.nn.Module], folder: str | Path, config: Config, vocab_size: int) -> None:
    """Fill this rank's `chunks`, in any layout, from a folder of logical weights. Raises ConfigError for another model's."""
    folder = Path(folder)
    theirs = read_config(folder)
    wrong = [
        f"{section}.{key} is {value}, the folder's {theirs[section].get(key)}"
        for section, values in architecture(config, vocab_size).items()
        for key, value in values.items()
        if theirs[section].get(key) != value
        # Rotary positions have no weights of a length, and both sentence heads have the same.
        and not (key == "sequence_length" and config.model.position_embedding == "rope")
        and not (key == "sentence_head" and "none" not in (value, theirs[section].get(key)))
    ]
    if wrong:
        raise ConfigError(f"weights in {folder} are of another model: {'; '.join(wrong)}. Take the values of {folder / 'config.yaml'}.")
    reader = Reader(folder)
    try:
        load_logical(chunks, reader.get)
    except ValueError as error:
        raise ConfigError(f"weights in {folder} do not fit: {error}.") from error


def write_config(folder: Path, overrides: dict[str, dict[str, Any]]) -> None:
    """Write config.yaml: the model as overrides of the sections `model` and `moe`."""
    (folder / "config.yaml").write_text(yaml.safe_dump({"format": FORMAT, **overrides}, sort_keys=False))


def read_config(folder: Path) -> dict[str, dict[str, Any]]:
    """The overrides of a folder of logical weights. Raises ConfigError where there is no such folder."""
    path = folder / "config.yaml"
    content = yaml.safe_load(path.read_text()) if path.is_file() else None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"folder {folder} must hold a config.yaml of format {FORMAT}, as `python -m models.convert import` writes it.")
    return {"model": content["model"], "moe": content["moe"]}


def config_from(overrides: dict[str, dict[str, Any]]) -> Config:
    """A Config with these keys replaced. Raises ConfigError for an unknown key."""
    config = Config()
    for section, values in overrides.items():
        target = getattr(config, section)
        unknown = set(values) - {field.name for field in fields(target)}
        if unknown:
            raise ConfigError(f"{section}.{min(unknown)} is no key of this version.")
        for key, value in values.items():
            setattr(target, key, value)
    return config


def architecture(config: Config, vocab_size: int) -> dict[str, dict[str, Any]]:
    """What decides names, shapes and meaning of the weights, with every default spelled out; equal for equal models."""
    model = {key: value for key, value in asdict(config.model).items() if key not in _NOT_ARCHITECTURE}
    model["vocab_size"] = vocab_size
    model["ffn_hidden_size"] = derived.ffn_hidden_size(config)
    model["num_query_groups"] = derived.num_query_groups(config)
    model["head_dim"] = derived.head_dim(config)
    model["qkv_bias"] = model["qkv_bias"] or model["linear_bias"]
    if model["attention"] == "grouped":
        for key in _LATENT_ONLY:
            del model[key]
    else:
        del model["num_query_groups"]
    if not model["qk_norm"] or model["qk_norm_over"] == "head":
        del model["qk_norm_over"]
    if model["position_embedding"] != "rope":
        del model["rotary_base"], model["rotary_fraction"]
    if model["family"] != "bert":
        del model["sentence_head"]
    moe: dict[str, Any] = {"num_experts": config.moe.num_experts}
    if config.moe.num_experts is not None:
        moe = {key: getattr(config.moe, key) for key in _MOE_ARCHITECTURE}
        moe["ffn_hidden_size"] = derived.expert_ffn_hidden_size(config)
        moe["layers"] = derived.moe_layer_pattern(config)
        if all(moe["layers"]):
            model["ffn_hidden_size"] = moe["ffn_hidden_size"]  # no dense layer: the value means nothing
    return {"model": model, "moe": moe}


def description(config: Config, vocab_size: int) -> dict[str, dict[str, Any]]:
    """`architecture`, and the other values of the model that its training was set up with: what config.yaml holds."""
    overrides = architecture(config, vocab_size)
    overrides["model"].update((key, getattr(config.model, key)) for key in ("hidden_dropout", "attention_dropout", "init_std"))
    return overrides


_LATENT_ONLY = ("attention", "q_lora_rank", "kv_lora_rank", "rotary_head_dim", "value_head_dim")
_NOT_ARCHITECTURE = {"hidden_dropout", "attention_dropout", "init_std", "backend"}
_MOE_ARCHITECTURE = (
    "num_experts",
    "top_k",
    "ffn_hidden_size",
    "shared_expert_ffn_hidden_size",
    "layers",
    "router_score",
    "normalize_top_k",
    "routed_scaling_factor",
    "expert_bias",
    "num_groups",
    "group_top_k",
)
