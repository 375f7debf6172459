"""Texts from files, read as training reads a corpus (data/corpus): kinds by suffix, UTF-8, line ends as they are."""

from __future__ import annotations

import tempfile
from pathlib import Path

from configs.schema import ConfigError
from data.corpus import BadLine, File, plan_parts, read_span, unpack
from data.corpus.kinds import TEXT, WHOLE, format_of, uncompressed


def read_texts(path: Path, option: str, text_key: str = "text", documents_in_text: str = "file") -> list[str]:
    """The documents of a file; one of an unknown kind is a text. Raises ConfigError, naming the option, for what
    training would leave out, too."""
    try:
        stat = path.stat()
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} ({path}) cannot be read: {error.strerror}.") from error
    kind = format_of(path.name) or WHOLE
    file = File(str(path), uncompressed(path.name), kind, stat.st_size, stat.st_mtime_ns)
    texts: list[str] = []
    bad: list[BadLine] = []
    try:
        with tempfile.TemporaryDirectory(prefix="mixtrain-") as folder:
            packed = {}
            if file.compression:
                packed[file.path] = f"{folder}/unpacked"
                unpack(file.path, packed[file.path])
            for item in (
                item
                for part in plan_parts([file], packed, documents_in_text)
                for span in part
                for item in read_span(span, text_key)
            ):
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
        said = f"{option} ({path}) must be mended or left out: it has {lines}: {bad[0]}"
        raise ConfigError(_in_terms_of(option, said, path))
    return texts


def read_prompts(path: Path, option: str, text_key: str = "text") -> list[str]:
    """The prompts of a file: one a line, or one an object of JSON or a row."""
    texts = read_texts(path, option, text_key)
    return split_lines("".join(texts)) if (format_of(path.name) or WHOLE) in (TEXT, WHOLE) else texts


def prompts_of(content: bytes, option: str) -> list[str]:
    """The prompts, one a line, in bytes that came without a file."""
    with tempfile.TemporaryDirectory(prefix="mixtrain-") as folder:
        path = Path(folder, "prompts")
        path.write_bytes(content)
        try:
            return read_prompts(path, option)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f" ({path})", "").replace(f"{path}:", "line ")) from error


def split_lines(text: str) -> list[str]:
    """The lines of a text; LF and CR LF end one, nothing else does."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def _in_terms_of(option: str, message: str, path: Path) -> str:
    message = message.replace(f"data.corpus: {path}", f"{option} ({path})").replace("data.corpus:", f"{option}:")
    return message.replace("data.text_key", "--text-key")
