"""Made models: every family opens and generates, no two tensors are alike; the same decoder over mapped weights."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from base.errors import ConfigError
from benchmarks.kit import made_models, token_times
from benchmarks.kit.made_models import (
    PRESETS,
    made_config,
    num_layers,
    one_layer,
    tensor_shapes,
    weights_bytes,
    write_made_model,
)
from benchmarks.kit.token_times import mapped_weights
from inference.decoder import TextBatch
from inference.generation import generate
from inference.open_model import open_model
from models.folder import Reader
from models.huggingface.tensors import open_folder

FIXED = {
    "llama": {"layers": 2, "hidden": 64, "heads": 4, "groups": 2, "vocab": 300},
    "mixtral": {"layers": 2, "hidden": 64, "heads": 4, "groups": 2, "vocab": 300, "ffn": 96},
    "qwen3_moe": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 300, "experts": 16, "top_k": 4, "expert_ffn": 48},
    "deepseek_v3": {"layers": 2, "hidden": 64, "heads": 4, "groups": 4, "vocab": 300, "experts": 16, "expert_ffn": 48},
    "gpt2": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 300},
}


def _num_bytes(reader: Reader) -> int:
    return sum(4 * math.prod(reader.shape(name)) for name in reader.names())


def test_every_preset_is_tried() -> None:
    assert set(FIXED) == set(PRESETS)


@pytest.mark.parametrize("logical", [False, True])
@pytest.mark.parametrize("family", list(FIXED))
def test_opens_and_generates(family: str, logical: bool, tmp_path: Path) -> None:
    config = made_config(family, dtype="float32", fixed=FIXED[family])
    folder = tmp_path / "made"
    total = write_made_model(folder, config, max_file_bytes=200_000, logical=logical)
    assert total == weights_bytes(config) == _num_bytes(Reader(folder))
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    if not logical:
        assert open_folder(folder).config.model.num_layers == 2
    with open_model(folder, device="cpu") as model:
        decoder = model.decoder()
        logits = decoder.prefill_all([TextBatch(torch.tensor([[1, 2, 3]]), [3])])[0]
        assert logits.isfinite().all() and 0 < logits.std() < 10
        assert len(generate(decoder, [[1, 2, 3]], 4)[0].tokens) == 4


def test_tensors_differ_and_are_normal(tmp_path: Path) -> None:
    config = made_config("qwen3_moe", dtype="bfloat16", fixed=FIXED["qwen3_moe"])
    write_made_model(tmp_path / "made", config)
    tensors = load_file(tmp_path / "made/model.safetensors")
    experts = {name: tensor.float() for name, tensor in tensors.items() if ".experts." in name}
    assert len(experts) == 2 * 16 * 3
    assert len({tuple(tensor.flatten().tolist()) for tensor in experts.values()}) == len(experts)
    assert all(abs(tensor.mean()) < 0.02 for tensor in experts.values())
    ups = torch.stack([tensor for name, tensor in experts.items() if "up_proj" in name])
    downs = torch.stack([tensor for name, tensor in experts.items() if "down_proj" in name])
    inner = made_models.INNER / 8  # of 64 inputs
    assert ups.std() == pytest.approx(inner, rel=0.05) and downs.std() == pytest.approx(inner / 2, rel=0.05)
    assert tensors["model.embed_tokens.weight"].float().std() == pytest.approx(made_models.EMBEDDING, rel=0.05)
    assert (tensors["model.norm.weight"] == 1).all()


def test_tensor_longer_than_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_models, "BLOCK", 1021)
    write_made_model(tmp_path / "made", made_config("llama", dtype="float32", fixed=FIXED["llama"]))
    embedding = load_file(tmp_path / "made/model.safetensors")["model.embed_tokens.weight"]
    assert embedding.unique(dim=0).size(0) == 300


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made_config("llama", fixed=FIXED["llama"])
    with pytest.raises(ConfigError, match="exists"):
        write_made_model(tmp_path, config)
    with pytest.raises(ValueError, match="llama has no experts"):
        made_config("llama", 1e9, fixed={"experts": 4})
    with pytest.raises(ValueError, match="give gigabytes, or both layers and hidden"):
        made_config("llama", fixed={"layers": 4})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(ConfigError, match="0.0 GB free"):
        write_made_model(tmp_path / "made", config)
    assert not list(tmp_path.iterdir())


@pytest.mark.fast
@pytest.mark.parametrize("family", list(PRESETS))
def test_proportions(family: str) -> None:
    config = made_config(family, 2.2e9)
    assert 2.2e9 <= weights_bytes(config) < 2.6e9
    one = one_layer(config)
    assert num_layers(one) == 1 and num_layers(config) > 6
    layers = {name.split(".")[2] for name in tensor_shapes(one, logical=True) if name.startswith("decoder.layers.")}
    assert layers == {"0"}


@pytest.mark.parametrize("mapped", [False, True])
def test_times_of_tokens(mapped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made"
    write_made_model(folder, made_config("qwen3_moe", fixed=FIXED["qwen3_moe"]), logical=True)
    arguments = ["--checkpoint", str(folder), "--ids", "--prompt", "1 2 3", "--max-tokens", "5", "--ignore-end"]
    own = [str(tmp_path / "times.json"), *(["--mapped"] if mapped else []), "--"]
    assert token_times.main([*own, *arguments, "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    times = token_times.read_times(tmp_path / "times.json")
    assert len(tokens) == len(times.tokens) == len(times.tokens_read) == 5
    assert 0 < times.begin < times.tokens[0] and times.tokens == sorted(times.tokens)
    with open_model(folder, device="cpu") as model:
        assert generate(model.decoder(), [[1, 2, 3]], 5)[0].tokens == tokens


def test_mapped_weights_are_pages_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    write_made_model(folder, made_config("llama", fixed=FIXED["llama"]), max_file_bytes=100_000, logical=True)
    weights = mapped_weights(folder)
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            mapped.append(range(begin, end))
    assert weights.keys() == Reader(folder).names()
    assert all(any(tensor.data_ptr() in each for each in mapped) for tensor in weights.values())
