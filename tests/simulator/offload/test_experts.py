"""What a plan says of experts off the device: memory by tier, times, worth, and what `auto` takes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from base.errors import ConfigError
from configs.job import Job
from configs.schema import Config
from memory import budgets, host_memory
from models.blueprint import model_chunks
from optim.arrangement.buckets import Capacity
from optim.arrangement.experts import expert_records, expert_traffic
from simulator.buffers import buffers
from simulator.clock.hardware import Hardware, load_hardware
from simulator.clock.predict import predict_step
from simulator.clock.stages import rates
from simulator.memory import rank_memory
from simulator.offload.expert_choice import decide, fitting_override
from simulator.offload.expert_options import break_even, tokens_between
from simulator.parameters import parameters
from simulator.run_plan import RunPlan, make_plan, refuse_what_cannot_fit
from simulator.text import text
from tests.training.helpers import make_config

pytestmark = pytest.mark.fast

VOCAB = 1000
MOE = ["experiment=gpt_moe_tiny", "training.device=cpu"]
HOST = [*MOE, "moe.weights_device=host", "optimizer.state_device=host"]
LAYERED = ["training.pass_order=by_layer", "training.recompute=full"]
LARGE = [
    *("experiment=mixtral_8x7b", "training.device=cuda", "training.recompute=full", "model.num_layers=4"),
    *("parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=1", "parallel.expert=1"),
    *("training.global_batch_size=8", "sample.prompts=[]", "training.eval_interval=0"),
]


def large(*more: str, world_size: int = 1) -> Config:
    return make_config([*LARGE, *more], world_size)


def machine(**values: float) -> Hardware:
    figures = {name.replace("__", "."): value for name, value in values.items()}
    return load_hardware("h100_8x").with_values(figures, "a test")


def test_experts_are_in_no_buffer_but_in_slots_and_records() -> None:
    resident, streamed = make_config(MOE, 1), make_config(HOST, 1)
    (before,), (after,) = (rank_memory(Job(each, 1, VOCAB, "cpu")) for each in (resident, streamed))
    experts = [
        p.local
        for of in model_chunks(streamed)
        for chunk in of
        for p in parameters(streamed, chunk, VOCAB)
        if p.is_offloaded
    ]
    records = expert_records(streamed, 1, 4)
    assert records is not None and sum(experts) == 4 * sum(records.numels)
    sizes = [
        sum(b.size for kind in buffers(Job(c, 1, VOCAB, "cpu"), 0).values() for b in kind) for c in (resident, streamed)
    ]
    assert 0 <= sizes[0] - sizes[1] - sum(experts) < 256  # but for padding
    assert before.weights - after.weights == 4 * (sizes[0] - sizes[1]) - records.weights_on_device
    assert after.host_experts == records.host_bytes == after.as_dict()["host"] - after.arrangement.host_bytes  # type: ignore[union-attr]
    assert sum(sum(of.values()) for of in after.as_dict()["experts"].values()) == (
        records.weights_on_device + records.grads_on_device + records.host_bytes
    )


def test_state_of_records_needs_no_slots_of_the_device() -> None:
    (found,) = rank_memory(Job(make_config(HOST, 1), 1, VOCAB, "cpu"))
    tiers = found.arrangement
    assert tiers is not None and {"record", "device_stream"} == set(tiers.engines)
    records = [n for n, way in zip(tiers.numels, tiers.engines, strict=True) if way == "record"]
    others = [n for n, way in zip(tiers.numels, tiers.engines, strict=True) if way != "record"]
    assert found.experts is not None and sum(records) == found.experts.num_layers * found.experts.shard_numel
    assert tiers.staging("device_stream").size == max(others)
    assert not any(early for early, way in zip(tiers.early, tiers.engines, strict=True) if way == "record")


def test_budgets_that_do_not_hold_experts_are_refused_with_those_that_do() -> None:
    config = large("moe.weights_device=host", "optimizer.state_device=host", "memory.host_budget=20000")
    with pytest.raises(
        ConfigError, match="for experts and optimizer state of rank 0.* Try memory.host_budget="
    ) as refused:
        refuse_what_cannot_fit(make_plan(Job(config, 1, 32000, "cuda")))
    least = str(refused.value).rpartition("=")[2].rstrip(".")
    config.memory.host_budget = float(least)
    refuse_what_cannot_fit(make_plan(Job(config, 1, 32000, "cuda")))
    config.memory.host_budget = float(least) - 2
    with pytest.raises(ConfigError, match=least):
        refuse_what_cannot_fit(make_plan(Job(config, 1, 32000, "cuda")))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_shadows_that_do_not_fit_are_reported(tier: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = (f"moe.weights_device={tier}", f"optimizer.state_device={tier}", f"memory.disk_dir={tmp_path}")

    def plan(early: str) -> RunPlan:
        return make_plan(Job(large(*where, f"optimizer.early_update={early}"), 1, 32000, "cuda"))

    free = dict.fromkeys(("host", "disk"), 2**50)
    monkeypatch.setattr(host_memory, "available", lambda: free["host"])
    monkeypatch.setattr(budgets, "free_bytes", lambda folder: free["disk"])
    free[tier] = int(getattr(plan("never").worst, tier) * 1.02 / budgets.SHARE)
    with pytest.raises(
        ConfigError, match=r"This node does not have that much free: .*\. Without early updates everything fits: try"
    ) as refused:
        refuse_what_cannot_fit(plan("always"))
    assert ("memory.disk_dir to a folder on another disk" in str(refused.value)) == (tier == "disk")
    refuse_what_cannot_fit(plan("auto"))
    free[tier] //= 2
    with pytest.raises(ConfigError, match="This node does not have that much free: .*(nodes|another disk)$"):
        refuse_what_cannot_fit(plan("always"))


def test_a_device_that_is_too_small_is_told_of_experts_off_it() -> None:
    config = large("optimizer.state_device=host", "memory.host_budget=400000", "training.memory_limit_gib=24")
    with pytest.raises(
        ConfigError, match="set moe.weights_device=host, so that each rank needs at most .* of the host"
    ):
        refuse_what_cannot_fit(make_plan(Job(config, 1, 32000, "cuda")))
    assert not fitting_override(Job(config, 1, 32000, "cuda"), Capacity(host=2**20), 24 * 2**30)


def seconds(config: Config, of: Hardware, world_size: int = 1) -> float:
    return predict_step(Job(config, world_size, 32000, "cuda"), of).seconds


STREAMED = ("moe.weights_device=host", "optimizer.state_device=host")


def test_a_fast_link_hides_behind_computing_and_a_slow_one_decides() -> None:
    """Beside the update, which is the host's: it is made to take nothing."""
    quick: dict[str, Any] = {"host__update": 1e18, "host__rate": 1e18}
    layered, resident = large(*STREAMED, *LAYERED), large("optimizer.state_device=host")
    fast = machine(**quick, host__up=1e15, host__down=1e15)
    assert seconds(layered, fast) == pytest.approx(seconds(resident, fast), rel=0.01)
    slow = machine(**quick, host__up=1e9, host__down=1e9)
    traffic = expert_traffic(layered, 1, 0)
    assert traffic is not None
    one_way = max(traffic.total.up, traffic.total.down) / rates(slow, 1).up
    # with two slots what comes and what leaves waits for each other at the turn
    assert one_way < seconds(layered, slow) < 2.1 * one_way
    between = machine(**quick, host__up=5e10, host__down=5e10)
    assert seconds(resident, between) <= seconds(layered, between) < seconds(layered, slow)


