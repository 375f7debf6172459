"""Choices of an earlier start (layout, offloaded experts) that a run's folder keeps for the next start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from configs.checksums import read_summed
from configs.schema import ConfigError


def read_choice(path: Path, keys: Iterable[str]) -> dict[str, Any] | None:
    """Read a choice, whose `values` are of some of these keys; None where there is none. Raises ConfigError for a file
    that was damaged or changed by hand: it says what is trained with."""
    try:
        content = read_summed(path)
        values = content.get("values")
        others = sorted(set(values) - set(keys)) if isinstance(values, dict) else ["no values"]
        if others:
            raise ValueError(f"it names {', '.join(map(str, others))}, which is none of its keys")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read ({' '.join(str(error).split())}). Put it back, or delete it to have the choice "
            "made anew."
        ) from error
    return content
