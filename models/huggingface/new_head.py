"""An output layer for a model that comes without one, as encoders and classifiers do: drawn as a fresh run draws it."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from configs.schema import Config
from models.blueprint import Weight, weights, whole

HEAD = ("lm_head.", "output_layer.")  # begin the logical names of what makes logits of the last layer's output


def is_of_head(name: str) -> bool:
    """Whether a logical weight belongs to the output layer."""
    return name.startswith(HEAD)


@dataclass(frozen=True)
class NewHead:
    """Draws weights of the output layer for a seed."""

    config: Config
    weights: dict[str, Weight]

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The initial values of a logical weight."""
        from models.initial_weights import initial_weight  # Megatron-core: seconds that no other import waits for

        return initial_weight(name, self.weights[name], self.config).to(dtype)


def new_head(config: Config, seed: int) -> NewHead:
    """The output layer that a run of `training.seed` would begin with."""
    config = copy.deepcopy(config)
    config.training.seed = seed
    assert config.model.vocab_size is not None
    return NewHead(config, dict(weights(config, config.model.vocab_size, whole(config))))
