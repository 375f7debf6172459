"""Logical weights: the model's tensors under names and in shapes that do not depend on the layout, as in Megatron with
one process.

A rank holds slices of them: some layers (pipeline), some experts (expert parallel, all of a rank in one stacked
parameter), a range of a dimension (tensor parallel), with the vocabulary padded. Initialization, import and export all
use this file.

Names are Megatron-core's parameter names with the global layer number and `experts.<global expert>`, the same for every
backend: `decoder.layers.3.mlp.experts.5.linear_fc1.weight`. A tied output layer has no name of its own. The blueprint
has the shape, kind and splits of each name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)

# isort: split
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from models.blueprint.operation import EXPERT, EXPERT_TENSOR, TENSOR, local_runs, unknown
from parallel.owned import is_at_hand, owner_of

EXPERTS = "mlp.experts."  # begins the names of routed experts' weights in a layer
# TransformerEngine keeps a norm inside the linear layer that follows it.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclass(frozen=True)
class LogicalTensor:
    """A parameter of this rank (or a buffer, or one expert of a stack), described as a slice of a logical weight (the
    whole weight, as with one process)."""

    name: str
    # Storage of the model: writing to it changes the model. Has the slice of `main_grad`, if its parameter has one.
    local: torch.Tensor
    shape: tuple[int, ...]  # of the logical tensor
    kind: str  # of the blueprint: matrix, norm, bias ...
    dim: int | None  # the dimension that tensor parallelism splits
    gated: bool  # fc1 of SwiGLU: rows are [gate | up], each split by itself
    group: dist.ProcessGroup  # the tensor parallel group that splits it
    # True if its values are offloaded (parallel/owned.py). `local` has the values only while `is_here` is True.
    off_device: bool = False
    is_here: bool = True

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of a full logical weight; padding rows are zero. Raises ValueError for a wrong
        shape."""
        if tuple(full.shape) != self.shape:
            raise ValueError(f"weight {self.name} has shape {tuple(full.shape)}, but this model needs {self.shape}")
        if self.dim is None:
            return full
        local = full.new_zeros(self.local.shape)
        for here, start, length in self.segments():
            local.narrow(self.dim, here, length).copy_(full.narrow(self.dim, start, length))
        return local

    def segments(self) -> list[tuple[int, int, int]]:
        """Return this rank's runs of indices along the split dimension, as (first local index, first index of the
        logical weight, length). A weight that is not split is one run along dimension 0. Local indices outside the runs
        pad the vocabulary."""
        if self.dim is None:
            return [(0, 0, self.shape[0])]
        return local_runs(self.shape[self.dim], self.local.size(self.dim), self.group.rank(), self.gated)

    def join(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Assemble the full logical weight from the slices of all tensor ranks, in order."""
        if self.dim is None:
            return slices[0]
        if self.gated:
            return torch.cat([local.chunk(2)[half] for half in range(2) for local in slices])
        return torch.cat(list(slices), dim=self.dim).narrow(self.dim, 0, self.shape[self.dim])


def logical_tensors(chunks: Sequence[torch.nn.Module]) -> list[LogicalTensor]:
    """Return the slices of logical weights in this rank's model chunks, which may be wrapped."""
    return [item for chunk in unwrap_model(list(chunks)) for item in _chunk_tensors(chunk)]


def tensors_off_device(
    chunks: Sequence[torch.nn.Module], off_device: Iterable[AbstractContextManager[None]]
) -> Iterator[LogicalTensor]:
    """Yield the slices of offloaded weights, for the caller to fill. Each context of `off_device` makes some weights
    accessible, and stores them when it exits."""
    for at_hand in off_device:
        with at_hand:
            for chunk in unwrap_model(list(chunks)):
                yield from _chunk_tensors(chunk, at_hand_alone=True)


def load_logical(
    chunks: Sequence[torch.nn.Module],
    get: Callable[[str], torch.Tensor],
    off_device: Iterable[AbstractContextManager[None]] = (),
) -> None:
    """Fill this rank's weights, in any layout. `get(name)` returns a full logical weight. `off_device`: contexts that
    each make some offloaded weights accessible. Raises ValueError for a wrong shape."""
    on_device = (item for item in logical_tensors(chunks) if not item.off_device)
    with torch.no_grad():
        for item in itertools.chain(on_device, tensors_off_device(chunks, off_device)):
            item.local.copy_(item.cut(get(item.name)))


def gather_logical(
    chunks: Sequence[torch.nn.Module], select: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather the full logical weights from all ranks, one at a time, sorted by name. Every rank must iterate to the
    end.

    Yields (name, full tensor on this rank's device) on every rank. `select` may replace each parameter by a different
    tensor of the same shape, such as its gradient.
    """
    items = {item.name: item for item in logical_tensors(chunks)}
    tensors = {name: select(item.local) for name, item in items.items()}
    device = next(iter(tensors.values())).device
    held: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(held, [(name, items[name].shape, tensor.dtype) for name, tensor in tensors.items()])
    sources: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    for rank, entries in enumerate(held):
        for name, shape, dtype in entries:
            sources.setdefault(name, (rank, shape, dtype))
    for name in sorted(sources):
        source, shape, dtype = sources[name]
        full = torch.empty(shape, dtype=dtype, device=device)
        # Ranks that split a tensor hold the same names, so the whole tensor group of the source is in this branch.
        if name in tensors and source in dist.get_process_group_ranks(items[name].group):
            item, local = items[name], tensors[name].contiguous()
            slices = [torch.empty_like(local) for _ in range(item.group.size())]
            dist.all_gather(slices, local, group=item.group)
            full.copy_(item.join(slices))
        dist.broadcast(full, src=source)
        yield name, full


def _chunk_tensors(chunk: torch.nn.Module, at_hand_alone: bool = False) -> Iterator[LogicalTensor]:
    """Yield the slices of logical weights in a model chunk. With `at_hand_alone`, yield only slices of offloaded
    parameters that are accessible now."""
    tensors: dict[str, torch.Tensor] = dict(chunk.named_parameters())
    if at_hand_alone:
        tensors = {name: tensor for name, tensor in tensors.items() if is_at_hand(tensor)}
    else:
        tensors.update((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias"))
    for name, of_blueprint, tensor in _unstacked(chunk, tensors):
        weight = chunk.blueprint_weights.get(of_blueprint)
        if weight is None:
            raise ValueError(f"the model has the weight {name!r}, which its blueprint does not have")
        # The first dimension of a stack is its experts, which are separate tensors here.
        stacked, dim = int(weight.is_expert), None
        for split in weight.splits:
            if split.axis in (TENSOR, EXPERT_TENSOR):
                dim = split.dim - stacked
            elif split.axis != EXPERT:
                unknown("logical_tensors", f"axis of {name}", split.axis)
        group = chunk.pg_collection.expt_tp if weight.is_expert else chunk.pg_collection.tp
        off_device, is_here = getattr(tensor, "offload_state", (False, True))
        shape = weight.shape[stacked:]
        yield LogicalTensor(name, tensor, shape, weight.kind, dim, weight.gated, group, off_device, is_here)


def _unstacked(chunk: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (logical name, name in the blueprint, tensor) for each parameter of a model chunk. The experts of a stack
    are separate views."""
    for local_name, tensor in tensors.items():
        match = re.fullmatch(r"(decoder|encoder)\.layers\.(\d+)\.(.+)", local_name)
        if match is None:
            tied = local_name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
            name = "embedding.word_embeddings.weight" if tied else local_name
            yield name, name, tensor
            continue
        block, index, rest = match.groups()
        layer = getattr(chunk, block).layers[int(index)]
        prefix = f"{block}.layers.{layer.layer_number - 1}."
        if rest.startswith(EXPERTS):
            gradients, owner = getattr(tensor, "main_grad", None), owner_of(tensor)
            for i, expert in enumerate(layer.mlp.local_expert_indices):
                view = tensor.detach()[i]  # a tensor, which carries what its readers ask of parameters
                if owner is not None:
                    view.offload_state = owner.off_device, owner.is_here  # type: ignore[attr-defined]
                if gradients is not None:
                    view.main_grad = gradients[i]  # type: ignore[attr-defined]
                yield f"{prefix}{EXPERTS}{expert}.{rest.removeprefix(EXPERTS)}", prefix + rest, view
            continue
        for fused, plain in FUSED_NORMS.items():
            if rest.startswith(fused):
                rest = plain + rest.removeprefix(fused)
        yield prefix + rest, prefix + rest, tensor
