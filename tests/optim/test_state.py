"""Optimizer state in the model's terms: whole, named, and the same whichever optimizer and rank held it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optim.state import boxes
from tests import distributed
from tests.training.helpers import make_config
from tests.training.test_step import VOCAB_SIZE, batches_of, build, small

MOE = ["moe.aux_loss_coeff=0", "moe.z_loss_coeff=0"]


Box = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]  # key, global shape, offset, data


def states_of(model: Any) -> list[Box]:
    """Copies of what this rank writes of the optimizer's state."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    from optim.state import sharded_state

    weights = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(model.bare_chunks)}
    tensors = [
        tensor for tensor in sharded_state(model.optimizer, model.chunks, weights) if is_main_replica(tensor.replica_id)
    ]
    return [(tensor.key, tensor.global_shape, tensor.global_offset, tensor.data.clone()) for tensor in tensors]


def assemble(owned_boxes: list[Box]) -> dict[str, torch.Tensor]:
    """The global tensors that the boxes of all ranks make up, each element once."""
    whole: dict[str, torch.Tensor] = {}
    for key, shape, offset, data in owned_boxes:
        target = whole.setdefault(key, torch.full(shape, torch.nan))
        data = data[(None,) * (len(shape) - data.dim())]
        region = target[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))]
        assert region.isnan().all() and data.dtype == torch.float32, key
        region.copy_(data)
    assert not any(value.isnan().any() for value in whole.values())
    return whole


def states_after_a_step(config: Any, rank_batches: bool) -> list[Box]:
    """This rank's part of the state after one step on the same global batch."""
    from training.step import train_step

    model = build(config)
    batches = batches_of(config, 1)
    if rank_batches:
        batches = batches[model.topology.data.rank :: model.topology.data.size]
    train_step(model, batches, 1)
    return states_of(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sharded_and_plain_hold_the_same(precision: str) -> None:
    common = [*MOE, f"training.precision={precision}"]
    plain = distributed.run(
        states_after_a_step, 1, small("gpt_moe_tiny", *common, "optimizer.distributed=false", micro=4), True
    )[0]
    shards = distributed.run(states_after_a_step, 2, small("gpt_moe_tiny", *common, micro=4), True)
    kinds = ("exp_avg", "exp_avg_sq") if precision == "fp32" else ("master", "exp_avg", "exp_avg_sq")
    assert all(shards)  # the writing is shared out
    expected, written = assemble(plain), assemble([box for shard in shards for box in shard])
    assert written.keys() == expected.keys() and {key.split(".")[1] for key in written} == set(kinds)
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    for key, value in written.items():
        assert value.shape == expected[key].shape
        assert float((value - expected[key]).norm()) <= tolerance * float(expected[key].norm()) + 1e-12, key


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 5), (4, 1, 1, 3)])
def test_a_range_of_elements_is_a_few_boxes(shape: tuple[int, ...]) -> None:
    count = int(torch.tensor(shape).prod()) if shape else 1
    numbers = torch.arange(count).view(shape)
    for start in range(count):
        for end in range(start + 1, count + 1):
            cut = list(boxes(shape, start, end))
            assert len(cut) <= max(1, 2 * len(shape) - 1)
            elements = [numbers[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].flatten() for box in cut]
            assert torch.equal(torch.cat(elements), torch.arange(start, end))


def save_and_restore(config: Any) -> dict[str, Any]:
    """Take two steps; or one, then carry the state over to a fresh model by hand, then the second."""
    from optim.state import allocate, sharded_state, steps_taken
    from training.step import train_step

    model = build(config)
    first = train_step(model, batches_of(config, 1), 1).loss
    counted = steps_taken(model.optimizer)
    saved = states_of(model)
    weights = [chunk.state_dict() for chunk in model.bare_chunks]
    weights = [{name: value.clone() for name, value in state.items() if torch.is_tensor(value)} for state in weights]
    second = train_step(model, batches_of(config, 2), 2)

    fresh = type(model)(config, model.topology, VOCAB_SIZE)
    before = steps_taken(fresh.optimizer)
    for chunk, state in zip(fresh.bare_chunks, weights, strict=True):
        chunk.load_state_dict(state, strict=False)
    allocate(fresh.optimizer, fresh.chunks, counted)
    views = sharded_state(
        fresh.optimizer, fresh.chunks, {f"model{i}": c.sharded_state_dict() for i, c in enumerate(fresh.bare_chunks)}
    )
    for view, (key, _, offset, data) in zip(views, saved, strict=True):
        assert (view.key, view.global_offset) == (key, offset)
        view.data.copy_(data)
    again = train_step(fresh, batches_of(config, 2), 2)
    after = [
        float((a.float() - b.float()).abs().max())
        for a, b in zip(model.chunks[0].parameters(), fresh.chunks[0].parameters(), strict=True)
    ]
    return {
        "first": first,
        "steps": (before, counted, steps_taken(fresh.optimizer)),
        "second": second,
        "again": again,
        "after": max(after),
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sharded", ["true", "false"])
def test_restored_state_steps_on_as_the_original(precision: str, sharded: str) -> None:
    config = small("gpt_moe_tiny", f"training.precision={precision}", f"optimizer.distributed={sharded}", micro=4)
    result = distributed.run(save_and_restore, 1, config)[0]
    assert result["steps"] == (0, 1, 2)
    assert result["again"].loss == result["second"].loss != result["first"]
    assert result["again"].grad_norm == result["second"].grad_norm
    assert result["after"] == 0.0


def fresh_states(config: Any) -> tuple[list[Box], int, list[Box], int]:
    """State and step count before the first step; and of a model that took one and is put back to before it."""
    from optim.state import allocate, steps_taken
    from parallel.megatron.optimizer import scaler_state
    from training.step import train_step

    model = build(config)
    assert scaler_state(model.optimizer) is None
    before, steps = states_of(model), steps_taken(model.optimizer)
    train_step(model, batches_of(config, 1), 1)
    allocate(model.optimizer, model.chunks, 0)
    return before, steps, states_of(model), steps_taken(model.optimizer)


def test_before_the_first_step_there_are_no_moments() -> None:
    before, steps, after, steps_after = distributed.run(
        fresh_states, 1, small("bert_tiny", "training.precision=bf16", micro=4)
    )[0]
    assert steps == steps_after == 0
    assert [box[0] for box in before] == [box[0] for box in after] and all(
        key.startswith("optimizer.master.") for key, *_ in before
    )
    assert any(data.any() for *_, data in before)


def test_rate_and_decay_reach_every_group() -> None:
    rates = distributed.run(groups_after, 1, small("gpt_moe_tiny", "optimizer.weight_decay=0.25"))[0]
    assert len(rates) > 1 and {rate for rate, _ in rates} == {
        make_config(["experiment=gpt_moe_tiny", "training.steps=20"]).optimizer.lr / 2
    }
    assert {decay for _, decay in rates} == {0.0, 0.25}


def groups_after(config: Any) -> list[tuple[float, float]]:
    from optim.optimizer import param_groups, set_learning_rate

    model = build(config)
    config.optimizer.warmup_steps = 2
    assert set_learning_rate(model.optimizer, config, 1) == config.optimizer.lr / 2
    return [(group["lr"], group["weight_decay"]) for group in param_groups(model.optimizer)]
