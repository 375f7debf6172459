"""A broken Hugging Face folder ends in one line that names the file and what is wrong in it, at every way in, and
nothing is written."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from base.errors import ConfigError
from inference import generate
from models import convert, folder

pytestmark = pytest.mark.fast

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in three files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("whole") / "hf"
    config = LlamaConfig(**SIZES, vocab_size=61, max_position_embeddings=32, bos_token_id=0, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size="8KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def _json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = json.loads((path / name).read_text()) if (path / name).exists() else {}
        change(content)
        (path / name).write_text(json.dumps(content))

    return damage


def _text(name: str, text: str | bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return damage


def _folder(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).mkdir()

    return damage


def _first(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[0]


def _cut(path: Path) -> None:
    _first(path).write_bytes(_first(path).read_bytes()[:-5])


def _header(text: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        _first(path).write_bytes(struct.pack("<Q", len(text)) + text)

    return damage


def _missing(path: Path) -> None:
    _first(path).unlink()


def _twice(path: Path) -> None:
    """Every file holds what the index says, but two hold the same tensor."""
    first, second = sorted(path.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    (path / folder.INDEX_NAME).unlink()
    weight_map = {name: file.name for file in path.glob("*.safetensors") for name in load_file(file)}
    (path / folder.INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def _two_models(path: Path) -> None:
    save_file({"a": torch.zeros(1)}, path / "model.safetensors")


def _elsewhere(index: dict) -> None:
    name = min(index["weight_map"])
    index["weight_map"][name] = "../other/model.safetensors"


def _moved(index: dict) -> None:
    name = min(index["weight_map"])
    index["weight_map"][name] = next(file for file in index["weight_map"].values() if file != index["weight_map"][name])


DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "config_not_json": (_text("config.json", "{'model_type': 1}"), ("config.json", "is not JSON")),
    "config_a_list": (_text("config.json", "[1, 2]"), ("config.json", "[1, 2]", "object")),
    "config_not_utf8": (_text("config.json", b"\xff\xfe{}"), ("config.json", "is not JSON")),
    "config_deep": (_text("config.json", '{"a": ' + "[" * 100_000), ("config.json", "is not JSON")),
    "config_long_number": (_text("config.json", '{"a": ' + "1" * 5000 + "}"), ("config.json", "is not JSON")),
    "config_key_twice": (_text("config.json", '{"a": 1, "a": 2}'), ("config.json", "the key a twice")),
    "config_a_folder": (_folder("config.json"), ("config.json", "Is a directory")),
    "model_type_a_list": (_json("config.json", lambda c: c.update(model_type=["llama"])), ("model_type", "llama")),
    "quantization_a_word": (
        _json("config.json", lambda c: c.update(quantization_config="fp8")),
        ("quantization_config", "fp8"),
    ),
    "index_not_json": (_text(folder.INDEX_NAME, "{"), (folder.INDEX_NAME, "is not JSON")),
    "index_a_list": (_text(folder.INDEX_NAME, "[]"), (folder.INDEX_NAME, "object")),
    "index_empty": (_text(folder.INDEX_NAME, "{}"), (folder.INDEX_NAME, "weight_map")),
    "index_null": (
        _json(folder.INDEX_NAME, lambda c: c.update(weight_map=None)),
        (folder.INDEX_NAME, "weight_map (null)"),
    ),
    "index_a_number": (
        _json(folder.INDEX_NAME, lambda c: c.update(weight_map={"x": 3})),
        (folder.INDEX_NAME, "weight_map.x (3)"),
    ),
    "index_elsewhere": (_json(folder.INDEX_NAME, _elsewhere), (folder.INDEX_NAME, "../other/model.safetensors")),
    "index_other_part": (_json(folder.INDEX_NAME, _moved), (folder.INDEX_NAME, "lm_head.weight")),
    "index_a_folder": (_folder(folder.INDEX_NAME), (folder.INDEX_NAME, "Is a directory")),
    "part_missing": (_missing, ("model-00001-of", "is missing")),
    "part_cut": (_cut, ("model-00001-of", "not a complete safetensors file")),
    "part_header": (_header(b"[]"), ("model-00001-of", "not a complete safetensors file")),
    "part_format": (_header(b'{"__metadata__":{"format":"tf"}}'), ("model-00001-of", "format (tf)")),
    "tensor_twice": (_twice, ("twice: in", "model-00002-of")),
    "two_models": (_two_models, ("model.safetensors", folder.INDEX_NAME)),
    "generation_not_json": (_text("generation_config.json", "{,}"), ("generation_config.json", "is not JSON")),
    "generation_a_list": (_text("generation_config.json", "[]"), ("generation_config.json", "object")),
    "generation_end_a_word": (
        _text("generation_config.json", '{"eos_token_id": "</s>"}'),
        ("generation_config.json", 'eos_token_id ("</s>")'),
    ),
    "generation_end_a_list": (
        _text("generation_config.json", '{"eos_token_id": [1, [2]]}'),
        ("generation_config.json", "[1, [2]]"),
    ),
    "generation_a_folder": (_folder("generation_config.json"), ("generation_config.json",)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_ends_in_one_line(name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, says = DAMAGES[name]
    shutil.copytree(whole, tmp_path / "hf")
    damage(tmp_path / "hf")
    for main, arguments in (
        (convert.main, ["import", str(tmp_path / "hf"), str(tmp_path / "ours")]),
        (generate.main, ["--checkpoint", str(tmp_path / "hf"), "--prompt", "a"]),
    ):
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert all(file in line for file in says), line
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_the_whole_folder_opens(whole: Path, tmp_path: Path) -> None:
    assert convert.main(["import", str(whole), str(tmp_path / "ours")]) == 0


def test_converting_deletes_nothing_of_the_users(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    assert convert.main(["import", str(whole), str(tmp_path / "out")]) == 0
    assert convert.main(["import", str(whole), str(tmp_path / "out")]) == 2  # in use
    with pytest.raises(RuntimeError), folder.new_folder(tmp_path / "out2") as partial:
        (partial / "half").write_text("")
        raise RuntimeError
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.partial"}
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "mine"
    capsys.readouterr()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    for target in ("file", "file/out", "loop"):
        assert convert.main(["import", str(whole), str(tmp_path / target)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"output folder {tmp_path / target}" in line


def test_an_empty_folder_behind_a_link_is_filled(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert convert.main(["import", str(whole), str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.yaml").is_file()


def test_another_type_of_weights_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(9), "b": torch.zeros(3, dtype=torch.float16)}, tmp_path / "model.safetensors")
    reader = folder.Reader(tmp_path)
    assert reader.main_dtype(["a"]) is torch.float32
    with pytest.raises(ConfigError, match="tensor b .* type F16"):
        reader.main_dtype(reader.names())
