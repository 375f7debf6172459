"""Whether a trained model's folder holds all of its weights, for `python -m checkpoint verify`. Of a checkpoint without
torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import manifest, safetensors_header
from checkpoint.logical.names import lacking_weights
from checkpoint.state_file import read_state
from configs.checksums import FOLDER_SUMS
from configs.compose import load
from configs.schema import ConfigError
from configs.weights import check_files
from models.weight_files.choice import INDEX_NAME, SINGLE_NAME
from models.weight_files.expected import logical_shapes

if TYPE_CHECKING:
    from models.folder import Reader


def lacking_in(folder: Path) -> list[str]:
    """A line for each weight that a checkpoint lacks, whose files are as its manifest says."""
    try:
        shapes = logical_shapes(load(folder / manifest.CONFIG), read_state(folder)["vocab_size"])
        names = (name for name in manifest.read(folder) if name.endswith(safetensors_header.SUFFIX))
        entries = [entry for name in names for entry in safetensors_header.read(folder / name).values()]
    except (OSError, ValueError) as error:
        return [" ".join(str(error).split())]
    return lacking_weights(entries, shapes)


def is_folder_of_weights(path: Path) -> bool:
    """Whether a path is a Hugging Face folder or one of logical weights: no run, and no checkpoint."""
    try:
        kind = manifest.kind_of_model(path)
    except ConfigError:
        return False
    return kind == "huggingface" or (
        kind == "weights" and any((path / name).exists() for name in (SINGLE_NAME, INDEX_NAME, FOLDER_SUMS))
    )


def problems_in(path: Path) -> list[str]:
    """A line for all that is wrong with such a folder, with every byte read: files, tensors that its config calls for,
    NaN and Inf."""
    from checkpoint.logical.reader import open_logical  # imports torch

    try:
        if manifest.kind_of_model(path) == "weights":
            check_files(path, slice(None))
        reader = open_logical(path)
    except ConfigError as error:
        return [str(error)]
    assert reader.files is not None
    found = [problem for name in reader.files.all_names() if (problem := _problem_with(reader.files, name))]
    reader.close()
    return found


def _problem_with(files: Reader, name: str) -> str | None:
    import torch

    from models.weight_files.pieces import bands_of

    try:
        for band in bands_of(files.stored(name)):
            if band.is_floating_point() and band.numel() > 0:
                low, high = (band if band.dtype.itemsize > 1 else band.float()).aminmax()  # NaN if any is
                if not torch.isfinite(low) or not torch.isfinite(high):
                    return f"tensor {name} holds NaN or Inf."
    except ConfigError as error:
        return str(error)
    return None
