"""The choice of a Hugging Face folder's weight files; files of torch.save are read as tensors alone, and checked as
safetensors are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import convert, folder
from models.weight_files.choice import PICKLED_INDEX_NAME, PICKLED_SINGLE_NAME
from tests.models.mutations import make_bases

pytestmark = pytest.mark.fast

BASE = "llama_tied"
DOWN = "model.layers.1.mlp.down_proj.weight"
Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bases")
    make_bases(path, (BASE,))
    assert convert.main(["import", str(path / BASE), str(path / "imported")]) == 0
    return path


def _views(tensors: Tensors) -> Tensors:
    """The same numbers as parameters, transposed views, parts of one storage, and a tied name."""
    tensors = {
        name: torch.nn.Parameter(tensor.t().contiguous().t()) if tensor.dim() == 2 else tensor
        for name, tensor in tensors.items()
    }
    both = torch.cat([tensors["model.norm.weight"], tensors["model.layers.0.input_layernorm.weight"]])
    tensors["model.norm.weight"], tensors["model.layers.0.input_layernorm.weight"] = both.chunk(2)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def _pickled(bases: Path, target: Path, **options: Any) -> Path:
    """The base with its tensors in pytorch_model.bin."""
    shutil.copytree(bases / BASE, target)
    (target / folder.SINGLE_NAME).unlink()
    torch.save(_views(load_file(bases / BASE / folder.SINGLE_NAME)), target / PICKLED_SINGLE_NAME, **options)
    return target


def _split_into_files(bases: Path, target: Path, **options: Any) -> Path:
    """Write the base as several files of torch.save, with their index."""
    shutil.copytree(bases / f"{BASE}.parts", target)
    index = json.loads((target / folder.INDEX_NAME).read_text())
    (target / folder.INDEX_NAME).unlink()
    new_names = {}
    for file in target.glob("*.safetensors"):
        new_names[file.name] = file.name.replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        torch.save(load_file(file), target / new_names[file.name], **options)
        file.unlink()
    index["weight_map"] = {name: new_names[file] for name, file in index["weight_map"].items()}
    (target / PICKLED_INDEX_NAME).write_text(json.dumps(index))
    return target


@pytest.mark.parametrize("make", [_pickled, _split_into_files])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_model_is_the_same_model(
    make: Callable[..., Path], zipped: bool, bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, loads = make(bases, tmp_path / "hf", _use_new_zipfile_serialization=zipped), []
    load = torch.load

    def recorded(file: Any, **options: Any) -> Any:
        loads.append(options)
        return load(file, **options)

    monkeypatch.setattr(torch, "load", recorded)
    assert convert.main(["import", str(path), str(tmp_path / "ours")]) == 0
    assert loads and all(options["weights_only"] is True and options["mmap"] is zipped for options in loads)
    ours, expected = (load_file(at / folder.SINGLE_NAME) for at in (tmp_path / "ours", bases / "imported"))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.items())


def _said(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    target = path.parent / "out"
    shutil.rmtree(target, ignore_errors=True)
    status = convert.main(["import", str(path), str(target)])
    assert target.exists() == (status == 0)
    return status, [line for line in capsys.readouterr().err.splitlines() if not line.startswith("writing")]


def test_safetensors_win_and_say_so(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _pickled(bases, tmp_path / "hf")
    shutil.copy(bases / BASE / folder.SINGLE_NAME, path)
    (path / PICKLED_SINGLE_NAME).write_bytes(b"not even looked at")
    status, lines = _said(path, capsys)
    assert status == 0
    assert lines == [
        f"note: {path} holds model.safetensors and pytorch_model.bin: model.safetensors is read, as transformers does."
    ]


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _rewritten(edit: Callable[[Tensors], Any]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        tensors = dict(torch.load(path / PICKLED_SINGLE_NAME, weights_only=True))
        changed = edit(tensors)
        torch.save(tensors if changed is None else changed, path / PICKLED_SINGLE_NAME)

    return damage


def _bytes(edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        file = path / PICKLED_SINGLE_NAME
        file.write_bytes(edit(file.read_bytes()))

    return damage


def _old(edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        file = path / PICKLED_SINGLE_NAME
        torch.save(torch.load(file, weights_only=True), file, _use_new_zipfile_serialization=False)
        file.write_bytes(edit(file.read_bytes()))

    return damage


def _folder(path: Path) -> None:
    (path / PICKLED_SINGLE_NAME).unlink()
    (path / PICKLED_SINGLE_NAME).mkdir()


def _put(tensors: Tensors, name: Any, value: Any) -> None:
    tensors[name] = value


DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "code": (
        lambda path: torch.save({"a": _Runs(path / "ran")}, path / PICKLED_SINGLE_NAME),
        ("pytorch_model.bin was not read", "posix.mkdir"),
    ),
    "code_in_an_old_file": (
        lambda path: torch.save(
            {"a": _Runs(path / "ran")}, path / PICKLED_SINGLE_NAME, _use_new_zipfile_serialization=False
        ),
        ("pytorch_model.bin was not read", "posix.mkdir"),
    ),
    "a_module": (_rewritten(lambda t: torch.nn.Linear(2, 2)), ("not read", "torch.nn.modules.linear.Linear")),
    "nested": (_rewritten(lambda t: {"state_dict": t}), ("holds a dict at 'state_dict'", "tensors by name")),
    "a_list": (_rewritten(lambda t: list(t.values())), ("holds a list", "tensors by name")),
    "a_number": (_rewritten(lambda t: _put(t, "step", 3)), ("holds a int at 'step'",)),
    "by_number": (_rewritten(lambda t: _put(t, 3, torch.ones(1))), ("holds a Tensor at 3",)),
    "sparse": (_rewritten(lambda t: _put(t, DOWN, t[DOWN].to_sparse())), (DOWN, "sparse")),
    "cut": (
        _bytes(lambda content: content[:-50]),
        ("pytorch_model.bin is not a complete file of torch.save", "Copy it again"),
    ),
    "empty": (_bytes(lambda content: b""), ("pytorch_model.bin is not a complete file of torch.save",)),
    "a_text": (_bytes(lambda content: b"404: Not Found"), ("pytorch_model.bin is not a complete file of torch.save",)),
    "old_and_cut": (_old(lambda content: content[:-50]), ("pytorch_model.bin is not a complete file of torch.save",)),
    "a_pointer": (
        _bytes(lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"),
        ("pytorch_model.bin", "Git LFS", "git lfs pull"),
    ),
    "a_folder": (
        _folder,
        ("pytorch_model.bin is not a file",),
    ),
    "missing_tensor": (_rewritten(lambda t: t.__delitem__(DOWN)), (f"no tensor {DOWN}",)),
    "left_over": (_rewritten(lambda t: _put(t, "more", torch.ones(1))), ("the first is more",)),
    "shape": (
        _rewritten(lambda t: _put(t, DOWN, t[DOWN].t())),
        (f"tensor {DOWN} has shape [24, 16], but config.json calls for [16, 24]",),
    ),
    "type": (_rewritten(lambda t: _put(t, DOWN, t[DOWN].double())), (f"tensor {DOWN}", "type F64")),
    "other_head": (
        _rewritten(lambda t: _put(t, "lm_head.weight", t["lm_head.weight"] + 1)),
        ("tie_word_embeddings", "lm_head.weight"),
    ),
    "and_an_index": (
        lambda path: (path / PICKLED_INDEX_NAME).write_text("{}"),
        (PICKLED_SINGLE_NAME, PICKLED_INDEX_NAME, "keep only the file"),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_not_tensors_alone_is_refused(
    name: str, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, says = DAMAGES[name]
    path = _pickled(bases, tmp_path / "hf")
    damage(path)
    status, lines = _said(path, capsys)
    assert status == 2 and len(lines) == 1, lines
    assert all(file in lines[0] for file in says), lines[0]
    assert not (path / "ran").exists()


def test_parts_are_checked_against_their_index(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _split_into_files(bases, tmp_path / "hf")
    index = json.loads((path / PICKLED_INDEX_NAME).read_text())
    file_names = sorted(set(index["weight_map"].values()))
    for weight_map, says in (
        ({**index["weight_map"], "x": file_names[0]}, f"lists tensor x of {file_names[0]}, which lacks it"),
        ({**index["weight_map"], DOWN: "../other.bin"}, f"weight_map.{DOWN}"),
        ({**index["weight_map"], DOWN: "model-1.safetensors"}, "must be the name of a .bin file"),
        (
            {**index["weight_map"], DOWN: "gone.bin"},
            "lacks it" if file_names[0] < "gone.bin" else "gone.bin is missing",
        ),
    ):
        (path / PICKLED_INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        status, (line,) = _said(path, capsys)
        assert status == 2 and (says in line or "gone.bin" in line), line


# Files in place of the weights, texts of the error, and whether following it opens the folder.
OTHERS: dict[str, tuple[str, str]] = {
    "model.fp16.safetensors": ("the variant fp16", "model.safetensors"),
    "pytorch_model.fp16.bin": ("the variant fp16", "pytorch_model.bin"),
    "tf_model.h5": ("it holds tf_model.h5", ""),
    "consolidated.00.pth": ("it holds consolidated.00.pth", ""),
    "adapter_model.safetensors": ("it holds adapter_model.safetensors", ""),
    "model-00001-of-00002.safetensors": ("it holds model-00001-of-00002.safetensors", ""),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_without_weights_says_what_it_has(
    name: str, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says, renamed = OTHERS[name]
    path = _pickled(bases, tmp_path / "hf")
    (path / PICKLED_SINGLE_NAME).rename(path / name)
    if name.endswith(".safetensors"):
        save_file(load_file(bases / BASE / folder.SINGLE_NAME), path / name)
    status, (line,) = _said(path, capsys)
    assert status == 2 and f"folder {path} must hold model.safetensors" in line and says in line, line
    if renamed:
        assert f"rename it to {renamed}" in line
        (path / name).rename(path / renamed)
        assert _said(path, capsys) == (0, [])


def test_an_index_of_a_variant_is_renamed(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(bases / f"{BASE}.parts", tmp_path / "hf")
    variant = tmp_path / "hf" / "model.safetensors.index.fp16.json"
    (tmp_path / "hf" / folder.INDEX_NAME).rename(variant)
    status, (line,) = _said(tmp_path / "hf", capsys)
    assert status == 2 and f"{variant.name}, the variant fp16: rename it to {folder.INDEX_NAME}" in line
    variant.rename(variant.with_name(folder.INDEX_NAME))
    assert _said(tmp_path / "hf", capsys) == (0, [])


def test_logical_weights_are_never_pickled(bases: Path, tmp_path: Path) -> None:
    shutil.copytree(bases / "imported", tmp_path / "ours")
    torch.save({}, tmp_path / "ours" / PICKLED_SINGLE_NAME)
    (tmp_path / "ours" / folder.SINGLE_NAME).unlink()
    with pytest.raises(ValueError, match="must hold model.safetensors or model.safetensors.index.json; it holds"):
        folder.Reader(tmp_path / "ours")
