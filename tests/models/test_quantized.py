"""Weights in fp8 with scales become the plain weights that transformers makes of them, bit for bit; others are refused
by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from base.errors import ConfigError
from models import convert
from models.huggingface import tensors
from models.weight_files.stored_tensors import BlockScale, StoredMatrix, as_matrix, fill, whole
from tests.models.mutations import DEEPSEEK

pytestmark = pytest.mark.fast

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 8], "activation_scheme": "dynamic"}
QUERY = "model.layers.1.self_attn.q_b_proj.weight"
Edit = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]


def _blocks(num_rows: int, num_columns: int, block: tuple[int, int]) -> tuple[int, int]:
    return -(-num_rows // block[0]), -(-num_columns // block[1])


def _random(
    num_rows: int, num_columns: int, block: tuple[int, int], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = (100 * torch.randn(num_rows, num_columns, generator=generator)).to(torch.float8_e4m3fn)
    return weight, torch.rand(_blocks(num_rows, num_columns, block), generator=generator) + 1e-4


def _dequantize(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """The weight as our reader dequantises it."""

    def stored(name: str, tensor: torch.Tensor) -> StoredMatrix:
        return StoredMatrix(name, lambda: tensor, 0, tensor.dtype, *as_matrix(tensor.shape))

    result = torch.empty(weight.shape, dtype=dtype)
    fill(result, [whole(replace(stored("weight", weight), scale=BlockScale(stored("scale", scale), block, dtype)))])
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_whole_blocks_are_those_of_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    theirs = Fp8Dequantize(None)
    for num_rows, num_columns, block in (
        (256, 384, (128, 128)),
        (64, 100, (64, 100)),
        (6, 8, (2, 4)),
        (300, 5, (100, 5)),
    ):
        weight, scale = _random(num_rows, num_columns, block)
        for kind in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
            expected = theirs._dequantize_one(weight, scale.to(kind), dtype)
            assert torch.equal(_dequantize(weight, scale.to(kind), block, dtype), expected)
    for one in (torch.tensor(0.37), torch.tensor([0.37]), torch.tensor([[0.37]])):
        expected = theirs._dequantize_one(weight, one, dtype)
        assert torch.equal(_dequantize(weight, one, None, dtype), expected)


def test_a_partial_block_ends_where_the_tensor_ends() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight

    # 576 x 7168 is DeepSeek-V3's. The grid divides 192, but its blocks are of 128 and 64, as they were made.
    for num_rows, num_columns in ((576, 7168), (192, 130), (127, 129), (1, 300), (448, 1)):
        weight, scale = _random(num_rows, num_columns, (128, 128))
        ours = _dequantize(weight, scale, (128, 128), torch.bfloat16)
        expected = _dequantize_fp8_weight(weight.clone(), scale, [128, 128], torch.float32).to(torch.bfloat16)
        assert torch.equal(ours, expected)
    with pytest.raises(ValueError, match="not divisible"):  # as transformers' own import of such a tensor ends
        Fp8Dequantize(None)._dequantize_one(*_random(576, 256, (128, 128)), torch.bfloat16)


def _quantize(tensors: dict[str, torch.Tensor], block: tuple[int, int]) -> None:
    """Projections in fp8 with scales, as DeepSeek-V3 has them."""
    for name in [name for name in tensors if name.endswith("proj.weight") or "kv_a_proj" in name]:
        num_rows, num_columns = tensors[name].shape
        tensors[name], tensors[f"{name}_scale_inv"] = _random(num_rows, num_columns, block, len(name))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    path = tmp_path_factory.mktemp("fp8") / "hf"
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)).to(torch.bfloat16).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    _quantize(tensors, (4, 8))
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    tensors.update({name: tensors[name].float() for name in biases})
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    return path


def _edited(source: Path, target: Path, edit: Edit) -> Path:
    shutil.copytree(source, target)
    tensors, config = load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())
    edit(tensors, config)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


def _round_trip(source: Path, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    assert convert.main(["import", str(source), str(folder / "ours")]) == 0
    assert convert.main(["export", str(folder / "ours"), str(folder / "again")]) == 0
    return load_file(folder / "again" / "model.safetensors"), json.loads((folder / "again" / "config.json").read_text())


def test_a_quantised_folder_leaves_as_plain_weights(quantized: Path, tmp_path: Path) -> None:
    tensors, config = _round_trip(quantized, tmp_path)
    held = load_file(quantized / "model.safetensors")
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    assert tensors.keys() == {name for name in held if not name.endswith("_scale_inv")}
    for name, tensor in tensors.items():
        expected, scale = held[name], held.get(f"{name}_scale_inv")
        if scale is not None:
            of_rows = scale.repeat_interleave(4, 0)[: len(expected)]
            spread = of_rows.repeat_interleave(8, 1)[:, : expected.size(1)]
            expected = (expected.float() * spread).to(torch.bfloat16)
        assert torch.equal(tensor, expected), name


def _one_scale(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = torch.tensor(0.25)
        tensors[name.replace("weight_scale_inv", "activation_scale")] = torch.tensor(7.0)
    config["quantization_config"] |= {"weight_block_size": None, "activation_scheme": "static"}


def test_one_scale_a_tensor(quantized: Path, tmp_path: Path) -> None:
    path = _edited(quantized, tmp_path / "hf", _one_scale)
    held = load_file(path / "model.safetensors")[QUERY]
    assert torch.equal(_round_trip(path, tmp_path)[0][QUERY], (held.float() * 0.25).to(torch.bfloat16))


ACCEPTED: dict[str, tuple[Edit, torch.dtype]] = {
    "no_dtype": (lambda t, c: c.pop("dtype"), torch.bfloat16),
    "ue8m0": (lambda t, c: c["quantization_config"].update(scale_fmt="ue8m0"), torch.bfloat16),
    "left_out": (
        lambda t, c: c["quantization_config"].update(modules_to_not_convert=["lm_head", "embed_tokens"]),
        torch.bfloat16,
    ),
    "further_layer": (
        lambda t, c: [
            c.update(num_nextn_predict_layers=1),
            t.update({name.replace(".1.", ".2."): tensor.clone() for name, tensor in t.items() if ".1.self" in name}),
        ],
        torch.bfloat16,
    ),
    "bf16_scale": (
        lambda t, c: t.update({f"{QUERY}_scale_inv": t[f"{QUERY}_scale_inv"].to(torch.bfloat16)}),
        torch.bfloat16,
    ),
    "fp32": (
        lambda t, c: [
            c.update(dtype="float32"),
            t.update({name: tensor.float() for name, tensor in t.items() if tensor.dtype == torch.bfloat16}),
        ],
        torch.float32,
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_other_spellings(name: str, quantized: Path, tmp_path: Path) -> None:
    edit, dtype = ACCEPTED[name]
    assert tensors.open_folder(_edited(quantized, tmp_path / "hf", edit)).dtype is dtype


def _settings(**changes: Any) -> Edit:
    return lambda tensors, config: config["quantization_config"].update(changes)


REFUSED: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "no_scale": (lambda t, c: t.pop(f"{QUERY}_scale_inv"), (QUERY, "no scale")),
    "no_weight": (lambda t, c: t.pop(QUERY), (f"{QUERY}_scale_inv", "is missing")),
    "plain_weight": (lambda t, c: t.update({QUERY: t[QUERY].to(torch.bfloat16)}), (f"{QUERY}_scale_inv", "type BF16")),
    "scale_rows": (
        lambda t, c: t.update({f"{QUERY}_scale_inv": t[f"{QUERY}_scale_inv"][:-1]}),
        (f"{QUERY}_scale_inv", "has shape", "weight_block_size ([4, 8]) calls for [10, 2]"),
    ),
    "one_number": (
        lambda t, c: t.update({f"{QUERY}_scale_inv": torch.tensor(1.0)}),
        (f"{QUERY}_scale_inv", "has shape []"),
    ),
    "scale_of_numbers": (
        lambda t, c: t.update({f"{QUERY}_scale_inv": t[f"{QUERY}_scale_inv"].to(torch.uint8)}),
        (f"{QUERY}_scale_inv", "type U8"),
    ),
    "weight_shape": (
        lambda t, c: t.update({QUERY: t[QUERY][:-1].clone()}),
        (f"tensor {QUERY} has shape [39, 10]", "[40, 10]"),
    ),
    "norm_quantised": (
        lambda t, c: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
        ("model.norm.weight", "no scale"),
    ),
    "other_fp8": (lambda t, c: t.update({QUERY: t[QUERY].float().to(torch.float8_e5m2)}), (QUERY, "F8_E5M2")),
    "other_block": (_settings(weight_block_size=[8, 8]), ("_scale_inv", "weight_block_size ([8, 8])")),
    "no_block": (_settings(weight_block_size=None), ("_scale_inv", "one number")),
    "block_a_number": (_settings(weight_block_size=128), ("quantization_config.weight_block_size (128)",)),
    "format": (_settings(fmt="e5m2"), ("quantization_config.fmt (e5m2)", "e4m3")),
    "unknown": (_settings(colour="red"), ("quantization_config.colour (red)",)),
    "fp4_experts": (_settings(expert_dtype="fp4"), ("quantization_config.expert_dtype (fp4)",)),
    "not_said": (lambda t, c: c.pop("quantization_config"), ("has type F8_E4M3",)),
    "nothing_is": (
        lambda t, c: [
            t.update({name: tensor.to(torch.bfloat16) for name, tensor in t.items()}),
            [t.pop(name) for name in list(t) if name.endswith("_scale_inv")],
        ],
        ("quantization_config", "no tensor"),
    ),
    **{
        method: (_settings(quant_method=method), (f"quant_method ({method})", "before it was quantised"))
        for method in ("gptq", "awq", "mxfp4", "compressed-tensors", "fbgemm_fp8", "modelopt", "torchao")
    },
    "bitsandbytes": (
        lambda t, c: c.update(quantization_config={"load_in_4bit": True}),
        ("quant_method (bitsandbytes)",),
    ),
    "no_method": (lambda t, c: c.update(quantization_config={}), ("quant_method (null)",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name: str, quantized: Path, tmp_path: Path) -> None:
    edit, says = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        tensors.open_folder(_edited(quantized, tmp_path / "hf", edit))
    assert all(text in str(error.value) for text in says), error.value
    assert "\n" not in str(error.value)
