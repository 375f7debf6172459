"""A snapshot of tensors of the pretended device is whole when it is taken."""

from __future__ import annotations

import pytest

from tests import distributed

pytestmark = [pytest.mark.cuda_pretended]


def _taken() -> list[float]:
    import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)

    # isort: split
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from checkpoint.shards import ShardWriter
    from memory.host_link import HostLink
    from tests.cuda.pretended.device import Device
    from tests.cuda.pretended.observed import OBSERVED

    with Device():
        OBSERVED.start(None)
        snapshot, tensor = ShardWriter(HostLink(torch.device("cuda"))), torch.arange(6.0, device="cuda")
        snapshot.take([ShardedTensor.from_rank_offsets("some", tensor)])
        tensor += 1  # a step goes on
        ((_, _, host_copy),) = snapshot._host_copies
        return host_copy.tolist()


def test_a_snapshot_is_there_before_the_next_step_changes_what_it_is_of() -> None:
    assert distributed.run(_taken, 1, backend=distributed.PRETENDED) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
