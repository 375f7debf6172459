"""Published tiktoken vocabularies: the patterns that split a text before merges, and the special tokens.

The files of these vocabularies contain neither. The patterns are for Oniguruma, the regular expressions of the
tokenizers library, in which `$` and possessive quantifiers have another meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words(upper: str, lower: str) -> str:
    before, after = r"[^\r\n\p{L}\p{N}]?", f"{_CONTRACTIONS}?"
    return f"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}"


_NUMBERS_AND_SIGNS = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_NO_HAN = r"&&[^\p{Han}]"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = "|".join((_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?\p{L}+", _NUMBERS_AND_SIGNS, _SPACES))
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = "|".join((_words(f"[{_UPPER}]", f"[{_LOWER}]"), _NUMBERS_AND_SIGNS.replace(r"[\r\n]", r"[\r\n/]"), _SPACES))
KIMI = "|".join((r"\p{Han}+", _words(f"[{_UPPER}{_NO_HAN}]", f"[{_LOWER}{_NO_HAN}]"), _NUMBERS_AND_SIGNS, _SPACES))


@dataclass(frozen=True)
class Published:
    """A published tiktoken vocabulary. `specials`: special tokens whose ids follow those of the ranks. `at`: special
    tokens with given ids. `pattern`: the regular expression that splits texts."""

    pattern: str
    eos: str
    bos: str | None = None
    pad: str | None = None
    specials: tuple[str, ...] = ()
    at: tuple[tuple[str, int], ...] = ()
    nfc: bool = False
    reserved: int = 0  # special tokens after the ranks, named RESERVED unless tokenizer_config.json names them


def _numbered(name: str, numbers: range) -> tuple[str, ...]:
    return tuple(name.format(number) for number in numbers)


_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_END = "<|endoftext|>"
RESERVED = "<|reserved_token_{}|>"
LLAMA3 = Published(
    CL100K,
    "<|end_of_text|>",
    "<|begin_of_text|>",
    "<|finetune_right_pad_id|>",
    (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        *_numbered("<|reserved_special_token_{}|>", range(3, 248)),
    ),
)
LLAMA4 = Published(
    O200K,
    "<|end_of_text|>",
    "<|begin_of_text|>",
    "<|finetune_right_pad|>",
    (
        *("<|begin_of_text|>", "<|end_of_text|>", *_FIM, "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>"),
        *("<|step|>", *_numbered("<|text_post_train_reserved_special_token_{}|>", range(6))),
        *("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"),
        *_numbered("<|text_post_train_reserved_special_token_{}|>", range(8, 69)),
        *("<|image_start|>", "<|image_end|>", *_numbered("<|vision_reserved_special_token_{}|>", range(2))),
        *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        *_numbered("<|vision_reserved_special_token_{}|>", range(2, 6)),
        *("<|image|>", "<|vision_reserved_special_token_6|>", "<|patch|>"),
        *_numbered("<|vision_reserved_special_token_{}|>", range(7, 1048)),
        *_numbered("<|reasoning_reserved_special_token_{}|>", range(8)),
        *("<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"),
        *_numbered("<|reserved_special_token_{}|>", range(904)),
    ),
)
PUBLISHED = {
    "r50k_base": Published(GPT2, _END, at=((_END, 50256),)),
    "p50k_base": Published(GPT2, _END, at=((_END, 50256),)),
    "cl100k_base": Published(
        CL100K, _END, at=((_END, 100257), *zip(_FIM, range(100258, 100261), strict=True), ("<|endofprompt|>", 100276))
    ),
    "o200k_base": Published(O200K, _END, at=((_END, 199999), ("<|endofprompt|>", 200018))),
    "qwen": Published(
        QWEN, _END, specials=(_END, "<|im_start|>", "<|im_end|>", *_numbered("<|extra_{}|>", range(205))), nfc=True
    ),
    "llama3": LLAMA3,
    "llama4": LLAMA4,
    "kimi": Published(KIMI, "[EOS]", "[BOS]", "[PAD]", reserved=256),
}
LLAMA4_RANKS = 200_000
# The published names of the files.
NAMES = {
    **{f"{name}.tiktoken": name for name in ("r50k_base", "p50k_base", "cl100k_base", "o200k_base", "qwen")},
    "tiktoken.model": "kimi",
}


def published(file: Path, ranks: int) -> Published | None:
    """Return the published vocabulary to which a file's name belongs, or None. ranks: number of tokens in the file. A
    tokenizer.model with ranks is Llama 4's or else, as in transformers, Llama 3's."""
    if file.name in NAMES:
        return PUBLISHED[NAMES[file.name]]
    if file.name == "tokenizer.model":
        return LLAMA4 if ranks == LLAMA4_RANKS else LLAMA3
    return None