def test_by_layer_is_as_much_faster_as_fewer_bytes_come_where_the_link_decides() -> None:
    slow = machine(host__update=1e18, host__rate=1e18, host__up=1e9, host__down=1e12)
    plain, layered = large(*STREAMED, "training.recompute=full"), large(*STREAMED, *LAYERED)
    bytes_up = [expert_traffic(config, 1, 0).fetched.up for config in (plain, layered)]  # type: ignore[union-attr]
    ratio = seconds(plain, slow) / seconds(layered, slow)
    assert ratio == pytest.approx(bytes_up[0] / bytes_up[1], rel=0.1)


def test_many_micro_batches_are_as_few_again_and_again() -> None:
    of = machine()
    few, more = (large(*STREAMED, f"training.global_batch_size={size}") for size in (24, 25))
    step = seconds(more, of) - seconds(few, of)
    assert seconds(large(*STREAMED, "training.global_batch_size=48"), of) == pytest.approx(
        seconds(few, of) + 24 * step, rel=0.01
    )


def test_ranks_that_share_experts_share_what_comes() -> None:
    of = machine(host__update=1e18, host__rate=1e18, host__up=1e9, host__down=1e12)
    whole, sharded = (
        large(*STREAMED, *LAYERED, f"moe.shard_weights={shard}", world_size=2) for shard in ("false", "true")
    )
    assert seconds(sharded, of, 2) < 0.6 * seconds(whole, of, 2)


