"""What a cluster's links really give: exchanges in which every receive is posted before its send.

gloo's own all_to_all_single sends first; a late rank's notice that it is ready to receive then waits behind its own
payload, and the two directions run one after the other. So every layer that is compared on gloo gets this exchange.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kit.cluster import Cluster

MESSAGE = 4 * 2**20  # bytes that each rank sends: far more than a link's burst


def exchange(
    output: torch.Tensor, source: torch.Tensor, output_counts: Sequence[int], source_counts: Sequence[int], group: Any
) -> None:
    """All-to-all of rows: `source_counts[i]` of them to rank i, `output_counts[i]` from it. Returns when all is there
    and sent."""
    rank, size = group.rank(), group.size()
    outputs, sources = output.split(list(output_counts)), source.split(list(source_counts))
    others = [(rank + step) % size for step in range(1, size)]
    works = [dist.irecv(outputs[other], group=group, group_src=other) for other in others if output_counts[other]]
    works += [
        dist.isend(sources[other].contiguous(), group=group, group_dst=other)
        for other in others
        if source_counts[other]
    ]
    outputs[rank].copy_(sources[rank])
    for work in works:
        if work is not None:
            work.wait()


class _Done:
    def wait(self) -> None:
        pass


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> _Done | None:
    """In place of torch.distributed's, full duplex; it is over when it returns."""
    group = group or dist.group.WORLD
    even = [len(input) // group.size()] * group.size()
    receive, send = (
        even if sizes is None else [int(size) for size in sizes] for sizes in (output_split_sizes, input_split_sizes)
    )
    exchange(output, input.contiguous(), receive, send, group)
    return _Done() if async_op else None


def seconds_of_exchanges(row_counts: Sequence[int], hidden: int, repeats: int) -> float:
    """On a rank: seconds for `repeats` exchanges of `row_counts[i]` fp32 rows [hidden] with rank i, one after the
    other."""
    group = dist.group.WORLD
    sent, received = (torch.zeros(sum(row_counts), hidden) for _ in range(2))
    dist.barrier()
    before = time.perf_counter()
    for _ in range(repeats):
        exchange(received, sent, row_counts, row_counts, group)
    return time.perf_counter() - before


def measured_rate(cluster: Cluster) -> float:
    """Bits per second that each node's link carries each way: the median of five exchanges between all ranks."""
    size = cluster.world_size
    others = size - size // cluster.nodes  # ranks on other nodes
    if others == 0:
        raise ValueError("nodes=1: a link needs at least 2 nodes")
    per_rank = max(1, MESSAGE // 4096 // (size - 1))
    bits = 8.0 * 4096 * per_rank * others * (size // cluster.nodes)  # of a node
    times = sorted(max(cluster.call(seconds_of_exchanges, [per_rank] * size, 1024, 1)) for _ in range(5))
    return bits / times[2]


def in_words(cluster: Cluster, rate: float) -> str:
    """The nominal rate beside what was measured."""
    return f"{cluster.nodes} nodes, links {cluster.rate} each way, measured {rate / 1e6:.0f} Mbit/s"
