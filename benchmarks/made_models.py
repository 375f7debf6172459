"""Writes a Hugging Face folder of random weights as fast as the disk takes it, of any size:
`python -m benchmarks.made_models llama FOLDER --gigabytes 2 [--dtype bfloat16] [--layers 1] [--logical]`.

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
from collections.abc import Iterator
from pathlib import Path

import torch

from base import command
from base.errors import ConfigError
from benchmarks.made_sizes import PRESETS, WORDS, made_config, num_layers, tensor_shapes, weights_bytes
from configs.architecture import description
from configs.weights import config_from
from models import folder as folders
from models.huggingface import special_tokens, translate
from models.huggingface.families.keys import HfConfig
from models.weight_files.choice import INDEX_NAME, SINGLE_NAME
from parallel.dtypes import SAFETENSORS_NAMES

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
