"""Token files of a source of text: found done and checked, or made."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.checksums import read_summed
from configs.files import writing_into
from configs.schema import ConfigError, DataConfig
from data import lock
from data.corpus import Source
from data.digest import digest_of, file_digest
from data.indexed import IndexedTokens
from data.prepare.notes import written_out
from data.prepare.parts import tokenize
from data.prepare.prepared import PreparedData, TokenFile, cache_key, source_identity
from data.shared_documents import Texts
from data.tokenizer import Tokenizer

SUMMARY_KEYS = ("tokens", "documents", "bytes", "bad_lines", "first_bad_lines", "sizes", "digests")  # of done.json


def add_tokenized(
    prepared: PreparedData,
    source: Source,
    config: DataConfig,
    family: str,
    tokenizer: Tokenizer,
    cache: Path,
    documents_in_text: str,
    show_progress: bool,
    rebuild_damaged: bool,
) -> None:
    folder = _folder(source, config, family, tokenizer, cache, documents_in_text)
    done = _find_done(folder, cache, config.timeout_seconds, rebuild_damaged)
    if done is None:
        folder.mkdir(parents=True, exist_ok=True)
        with lock.hold(folder / "lock", config.timeout_seconds):
            done = _find_done(folder, cache, config.timeout_seconds, rebuild_damaged)
            if done is None:
                with _room_given_back(folder), writing_into(folder):
                    tokenize(source, config, family, tokenizer, folder, cache, documents_in_text, show_progress)
                done = _find_done(folder, cache, config.timeout_seconds, False)
                assert done is not None
    for split, name in ((prepared.train, "train"), (prepared.valid, "valid")):
        split += _token_file(folder, done, name, source)
    prepared.texts.append(Texts(source.given, str(folder)))
    digests = done["digests"]
    splits = {
        name: {"tokens": done["tokens"][name], "digest": digest_of(digests[f"{name}.bin"], digests[f"{name}.idx"])}
        for name in ("train", "valid")
    }
    prepared.identity["sources"].append(
        source_identity(
            source,
            done["documents"],
            splits["train"],
            splits["valid"],
            None,
            done["text"],
            documents_in_text if source.has_text_files else None,
        )
    )
    control_tokens = {int(token): count for token, count in done["control_tokens"].items()}
    if control_tokens:
        prepared.notes.append(written_out(source.name, control_tokens, tokenizer))
    prepared.notes += [*source.notes, *done["advice"]]
    prepared.num_documents += done["documents"]
    prepared.num_bytes += done["bytes"]
    prepared.num_bad_lines += done["bad_lines"]
    prepared.bad_lines += done["first_bad_lines"]
    if done["bad_lines"]:
        prepared.bad_lines_files.append(str(folder / "bad_lines.txt"))


def finished(
    source: Source, config: DataConfig, family: str, tokenizer: Tokenizer, cache: Path
) -> list[TokenFile] | None:
    """The token files that a source is trained on, where they are made; nothing of them is read. None where they are
    not."""
    folder = _folder(source, config, family, tokenizer, cache, config.documents_in_text)
    done = _summary(folder)
    return None if done is None else _token_file(folder, done, "train", source)


def _token_file(folder: Path, done: dict[str, Any], name: str, source: Source) -> list[TokenFile]:
    """The token file `name` of finished work; none where it is empty."""
    num_tokens = done["tokens"][name]
    prefix, weight = str(folder / name), num_tokens if source.weight is None else source.weight
    return [TokenFile(prefix, weight, num_tokens)] if num_tokens else []


def _folder(
    source: Source, config: DataConfig, family: str, tokenizer: Tokenizer, cache: Path, documents_in_text: str
) -> Path:
    """Return the folder of a source's token files."""
    tokenizer_hash = hashlib.sha256(tokenizer.core_bytes()).hexdigest()
    named: list[Any] = [] if tokenizer.named_eod is None else [tokenizer.named_eod]
    if tokenizer.rules:
        named.append(tokenizer.rules)
    inputs = [source.identity(), tokenizer_hash, family, config.text_key, config.validation_fraction, *named]
    if source.has_text_files:
        inputs.append(documents_in_text)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", source.name)[:40]
    return cache / "tokens" / f"{name}-{family}-{cache_key(*inputs)}"


def _find_done(folder: Path, cache: Path, timeout: float, rebuild_damaged: bool) -> dict[str, Any] | None:
    """Return the summary of finished work; None when there is none. Raises ConfigError when the work was damaged."""
    done = _summary(folder)
    return done and _checked(done, folder, cache, timeout, rebuild_damaged)


def _summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of finished work; None when there is none."""
    try:
        done = read_summed(folder / "done.json")
    except (FileNotFoundError, ValueError):  # damaged: it is made again
        return None
    return done if all(key in done for key in SUMMARY_KEYS) else None  # else another file in its place


def _checked(
    done: dict[str, Any], folder: Path, cache: Path, timeout: float, rebuild_damaged: bool
) -> dict[str, Any] | None:
    """The summary, with the files' digests as they are now; None where they were damaged and are to be made again."""
    written, done["digests"] = done["digests"], {}
    for name, size in done["sizes"].items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else None
        if actual == size:
            done["digests"][name] = file_digest(path, cache, timeout)
            if done["digests"][name] == written[name]:
                continue
        if rebuild_damaged:
            return None
        found = (
            "is missing" if actual is None else f"has {actual} bytes" if actual != size else f"has {size} other bytes"
        )
        raise ConfigError(
            f"data.cache_dir: {path} {found}, but {size} were written: it was truncated or damaged; delete {folder}, "
            "or run `python -m data.prepare` with the same data settings to make it again"
        )
    if rebuild_damaged:
        try:
            for name in ("train", "valid"):
                IndexedTokens(folder / name)
        except ConfigError:
            return None
    return done


@contextlib.contextmanager
def _room_given_back(folder: Path) -> Iterator[None]:
    """Where a disk fails, deletes what was half written; finished parts stay, and are gone on from."""
    try:
        yield
    except OSError:
        for leftover in folder.rglob("*.tmp*"):
            with contextlib.suppress(OSError):
                leftover.unlink()
        raise
