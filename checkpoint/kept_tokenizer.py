"""The tokenizer that a run keeps beside its checkpoints, known by content: a checkpoint's tokens mean nothing with
another one.

`run_dir/tokenizer` is the newest; one that was exchanged by name (`checkpoint.accept_changes`) stays, as
`tokenizer-DIGEST`, for the checkpoints that were trained with it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoint.state_file import read_state
from configs import files
from configs.schema import ConfigError
from configs.tokenizer_files import copy_tokenizer, core_file, tokenizer_files
from data.tokenizer import Tokenizer, tokenizer_digest

FOLDER = "tokenizer"


def digest_of(checkpoint: Path) -> str | None:
    """Return the digest of the tokenizer that a checkpoint was trained with; None where its state names no data.
    Raises ConfigError for a broken checkpoint."""
    data = read_state(checkpoint).get("data")
    return None if data is None else str(data["tokenizer"])


def of_checkpoint(checkpoint: Path) -> Path | None:
    """The kept tokenizer that a checkpoint was trained with; None where none is kept beside it.

    Raises ConfigError where one is kept, and none is the checkpoint's.
    """
    run_dir, wanted = checkpoint.absolute().parent.parent, digest_of(checkpoint)
    kept = [run_dir / FOLDER, *run_dir.glob(f"{FOLDER}-*")]
    kept = [folder for folder in kept if folder.is_dir() and any(folder.iterdir())]
    if not kept or wanted is None:
        return None
    for folder in kept:
        if tokenizer_digest(folder, tried=True) == wanted:
            return folder
    raise ConfigError(
        f"{core_file(kept[0]) or kept[0]} has other content than the tokenizer that checkpoint {checkpoint} was "
        "trained with: its weights would read other tokens. Put the run's own tokenizer back."
    )


def keep(run_dir: Path, tokenizer: Tokenizer) -> None:
    """Keep a run's tokenizer in `tokenizer`, from which one of other content moves away first. Raises OSError."""
    folder = run_dir / FOLDER
    if folder.is_dir() and any(folder.iterdir()):
        old = tokenizer_digest(folder, tried=True)
        if old == tokenizer.digest:
            return
        place = run_dir / f"{FOLDER}-{old[:8]}"
        if place.exists():  # exchanged before, and back
            shutil.rmtree(folder)
        else:
            folder.rename(place)
    between = files.temporary(folder)
    with files.writing(folder):
        try:
            _write(tokenizer, between)
            files.sync(between)  # before its name: else a disk that fails may keep the name and lose what is in it
            between.replace(folder)
        except OSError:
            shutil.rmtree(between, ignore_errors=True)
            raise


def _write(tokenizer: Tokenizer, folder: Path) -> None:
    texts = tokenizer.kept_files()
    if texts is None:
        copy_tokenizer(Path(tokenizer.path), folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in tokenizer_files(Path(tokenizer.path)).items():
        if name.startswith("chat_template"):
            shutil.copyfile(file, folder / name)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
