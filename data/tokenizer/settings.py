"""tokenizer_config.json, which may lie beside a tokenizer's own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.schema import ConfigError


def read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of a folder, {} where there is none. Raises ConfigError."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {first_line(error)}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return settings


def token_name(token: Any) -> str:
    """The text of a special token in tokenizer_config.json, which is that or an object; "" for none."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
