"""The insides of Megatron-core 0.16.1's activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.transformer_block import TransformerBlock

from parallel.megatron import require_version

require_version()


def around_checkpoints(
    chunk: torch.nn.Module, context: Callable[[Callable[[], bool]], AbstractContextManager[None]]
) -> None:
    """Have a model chunk run its layers, where it checkpoints all of them, in a context.

    What autograd saves meanwhile is what the checkpoints keep, unless the function that `context` gets says that one is
    computing: Megatron-core enables gradients for some operations of a layer.
    """
    (block,) = (module for module in chunk.modules() if isinstance(module, TransformerBlock))
    forward = block._checkpointed_forward

    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        with context(is_checkpointing):
            return forward(*args, **kwargs)

    block._checkpointed_forward = checkpointed_forward
