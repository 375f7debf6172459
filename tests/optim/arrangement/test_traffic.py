"""Which weights of experts off the device come when, and what a step moves of them."""

from __future__ import annotations

import pytest

from optim.arrangement.experts import expert_traffic, moe_visits
from parallel.pipeline import layer_visits
from tests.training.helpers import make_config

pytestmark = pytest.mark.fast

HOST = ["experiment=gpt_moe_tiny", "moe.weights_device=host", "optimizer.state_device=host"]
BY_LAYER = ["training.pass_order=by_layer", "training.recompute=full"]


def test_visits_are_those_of_the_schedule() -> None:
    plain = make_config([*HOST, "training.global_batch_size=4", "training.micro_batch_size=2"], 1)
    assert layer_visits(plain, 2, 0) == [0, 1, 2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0]
    assert layer_visits(plain, 2, 0, forward_only=True) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert layer_visits(make_config([*HOST, *BY_LAYER], 1), 2, 0) == [0, 1, 2, 3, 2, 1, 0]
    some = make_config([*HOST, "moe.layers=[0,1,0,1]"], 1)
    assert moe_visits(some, 1, 0) == [1, 3, 1]
    chunks = ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "training.global_batch_size=4"]
    staged = make_config([*HOST, *chunks], 2)
    # two forward passes of the first chunk, two of the second, then each back behind its forward pass
    assert layer_visits(staged, 2, 1) == [1, 3, 1]
    assert layer_visits(staged, 2, 0) == [0, 2, 0]


def _traffic(more: list[str], world_size: int = 1):  # type: ignore[no-untyped-def]
    found = expert_traffic(make_config([*HOST, *more], world_size), world_size, 0)
    assert found is not None
    return found


def test_by_layer_moves_weights_once_in_each_pass_and_a_gradient_once() -> None:
    plain, layered = _traffic([]), _traffic(BY_LAYER)
    of = layered.layer.records
    layer = of.padded_numel * 4
    assert layered.fetched.up == (2 * 4 - 2) * layer and layered.layer.gradients_out.down == 4 * layer
    assert layered.layer.gradients_out.host == 0  # nothing is added up
    assert plain.layer.num_gradients == 4 and plain.fetched.up == (4 * 8 - 2 * 7) * layer
    assert plain.layer.gradients_out.down == 4 * 4 * layer
    # of four micro-batches the first is written, the others are read, added and written
    assert plain.layer.gradients_out.host == 4 * layer * (2 + 3 * 3)
    assert plain.layer.updates == layered.layer.updates


def test_slots_beyond_two_spare_a_transfer_at_each_turn() -> None:
    for num_slots in (1, 2, 3, 4, 9):
        found = _traffic([f"moe.weight_slots={num_slots}"])
        records, kept = found.layer.records, min(num_slots, 4)
        assert records.weight_slots == kept and records.weights_on_device == kept * records.padded_numel * 4
        assert found.fetched.up == (4 * 8 - kept * 7) * records.padded_numel * 4


def test_ranks_that_keep_a_part_move_as_much_less() -> None:
    base = [*BY_LAYER, "parallel.expert=2", "training.global_batch_size=16"]
    whole, shard = _traffic([*base, "moe.shard_weights=false"], 4), _traffic(base, 4)
    records = shard.layer.records
    assert records.num_shards == records.data_parallel_size == 2
    assert shard.fetched.up * 2 == len(shard.fills) * records.padded_numel * 4
    assert shard.fetched.gathered == 2 * shard.fetched.up and whole.fetched.gathered == 0
    assert (
        shard.layer.gradients_out.down * 2 == shard.layer.gradients_out.reduced
        and whole.layer.gradients_out.down == whole.layer.gradients_out.reduced
    )
    assert shard.layer.updates.host == pytest.approx(whole.layer.updates.host / 2, rel=0.05)


def test_a_sum_goes_back_to_be_reduced_with_the_last_micro_batch() -> None:
    found = _traffic(["parallel.expert=2", "training.global_batch_size=16"], 4)
    records = found.layer.records
    assert records.sums_on_host and found.layer.num_gradients > 1
    last = found.layer.gradient(False, True)
    assert (last.up, last.down) == (4 * records.padded_numel, 4 * records.shard_numel)
    assert found.layer.gradients_out.reduced == 4 * 4 * records.padded_numel


def test_the_disk_reads_what_comes_and_writes_what_leaves(tmp_path: object) -> None:
    disk = ["moe.weights_device=disk", "optimizer.state_device=disk", f"memory.disk_dir={tmp_path}"]
    found = _traffic([*BY_LAYER, *disk])
    numel = 4 * found.layer.records.padded_numel
    assert (
        found.fetched.read == found.fetched.up and found.layer.gradients_out.written == found.layer.gradients_out.down
    )
    # fp32: the weight is its own master, and two moments lie beside it
    assert (found.layer.updates.read, found.layer.updates.written) == (numel * (4 + 4 + 8), numel * (4 + 8))
    half = _traffic([*BY_LAYER, *disk, "training.precision=bf16", "optimizer.moment_dtype=bf16"])
    assert half.layer.state_bytes == 10
    on_host = _traffic([*BY_LAYER, "optimizer.state_device=disk", f"memory.disk_dir={tmp_path}"])
    assert (on_host.layer.updates.read, on_host.layer.updates.written) == (
        numel * 8,
        numel * 8,
    ) and on_host.layer.gradients_out.written == 0


def test_shadows_take_as_much_again_and_cross_no_link(tmp_path: object) -> None:
    for tier in (HOST[1:], ["moe.weights_device=disk", "optimizer.state_device=disk", f"memory.disk_dir={tmp_path}"]):
        late, early = (_traffic([*BY_LAYER, *tier, f"optimizer.early_update={word}"]) for word in ("auto", "always"))
        records, more = late.layer.records, early.layer.records
        assert more.weights_kept == 2 * records.weights_kept and more.grads_kept == records.grads_kept
        crossing = ("up", "down", "read", "written")
        assert [getattr(late.total, each) for each in crossing] == [getattr(early.total, each) for each in crossing]
        # fp32: the weight and two moments are copied on the host, read and written
        copied = 2 * (4 + 8) * 4 * records.shard_numel if records.target == "host" else 0
        assert early.layer.updates.host - late.layer.updates.host == copied
