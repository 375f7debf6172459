"""The tokens that begin, end and pad a text, as Hugging Face folders and folders of logical weights store them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from base.errors import ConfigError
from base.files import read_yaml
from models.folder import read_json, read_token_ids, show_json

SpecialTokens = dict[str, int | list[int] | None]
BOS, EOS, PAD = KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
GENERATION_CONFIG = "generation_config.json"
# Defaults for a config.json without these keys: those of transformers' config classes.
DEFAULTS: dict[str, SpecialTokens] = {
    "gpt2": {BOS: 50256, EOS: 50256},
    "llama": {BOS: 1, EOS: 2},
    "mistral": {BOS: 1, EOS: 2},
    "qwen2": {},
    "qwen3": {},
    "phi3": {BOS: 1, EOS: 32000, PAD: 32000},
    "mixtral": {BOS: 1, EOS: 2},
    "qwen3_moe": {},
    "olmoe": {EOS: 50279, PAD: 1},
    "deepseek_v3": {BOS: 0, EOS: 1},
    "kimi_k2": {BOS: 0, EOS: 1},
    "deepseek_v2": {BOS: 1, EOS: 2},
    "bert": {PAD: 0},
}
# Keys of generation_config.json that change the text of greedy decoding, with the values that do not.
CHANGES_TEXT: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beams": (1,),
    "guidance_scale": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    **dict.fromkeys(
        ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "stop_strings", "dola_layers"),
        ([],),
    ),
    **dict.fromkeys(
        ("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "force_words_ids"), ()
    ),
}


def of_config(hf: dict[str, Any], vocab_size: int) -> SpecialTokens:
    """Return the special tokens of a config.json, with the defaults of its family. Ids outside the vocabulary are left
    out. Raises ConfigError if a value is not an id."""
    return _checked({**DEFAULTS.get(hf["model_type"], {}), **hf}, vocab_size, "config.json")


def kept_in(folder: Path, vocab_size: int) -> SpecialTokens | None:
    """Return the special tokens in the config.yaml of a folder of logical weights; None if it has none. Raises
    ConfigError."""
    section = read_yaml(folder / "config.yaml").get("special_tokens")
    if section is not None and not isinstance(section, dict):
        raise ConfigError(
            f"{folder / 'config.yaml'} special_tokens ({show_json(section)}) must be a mapping with {', '.join(KEYS)}. "
            "Correct it, or remove special_tokens from the file."
        )
    return None if section is None else _checked(section, vocab_size, str(folder / "config.yaml"))


def end_tokens(folder: Path, special: SpecialTokens | None) -> set[int] | None:
    """Return the token ids that end a text, chosen as in transformers: from generation_config.json if it exists, else
    from config.json (`special`). Returns None if neither exists. Raises ConfigError."""
    if (folder / GENERATION_CONFIG).exists():
        return read_token_ids(folder / GENERATION_CONFIG, EOS)
    if special is None:
        return None
    ends = special[EOS]
    return set(ends) if isinstance(ends, list) else set() if ends is None else {ends}


def changes_of_text(folder: Path) -> dict[str, Any]:
    """Return the settings of generation_config.json that change the result of greedy decoding. Raises ConfigError."""
    path = folder / GENERATION_CONFIG
    settings = read_json(path) if path.exists() else {}
    return {
        key: settings[key]
        for key, same in CHANGES_TEXT.items()
        if settings.get(key) is not None and settings[key] not in same
    }


def _checked(values: dict[str, Any], vocab_size: int, where: str) -> SpecialTokens:
    result: SpecialTokens = {}
    for key in KEYS:
        value = values.get(key)
        ids = value if isinstance(value, list) and key == EOS else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            form = "a token id, a list of token ids, or null" if key == EOS else "a token id or null"
            raise ConfigError(f"{where} {key} ({show_json(value)}) must be {form}. Correct the value.")
        tokens = [token for token in ids if 0 <= token < vocab_size]
        result[key] = None if not tokens else tokens if isinstance(value, list) else tokens[0]
    return result
