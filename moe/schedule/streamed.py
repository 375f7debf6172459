"""What both interpreters with tensors do where experts lie off the device (moe/experts/streamed.py)."""

from __future__ import annotations

from typing import Any

from moe.schedule import program


def _store(state: Any, operation: program.StoreExpert) -> None:
    if state.grads is not None:
        copies = state.call.copies
        state.call.streamed.store(state.grads.finish(), () if copies is None else copies.take_arrived())


# What each operation does to the state of a pass.
LINES: program.Lines = {
    program.FetchExpert: lambda state, _: state.call.streamed.fetch(),
    program.WaitExpert: lambda state, _: state.call.streamed.wait(),
    program.StoreExpert: _store,
}
