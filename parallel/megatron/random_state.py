"""This rank's random number states: those of torch, and those of Megatron's tracker, which dropout uses."""

from __future__ import annotations

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)

# isort: split
import torch
from megatron.core import tensor_parallel

PassId = tuple[int, int]  # step, micro-batch in the global batch
PASS_KEY = "place"  # key of the PassId among the tracker's states, for parallel/dropout.py


def random_states() -> dict[str, torch.Tensor]:
    """Return this rank's random number states by name, as host tensors."""
    states = {"host": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["device"] = torch.cuda.get_rng_state()
    for name, tracked in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        if name != PASS_KEY:
            states[f"tracker.{name}"] = tracked.cpu()
    return states


def restore_random_states(states: dict[str, torch.Tensor]) -> None:
    """Set this rank's random number states to those that `random_states` returned."""
    torch.set_rng_state(states["host"])
    if "device" in states:
        torch.cuda.set_rng_state(states["device"])
    tracked = {name.removeprefix("tracker."): value for name, value in states.items() if name.startswith("tracker.")}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def current_pass() -> PassId | None:
    """Return (step, micro-batch in the global batch) of the current pass, or None if it was never set."""
    return tensor_parallel.get_cuda_rng_tracker().get_states().get(PASS_KEY)  # type: ignore[no-any-return]


def set_current_pass(pass_id: PassId | None) -> None:
    """Set the step and micro-batch of the current pass, from which dropout derives its seeds."""
    # Stored with the random number states, because Megatron-core restores these when it recomputes a layer.
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if pass_id is not None:
        tracker.set_states({**tracker.get_states(), PASS_KEY: pass_id})
