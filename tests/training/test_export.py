"""What leaves a run: the files of an exported folder, all of them or none, and the same text from the same prompt in transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from configs.tokenizer_files import copy_tokenizer
from models import convert, folder
from tests import distributed
from tests.training.helpers import train_on_ranks
from training import export

WORDS = ["the", "model", "learns", "a", "gradient", "from", "text", "def", "return", "self", "import", "class", "(", ")", ":", "=", "."]
TEXTS = [" ".join(WORDS[(i * k) % len(WORDS)] for i in range(12)) for k in range(1, 17)]
OF_A_MODEL = {  # what a Hugging Face model's folder holds beside its tokenizer
    "config.json": json.dumps({"model_type": "gpt2", "n_layer": 1}),
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}),
    "generation_config.json": json.dumps({"eos_token_id": 7}),
    "pytorch_model.bin": "weights",
    "preprocessor_config.json": "{}",
    "README.txt": "words",
}


def byte_level(path: Path, bos: bool) -> Path:
    """A Hugging Face folder with a byte-level BPE of about 300 tokens, and with all that lies beside it in a model's folder."""
    path.mkdir(parents=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<|begin|>", "<|end|>", "<|pad|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["gradient descent"])  # an added token that is none of the special ones
    if bos:
        begin = tokenizer.token_to_id("<|begin|>")
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", begin)]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    roles = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**roles, "tokenizer_class": "PreTrainedTokenizerFast"}))
    (path / "special_tokens_map.json").write_text(json.dumps(roles))
    for name, text in OF_A_MODEL.items():
        (path / name).write_text(text)
    return path


TINY = ["model=gpt_tiny", "model.num_layers=2", "model.sequence_length=32", "model.hidden_size=32", "model.init_std=0.2"]


@pytest.fixture(scope="module")
def run_dir(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tokenizer came from a Hugging Face model's folder, and puts a token before each text."""
    path = tmp_path_factory.mktemp("run")
    tokenizer = byte_level(path / "tokenizer", bos=True)
    train_on_ranks([*TINY, *data, f"data.tokenizer={tokenizer}", f"run_dir={path / 'run'}", "training.steps=2"])
    return path / "run"


def test_only_tokenizer_files_are_kept(tmp_path: Path) -> None:
    whole = byte_level(tmp_path / "whole", bos=False)
    for name in ("chat_template.jinja", "vocab.json", "tokenizer.model"):
        (whole / name).write_text("x")
    whole.chmod(0o700)
    copy_tokenizer(whole, tmp_path / "copy")
    kept = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json", "tokenizer.model"}
    assert {path.name for path in (tmp_path / "copy").iterdir()} == kept
    copy_tokenizer(tmp_path / "copy", tmp_path / "copy")  # onto itself
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()
    # A file alone: what says how it is used comes along, other vocabularies do not.
    copy_tokenizer(whole / "tokenizer.model", tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == kept - {"tokenizer.json", "vocab.json"}
    (whole / "tokenizer.json").rename(whole / "mine.json")
    copy_tokenizer(whole / "mine.json", tmp_path / "mine")
    assert (tmp_path / "mine" / "tokenizer.json").read_bytes() == (whole / "mine.json").read_bytes()


def _export(run_dir: Path, target: Path) -> int:
    os.umask(0o027)
    try:
        export.export(run_dir, target / "weights")
        return convert.main(["export", str(target / "weights"), str(target / "hf"), "--max-shard-size", "40kB"])
    finally:
        os.umask(0o022)


def test_an_export_holds_its_own_files_alone(run_dir: Path, tmp_path: Path) -> None:
    assert distributed.run(_export, 1, run_dir, tmp_path) == [0]
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {path.name for path in (run_dir / "tokenizer").iterdir()} == tokenizer
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {*tokenizer, "config.yaml", "model.safetensors"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert all((tmp_path / "hf" / part).is_file() for part in index["weight_map"].values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "weights"]
    for path in [tmp_path / "hf", tmp_path / "weights", *(tmp_path / "hf").iterdir(), *(tmp_path / "weights").iterdir()]:
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


def _interrupted(run_dir: Path, target: Path, module: str, function: str, error: type[BaseException]) -> list[str]:
    """The names beside `target` while an export does `function`, which fails; afterwards nothing of it may be left."""
    seen: list[str] = []

    def fail(*_: Any) -> None:
        seen.extend(path.name for path in target.parent.iterdir())
        raise error("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.{function}", fail)
        with pytest.raises(error):
            export.export(run_dir, target)
    return seen


@pytest.mark.parametrize(
    ("function", "error"),
    [("models.folder.write_config", OSError), ("models.folder.write_config", KeyboardInterrupt), ("shutil.copyfile", OSError)],
)
def test_an_export_is_whole_or_not_there(function: str, error: type[BaseException], run_dir: Path, tmp_path: Path) -> None:
    others = {"out.partial", "out.partial-0"}  # of the user, or of another process
    for other in others:
        (tmp_path / other).mkdir()
        (tmp_path / other / "file").write_text("x")
    seen = distributed.run(_interrupted, 1, run_dir, tmp_path / "out", *function.rsplit(".", 1), error)[0]
    assert "out" not in seen and others < set(seen)
    assert {path.name for path in tmp_path.iterdir()} == others
    assert all((tmp_path / other / "file").exists() for other in others)


def test_a_file_of_weights_takes_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    writer = folder.Writer(tmp_path)
    writer.add("weight", torch.zeros(3))
    writer.close()
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode
