"""The tokenizer.json of a tokenizer that is trained here: the same tokens of a text, and the same text of any
tokens."""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers

from data.tokenizer import load_tokenizer, train_tokenizer, word_encoder
from data.tokenizer.huggingface import HuggingFaceTokenizer
from data.tokenizer.sentencepiece_json import NotConvertible, tokenizer_json

pytestmark = pytest.mark.fast

NASTY = [
    "",
    " ",
    "\n\n  \n",
    "[CLS] <pad> </s> <unk> <0x0A> [MASK] <0x41>",
    "\u2581 a\u2581\u2581b",
    "caf\u00e9 \U0001f600 \u4e2d\u6587 \ufffd \x00\x7f",
    "def f():\r\n\treturn x[1] < y[2]\r\n",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as an export makes it, with the model that it came from."""
    path = tmp_path_factory.mktemp("unigram")
    train_tokenizer([_source("argparse"), _source("typing")], 512, path / "tokenizer.model")
    for name, text in tokenizer_json(path / "tokenizer.model").items():
        (path / name).write_text(text)
    return path


def _source(module: str) -> str:
    return (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text()


def _random_text(rng: random.Random) -> str:
    points = (
        rng.choice([rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])
        for _ in range(rng.randint(1, 30))
    )
    return "".join(chr(point) for point in points if point not in (0xFDD0, 0xFDD1))


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_transformers_reads_and_writes_the_same(family: str, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    # which tokenizer class it would take otherwise
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
    ours, theirs = load_tokenizer(folder / "tokenizer.model"), AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(0)
    for text in [*NASTY, *(_random_text(rng) for _ in range(200))]:
        ids = ours.encode_prompt(text)
        assert theirs.decode(ours.encode(text), skip_special_tokens=True) == text
        assert theirs(text).input_ids == ids, repr(text)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids) == text
    # also bytes that are no UTF-8, special tokens in between, and ids that a model has beyond the tokenizer's
    for _ in range(300):
        ids = [rng.randrange(ours.vocab_size + 20) for _ in range(rng.randint(1, 20))]
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids), ids
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.mask_token_id) == (ours.eod, ours.pad, ours.mask)
    assert len(theirs) == ours.vocab_size


def test_a_whole_source_is_split_as_it_is_in_training(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder / "tokenizer.model"), load_tokenizer(folder / "tokenizer.json")
    for module in ("argparse", "tarfile"):
        text = _source(module)
        ids, again = ours.encode(text), theirs.encode(text)
        assert ours.encode_prompt(text) == theirs.encode_prompt(text) == again
        assert theirs.decode(again) == text
        # sentencepiece adds in fp32: which of two equally likely splits it takes depends on the text before.
        assert len(ids) == pytest.approx(len(again), rel=1e-3)
        different = sum(ours.encode(line) != theirs.encode(line) for line in text.splitlines(keepends=True))
        assert different < len(text.splitlines()) / 50


class Counted:
    """A library's tokenizer that counts the characters that it is asked to search."""

    def __init__(self, model: Any):
        self.model, self.characters = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self.model.encode(text, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self.model.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("limit", ["MOST_WORDS", "LONGEST_WORD"])
def test_words_beyond_those_that_are_kept(limit: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_encoder, limit, 5)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    assert isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer._words is not None
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    kept = []
    for text in ["abcd", "if x in y", "abcd abcde", "x y", "if x", " ".join(["for else while"] * 2), "abcd"]:
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids, text
        kept.append(set(tokenizer._words._ids))
    numbers = list(map(len, kept))
    assert limit != "MOST_WORDS" or sorted(numbers) != numbers  # it began anew
    assert limit != "LONGEST_WORD" or max(map(len, kept[-1])) == 5


def test_words_that_come_again_are_not_searched_again(folder: Path, tmp_path: Path) -> None:
    """As fast as by the model beside it is a folder of our own export only if each word is searched once."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    counted: Any = Counted(tokenizer._model)
    tokenizer._model = counted
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    rng = random.Random(1)
    mixed = [
        "".join(rng.choice([" ", "    ", "\n", "e", "re", "(", "[1]", "</s>", "9", "\t", "\xe9"]) for _ in range(99))
    ]
    texts = [*NASTY, *mixed, "a\ufdd0 (\ufdd1", *(_random_text(rng) for _ in range(200)), "x" * 300 + " " * 300]
    for text in [*texts, _source("argparse"), _source("tarfile")]:
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids, repr(text)
    assert counted.characters < 60_000  # of 210,000
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    counted.characters = 0
    tokenizer.encode(_source("argparse") + _source("tarfile"))
    assert counted.characters < 2_000  # the longest words, which are not kept


@pytest.mark.parametrize(
    ("section", "change", "by_words"),
    [
        ("model", {"byte_fallback": False}, False),
        ("normalizer", None, False),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "_", "prepend_scheme": "never", "split": True}, False),
        ("added_tokens", [], False),
        ("piece", "a(b", True),  # longer words
        ("piece", "a b", False),  # from word to word
        ("score", -(2.0**-45), True),  # only of short texts: of longer ones the scores' sums are rounded
    ],
)
def test_a_tokenizer_whose_words_could_be_split_otherwise(
    section: str, change: Any, by_words: bool, folder: Path, tmp_path: Path
) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    if section == "piece":
        spec["model"]["vocab"].append([change, -1.0])
    elif section == "score":
        spec["model"]["vocab"][-1][1] = change
    elif section == "model":
        spec["model"].update(change)
    else:
        spec[section] = change
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert (tokenizer._words is not None) == by_words
    for text in [_source("typing"), "x = a(b) a b ", *NASTY]:
        assert tokenizer.encode(text) == tokenizer._model.encode(text, add_special_tokens=False).ids, repr(text)
    if section == "score":
        assert tokenizer._words is not None and tokenizer._words.encode("a" * 20) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "word"}, r"its type \(WORD\) is neither Unigram nor BPE"),
        ({"model_type": "char"}, r"its type \(CHAR\) is neither Unigram nor BPE"),
        ({"treat_whitespace_as_suffix": True}, "it marks spaces at the end of a word"),
        ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "it marks spaces at the end of a word"),
        ({"user_defined_symbols": ["<x>"]}, r"its piece '<x>' contains <, \[ or a character that stands for them"),
        ({"user_defined_symbols": ["a b"], "model_type": "bpe"}, "its piece 'a b' contains a space"),
        ({"user_defined_symbols": ["ab", "bcd"], "model_type": "bpe", "add_dummy_prefix": True}, "overlap"),
    ],
)
def test_what_has_no_equal_is_told(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    kept = {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    trained: dict[str, Any] = {"byte_fallback": True, **kept}
    lines = _source("typing").splitlines()[:300]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "m"),
        vocab_size=400,
        minloglevel=2,
        hard_vocab_limit=False,
        **{**trained, **settings},
    )
    with pytest.raises(NotConvertible, match=reason):
        tokenizer_json(tmp_path / "m.model")
