"""A folder of imported weights says what its files were: each that was damaged is named, by verify and by training."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from base.checksums import FOLDER_SUMS
from base.errors import ConfigError
from checkpoint import __main__ as command
from models import convert
from tests.checkpoint.test_checkpoint_damage import KINDS, flip_a_bit
from tests.checkpoint.test_export import byte_level
from tests.distributed import RankError
from tests.training.helpers import train_on_ranks


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in several files with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("imported")
    hf = byte_level(path / "hf", bos=True)
    for name in ("config.json", "model.safetensors.index.json", "pytorch_model.bin"):
        (hf / name).unlink()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=310, max_position_embeddings=32)).save_pretrained(hf)
    convert.import_folder(hf, path / "ours", max_file_bytes=16_000)
    return path / "ours"


def _train(folder: Path, run_dir: Path, data: list[str]) -> float:
    """The loss of the first step."""
    named = [word for word in data if not word.startswith("data.tokenizer")]
    lines = train_on_ranks(
        [f"checkpoint.weights={folder}", *named, f"run_dir={run_dir}", "training.steps=1", "logging.wandb=off"],
        2,
    )
    return float(lines[0]["loss"])


def test_each_damaged_file_is_named(imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = sorted(str(path.relative_to(imported)) for path in imported.rglob("*") if path.is_file())
    assert FOLDER_SUMS in names and sum(name.endswith(".safetensors") for name in names) > 2
    rng, folder_copy = random.Random(7), tmp_path / "copy"
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        for damage in KINDS:
            if (name, damage.__name__) == (FOLDER_SUMS, "lose"):
                continue  # a folder without sums is taken as it is
            shutil.rmtree(folder_copy, ignore_errors=True)
            shutil.copytree(imported, folder_copy)
            damage(folder_copy / name, imported / other, rng)
            capsys.readouterr()
            assert command.main(["verify", str(folder_copy)]) == 1, (name, damage.__name__)
            printed = capsys.readouterr().out
            assert name.rpartition("/")[2] in printed and len(printed.splitlines()) == 1, (name, damage.__name__)


def test_training_refuses_a_damaged_folder(imported: Path, tmp_path: Path, data: list[str]) -> None:
    loss = _train(imported, tmp_path / "whole", data)
    for number, name in enumerate(["config.yaml", "model-00001-of-*", "model-00002-of-*"]):
        folder_copy = tmp_path / f"damaged{number}"
        shutil.copytree(imported, folder_copy)
        (path,) = folder_copy.glob(name)
        flip_a_bit(path, path, random.Random(number))
        with pytest.raises(
            (ConfigError, RankError), match=f"was changed after it was written: its file {path.name} was changed"
        ):
            _train(folder_copy, tmp_path / f"run{number}", data)
    folder_copy = tmp_path / "without"
    shutil.copytree(imported, folder_copy)
    (folder_copy / FOLDER_SUMS).unlink()
    assert _train(folder_copy, tmp_path / "run", data) == loss
