import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from base.errors import ConfigError
from data.tokenizer import load_tokenizer, train_tokenizer
from data.tokenizer.base import CLS, EOD, MASK, PAD, SEP
from data.tokenizer.huggingface import HuggingFaceTokenizer
from tests.waits import LONG

pytestmark = pytest.mark.fast

ALPHABETS = [
    "abc XYZ 019 \n\t\r",
    "  \n\n\n    ",
    "\u2581 a\u2581\u2581b",
    "\x00\x01\x7f\x85\u2028\ufeff\ufffd",
    "e\u0301\u00e9\u4e2d\u6587\u3000\U0001f600\u200d\U0001f469",
    "<>[]0xAF|_/pads",
]
NASTY = [
    "",
    " ",
    "\n",
    "[CLS] <pad> </s> <unk> <0x0A> [MASK]",
    "\u2581",
    "a\u2581",
    "\u2581a",
    "x" * 5000,
    "\n" * 500,
    " " * 500,
    "def f():\r\n\treturn 1\r\n",
]


def word_piece(folder: Path, texts: list[str]) -> Path:
    model = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    model.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[PAD]", "[UNK]", CLS, SEP, MASK])
    )
    model.save(str(folder / "tokenizer.json"))
    return folder


def byte_level(folder: Path, texts: list[str]) -> Path:
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    )
    model.save(str(folder / "tokenizer.json"))
    return folder


def words_of(tokenizer, text: str) -> list[str]:
    """The text cut where the tokenizer says that words begin."""
    ids = tokenizer.encode(text)
    begins = tokenizer.word_starts()[ids]
    begins[1:] |= tokenizer.word_ends()[ids][:-1]
    groups: list[list[int]] = []
    for token, begin in zip(ids, begins, strict=True):
        if begin or not groups:
            groups.append([])
        groups[-1].append(token)
    return [tokenizer.decode(group) for group in groups]


def test_trained_tokenizer_is_lossless(tokenizer):
    rng = random.Random(0)
    cases = list(NASTY)
    for _ in range(400):
        alphabet = rng.choice(ALPHABETS) + rng.choice(ALPHABETS)
        cases.append("".join(rng.choices(alphabet, k=rng.randint(1, 60))))
    for _ in range(200):  # any character but surrogates
        points = (
            rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]) for _ in range(rng.randint(1, 30))
        )
        cases.append("".join(map(chr, points)))
    for text in cases:
        assert tokenizer.decode(tokenizer.encode(text)) == text, repr(text)
    batch = tokenizer.encode_batch(cases)
    assert batch == [tokenizer.encode(text) for text in cases]


def test_text_never_makes_special_tokens(tokenizer):
    special = set(tokenizer.special_ids().tolist())
    assert {tokenizer.pad, tokenizer.eod, tokenizer.cls, tokenizer.sep, tokenizer.mask} <= special
    for text in (PAD, EOD, CLS, SEP, MASK, "<unk>", f"a {MASK} b"):
        assert not special & set(tokenizer.encode(text)), text


