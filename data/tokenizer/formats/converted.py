"""A tokenizer that is read from another format, and is from then on an ordinary tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.tokenizer_files import BYTE_PAIRS, JSON, TEKKEN, TIKTOKEN, WORD_PIECES, format_of
from data.tokenizer.formats.rank_files import tekken, tiktoken
from data.tokenizer.formats.spec import Converted
from data.tokenizer.formats.word_lists import byte_pairs, word_pieces
from data.tokenizer.huggingface import HuggingFaceTokenizer
from data.tokenizer.settings import CONFIG, Settings, read_settings

READERS: dict[str, Callable[[Path, dict[str, Any]], Converted]] = {
    BYTE_PAIRS: byte_pairs,
    WORD_PIECES: word_pieces,
    TEKKEN: tekken,
    TIKTOKEN: tiktoken,
}


class ConvertedTokenizer(HuggingFaceTokenizer):
    """A vocabulary of another format (`READERS`) as a tokenizer.json. Raises ConfigError."""

    def _read(self, path: str | Path) -> tuple[Path, str, Settings]:
        file = Path(path)
        converted = READERS[format_of(file)](file, read_settings(file.parent).values)
        # transformers would take another class' rules where one is named
        settings = {**converted.settings, "tokenizer_class": "PreTrainedTokenizerFast"}
        for key in ("added_tokens_decoder", "add_bos_token", "add_eos_token", "auto_map"):  # they are in the spec
            settings.pop(key, None)
        self.said = converted.notes
        files = dict.fromkeys(settings, CONFIG)
        return file, json.dumps(converted.spec, ensure_ascii=False), Settings(settings, files)

    def kept_files(self) -> dict[str, str]:
        text = json.dumps(self._spec, ensure_ascii=False)
        return {JSON: text, CONFIG: json.dumps(self._settings.values, indent=2) + "\n"}
