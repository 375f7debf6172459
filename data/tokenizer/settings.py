"""Settings of special tokens in the files next to a tokenizer: tokenizer_config.json, special_tokens_map.json and
added_tokens.json, combined as in transformers 5 (tokenization_utils_base.py, `_from_pretrained`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.errors import ConfigError, reason_of

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Keys of a token's object in a settings file that decide how it is found in a text.
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


@dataclass(frozen=True)
class Settings:
    """The combined settings of special tokens from the files in a tokenizer's folder.

    values: the settings by key. files: the file that each key is from. added: added tokens by id, each in the format of
    tokenizer.json's `added_tokens`. by_config: whether the added tokens are from tokenizer_config.json.
    """

    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    added: dict[int, dict[str, Any]] = field(default_factory=dict)
    by_config: bool = False

    def end_file(self, folder: Path) -> Path:
        """Return the path of the settings file in `folder` that determines the eos_token."""
        return folder / self.files.get("eos_token", CONFIG)

    def named(self) -> dict[str, Any]:
        """Return the special tokens with a name in the settings (a role such as eos_token, or a name of their own), by
        this name. Each token is a text or an object."""
        named = {
            key: value
            for key, value in self.values.items()
            if token_name(value) and (key in ROLES or (key.endswith("_token") and isinstance(value, str)))
        }
        extra = self.values.get("extra_special_tokens")
        return {**named, **extra} if isinstance(extra, dict) else named

    def unnamed(self) -> list[Any]:
        """Return the additional special tokens, which have no name in the settings. Each is a text or an object."""
        extra = self.values.get("extra_special_tokens")
        if extra is None:
            extra = self.values.get("additional_special_tokens")
        return extra if isinstance(extra, list) else []


def read_settings(folder: Path) -> Settings:
    """Read the settings of special tokens in a tokenizer's folder.

    As in transformers, special_tokens_map.json overrides tokenizer_config.json, and neither special_tokens_map.json nor
    added_tokens.json is read if tokenizer_config.json has `added_tokens_decoder`. Raises ConfigError.
    """
    config = _read(folder / CONFIG)
    values, files = dict(config), dict.fromkeys(config, CONFIG)
    if config.get("additional_special_tokens") is not None and not config.get("extra_special_tokens"):
        values["extra_special_tokens"] = values.pop("additional_special_tokens")
    if "added_tokens_decoder" in config:
        decoder = config["added_tokens_decoder"]
        try:
            added = {int(number): dict(token) for number, token in decoder.items()}
        except (AttributeError, TypeError, ValueError):
            added = {0: {}} if decoder else {}
        if not all(isinstance(token.get("content"), str) for token in added.values()):
            raise ConfigError(
                f'{folder / CONFIG}: added_tokens_decoder must contain an object with "content" for each token id, not '
                f"{json.dumps(decoder, ensure_ascii=False):.60}. Download the file again"
            )
        return Settings(values, files, added, True)
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
            raise ConfigError(
                f"{folder / ADDED}: the value of {content!r} is {number!r}, but must be its token id, an integer. "
                "Download the file again."
            )
        added[number] = {"content": content, "normalized": content not in special, "special": content in special}
    return Settings(values, files, added)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {first_line(error)}. Download it again") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file} must contain a JSON object, but contains a {type(content).__name__}. Download it again"
        )
    return content


def refuse_unknown_end(tokenizer: str, settings: Settings, vocabulary: str, known: bool) -> None:
    """Raise ConfigError if the settings name an eos_token that has no id in any file. transformers would add a new
    token, which no trained model has."""
    name = token_name(settings.values.get("eos_token"))
    if name and not known:
        raise ConfigError(
            f"data.tokenizer={tokenizer}: {settings.files['eos_token']} names the eos_token {name!r}, which is not in "
            f"{vocabulary}. Use a {vocabulary} with this token, or change eos_token to a token that {vocabulary} has"
        )


def token_name(token: Any) -> str:
    """Return the name of a special token from a settings file (a text or an object); an empty string if none."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty; for a KeyError, a
    clause that names the missing key."""
    if isinstance(error, KeyError):
        return reason_of(error)
    return (str(error) or type(error).__name__).splitlines()[0]
