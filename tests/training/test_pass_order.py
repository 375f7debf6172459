"""training.pass_order=by_layer: the same bits as by micro-batch where no table is shared, close ones where one is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs import derived
from models.loss.tiles import FEW_TOKENS
from simulator.layer_inputs import layer_inputs
from tests import distributed
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import make_config, train_on_ranks

VOCAB_SIZE = 500
ORDERS = ("by_micro_batch", "by_layer")
COMMON = (
    "training.recompute=full",
    "training.global_batch_size=12",
    "training.micro_batch_size=2",
    "model.num_layers=3",
    "model.sequence_length=32",
    "model.backend=portable",
    "model.tie_embeddings=false",
)
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
OVERLAP = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")
Numbers = list[tuple[Any, ...]]

CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "experts and their losses": (
        1,
        ("model=gpt_moe_tiny", "moe.z_loss_coeff=0.001", "moe.global_aux_loss_coeff=0.01", *DROPOUT),
    ),
    "bert in bf16 with a sentence head, some inputs on the host": (
        1,
        (
            *("model=bert_moe_tiny", "model.sentence_head=next_sentence", "training.precision=bf16"),
            "training.activation_offload=0.05",
        ),
    ),
    "expert parallel with copies of experts, state and inputs on the host": (
        2,
        (
            *("model=gpt_moe_tiny", "parallel.expert=2", *OVERLAP, *DROPOUT, "training.activation_offload=auto"),
            *("optimizer.state_device=host", "optimizer.early_update=always", "moe.memory_strategy=recompute"),
            *("moe.placement.policy=solve", "moe.placement.extra_slots=2", "moe.placement.max_load=1.0"),
            "moe.placement.bitwise=true",
        ),
    ),
    "tensor and sequence parallel": (
        2,
        ("model=gpt_moe_tiny", "parallel.tensor=2", "parallel.sequence=true", *DROPOUT),
    ),
    "context parallel in fp16": (
        2,
        ("model=gpt_moe_tiny", "parallel.context=2", "training.precision=fp16", "training.activation_offload=0.05"),
    ),
}


def _steps(overrides: Sequence[str]) -> tuple[Numbers, tuple[int, ...]]:
    """What three steps report, with an evaluation and passes that are run again in between, and sums of the weights at
    the end; and what the store of layer inputs counted in the last one."""
    import torch
    import torch.distributed as dist

    from parallel import topology
    from training.engine import Engine
    from training.starting.dry_run import made_up_batches
    from training.step import evaluate, run_again, train_step

    config = make_config(overrides, dist.get_world_size())
    ranks = topology.initialize(config)
    engine = Engine(config, ranks, VOCAB_SIZE)
    batches = made_up_batches(config, derived.num_micro_batches(config, ranks.world_size), VOCAB_SIZE, ranks.data.rank)
    numbers: Numbers = []
    for step in (1, 2, 3):
        if step == 3:
            numbers.append(evaluate(engine, iter([batches])))
            run_again(engine, batches)
        result = train_step(engine, batches, step)
        counts = None if result.tokens_per_expert is None else result.tokens_per_expert.tolist()
        numbers.append((result.loss, result.grad_norm, result.extra, counts, result.per_layer))
    counted: tuple[int, ...] = ()
    if (store := engine.layer_inputs) is not None:
        counts = store.counts
        counted = store.host_bytes, counts.device_peak, counts.copies_out, counts.copies_back
        last = counted[-1] and counts.device // derived.layer_input_bytes(config)
        assert last == (2 if config.training.pass_order == "by_layer" else 1), (
            "something was not read for the last time"
        )
    engine.synchronize()
    weights = [parameter.detach().double().sum() for chunk in engine.bare_chunks for parameter in chunk.parameters()]
    numbers.append(tuple(torch.stack(weights).tolist()))
    engine.close()
    return numbers, counted


def _both(ranks: int, overrides: Sequence[str]) -> list[list[tuple[Numbers, tuple[int, ...]]]]:
    """By order, by rank."""
    given = [(*COMMON, *overrides, f"training.pass_order={order}") for order in ORDERS]
    return [distributed.run(_steps, ranks, each) for each in given]


@pytest.mark.parametrize("name", CASES)
def test_layer_wise_passes_make_the_same_bits(name: str) -> None:
    ranks, overrides = CASES[name]
    micro_batch_wise, layer_wise = _both(ranks, overrides)
    assert [numbers for numbers, _ in layer_wise] == [numbers for numbers, _ in micro_batch_wise]
    config = make_config([*COMMON, *overrides, "training.pass_order=by_layer"], ranks)
    if config.training.activation_offload != "none":
        plan = layer_inputs(config, ranks, 0)
        counts = plan.host, plan.device_peak, plan.copies_out, plan.copies_back
        assert [counted for _, counted in layer_wise] == [counts] * ranks and plan.copies_back > plan.copies_out > 0


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ("model=bert_tiny", *OVERLAP)),
        (1, ("model=gpt_tiny", f"model.sequence_length={FEW_TOKENS // 2}")),  # the most tokens that are one tile
        (1, ("model=gpt_tiny", f"model.sequence_length={FEW_TOKENS // 2 + 2}")),
        (2, ("model=gpt_tiny", "training.token_tile=48", *OVERLAP)),
    ],
    ids=["bert", "one tile", "several tiles", "tiles that were asked for"],
)
def test_a_table_that_is_shared_adds_up_in_another_order(ranks: int, more: tuple[str, ...]) -> None:
    """With tiles the head's gradient is in its buffer before its backward call, which is not the embedding's."""
    overrides = ("training.global_batch_size=4", *more, "model.tie_embeddings=true")
    micro_batch_wise, layer_wise = (each[0][0] for each in _both(ranks, overrides))  # of rank 0
    for ours, theirs in zip(layer_wise[:-1], micro_batch_wise[:-1], strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=FP32_LOSS, abs=0)
        if isinstance(theirs[1], float):
            assert ours[1] == pytest.approx(theirs[1], rel=FP32_GRAD_NORM, abs=0)


def _named(overrides: Sequence[str], kind: str) -> str:
    """What is found where one layer's output, or its gradient, is not finite in the second micro-batch."""
    import torch

    from parallel import topology
    from parallel.megatron.random_state import current_pass
    from training.engine import Engine
    from training.resilience import diagnosis
    from training.starting.dry_run import made_up_batches
    from training.step import gradients

    config = make_config(overrides)
    engine = Engine(config, topology.initialize(config), VOCAB_SIZE)
    batches = made_up_batches(config, 3, VOCAB_SIZE, 0)

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        now = current_pass()
        if now is None or now[1] != 1 or not torch.is_grad_enabled():
            return output
        if kind == "forward":
            return output[0] * float("nan"), *output[1:]
        output[0].register_hook(lambda gradient: gradient * float("nan"))
        return output

    engine.bare_chunks[0].decoder.layers[1].mlp.register_forward_hook(spoil)
    result = gradients(engine, batches, 1)
    found = str(diagnosis.find_first(engine, batches, result.own_losses))
    engine.close()
    return found


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_pass_that_is_not_finite_has_its_micro_batch(kind: str) -> None:
    overrides = [*COMMON, "model=gpt_tiny", "training.global_batch_size=6", "training.pass_order="]
    found = [
        distributed.run(_named, 1, [*overrides[:-1], overrides[-1] + order, *tied], kind)[0]
        for order, tied in (("by_micro_batch", []), ("by_layer", ["model.tie_embeddings=true"]))
    ]
    assert len(set(found)) == 1 and "micro-batch 2" in found[0] and "layer 2 of 3" in found[0], found


def test_a_run_goes_on_in_the_other_order(data: list[str], tmp_path: Path) -> None:
    common = [
        "experiment=gpt_moe_tiny",
        *COMMON,
        *data,
        *DROPOUT,
        "optimizer.decay_steps=3",
        "optimizer.warmup_steps=1",
    ]
    whole = train_on_ranks([*common, "training.steps=3", "checkpoint=off", f"run_dir={tmp_path / 'whole'}"])
    own = [*common, f"run_dir={tmp_path / 'turned'}"]
    lines = train_on_ranks([*own, "training.steps=2", "training.pass_order=by_layer"])
    lines += train_on_ranks([*own, "training.steps=3"])
    keys = ("step", "loss", "grad_norm")
    assert [[line[key] for key in keys] for line in lines] == [[line[key] for key in keys] for line in whole]