def test_a_disk_is_waited_for(tmp_path: object) -> None:
    disk = ("moe.weights_device=disk", "optimizer.state_device=disk", f"memory.disk_dir={tmp_path}", *LAYERED)
    of = machine(disk__read=1e9, disk__write=1e9)
    found = predict_step(Job(large(*disk), 1, 32000, "cuda"), of)
    traffic = expert_traffic(large(*disk), 1, 0)
    assert traffic is not None
    assert found.seconds > traffic.total.read / 1e9
    assert max(found.reasons, key=lambda name: found.reasons[name]) == "disk"
    early = predict_step(Job(large(*disk, "optimizer.early_update=always"), 1, 32000, "cuda"), of)
    assert traffic.total.read / 1e9 < early.seconds < found.seconds  # more of it beside the backward pass


def test_the_plan_says_what_experts_are_worth_off_the_device(tmp_path: object) -> None:
    config = large(*STREAMED, *LAYERED, f"memory.disk_dir={tmp_path}", "memory.disk_budget=1000000")
    plan = make_plan(Job(config, 1, 32000, "cuda"), hardware=machine())
    found = {tuple(each.values.values())[:2]: each for each in plan.expert_options}
    assert list(found) == [
        *(("host", "by_layer"), ("device", "by_micro_batch"), ("host", "by_micro_batch")),
        *(("disk", "by_micro_batch"), ("disk", "by_layer")),
    ]
    own = found["host", "by_layer"]
    # 4,096 tokens of a micro-batch, two experts of eight each, eight micro-batches
    assert own.tokens == 8 * 1024 == tokens_between(config, 1) and found["host", "by_micro_batch"].tokens == 1024
    of = machine()
    assert own.break_even == pytest.approx(of["products.half"] / of["host.up"]) == break_even(config, 1, of)
    assert found["device", "by_micro_batch"].break_even is None and not own.written
    disk = found["disk", "by_layer"]
    assert disk.written_a_day == pytest.approx(disk.written * 86400 / disk.seconds)  # type: ignore[operator]
    assert disk.written > disk.moved.written  # all else's state is there too
    lines = text(plan).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("Experts by the offload target of their weights"))
    assert lines[first + 2].split()[:3] == ["host", "by_layer", "host"]
    assert "8,192" in lines[first + 2] and any("2 on the device at once" in line for line in lines[first:])
    known = json.loads(json.dumps(plan.as_dict()))["experts_off_device"]
    assert known[0]["is_own"] and known[0]["moved"]["up"] == own.moved.up and len(known) == 5
    assert make_plan(Job(make_config(["experiment=gpt_tiny"], 1), 1, VOCAB, "cpu")).expert_options == []


def test_one_gpu_of_a_gh200_needs_the_published_tokens() -> None:
    """2,200 at the peak and the link's rate on paper."""
    paper = load_hardware("gh200").with_values({"products.half": 989e12, "host.up": 450e9}, "a test")
    assert break_even(large(*STREAMED), 1, paper) == pytest.approx(2200, rel=0.01)


