"""`checkpoint.weights` brings the model and the tokenizer of its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from base.errors import ConfigError
from configs.architecture import architecture, description
from configs.compose import compose, to_yaml
from configs.schema import Config
from configs.validate import validate
from configs.weights import FORMAT
from data.tokenizer import train_tokenizer
from training.starting import preflight

pytestmark = pytest.mark.fast

MODELS = ["gpt_tiny", "gpt_moe_tiny", "bert_tiny", "deepseek_v3_like", "qwen3_30b_a3b"]
VOCAB = 500


def weights(folder: Path, model: str, tokenizer: bool = True) -> Path:
    """A folder as `python -m models.convert import` leaves it, without the tensors."""
    folder.mkdir()
    config = compose([f"experiment={model}"])
    (folder / "config.yaml").write_text(yaml.safe_dump({"format": FORMAT, **description(config, VOCAB)}))
    if tokenizer:
        (folder / "tokenizer.model").write_bytes(b"")
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_no_key_of_the_model_is_typed(tmp_path: Path, model: str) -> None:
    folder = weights(tmp_path / "imported", model)
    config = compose([f"checkpoint.weights={folder}", "training.steps=3", "model.hidden_dropout=0.25"])
    assert architecture(config, VOCAB) == architecture(compose([f"experiment={model}"]), VOCAB)
    assert config.data.tokenizer == str(folder) and config.model.vocab_size == VOCAB
    assert config.model.hidden_dropout == 0.25 and config.training.steps == 3


def test_the_same_preset_may_be_named(tmp_path: Path) -> None:
    folder = weights(tmp_path / "imported", "gpt_tiny")
    config = compose(["experiment=gpt_tiny", f"checkpoint.weights={folder}"])
    assert config.training.global_batch_size == 8 and config.model.vocab_size == VOCAB
    validate(config, 1)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.num_layers=3", "model.num_layers (3) must be 4"),
        ("model=bert_tiny", "model.family (bert) must be gpt"),
        ("experiment=gpt_moe_tiny", "moe.num_experts (4) must be null"),
        ("model.vocab_size=600", "model.vocab_size (600) must be 500"),
        ("moe.num_experts=8", "moe.num_experts (8) must be null"),
        ("model.tie_embeddings=false", "model.tie_embeddings (false) must be true"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, override: str, key: str) -> None:
    folder = weights(tmp_path / "imported", "gpt_tiny")
    with pytest.raises(ConfigError) as caught:
        compose([override, f"checkpoint.weights={folder}"])
    assert str(caught.value).startswith(key) and str(folder) in str(caught.value)


def test_what_differs_of_a_long_value_is_not_cut_off(tmp_path: Path) -> None:
    def scaling(high: float) -> str:
        return (
            "model.rotary_scaling={rope_type: llama3, factor: 8.0, low_freq_factor: 1.0, "
            f"high_freq_factor: {high}, original_max_position_embeddings: 8192}}"
        )

    folder = tmp_path / "imported"
    folder.mkdir()
    imported = compose(["experiment=gpt_tiny", scaling(4.0)])
    (folder / "config.yaml").write_text(yaml.safe_dump({"format": FORMAT, **description(imported, VOCAB)}))
    with pytest.raises(ConfigError, match=r"\(\{.*high_freq_factor: 2.0.*\}\) must be \{.*high_freq_factor: 4.0"):
        compose([scaling(2.0), f"checkpoint.weights={folder}"])


def test_a_shorter_sequence_is_no_other_model(tmp_path: Path) -> None:
    folder = weights(tmp_path / "imported", "gpt_tiny")
    assert compose(["model.sequence_length=32", f"checkpoint.weights={folder}"]).model.sequence_length == 32
    learned = weights(tmp_path / "learned", "bert_tiny")
    with pytest.raises(ConfigError, match="model.sequence_length"):
        compose(["model.sequence_length=32", f"checkpoint.weights={learned}"])


def test_weights_without_a_tokenizer_ask_for_theirs(tmp_path: Path) -> None:
    folder = weights(tmp_path / "imported", "gpt_tiny", tokenizer=False)
    with pytest.raises(ConfigError, match="contains no tokenizer.*data.tokenizer=PATH"):
        compose([f"checkpoint.weights={folder}"])
    assert compose([f"checkpoint.weights={folder}", "data.tokenizer=mine.model"]).data.tokenizer == "mine.model"


def test_another_tokenizer_is_refused_before_a_corpus_is_touched(tmp_path: Path) -> None:
    folder = weights(tmp_path / "imported", "gpt_tiny")
    for path, words in ((folder / "tokenizer.model", "loss step"), (tmp_path / "other.model", "paper light")):
        train_tokenizer([f"{words} {i}" for i in range(50)], 330, path)
    overrides = [f"checkpoint.weights={folder}", f"run_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    preflight.check(
        compose([*overrides, f"data.tokenizer={shutil.copy(folder / 'tokenizer.model', tmp_path / 'same.model')}"])
    )
    with pytest.raises(
        ConfigError,
        match=r"data.tokenizer \(.*other.model\) differs from the tokenizer in checkpoint.weights",
    ):
        preflight.check(compose([*overrides, f"data.tokenizer={tmp_path / 'other.model'}"]))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, f"must contain a config.yaml of format {FORMAT}, but it has no config.yaml"),
        ("a: [", "cannot be read"),
        ("format: other", f"must contain a config.yaml of format {FORMAT}, but its config.yaml has format other"),
        (f"format: {FORMAT}\nmodel: 3\nmoe: {{}}", "model must be a mapping of keys"),
        (f"format: {FORMAT}\nmodel: {{vocab_size: null}}\nmoe: {{}}", "config.yaml must contain model.vocab_size"),
        (f"format: {FORMAT}\nmodel: {{hidden: 3}}\nmoe: {{}}", "model.hidden is not a key of this version"),
        (f"format: {FORMAT}\nmodel: {{hidden_size: wide}}\nmoe: {{}}", "model.hidden_size (wide) must be an integer"),
    ],
)
def test_a_broken_folder(tmp_path: Path, content: str | None, says: str) -> None:
    folder = tmp_path / "imported"
    folder.mkdir()
    if content is not None:
        (folder / "config.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        compose([f"checkpoint.weights={folder}"])
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_outlives_the_folder_that_it_began_from(tmp_path: Path) -> None:
    folder, run_dir = weights(tmp_path / "imported", "gpt_tiny"), tmp_path / "run"
    command = [f"checkpoint.weights={folder}", f"run_dir={run_dir}"]
    first = compose(command)
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(to_yaml(first))
    shutil.rmtree(folder)
    assert compose(command) == first
    with pytest.raises(ConfigError):
        compose([f"checkpoint.weights={folder}", f"run_dir={tmp_path / 'fresh'}"])
    assert isinstance(first, Config)
