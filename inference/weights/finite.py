"""Which weight is to blame where a model's answers are no numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference.weights.loader import UnitLoader
from inference.weights.parts import RankWeights, WeightUnit


def are_finite(values: Sequence[torch.Tensor]) -> bool:
    """Whether no number of these is infinite or NaN."""
    return bool(torch.stack([each.sum() for each in values]).isfinite().all().item())


def first_not_finite(loader: UnitLoader, held: RankWeights) -> str | None:
    """The first of a rank's weights with an infinite number or NaN, in its order of use; reads all of them, a unit at a
    time. Raises ConfigError where one cannot be read."""
    words = () if held.words is None else (WeightUnit("words", (held.words,)),)
    for unit in (WeightUnit("small", held.small), *words, *held.units, *held.experts.values()):
        for name, weight in loader.load_now(unit).items():
            if not weight.isfinite().all():
                return name
    return None
