"""Special tokens of a folder: which texts make them, and which file names them, as in transformers; training, prompts
and scores alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from base.errors import ConfigError
from configs.schema import DataConfig
from data.prepare import prepare
from data.prepare.command import main as prepare_command
from data.tokenizer import load_tokenizer, train_tokenizer
from data.tokenizer.sentencepiece_json import tokenizer_json
from data.worker import tokenize_shard
from tests.data.test_tokenizer import word_piece

pytestmark = pytest.mark.fast

HARD = [
    "a </s> b",
    "<|endoftext|>x<|endoftext|></s>",
    "  <pad>y [MASK] z [SEP]\n",
    "in < / s > and </S> or &lt;/s>",
    "caf\u00e9</s>\u4e2d\u6587 <end>\t<END> end",
    "the</s>",
    "",
]
OBJECT = {"__type": "AddedToken", "content": "<end>", "lstrip": True, "rstrip": False, "normalized": False}
MAP, ADDED, CONFIG = "special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "nothing": {CONFIG: FAST},
    "split": {CONFIG: {**FAST, "eos_token": "</s>", "split_special_tokens": True}},
    "not split": {CONFIG: {**FAST, "eos_token": "</s>", "split_special_tokens": False}},
    "the map counts first": {CONFIG: {**FAST, "eos_token": "</s>"}, MAP: {"eos_token": "<end>", "pad_token": "<pad>"}},
    "the map alone": {CONFIG: FAST, MAP: {"eos_token": {**OBJECT, "special": True}, "bos_token": "</s>"}},
    "the decoder shuts the map out": {
        CONFIG: {**FAST, "eos_token": "</s>", "added_tokens_decoder": {"1": {"content": "</s>", "special": True}}},
        MAP: {"eos_token": "<end>"},
        ADDED: {"<more>": 700},
    },
    "flags of the decoder": {
        CONFIG: {
            **FAST,
            "eos_token": OBJECT,
            "added_tokens_decoder": {
                "1": {"content": "</s>", "special": True, "lstrip": True, "rstrip": True, "normalized": False},
                "2": {"content": "<pad>", "special": False, "normalized": True},
            },
        }
    },
    "more tokens": {CONFIG: {**FAST, "eos_token": "</s>", "additional_special_tokens": ["<end>", "[SEP]"]}},
    "more tokens, split": {
        CONFIG: {**FAST, "eos_token": "</s>", "extra_special_tokens": ["[MASK]"], "split_special_tokens": True}
    },
    "more tokens by name": {CONFIG: {**FAST, "eos_token": "</s>", "extra_special_tokens": {"image_token": "[SEP]"}}},
    "a role of its own": {CONFIG: {**FAST, "eos_token": "<end>", "image_token": "[MASK]", "pad_token": None}},
    "added tokens": {CONFIG: {**FAST, "eos_token": "<end>"}, ADDED: {"[MASK]": 400, "[SEP]": 401}},
    "a padding that is new": {CONFIG: {**FAST, "eos_token": "</s>", "pad_token": "<new>"}},
    "an end of more files": {CONFIG: {**FAST, "eos_token": "<new>"}, ADDED: {"<new>": 300}},
}


def byte_folder(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    """A byte-level tokenizer whose letters are lower case, with `<end>` in its vocabulary alone."""
    letters = {letter: i + 3 for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = {"<|endoftext|>": 0, "</s>": 1, "<pad>": 2, **letters, "<end>": len(letters) + 3}
    model = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    model.normalizer = normalizers.Lowercase()
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.post_processor = processors.TemplateProcessing("</s> $A", None, [("</s>", 1)])
    model.add_special_tokens(["<|endoftext|>", "</s>", "<pad>"])
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_one_folder_is_one_encoding(case: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = byte_folder(tmp_path / "t", CASES[case])
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    plain = [theirs.encode(text, add_special_tokens=False) for text in HARD]
    assert [ours.encode(text) for text in HARD] == plain == ours.encode_batch(HARD)
    assert [ours.encode_prompt(text) for text in HARD] == [theirs.encode(text) for text in HARD]
    assert [ours.decode(ids) for ids in plain] == [theirs.decode(ids, skip_special_tokens=True) for ids in plain]
    assert theirs.eos_token_id in (ours.eod, None) and theirs.pad_token_id in (ours.pad, None)
    assert (ours.bos, ours.vocab_size) == (theirs.bos_token_id, len(theirs))
    special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.control_tokens().keys() == special
    if "split" in ours.rules:
        assert not special & {token for ids in plain for token in ids}


def test_an_end_token_that_no_file_has_is_refused(tmp_path: Path) -> None:
    for name in (CONFIG, MAP):
        folder = byte_folder(tmp_path / name, {name: {"eos_token": "</oops>"}})
        with pytest.raises(ConfigError, match=rf"{name} names the eos_token '</oops>', which is not in tokenizer.json"):
            load_tokenizer(folder)


@pytest.mark.parametrize("name", [CONFIG, MAP])
def test_a_sentencepiece_model_ends_with_the_token_that_is_named(name: str, tmp_path: Path) -> None:
    train_tokenizer(["a b c"], 330, tmp_path / "tokenizer.model")
    alone = load_tokenizer(tmp_path)
    assert alone.named_eod is None
    (tmp_path / name).write_text(json.dumps({"eos_token": "[SEP]", "pad_token": "[CLS]"}))
    named = load_tokenizer(tmp_path)
    assert (named.eod, named.pad, named.named_eod) == (named.sep, named.cls, named.sep)
    assert named.digest != alone.digest
    (tmp_path / name).write_text(json.dumps({"eos_token": "</oops>"}))
    with pytest.raises(ConfigError, match=f"{name} names the eos_token '</oops>', which is not in tokenizer.model"):
        load_tokenizer(tmp_path)


DECODER = 'added_tokens_decoder must contain an object with "content" for each token id'


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (CONFIG, '{"added_tokens_decoder": [1]}', rf"{DECODER}, not \[1\]\. Download the file again"),
        (CONFIG, '{"added_tokens_decoder": {"x": {"content": "a"}}}', rf'{DECODER}, not {{"x": {{"content": "a"}}}}\.'),
        (MAP, "[]", f"{MAP} must contain a JSON object"),
        (MAP, "{", f"{MAP} is not JSON"),
        (
            ADDED,
            '{"a": "b"}',
            "the value of 'a' is 'b', but must be its token id, an integer. Download the file again.",
        ),
    ],
)
def test_wrong_settings_are_refused(name: str, content: str, problem: str, tmp_path: Path) -> None:
    byte_folder(tmp_path / "t", {})
    (tmp_path / "t" / name).write_text(content)
    with pytest.raises(ConfigError, match=problem):
        load_tokenizer(tmp_path / "t")


def test_an_export_encodes_as_the_run_that_it_came_from(tmp_path: Path) -> None:
    text = "Read </s> and <pad> and [MASK] as they are written. <unk>\n" * 20
    train_tokenizer([text], 330, tmp_path / "run.model")
    (tmp_path / "hf").mkdir()
    for name, content in tokenizer_json(tmp_path / "run.model").items():
        (tmp_path / "hf" / name).write_text(content)
    run, export = load_tokenizer(tmp_path / "run.model"), load_tokenizer(tmp_path / "hf")
    assert export.encode(text) == export.encode_prompt(text) == run.encode_prompt(text)
    assert export.encode_batch([text]) == [export.encode(text)]
    assert not set(export.special_ids().tolist()) & set(export.encode(text))


@pytest.mark.parametrize("split", [True, False])
def test_a_mask_is_asked_for(split: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = word_piece(tmp_path, ["the model learns"] * 9)
    (folder / CONFIG).write_text(json.dumps({**FAST, "mask_token": "[MASK]", "split_special_tokens": split}))
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "the [MASK] learns [SEP]"
    ids = ours.encode_masked(text)
    assert ids.count(ours.mask) == 1 and (ours.sep in ids) is not split
    assert [ids[: ids.index(ours.mask)], ids[ids.index(ours.mask) + 1 :]] == [
        ours.encode("the "),
        ours.encode(" learns [SEP]"),
    ]
    if not split:
        assert ids == theirs.encode(text, add_special_tokens=False)


def test_the_mask_goes_by_its_name_and_takes_its_spaces(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    mask = {**OBJECT, "content": "<mask>", "special": True}
    config = {**FAST, "eos_token": "</s>", "mask_token": mask, "extra_special_tokens": [mask]}
    for split in (False, True):
        folder = byte_folder(tmp_path / str(split), {CONFIG: {**config, "split_special_tokens": split}})
        ours = load_tokenizer(folder)
        assert ours.encode_masked("a [MASK]b") == ours.encode_masked("a <mask>b")
        assert ours.encode_masked("a <mask>b") == [ours.encode("a")[0], ours.mask, ours.encode("b")[0]]
        if not split:
            theirs = AutoTokenizer.from_pretrained(folder)
            assert ours.encode_masked("a <mask>b") == theirs.encode("a <mask>b", add_special_tokens=False)


# ---------------------------------------------------------------------------------------------------------------------
# A corpus that holds the names of special tokens
# ---------------------------------------------------------------------------------------------------------------------


def corpus(folder: Path, text: str) -> Path:
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(40)))
    return folder / "c.jsonl"


def config_of(tmp_path: Path, folder: Path, text: str) -> DataConfig:
    return DataConfig(
        corpus=str(corpus(tmp_path, text)), tokenizer=str(folder), cache_dir=str(tmp_path / "cache"), num_workers=1
    )


def test_special_tokens_in_a_corpus_are_said_and_can_be_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = byte_folder(tmp_path / "t", {CONFIG: {**FAST, "eos_token": "</s>"}})
    config = config_of(tmp_path, folder, "a </s> b <pad> </s>")
    for _ in range(2):  # made, and found done
        (note,) = prepare(config, "gpt", show_progress=False).notes
        assert "c.jsonl contains 120 names of special tokens ('</s>' 80, '<pad>' 40)" in note
        assert f'"split_special_tokens": true in {folder / CONFIG} makes them plain text' in note
    assert prepare_command([f"data.{key}={getattr(config, key)}" for key in ("corpus", "tokenizer", "cache_dir")]) == 0
    assert f"note        {note}" in capsys.readouterr().out
    # what it advises
    (folder / CONFIG).write_text(json.dumps({**FAST, "eos_token": "</s>", "split_special_tokens": True}))
    split = prepare(config, "gpt", show_progress=False)
    assert split.notes == []
    tokens = np.fromfile(f"{split.train[0].prefix}.bin", np.uint16)
    assert (tokens == 2).sum() == 0 and (tokens[:-1] == 1).sum() <= 40
    assert prepare(config_of(tmp_path, folder, "plain"), "gpt", show_progress=False).notes == []


def test_parts_count_special_tokens(tmp_path: Path) -> None:
    from data.corpus.documents import Span  # as a worker gets it

    tokenizer = load_tokenizer(byte_folder(tmp_path / "t", {CONFIG: {**FAST, "eos_token": "</s>"}}))
    file = corpus(tmp_path, "x <pad>")
    span = Span(str(file), "c", "c", "jsonl", 0, file.stat().st_size, file.stat().st_size)
    for family in ("gpt", "bert"):
        tokenize_shard(tokenizer, [span], "text", family, tmp_path / f"{family}.npz")
        assert np.load(tmp_path / f"{family}.npz")["control_tokens"].tolist() == [[2, 40]]
