"""Routers whose rows are dealt over context and tensor ranks, in any order: losses, gradients, capacity and reports are
those of one process with the whole micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.schema import Config
from tests import distributed
from tests.tolerances import MOE
from tests.training.helpers import make_config

LAYERS, EXPERTS, HIDDEN = 2, 4, 16
SAMPLES, LENGTH = 3, 16
NUM_ROWS = SAMPLES * LENGTH
COEFFICIENTS = {
    "aux_loss_coeff": 0.3,
    "sequence_aux_loss_coeff": 0.7,
    "global_aux_loss_coeff": 0.5,
    "z_loss_coeff": 0.2,
}
SIZES = [
    *("experiment=gpt_moe_tiny", f"model.hidden_size={HIDDEN}", f"model.num_layers={LAYERS}"),
    *(f"moe.num_experts={EXPERTS}", f"training.micro_batch_size={SAMPLES}", "training.global_batch_size=12"),
    f"model.sequence_length={LENGTH}",
]
LAYOUTS = {
    "context 2": (2, ["parallel.context=2"]),
    "context 4": (4, ["parallel.context=4"]),
    "tensor 2, context 2": (4, ["parallel.context=2", "parallel.tensor=2", "parallel.sequence=true"]),
    "data 2, context 2": (4, ["parallel.context=2"]),
}


def _router(config: Config) -> tuple[Any, Any]:
    """A router of the second layer with the weights of every layout, and its topology."""
    from models.transformer_config import transformer_config
    from moe.router import Router
    from parallel import topology

    found = topology.initialize(config)
    router = Router(transformer_config(config), found.groups)
    router.set_layer_number(LAYERS)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
    return router.train(), found


def _hidden(seed: int) -> torch.Tensor:
    """Hidden states of a micro-batch, by sample and position; values repeat, so that probabilities are equal."""
    draw = torch.Generator().manual_seed(seed)
    few = torch.randn(NUM_ROWS // 2, HIDDEN, generator=draw) + 0.5 * torch.randn(HIDDEN, generator=draw)
    return few[torch.randint(0, len(few), (NUM_ROWS,), generator=draw)]


def _sharded_rows(topology: Any, seed: int) -> torch.Tensor:
    """Rows of this rank: a random order of all, cut for context ranks and then for tensor ranks."""
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed))
    of_context = order.chunk(topology.context.size)[topology.context.rank]
    return of_context.chunk(topology.tensor.size)[topology.tensor.rank]


def _observe(config: Config, batch: int | None = None) -> dict[str, Any]:
    """What one call of the router leaves, with the rows' gradients where they belong in the micro-batch: of the whole
    `batch`, else of this rank's rows of its data rank's."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from moe.balance import GlobalBalance
    from moe.watch import LOSSES, RouterWatch
    from parallel.megatron.router import RouterRows

    router, topology = _router(config)
    holder = torch.nn.ModuleList([router])
    balance = GlobalBalance([holder], range(LAYERS), EXPERTS, torch.device("cpu"))
    balance.follow(torch.tensor([[40, 30, 20, 10], [7, 1, 0, 24]], dtype=torch.float64))
    watch = RouterWatch([holder], LAYERS, EXPERTS, list(LOSSES.values()), torch.device("cpu"))
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([1.0]))
    hidden = _hidden(topology.data.rank if batch is None else batch)
    if batch is None:
        ids = _sharded_rows(topology, 7 + topology.data.rank)
        router.token_rows = RouterRows(ids, SAMPLES, LENGTH)
        given = hidden[ids][:, None]
    else:
        ids = torch.arange(NUM_ROWS).view(SAMPLES, LENGTH).t().flatten()
        given = hidden[ids].view(LENGTH, SAMPLES, HIDDEN)
    given = given.clone().requires_grad_()
    probs, kept = router(given)
    (0 * probs.sum()).backward()
    placed, keeps = torch.zeros(NUM_ROWS, HIDDEN), torch.zeros(NUM_ROWS, EXPERTS, dtype=torch.long)
    placed[ids], keeps[ids] = given.grad.view(len(ids), HIDDEN), kept.long()
    bias = None if router.local_tokens_per_expert is None else router.local_tokens_per_expert
    return {
        "data": topology.data.rank,
        "rows_grad": placed,
        "weight_grad": router.weight.grad,
        "kept": keeps,
        "watched": watch.take(),
        "balance": balance.take(),
        "chosen": torch.zeros(EXPERTS) if bias is None else bias,
    }


