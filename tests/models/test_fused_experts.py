"""Folders whose experts stand in one tensor a layer are the models that transformers means by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from base.errors import ConfigError
from models import convert
from models.folder import Reader
from models.huggingface.tensors import open_folder

pytestmark = pytest.mark.fast

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "intermediate_size": 24,
    "num_experts_per_tok": 2,
}
LATENT: dict[str, Any] = {
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 3, "moe_intermediate_size": 8, "head_dim": 8, "mlp_only_layers": [0]},
    "Mixtral": {"num_local_experts": 3},
    "Olmoe": {"num_experts": 3},
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
}


def _both(family: str, path: Path) -> tuple[Path, Path]:
    """One model as a folder with fused experts, and as one with a tensor for each."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(path / "fused", save_original_format=False)
    model.save_pretrained(path / "single")
    return path / "fused", path / "single"


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_experts_are_read_as_single_ones(family: str, tmp_path: Path) -> None:
    fused, single = _both(family, tmp_path)
    assert any(name.endswith("experts.gate_up_proj") for name in Reader(fused).names())
    assert convert.main(["import", str(fused), str(tmp_path / "one")]) == 0
    assert convert.main(["import", str(single), str(tmp_path / "other")]) == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_fused_experts_of_a_pickled_folder(tmp_path: Path) -> None:
    fused, single = _both("Mixtral", tmp_path)
    torch.save(load_file(fused / "model.safetensors"), fused / "pytorch_model.bin")
    (fused / "model.safetensors").unlink()
    one, other = open_folder(fused), open_folder(single)
    assert list(one.names()) == list(other.names())
    assert all(torch.equal(one.get(name), other.get(name)) for name in one.names())


def test_fused_experts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    fused, _ = _both("Olmoe", tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors = load_file(fused / "model.safetensors")
    whole = tensors[name]
    for wrong in (whole[:2], whole[:, :-2], whole.transpose(1, 2), whole.flatten(0, 1)):
        save_file({**tensors, name: wrong.contiguous()}, fused / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError) as error:
            open_folder(fused)
        assert f"tensor {name} has shape {list(wrong.shape)}, but config.json calls for [3, 48, 16]" in str(error.value)
    twin = {"model.layers.1.mlp.experts.2.up_proj.weight": whole[2, 24:].clone()}
    save_file({**tensors, **twin}, fused / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"has tensor .*experts.2.up_proj.weight twice: as a separate tensor, and as rows of"
    ):
        open_folder(fused)
