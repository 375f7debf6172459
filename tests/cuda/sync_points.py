"""What the tests of the pretended device know of the product's places: `file:function`, to be kept up when code moves.

The tables list the host's waits for the device. A wait that they do not name turns test_waits red. A change that moves
a place changes it here; one that adds a wait says why here.
"""

from __future__ import annotations

from collections import Counter

from tests.cuda.pretended.observed import Mutant

P2P = "megatron/core/pipeline_parallel/p2p_communication.py:P2PCommunicator._communicate"
GRADS = "megatron/core/distributed/param_and_grad_buffer.py:_ParamAndGradBucketGroup.finish_grad_sync"
WEIGHTS = "megatron/core/distributed/param_and_grad_buffer.py:_ParamAndGradBucketGroup.finish_param_sync"
LINEAR = "megatron/core/tensor_parallel/layers.py:LinearWithGradAccumulationAndAsyncCommunication"
INTERLEAVED = "megatron/core/pipeline_parallel/schedules.py:forward_backward_pipelining_with_interleaving"
SENT = "parallel/megatron/fixes.py:_free_outputs_once_sent.<locals>.free_once_sent"
OVER_RANKS = "moe/schedule/over_ranks.py:"
OFFLOAD = "memory/host_link.py:OffloadedTensor."
EXPERTS, OFFLOADED_EXPERTS = "moe/experts/streamed.py:", "optim/offload/experts.py:OffloadedExperts."
STREAM, OFFLOADED_OPTIMIZER = "memory/copy_stream.py:CopyStream._wait", "optim/offload/optimizer.py:OffloadedOptimizer."
HIERARCHY, MESSAGES = "moe/alltoall/hierarchical.py:", "moe/alltoall/messages.py:"
Waits = dict[tuple[str, str], int]  # by kind (see device.py) and place


# Where a copy stream's thread waits, when it ends, for all that its streams were given.
STREAMS_END = "memory/copy_stream.py:CopyStream._run"
# Numbers that the host has worked out, in blocks that torch has pinned before and uses again.
SMALL = "memory/transfer.py:to_device"
PER_STEP: Waits = {("copy to host", "training/step.py:_sum_over_ranks"): 1}  # the step's sums
# Of an MoE layer and micro-batch, forward and backward pass together.
FLAT: Waits = {("tolist", "moe/alltoall/flat.py:FlatAllToAll.count"): 1}
HIERARCHICAL: Waits = {("tolist", "moe/alltoall/hierarchical.py:HierarchicalAllToAll.count"): 1}
# Where a policy places experts the host learns all ranks' counts first.
PLACED: Waits = {**FLAT, ("copy to host", "moe/placement/live.py:LayerPlacement._gather"): 1}
# Full recomputation runs the forward pass of each layer twice.
FLAT_TWICE: Waits = {key: 2 * count for key, count in FLAT.items()}
# Where a grouped product is not one kernel, the host loops over experts: it asks once for all chunks of both passes.
LOOP_OVER_EXPERTS: Waits = {**FLAT, ("tolist", "moe/route.py:read_ends"): 1}
PLACED_LOOP: Waits = {**PLACED, **LOOP_OVER_EXPERTS}
LOOP_LOCAL: Waits = {("tolist", "moe/route.py:read_ends"): 1}

# Of generation: the token that was chosen, or the logits that it is drawn from, for each batch of a pass; what this
# layer's router chose and the next one's probably will, for each MoE layer and pass; log-probabilities, for each batch.
TOKEN: Waits = {("copy to host", "inference/generation.py:_Generation.run"): 1}
DRAWN: Waits = {("copy to host", "inference/generation.py:_choose"): 1}
CHOICE: Waits = {("copy to host", "inference/decoder/experts.py:_to_host"): 1}
SCORES: Waits = {("copy to host", "inference/scoring.py:log_likelihoods_of"): 1}
# Of each pass with answers: whether these are numbers.
FINITE: Waits = {("item", "inference/weights/file_weights.py:FileWeights.check_finite"): 1}


def waits(per_layer: Waits, layers: int, also: Waits | None = None) -> Counter[tuple[str, str]]:
    """Of one step with so many passes of MoE layers (layers times micro-batches); `also`: further ones a step."""
    return Counter({**PER_STEP, **{key: count * layers for key, count in per_layer.items()}, **(also or {})})


def host_waits(buckets: int) -> dict[str, int]:
    """Of a step, for Case.thread_waits: so many buckets are updated on the host, and each waits for one copy a
    direction: its gradient's, and that of the weights that were in its memory before."""
    return {"host update stream": 2 * buckets}


def expert_waits(updated: int, read: int = 0, written: int = 0) -> dict[str, int]:
    """Experts off the device. The host's thread waits for a copy of each gradient that it adds or updates with, and for
    the last copy of the weights that it changes; the disk's threads for a copy to where they read, or of what they
    write."""
    return {"host update stream": updated, "disk read stream": read, "disk write stream": written}


def disk_waits(buckets: int) -> dict[str, int]:
    """So many buckets come from the disk to the device, and go back there once a copy has brought them to the host."""
    return {"disk write stream": buckets}


def _mutant(what: str, call_site: str, case: str, thread: str | None = None) -> tuple[Mutant, str]:
    return Mutant(what, call_site, thread=thread), case


