"""What the tests of the pretended device know of the product's places: `file:function`, to be kept up when code moves.

The tables list the host's waits for the device. A wait that they do not name turns test_waits red. A change that moves
a place changes it here; one that adds a wait says why here.
"""

from __future__ import annotations

from collections import Counter

P2P = "megatron/core/pipeline_parallel/p2p_communication.py:P2PCommunicator._communicate"
Waits = dict[tuple[str, str], int]  # by kind (see device.py) and place


# Calls that a test leaves out, by what they are, and the case that misses them.
MUTANTS = {
    "a chunk's rows": ("wait", "moe/schedule/over_ranks.py:_Pass.wait_dispatch", "offload, chunks"),
    "a chunk's sums": ("wait", "moe/schedule/over_ranks.py:_Pass.sum_combine", "offload, chunks"),
    "what comes back from the host": ("wait_event", "moe/schedule/restore.py:HostStore.get", "offload, chunks"),
    "the allocator's notice of a copy": ("record_stream", "moe/schedule/restore.py:HostStore.put", "offload, chunks"),
    "rows that pass through a relay": (
        "wait",
        "moe/alltoall/hierarchical.py:_HierarchicalHandle.wait",
        "hierarchical",
    ),
    "another stage's activations": ("wait", P2P, "pipeline"),
}

PER_STEP: Waits = {("copy to host", "training/step.py:gradients"): 1}  # the step's sums
# Of an MoE layer and micro-batch, forward and backward pass together.
FLAT: Waits = {("tolist", "moe/alltoall/flat.py:FlatAllToAll.count"): 1}
HIERARCHICAL: Waits = {("tolist", "moe/alltoall/hierarchical.py:HierarchicalAllToAll.count"): 1}
# Full recomputation runs the forward pass of each layer twice.
FLAT_TWICE: Waits = {key: 2 * count for key, count in FLAT.items()}
# Where a grouped product is not one kernel, the host loops over experts: it asks once for all chunks of both passes.
LOOP_OVER_EXPERTS: Waits = {**FLAT, ("tolist", "moe/route.py:read_ends"): 1}
LOOP_LOCAL: Waits = {("tolist", "moe/route.py:read_ends"): 1}


def waits(per_layer: Waits, layers: int, also: Waits | None = None) -> Counter[tuple[str, str]]:
    """Of one step with so many passes of MoE layers (layers times micro-batches); `also`: further ones a step."""
    return Counter({**PER_STEP, **{key: count * layers for key, count in per_layer.items()}, **(also or {})})
