"""What the files beside a tokenizer's own say of its special tokens: tokenizer_config.json, special_tokens_map.json and
added_tokens.json, put together as transformers 5 does (tokenization_utils_base.py, `_from_pretrained`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema import ConfigError

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


@dataclass(frozen=True)
class Settings:
    """`values`: the keys that count; `files`: which file says each; `added`: tokens with an id of their own, each as a
    token of tokenizer.json's `added_tokens` (`by_config`: those of tokenizer_config.json)."""

    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    added: dict[int, dict[str, Any]] = field(default_factory=dict)
    by_config: bool = False

    def end_file(self, folder: Path) -> Path:
        """The file of a folder in which an eos_token counts."""
        return folder / self.files.get("eos_token", CONFIG)

    def named(self) -> dict[str, Any]:
        """Every special token that has a name of its own, a text or an object, by that name."""
        named = {
            key: value
            for key, value in self.values.items()
            if token_name(value) and (key in ROLES or (key.endswith("_token") and isinstance(value, str)))
        }
        extra = self.values.get("extra_special_tokens")
        return {**named, **extra} if isinstance(extra, dict) else named

    def unnamed(self) -> list[Any]:
        """Special tokens without a name, each a text or an object."""
        extra = self.values.get("extra_special_tokens")
        if extra is None:
            extra = self.values.get("additional_special_tokens")
        return extra if isinstance(extra, list) else []


def read_settings(folder: Path) -> Settings:
    """The settings beside a tokenizer's file.

    As in transformers, special_tokens_map.json counts before tokenizer_config.json, and neither it nor
    added_tokens.json is read where tokenizer_config.json has `added_tokens_decoder`. Raises ConfigError.
    """
    config = _read(folder / CONFIG)
    values, files = dict(config), dict.fromkeys(config, CONFIG)
    if config.get("additional_special_tokens") is not None and not config.get("extra_special_tokens"):
        values["extra_special_tokens"] = values.pop("additional_special_tokens")
    by_config = "added_tokens_decoder" in config
    if by_config:
        return Settings(values, files, _decoder(folder / CONFIG, config["added_tokens_decoder"]), True)
    for key, value in _read(folder / MAP).items():
        if key == "extra_special_tokens" and isinstance(value, list):
            before = values.get(key) or []
            value = [*before, *(token for token in value if token not in before)] if isinstance(before, list) else value
        values[key], files[key] = value, MAP
    special = {token_name(values.get(role)) for role in ROLES}
    extra = values.get("extra_special_tokens") or []
    special |= {token_name(token) for token in (extra if isinstance(extra, list) else [])}
    added = {}
    for content, number in _read(folder / ADDED).items():
        if type(number) is not int:
            raise ConfigError(f"{folder / ADDED}: {content!r} must have an integer, its token id")
        added[number] = {"content": content, "normalized": content not in special, "special": content in special}
    return Settings(values, files, added)


def _decoder(file: Path, content: Any) -> dict[int, dict[str, Any]]:
    try:
        added = {int(number): dict(token) for number, token in content.items()}
    except (AttributeError, TypeError, ValueError):
        added = {0: {}} if content else {}
    if not all(isinstance(token.get("content"), str) for token in added.values()):
        raise ConfigError(f'{file}: added_tokens_decoder must hold an object with "content" for each token id')
    return added


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return content


def refuse_unknown_end(tokenizer: str, settings: Settings, vocabulary: str, known: bool) -> None:
    """Raise ConfigError for an end token that no file gives an id: transformers would make a token of it that no model
    knows."""
    name = token_name(settings.values.get("eos_token"))
    if name and not known:
        raise ConfigError(
            f"data.tokenizer={tokenizer}: {settings.files['eos_token']} names the eos_token {name!r}, which "
            f"{vocabulary} does not have; give the {vocabulary} that has it, or name one of its tokens"
        )


def token_name(token: Any) -> str:
    """The text of a special token in a file of settings, which is that or an object; "" for none."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""


def token_flags(token: dict[str, Any]) -> dict[str, bool]:
    """How a token is found in a text, as an object in a file of settings says it."""
    return {flag: bool(token[flag]) for flag in FLAGS if flag in token}


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
