"""Operations of process groups as NCCL may run them at the latest: when somebody waits.

Until then results hold NaN, and what is sent is not read. The operations of a communicator run in the order of their
issue. What is called without `async_op` runs at once, after all that the communicator was told before. Each is noted in
a log, which logs.py compares over the ranks.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._pytree import tree_leaves, tree_map

from tests.cuda import device, memory
from tests.cuda.device import DeviceTensor, host_of
from tests.cuda.logs import Key, Log, Operation
from tests.cuda.observed import OBSERVED, place
from tests.cuda.streams import AT_SYNCHRONIZE, is_default, is_poisoned, poison

LIMIT = timedelta(seconds=60)  # that the other ranks have to do their part
c10d = torch.ops.c10d
MOST_ON_THEIR_WAY = 64  # messages
_TAG = 7  # messages of two ranks match in their order
# gloo's own of these corrupt the heap (torch 2.13).
_ONE_BY_ONE = {
    c10d.allgather_into_tensor_coalesced_: c10d._allgather_base_.default,
    c10d.reduce_scatter_tensor_coalesced_: c10d._reduce_scatter_base_.default,
}
_GATHERS = {c10d._allgather_base_, c10d.allgather_, c10d.allgather_into_tensor_coalesced_}
_SIZED_BY_OUTPUT = ("reduce_scatter", "_reduce_scatter", "scatter", "broadcast")


class _State:
    def __init__(self) -> None:
        self.queues: dict[Key, deque[Exchange]] = {}
        self.overtaken: dict[Key, Exchange] = {}  # by the mutant `order`
        self.all: list[Exchange] = []  # the Python half of what C++ still holds
        self.sent: deque[tuple[Any, torch.Tensor]] = deque()  # messages on their way, and gloo's works
        self.log: Log = {}
        self.is_running = False  # what is called now is gloo's


_STATE = _State()
_of_host: set[ProcessGroup] = set()  # groups that the product has made for tensors of the host


class Exchange(Work):  # type: ignore[misc]
    """One operation of a communicator. Like torch's it keeps its tensors until it is over, but not what `Tensor.data`
    has taken away from them."""

    def __init__(
        self,
        key: Key,
        operation: Operation,
        outputs: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
        run: Callable[[Callable[[torch.Tensor], torch.Tensor]], None],
        at_once: bool = False,
        is_gather: bool = False,
    ) -> None:
        super().__init__()
        self._key, self.operation, self._run, self._is_done = key, operation, run, False
        self._outputs = [tensor for tensor in outputs if tensor.numel()]
        self._inputs = [tensor for tensor in inputs if tensor.numel()]
        self._aside: dict[int, torch.Tensor] = {}  # inputs that lie in outputs, as they were
        self._poisoned: list[torch.Tensor] = []
        user = f"{operation.name}, issued in {operation.place},"
        tensors = {id(tensor): tensor for tensor in (*self._outputs, *self._inputs)}
        self._uses = {key: memory.Use(host_of(tensor), user) for key, tensor in tensors.items()}
        if not is_default():
            raise NotImplementedError(f"{user} on a side stream")
        _STATE.all.append(self)
        for tensor in self._outputs:
            memory.wrote(host_of(tensor))
        if at_once or OBSERVED.early:
            self._enqueue()
            self._complete()
        else:
            self._poison(is_gather)
            self._enqueue()

    def _enqueue(self) -> None:
        queue = _STATE.queues.setdefault(self._key, deque())
        if self._key not in _STATE.overtaken and dist.get_rank() == 1 and OBSERVED.leaves_out("order"):
            _STATE.overtaken[self._key] = self
            return
        for exchange in (self, _STATE.overtaken.pop(self._key, None)):
            if exchange is not None:
                _STATE.log.setdefault(self._key, []).append(exchange.operation)
                queue.append(exchange)

    def _poison(self, is_gather: bool) -> None:
        outputs = [host_of(tensor) for tensor in self._outputs]
        for tensor in self._inputs:
            if any(_overlap(host_of(tensor), output) for output in outputs):
                self._aside[id(tensor)] = host_of(tensor).clone()
        for output in outputs:
            poison(output)
        if is_gather:  # in place: a rank's own part is there all the time
            for tensor in self._inputs:
                if id(tensor) in self._aside:
                    host_of(tensor).copy_(self._aside[id(tensor)])
        elif not any(_overlap(one, other) for i, one in enumerate(outputs) for other in outputs[:i]):
            self._poisoned = list(self._outputs)

    def wait(self, timeout: Any = None) -> bool:
        """The operations of the communicator up to this one."""
        if not is_default():
            raise NotImplementedError(f"a wait for {self.operation} on a side stream")
        if not self._is_done and not OBSERVED.leaves_out("wait"):
            self._complete()
        return True

    def is_completed(self) -> bool:
        return self._is_done

    def _complete(self) -> None:
        if _STATE.overtaken.get(self._key) is self:  # nothing has come to overtake it
            del _STATE.overtaken[self._key]
            _STATE.log.setdefault(self._key, []).append(self.operation)
            _STATE.queues[self._key].append(self)
        while not self._is_done:
            _STATE.queues[self._key].popleft().run()

    def run(self) -> None:
        if self.operation.name != "send":  # that does not wait for other ranks
            _send_what_waits()
        self._is_done = True
        hosts = {}
        for tensor in (*self._outputs, *self._inputs):
            use = self._uses[id(tensor)]
            host = use.tensor()
            hosts[id(tensor)] = torch.zeros(tensor.shape, dtype=tensor.dtype) if host is None else host
            if host is not None and any(tensor is each for each in self._poisoned) and not is_poisoned(host):
                OBSERVED.fault(f"{use.user} was under way when somebody wrote to its result")
        in_place = {id(tensor) for tensor in self._outputs}
        for key, values in self._aside.items():
            if key in in_place:
                hosts[key].copy_(values)
            else:
                hosts[key] = values
        _STATE.is_running = True
        try:
            self._run(lambda tensor: hosts[id(tensor)] if id(tensor) in hosts else host_of(tensor))
        except RuntimeError as error:
            raise RuntimeError(f"{self.operation}, on rank {dist.get_rank()}, over {self._key}: {error}") from error
        finally:
            _STATE.is_running = False
            self.end()

    def end(self) -> None:
        """Nothing is held any more."""
        for use in self._uses.values():
            use.end()
        self._outputs, self._inputs, self._poisoned = [], [], []
        self._uses, self._aside, self._run = {}, {}, _nothing


def _nothing(_: Any) -> None:
    return None


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    (begin, end), (other_begin, other_end) = _extent(one), _extent(other)
    return begin < other_end and other_begin < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.storage_offset()
    return begin, begin + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _key(group: ProcessGroup, suffix: str = "") -> Key:
    return f"{group.group_name}{suffix}", tuple(dist.get_process_group_ranks(group))


def _pair(group: ProcessGroup, peer: int) -> Key:
    # What is sent outside of a batch has a communicator of two ranks.
    name, ranks = _key(group)
    both = sorted({group.rank(), peer})
    return f"{name}, messages of {both}", tuple(ranks[rank] for rank in both)


def take_log() -> Log:
    """What this rank's communicators have been told since `forget`."""
    return _STATE.log


