"""Writes a Hugging Face folder of random weights as fast as the disk takes it, of any size:
`python -m benchmarks.kit.made_models llama FOLDER --gigabytes 2 [--dtype bfloat16] [--layers 1] [--logical]`.

No model is built. All tensors are pieces of one random block, each from a place of its own: values are normal, no two
tensors or experts are alike, and a forward pass stays finite. `--logical` writes what `python -m models.convert import`
would make of such a folder, with other values: the decoder's own layout, config.yaml in place of config.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from base import command
from base.errors import ConfigError
from configs.architecture import description
from configs.weights import config_from
from models import folder as folders
from models.huggingface import special_tokens, translate
from models.huggingface.families.keys import HfConfig
from models.huggingface.families.rules import Family, sizes
from models.huggingface.tensors import expand_rules
from models.weight_files.choice import INDEX_NAME, SINGLE_NAME
from models.weight_files.expected import logical_shapes
from parallel.dtypes import SAFETENSORS_NAMES

SMALLEST, WIDEST, STEP = 256, 12288, 256  # hidden sizes that are tried; wide ones in steps of twice that
ROPE = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}


@dataclass(frozen=True)
class Proportions:
    """How a family's published model grows: config.json at a hidden size and a number of layers, of which `layers` go
    with `hidden`, and what the plain words of the command line are called in it."""

    hidden: int
    layers: int
    config: Callable[[int, int], HfConfig]
    keys: dict[str, str]  # word -> key


def _rounded(value: float, multiple: int = 32) -> int:
    return max(multiple, round(value / multiple) * multiple)


def _llama(hidden: int, layers: int) -> HfConfig:
    """Llama 3's 8B: as wide as Llama 2's, with fewer heads of keys."""
    heads = hidden // (128 if hidden >= 2048 else 64)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": _rounded(hidden * 3.5),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "vocab_size": 32000,
        **ROPE,
    }


def _mixtral(hidden: int, layers: int) -> HfConfig:
    """Mixtral 8x7B."""
    return {
        **_llama(hidden, layers),
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }


def _qwen3_moe(hidden: int, layers: int) -> HfConfig:
    """Qwen3-30B-A3B, with a smaller vocabulary."""
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": _rounded(hidden * 0.375),
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "head_dim": 128,
        "num_attention_heads": max(4, hidden // 64),
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        **ROPE,
    }


def _deepseek_v3(hidden: int, layers: int) -> HfConfig:
    """DeepSeek-V3 with 64 experts."""
    heads = max(4, hidden // 56)
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": _rounded(hidden * 18 / 7),
        "moe_intermediate_size": _rounded(hidden * 2 / 7),
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": min(1, layers - 1),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": _rounded(hidden * 3 / 14),
        "kv_lora_rank": _rounded(hidden / 14),
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 32000,
        **ROPE,
    }


def _gpt2(hidden: int, layers: int) -> HfConfig:
    """GPT-2 XL."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": hidden // 64,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


_WORDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "vocab": "vocab_size",
}
_EXPERT_WORDS = {**_WORDS, "top_k": "num_experts_per_tok", "expert_ffn": "moe_intermediate_size"}
PRESETS = {
    "llama": Proportions(4096, 32, _llama, _WORDS),
    "mixtral": Proportions(
        4096, 32, _mixtral, {**_WORDS, "experts": "num_local_experts", "top_k": "num_experts_per_tok"}
    ),
    "qwen3_moe": Proportions(2048, 48, _qwen3_moe, {**_EXPERT_WORDS, "experts": "num_experts"}),
    "deepseek_v3": Proportions(7168, 61, _deepseek_v3, {**_EXPERT_WORDS, "experts": "n_routed_experts"}),
    "gpt2": Proportions(
        1600,
        48,
        _gpt2,
        {"layers": "n_layer", "hidden": "n_embd", "ffn": "n_inner", "heads": "n_head", "vocab": "vocab_size"},
    ),
}
WORDS = ("layers", "hidden", "ffn", "experts", "expert_ffn", "top_k", "heads", "groups", "vocab")


