"""The loss in tiles against full logits: loss, gradients, and what the schedule sends back."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from models.loss import token_loss as module
from models.loss.output_layer import predicted_rows, select_rows
from models.loss.tiles import token_tile
from models.loss.token_loss import Targets, VocabularyShard, token_loss
from parallel.topology import Topology, initialize
from tests.distributed import run
from tests.models.helpers import make_config, relative_error
from tests.tolerances import TOKEN_LOSS
from tests.training.helpers import make_config as compose

SAMPLES, LENGTH, HIDDEN, NUM_ROWS, VOCAB_SIZE = 2, 22, 24, 256, 193  # the last 63 rows pad the vocabulary
NO_FURTHER = 1.02  # errors of as many roundings, drawn otherwise
Case = dict[str, Any]
Made = dict[str, torch.Tensor]


def inputs(dtype: torch.dtype, share: float, length: int = LENGTH) -> Made:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(NUM_ROWS, HIDDEN, generator=generator) * 0.3
    weight[VOCAB_SIZE:] = 0
    # Ranks that hold half of the sequence each predict other numbers of tokens.
    shares = torch.linspace(0.4, 1.6, length) * share
    return {
        "hidden": torch.randn(length, SAMPLES, HIDDEN, generator=generator).to(dtype),
        "weight": weight.to(dtype),
        "bias": (torch.randn(NUM_ROWS, generator=generator) * 0.1).to(dtype),
        "labels": torch.randint(0, VOCAB_SIZE, (SAMPLES, length), generator=generator),
        "mask": (torch.rand(SAMPLES, length, generator=generator) < shares).float(),
        "scale": torch.tensor(0.37),
    }


def full_logits(made: Made, with_bias: bool, dtype: torch.dtype | None = None) -> Made:
    """Loss and gradients of all logits at once, in fp64 or in the inputs' own dtype with an fp32 softmax."""
    names = ("hidden", "weight", "bias")
    hidden, weight, bias = (made[name].to(dtype or torch.float64).requires_grad_() for name in names)
    logits = hidden @ weight.t()
    logits = logits + bias if with_bias else logits  # rounded twice, as in Megatron-core
    logits = logits[..., :VOCAB_SIZE].to(torch.float64 if dtype is None else torch.float32)
    losses = F.cross_entropy(logits.flatten(0, 1), made["labels"].t().reshape(-1), reduction="none")
    loss = (losses.view(-1, SAMPLES).t() * made["mask"]).sum()
    (loss * made["scale"]).backward()
    empty = torch.zeros(NUM_ROWS)
    return {
        "loss": loss.detach(),
        "hidden": hidden.grad if hidden.grad is not None else torch.zeros(()),
        "weight": weight.grad if weight.grad is not None else torch.zeros(()),
        "bias": bias.grad if bias.grad is not None else empty,
    }


def in_tiles(made: Made, case: Case, topology: Topology) -> Made:
    """What this rank has of the loss in tiles: all of the hidden gradient, its rows of the weight's."""
    rank, ranks = topology.tensor.rank, topology.tensor.size
    spread = case.get("sequence", False)
    own = NUM_ROWS // ranks
    shard = VocabularyShard(
        topology.tensor.group, rank * own, min(max(VOCAB_SIZE - rank * own, 0), own), spread and ranks > 1
    )
    hidden = made["hidden"].chunk(shard.ranks)[rank if spread else 0].clone().requires_grad_()
    weight = made["weight"][rank * own :][:own].clone().requires_grad_()
    bias = made["bias"][rank * own :][:own].clone().requires_grad_() if case["bias"] else None
    if case["known"]:
        weight.main_grad = torch.ones(own, HIDDEN)
        weight.grad_added_to_main_grad = False
        weight.grad_is_old = case.get("old", False)
    loss_rows = predicted_rows(made["mask"], shard.ranks)
    given = Targets(made["labels"], made["mask"], loss_rows, made["scale"] if case["known"] else None)
    loss, each = token_loss(select_rows(hidden, loss_rows, rank), weight, bias, given, shard, case["tile"])
    (loss * made["scale"]).backward()
    grad = weight.grad
    if case["known"] and case["tile"] < made["labels"].numel():
        assert grad is not None and grad.data_ptr() == weight.data_ptr() and weight.grad_added_to_main_grad
        grad = weight.main_grad - (0 if case.get("old", False) else 1)
    assert torch.equal(each * made["mask"], each) and not each.requires_grad
    torch.testing.assert_close(each.sum(), loss.detach())
    assert grad is not None and hidden.grad is not None
    empty = torch.zeros(own)
    return {
        "loss": loss.detach(),
        "hidden": hidden.grad,
        "weight": grad,
        "bias": empty if bias is None or bias.grad is None else bias.grad,
    }


