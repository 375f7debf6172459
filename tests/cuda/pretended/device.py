"""A CUDA device made of host memory, for a torch without CUDA: real numbers on tensors that say `cuda:0`.

`Device` is the dispatch mode under which the product runs. Each operation is computed on the host tensors inside. Where
the driver of a GPU would make the host wait, that is counted by kind and place. An operation that mixes host and device
tensors is an error. What this cannot show: speed, memory, and the numbers of CUDA's own kernels. To C++ a tensor's
address is null.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.cuda.pretended import attention, memory, order, streams
from tests.cuda.pretended.observed import OBSERVED, call_site, is_launch

DEVICE = streams.DEVICE
HOST = torch.device("cpu")
aten = torch.ops.aten
_PINNED: dict[int, StorageWeakRef] = {}  # by address of the storage, which is not given to another one before that

# The size of their result depends on the values, so the host must read a count back.
SIZED_BY_VALUES = {
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
}
READ_BY_HOST = {aten._local_scalar_dense: "item", aten.equal: "equal", aten.is_nonzero: "item"}
# Who runs the operations of a namespace instead of torch: exchanges.py those of process groups.
NAMESPACES: dict[str, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {}
INDEXING = {aten.index, aten._unsafe_index, aten.index_put, aten.index_put_}


class DeviceTensor(torch.Tensor):
    """Says `cuda:0`; its numbers are in the tensor `host`."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        geometry = {
            "strides": host.stride(),
            "storage_offset": host.storage_offset(),
            "dtype": host.dtype,
            "layout": host.layout,
        }
        made = torch.Tensor._make_wrapper_subclass(cls, host.size(), device=DEVICE, requires_grad=False, **geometry)
        made.host = host
        memory.made(host)
        return made

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        value = on_device(value)  # a tensor of the host, which torch takes, too
        self.host = value.host
        torch.Tensor.data.__set__(self, value)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        streams.at_once([(self.host, False)])
        OBSERVED.wait("tolist")
        OBSERVED.carry(self.host.nbytes, to_device=False)
        return self.host.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host})"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(operation, args, kwargs or {})


class Device(TorchDispatchMode):
    """While it is entered, whatever is made on or moved to a CUDA device becomes a `DeviceTensor`."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(operation, args, kwargs or {})


def host_of(value: Any) -> Any:
    """The host tensor inside a device tensor; anything else as it is."""
    return value.host if isinstance(value, DeviceTensor) else value


def on_device(value: Any) -> Any:
    """The same numbers as a device tensor; what is no tensor as it is."""
    return DeviceTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor) else value


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the memory of a host tensor is page-locked."""
    return tensor.untyped_storage()._cdata in _PINNED


