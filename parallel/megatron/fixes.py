"""Mends of Megatron-core 0.16.1 that every device needs. Each says what breaks without it."""

from __future__ import annotations

import queue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.moe import moe_utils


def apply() -> None:
    """Apply all mends. Called once, by parallel.megatron.apply_patches."""
    _define_te_general_gemm()
    _write_checkpoints_in_this_process()


def _define_te_general_gemm() -> None:
    # Without TransformerEngine the name is never bound, and the router's matrix product raises NameError on every
    # device. None selects the plain torch product. Fixed upstream in 0.17.0.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _write_checkpoints_in_this_process() -> None:
    # Upstream starts a manager process with the "spawn" method (it imports the main module again, several seconds a
    # job) and forks one writer per file, which is unsafe in a process that holds gloo or NCCL threads. A save of ours
    # writes one or two files per rank: the bytes go out from the calling thread instead.
    def write(transforms: Any, use_msc: bool, rank: int, write_buckets: list[Any], results: queue.Queue[Any]) -> None:
        written: dict[int, Any] | Exception = {}
        for i, bucket in enumerate(write_buckets):
            local_results: queue.Queue[Any] = queue.Queue()
            count: queue.Queue[int] = queue.Queue()
            count.put(i)
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms, i, bucket, local_results, count, use_fsync=True, use_msc=use_msc
            )
            index, result = local_results.get(timeout=60)
            if isinstance(result, Exception):
                written = result
                break
            assert isinstance(written, dict)
            written[index] = result
        results.put(written)

    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write)
    filesystem_async._get_write_results_queue = queue.Queue
