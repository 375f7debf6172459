"""The tokenizer that a run stores next to its checkpoints. It is identified by its content, because the weights are
useless with other token ids. `run_dir/tokenizer` is the newest. A tokenizer that was replaced
(`checkpoint.accept_changes`) is kept as `tokenizer-DIGEST` for the checkpoints that were trained with it."""

from __future__ import annotations

import shutil
from pathlib import Path

from base import files
from base.errors import ConfigError
from checkpoint.state_file import read_state
from configs.tokenizer_files import copy_tokenizer, core_file, tokenizer_files
from data.tokenizer import Tokenizer, tokenizer_digest

FOLDER = "tokenizer"


def digest_of(checkpoint: Path) -> str | None:
    """Return the digest of the tokenizer that a checkpoint was trained with; None if its state.json has no data entry.
    Raises ConfigError if state.json cannot be read."""
    data = read_state(checkpoint).get("data")
    return None if data is None else str(data["tokenizer"])


def of_checkpoint(checkpoint: Path) -> Path | None:
    """Return the folder of the tokenizer that a checkpoint was trained with; None if its run stores no tokenizer.
    Raises ConfigError if its run stores only other tokenizers."""
    run_dir, wanted = checkpoint.absolute().parent.parent, digest_of(checkpoint)
    kept = [run_dir / FOLDER, *run_dir.glob(f"{FOLDER}-*")]
    kept = [folder for folder in kept if folder.is_dir() and any(folder.iterdir())]
    if not kept or wanted is None:
        return None
    for folder in kept:
        if tokenizer_digest(folder, tried=True) == wanted:
            return folder
    raise ConfigError(
        f"{core_file(kept[0]) or kept[0]} differs from the tokenizer that checkpoint {checkpoint} was "
        "trained with: token ids would have another meaning. Restore the run's own tokenizer."
    )


def keep(run_dir: Path, tokenizer: Tokenizer) -> None:
    """Store a run's tokenizer in `run_dir/tokenizer`, after renaming a different tokenizer there. Raises OSError."""
    folder = run_dir / FOLDER
    if folder.is_dir() and any(folder.iterdir()):
        old = tokenizer_digest(folder, tried=True)
        if old == tokenizer.digest:
            return
        renamed = run_dir / f"{FOLDER}-{old[:8]}"
        if renamed.exists():  # replaced before
            shutil.rmtree(folder)
        else:
            folder.rename(renamed)
    between = files.temporary(folder)
    with files.writing(folder):
        try:
            _write(tokenizer, between)
            files.sync(between)  # before the rename: else a failing disk may keep the name and lose the content
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