AUTO = ("moe.weights_device=auto", "training.pass_order=auto")


def decided(config: Config, capacity: Capacity, given: frozenset[str] = frozenset(), of: Hardware | None = None) -> Any:
    return decide(Job(config, 1, 32000, "cuda"), of or machine(), capacity, given)


def test_auto_keeps_experts_where_they_fit_and_lets_them_go_where_they_do_not() -> None:
    config = large(*AUTO)
    all_of_it = decided(config, Capacity())
    assert list(all_of_it.values.values()) == ["device", "by_micro_batch", "device"]
    small = Capacity(device=24 * 2**30)
    found = decided(config, small)
    assert list(found.values.values()) == ["host", "by_layer", "host"]
    assert "optimizer.state_device=host" in found.line and "does not fit" in found.line and "break-even" in found.line
    assert found.config.moe.weights_device == "host" and config.moe.weights_device == "auto"


def test_auto_never_contradicts_what_was_set() -> None:
    small = Capacity(device=24 * 2**30)
    key = "optimizer.state_device"
    stays = decided(large(*AUTO), small, frozenset({key}))  # device, and said so
    assert stays.values[key] == "device" and stays.values["moe.weights_device"] == "device"
    assert "nothing fits" in stays.line
    order = decided(large("moe.weights_device=auto", "training.pass_order=by_micro_batch"), small)
    assert list(order.values.values()) == ["host", "by_micro_batch", "host"]
    weights = decided(large(*STREAMED, "training.pass_order=auto"), small)
    assert list(weights.values.values()) == ["host", "by_layer", "host"]
    kept = decided(large(*AUTO, "training.recompute=none"), Capacity(device=50 * 2**30))
    assert kept.values["training.pass_order"] == "by_micro_batch"
    dense = decided(make_config(["experiment=gpt_tiny", "training.pass_order=auto"], 1), Capacity())
    assert dense.config.training.pass_order == "by_micro_batch" and "none" in dense.line


def test_auto_takes_what_moves_least_of_what_is_predicted_alike() -> None:
    small = Capacity(device=24 * 2**30)
    quick = machine(host__update=1e18, host__rate=1e18, host__up=1e13, host__down=1e13)  # nothing is waited for

    def order(*more: str) -> Any:
        found = decide(Job(large(*AUTO, *more), 1, 32000, "cuda"), quick, small, frozenset())
        assert found.values["moe.weights_device"] == "host"
        return found.values["training.pass_order"]

    assert order() == "by_layer"
    assert order("training.global_batch_size=1") == "by_micro_batch"  # as many bytes: the simpler one
    many = ("training.micro_batch_size=16", "training.global_batch_size=32", "training.activation_offload=auto")
    assert order(*many) == "by_micro_batch"  # layer inputs move thrice as often


def test_auto_goes_to_the_disk_only_where_there_is_one(tmp_path: object) -> None:
    small = Capacity(device=24 * 2**30, host=40 * 2**30, disk=math.inf)
    without = decided(large(*AUTO), small)
    assert without.values["moe.weights_device"] != "disk"
    found = decided(large(*AUTO, f"memory.disk_dir={tmp_path}"), small)
    assert found.values["moe.weights_device"] == found.values["optimizer.state_device"] == "disk"


def test_auto_names_more_expert_ranks_where_these_would_do() -> None:
    config = large(*AUTO, "training.global_batch_size=32", world_size=8)
    capacity = Capacity(device=20 * 2**30)
    found = decide(Job(config, 8, 32000, "cuda"), machine(), capacity, frozenset({"optimizer.state_device"}))
    assert "parallel.expert" not in found.line  # state was to stay
    with_host = replace(config, optimizer=replace(config.optimizer, state_device="host"))
    found = decide(Job(with_host, 8, 32000, "cuda"), machine(), capacity, frozenset())
    assert found.values["moe.weights_device"] == "host"
    assert "parallel.expert=8 would keep them on the device" in found.line
