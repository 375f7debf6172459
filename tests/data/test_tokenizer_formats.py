"""Tokenizers in the formats of Megatron's users, small ones of the same shape as the published files."""

from __future__ import annotations

import base64
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from base.errors import ConfigError
from checkpoint import kept_tokenizer
from configs.tokenizer_files import copy_tokenizer
from data.tokenizer import load_tokenizer
from data.tokenizer.formats import patterns
from data.tokenizer.formats.spec import byte_level_alphabet
from data.tokenizer.probes import PROBES

pytestmark = pytest.mark.fast

TEXTS = [
    *PROBES,
    "Don't WE'LL 1234567 \u0663\u0664 it'\u017f",
    "\u4e2d\u6587abc\u4e2d <|endoftext|><|im_end|> [EOS]</s>",
]
ALPHABET = byte_level_alphabet()
CORPUS = [
    "the model learns the words of the text ",
    "    return self.x == 12345\n\n",
    "\u4e2d\u6587 caf\u00e9 \u0442\u0435",
]


def _trained(specials: list[str]) -> Any:
    """A small byte pair encoding."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(ALPHABET), special_tokens=specials, show_progress=False
    )
    model.train_from_iterator(CORPUS * 9, trainer)
    return model


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Bytes and what is merged of them, by rank, as tiktoken's files have them."""
    spec = json.loads(_trained([]).to_str())["model"]
    tokens = [*sorted(ALPHABET), *("".join(pair) for pair in spec["merges"])]
    return {bytes(ALPHABET[c] for c in token): rank for rank, token in enumerate(dict.fromkeys(tokens))}


def _tiktoken(ranks: dict[bytes, int], pattern: str, text: str) -> list[int]:
    """tiktoken's algorithm: of the neighbours that are a token together those of the least rank, from the left."""
    ids = []
    for word in regex.findall(pattern, text, flags=regex.V1):
        spans = [bytes([byte]) for byte in word.encode()]
        while len(spans) > 1:
            best = min(range(len(spans) - 1), key=lambda i: ranks.get(spans[i] + spans[i + 1], 1 << 30))
            if spans[best] + spans[best + 1] not in ranks:
                break
            spans[best : best + 2] = [spans[best] + spans[best + 1]]
        ids += [ranks[span] for span in spans]
    return ids


def _alike(tokenizer: Any, expected: Any, texts: list[str] = TEXTS) -> None:
    """Training, prompts and scores have the tokens that are expected of plain text."""
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    for text in texts:
        assert tokenizer.encode_array(text).tolist() == expected(text), repr(text)
        assert tokenizer.encode_prompt(text) == expected(text), repr(text)


def _kept(tokenizer: Any, run_dir: Path) -> Any:
    """What a run keeps of it, as transformers reads it."""
    from transformers import AutoTokenizer

    kept_tokenizer.keep(run_dir, tokenizer)
    again = load_tokenizer(run_dir / "tokenizer")
    assert (again.digest, again.eod, again.pad) == (tokenizer.digest, tokenizer.eod, tokenizer.pad)
    assert again.core_bytes() == tokenizer.core_bytes()  # so the tokens of the corpus are found again
    theirs = AutoTokenizer.from_pretrained(run_dir / "tokenizer")
    for text in TEXTS:
        assert theirs(text).input_ids == tokenizer.encode_prompt(text) == again.encode_prompt(text), repr(text)
    return theirs


