"""Checkpoints of optimizer state that lies off the device: the same tensors, no copy of it, and nothing held for
longer than its bucket takes to write."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import manifest, safetensors_header
from models.weight_files.header import ITEM_BYTES
from tests import distributed
from tests.training.helpers import make_config
from tests.training.test_step import SAMPLES, SMALL, batches_of, build
from tests.waits import LONG

BF16 = "training.precision=bf16"
BUCKETS = "optimizer.bucket_parameters=4096"
HOST = [BUCKETS, "optimizer.state_device=host"]
TIERS = {
    "host": [*HOST, "optimizer.engine=host"],
    "device_stream": [*HOST, "optimizer.engine=device_stream"],
    "disk": [BUCKETS, "optimizer.state_device=disk", "optimizer.engine=device_stream"],
    "disk to host": [BUCKETS, "optimizer.state_device=disk", "optimizer.engine=host"],
    "early": [*HOST, "optimizer.engine=host", "optimizer.early_update=always", "optimizer.clip_grad=0"],
    "early on disk": [BUCKETS, "optimizer.state_device=disk", "optimizer.early_update=always", "optimizer.clip_grad=0"],
}
LAYOUTS = {
    "alone": (1, []),
    "tensor": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "experts": (2, ["parallel.expert=2"]),
    "data": (2, []),
    "pipeline": (2, ["parallel.pipeline=2"]),
}
CASES = [
    ("alone", "bf16", "device_stream"),
    ("alone", "fp32", "host"),
    ("tensor", "bf16", "disk"),
    ("experts", "fp32", "disk to host"),
    ("data", "bf16", "device_stream"),
    ("pipeline", "bf16", "host"),
]


def small(*overrides: str, ranks: int = 1) -> Any:
    sizes = [f"training.global_batch_size={SAMPLES}", "training.micro_batch_size=4"]
    return make_config(["experiment=gpt_moe_tiny", *SMALL, *sizes, "optimizer.distributed=true", *overrides], ranks)


def step_on(model: Any, step: int) -> tuple[float, float]:
    """Loss and gradient norm of a step that all ranks take on the same samples in every layout."""
    from training.step import train_step

    batches = batches_of(model.config, step)
    result = train_step(model, batches[model.topology.data.rank :: model.topology.data.size], step)
    return result.loss, result.grad_norm


def trained(config: Any, steps: int = 2) -> Any:
    model = build(config)
    for step in range(1, steps + 1):
        step_on(model, step)
    return model


def another(model: Any, config: Any) -> Any:
    """A fresh engine beside one."""
    return type(model)(config, model.topology, model.vocab_size)


def begin_save(model: Any, folder: Path, steps: int = 2) -> Any:
    from checkpoint.saver import Saver
    from training.progress import Progress, state

    model.synchronize()
    saver = Saver(model.config, model.host_link)
    saver.start(model.chunks, model.optimizer, state(model, Progress(steps, 8 * steps), {}), folder)
    return saver


def save(model: Any, folder: Path, steps: int = 2) -> Any:
    """Write a checkpoint; the saver. Raises SaveError."""
    saver = begin_save(model, folder, steps)
    saver.finish()
    return saver


def free_buckets(model: Any) -> list[bool]:
    """Of each bucket whether a change would wait for a save."""
    return [released.is_issued for released in model.optimizer.offload._snapshot._released]


def content(folder: Path) -> dict[str, torch.Tensor]:
    """The global tensors of a checkpoint, in bits, but for random number states: models of one process share these."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from checkpoint.shards import ShardReader
    from parallel.dtypes import SAFETENSORS_NAMES

    assert manifest.verify(folder) is None
    reader, names = ShardReader(folder), {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
    result = {}
    for key, boxes in reader._boxes.items():
        if key.startswith("random."):
            continue
        shape = boxes[0][2].global_shape
        data = torch.empty(shape, dtype=names[boxes[0][2].dtype])
        reader.fill(ShardedTensor(key, data, data.dtype, shape, shape, (0,) * len(shape), None))
        result[key] = data.reshape(-1).view(torch.uint8)
    return result


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def save_in_both_directions(config: Any, tiered: Any, folder: Path) -> dict[str, Any]:
    """A model saved from the device and from tiers; both loaded by a model of the other kind, which goes on."""
    import torch.distributed as dist

    from checkpoint.state import tensors_to_save
    from optim.offload.optimizer import OffloadedOptimizer
    from optim.offload.records import StateSnapshot
    from optim.state import StoredTensor
    from training.progress import load

    on_device, on_host = trained(config), None
    save(on_device, folder / "device")
    on_host = another(on_device, tiered)
    for step in (1, 2):
        step_on(on_host, step)
    boxes = tensors_to_save(on_host.chunks, on_host.optimizer)
    assert all(box.data.is_meta for box in boxes if isinstance(box, StoredTensor))
    rest = sum(box.data.nbytes for box in boxes if not isinstance(box, StoredTensor))
    stored = [box for box in boxes if isinstance(box, StoredTensor)]

    calls: list[tuple[str, int]] = []
    read, release, fill, empty = (
        StateSnapshot.read,
        StateSnapshot.release,
        OffloadedOptimizer.fill,
        OffloadedOptimizer.empty,
    )

    def said(name: str, function: Any) -> Any:
        def call(self: Any, index: int) -> Any:
            calls.append((name, index))
            assert name != "read" or threading.current_thread().name == "checkpoint writer"
            return function(self, index)

        return call

    StateSnapshot.read, StateSnapshot.release = said("read", read), said("release", release)  # type: ignore[method-assign]
    OffloadedOptimizer.empty, OffloadedOptimizer.fill = said("empty", empty), said("fill", fill)  # type: ignore[method-assign]
    try:
        saver = save(on_host, folder / "host")
        written = sorted({box.bucket for box in stored})
        seen = {"snapshot": saver._shard_writer.num_bytes - rest, "buckets": len(written)}
        seen["reads"] = calls == [(name, bucket) for bucket in written for name in ("read", "release")]
        seen["free"] = all(free_buckets(on_host))
        dist.barrier()
        seen["tensors"] = same(content(folder / "device"), content(folder / "host"))

        fresh = another(on_device, config)
        load(fresh, folder / "host")
        other = another(on_device, tiered)
        calls.clear()
        load(other, folder / "device")
        buckets = range(len(other.optimizer.offload.buckets))
        seen["fills"] = calls == [(name, bucket) for bucket in buckets for name in ("empty", "fill")]
        expected = step_on(on_device, 3)
        seen["to device"], seen["to host"] = step_on(fresh, 3) == expected, step_on(other, 3) == expected
        save(other, folder / "other", 3)
        save(on_device, folder / "on", 3)
        dist.barrier()
        seen["later"] = same(content(folder / "on"), content(folder / "other"))
    finally:
        StateSnapshot.read, StateSnapshot.release = read, release  # type: ignore[method-assign]
        OffloadedOptimizer.empty, OffloadedOptimizer.fill = empty, fill  # type: ignore[method-assign]
    for model in (on_device, on_host, fresh, other):
        model.close()
    return seen


@pytest.mark.parametrize(("layout", "precision", "tier"), CASES)
def test_tiers_and_device_write_and_read_the_same(layout: str, precision: str, tier: str, tmp_path: Path) -> None:
    ranks, overrides = LAYOUTS[layout]
    common = [*overrides, f"training.precision={precision}"]
    config = small(*common, ranks=ranks)
    tiered = small(*common, *TIERS[tier], f"memory.disk_dir={tmp_path}", ranks=ranks)
    for seen in distributed.run(save_in_both_directions, ranks, config, tiered, tmp_path):
        assert seen.pop("buckets") > 4
        assert seen.pop("snapshot") == 0  # no byte of the state
        assert all(seen.values()), seen


def save_before_the_first_step(config: Any, tiered: Any, folder: Path) -> dict[str, Any]:
    from optim.state import named_state
    from training.progress import load

    model = trained(config, 0)
    save(model, folder, 0)
    other = another(model, tiered)
    step_on(other, 1)  # and back
    load(other, folder)
    kinds = {kind for _, _, kind, _ in named_state(other.optimizer, other.chunks)}
    steps = [(step_on(model, step), step_on(other, step)) for step in (1, 2)]
    other.close()
    return {
        "saved": {key.split(".")[1] for key in content(folder) if key.startswith("optimizer.")},
        "kinds": kinds,
        "steps": all(ours == theirs for ours, theirs in steps),
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_without_moments(precision: str, tmp_path: Path) -> None:
    common = [f"training.precision={precision}"]
    (seen,) = distributed.run(save_before_the_first_step, 1, small(*common), small(*common, *HOST), tmp_path / "one")
    assert seen.pop("steps")
    assert seen == dict.fromkeys(("saved", "kinds"), {"master"} if precision == "bf16" else set())


def change_moment_dtype(config: Any, narrow: list[Any], folder: Path) -> list[dict[str, Any]]:
    """Save with moments in fp32, load with exp_avg in bf16 and save that, from each tier."""
    from training.progress import load

    model = trained(config)
    save(model, folder / "wide")
    wide, result = content(folder / "wide"), []
    moments = {key for key in wide if key.startswith("optimizer.exp_avg.")}
    for i, settings in enumerate(narrow):
        other = another(model, settings)
        load(other, folder / "wide")
        save(other, folder / f"narrow{i}")
        load(other, folder / f"narrow{i}")
        save(other, folder / f"again{i}")
        other.close()
        entries = safetensors_header.read(folder / f"narrow{i}" / "rank_00000.safetensors").values()
        found = content(folder / f"narrow{i}")
        result.append(
            {
                "differ": {key for key in wide if not torch.equal(wide[key], found[key])} == moments,
                "aligned": all(entry.start % ITEM_BYTES[entry.dtype] == 0 for entry in entries),
                "rounded": all(
                    torch.equal(wide[key].view(torch.float32).bfloat16(), found[key].view(torch.bfloat16))
                    for key in moments
                ),
                "kept": same(found, content(folder / f"again{i}")),
            }
        )
    return result


def test_moments_of_another_dtype(tmp_path: Path) -> None:
    narrow = [BF16, "optimizer.moment_dtype=bf16"]
    tiers = [small(*narrow, BUCKETS), small(*narrow, *TIERS["disk"], f"memory.disk_dir={tmp_path}")]
    for seen in distributed.run(change_moment_dtype, 1, small(BF16), tiers, tmp_path)[0]:
        assert all(seen.values()), seen


def train_while_saving(config: Any, folder: Path) -> dict[str, Any]:
    """Two steps are taken while the disk of a save hangs in the midst of the buckets, and takes half of each write."""
    model = trained(config)
    save(model, folder / "before")
    free, pwrite, seen = threading.Event(), os.pwrite, {"writes": 0}

    def hangs(descriptor: int, data: Any, at: int) -> int:
        if threading.current_thread().name != "checkpoint writer":
            return pwrite(descriptor, data, at)
        seen["writes"] += 1
        if seen["writes"] == 20:
            assert free.wait(LONG)
        return pwrite(descriptor, data[: max(1, len(data) // 2)], at)

    vars(os)["pwrite"] = hangs
    try:
        saver = begin_save(model, folder / "during")
        step_on(model, 3)
        seen["held"] = free_buckets(model).count(False)
        threading.Timer(0.2, free.set).start()
        losses = [step_on(model, 4), step_on(model, 5)]
        saver.finish()
    finally:
        vars(os)["pwrite"] = pwrite
    seen["waits"] = model.optimizer.offload.memory.store.waits_for_save
    seen["free"] = all(free_buckets(model))
    seen["same"] = same(content(folder / "before"), content(folder / "during"))
    model.close()
    undisturbed = another(model, config)
    seen["losses"] = [step_on(undisturbed, step) for step in range(1, 6)][3:] == losses
    undisturbed.close()
    return seen


@pytest.mark.parametrize("tier", TIERS)
def test_updates_wait_for_the_bucket_that_is_written(tier: str, tmp_path: Path) -> None:
    config = small(BF16, *TIERS[tier], f"memory.disk_dir={tmp_path}")
    (seen,) = distributed.run(train_while_saving, 1, config, tmp_path)
    assert seen["held"] > 0 and seen["waits"] > 0 and seen["free"] and seen["same"] and seen["losses"]


def failing_saves(config: Any, folder: Path) -> dict[str, Any]:
    """What each way to fail says, and whether every bucket is free after it; then a save that works."""
    from checkpoint.saver import SaveError

    model = trained(config)
    pwrite, preadv, seen = os.pwrite, os.preadv, {}
    rank = int(os.environ["RANK"])

    def attempt(name: str, write: Any) -> None:
        text, calls = "nothing", [0]
        savers: list[Any] = []

        def counted(descriptor: int, data: Any, at: int) -> int:
            if threading.current_thread().name == "checkpoint writer":
                calls[0] += 1
                if calls[0] == 10:
                    data = write(savers, bytearray(data))
            return pwrite(descriptor, data, at)

        def unreadable(descriptor: int, buffers: Any, at: int) -> int:
            if threading.current_thread().name == "checkpoint writer" and calls[0] > 10:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return preadv(descriptor, buffers, at)

        vars(os)["pwrite"] = counted
        if name == "unreadable":
            vars(os)["preadv"] = unreadable
        try:
            savers.append(begin_save(model, folder / name))
            if name == "end":
                savers[0].close()
            else:
                savers[0].finish()
        except SaveError as error:
            text = str(error)
        finally:
            vars(os)["pwrite"], vars(os)["preadv"] = pwrite, preadv
        step_on(model, 3)  # which waits for every bucket
        model.synchronize()
        seen[name] = (text, all(free_buckets(model)))

    def full(savers: Any, data: bytearray) -> bytearray:
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return data

    def cancelled(savers: Any, data: bytearray) -> bytearray:
        while not savers:
            time.sleep(0.001)
        savers[0].cancel("no room")
        return data

    def endless(savers: Any, data: bytearray) -> bytearray:
        while not savers:
            time.sleep(0.001)
        assert savers[0]._save.cancelled.wait(LONG)
        return data

    def flipped(savers: Any, data: bytearray) -> bytearray:
        data[-1] ^= 1
        return data

    def fine(savers: Any, data: bytearray) -> bytearray:
        return data

    writes = {"full": full, "cancelled": cancelled, "end": endless, "flipped": flipped, "unreadable": fine}
    for name, write in writes.items():
        attempt(name, write)
    spoil(model, float("inf"))
    attempt("broken", fine)
    spoil(model, 0.0)
    save(model, folder / "fine")
    model.close()
    return seen


def spoil(model: Any, value: float) -> None:
    """Set an element of a bucket's state."""
    tiers = model.optimizer.offload
    tiers.synchronize()
    snapshot = tiers.snapshot()
    for kind, flat in snapshot.read(3).items():
        tiers.empty(3)[kind].copy_(flat)
    snapshot.close()
    tiers.empty(3)["exp_avg_sq"][0] = value
    tiers.fill(3)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_save_that_fails_holds_nothing(tier: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    scratch = tmp_path_factory.mktemp("scratch")
    config = small(BF16, *TIERS[tier], f"memory.disk_dir={scratch}", ranks=2)
    for seen in distributed.run(failing_saves, 2, config, tmp_path):
        assert all(is_free for _, is_free in seen.values()), seen
        assert "(rank 1: No space left on device" in seen["full"][0]
        assert "(rank 0: no room)" in seen["cancelled"][0]
        assert "does not read back the bytes that were written: check its disk" in seen["flipped"][0]
        assert ": optimizer.exp_avg_sq." in seen["broken"][0] and "must be finite" in seen["broken"][0]
        assert seen["end"][0] == "nothing"
        says = f"memory.disk_dir ({scratch}) cannot be read: Input/output error" if tier == "disk" else "nothing"
        assert says in seen["unreadable"][0]
    left = {"fine"} if tier == "disk" else {"fine", "unreadable"}
    # What a run that ends leaves where another rank still writes, the next start takes away.
    assert {path.name for path in tmp_path.iterdir()} - {"end.tmp"} == left
    assert manifest.verify(tmp_path / "fine") is None


def find_damage(config: Any) -> list[str | None]:
    from training.resilience.diagnosis import damage

    model = trained(config)
    found = [damage(model)]
    spoil(model, float("nan"))
    found.append(damage(model))
    assert all(free_buckets(model))
    model.close()
    return [str(finding) if finding is not None else None for finding in found]


def test_damage_of_state_off_the_device_is_found() -> None:
    ((none, found),) = distributed.run(find_damage, 1, small(BF16, *HOST))
    assert none is None and found is not None and found.startswith("the optimizer's exp_avg_sq of ")


def steps_after_other_weights(config: Any, tiered: Any) -> bool:
    """Whether a step after weights were put in by hand is the same from the device and from a tier."""
    model = trained(config, 1)
    other = another(model, tiered)
    step_on(other, 1)
    for engine in (model, other):
        with engine.frozen_weights(), torch.no_grad():
            for parameter in engine.bare_chunks[0].parameters():
                parameter.mul_(0.5)
        engine.optimizer.reload_model_params()
    same_steps = [step_on(model, step) == step_on(other, step) for step in (2, 3)]
    other.close()
    return all(same_steps)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_masters_are_taken_from_weights(precision: str) -> None:
    common = [f"training.precision={precision}"]
    configs = small(*common, ranks=2), small(*common, *HOST, ranks=2)
    assert distributed.run(steps_after_other_weights, 2, *configs) == [True, True]
