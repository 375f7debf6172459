"""Tokenizers behind one interface: sentencepiece models (taken or trained here) and Hugging Face `tokenizer.json` files.

torch and transformers are not imported: the processes that tokenize import this file.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import ConfigError
from configs.tokenizer_files import JSON, core_file
from data import unigram

REPLACEMENT = "\ufffd"  # stands for bytes that are no text
SPACE = "\u2581"  # sentencepiece writes spaces as this character (and reads it back as a space)
PAD, EOD, CLS, SEP, MASK = "<pad>", "</s>", "[CLS]", "[SEP]", "[MASK]"
# Names that common tokenizers give to the same role, most usual first.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|eot_id|>", "<eos>", "<eod>", "[EOS]", "[SEP]")
PAD_NAMES = ("<pad>", "[PAD]", "<|padding|>", "<|pad|>", "<|finetune_right_pad_id|>")
MASK_NAMES = {"cls": ("[CLS]", "<cls>", "<s>"), "sep": ("[SEP]", "<sep>", "</s>"), "mask": ("[MASK]", "<mask>")}

MIN_TRAINED_VOCAB = 320  # 256 bytes, 7 special symbols and some room for real pieces
MAX_TRAINING_SENTENCES = 50_000
MAX_TRAINING_CHARACTERS = 2_000_000
MAX_SENTENCE_CHARACTERS = 2_000


class Tokenizer(ABC):
    """Text to token ids and back.

    `pad`, `eod` and, for BERT, `cls`, `sep`, `mask` are ids; the latter three raise ConfigError when the tokenizer has none. `bos` is
    the id that the tokenizer itself begins texts with, if it names one: training does not use it, its documents follow `eod`.
    """

    path: str
    vocab_size: int
    eod: int
    pad: int
    bos: int | None
    named_eod: int | None = None  # eod, where a file beside the tokenizer's names another than the usual one

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 [n], without special tokens."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special tokens are left out."""

    @abstractmethod
    def _find(self, names: Iterable[str]) -> int | None:
        """The id of the first of these pieces that exists."""

    @abstractmethod
    def _surfaces(self) -> list[bytes | None]:
        """The bytes that each piece stands for, with its leading space; None for special tokens."""

    @abstractmethod
    def _content(self) -> bytes:
        """What decides the ids of a text, apart from the roles."""

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits that are the same for tokenizers that do the same, wherever they lie and whatever they are called."""
        return hashlib.sha256(json.dumps([self.eod, self.pad]).encode() + self._content()).hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        return self.encode_array(text).tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text to continue, with the special tokens that transformers puts around it."""
        return self.encode(text)

    def for_transformers(self, family: str) -> dict[str, str]:
        """Files, by name, without which transformers would not make the same tokens for a model of this family. Raises NotConvertible if
        there can be none."""
        return {}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each text; faster than one by one where the texts are short."""
        return [self.encode(text) for text in texts]

    def _role(self, role: str) -> int:
        found = self._find(MASK_NAMES[role])
        if found is None:
            raise ConfigError(
                f"data.tokenizer={self.path}: it has no {role} token (one of {', '.join(MASK_NAMES[role])}), which BERT needs; "
                "data.tokenizer=sentencepiece trains one that has it"
            )
        return found

    @cached_property
    def cls(self) -> int:
        return self._role("cls")

    @cached_property
    def sep(self) -> int:
        return self._role("sep")

    @cached_property
    def mask(self) -> int:
        return self._role("mask")

    def special_ids(self) -> np.ndarray:
        """Ids that stand for no text, ascending."""
        return np.flatnonzero([surface is None for surface in self._surfaces()])

    def line_ends(self) -> np.ndarray:
        """bool [vocab_size]: a line ends with this piece, apart from spaces."""
        return np.array([surface is not None and surface.rstrip(b" \t").endswith(b"\n") for surface in self._surfaces()], dtype=bool)

    def word_starts(self) -> np.ndarray:
        """bool [vocab_size]: this piece always begins a word (it starts with a space or a symbol, or is special)."""
        return np.array([surface is None or not _is_letter(surface[:1]) for surface in self._surfaces()], dtype=bool)

    def word_ends(self) -> np.ndarray:
        """bool [vocab_size]: whatever follows this piece begins a word (it ends with a space or a symbol, or is special).

        A piece that is one space does not: it is the beginning of a word whose letters got pieces of their own.
        """
        surfaces = self._surfaces()
        return np.array([surface is None or (surface != b" " and not _is_letter(surface[-1:])) for surface in surfaces], dtype=bool)


def _is_letter(byte: bytes) -> bool:
    """Whether a byte belongs to the inside of a word: letters, digits, `_`, and every byte of a non-ASCII character."""
    return bool(byte) and (byte[0] >= 0x80 or byte.isalnum() or byte == b"_")


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model` file."""

    def __init__(self, path: str | Path):
        import sentencepiece

        self.path = str(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=self.path)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"data.tokenizer={self.path}: it is no sentencepiece model: {_first_line(error)}") from error
        self.vocab_size = self._model.vocab_size()
        eod = self._model.eos_id()
        found = eod if eod >= 0 else self._find(EOD_NAMES)
        if found is None:
            raise ConfigError(f"data.tokenizer={self.path}: it has no end-of-document token (one of {', '.join(EOD_NAMES)})")
        self.eod = found
        pad = self._model.pad_id()
        named = pad if pad >= 0 else self._find(PAD_NAMES)
        self.pad = self.eod if named is None else named
        settings = _settings(Path(path).parent)
        bos = self._find([_name(settings.get("bos_token"))])
        self.bos = bos if bos is not None else self._model.bos_id() if self._model.bos_id() >= 0 else None
        self._before = [self.bos] if settings.get("add_bos_token") and self.bos is not None else []
        self._after = [self.eod] if settings.get("add_eos_token") else []
        # sentencepiece would read a literal U+2581 back as a space; its three bytes come back as they were.
        self._space_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self._lossless = all(self._model.is_byte(i) for i in self._space_ids)

    def encode_array(self, text: str) -> np.ndarray:
        if SPACE not in text or not self._lossless:
            return self._model.encode_as_numpy(text)
        escaped = np.array(self._space_ids, dtype=np.int32)
        pieces = [self._model.encode_as_numpy(piece) for piece in text.split(SPACE)]
        return np.concatenate([pieces[0]] + [part for piece in pieces[1:] for part in (escaped, piece)])

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self._lossless and any(SPACE in text for text in texts):
            return super().encode_batch(texts)
        return self._model.encode(texts, num_threads=1)

    def _content(self) -> bytes:
        return Path(self.path).read_bytes()

    def encode_prompt(self, text: str) -> list[int]:
        # Two splits of a word that are equally likely come out in either order: transformers' is taken, where it is known.
        ids = self.encode(text) if self._of_transformers is None else self._of_transformers.encode(text).ids
        return [*self._before, *ids, *self._after]

    @cached_property
    def _of_transformers(self) -> Any:
        import tokenizers

        try:
            model = tokenizers.Tokenizer.from_str(unigram.tokenizer_json(Path(self.path))[JSON])
        except unigram.NotConvertible:
            return None
        model.encode_special_tokens = True  # "</s>" in a text is four characters
        return model

    def for_transformers(self, family: str) -> dict[str, str]:
        has_settings = (Path(self.path).parent / "tokenizer_config.json").is_file()  # then it came from Hugging Face
        return {} if has_settings else unigram.tokenizer_json(Path(self.path), family)

    def decode(self, ids: Iterable[int]) -> str:
        model = self._model
        known = (i for i in map(int, ids) if 0 <= i < self.vocab_size)  # a model may have more tokens than its tokenizer
        kept = [i for i in known if not (model.is_control(i) or model.is_unknown(i))]
        text = model.decode(kept)
        if REPLACEMENT not in text or not self._lossless:
            return str(text)
        # As Hugging Face's tokenizers write bytes in a row that are no UTF-8 as a whole: a replacement character for each.
        replaced: list[int] = []
        for is_byte, group in itertools.groupby(kept, model.is_byte):
            run = list(group)
            if is_byte and not _is_utf8(bytes(int(model.id_to_piece(i)[3:5], 16) for i in run)):
                run = [model.piece_to_id(f"<0x{byte:02X}>") for byte in REPLACEMENT.encode()] * len(run)
            replaced += run
        return str(model.decode(replaced))

    def _find(self, names: Iterable[str]) -> int | None:
        known = ((self._model.piece_to_id(name), name) for name in names)  # an unknown name gives the id of <unk>
        return next((i for i, name in known if self._model.id_to_piece(i) == name), None)

    def _surfaces(self) -> list[bytes | None]:
        model = self._model
        surfaces: list[bytes | None] = []
        for i in range(self.vocab_size):
            piece = model.id_to_piece(i)
            if model.is_byte(i):
                surfaces.append(bytes([int(piece[3:5], 16)]))
            elif model.is_control(i) or model.is_unknown(i) or piece in (CLS, SEP, MASK, PAD):
                surfaces.append(None)
            else:
                surfaces.append(piece.replace(SPACE, " ").encode())
        return surfaces


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, or a folder that holds one."""

    def __init__(self, path: str | Path):
        import tokenizers

        self.path = str(path)
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        try:
            self._model = tokenizers.Tokenizer.from_file(str(file))
            self._spec: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"data.tokenizer={path}: {file} is no Hugging Face tokenizer.json: {_first_line(error)}") from error
        self._model.no_truncation()
        self._model.no_padding()
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        settings = _settings(file.parent)
        self._says_class = "tokenizer_class" in settings
        named = {role: [_name(settings[role])] for role in ("bos_token", "eos_token", "pad_token") if _name(settings.get(role))}
        eod = self._find([*named.get("eos_token", ()), *EOD_NAMES])
        if eod is None:
            raise ConfigError(
                f"data.tokenizer={path}: it has no end-of-document token: none of {', '.join(EOD_NAMES)}, "
                "and no eos_token in tokenizer_config.json"
            )
        self.eod = eod
        self.named_eod = eod if eod != self._find(EOD_NAMES) else None
        pad = self._find([*named.get("pad_token", ()), *PAD_NAMES])
        self.pad = eod if pad is None else pad
        self.bos = self._find(named.get("bos_token", ()))
        roles = {"eos_token": self._model.id_to_token(self.eod), "pad_token": self._model.id_to_token(self.pad)}
        self._settings = {"tokenizer_class": "PreTrainedTokenizerFast", **(settings or roles)}

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self._model.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_prompt(self, text: str) -> list[int]:
        return list(self._of_transformers.encode(text, add_special_tokens=True).ids)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False)]

    def _content(self) -> bytes:
        # Neither the order and layout of the JSON nor what is switched off above changes an id.
        spec = {key: value for key, value in self._spec.items() if key not in ("truncation", "padding")}
        return json.dumps(spec, sort_keys=True).encode()

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._of_transformers.decode([int(i) for i in ids], skip_special_tokens=True))

    def for_transformers(self, family: str) -> dict[str, str]:
        # Without a class in its settings, transformers would take that of the model's family, which may split texts by rules of its own.
        return {} if self._says_class else {"tokenizer_config.json": json.dumps(self._settings, indent=2) + "\n"}

    @cached_property
    def _of_transformers(self) -> Any:
        """The tokenizer as transformers takes it: what the files beside tokenizer.json name as special tokens are so, too. Training's
        encoding does not know of them."""
        import tokenizers

        model = tokenizers.Tokenizer.from_str(self._model.to_str())
        names = {_name(value) for key, value in self._settings.items() if key.endswith("_token")}
        extra = self._settings.get("additional_special_tokens") or self._settings.get("extra_special_tokens") or []
        names |= {_name(value) for value in (extra.values() if isinstance(extra, dict) else extra)}
        names |= {_name(value) for value in self._settings.get("added_tokens_decoder", {}).values() if value.get("special")}
        known = sorted(name for name in names if name and model.token_to_id(name) is not None)
        have = {token.content for token in model.get_added_tokens_decoder().values() if token.special}
        model.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in known if name not in have])
        model.encode_special_tokens = bool(self._settings.get("split_special_tokens"))  # whether "<s>" in a text is three characters
        return model

    def _find(self, names: Iterable[str]) -> int | None:
        return next((i for i in map(self._model.token_to_id, names) if i is not None), None)

    def _kinds(self) -> set[str]:
        """Every `type` that the pre-tokenizer and the decoder name."""
        kinds: set[str] = set()
        pending = [self._spec.get("pre_tokenizer"), self._spec.get("decoder")]
        while pending:
            item = pending.pop()
            if isinstance(item, dict):
                kinds.add(str(item.get("type")))
                pending.extend(value for value in item.values() if isinstance(value, (dict, list)))
            elif isinstance(item, list):
                pending.extend(item)
        return kinds

    def _surfaces(self) -> list[bytes | None]:
        special = {token["id"] for token in self._spec.get("added_tokens", []) if token.get("special")}
        byte_level = "ByteLevel" in self._kinds()
        alphabet = _byte_level_alphabet() if byte_level else {}
        surfaces: list[bytes | None] = []
        for i in range(self.vocab_size):
            piece = None if i in special else self._model.id_to_token(i)
            if piece is None:
                surfaces.append(None)
            elif byte_level:
                surfaces.append(b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece))
            elif len(piece) == 6 and piece.startswith("<0x"):
                surfaces.append(bytes([int(piece[3:5], 16)]))
            else:
                surfaces.append(piece.replace(SPACE, " ").encode())
        return surfaces

    def _is_word_piece(self) -> bool:
        return self._spec["model"].get("type") == "WordPiece"

    def word_starts(self) -> np.ndarray:
        if not self._is_word_piece():
            return super().word_starts()
        prefix = self._spec["model"].get("continuing_subword_prefix", "##")
        pieces = [self._model.id_to_token(i) for i in range(self.vocab_size)]
        return np.array([piece is None or not piece.startswith(prefix) for piece in pieces], dtype=bool)

    def word_ends(self) -> np.ndarray:
        # The "##" mark alone says where words begin.
        return np.zeros(self.vocab_size, dtype=bool) if self._is_word_piece() else super().word_ends()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: character -> byte (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of a folder, {} where there is none. Raises ConfigError."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {_first_line(error)}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return settings


def _name(token: Any) -> str:
    """The text of a special token in tokenizer_config.json, which is that or an object; "" for none."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Open a sentencepiece `.model`, a `tokenizer.json`, or a folder with either. Raises ConfigError naming data.tokenizer."""
    place = Path(path)
    if not place.exists():
        raise ConfigError(
            f"data.tokenizer={path}: no such file or folder; give a sentencepiece .model file, a Hugging Face folder "
            "or tokenizer.json, or data.tokenizer=sentencepiece to train one"
        )
    core = core_file(place)
    if core is None:
        count = len(list(place.glob("*.model")))
        raise ConfigError(f"data.tokenizer={path}: the folder holds no tokenizer.json and {count} .model files (one is needed)")
    if core.suffix == ".json":
        return HuggingFaceTokenizer(place)
    return SentencePieceTokenizer(core)