@pytest.mark.parametrize("prefix", ["", "gpt2-"])
def test_vocab_json_and_merges(prefix: str, tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    folder = tmp_path / "gpt2"
    folder.mkdir()
    _trained(["<|endoftext|>"]).model.save(str(folder))
    theirs = GPT2Tokenizer.from_pretrained(folder)
    (folder / "vocab.json").rename(folder / f"{prefix}vocab.json")
    (folder / "merges.txt").rename(folder / f"{prefix}merges.txt")
    tokenizer = load_tokenizer(folder)
    _alike(tokenizer, lambda text: theirs(text).input_ids)
    assert tokenizer.eod == theirs.eos_token_id
    assert load_tokenizer(folder / f"{prefix}vocab.json").digest == tokenizer.digest
    copy_tokenizer(folder, tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").digest == tokenizer.digest
    _kept(tokenizer, tmp_path / "run")


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPTNeoXTokenizer", "RobertaTokenizer"])
def test_vocab_json_of_other_classes(name: str, tmp_path: Path) -> None:
    import transformers

    _trained(["<|endoftext|>", "<|padding|>", "<s>", "</s>", "<unk>", "<pad>", "<mask>"]).model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode_prompt(text) == theirs(text).input_ids, repr(text)


@pytest.mark.parametrize(
    "settings", [{}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}]
)
def test_vocab_txt(settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import BertTokenizer

    words = ["the", "Don", "##'", "don", "'", "caf", "cafe", "##\xe9", "a", "b", "##b", "\u4e2d", "\u6587", "=", "-"]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, ""]))
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = BertTokenizer.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode_prompt(text) == theirs(text).input_ids, repr(text)
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False).input_ids, repr(text)
    assert (tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad) == (2, 3, 4, 0)
    said = "do_lower_case" not in settings
    assert ["1 of its pieces never occur" in note for note in tokenizer.notes()] == [True] * said
    _kept(tokenizer, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "known", "eos", "size"),
    [
        ("tokenizer.model", patterns.LLAMA3, "<|end_of_text|>", 256),
        ("qwen.tiktoken", patterns.PUBLISHED["qwen"], "<|endoftext|>", 208),
        ("cl100k_base.tiktoken", patterns.PUBLISHED["cl100k_base"], "<|endoftext|>", None),
        ("o200k_base.tiktoken", patterns.PUBLISHED["o200k_base"], "<|endoftext|>", None),
        ("tiktoken.model", patterns.PUBLISHED["kimi"], "[EOS]", 256),
    ],
)
def test_tiktoken(
    name: str, known: patterns.Published, eos: str, size: int | None, ranks: dict[bytes, int], tmp_path: Path
) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (tmp_path / name).write_text("".join(lines))
    if name == "tiktoken.model":  # whose special tokens are named beside it
        named = {str(len(ranks) + 1): {"content": "[EOS]", "special": True}}
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"added_tokens_decoder": named, "eos_token": "[EOS]", "tokenizer_class": "TikTokenTokenizer"})
        )
    tokenizer = load_tokenizer(tmp_path)

    def expected(text: str) -> list[int]:
        return _tiktoken(ranks, known.pattern, unicodedata.normalize("NFC", text) if known.nfc else text)

    _alike(tokenizer, expected)
    rng = random.Random(0)
    spans = [" ", "\n", "\t", "the", "'s", "12", "\u4e2d", "A", "e\u0301", "=", "    ", "\r", "\u2028", "</s>"]
    _alike(tokenizer, expected, ["".join(rng.choices(spans, k=rng.randint(1, 30))) for _ in range(100)])
    assert size is None or tokenizer.vocab_size == len(ranks) + size
    theirs = _kept(tokenizer, tmp_path / "run")
    assert theirs.eos_token == eos and theirs.eos_token_id == tokenizer.eod


@pytest.mark.parametrize("listed", [True, False])
def test_tekken(listed: bool, ranks: dict[bytes, int], tmp_path: Path) -> None:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for t, i in ranks.items()]
    config = {"pattern": patterns.O200K, "default_vocab_size": 350, "default_num_special_tokens": 50, "version": "v3"}
    content: dict[str, Any] = {"config": config, "vocab": vocab}
    if listed:
        names = ["<unk>", "<s>", "</s>", "[INST]"]
        content["special_tokens"] = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    kept = {token: rank for token, rank in ranks.items() if rank < 300}  # the rest is beyond the vocabulary's size
    tokenizer = load_tokenizer(tmp_path)
    _alike(tokenizer, lambda text: [i + 50 for i in _tiktoken(kept, patterns.O200K, text)])
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (350, 2, 1)
    assert tokenizer.pad == (2 if listed else 11)
    theirs = _kept(tokenizer, tmp_path / "run")
    assert theirs.convert_ids_to_tokens(49) == "<SPECIAL_49>"


def test_a_begin_token_stands_before_prompts_where_the_settings_say_so(ranks: dict[bytes, int], tmp_path: Path) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_prompt("the") == [len(ranks), *tokenizer.encode("the")]
    _kept(tokenizer, tmp_path / "run")


def test_a_sentencepiece_model_of_a_published_folder_leaves_as_it_is_read(tmp_path: Path) -> None:
    """The class that such a folder names would take one space less at the start of a text."""
    from transformers import AutoTokenizer

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 9),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_bos_token": True, "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    for name, text in tokenizer.for_transformers("gpt").items():
        (tmp_path / name).write_text(text)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, " the"]:
        assert tokenizer.encode_prompt(text) == [1, *tokenizer.encode(text)] == theirs(text).input_ids, repr(text)


