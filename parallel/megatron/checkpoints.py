"""Access to internals of Megatron-core 0.16.1's activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CheckpointFunction, is_checkpointing
from megatron.core.transformer.transformer_block import TransformerBlock

from parallel.megatron import require_version

require_version()


def around_checkpoints(
    chunk: torch.nn.Module, context: Callable[[Callable[[], bool]], AbstractContextManager[None]]
) -> None:
    """Make a model chunk run its layers within a context. All its layers must use activation checkpointing.

    context: takes a function that returns whether a checkpointed layer computes with gradients.
    """
    (block,) = (module for module in chunk.modules() if isinstance(module, TransformerBlock))
    forward = block._checkpointed_forward

    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        with context(is_checkpointing):
            return forward(*args, **kwargs)

    block._checkpointed_forward = checkpointed_forward


class CheckpointedCall:
    """A layer's passes with Megatron-core's activation checkpointing, but outside autograd's graph.

    `run` computes the layer: hidden states [s, b, H] to hidden states [s, b, H].
    """

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._run = run
        self._input: torch.Tensor | None = None

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output without saving activations."""
        return CheckpointFunction.forward(self, self._run, False, hidden)  # type: ignore[no-any-return]

    @torch.no_grad()
    def backward(self, hidden: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Recompute the layer, and return the gradient of its input from that of its output."""
        self._input = hidden.requires_grad_()
        del hidden
        return CheckpointFunction.backward(self, grad)[2]  # type: ignore[no-any-return]

    # The attributes of autograd's context that CheckpointFunction uses.

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Save nothing for the backward pass, which recomputes from the layer's input: the caller already stores it."""

    @property
    def saved_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the layer's input for the recomputation. It can be read once."""
        assert self._input is not None
        given, self._input = self._input, None
        return (given,)
