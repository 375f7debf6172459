"""The clock: tasks of a loop, exchanges between ranks, and whole steps."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from configs.compose import compose
from configs.job import Job
from configs.schema import Config
from models import blueprint
from simulator.clock.axes import DENSE_REPLICAS, Group, collective, exchange, groups, send
from simulator.clock.hardware import Hardware, load_hardware
from simulator.clock.loop import Loop
from simulator.clock.passes import Fold
from simulator.clock.predict import StepClock, least_seconds, predict_step
from simulator.clock.schedule import Schedule, StepWork
from simulator.clock.stages import stage_rest
from simulator.context.shared_rows import shared_rows

VOCAB = 1000
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "data": (4, []),
    "tensor": (4, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pipeline": (4, ["parallel.pipeline=4", "training.global_batch_size=24", "training.micro_batch_size=1"]),
    "chunks": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "training.global_batch_size=16"]),
    "context": (4, ["parallel.context=4", "training.micro_batch_size=1"]),
    "full": (2, ["training.recompute=full", "training.activation_offload=auto"]),
    "host": (2, ["optimizer.state_device=host", "training.micro_batch_size=2"]),
    "disk": (2, ["optimizer.state_device=disk", "memory.disk_dir=/tmp", "optimizer.early_update=never"]),
}
MODELS = ("gpt_tiny", "bert_tiny", "gpt_moe_tiny")


def a_config(model: str, overrides: list[str]) -> Config:
    return compose([f"model={model}", "training.device=cuda", *overrides])


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware("a100_8x")


def test_tasks_wait_for_their_resource_and_for_others() -> None:
    loop = Loop()
    first = loop.add("compute", "first", {"products": 2.0})
    sent = loop.add("link", "state", {"pipeline": 1.0}, [first])
    loop.add("compute", "beside", {"products": 0.5})
    last = loop.add("compute", "last", {"products": 1.0}, [sent])
    late = loop.add("disk", "written", {"disk": 3.5}, [first], overlaps_next=True)
    assert loop.run() == 4.0  # the disk goes on beside the next step
    assert [task.start for task in loop.tasks] == [0.0, 2.0, 2.0, 3.0, 2.0]
    assert loop.tasks[last].end == 4.0 and loop.tasks[late].end == 5.5
    assert loop.overlapping() == {"disk": {"disk": 3.5}}


def test_tasks_that_wait_for_each_other_are_named() -> None:
    loop = Loop()
    first = loop.add("compute", "first", {"products": 1.0})
    loop.wait_also(first, loop.add("link", "state", {"pipeline": 1.0}, [first]))
    with pytest.raises(RuntimeError, match="first, state"):
        loop.run()


def test_groups_lie_in_nodes_as_ranks_are_laid_out() -> None:
    config = a_config("gpt_moe_tiny", ["parallel.tensor=2", "parallel.pipeline=2", "parallel.expert=4"])
    found = groups(config, 32, 8)
    assert found["tensor"] == Group(2, 2, 4) and found["tensor"].link == "inside"
    assert found[DENSE_REPLICAS] == Group(8, 4, 2) and found[DENSE_REPLICAS].link == "between"
    assert found["expert"] == Group(4, 4, 2) and found["pipeline"] == Group(2, 1, 8)
    assert groups(config, 32, 32)[DENSE_REPLICAS].link == "inside"


def test_a_card_is_shared_by_the_groups_of_a_node(hardware: Hardware) -> None:
    free = hardware.with_values({"between.startup": 0.0, "between.rate": 8e9, "inside.rate": 1e15}, "a test")
    free = free.with_values({f"inside.startup_{size}": 0.0 for size in (2, 4, 8)}, "a test")
    whole = collective(free, "all_reduce", Group(16, 8, 1), 16e9)
    assert whole == pytest.approx(2 * 15 / 16 * 16e9 / 8e9)
    assert collective(free, "all_reduce", Group(16, 4, 2), 16e9) == pytest.approx(2 * whole)
    assert collective(free, "all_gather", Group(16, 8, 1), 16e9) == pytest.approx(whole / 2)
    assert send(free, Group(2, 1, 8), 8e9) == pytest.approx(8.0)
    startup, a_byte = exchange(free, Group(16, 8, 1))
    assert startup == 0.0 and a_byte == pytest.approx(8 / 15 * 8 / 8e9)  # eight ranks send 8 of 15 parts through it
    assert collective(free, "all_reduce", Group(1, 1, 8), 1e9) == 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_reasons_add_up_to_the_step(model: str, layout: str, hardware: Hardware) -> None:
    ranks, overrides = LAYOUTS[layout]
    config = a_config(model, overrides)
    found = predict_step(Job(config, ranks, VOCAB, "cuda"), hardware)
    assert sum(found.reasons.values()) == pytest.approx(found.seconds)
    assert all(value > 0 for value in found.reasons.values())
    assert 0 < least_seconds(Job(config, ranks, VOCAB, "cuda"), hardware) <= found.seconds
    drawn = predict_step(Job(config, ranks, VOCAB, "cuda"), hardware, with_spans=True)
    assert drawn.seconds == pytest.approx(found.seconds)  # a period of the pipeline stands for the others
    ends = max(span.start + span.seconds for span in drawn.spans if "disk" not in span.track)
    assert ends <= drawn.seconds + 1e-9


@pytest.mark.parametrize("name", ["products.half", "device.rate", "inside.rate", "between.rate", "host.up"])
def test_more_of_anything_is_never_slower(name: str, hardware: Hardware) -> None:
    for overrides in ([], ["parallel.tensor=2"], ["parallel.pipeline=2"], ["optimizer.state_device=host"]):
        config = a_config("gpt_tiny", ["training.precision=bf16", *overrides])
        seconds = [
            predict_step(
                Job(config, 16, VOCAB, "cuda"), hardware.with_values({name: times * hardware[name]}, "a test")
            ).seconds
            for times in (0.5, 1.0, 2.0)
        ]
        assert seconds == sorted(seconds, reverse=True), overrides


def test_equal_stages_wait_for_the_pipeline_alone(hardware: Hardware) -> None:
    stages, micro_batches = 4, 12
    config = a_config("gpt_tiny", ["parallel.pipeline=4", "training.global_batch_size=12"])
    config.training.micro_batch_size = 1
    clock = StepClock(Job(config, stages, VOCAB, "cuda"), hardware)
    rest = stage_rest(clock.job, hardware, clock.groups, clock.recipe, None)
    rest = [replace(of, tied={}, update={}) for of in rest]
    one = clock.chunks()[1]  # of a stage without embedding and head
    schedule = Schedule(config, StepWork([one] * stages, rest, 0.0, "inside", True, True, True), micro_batches)
    both = sum(one[0].forward.values()) + sum(one[0].backward.values())
    assert schedule.end == pytest.approx((micro_batches + stages - 1) * both)
    assert schedule.reasons()["bubble"] == pytest.approx((stages - 1) * both)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 16, 64])
def test_a_slow_disk_hides_no_pass(micro_batches: int, hardware: Hardware) -> None:
    tiers = ["optimizer.state_device=disk", "memory.disk_dir=/tmp", f"training.global_batch_size={micro_batches}"]
    config = a_config("gpt_tiny", [*tiers, "training.micro_batch_size=1"])
    plain = a_config("gpt_tiny", [tiers[-1], "training.micro_batch_size=1"])
    passes = least_seconds(Job(plain, 1, VOCAB, "cuda"), hardware)
    slow = hardware.with_values({"disk.read": 1e8, "disk.write": 1e8}, "a test")
    found = predict_step(Job(config, 1, VOCAB, "cuda"), slow)
    drawn = predict_step(Job(config, 1, VOCAB, "cuda"), slow, with_spans=True)
    assert found.seconds == pytest.approx(drawn.seconds) and sum(found.reasons.values()) == pytest.approx(found.seconds)
    state = sum(span.seconds for span in drawn.spans if span.track.endswith("disk"))
    assert max(passes, state) <= found.seconds


def test_recomputed_layers_take_their_forward_pass_again(hardware: Hardware) -> None:
    plain, again = (
        predict_step(Job(a_config("gpt_tiny", [f"training.recompute={kind}"]), 1, VOCAB, "cuda"), hardware)
        for kind in ("none", "full")
    )
    assert "recomputed" not in plain.reasons
    assert again.seconds - plain.seconds == pytest.approx(again.reasons["recomputed"])


def test_operations_that_are_not_known_are_named() -> None:
    config = a_config("gpt_tiny", [])
    layer = blueprint.layer(config, False)
    strange = replace(layer, operations=(replace(layer.operations[0], kind="strange"),))
    with pytest.raises(ValueError, match="the clock does not know .*strange"):
        Fold(config, "cuda", shared_rows(config), None).block(strange)


def test_flops_are_those_of_the_blueprint() -> None:
    config = a_config("gpt_tiny", ["model.attention_dropout=0"])
    fold = Fold(config, "cuda", shared_rows(config), None)
    layer = blueprint.layer(config, False)
    work = fold.block(layer)
    tokens = config.training.micro_batch_size * config.model.sequence_length
    flops = sum(each.flops for each in layer.operations)
    attention = sum(each.flops for each in layer.operations if each.kind == "attention")
    assert sum(each.flops for each in work.forward.products) == (flops - attention) * tokens
    assert work.forward.attention == attention * tokens / 2  # of GPT half of the square
    split = copy.deepcopy(config)
    split.parallel.tensor = 2
    halves = Fold(split, "cuda", shared_rows(split), None).block(blueprint.layer(split, False))
    assert sum(each.flops for each in halves.forward.products) == (flops - attention) * tokens / 2
