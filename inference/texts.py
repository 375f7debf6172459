"""Texts and prompts from files, read as a training corpus is: file kinds by suffix, UTF-8, unchanged line ends."""

from __future__ import annotations

import tempfile
from itertools import chain
from pathlib import Path

from base.errors import ConfigError
from data.corpus import BadLine, File, plan_shards, read_span, unpack
from data.corpus.file_kinds import TEXT, WHOLE, format_of, uncompressed


def read_texts(path: Path, option: str, text_key: str = "text", documents_in_text: str = "file") -> list[str]:
    """Return the documents of a file. A file of unknown kind is one document.

    Raises ConfigError with the name of the option if the file cannot be read or has lines that training would skip.
    """
    try:
        stat = path.stat()
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} ({path}) cannot be read: {error.strerror}. Check the path.") from error
    kind = format_of(path.name) or WHOLE
    file = File(str(path), uncompressed(path.name), kind, stat.st_size, stat.st_mtime_ns)
    texts: list[str] = []
    bad: list[BadLine] = []
    try:
        with tempfile.TemporaryDirectory(prefix="mixtrain-") as folder:
            unpacked = {file.path: f"{folder}/unpacked"} if file.compression else {}
            for source, target in unpacked.items():
                unpack(source, target)
            spans = chain.from_iterable(plan_shards([file], unpacked, documents_in_text))
            for item in chain.from_iterable(read_span(span, text_key) for span in spans):
                if isinstance(item, BadLine):
                    bad.append(item)
                elif item.begins:
                    texts.append(item.text)
                else:
                    texts[-1] += item.text
    except ConfigError as error:
        raise ConfigError(_in_terms_of(option, str(error), path)) from error
    if bad:
        lines = "a line that cannot be used" if len(bad) == 1 else f"{len(bad):,} lines that cannot be used, the first"
        message = f"{option} ({path}) has {lines}: {bad[0]}. Correct the file or omit it."
        raise ConfigError(_in_terms_of(option, message, path))
    return texts


def read_prompts(path: Path, option: str, text_key: str = "text") -> list[str]:
    """Return the prompts of a file: one per line of text, JSON object or table row."""
    texts = read_texts(path, option, text_key)
    if (format_of(path.name) or WHOLE) not in (TEXT, WHOLE):
        return texts
    lines = [line.removesuffix("\r") for line in "".join(texts).split("\n")]  # only LF and CR LF end a line
    return lines if lines[-1] else lines[:-1]


def prompts_of(content: bytes, option: str) -> list[str]:
    """Return the prompts, one per line, from the bytes of standard input."""
    with tempfile.TemporaryDirectory(prefix="mixtrain-") as folder:
        path = Path(folder, "prompts")
        path.write_bytes(content)
        try:
            return read_prompts(path, option)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f" ({path})", "").replace(f"{path}:", "line ")) from error


def _in_terms_of(option: str, message: str, path: Path) -> str:
    message = message.replace(f"data.corpus: {path}", f"{option} ({path})").replace("data.corpus:", f"{option}:")
    return message.replace("data.text_key", "--text-key")
