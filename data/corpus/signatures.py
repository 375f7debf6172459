"""Files that are not what their name says, known by their first bytes: pointers to a file that was not fetched, saved
error pages, and compressed data without its suffix."""

from __future__ import annotations

import os
import re
import shlex

from configs.schema import ConfigError

HEAD_BYTES = 4096
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # git-lfs, docs/spec.md
ANNEX_POINTER = re.compile(rb"/annex/objects/\S+\s*\Z")  # git-annex, internals: pointer files
PACKED = (
    (b"\x1f\x8b\x08", "gzip", ".gz"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
    (b"\xfd7zXZ\0", "xz", ".xz"),
    (b"BZh", "bzip2", ".bz2"),
)
OTHER_KINDS = ((b"PAR1", "Parquet", ".parquet"), (b"PK\x03\x04", "a zip archive", ".zip"))
MARKUP = re.compile(rb"\s*<(?:!doctype html|html|\?xml|error)[\s>]", re.IGNORECASE)
TITLE = re.compile(rb"<(?:title|h1|code|message)>\s*([^<]{1,80})", re.IGNORECASE)
OF_AN_ERROR = re.compile(
    r"\b(?:[45]\d\d|not found|forbidden|access ?denied|denied|error|unauthorized|unavailable|too many requests|"
    r"no ?such ?(?:key|bucket)|sign in|log ?in|just a moment)\b",
    re.IGNORECASE,
)
# Servers answer with one of these where a file is not there, or not for everyone.
ERROR_TEXT = re.compile(
    rb"\s*(?:404: Not Found|Not Found|Entry not found|Repository not found|Invalid (?:username or password|credentials)"
    rb"[^\n]*|Access to [^\n]{1,200} is restricted[^\n]*|\{\"error\":\s*\"[^\"\n]{1,500}\"[^\n]*\})\s*\Z"
)


def refuse_pointer(path: str) -> None:
    """Raise ConfigError for a file that stands for one which was not fetched, or for a server's error page."""
    head, size = _head(path)
    if head.startswith(LFS_POINTER):
        name = shlex.quote(os.path.basename(path))
        raise ConfigError(
            f"data.corpus: {path} is a git-lfs pointer to the file, and not the file. Fetch it, in its folder: "
            f"git lfs pull --include={name}"
        )
    if size <= HEAD_BYTES and ANNEX_POINTER.match(head):
        raise ConfigError(
            f"data.corpus: {path} is a git-annex pointer to the file, and not the file. Fetch it: "
            f"git annex get {shlex.quote(path)}"
        )
    if size == len(head) and ERROR_TEXT.match(head):
        raise ConfigError(
            f"data.corpus: {path} holds a server's error ({_shown(head)}) in the place of the file. Download it again."
        )
    title = TITLE.search(head) if MARKUP.match(head) else None
    if title is not None and OF_AN_ERROR.search(_shown(title[1])):
        raise ConfigError(
            f"data.corpus: {path} is a saved error page ({_shown(title[1])}) in the place of the file. "
            "Download it again."
        )


def refuse_another_kind(path: str, shown: str) -> None:
    """Raise ConfigError for a text file that is compressed or of another kind, whatever its name says; `shown` is the
    file's name for the user, and `path` has its content."""
    head, _ = _head(path)
    for mark, kind, suffix in PACKED:
        if head.startswith(mark) and not _is_text(head):
            raise ConfigError(
                f"data.corpus: {shown} is compressed with {kind}. Give it the suffix that says so: "
                f"mv {shlex.quote(shown)} {shlex.quote(shown + suffix)}"
            )
    for mark, kind, suffix in OTHER_KINDS:
        if head.startswith(mark) and not _is_text(head):
            raise ConfigError(
                f"data.corpus: {shown} is {kind}, and no text. Give it the suffix that says so: "
                f"mv {shlex.quote(shown)} {shlex.quote(os.path.splitext(shown)[0] + suffix)}"
            )


def _head(path: str) -> tuple[bytes, int]:
    """The first bytes of a file, and its size."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ConfigError(f"data.corpus: cannot read {path}: {error.strerror}") from error


def _is_text(head: bytes) -> bool:
    """Whether bytes are UTF-8 without control characters, but for a character that is cut off at their end."""
    try:
        text = head[:-3].decode("utf-8")
    except UnicodeDecodeError:
        return False
    return not re.search(r"[\0-\x08\x0e-\x1a\x1c-\x1f]", text)


def _shown(text: bytes) -> str:
    return " ".join(text.decode("utf-8", "replace").split())[:80]
