"""Reads fp8 weights with scales, as DeepSeek-V3 (arXiv:2412.19437, section 3.3) publishes them, as dequantised weights.

X.weight in F8_E4M3 has its scales in X.weight_scale_inv: one for each block of `weight_block_size` (the last block of a
row or column may be partial), or one for the whole tensor. Numbers and scales are multiplied in fp32 and rounded once,
as transformers does with dequantize=True, a few rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from base.errors import ConfigError
from memory.read_only_file import BounceBuffers
from models.folder import WEIGHT_DTYPES, Reader, show_json
from models.huggingface.families import kinds
from models.huggingface.families.keys import FamilyKey, HfConfig, Keys, carried, irrelevant, only, read_keys, show
from models.weight_files.stored_tensors import BlockScale, StoredMatrix

WEIGHT_TYPE = "F8_E4M3"
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
SCALE, ACTIVATION_SCALE = "_scale_inv", ".activation_scale"  # X.weight_scale_inv and X.activation_scale of X.weight
BLOCK = kinds.Kind(
    "two whole numbers above 0, or null",
    lambda value: value is None or (isinstance(value, list) and len(value) == 2 and all(map(kinds.COUNT.fits, value))),
)
SECTION = "quantization_config"
COPY_AGAIN = "Copy the folder again."  # ends a message
# transformers dequantises every tensor with a scale, so the lists of excluded modules are not needed.
KEYS: Keys = {
    f"{SECTION}.{key}": row
    for key, row in {
        "quant_method": only("fp8"),
        "fmt": only("e4m3"),
        "weight_block_size": carried(BLOCK, [128, 128]),
        "activation_scheme": FamilyKey(kinds.ANYTHING, "dynamic", only=("dynamic", "static")),
        "scale_fmt": FamilyKey(kinds.ANYTHING, "float", only=("float", "ue8m0")),
        "expert_dtype": only("fp8"),
        "modules_to_convert": only(None, []),
        "modules_to_not_convert": irrelevant(kinds.or_null(kinds.TEXTS)),
        "ignored_layers": irrelevant(kinds.or_null(kinds.TEXTS)),
        "dequantize": irrelevant(),
    }.items()
}


@dataclass(frozen=True)
class Fp8:
    """The format of fp8 weights: the size of the block whose numbers share a scale."""

    block: tuple[int, int] | None  # rows and columns; None: one scale per tensor


def read_quantization(hf: HfConfig) -> Fp8 | None:
    """Return the format of the quantised weights that a config.json describes; None if they are not quantised. Raises
    ConfigError if the format is not supported."""
    section = hf.get(SECTION)
    if section is None:
        return None
    if not kinds.OBJECT.fits(section):
        raise ConfigError(
            f"config.json {SECTION} ({show_json(section)}) must be {kinds.OBJECT.rule}, or null. {COPY_AGAIN}"
        )
    method = section.get("quant_method")
    if method != "fp8":
        named = "bitsandbytes" if section.get("load_in_4bit") or section.get("load_in_8bit") else method
        raise ConfigError(
            f"config.json {SECTION}.quant_method ({show(named)}) is not supported: weights must be fp32, bf16 or fp16, "
            "or fp8 with scales (quant_method fp8). Use the model from before it was quantised."
        )
    unknown = [f"{SECTION}.{key} ({show(section[key])})" for key in section if f"{SECTION}.{key}" not in KEYS]
    if unknown:
        raise ConfigError(
            f"config.json {', '.join(unknown)} is not a known setting of fp8 weights. Use the model from before it was "
            "quantised."
        )
    keys = read_keys({f"{SECTION}.{key}": value for key, value in section.items()}, "quantised fp8", KEYS)
    block = keys[f"{SECTION}.weight_block_size"]
    return Fp8(None if block is None else (block[0], block[1]))


def open_weights(
    path: Path, quantization: Fp8 | None, dtype: str | None, bounce: BounceBuffers | None = None
) -> Reader:
    """Return a reader of a Hugging Face folder's weights, which dequantises fp8 to `dtype` (float32, ...; None: the
    type of the other weights). `bounce`: buffers for reads that bypass the page cache. Raises ConfigError."""
    if quantization is not None:
        return _Fp8Reader(path, quantization, dtype, bounce)
    reader = Reader(path, pickled=True, bounce=bounce)
    for name in sorted(reader.names()):
        if reader.dtype(name) == WEIGHT_TYPE:
            problem = f"has type {WEIGHT_TYPE}, but config.json has no {SECTION} that says how to dequantise it"
            raise _wrong(path, name, problem)
    return reader


def _wrong(folder: Path, name: str, problem: str) -> ConfigError:
    return ConfigError(f"tensor {name} of folder {folder} {problem}. {COPY_AGAIN}")


class _Fp8Reader(Reader):
    """Reader of a folder with fp8 weights: returns dequantised weights, and hides the tensors of their scales."""

    def __init__(self, path: Path, quantization: Fp8, dtype: str | None, bounce: BounceBuffers | None) -> None:
        super().__init__(path, pickled=True, bounce=bounce)
        self._block = quantization.block
        names = super().names()
        self._quantized = {name for name in names if super(_Fp8Reader, self).dtype(name) == WEIGHT_TYPE}
        if not self._quantized:
            raise ConfigError(
                f"config.json {SECTION} says that weights are fp8, but no tensor of folder {path} has type "
                f"{WEIGHT_TYPE}. Remove {SECTION} from config.json if these are the plain weights."
            )
        self._scales = {name for name in names if name.endswith(SCALE)}
        self._hidden = self._scales | {name for name in names if name.endswith(ACTIVATION_SCALE)}
        for name in sorted(self._quantized):
            self._check(name)
        for name in sorted(self._hidden):
            weight = (
                name.removesuffix(SCALE) if name in self._scales else f"{name.removesuffix(ACTIVATION_SCALE)}.weight"
            )
            if weight not in self._quantized:
                has = "is missing" if weight not in names else f"has type {super().dtype(weight)}"
                raise _wrong(path, name, f"is the scale of {weight}, which {has}; it must be {WEIGHT_TYPE}")
        plain = names - self._hidden - self._quantized
        self._dtype = super().main_dtype(plain) if dtype is None else getattr(torch, dtype)
        self._dtype_name = next(name for name, known in WEIGHT_DTYPES.items() if known == self._dtype)

    def _check(self, name: str) -> None:
        scale, shape = f"{name}{SCALE}", self.shape(name)
        if scale not in self._scales:
            raise _wrong(self.folder, name, f"has type {WEIGHT_TYPE}, but no scale tensor {scale}")
        if len(shape) != 2:
            problem = f"has shape {list(shape)}; with type {WEIGHT_TYPE} it must be a matrix"
            raise _wrong(self.folder, name, problem)
        kind = super().dtype(scale)
        if kind not in SCALE_TYPES:
            raise _wrong(self.folder, scale, f"has type {kind}; it must be {' or '.join(SCALE_TYPES)}")
        found = self.shape(scale)
        if self._block is None:
            if found not in ((), (1,), (1, 1)):
                raise ConfigError(
                    f"tensor {scale} of folder {self.folder} has shape {list(found)}; without config.json "
                    f"{SECTION}.weight_block_size it must be one number. Correct config.json, or copy the folder again."
                )
            return
        calls_for = tuple(-(-size // block) for size, block in zip(shape, self._block))
        if found != calls_for:
            raise ConfigError(
                f"tensor {scale} has shape {list(found)}, but config.json {SECTION}.weight_block_size "
                f"({list(self._block)}) calls for {list(calls_for)}, because {name} has shape {list(shape)}. Correct "
                "config.json, or copy the folder again."
            )

    def names(self) -> set[str]:
        """Return the names of all weights, without their scales."""
        return super().names() - self._hidden

    def dtype(self, name: str) -> str:
        """Return the type that a weight has when it is read, as safetensors spells it."""
        return self._dtype_name if name in self._quantized else super().dtype(name)

    def stored(self, name: str) -> StoredMatrix:
        """Return the location of a weight in its file, with its scales if it is quantised. Raises ConfigError."""
        stored = super().stored(name)
        if name not in self._quantized:
            return stored
        return replace(stored, scale=BlockScale(super().stored(f"{name}{SCALE}"), self._block, self._dtype))