def _sums(found: list[dict[str, Any]], data: int) -> dict[str, torch.Tensor]:
    ranks = [of_rank for of_rank in found if of_rank["data"] == data]
    return {name: sum(rank[name] for rank in ranks) for name in ranks[0] if name != "data"}  # type: ignore[misc]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_process(layout: str, score: str) -> None:
    ranks, words = LAYOUTS[layout]
    base = [*SIZES, f"moe.router_score={score}", *(f"moe.{name}={value}" for name, value in COEFFICIENTS.items())]
    base += ["moe.expert_bias=true"] if score == "sigmoid" else []
    found = distributed.run(_observe, ranks, make_config([*base, *words], ranks))
    num_ranks = ranks // (2 if "data" in layout else 1)
    for data in range(ranks // num_ranks):
        ours = _sums(found, data)
        (theirs,) = distributed.run(_observe, 1, make_config(base), data)
        watched = theirs["watched"].clone()
        watched[-LAYERS:] *= num_ranks  # z-losses: parts of a mean
        assert watched[-3 * LAYERS :].view(3, LAYERS)[:, 1].gt(0).all()
        torch.testing.assert_close(ours["watched"], watched, rtol=MOE["float32"], atol=MOE["float32"])
        for name in ("rows_grad", "weight_grad", "balance"):
            assert theirs[name].abs().max() > 0
            torch.testing.assert_close(ours[name], theirs[name], rtol=MOE["float32"], atol=1e-7)
        assert torch.equal(ours["kept"], theirs["kept"]) and torch.equal(ours["chosen"], theirs["chosen"])
        assert (theirs["chosen"].sum() > 0) == (score == "sigmoid")


@pytest.mark.parametrize(("policy", "factor"), [("position", 0.25), ("position", 0.7), ("probs", 0.25), ("probs", 0.7)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_capacity_is_the_micro_batchs(layout: str, policy: str, factor: float) -> None:
    ranks, words = LAYOUTS[layout]
    base = [*SIZES, f"moe.capacity_factor={factor}", f"moe.drop_policy={policy}"]
    found = distributed.run(_observe, ranks, make_config([*base, *words], ranks))
    for data in {of_rank["data"] for of_rank in found}:
        ours = _sums(found, data)["kept"]
        (theirs,) = distributed.run(_observe, 1, make_config(base), data)
        assert torch.equal(ours, theirs["kept"])
        assert 0 < int(ours.sum()) < NUM_ROWS * 2


def _handed() -> list[bool]:
    """Whether layers' routers get the rows of the micro-batch that they run, also when they are computed again after
    the next one has run."""
    from models.attention.sequence_rows import MicroBatchRows
    from models.build import build_model
    from moe.layer import hand_rows_to_routers
    from parallel import topology
    from parallel.megatron.router import RouterRows

    config = make_config([*SIZES, "training.recompute=full", "moe.sequence_aux_loss_coeff=0.5"])
    chunks = build_model(config, topology.initialize(config), 256)
    hand_rows_to_routers(chunks)
    decoder, seen = chunks[0].decoder.train(), []
    for layer in decoder.layers:
        layer.mlp.router.register_forward_hook(lambda router, *_: seen.append((router.layer_number, router.token_rows)))
    # As two micro-batches in flight: both forward passes, then both backward passes.
    token_rows = [RouterRows(torch.arange(NUM_ROWS), SAMPLES, LENGTH) for _ in range(2)]
    outputs = []
    for of_batch in token_rows:
        tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
        packed = MicroBatchRows(tokens)
        packed.routed = of_batch  # type: ignore[attr-defined]
        hidden = torch.randn(LENGTH, SAMPLES, HIDDEN, requires_grad=True)
        outputs.append(decoder(hidden, None, rotary_pos_emb=None, packed_seq_params=packed))
    for output in outputs:
        output.sum().backward()
    numbers = list(range(1, LAYERS + 1))
    expected = [(number, of_batch) for of_batch in token_rows for number in numbers]
    expected += [(number, of_batch) for of_batch in token_rows for number in reversed(numbers)]
    same = [number == other and of is wanted for (number, of), (other, wanted) in zip(seen, expected, strict=True)]
    chunks[0].decoder.layers[0](hidden, None, packed_seq_params=MicroBatchRows(tokens))
    return [*same, decoder.layers[0].mlp.router.token_rows is None]


def test_each_call_has_its_own_rows() -> None:
    (found,) = distributed.run(_handed, 1)
    assert found == [True] * (4 * LAYERS + 1)


def test_rows_say_their_samples_and_turns() -> None:
    from parallel.megatron.router import RouterRows

    token_rows = RouterRows(torch.tensor([17, 0, 47, 16]), SAMPLES, LENGTH)
    assert token_rows.members.argmax(dim=0).tolist() == [1, 0, 2, 1] and token_rows.members.sum() == 4
    assert token_rows.global_order.tolist() == [1 * SAMPLES + 1, 0, 15 * SAMPLES + 2, 1]
