"""Token files of a source of text: found done and checked, or made."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs import progress
from configs.checksums import read_summed
from configs.files import writing_into
from configs.schema import ConfigError, DataConfig
from data import lock
from data.corpus import Source
from data.corpus.earlier import RULE as EARLIER
from data.digest import digest_of, file_digest
from data.indexed import IndexedTokens
from data.prepare.notes import written_out
from data.prepare.parts import tokenize
from data.prepare.prepared import PreparedData, TokenFile, cache_key, rule_of, source_identity
from data.shared_documents import Texts
from data.split import hash_suffices
from data.tokenizer import Tokenizer

SUMMARY_KEYS = ("tokens", "documents", "bytes", "bad_lines", "first_bad_lines", "sizes")  # of done.json
MADE_BEFORE = ("done.json", "exact/done.json")
GOES_ON = (
    "its text files are cut as when the run began, by an earlier version: after two empty lines, or after 64 KiB "
    "(data.documents_in_text is for new runs)"
)


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
    folder, before = _folders(source, config, family, tokenizer, cache, documents_in_text)
    rule = prepared.identity["split"]["rule"]
    find = functools.partial(_find_done, folder, source, config, cache, rule)
    done = find(rebuild_damaged)
    if done is None:
        folder.mkdir(parents=True, exist_ok=True)
        with lock.hold(folder / "lock", config.timeout_seconds):
            done = find(rebuild_damaged)
            if done is None:
                if show_progress and folder != before and any((before / name).exists() for name in MADE_BEFORE):
                    progress.begin(
                        f"{before} is of an earlier version, which cut text files otherwise: tokenizing anew"
                    )
                elif show_progress and rule == "alike" and not (folder / "alike").exists():
                    _say_why_again(folder, source)
                with _room_given_back(folder), writing_into(folder):
                    tokenize(source, config, family, tokenizer, folder, cache, rule, documents_in_text, show_progress)
                done = find(False)
                assert done is not None
    folder = Path(done["folder"])
    for split, name in ((prepared.train, "train"), (prepared.valid, "valid")):
        split += _token_file(done, name, source)
    prepared.texts.append(Texts(source.given, done["folder"]))
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
            done.get("text"),
            rule_of(source, documents_in_text),
        )
    )
    control_tokens = {int(token): count for token, count in done.get("control_tokens", {}).items()}
    if control_tokens:
        prepared.notes.append(written_out(source.name, control_tokens, tokenizer))
    prepared.notes += [*source.notes, *done.get("advice", [])]
    if documents_in_text == EARLIER and source.has_text_files:
        prepared.notes.append(f"{source.given}: {GOES_ON}")
    prepared.num_documents += done["documents"]
    prepared.num_bytes += done["bytes"]
    prepared.num_bad_lines += done["bad_lines"]
    prepared.bad_lines += done["first_bad_lines"]
    if done["bad_lines"]:
        prepared.bad_lines_files.append(str(folder / "bad_lines.txt"))


def finished(
    source: Source, config: DataConfig, family: str, tokenizer: Tokenizer, cache: Path, rule: str
) -> list[TokenFile] | None:
    """The token files that a source is trained on, where they are made; nothing of them is read. None where they are
    not."""
    folder, _ = _folders(source, config, family, tokenizer, cache, config.documents_in_text)
    done = _summary(folder, source, config, rule)
    return None if done is None else _token_file(done, "train", source)


def _token_file(done: dict[str, Any], name: str, source: Source) -> list[TokenFile]:
    """The token file `name` of finished work; none where it is empty."""
    num_tokens = done["tokens"][name]
    prefix, weight = str(Path(done["folder"]) / name), num_tokens if source.weight is None else source.weight
    return [TokenFile(prefix, weight, num_tokens)] if num_tokens else []


def _folders(
    source: Source, config: DataConfig, family: str, tokenizer: Tokenizer, cache: Path, documents_in_text: str
) -> tuple[Path, Path]:
    """The folder of a source's token files, and the one that they had before there was a choice of documents."""
    tokenizer_hash = hashlib.sha256(tokenizer.core_bytes()).hexdigest()
    named: list[Any] = [] if tokenizer.named_eod is None else [tokenizer.named_eod]
    if tokenizer.rules:
        named.append(tokenizer.rules)
    inputs = [source.identity(), tokenizer_hash, family, config.text_key, config.validation_fraction, *named]
    # Files without a choice of what their documents are have the same key as before there was one.
    chosen = [documents_in_text] if source.has_text_files and documents_in_text != EARLIER else []
    stem = cache / "tokens" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', source.name)[:40]}-{family}"
    folder, before = (stem.with_name(f"{stem.name}-{cache_key(*inputs, *more)}") for more in (chosen, []))
    return folder, before


def _find_done(
    folder: Path, source: Source, config: DataConfig, cache: Path, rule: str, rebuild_damaged: bool
) -> dict[str, Any] | None:
    """The summary of finished work, with its `folder`; None when there is none. Raises ConfigError when it was
    damaged."""
    done = _summary(folder, source, config, rule)
    return done and _checked(done, Path(done["folder"]), cache, config.timeout_seconds, rebuild_damaged)


def _summary(folder: Path, source: Source, config: DataConfig, rule: str) -> dict[str, Any] | None:
    """The summary of finished work, with its `folder`; None when there is none.

    The split by hash lies in `folder`, as it did before there was another; one that `exact` makes otherwise in its
    folder `exact`, and of documents with copies that of `alike` in its own.
    """
    places = {"alike": [folder / "alike", folder / "exact", folder], "exact": [folder / "exact", folder]}
    for place in places.get(rule, [folder]):
        try:
            done = read_summed(place / "done.json")
        except (FileNotFoundError, ValueError):  # damaged: it is made again
            continue
        if not all(key in done for key in SUMMARY_KEYS):  # another file in its place
            continue
        done["folder"] = str(place)
        # an earlier version did not look for copies
        if rule == "alike" and place.name != "alike" and not source.is_stdlib and done.get("copies") != 0:
            continue
        if rule != "hash" and place == folder:
            tokens = done["tokens"]
            if not hash_suffices(
                done["documents"], tokens["train"], tokens["valid"], config.validation_fraction, source.is_stdlib
            ):
                continue
        return done
    return None


def _say_why_again(folder: Path, source: Source) -> None:
    """Say why tokens are made that are there: by an earlier version, which split documents of equal text by their
    names."""
    found = [place / "done.json" for place in (folder, folder / "exact")]
    if any(path.exists() and '"copies"' not in path.read_text() for path in found):
        print(
            f"data.cache_dir: the tokens of {source.given} in {folder} are of an earlier version, which did not look "
            "for copies of documents: they are made again",
            file=sys.stderr,
            flush=True,
        )


def _checked(
    done: dict[str, Any], folder: Path, cache: Path, timeout: float, rebuild_damaged: bool
) -> dict[str, Any] | None:
    """The summary, with the files' digests as they are now; None where they were damaged and are to be made again."""
    written = done.get("digests", {})  # a cache of an earlier version has none
    done["digests"] = {}
    for name, size in done["sizes"].items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else None
        if actual == size:
            done["digests"][name] = file_digest(path, cache, timeout)
            if done["digests"][name] == written.get(name, done["digests"][name]):
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
