"""This rank's random number states: torch's own, and those of Megatron's tracker, from which dropout draws."""

from __future__ import annotations

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)

# isort: split
import torch
from megatron.core import tensor_parallel

Place = tuple[int, int]
PLACE = "place"  # beside the tracker's states: the (step, micro-batch) of the pass, for parallel/dropout.py


def random_states() -> dict[str, torch.Tensor]:
    """This rank's random number states, on the host."""
    states = {"host": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["device"] = torch.cuda.get_rng_state()
    for name, tracked in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        if name != PLACE:
            states[f"tracker.{name}"] = tracked.cpu()
    return states


def restore_random_states(states: dict[str, torch.Tensor]) -> None:
    """Undo `random_states`."""
    torch.set_rng_state(states["host"])
    if "device" in states:
        torch.cuda.set_rng_state(states["device"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states(
        {name.removeprefix("tracker."): value for name, value in states.items() if name.startswith("tracker.")}
    )


def place() -> Place | None:
    """The (step, micro-batch of the global batch) of the pass that goes on, where it was ever said."""
    return tensor_parallel.get_cuda_rng_tracker().get_states().get(PLACE)  # type: ignore[no-any-return]


def set_place(place: Place | None) -> None:
    """What follows is of this (step, micro-batch of the global batch)."""
    # It lies with the random number states because Megatron-core puts those back where it computes a layer again.
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if place is not None:
        tracker.set_states({**tracker.get_states(), PLACE: place})
