"""A CUDA device without numbers: torch's FakeTensorMode for what is on it, real tensors for what is on the host.

Shapes, strides, dtypes and devices are those of a GPU's kernels, and so is what they refuse. Nothing is computed and
nothing is allocated, so a model has its real sizes. What the host reads of the device has no value: `READS` gives one
where the product may read; everywhere else a read is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cuda.fake.live import LIVE
from tests.cuda.pretended.device import INDEXING, count_index_waits, is_pinned
from tests.cuda.pretended.observed import OBSERVED, call_site

aten = torch.ops.aten

# By dtype: grouped products that passed torch's checks of dtypes, alignment and offsets.
GROUPED_PRODUCTS: Counter[str] = Counter()
# By place: a made-up value of the tensor that the host reads there.
READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


class Device(TorchDispatchMode):
    """While it is entered, whatever is made on or moved to a CUDA device is a FakeTensor."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)  # numbers of the host beside tensors of the device

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.prim.device.default:  # by far the most, and no kernel
            return args[0].fake_device
        kwargs, name = kwargs or {}, getattr(operation, "overloadpacket", operation)
        if operation.namespace == "c10d":
            return _collective(operation, args)
        asked = kwargs.get("device")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not here and (asked is None or torch.device(asked).type == "cpu"):
            return operation(*args, **kwargs)
        if name is aten._to_copy and asked is not None and torch.device(asked).type == "cpu":
            OBSERVED.wait("copy to host")
            return read(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if name is aten._to_copy and not here:
            return self._to_device(args[0], kwargs)
        if name is aten.copy_ and isinstance(args[0], FakeTensor) != isinstance(args[1], FakeTensor):
            return _copy_between(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if name in INDEXING:
            count_index_waits(args, FakeTensor)
        with self._fake:
            result = operation(*args, **kwargs)
        if name is aten._grouped_mm:
            GROUPED_PRODUCTS[str(args[0].dtype)] += 1
        LIVE.see(result)
        return result

    def _to_device(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if not (kwargs.get("non_blocking", False) and is_pinned(tensor)):
            OBSERVED.wait("copy to device")
        dtype = kwargs.get("dtype") or tensor.dtype
        with self._fake:
            moved = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=kwargs["device"])
        LIVE.see(moved)
        return moved


def _copy_between(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """Host memory keeps what it had: nobody reads it but to copy it back."""
    to_here = isinstance(target, FakeTensor)
    if not (non_blocking and is_pinned(source if to_here else target)):
        OBSERVED.wait("copy to device" if to_here else "copy to host")
        if not to_here:
            read(source)
    return target


def read(tensor: torch.Tensor) -> torch.Tensor:
    """The made-up value of a tensor of the device, on the host. Raises RuntimeError where the host must not read."""
    where = call_site()
    if where not in READS:
        raise RuntimeError(f"the host reads a tensor {tuple(tensor.shape)} of the device in {where}")
    return READS[where](tensor).to(tensor.dtype)


def _tolist(tensor: torch.Tensor) -> Any:
    OBSERVED.wait("tolist")
    return read(tensor).tolist()


FakeTensor.tolist = _tolist  # its own asks for each number


def _collective(operation: Any, args: Sequence[Any]) -> Any:
    """What torch gives back for a collective: the tensors that it writes, and what to wait for."""
    results = [FakeWork().boxed() if "Work" in str(result.type) else args[0] for result in operation._schema.returns]
    return tuple(results) if len(results) > 1 else results[0]
