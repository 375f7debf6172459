"""The operations of torch.distributed as exchanges: what is read, what is written, and what the log says of each.

torch dispatches them (`c10d::allreduce_` and so on), but for those that gloo does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._pytree import tree_leaves, tree_map

from tests.cuda.pretended import device, exchanges
from tests.cuda.pretended.device import DeviceTensor
from tests.cuda.pretended.exchanges import Exchange
from tests.cuda.pretended.logs import Key, Operation
from tests.cuda.pretended.observed import OBSERVED, call_site
from tests.cuda.pretended.streams import AT_SYNCHRONIZE

c10d = torch.ops.c10d
_TAG = 7  # messages of two ranks match in their order
_of_host: set[ProcessGroup] = set()  # groups that the product has made for tensors of the host
# gloo's own of these corrupt the heap (torch 2.13).
_ONE_BY_ONE = {
    c10d.allgather_into_tensor_coalesced_: c10d._allgather_base_.default,
    c10d.reduce_scatter_tensor_coalesced_: c10d._reduce_scatter_base_.default,
}
_GATHERS = {c10d._allgather_base_, c10d.allgather_, c10d.allgather_into_tensor_coalesced_}
_SIZED_BY_OUTPUT = ("reduce_scatter", "_reduce_scatter", "scatter", "broadcast")


def _key(group: ProcessGroup, suffix: str = "") -> Key:
    return f"{group.group_name}{suffix}", tuple(dist.get_process_group_ranks(group))


def _pair(group: ProcessGroup, peer: int) -> Key:
    # What is sent outside of a batch has a communicator of two ranks.
    name, ranks = _key(group)
    both = sorted({group.rank(), peer})
    return f"{name}, messages of {both}", tuple(ranks[rank] for rank in both)


def _operate(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operation of a process group, as torch dispatches it."""
    if exchanges.is_running():
        return operation(*args, **kwargs)
    given = _arguments(operation, args, kwargs)
    (group,) = (ProcessGroup.unbox(value) for name, value in given.items() if name == "process_group")
    outputs, inputs = _roles(operation, given, group)
    packet = operation.overloadpacket
    name = packet.__name__.strip("_")
    is_barrier = "barrier" in name
    here = any(isinstance(tensor, DeviceTensor) for tensor in (*outputs, *inputs))
    if not here and not is_barrier:
        _refuse_host(name, group)
        exchanges.note(_key(group, ", on the host"), _describe(name, given, outputs, inputs, group))
        return operation(*args, **kwargs)
    if is_barrier:
        OBSERVED.wait("barrier")
    OBSERVED.launch(name)
    of_pair = name in ("send", "recv")

    def run(of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if name == "send":
            message = of(inputs[0]).clone()
            exchanges.send(dist.isend(message, group=group, group_dst=given["dst"], tag=given["tag"]), message)
            return
        for call, arguments in _calls(operation, args):
            arguments = tree_map(lambda value: of(value) if isinstance(value, torch.Tensor) else value, arguments)
            result = call(*arguments, **kwargs)
            work = result[-1] if isinstance(result, tuple) and result else result
            if isinstance(work, torch.ScriptObject):
                Work.unbox(work).wait(exchanges.LIMIT)

    described = _describe(name, given, outputs, inputs, group)
    if of_pair:
        peer = given["dst"] if name == "send" else given["src"]
        ends = tuple((_end(tensor, peer)) for tensor in (*outputs, *inputs))
        described = Operation(
            name, None, described.call_site, ends if name == "send" else (), ends if name == "recv" else ()
        )
    exchange = Exchange(
        _pair(group, peer) if of_pair else _key(group),
        described,
        outputs,
        inputs,
        run,
        is_at_once=not given.get("async_op", of_pair),
        is_gather=packet in _GATHERS,
    )
    work = Work.boxed(exchange)
    return (args[0], work) if len(operation._schema.returns) == 2 else work


def _arguments(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = {}
    for index, argument in enumerate(operation._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        given[argument.name] = value
    return given


def _roles(operation: Any, given: dict[str, Any], group: ProcessGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tensors that are written, tensors that are read)."""
    outputs: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    name = operation.overloadpacket.__name__.strip("_")
    for argument, value in given.items():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if argument.startswith("output"):
            outputs += tensors
        elif argument.startswith("input"):
            inputs += tensors
        elif argument == "tensors":
            is_root = given.get("root_rank", group.rank()) == group.rank()
            if name != "recv" and (name != "broadcast" or is_root):
                inputs += tensors
            if name != "send" and (is_root or name != "reduce") and not (name == "broadcast" and is_root):
                outputs += tensors
    return outputs, inputs


def _describe(
    name: str,
    given: dict[str, Any],
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: ProcessGroup,
) -> Operation:
    first = (*outputs, *inputs)[:1]
    dtype = str(first[0].dtype).removeprefix("torch.") if first else ""
    if name == "alltoall_base":
        first_sizes = given["output"].size(0), given["input"].size(0)
        columns = [tensor.numel() // max(1, tensor.size(0)) for tensor in (given["output"], given["input"])]
        split = given["output_split_sizes"], given["input_split_sizes"]
        receives, sends = (
            tuple(
                (rank, count * width, dtype)
                for rank, count in enumerate(counts or [total // group.size()] * group.size())
            )
            for counts, total, width in zip(split, first_sizes, columns, strict=True)
        )
        return Operation(name, dtype, call_site(), sends, receives)
    sized = (outputs if name.startswith(_SIZED_BY_OUTPUT) else inputs) or (*outputs, *inputs)
    numbers = tuple(tensor.numel() for tensor in sized)
    if name in ("gather", "scatter", "barrier"):  # only the root has all of it
        numbers = ()
    root = given.get("root_rank")
    return Operation(name, (dtype, numbers) if root is None else (dtype, numbers, f"root {root}"), call_site())


def _calls(operation: Any, args: Sequence[Any]) -> list[tuple[Any, Sequence[Any]]]:
    single = _ONE_BY_ONE.get(operation.overloadpacket)
    if single is None:
        return [(operation, args)]
    outputs, inputs, *rest = args
    return [(single, (output, source, *rest)) for output, source in zip(outputs, inputs, strict=True)]


def _refuse_host(name: str, group: ProcessGroup) -> None:
    frame = sys._getframe(2)
    while frame is not None:
        if "object" in frame.f_code.co_name and frame.f_code.co_filename.endswith("distributed_c10d.py"):
            return  # which would bring them to the device
        frame = frame.f_back  # type: ignore[assignment]
    if group not in _of_host:
        OBSERVED.fault(f"{name} of a host's tensor over NCCL, in {call_site()}")


def _end(tensor: torch.Tensor, peer: int) -> tuple[int, int, str]:
    return peer, tensor.numel(), str(tensor.dtype).removeprefix("torch.")


def _messages(
    group: ProcessGroup,
    sends: Iterable[tuple[torch.Tensor, int]],
    receives: Iterable[tuple[torch.Tensor, int]],
    name: str,
    what: str | None,
    at_once: bool,
) -> Exchange:
    sends, receives = ([(tensor, rank) for tensor, rank in ends if tensor.numel()] for ends in (sends, receives))

    def run(of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        own = group.rank()
        mine = [of(tensor) for tensor, rank in sends if rank == own]
        for target, source in zip((of(tensor) for tensor, rank in receives if rank == own), mine, strict=True):
            target.copy_(source)
        works = [dist.irecv(of(t), group=group, group_src=rank, tag=_TAG) for t, rank in receives if rank != own]
        works += [dist.isend(of(t), group=group, group_dst=rank, tag=_TAG) for t, rank in sends if rank != own]
        for work in works:
            work.wait(exchanges.LIMIT)

    operation = Operation(
        name,
        what,
        call_site(),
        tuple(_end(tensor, rank) for tensor, rank in sends),
        tuple(_end(tensor, rank) for tensor, rank in receives),
    )
    return Exchange(
        _key(group), operation, [tensor for tensor, _ in receives], [tensor for tensor, _ in sends], run, at_once
    )


def _all_to_all(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: Any = None, async_op: bool = False
) -> Any:
    sends, receives = zip(inputs, range(len(inputs))), zip(outputs, range(len(outputs)))
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    exchange = _messages(group or dist.group.WORLD, sends, receives, "all_to_all", dtype, not async_op)
    return exchange if async_op else None


def _batch(operations: Sequence[Any]) -> list[Exchange]:
    group = operations[0].group or dist.group.WORLD
    sends = [(operation.tensor, operation.group_peer) for operation in operations if operation.op is dist.isend]
    receives = [(operation.tensor, operation.group_peer) for operation in operations if operation.op is dist.irecv]
    return [_messages(group, sends, receives, "batch", None, False)]


def install() -> None:
    """Put these in the place of torch's for the rest of the process; process groups say that they are NCCL's."""
    make_group = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = make_group(*args, **kwargs)
        if kwargs.get("backend") == "gloo" and isinstance(group, ProcessGroup):
            _of_host.add(group)
        return group

    dist.new_group = new_group
    dist.all_to_all = _all_to_all
    dist.batch_isend_irecv = _batch
    dist.ProcessGroupNCCL = SimpleNamespace(Options=lambda **_: None)  # which gloo's groups do not read
    dist.get_backend = dist.distributed_c10d.get_backend = lambda group=None: "gloo" if group in _of_host else "nccl"
    device.NAMESPACES["c10d"] = _operate
    AT_SYNCHRONIZE.append(exchanges.run_all)
