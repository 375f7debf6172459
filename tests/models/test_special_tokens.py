"""Begin, end and padding tokens: in config files, in our folders, and at the end of generated texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from base.errors import ConfigError
from configs.architecture import description
from configs.weights import adopt, config_from
from models import folder
from models.huggingface import special_tokens, translate
from models.huggingface.special_tokens import BOS, EOS, KEYS, PAD
from tests.models.real_configs import COMPUTED_AS

pytestmark = pytest.mark.fast


def test_defaults_are_those_of_transformers() -> None:
    from transformers import AutoConfig

    assert special_tokens.DEFAULTS.keys() == translate.FAMILIES.keys()
    for family in translate.FAMILIES:
        theirs = AutoConfig.for_model(COMPUTED_AS.get(family, family))
        expected = {key: getattr(theirs, key) for key in KEYS}
        assert special_tokens.of_config({"model_type": family}, vocab_size=10**6) == expected, family


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {BOS: 1, EOS: 2, PAD: None}),
        ({EOS: None, PAD: 5}, {BOS: 1, EOS: None, PAD: 5}),
        ({BOS: 99, EOS: [3, 100, 7], PAD: -1}, {BOS: 99, EOS: [3, 7], PAD: None}),
        ({BOS: 100, EOS: 100}, {BOS: None, EOS: None, PAD: None}),  # no token of this model
    ],
)
def test_what_config_json_says(values: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = special_tokens.of_config({"model_type": "llama", **values}, vocab_size=100)
    assert found == expected
    folder.write_config(tmp_path, {"model": {}, "moe": {}}, found)
    assert special_tokens.kept_in(tmp_path, 100) == expected
    assert folder.read_config(tmp_path) == {"model": {}, "moe": {}}


@pytest.mark.parametrize("wrong", [{EOS: "</s>"}, {EOS: [2, None]}, {BOS: [1]}, {PAD: True}, {BOS: 1.0}])
def test_what_is_no_token_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"config.json {next(iter(wrong))}"):
        special_tokens.of_config({"model_type": "llama", **wrong}, vocab_size=100)


def test_where_a_text_ends(tmp_path: Path) -> None:
    assert special_tokens.end_tokens(tmp_path, None) is None
    assert special_tokens.end_tokens(tmp_path, {BOS: 1, EOS: 2, PAD: None}) == {2}
    assert special_tokens.end_tokens(tmp_path, {BOS: 1, EOS: [2, 4], PAD: None}) == {2, 4}
    assert special_tokens.end_tokens(tmp_path, {BOS: 1, EOS: None, PAD: None}) == set()
    for content, expected in (
        ({"eos_token_id": [7, 8]}, {7, 8}),
        ({"eos_token_id": 7}, {7}),
        ({"temperature": 0.6}, set()),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        assert special_tokens.end_tokens(tmp_path, {BOS: 1, EOS: 2, PAD: None}) == expected


def test_what_generation_would_do_otherwise(tmp_path: Path) -> None:
    assert special_tokens.changes_of_text(tmp_path) == {}
    harmless = {
        "temperature": 0.6,
        "top_p": 0.9,
        "do_sample": True,
        "repetition_penalty": 1.0,
        "num_beams": 1,
        "min_length": 0,
    }
    (tmp_path / "generation_config.json").write_text(
        json.dumps({**harmless, "repetition_penalty": 1.1, "suppress_tokens": [3]})
    )
    assert special_tokens.changes_of_text(tmp_path) == {"repetition_penalty": 1.1, "suppress_tokens": [3]}


@pytest.mark.parametrize(("length", "at_most", "expected"), [(32, 4096, 4096), (32, None, 32), (64, 32, 64)])
def test_positions_do_not_shrink(length: int, at_most: int | None, expected: int) -> None:
    config = config_from({"model": {"vocab_size": 99, "sequence_length": length, "max_positions": at_most}})
    family, hf = translate.write_config(config)
    assert (family.model_type, hf["max_position_embeddings"]) == ("llama", expected)
    assert config.model.sequence_length == length
    again = translate.read_config(hf)[2]
    assert again["model"]["sequence_length"] == again["model"]["max_positions"] == expected


def test_learned_positions_keep_their_length() -> None:
    learned = {
        "position_embedding": "learned",
        "normalization": "layernorm",
        "activation": "gelu_tanh",
        "linear_bias": True,
    }
    config = config_from({"model": {"vocab_size": 99, "sequence_length": 32, "max_positions": 4096, **learned}})
    assert translate.write_config(config)[1]["n_positions"] == 32


@pytest.mark.parametrize("named", [set(), {"model.sequence_length"}, {"model", "model.sequence_length"}])
def test_a_run_from_imported_weights_can_take_what_they_could(named: set[str], tmp_path: Path) -> None:
    imported = config_from({"model": {"vocab_size": 99, "sequence_length": 4096, "max_positions": 4096}})
    folder.write_config(tmp_path, description(imported, 99))
    (tmp_path / "tokenizer.json").write_text("{}")
    config = config_from({"model": {"vocab_size": 99, "sequence_length": 32}})
    config.checkpoint.weights = str(tmp_path)
    adopt(config, named)
    assert config.model.sequence_length == (32 if named else 4096)
    assert translate.write_config(config)[1]["max_position_embeddings"] == 4096
