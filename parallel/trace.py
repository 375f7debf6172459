"""Names of a step's phases in a profiler trace: dispatch, experts, combine, attention, gradient reduction and so on.

While no trace is recorded, a name costs the test of a flag (0.1 us; torch's record_function would take 3 us).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

Function = TypeVar("Function", bound=Callable[..., Any])

_NOTHING = contextlib.nullcontext()
_recording = False


def span(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that names the operations inside it in a trace."""
    return record_function(name) if _recording else _NOTHING


def named(name: str) -> Callable[[Function], Function]:
    """Return a decorator that names a function's calls in a trace."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _recording:
                return function(*args, **kwargs)
            with record_function(name):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


@contextlib.contextmanager
def recording(*others: tuple[Any, str, str]) -> Iterator[None]:
    """Within this context, traces record names, also those of the functions `others`, each (owner, attribute, name)."""
    global _recording
    before, _recording = _recording, True
    try:
        with contextlib.ExitStack() as undo:
            for owner, attribute, name in others:
                own = vars(owner).get(attribute)
                setattr(owner, attribute, named(name)(getattr(owner, attribute)))
                undo.callback(*((delattr, owner, attribute) if own is None else (setattr, owner, attribute, own)))
            yield
    finally:
        _recording = before


def with_backward(name: str) -> Callable[[Function], Function]:
    """Return a decorator that names a module's forward and backward passes in a trace.

    It decorates a `forward` from a tensor to a tensor or a tuple that starts with one. The backward pass is taken to
    last from the output's gradient to the input's gradient.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with record_function(name):
                result = function(x, *args, **kwargs)
            output = result[0] if isinstance(result, tuple) else result
            if x.requires_grad and output.requires_grad and not x.is_leaf:
                backward = record_function(f"{name} backward")

                def begin(grad: torch.Tensor) -> None:
                    backward.__enter__()

                def end(grad: torch.Tensor) -> None:  # returns None, as other values would replace the gradient
                    backward.__exit__(None, None, None)

                output.register_hook(begin)
                x.register_hook(end)
            return result

        return call  # type: ignore[return-value]

    return decorate