# Calls that are left out, and the case that misses them; or an operation that another one of its communicator
# overtakes.
MUTANTS = {
    "a chunk's rows": _mutant("wait", f"{OVER_RANKS}_Pass.wait_dispatch", "offload, chunks"),
    "a chunk's sums": _mutant("wait", f"{OVER_RANKS}_Pass.sum_combine", "offload, chunks"),
    "rows that are dispatched again": _mutant("wait", f"{OVER_RANKS}_Pass.wait_dispatch", "communicate"),
    "sums of a pass with another degree": _mutant("wait", f"{OVER_RANKS}_Pass.sum_combine", "communicate, two degrees"),
    "the message of assignments": _mutant("wait", f"{OVER_RANKS}_Pass.take_message", "keep, chunks"),
    "counts": _mutant("wait", "moe/alltoall/flat.py:FlatAllToAll.count", "keep"),
    "what comes back from the host": _mutant("wait_event", f"{OFFLOAD}get", "offload, chunks"),
    "preactivations from the host": _mutant("wait_event", f"{OFFLOAD}get", "communicate and offload"),
    "the allocator's notice of a copy": _mutant("record_stream", f"{OFFLOAD}__init__", "offload, chunks"),
    "rows that are copied out too early": _mutant("wait_stream", f"{OFFLOAD}__init__", "offload, chunks"),
    "layer inputs that leave and come back": _mutant(
        "wait_event", "memory/completion.py:Completion.order", "layer inputs on the host"
    ),
    "memory that was somebody else's": _mutant("wait_stream", f"{OFFLOAD}fetch", "offload"),
    "keys that arrive in a round": _mutant("wait", f"{MESSAGES}Messages.wait_received", "context"),
    "latents that arrive in a round": _mutant("wait", f"{MESSAGES}Messages.wait_received", "context, latent attention"),
    "gradients that come home": _mutant("wait", f"{MESSAGES}Messages.wait", "context"),
    "rows that pass through a relay": _mutant("wait", f"{HIERARCHY}_HierarchicalHandle.wait", "hierarchical"),
    "counts of all nodes": _mutant("wait", f"{HIERARCHY}HierarchicalAllToAll.count", "hierarchical"),
    "another stage's activations": _mutant("wait", P2P, "pipeline"),
    "another stage's experts": _mutant("wait", P2P, "experts in a pipeline"),
    "activations of a model chunk": _mutant("wait", INTERLEAVED, "interleaved"),
    "an output that is sent before it is freed": _mutant("wait", SENT, "interleaved"),
    "gradients that are sharded": _mutant("wait", GRADS, "data parallel"),
    "gradients that are not": _mutant("wait", GRADS, "gradients not sharded"),
    "weights that are gathered": _mutant("wait", WEIGHTS, "data parallel"),
    "input gradients over tensor ranks": _mutant("wait", f"{LINEAR}.backward", "tensor, whole sequences"),
    "sequences over tensor ranks": _mutant("wait", f"{LINEAR}.backward", "tensor"),
    "a record's slot that is free": _mutant("wait_event", STREAM, "state streamed from the host", "to device stream"),
    "a record that has come": _mutant("wait_event", STREAM, "state streamed from the host", "device update stream"),
    "a record that is updated": _mutant("wait_event", STREAM, "state streamed early", "from device stream"),
    "a record for the disk": _mutant(
        "event.synchronize", STREAM, "state streamed from the disk early", "disk write stream"
    ),
    "a gradient that leaves": _mutant("wait_event", STREAM, "state updated on the host", "from device stream"),
    "a gradient on the host": _mutant(
        "event.synchronize", STREAM, "state updated on the host early", "host update stream"
    ),
    "weights that are back": _mutant("wait_event", OFFLOADED_OPTIMIZER + "gate", "state updated on the host early"),
    "gradients without their scale": _mutant("wait_event", OFFLOADED_OPTIMIZER + "unscaled", "state split"),
    "a slot for weights that is free": _mutant(
        "wait_event", STREAM, "experts on the host by layer", "to device stream"
    ),
    "weights of experts": _mutant("wait_event", f"{EXPERTS}StreamedExperts.wait", "experts on the host by layer"),
    "a slot for gradients that is free": _mutant(
        "wait_event", f"{EXPERTS}ExpertStream.store", "experts on the host by layer"
    ),
    "weights of experts that are updated": _mutant(
        "written", f"{OFFLOADED_EXPERTS}bring", "experts on the host by layer"
    ),
    "a sum of gradients on the host": _mutant("written", f"{OFFLOADED_EXPERTS}sum_to", "experts' parts on the host"),
    "the order of two chunks": _mutant("order", f"{OVER_RANKS}_Pass.dispatch", "keep, chunks"),
    "the order of two chunks' sums": _mutant("order", f"{OVER_RANKS}_Pass.combine", "offload, chunks"),
}
MUTANTS_OF_TESTS = (
    "a chunk's rows",
    "what comes back from the host",
    "the allocator's notice of a copy",
    "rows that pass through a relay",
    "another stage's activations",
    "gradients that are sharded",
    "a record's slot that is free",
    "a gradient on the host",
    "weights that are back",
)