def together(of_ranks: list[Made], sequence: bool) -> Made:
    """The ranks' results as one."""
    for of_rank in of_ranks:
        assert torch.equal(of_rank["loss"], of_ranks[0]["loss"])
        assert sequence or torch.equal(of_rank["hidden"], of_ranks[0]["hidden"])
    return {
        "loss": of_ranks[0]["loss"],
        "hidden": torch.cat([of_rank["hidden"] for of_rank in of_ranks]) if sequence else of_ranks[0]["hidden"],
        **{name: torch.cat([of_rank[name] for of_rank in of_ranks]) for name in ("weight", "bias")},
    }


def on_ranks(cases: list[tuple[torch.dtype, float, Case]], tensor: int, sequence: bool) -> list[Made]:
    topology = initialize(make_config({"parallel": {"tensor": tensor, "sequence": sequence}}))
    return [in_tiles(inputs(dtype, share), case, topology) for dtype, share, case in cases]


CASES: list[Case] = [
    {"tile": tile, "bias": bias, "known": known, "old": old}
    for tile, bias, known, old in [
        (5, False, True, False),
        (5, True, False, False),
        (16, True, True, True),
        (1000, False, True, False),
        (1000, True, False, False),
    ]
]
SHARES = (1.0, 0.4)  # 1.0: the first tokens predict less


@pytest.mark.parametrize(("ranks", "sequence"), [(1, False), (2, False), (2, True)], ids=["one", "tensor", "sequence"])
def test_loss_and_gradients_are_those_of_full_logits(ranks: int, sequence: bool) -> None:
    each = [(torch.float32, share, {**case, "sequence": sequence}) for share in (2.6, *SHARES) for case in CASES]
    results = run(on_ranks, ranks, each, ranks, sequence)
    for (dtype, share, case), *of_ranks in zip(each, *results, strict=True):
        made = inputs(dtype, share)
        assert share < 2 or made["mask"].all()  # then nothing is left out
        ours, expected = together(of_ranks, sequence), full_logits(made, case["bias"])
        for name in expected:
            assert relative_error(ours[name].double(), expected[name].double()) < TOKEN_LOSS, (share, case, name)
        assert ours["weight"][VOCAB_SIZE:].abs().max() == 0


def half_precision(tile: int) -> tuple[Made, Made]:
    made = inputs(torch.bfloat16, 2.6, 512)
    return made, in_tiles(made, {"tile": tile, "bias": False, "known": True}, initialize(make_config()))


@pytest.mark.parametrize("tile", [64, 1024])
def test_half_precision_is_as_near_to_fp64_as_full_logits(tile: int) -> None:
    ((made, ours),) = run(half_precision, 1, tile)
    exact, theirs = full_logits(made, False), full_logits(made, False, torch.bfloat16)
    for name in ("loss", "hidden", "weight"):
        error, allowed = (
            ((each[name].double() - exact[name]).norm() / exact[name].norm()).item() for each in (ours, theirs)
        )
        assert error <= NO_FURTHER * max(allowed, TOKEN_LOSS), name


@pytest.mark.parametrize(("ranks", "sequence"), [(1, False), (2, True)], ids=["one", "sequence"])
@pytest.mark.parametrize("tile", [5, 1000])
def test_a_micro_batch_that_predicts_nothing(ranks: int, sequence: bool, tile: int) -> None:
    case = {"tile": tile, "bias": True, "known": True, "old": True, "sequence": sequence}
    for (result,) in run(on_ranks, ranks, [(torch.float32, 0.0, case)], ranks, sequence):
        assert all(not value.any() for value in result.values())


