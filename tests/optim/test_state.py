"""Optimizer state in the model's terms: whole, named, and the same whichever optimizer and rank held it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import distributed
from tests.training.helpers import make_config
from tests.training.test_step import VOCAB_SIZE, batches_of, build, small

MOE = ["moe.aux_loss_coeff=0", "moe.z_loss_coeff=0"]


def states_of(model: Any, loading: bool = False) -> dict[str, dict[str, Any]]:
    from optim.state import sharded_state

    weights = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(model.bare_chunks)}
    return sharded_state(model.optimizer, model.chunks, weights, loading=loading)


def tensors_of(sharded: dict[str, dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    result: dict[str, dict[str, torch.Tensor]] = {}
    for name, kinds in sharded.items():
        for kind, tensor in kinds.items():
            assert tensor.key.startswith(f"optimizer.{kind}."), tensor.key
            value = tensor.data
            if isinstance(tensor, ShardedTensorFactory):  # a gated layer's two halves: built on demand
                assert value is not None
            result.setdefault(name, {})[kind] = value.clone()
    return result


def states_after_a_step(config: Any, rank_batches: bool) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's part of the state after one step on the same global batch."""
    model = build(config)
    batches = batches_of(config, 1)
    if rank_batches:
        batches = batches[model.topology.data_rank :: model.topology.data_size]
    model.train_step(batches, 1)
    return tensors_of(states_of(model))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sharded_and_plain_hold_the_same(precision: str) -> None:
    common = [*MOE, f"training.precision={precision}"]
    plain = distributed.run(states_after_a_step, 1, small("gpt_moe_tiny", *common, "optimizer.distributed=false", micro=4), True)[0]
    shards = distributed.run(states_after_a_step, 2, small("gpt_moe_tiny", *common, micro=4), True)
    kinds = ("exp_avg", "exp_avg_sq") if precision == "fp32" else ("master", "exp_avg", "exp_avg_sq")
    written: dict[tuple[str, str], torch.Tensor] = {}
    for shard in shards:
        for name, values in shard.items():
            for kind, value in values.items():
                assert (name, kind) not in written, "each parameter has one writer"
                written[name, kind] = value
    assert written.keys() == {(name, kind) for name in plain for kind in kinds}
    assert len({frozenset(shard) for shard in shards}) == 2 and all(shards)  # the writing is shared out
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    for (name, kind), value in written.items():
        expected = plain[name][kind]
        assert value.shape == expected.shape and value.dtype == torch.float32
        assert float((value - expected).norm()) <= tolerance * float(expected.norm()) + 1e-12, (name, kind)


def save_and_restore(config: Any) -> dict[str, Any]:
    """Take two steps; or one, then carry the state over to a fresh model by hand, then the second."""
    from optim.state import restore, steps_taken

    model = build(config)
    first = model.train_step(batches_of(config, 1), 1).loss
    counted = steps_taken(model.optimizer)
    saved = tensors_of(states_of(model))
    weights = [chunk.state_dict() for chunk in model.bare_chunks]
    weights = [{name: value.clone() for name, value in state.items() if torch.is_tensor(value)} for state in weights]
    second = model.train_step(batches_of(config, 2), 2)

    fresh = type(model)(config, model.topology, VOCAB_SIZE)
    before = steps_taken(fresh.optimizer)
    empty = states_of(fresh, loading=True)
    assert {name: set(kinds) for name, kinds in empty.items()} == {name: set(kinds) for name, kinds in saved.items()}
    for chunk, state in zip(fresh.bare_chunks, weights, strict=True):
        chunk.load_state_dict(state, strict=False)
    restore(fresh.optimizer, fresh.chunks, saved, counted)
    again = fresh.train_step(batches_of(config, 2), 2)
    after = [
        float((a.float() - b.float()).abs().max()) for a, b in zip(model.chunks[0].parameters(), fresh.chunks[0].parameters(), strict=True)
    ]
    return {"first": first, "steps": (before, counted, steps_taken(fresh.optimizer)), "second": second, "again": again, "after": max(after)}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sharded", ["true", "false"])
def test_restored_state_steps_on_as_the_original(precision: str, sharded: str) -> None:
    config = small("gpt_moe_tiny", f"training.precision={precision}", f"optimizer.distributed={sharded}", micro=4)
    result = distributed.run(save_and_restore, 1, config)[0]
    assert result["steps"] == (0, 1, 2)
    assert result["again"].loss == result["second"].loss != result["first"]
    assert result["again"].grad_norm == result["second"].grad_norm
    assert result["after"] == 0.0


def fresh_state(config: Any) -> tuple[dict[str, dict[str, torch.Tensor]], int]:
    from optim.state import restore, scaler_state, steps_taken

    model = build(config)
    state = tensors_of(states_of(model))
    restore(model.optimizer, model.chunks, state, 0)
    assert scaler_state(model.optimizer) is None
    return state, steps_taken(model.optimizer)


def test_before_the_first_step_moments_are_zero() -> None:
    state, steps = distributed.run(fresh_state, 1, small("bert_tiny", "training.precision=bf16"))[0]
    assert steps == 0
    for name, kinds in state.items():
        assert not kinds["exp_avg"].any() and not kinds["exp_avg_sq"].any(), name
    assert any(kinds["master"].any() for kinds in state.values())


def test_rate_and_decay_reach_every_group() -> None:
    rates = distributed.run(groups_after, 1, small("gpt_moe_tiny", "optimizer.weight_decay=0.25"))[0]
    assert len(rates) > 1 and {rate for rate, _ in rates} == {
        make_config(["experiment=gpt_moe_tiny", "training.steps=20"]).optimizer.lr / 2
    }
    assert {decay for _, decay in rates} == {0.0, 0.25}


def groups_after(config: Any) -> list[tuple[float, float]]:
    from optim.build import param_groups, set_learning_rate

    model = build(config)
    config.optimizer.warmup_steps = 2
    assert set_learning_rate(model.optimizer, config, 1) == config.optimizer.lr / 2
    return [(group["lr"], group["weight_decay"]) for group in param_groups(model.optimizer)]