def test_training_is_deterministic(tmp_path, texts):
    for name in ("a", "b"):
        train_tokenizer(iter(texts), 350, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_training_on_little_text_gives_a_small_vocabulary(tmp_path):
    train_tokenizer(["hello world\n"], 4096, tmp_path / "m.model")
    small = load_tokenizer(tmp_path / "m.model")
    assert 256 < small.vocab_size < 4096
    assert small.decode(small.encode("hello world")) == "hello world"


def test_training_rejects_what_cannot_work(tmp_path):
    with pytest.raises(ConfigError, match=r"data.vocab_size \(100\) must be from 320"):
        train_tokenizer(["text"], 100, tmp_path / "m")
    with pytest.raises(ConfigError, match="data.corpus"):
        train_tokenizer(["\n\n"], 400, tmp_path / "m")


@pytest.mark.parametrize(("first", "count"), [(0x3041, 80), (0x4E00, 3000), (0xAC00, 2000), (0x21, 90)])
@pytest.mark.parametrize("vocab_size", [320, 600, 2000])
def test_more_characters_than_a_vocabulary_holds(first, count, vocab_size, tmp_path):
    """Japanese, Chinese, Korean: what has no piece is written as bytes, and frequent words still are pieces."""
    rng = random.Random(count)
    characters = [chr(first + i) for i in range(count)]
    rng.shuffle(characters)
    weights = [1 / (i + 5) for i in range(count)]
    words = ["".join(rng.choices(characters, weights, k=rng.randint(2, 4))) for _ in range(count)]
    lines = ["".join(rng.choices(words, k=12)) for _ in range(400)]
    said = train_tokenizer(lines, vocab_size, tmp_path / "m.model")
    tokenizer = load_tokenizer(tmp_path / "m.model")
    text = "".join(lines) + "\u3042\U0001f600 x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    if count > vocab_size or vocab_size == 320:
        assert tokenizer.vocab_size == vocab_size
        assert f"data.vocab_size={vocab_size}: the corpus has " in said and "the others are encoded as bytes" in said
        assert any(len(tokenizer.token_piece(i)) > 1 for i in range(263, vocab_size))
    else:
        assert "encoded as bytes" not in said


def test_training_says_what_it_could_not_do(tmp_path):
    assert train_tokenizer(["a b"], 8000, tmp_path / "m") == "data.vocab_size=8000: the corpus yields only 266 pieces"
    with pytest.raises(ConfigError, match=r"data.vocab_size \(2147483648\) must be .* to 1000000\."):
        train_tokenizer(["a"], 2**31, tmp_path / "m")
    with pytest.raises(ConfigError, match="data.corpus: every line contains U.2585"):
        train_tokenizer(["\u2585"], 400, tmp_path / "m")
    for vocab_size in (320, 4096):  # what is advised for a vocabulary that is too small
        train_tokenizer(["a"], vocab_size, tmp_path / "m")


def test_sentencepiece_words(tokenizer):
    assert words_of(tokenizer, "The model learns.") == ["The", " model", " learns", "."]
    # A word at the start of a line has no space before it; indentation and symbols stand alone.
    words = [word for word in words_of(tokenizer, "a\ntokens(x_1) caf\u00e9") if word.strip()]
    assert words == ["a", "tokens", "(", "x_1", ")", " caf\u00e9"]


def test_word_piece(tmp_path, texts):
    wordpiece = load_tokenizer(word_piece(tmp_path, texts))
    assert isinstance(wordpiece, HuggingFaceTokenizer)
    assert wordpiece.cls != wordpiece.sep != wordpiece.mask
    assert wordpiece.decode(wordpiece.encode("the model learns")) == "the model learns"
    ids = wordpiece.encode("gradient zebraa")
    tokens = [str(wordpiece._model.id_to_token(i)) for i in ids]
    assert any(token.startswith("##") for token in tokens)
    assert wordpiece.word_starts()[ids].tolist() == [not token.startswith("##") for token in tokens]
    assert not wordpiece.word_ends().any()


def test_byte_level(tmp_path, texts):
    byte = load_tokenizer(byte_level(tmp_path, texts))
    assert isinstance(byte, HuggingFaceTokenizer)
    assert byte.encode_batch(texts[:9]) == [byte.encode(text) for text in texts[:9]]
    text = "the  model\n\tlearns caf\u00e9 quickly."
    assert byte.decode(byte.encode(text)) == text
    assert [word for word in words_of(byte, text) if word.strip()] == [
        "the",
        " model",
        "learns",
        " caf\u00e9",
        " quickly",
        ".",
    ]
    assert byte.eod == byte.pad == byte._model.token_to_id("<|endoftext|>")
    with pytest.raises(ConfigError, match="data.tokenizer=.*mask"):
        _ = byte.mask


def test_hugging_face_config_names_the_special_tokens(tmp_path, texts):
    byte_level(tmp_path, texts)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "!"}, "pad_token": "?"}')
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.eod == tokenizer._model.token_to_id("!") and tokenizer.pad == tokenizer._model.token_to_id("?")


def test_what_is_no_tokenizer(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"not a model")
    (tmp_path / "tokenizer.json").write_text("{}")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "none.model", tmp_path / "bad.model", tmp_path, empty):
        with pytest.raises(ConfigError, match="data.tokenizer"):
            load_tokenizer(path)


def test_arrays(tokenizer):
    ids = tokenizer.encode_array("the model")
    assert ids.dtype == np.int32 and ids.max() < tokenizer.vocab_size
    assert len(tokenizer.word_starts()) == len(tokenizer.word_ends()) == tokenizer.vocab_size


def test_workers_import_neither_torch_nor_transformers():
    heavy = "{'torch', 'transformers', 'pyarrow', 'megatron'}"
    code = f"import sys, data.worker, data.prepare, data.samples; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONG)