def tokenizer_digest(path: str | Path) -> str:
    """The content of the tokenizer at `path` (as load_tokenizer takes it) in 32 hexadecimal digits. Raises ConfigError."""
    return load_tokenizer(path).digest


def tokenizer_file(path: str | Path) -> Path:
    """The file that decides what the tokenizer at `path` does."""
    return core_file(Path(path)) or Path(path)


def train_tokenizer(texts: Iterable[str], vocab_size: int, out: str | Path) -> None:
    """Train a lossless sentencepiece model on a bounded sample of `texts` and write it to `out`, atomically.

    Unigram rather than BPE: on source text it encodes 3 to 4 times as fast at 2% more tokens. Deterministic for the same texts.
    The same model serves GPT and BERT: it has pad, end-of-document, [CLS], [SEP] and [MASK] symbols.
    Few texts give a vocabulary smaller than `vocab_size`. Raises ConfigError when vocab_size is too small or there is no text.
    """
    import sentencepiece

    if vocab_size < MIN_TRAINED_VOCAB:
        raise ConfigError(
            f"data.vocab_size={vocab_size}: a trained tokenizer needs at least {MIN_TRAINED_VOCAB} "
            f"(256 bytes, the special symbols and some words); data.vocab_size=4096 works"
        )
    lines = _sample_lines(texts)
    if not lines:
        raise ConfigError("data.corpus: it holds no text to train a tokenizer on")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9995,
            unk_id=0,
            pad_id=1,
            eos_id=2,
            bos_id=-1,
            pad_piece=PAD,
            eos_piece=EOD,
            control_symbols=[CLS, SEP, MASK],
            user_defined_symbols=["\n"],
            max_sentence_length=16 * MAX_SENTENCE_CHARACTERS,
            seed_sentencepiece_size=200_000,
            num_threads=2,  # fixed: the sums of the EM steps, and so the model, depend on it
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(f"data.vocab_size={vocab_size}: sentencepiece could not train on this corpus: {_first_line(error)}") from error
    temporary = Path(f"{out}.tmp{os.getpid()}")
    temporary.write_bytes(model.getvalue())
    temporary.rename(out)


def _sample_lines(texts: Iterable[str]) -> list[str]:
    """At most MAX_TRAINING_SENTENCES lines and MAX_TRAINING_CHARACTERS characters of the texts, chosen by a fixed seed."""
    lines = []
    for text in texts:
        for line in text.replace(SPACE, " ").split("\n"):
            for begin in range(0, len(line), MAX_SENTENCE_CHARACTERS):
                lines.append(line[begin : begin + MAX_SENTENCE_CHARACTERS])
    random.Random(0).shuffle(lines)
    chosen: list[str] = []
    total = 0
    for line in lines[:MAX_TRAINING_SENTENCES]:
        total += len(line)
        if total > MAX_TRAINING_CHARACTERS and chosen:
            break
        chosen.append(line)
    return chosen
