"""Every key of the schema says what it means, what it takes and what a change of it means; nothing else lists keys."""

from __future__ import annotations

import copy
import itertools
import re
import typing
from pathlib import Path

import pytest

from base.errors import ConfigError
from configs.architecture import architecture, for_use
from configs.changes import Change, changes
from configs.compose import compose
from configs.keys import OnResume, get, put
from configs.schema import KEYS, Config
from configs.validate import validate, validate_for_use

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", KEYS)
def test_every_key_says_all_of_itself(name: str) -> None:
    key = KEYS[name]
    assert key.name == name
    assert key.default == get(Config(), name)
    assert key.meaning and key.meaning == key.meaning.strip() and not key.meaning.endswith(".")
    assert key.on_resume in typing.get_args(OnResume)
    assert key.rule() and key.kind()
    assert key.broken_rule(key.default) is None
    if {int, float} & {*key.kinds, key.of_items}:
        assert (key.low is None) != (key.above is None), "a number has one lower limit"
        assert key.high is None or key.below is None
    if key.type is typing.Any:
        assert key.form, "a key that takes several types says what they look like"
    if key.choices:
        assert str in key.kinds and len(key.choices) == len(set(key.choices))
        assert key.default in key.choices or (key.default is None and key.nullable)


def test_the_defaults_are_legal() -> None:
    validate(Config(), 1)


# Decides the weights only where positions are learned, and is data besides; the vocabulary's size counts as resolved.
PARTLY = {"model.sequence_length"}
FAMILIES = [
    ["model=bert_moe_tiny"],
    ["model=gpt_moe_tiny", "model.qk_norm=true", "model.qk_norm_over=all_heads"],
    ["model=gpt_tiny", "model.attention=latent"],
    ["model=gpt_tiny", "model.sliding_window=8"],
]


def test_architecture_is_what_a_folder_of_weights_compares() -> None:
    compared = {
        f"{section}.{key}"
        for text in FAMILIES
        for section, values in architecture(compose(text), 512).items()
        for key in values
    }
    assert {name for name, key in KEYS.items() if key.architecture} == compared - PARTLY | {"training.precision"}
    assert not any(KEYS[name].architecture for name in PARTLY)


# What an export says of the model.
LEAVES_WITH_IT = {"model.max_positions", "model.export_family", "model.config_json"}
# What is not the model's in its own sections: how it is trained, and who computes it.
OF_TRAINING = {"hidden_dropout", "attention_dropout", "init_std", "backend", "fusions"}


def test_a_model_that_is_opened_keeps_what_is_its_own() -> None:
    trained, other = Config(), "other"
    for name in KEYS:
        put(trained, name, other)
    opened = for_use(trained)
    kept = {name for name in KEYS if get(opened, name) == other}
    assert kept == {name for name, key in KEYS.items() if key.architecture} | PARTLY | LEAVES_WITH_IT
    assert {name for name in KEYS if name.startswith("model.")} - kept == {f"model.{name}" for name in OF_TRAINING}
    left = {name for name in KEYS.keys() - kept if get(opened, name) != KEYS[name].default}
    assert left == {"data.tokenizer"}, "the rules of one that is trained here are not asked"


def test_what_generation_reads_is_the_models_own() -> None:
    text = "".join(path.read_text() for path in (ROOT / "inference" / "decoder").glob("*.py"))
    read = {f"{section}.{name}" for section, name in re.findall(r"\b(model|moe)\.(\w+)", text)} & KEYS.keys()
    assert len(read) > 15 and all(KEYS[name].of_the_model for name in read)


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")))
def test_a_model_of_any_preset_opens_on_one_process(preset: str) -> None:
    validate(for_use(compose([f"experiment={preset}"])), 1)


def test_advice_on_the_layout_of_an_opened_model_works() -> None:
    refused, constants = 0, {"null": None, "true": True, "false": False}
    for preset in ("gpt_moe_tiny", "bert_tiny", "gpt2_124m"):
        model = for_use(compose([f"experiment={preset}", *(["model.linear_bias=true"] if "moe" in preset else [])]))
        for ranks, *sizes in itertools.product((1, 2, 4, 6), (1, 2, 3), (1, 2, 5), (1, 2, 3)):
            config = copy.deepcopy(model)
            for name, size in zip(("tensor", "pipeline", "expert"), sizes, strict=True):
                put(config, f"parallel.{name}", size)
            try:
                validate_for_use(config, ranks)
            except ConfigError as error:
                refused += 1
                for advice in str(error).rpartition(" Try ")[2].rstrip(".").split(" or "):
                    changed, processes = copy.deepcopy(config), ranks
                    for word in advice.split():
                        name, is_setting, value = word.partition("=")
                        assert not is_setting or name.startswith("parallel."), error
                        if is_setting:
                            put(changed, name, constants[value] if value in constants else int(value))
                        elif word.isdigit():
                            processes = int(word)
                    validate_for_use(changed, processes)
    assert refused > 100


def _changes(before: list[str], after: list[str]) -> list[Change]:
    return changes(compose(["model=gpt_tiny", *before]), compose(["model=gpt_tiny", *after]))


def test_changes_name_each_key_that_differs() -> None:
    assert _changes([], []) == []
    assert _changes([], ["training.seed=1", "optimizer.lr=0.5", "parallel.tensor=2"]) == [
        Change("parallel.tensor", 1, 2, "free"),
        Change("training.seed", 1234, 1, "refuse"),
        Change("optimizer.lr", 0.004, 0.5, "say"),
    ]
    assert _changes([], ["data.documents=separate"]) == [Change("data.documents", "joined", "separate", "say")]


@pytest.mark.parametrize(
    ("overrides", "key", "means"),
    [
        (["training.steps=9"], "training.steps", "say"),
        (["training.steps=9", "optimizer.decay_steps=20"], "training.steps", "free"),
        (["training.steps=9", "optimizer.schedule=constant"], "training.steps", "free"),
        (["training.micro_batch_size=1"], "training.micro_batch_size", "free"),
        (
            [
                "training.micro_batch_size=1",
                "model=gpt_moe_tiny",
                "moe.aux_loss_coeff=0",
                "moe.global_aux_loss_coeff=0.1",
            ],
            "training.micro_batch_size",
            "free",
        ),
        (
            ["training.micro_batch_size=1", "model=gpt_moe_tiny", "moe.aux_loss_coeff=0.1"],
            "training.micro_batch_size",
            "say",
        ),
        (
            ["training.micro_batch_size=1", "model=gpt_moe_tiny", "moe.capacity_factor=1"],
            "training.micro_batch_size",
            "say",
        ),
        (["parallel.context=2"], "parallel.context", "free"),
        (["parallel.context=2", "model.hidden_dropout=0.1"], "parallel.context", "say"),
        (["parallel.sequence=true", "model.hidden_dropout=0.1"], "parallel.sequence", "say"),
        (["parallel.tensor=2", "model.attention_dropout=0.1"], "parallel.tensor", "say"),
        (["parallel.tensor=2", "model.hidden_dropout=0.1"], "parallel.tensor", "free"),
        (["parallel.tensor=2", "model.hidden_dropout=0.1", "parallel.sequence=true"], "parallel.tensor", "say"),
    ],
)
def test_a_change_may_mean_less_or_more_than_its_key_says(overrides: list[str], key: str, means: str) -> None:
    found = {change.key: change.on_resume for change in _changes(overrides[1:], overrides)}
    assert found[key] == means