def made_config(
    family: str, num_bytes: float | None = None, dtype: str = "bfloat16", fixed: dict[str, int] | None = None
) -> HfConfig:
    """config.json of a model of `num_bytes` or a little more in the family's proportions; `fixed` holds words of WORDS
    and their values. None: `fixed` must have `hidden` and `layers`. Raises ValueError."""
    preset, fixed = PRESETS[family], fixed or {}
    if unknown := sorted(fixed.keys() - preset.keys.keys()):
        raise ValueError(f"{family} has no {unknown[0]}: it has {', '.join(preset.keys)}")

    def config(hidden: int, layers: int) -> HfConfig:
        found = preset.config(hidden, layers)
        return {**found, **{preset.keys[word]: value for word, value in fixed.items()}, "dtype": dtype}

    if num_bytes is None:
        if not {"hidden", "layers"} <= fixed.keys():
            raise ValueError("give gigabytes, or both layers and hidden")
        return config(fixed["hidden"], fixed["layers"])
    best: tuple[float, HfConfig] | None = None
    for hidden in [fixed["hidden"]] if "hidden" in fixed else _hidden_sizes():
        if "layers" in fixed:
            found = config(hidden, fixed["layers"])
            distance = abs(math.log(weights_bytes(found) / num_bytes))
        else:
            two, three = (weights_bytes(config(hidden, layers)) for layers in (2, 3))
            layers = max(1, math.ceil((num_bytes - two) / (three - two)) + 2)
            found = config(hidden, layers)
            distance = abs(math.log(layers / hidden * preset.hidden / preset.layers))
        if best is None or distance < best[0]:
            best = distance, found
    assert best is not None
    return best[1]


def one_layer(config: HfConfig) -> HfConfig:
    """Return the same config with one layer, which has experts if the model has any."""
    layers = "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"
    return {**config, layers: 1, **({"first_k_dense_replace": 0} if "first_k_dense_replace" in config else {})}