def run(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute one operation as the device would, or as torch does where no device tensor has to do with it."""
    if operation.namespace in NAMESPACES:
        return NAMESPACES[operation.namespace](operation, args, kwargs)
    name = getattr(operation, "overloadpacket", operation)
    asked = kwargs.get("device")
    if asked is not None:
        kwargs = {**kwargs, "device": HOST}
    if name is aten.copy_:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return _copy_between(args[0], args[1], non_blocking)
    if name is aten._to_copy and asked is not None:
        return _move(operation, args[0], torch.device(asked), kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    here = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
    if not here and (asked is None or torch.device(asked).type == "cpu"):
        if order.knows_of_host():
            _use_on_host(_uses(operation, args, kwargs))
        return operation(*args, **kwargs)
    kwargs.pop("pin_memory", None)
    OBSERVED.launch(_short(operation))
    if here:
        _refuse_mixed(operation, name, tensors)
        _count_waits(name, args, kwargs)
    uses = [
        (host_of(tensor), writes) for tensor, writes in _uses(operation, args, kwargs) if tensor is not host_of(tensor)
    ]
    if not streams.is_default() and (uses or not here):
        return _queue(operation, args, kwargs, uses)
    streams.at_once(uses)
    args_of_host = tree_map(host_of, args)
    if operation is aten.mm.dtype:  # which no CPU has
        result = torch.mm(*(each.to(args[2]) for each in args_of_host[:2]))
    elif name is aten.histc and not args_of_host[0].is_floating_point():  # which no CPU has
        result = torch.histc(args_of_host[0].double(), *args_of_host[1:], **kwargs).to(args[0].dtype)
    elif name in attention.KERNELS:
        result = attention.KERNELS[name](*args_of_host, **tree_map(host_of, kwargs))
    else:
        result = operation(*args_of_host, **tree_map(host_of, kwargs))
    if asked is not None and torch.device(asked).type == "cpu":
        return result
    result = tree_map(on_device, result)
    return return_and_correct_aliasing(operation, args, kwargs, result) if here else result


def _short(operation: Any) -> str:
    return str(getattr(operation, "overloadpacket", operation)).rpartition(".")[2]


def _uses(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, bool]]:
    """The tensors whose numbers it touches, and whether it writes to them."""
    if not is_launch(_short(operation)) or operation.is_view:
        return []
    if not operation._schema.is_mutable:
        return [(leaf, False) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    found = []
    for index, argument in enumerate(operation._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        # Fused optimizers write to gradients where they scale them.
        writes = argument.is_write and not (argument.name == "grads" and kwargs.get("grad_scale") is None)
        found += [(leaf, writes) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _use_on_host(uses: Sequence[tuple[torch.Tensor, bool]]) -> None:
    for tensor, writes in uses:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
            order.use_on_host(tensor, writes)


def _queue(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any], uses: Sequence[tuple[torch.Tensor, bool]]
) -> Any:
    """An operation of a side stream: it is done later, on the numbers that are there by then."""
    written = [argument for argument in operation._schema.arguments if argument.is_write]
    returns = operation._schema.returns
    if not written or len(returns) > 1 or any(each.alias_info is None for each in returns):
        streams.refuse_on_side_stream(operation)
    leaves, spec = tree_flatten((tuple(args), kwargs))
    tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, DeviceTensor)]
    tensors = [leaves[index].host for index in tensor_indices]
    for index, leaf in enumerate(leaves):  # numbers of the host are read now; those of the device do not stay alive
        if isinstance(leaf, torch.Tensor):
            leaves[index] = None if index in tensor_indices else leaf.clone()

    def run(*tensors: torch.Tensor) -> None:
        given = list(leaves)
        for index, tensor in zip(tensor_indices, tensors, strict=True):
            given[index] = tensor
        args, kwargs = tree_unflatten(given, spec)
        operation(*args, **kwargs)

    streams.queue(run, _short(operation), tensors, uses)
    index = operation._schema.arguments.index(written[0])
    return None if not returns else args[index] if index < len(args) else kwargs[written[0].name]


def _move(operation: Any, source: torch.Tensor, target: torch.device, kwargs: dict[str, Any]) -> torch.Tensor:
    from_here, to_here = isinstance(source, DeviceTensor), target.type == "cuda"
    non_blocking = kwargs.get("non_blocking", False)
    kwargs.pop("pin_memory", None)
    if to_here:
        streams.refuse_on_side_stream(operation)
    if from_here == to_here:
        if from_here:
            OBSERVED.launch("copy")
            streams.at_once([(host_of(source), False)])
        moved = operation(host_of(source), **kwargs)
        return on_device(moved) if to_here else moved
    moved = operation(host_of(source), **kwargs)
    if from_here and non_blocking:  # torch pins what it makes for this
        pin(moved)
    _carry(on_device(moved) if to_here else moved, source, non_blocking)
    return on_device(moved) if to_here else moved


def _copy_between(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    to_here, from_here = isinstance(target, DeviceTensor), isinstance(source, DeviceTensor)
    if to_here != from_here:
        _carry(target, source, non_blocking)
    elif to_here:
        OBSERVED.launch("copy")
        streams.copy_on_stream(host_of(target), host_of(source), True, True, waits=False)
    else:
        _use_on_host([(target, True), (source, False)])
        aten.copy_(target, source)
    return target


def _carry(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Copy between host and device."""
    to_here = isinstance(target, DeviceTensor)
    pinned = is_pinned(source if to_here else target)
    way = "copy to device" if to_here else "copy to host"
    OBSERVED.launch("copy")
    OBSERVED.carry(host_of(source).nbytes, to_here)
    if non_blocking and not pinned:
        OBSERVED.fault(f"a non-blocking {way} of memory that is not pinned, in {call_site()}")
    waits = not (non_blocking and pinned)
    if waits:
        OBSERVED.wait(way)
    streams.copy_on_stream(host_of(target), host_of(source), to_here, not to_here, waits)


def _refuse_mixed(operation: Any, name: Any, tensors: list[torch.Tensor]) -> None:
    # Numbers of the host may stand beside device tensors, and indices too (they are copied).
    for tensor in tensors:
        if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0 and name not in INDEXING:
            raise RuntimeError(
                f"{operation} got a tensor {tuple(tensor.shape)} of the host beside those of the device, in "
                f"{call_site()}"
            )


def _count_waits(name: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if name in READ_BY_HOST:
        OBSERVED.wait(READ_BY_HOST[name])
        OBSERVED.carry(args[0].dtype.itemsize, to_device=False)
    elif name in SIZED_BY_VALUES:
        OBSERVED.wait(str(name).rpartition(".")[2])
    elif name is aten.repeat_interleave and kwargs.get("output_size") is None:
        OBSERVED.wait("repeat_interleave")
    elif name in INDEXING:
        count_index_waits(args, DeviceTensor)


def count_index_waits(args: Sequence[Any], of_device: type[torch.Tensor]) -> None:
    """Of an operation of INDEXING; `of_device`: the class of the device's tensors."""
    indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
    fills = len(args) > 2 and args[2].numel() == 1  # a masked fill
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices) and not fills:
        OBSERVED.wait("boolean index")
    if any(not isinstance(index, of_device) and index.dim() > 0 for index in indices):
        OBSERVED.wait("host index")


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the memory of a host tensor as page-locked, as long as it lives."""
    for address in [address for address, storage in _PINNED.items() if storage.expired()]:
        del _PINNED[address]
    storage = StorageWeakRef(tensor.untyped_storage())
    _PINNED[storage.cdata] = storage
    return tensor