def run_all() -> int:
    """Run what is left; how many operations nobody had waited for."""
    left = 0
    for queue in _STATE.queues.values():
        while queue:
            left += 1
            queue.popleft().run()
    while _STATE.sent:
        _STATE.sent.popleft()[0].wait(LIMIT)
    return left


def _send_what_waits() -> None:
    # Before this rank stands still until another one has done its part: that one may need a message of this rank, which
    # NCCL would have sent without anybody's wait.
    for queue in list(_STATE.queues.values()):
        while queue and queue[0].operation.name == "send":
            queue.popleft().run()


def _send(work: Any, message: torch.Tensor) -> None:
    _STATE.sent.append((work, message))
    while len(_STATE.sent) > MOST_ON_THEIR_WAY:
        _STATE.sent.popleft()[0].wait(LIMIT)


def forget() -> None:
    """Leave undone what is left: its process groups go."""
    for exchange in _STATE.all:
        exchange.end()
    _STATE.queues, _STATE.overtaken, _STATE.all, _STATE.log = {}, {}, [], {}
    _STATE.sent.clear()
    _of_host.clear()


# ---------------------------------------------------------------------------------------------------------------------
# What torch.distributed calls
# ---------------------------------------------------------------------------------------------------------------------


def _operate(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operation of a process group, as torch dispatches it."""
    if _STATE.is_running:
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
        _STATE.log.setdefault(_key(group, ", on the host"), []).append(_describe(name, given, outputs, inputs, group))
        return operation(*args, **kwargs)
    if is_barrier:
        OBSERVED.wait("barrier")
    of_pair = name in ("send", "recv")

    def run(of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if name == "send":
            message = of(inputs[0]).clone()
            _send(dist.isend(message, group=group, group_dst=given["dst"], tag=given["tag"]), message)
            return
        for call, arguments in _calls(operation, args):
            arguments = tree_map(lambda value: of(value) if isinstance(value, torch.Tensor) else value, arguments)
            result = call(*arguments, **kwargs)
            work = result[-1] if isinstance(result, tuple) and result else result
            if isinstance(work, torch.ScriptObject):
                Work.unbox(work).wait(LIMIT)

    described = _describe(name, given, outputs, inputs, group)
    if of_pair:
        peer = given["dst"] if name == "send" else given["src"]
        ends = tuple((_end(tensor, peer)) for tensor in (*outputs, *inputs))
        described = Operation(
            name, None, described.place, ends if name == "send" else (), ends if name == "recv" else ()
        )
    exchange = Exchange(
        _pair(group, peer) if of_pair else _key(group),
        described,
        outputs,
        inputs,
        run,
        at_once=not given.get("async_op", of_pair),
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
        rows = given["output"].size(0), given["input"].size(0)
        columns = [tensor.numel() // max(1, tensor.size(0)) for tensor in (given["output"], given["input"])]
        split = given["output_split_sizes"], given["input_split_sizes"]
        receives, sends = (
            tuple(
                (rank, count * width, dtype)
                for rank, count in enumerate(counts or [total // group.size()] * group.size())
            )
            for counts, total, width in zip(split, rows, columns, strict=True)
        )
        return Operation(name, dtype, place(), sends, receives)
    sized = (outputs if name.startswith(_SIZED_BY_OUTPUT) else inputs) or outputs
    numbers = tuple(tensor.numel() for tensor in sized)
    if name in ("gather", "scatter", "barrier"):  # only the root has all of it
        numbers = ()
    root = given.get("root_rank")
    return Operation(name, (dtype, numbers) if root is None else (dtype, numbers, f"root {root}"), place())


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
        OBSERVED.fault(f"{name} of a host's tensor over NCCL, in {place()}")


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
            work.wait(LIMIT)

    operation = Operation(
        name,
        what,
        place(),
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
    AT_SYNCHRONIZE.append(run_all)