def tensor_shapes(config: HfConfig, logical: bool = False) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Hugging Face folder, layer by layer; `logical`: of a folder of logical
    weights. Raises ConfigError for a config.json that is not accepted."""
    family, ours = _read(config)
    lengths = sizes(ours)
    shapes = logical_shapes(ours, lengths["vocab"])
    found: dict[str, tuple[int, ...]] = {}
    for rule in _in_order(list(expand_rules(family, ours))):
        if not logical:
            found.update(zip(rule.theirs, rule.shapes(lengths), strict=True))
        elif not rule.unread:
            found[rule.ours] = shapes[rule.ours]
    return found


def weights_bytes(config: HfConfig) -> int:
    """Return the bytes of all tensors."""
    width = {"bfloat16": 2, "float16": 2, "float32": 4}[config["dtype"]]
    return width * sum(math.prod(shape) for shape in tensor_shapes(config).values())


def num_layers(config: HfConfig) -> int:
    return int(config["n_layer"] if config["model_type"] == "gpt2" else config["num_hidden_layers"])


def _read(config: HfConfig) -> tuple[Family, Any]:
    family, _, overrides = translate.read_config(config)
    return family, config_from(overrides)


def _in_order(rules: list[Any]) -> Iterable[Any]:
    """Sort tensors layer by layer, as in saved models."""

    def layer_of(rule: Any) -> int:
        words = rule.ours.split(".")
        if words[1] == "layers":
            return int(words[2])
        return -1 if words[0] == "embedding" else len(rules)

    return sorted(rules, key=layer_of)


def _hidden_sizes() -> list[int]:
    narrow = list(range(SMALLEST, 2048, STEP))
    return narrow + list(range(2048, WIDEST + 1, 2 * STEP))


DTYPES = ("bfloat16", "float16", "float32")
MAX_FILE_BYTES = 2 * 10**9
# Odd numbers, so that a tensor's rows never meet their like in the next one, nor in the block's next round.
BLOCK = 2**24 - 3  # elements
STRIDE = 7_368_787
# Standard deviations. A row of inputs of length 1 gives INNER, whatever the width. EMBEDDING decides how much of a
# hidden state is the token's own: with that of other weights all tokens soon choose the same experts, with 1.0 each has
# its own. 0.12 is in between: a least-recently-used cache of a quarter of 128 experts in 23 layers hit half of the
# requests, and the next layer's router predicted 81% of its experts from this layer's input.
INNER, EMBEDDING = 0.55, 0.12
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")
OUTPUTS = ("o_proj.weight", "down_proj.weight", "w2.weight", "c_proj.weight", "linear_proj.weight", "linear_fc2.weight")
FREE_BYTES = 10**9  # of the disk that must stay free
ALIGNMENT = 8  # safetensors': of a header


def write_made_model(
    folder: Path, config: HfConfig, *, seed: int = 0, max_file_bytes: int = MAX_FILE_BYTES, logical: bool = False
) -> int:
    """Write a folder with config.json `config` (of `made_config`), in files of at most `max_file_bytes`; return the
    bytes of its weights. Raises ValueError if the folder exists or the disk is too full."""
    total = weights_bytes(config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if os.path.lexists(folder):
        raise ConfigError(f"output folder {folder} exists. Try another name.")
    if free < total + FREE_BYTES:
        raise ConfigError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, but the weights take {total / 1e9:.1f} GB and "
            f"{FREE_BYTES / 1e9:.0f} GB must stay free."
        )
    dtype = getattr(torch, config["dtype"])
    # The deviation of layers whose outputs are summed is GPT-2's: the sum does not grow with the number of layers.
    size = min(BLOCK, total // dtype.itemsize | 1)
    inner = INNER / math.sqrt(config["n_embd" if config["model_type"] == "gpt2" else "hidden_size"])
    blocks = _Blocks(size, dtype, seed, (inner, inner / math.sqrt(2 * num_layers(config)), EMBEDDING))
    with folders.new_folder(folder) as partial:
        _write_files(partial, tensor_shapes(config, logical), dtype, blocks, max_file_bytes)
        if logical:
            family, _, overrides = translate.read_config(config)
            special = special_tokens.of_config(config, config["vocab_size"])
            folders.write_config(partial, description(config_from(overrides), config["vocab_size"]), special)
        else:
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return total


class _Blocks:
    """Blocks of random elements, and spans of them for tensors."""

    def __init__(self, size: int, dtype: torch.dtype, seed: int, stds: tuple[float, float, float]) -> None:
        normal = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        self.size, self.width = size, dtype.itemsize
        self.inner, self.output, self.embedding = (self._bytes((normal * std).to(dtype)) for std in stds)
        self.ones = self._bytes(torch.ones(2**20, dtype=dtype))
        self.zeros = self._bytes(torch.zeros(2**20, dtype=dtype))
        self.num_tensors = 0

    @staticmethod
    def _bytes(tensor: torch.Tensor) -> memoryview:
        return memoryview(tensor.view(torch.uint8).numpy().data)

    def spans(self, name: str, num_elements: int) -> Iterator[memoryview]:
        """Yield the bytes of the next tensor."""
        self.num_tensors += 1
        left = num_elements * self.width
        if name.endswith("bias"):
            block, start = self.zeros, 0
        elif "norm" in name or ".ln_" in name:
            block, start = self.ones, 0
        else:
            block = self.inner
            if name.endswith(OUTPUTS):
                block = self.output
            elif name.endswith(EMBEDDINGS):
                block = self.embedding
            start = self.num_tensors * STRIDE % self.size * self.width
        while left:
            span = block[start : start + left]
            yield span
            left, start = left - len(span), 0


def _write_files(
    folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, blocks: _Blocks, max_file_bytes: int
) -> None:
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        width = math.prod(shape) * dtype.itemsize
        if files[-1] and size + width > max_file_bytes:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += width
    if len(files) == 1:
        _write_file(folder / SINGLE_NAME, files[0], dtype, blocks)
        return
    weight_map = {}
    for index, held in enumerate(files):
        name = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / name, held, dtype, blocks)
        weight_map.update(dict.fromkeys(held, name))
    total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index_file, indent=2, sort_keys=True) + "\n")


def _write_file(path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, blocks: _Blocks) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, shape in shapes.items():
            for span in blocks.spans(name, math.prod(shape)):
                file.write(span)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # others need the memory more


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=list(PRESETS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, help="of the weights at least, in the family's proportions")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    for word in WORDS:
        parser.add_argument(f"--{word.replace('_', '-')}", type=int, help="given, and not by the proportions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part-gigabytes", type=float, default=MAX_FILE_BYTES / 1e9, help="of a file at most (2)")
    parser.add_argument("--logical", action="store_true", help="a folder of logical weights")
    options = parser.parse_args(arguments)
    fixed = {word: getattr(options, word) for word in WORDS if getattr(options, word) is not None}

    def write() -> None:
        num_bytes = None if options.gigabytes is None else options.gigabytes * 1e9
        config = made_config(options.family, num_bytes, options.dtype, fixed)
        begin = time.perf_counter()
        max_file_bytes = int(options.part_gigabytes * 1e9)
        total = write_made_model(
            options.folder, config, seed=options.seed, max_file_bytes=max_file_bytes, logical=options.logical
        )
        seconds = time.perf_counter() - begin
        print(
            f"wrote {options.folder}: {total / 1e9:.2f} GB, {num_layers(config)} layers, in {seconds:.1f} s "
            f"({total / seconds / 1e6:.0f} MB/s)"
        )

    return command.run(write)


if __name__ == "__main__":
    sys.exit(main())