def same_bits(dtype: torch.dtype) -> bool:
    """Whether a single tile computes what Megatron-core's output layer and loss do, number by number."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as linear

    topology = initialize(make_config())
    made = inputs(dtype, 2.6)
    case = {"tile": 1000, "bias": True, "known": True}
    ours = in_tiles(made, case, topology)
    hidden, weight, bias = (made[name].clone().requires_grad_() for name in ("hidden", "weight", "bias"))
    logits = linear(hidden, weight, bias, False, False, False, None, None, topology.tensor.group)
    logits.data[..., VOCAB_SIZE:] = torch.finfo(dtype).min
    losses = vocab_parallel_cross_entropy(logits, made["labels"].t().contiguous()).t().contiguous()
    loss = (losses * made["mask"]).sum()
    (loss * made["scale"]).backward()
    theirs = {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    return all(torch.equal(ours[name], value) for name, value in theirs.items() if value is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_single_tile_is_megatrons_loss_bit_for_bit(dtype: torch.dtype) -> None:
    assert run(same_bits, 1, dtype) == [True]


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_torchs_own_agrees() -> None:
    made = inputs(torch.float32, 2.6)
    hidden = made["hidden"].flatten(0, 1).requires_grad_()
    weight = made["weight"][:VOCAB_SIZE].clone().requires_grad_()
    loss = F.linear_cross_entropy(hidden, weight, made["labels"].t().reshape(-1), reduction="sum")
    (loss * made["scale"]).backward()
    (ours,) = run(on_ranks, 1, [(torch.float32, 2.6, CASES[0])], 1, False)[0]
    assert relative_error(ours["loss"], loss.detach()) < TOKEN_LOSS
    assert hidden.grad is not None and weight.grad is not None
    assert relative_error(ours["hidden"].flatten(0, 1), hidden.grad) < TOKEN_LOSS
    assert relative_error(ours["weight"][:VOCAB_SIZE], weight.grad) < TOKEN_LOSS


def test_rows_of_ranks_are_as_many() -> None:
    mask = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 1]]).float()  # flattened: 1 0 | 0 1 | 0 0 | 0 1
    one = predicted_rows(mask)
    assert one is not None and one.tolist() == [[0, 3, 7]]
    two = predicted_rows(mask, 2)
    assert two is not None and two.tolist() == [[0, 3], [4, 7]]  # 4 predicts nothing
    nothing = predicted_rows(torch.zeros(2, 4), 2)
    assert nothing is not None and nothing.shape == (2, 0)
    assert predicted_rows(torch.ones(2, 4), 2) is None


def test_tiles_by_default() -> None:
    assert [token_tile(tokens) for tokens in (1, 512, 513, 4096, 8192, 65536)] == [1, 512, 128, 128, 128, 1024]
    assert [token_tile(tokens, 256) for tokens in (100, 8192)] == [100, 256]


# ---------------------------------------------------------------------------------------------------------------------
# In a step
# ---------------------------------------------------------------------------------------------------------------------


def gradients_sent_back(config: Any) -> list[tuple[float, float]]:
    """The gradient of each micro-batch's sum of losses, as it was given and as it came, of two steps."""
    from training.engine import Engine
    from training.starting.dry_run import made_up_batches
    from training.step import train_step

    engine, backward, pairs = Engine(config, initialize(config), 300), module._TokenLoss.backward, []

    def watched(ctx: Any, grad: torch.Tensor, each: Any) -> Any:
        pairs.append((ctx.loss_grad.item(), grad.item()))
        return backward(ctx, grad, each)

    count = config.training.global_batch_size // (config.training.micro_batch_size * engine.topology.data.size)
    batches = made_up_batches(config, count, 300, seed=engine.topology.data.rank)
    batches[0]["loss_mask"][0, 3:] = 0
    with mock.patch.object(module._TokenLoss, "backward", staticmethod(watched)):
        for step in (1, 2):
            train_step(engine, batches, step)
    engine.close()
    return pairs


@pytest.mark.parametrize(
    ("model", "ranks", "overrides"),
    [
        ("gpt_tiny", 1, ["training.precision=fp16"]),
        ("bert_tiny", 2, ["training.precision=fp16"]),
        ("gpt_moe_tiny", 2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.num_layers=4"]),
    ],
)
def test_the_gradient_is_known_before_the_forward_pass(model: str, ranks: int, overrides: list[str]) -> None:
    more = ["training.global_batch_size=8", "training.micro_batch_size=2", "training.token_tile=24", *overrides]
    config = compose([f"experiment={model}", "training.device=cpu", "model.sequence_length=32", *more], ranks)
    pairs = [pair for of_rank in run(gradients_sent_back, ranks, config) for pair in of_rank]
    assert len(pairs) == 8 and all(given == came for given, came in pairs)
