"""One optimizer step: what it minimises, what it reports, what it counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from configs.schema import Config
from models.loss.output_layer import predicted_rows
from parallel.megatron.optimizer import members, restore_scaler, scaler_state
from simulator.flops import forward_flops_per_token, training_flops_per_token
from tests import distributed
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import largest_difference, make_config, train_on_ranks

VOCAB_SIZE = 256  # a whole number of padded blocks, so that storage has no rows beyond it
SAMPLES = 8
SMALL = [
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.sequence_length=16",
    "data.vocab_size=320",
    "model.vocab_size=null",
]


def small(model: str, *overrides: str, micro: int = SAMPLES) -> Config:
    sizes = [f"training.global_batch_size={SAMPLES}", f"training.micro_batch_size={micro}"]
    return make_config([f"experiment={model}", *SMALL, *sizes, *overrides])


def batches_of(config: Config, step: int) -> list[dict[str, torch.Tensor]]:
    """The same random samples for every micro-batch size; each predicts another number of tokens."""
    generator = torch.Generator().manual_seed(step)
    shape = (SAMPLES, config.model.sequence_length)
    batch = {
        "tokens": torch.randint(0, VOCAB_SIZE, shape, generator=generator),
        "labels": torch.randint(0, VOCAB_SIZE, shape, generator=generator),
        "loss_mask": (torch.rand(shape, generator=generator) < torch.linspace(0.1, 1, SAMPLES)[:, None]).float(),
    }
    if config.model.family == "bert":
        batch["types"] = torch.randint(0, 2, shape, generator=generator)
        batch["padding_mask"] = torch.arange(shape[1]).expand(shape) < torch.randint(
            8, shape[1] + 1, (SAMPLES, 1), generator=generator
        )
        batch["sentence_label"] = torch.randint(0, 2, (SAMPLES,), generator=generator)
    micro = config.training.micro_batch_size
    return [{name: value[i : i + micro] for name, value in batch.items()} for i in range(0, SAMPLES, micro)]


def build(config: Config) -> Any:
    from parallel import topology
    from training.engine import Engine

    return Engine(config, topology.initialize(config), VOCAB_SIZE)


def take_steps(config: Config, steps: int) -> list[dict[str, Any]]:
    from training.step import train_step

    model = build(config)
    results = [train_step(model, batches_of(config, step), step) for step in range(1, steps + 1)]
    return [
        {"step": i + 1, "loss": r.loss, "grad_norm": r.grad_norm, **r.extra, "tokens": r.tokens_per_expert}
        for i, r in enumerate(results)
    ]


def on_one_rank(function: Any, *arguments: Any) -> Any:
    return distributed.run(function, 1, *arguments)[0]


# Losses of a router are means over micro-batches of products of means, and change with their size by design: off here.
@pytest.mark.parametrize("model", ["gpt_tiny", "bert_tiny", "gpt_moe_tiny"])
def test_accumulated_micro_batches_are_one_big_batch(model: str) -> None:
    no_aux = ["moe.aux_loss_coeff=0", "moe.z_loss_coeff=0"] if "moe" in model else []
    whole = on_one_rank(take_steps, small(model, *no_aux), 3)
    for micro in (4, 1):
        accumulated = on_one_rank(take_steps, small(model, *no_aux, micro=micro), 3)
        for key in ("loss", *(["sentence_loss"] if model == "bert_tiny" else [])):
            assert largest_difference(accumulated, whole, key) < FP32_LOSS, key
        assert largest_difference(accumulated, whole, "grad_norm") < FP32_GRAD_NORM


def measure_loss(config: Config) -> dict[str, float]:
    from training.step import evaluate, train_step

    model = build(config)
    batches = batches_of(config, 1)
    chunk, total, tokens = model.bare_chunks[0], 0.0, 0.0
    with torch.no_grad(), model.frozen_weights():
        for batch in batches:
            per_token = model.family.forward(chunk, batch)[1]
            total += float((per_token.double() * batch["loss_mask"]).sum())
            tokens += float(batch["loss_mask"].sum())
    evaluated = evaluate(model, iter([batches]))[0]
    reported = train_step(model, batches, 1).loss
    return {
        "direct": total / tokens,
        "reported": reported,
        "evaluated": evaluated,
        "after": evaluate(model, iter([batches]))[0],
    }


@pytest.mark.parametrize("model", ["gpt_tiny", "bert_moe_tiny"])
def test_loss_is_the_mean_over_predicted_tokens_before_the_update(model: str) -> None:
    losses = on_one_rank(measure_loss, small(model, micro=2))
    assert losses["reported"] == pytest.approx(losses["direct"], rel=1e-6)
    assert losses["evaluated"] == pytest.approx(losses["direct"], rel=1e-6)
    assert losses["after"] < losses["direct"] - 1e-3


def applied_gradient_norm(config: Config) -> tuple[float, float]:
    """Norm as reported, and of the gradient that reached AdamW, from its first moment."""
    from training.step import train_step

    model = build(config)
    reported = train_step(model, batches_of(config, 1), 1).grad_norm
    squares = 0.0
    for member in members(model.optimizer):
        for state in member.optimizer.state.values():
            squares += float(state["exp_avg"].double().square().sum())
    return reported, squares**0.5 / (1 - config.optimizer.beta1)


@pytest.mark.parametrize("optimizer", ["true", "false"])
def test_clipping(optimizer: str) -> None:
    kind = f"optimizer.distributed={optimizer}"
    norm, applied = on_one_rank(applied_gradient_norm, small("gpt_moe_tiny", kind, "optimizer.clip_grad=0"))
    assert norm > 0.1 and applied == pytest.approx(norm, rel=1e-4)
    clipped = on_one_rank(applied_gradient_norm, small("gpt_moe_tiny", kind, "optimizer.clip_grad=0.01"))
    assert clipped == pytest.approx((norm, 0.01), rel=1e-3)
    below = on_one_rank(applied_gradient_norm, small("gpt_moe_tiny", kind, "optimizer.clip_grad=1000"))
    assert below == pytest.approx((norm, norm), rel=1e-4)


def overflow_and_recover(config: Config) -> dict[str, Any]:
    from training.step import train_step

    model = build(config)
    weights = [parameter.detach().clone() for parameter in model.bare_chunks[0].parameters()]
    scales, results, kept = [], [], []
    for step in range(1, 40):
        results.append(train_step(model, batches_of(config, step), step))
        scales.append((scaler_state(model.optimizer) or {})["scale"])
        kept.append(all(torch.equal(*pair) for pair in zip(weights, model.bare_chunks[0].parameters(), strict=True)))
        if results[-1].updated:
            break
    saved = scaler_state(model.optimizer)
    restore_scaler(model.optimizer, {"scale": 8.0, "growth_tracker": 3.0, "hysteresis_tracker": 1.0})
    changed = scaler_state(model.optimizer)
    restore_scaler(model.optimizer, saved)
    return {
        "updated": [result.updated for result in results],
        "losses": [result.loss for result in results],
        "norm": results[-1].grad_norm,
        "scales": scales,
        "kept": kept,
        "changed": changed,
        "restored": scaler_state(model.optimizer) == saved,
    }


def test_fp16_skips_overflows_and_recovers() -> None:
    result = on_one_rank(
        overflow_and_recover, small("gpt_tiny", "training.precision=fp16", f"training.initial_loss_scale={2.0**28}")
    )
    assert len(result["updated"]) > 2 and result["updated"] == [False] * (len(result["updated"]) - 1) + [True]
    assert result["kept"] == [not updated for updated in result["updated"]]
    assert result["scales"][-1] < 2.0**28 and result["scales"] == sorted(result["scales"], reverse=True)
    assert all(0 < loss < 10 for loss in result["losses"]) and 0 < result["norm"] < 100
    assert result["changed"] == {"scale": 8.0, "growth_tracker": 3, "hysteresis_tracker": 1} and result["restored"]


def test_fp16_resumes_bit_for_bit(data: list[str], tmp_path: Any) -> None:
    common = [
        "experiment=gpt_tiny",
        *data,
        "training.precision=fp16",
        f"training.initial_loss_scale={2.0**22}",
        "optimizer.decay_steps=10",
    ]
    whole = train_on_ranks([*common, "training.steps=10", "checkpoint=off", f"run_dir={tmp_path / 'whole'}"])
    updates = [line["updated"] for line in whole]
    assert not updates[0] and updates[-1]
    first = train_on_ranks(
        [*common, f"training.steps={updates.index(True) + 1}", f"run_dir={tmp_path / 'accumulated'}"]
    )
    rest = train_on_ranks([*common, "training.steps=10", f"run_dir={tmp_path / 'accumulated'}"])
    for key in ("step", "loss", "grad_norm", "updated"):
        assert [line[key] for line in first + rest] == [line[key] for line in whole], key


@pytest.mark.parametrize("model", ["gpt_moe_tiny", "bert_tiny"])
def test_recompute_changes_nothing(model: str) -> None:
    dropout = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
    kept = on_one_rank(take_steps, small(model, *dropout, micro=4), 3)
    for kind in ("selective", "full"):
        again = on_one_rank(take_steps, small(model, *dropout, f"training.recompute={kind}", micro=4), 3)
        assert largest_difference(again, kept, "loss") < FP32_LOSS, kind
        assert largest_difference(again, kept, "grad_norm") < FP32_GRAD_NORM, kind
        if "moe" in model:
            assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(again, kept, strict=True)), kind
            for key in ("aux_loss", "z_loss"):
                assert largest_difference(again, kept, key) < FP32_LOSS, (kind, key)


def test_router_statistics() -> None:
    config = small("gpt_moe_tiny", micro=2)
    lines = on_one_rank(take_steps, config, 2)
    for line in lines:
        tokens = SAMPLES * config.model.sequence_length * config.moe.top_k
        assert line["tokens"].shape == (config.model.num_layers, config.moe.num_experts)
        assert line["tokens"].sum(dim=1).tolist() == [tokens] * config.model.num_layers
        # Free of their coefficients: 1 for perfect balance, and log(4)^2 for a router that does not know yet.
        assert line["aux_loss"] == pytest.approx(1.0, abs=0.05) and line["z_loss"] == pytest.approx(
            math.log(4) ** 2, abs=0.1
        )


def is_deterministic(config: Config) -> tuple[bool, list[dict[str, Any]]]:
    from tests.training.helpers import train

    lines = train(config)
    return torch.are_deterministic_algorithms_enabled(), lines


def test_deterministic_mode(data: list[str], tmp_path: Any) -> None:
    overrides = ["experiment=gpt_moe_tiny", *data, "training.steps=2", "checkpoint=off", f"run_dir={tmp_path}"]
    runs = [
        on_one_rank(is_deterministic, make_config([*overrides, f"training.deterministic={on}"]))
        for on in ("true", "true", "false")
    ]
    assert [on for on, _ in runs] == [True, True, False]
    losses = [[(line["loss"], line["grad_norm"]) for line in lines] for _, lines in runs]
    assert losses[0] == losses[1]
    assert losses[2][0][0] == pytest.approx(losses[0][0][0], rel=FP32_LOSS)


def count_flops(config: Config) -> tuple[float, float]:
    """Operations per token: of attention's kernel forward, and of all matrix products forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    model = build(config)
    (batch,) = batches_of(config, 1)

    def attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        keys, values = (*query[:2], *key[2:]), (*query[:2], *value[2:])  # torch 2.11 knows no groups of queries
        return sdpa_flop_count(query, keys, values)

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch's counter knows those of CUDA only
    if config.model.family == "bert":
        batch["loss_mask"] = (torch.arange(batch["tokens"].numel()) % 4 == 0).float().view_as(batch["tokens"])
        batch["rows"] = predicted_rows(batch["loss_mask"])
    counts = []
    # With labels, the forward pass makes the output layer's gradients too.
    for given in ({name: value for name, value in batch.items() if name != "labels"}, batch):
        with FlopCounterMode(display=False, custom_mapping={kernel: attention}) as counter:
            output = model.family.forward(model.bare_chunks[0], given)
        counts.append(counter.get_flop_counts()["Global"])
    tokens = batch["tokens"].numel()
    attended, _ = (count.pop(kernel) for count in counts)
    with FlopCounterMode(display=False) as counter:
        loss, _ = model.family.loss(output, batch)
        loss.backward()
    backward = sum(counter.get_flop_counts()["Global"].values())
    logits, forward = (sum(count.values()) for count in counts)
    trained = forward + backward
    # Logits are of all tokens, the loss of a quarter of BERT's.
    assert logits == trained / 3 or config.model.family == "bert"
    return attended / tokens, trained / tokens


@pytest.mark.parametrize("model", ["gpt_tiny", "gpt_moe_tiny", "bert_moe_tiny"])
def test_flops_formula_against_torch_counter(model: str) -> None:
    # a head on one token a sample is not counted
    more = (
        ["model.num_query_groups=2"] if "gpt" in model else ["model.sentence_head=none", "data.mask_probability=0.25"]
    )
    config = small(model, *more)
    attended, trained = on_one_rank(count_flops, config)
    products = trained / 3
    # torch counts attention's whole square, also where half of it is masked; so does the formula for BERT. For GPT it
    # takes half: of s tokens, one attends to (s + 1) / 2 on average, which convention rounds to s / 2.
    full = config.model.num_layers * 4 * config.model.hidden_size * config.model.sequence_length
    assert attended == full
    assert forward_flops_per_token(config, VOCAB_SIZE) == products + (
        attended / 2 if config.model.family == "gpt" else attended
    )
    assert training_flops_per_token(config, VOCAB_SIZE) == 3 * forward_flops_per_token(config, VOCAB_SIZE)