def test_of_several_formats_one_is_read_and_said(tmp_path: Path) -> None:
    _trained(["<|endoftext|>"]).model.save(str(tmp_path))
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size > 256 and "vocab.txt in the same folder is ignored" in tokenizer.notes()[0]
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizerFast"}')
    assert load_tokenizer(tmp_path).vocab_size == 6


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    def refused(files: dict[str, str], *words: str) -> None:
        folder = tmp_path / f"case_{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        with pytest.raises(ConfigError) as error:
            load_tokenizer(folder)
        text = str(error.value)
        assert "\n" not in text and all(word in text for word in ("data.tokenizer", str(folder), *words)), text

    refused({}, "contains nothing", "vocab.txt", "tekken.json", "merges.txt")
    refused({"vocab.json": "{}", "notes.md": ""}, "notes.md, vocab.json")  # without its merges it is no tokenizer
    refused({"a-vocab.txt": "", "b-vocab.txt": ""}, "a-vocab.txt, b-vocab.txt", "Name one of these files")
    refused({"vocab.json": "[]", "merges.txt": ""}, "a JSON object")
    refused({"vocab.json": '{"a": 1, "b": 1}', "merges.txt": ""}, "a different id for each token")
    refused({"vocab.json": '{"a": 0, "b": 1}', "merges.txt": "a b\n"}, "in line 1 of", "merges.txt", "'ab'")
    refused({"vocab.json": '{"a": 0, "b": 1}', "merges.txt": "#version: 0.2\na\n"}, "line 2", "two pieces")
    refused({"vocab.txt": "a\nb\n"}, "[UNK]")
    refused({"cl100k_base.tiktoken": "IQ== 0\nx\n"}, "line 2", "base64")
    refused({"cl100k_base.tiktoken": "IQ== 0\n"}, "a token for every byte, but has none for byte 0")
    refused({"mine.tiktoken": "IQ== 0\n"}, "tells how texts are split", "cl100k_base.tiktoken")
    refused({"tekken.json": "{}"}, "is not a tekken.json: it lacks 'config'. Download it again")
    config = {"pattern": r"\s++$", "default_vocab_size": 1, "default_num_special_tokens": 0}
    vocab = [{"rank": 0, "token_bytes": "IQ=="}]
    content = json.dumps({"config": config, "vocab": vocab, "special_tokens": []})
    refused({"tekken.json": content}, "its pattern contains '++'")
    other = '{"tokenizer_class": "CLIPTokenizer"}'
    bpe = {"vocab.json": '{"a": 0}', "merges.txt": "", "tokenizer_config.json": other}
    refused(bpe, "CLIPTokenizer", "save_pretrained('tokenizer')")


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        ({"tokenizer_class": "LlamaTokenizer"}, True),  # transformers takes a byte-level one as it is
        ({"tokenizer_class": "GPT2Tokenizer"}, False),
        ({"tokenizer_class": "Qwen2TokenizerFast"}, False),
        ({"tokenizer_class": "GPTNeoXTokenizer"}, False),
    ],
)
def test_classes_that_transformers_rebuilds(settings: dict[str, Any], tokens: bool, tmp_path: Path) -> None:
    """Prompts are those of transformers, or it is said that they are not; what is exported has the same tokens."""
    from transformers import AutoTokenizer

    model = _trained(["<|endoftext|>"])
    pattern = pre_tokenizers.Split(tokenizers.Regex(patterns.O200K), "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence([pattern, pre_tokenizers.ByteLevel(False, False, False)])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", **settings}))
    tokenizer = load_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert all(theirs(text).input_ids == tokenizer.encode_prompt(text) for text in TEXTS) == tokens
    name = settings.get("tokenizer_class", "").removesuffix("Fast")
    assert [f"transformers 5 reads it as {name}" in note for note in tokenizer.notes()] == ([] if tokens else [True])
    for name, text in tokenizer.for_transformers("gpt").items():
        (tmp_path / name).write_text(text)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert all(exported(text).input_ids == tokenizer.encode_prompt(text) for text in TEXTS)


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize(
    ("kind", "prefix", "trims", "rules"),
    [
        ("bpe", False, False, "identity"),
        ("bpe", True, False, "identity"),
        ("bpe", True, True, "identity"),
        ("bpe", True, True, "nmt_nfkc"),
        ("bpe", False, False, "nmt_nfkc"),
        ("unigram", True, False, "identity"),
        ("unigram", True, True, "nmt_nfkc"),
    ],
)
def test_sentencepiece_models(
    kind: str, prefix: bool, trims: bool, rules: str, byte_fallback: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 9),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=360,
        model_type=kind,
        byte_fallback=byte_fallback,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=trims,
        normalization_rule_name=rules,
        user_defined_symbols=["<x>", "<x><y>", "\n"] if kind == "bpe" else [],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    for name, text in tokenizer.for_transformers("gpt").items():
        (tmp_path / name).write_text(text)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "<x>the <x> text<x><y>", "<x>", " <x>", "\n\n", "word" * 300]:
        assert tokenizer.encode(text) == model.encode(text), repr(text)
        assert tokenizer.encode_prompt(text) == theirs(text).input_ids, repr(text)
        if kind == "bpe":  # of equally likely splits a Unigram model may take another one
            assert theirs(text).input_ids == model.encode(text), repr(text)
