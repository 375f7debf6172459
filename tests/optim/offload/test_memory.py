"""What optimizer state off the device takes of each tier, counted from the tensors that are there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks.offload_parity import config_of
from memory.host_memory import padded
from tests import distributed
from tests.optim.offload.parity import LARGE, SMALL, Training, Variant, with_variant


def bytes_of_tiers(config: Any) -> dict[str, Any]:
    """On a rank, after two steps: bytes of the tensors by tier, and of the budgets while they are there and after."""
    from memory.budgets import DISK, HOST

    with Training(config) as training:
        for step in (1, 2):
            training.step(step)
        training.engine.synchronize()
        assert training.tiers is not None
        memory = training.tiers.memory
        staged = [
            tensor for stage in memory.device_stages for tensor in (stage.record, stage.weights) if tensor is not None
        ]
        store = memory.store
        kept = [location.memory for location in store._locations] + [stage.memory for stage in store._stages]
        kept += [*memory.grad_areas, *memory.weight_areas, memory.buffer]
        kept += [tensor for stage in memory.host_stages for tensor in (stage.grads, stage.weights)]
        found: dict[str, Any] = {
            "device": sum(tensor.nbytes for tensor in (*staged, *memory.resident) if tensor is not None),
            "host": sum(padded(tensor.nbytes) for tensor in kept if tensor is not None),
            "largest": max(bucket.numel for bucket in training.tiers.buckets),
            "total": sum(bucket.numel for bucket in training.tiers.buckets),
            "counted": (memory.arrangement.device_bytes, HOST.total, DISK.total),
            "limit": HOST.limit,
            "peak": HOST.peak,
        }
    return {**found, "after": (HOST.total, DISK.total)}


@pytest.mark.parametrize(
    ("device", "early", "bucket", "precision", "moment", "record", "weight"),
    [
        ("host", "never", SMALL, "fp32", "fp32", 8, 4),
        ("host", "always", LARGE, "fp32", "fp32", 8, 4),
        ("host", "never", LARGE, "bf16", "bf16", 10, 2),
        ("disk", "always", SMALL, "bf16", "fp32", 12, 2),
    ],
)
def test_device_holds_two_slots(
    tmp_path: Path, device: str, early: str, bucket: int, precision: str, moment: str, record: int, weight: int
) -> None:
    config, ranks = config_of("gpt moe", "single", precision, moment)
    config = with_variant(config, Variant(device, early=early, bucket=bucket), str(tmp_path))
    (found,) = distributed.run(bytes_of_tiers, ranks, config)
    # Early updates have their new weights in the slot too, until these have left.
    each = record + (weight if early == "always" else 0)
    assert found["device"] == found["counted"][0] == 2 * found["largest"] * each
    assert found["device"] < found["total"] * record / 2  # however large a bucket may be
    assert found["after"] == (0, 0)
    assert (found["counted"][2] > 0) == (device == "disk")


@pytest.mark.parametrize("engine", ["device_stream", "host", "split"])
def test_disk_keeps_the_host_within_its_budget(tmp_path: Path, engine: str) -> None:
    config, ranks = config_of("gpt moe", "single", "bf16", "fp32")
    config = with_variant(config, Variant("disk", engine, "auto", SMALL), str(tmp_path))
    budget = 0.5  # MiB, of some 5 of state
    config = replace(config, memory=replace(config.memory, host_budget=budget))
    (found,) = distributed.run(bytes_of_tiers, ranks, config)
    assert found["total"] * 12 > 4 * budget * 2**20
    assert found["host"] <= budget * 2**20 and found["peak"] <= found["limit"] == budget * 2**20
    assert found["counted"][1] <= found["host"]
