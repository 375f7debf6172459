"""Plans of sequences that context ranks share, counted again row by row, tensor by tensor."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from base.errors import ConfigError
from benchmarks.speed.plan_accuracy import CONTEXT_CASES, Case, compare
from configs.compose import compose
from configs.job import Job
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import walk
from simulator import communication
from simulator.buffers import buffers
from simulator.context.context_sizes import attention_flops, context_sizes, layer_exchange, layouts
from simulator.context.shared_rows import shard_sequence, shared_rows
from simulator.flops import executed_flops_per_token
from simulator.parameters import rank_coordinates, state_ranks
from simulator.run_plan import RunPlan, make_plan, refuse_what_cannot_fit
from simulator.sizes import Sizes
from simulator.text import describe_context, text
from tests.training.helpers import make_config

LENGTH, VOCAB_SIZE = 1024, 1000
LATENT = [
    f"model.{key}"
    for key in (
        *("attention=latent", "num_query_groups=null", "kv_lora_rank=64"),
        *("head_dim=32", "rotary_head_dim=16", "value_head_dim=24"),
    )
]


def config_of(*overrides: str, experiment: str = "gpt_small") -> Config:
    """8 heads of 64 channels."""
    sizes = [f"model.sequence_length={LENGTH}", "training.micro_batch_size=2", "training.global_batch_size=8"]
    return compose([f"experiment={experiment}", "training.device=cpu", *sizes, *overrides])


def plan_of(ranks: int, *overrides: str, **more: Any) -> RunPlan:
    return make_plan(Job(config_of(*overrides), ranks, VOCAB_SIZE, "cpu"), **more)


# ---------------------------------------------------------------------------------------------------------------------
# Rows, ranks
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("lengths", [[64, 64], [128], [63, 1, 30, 20, 14]], ids=["samples", "one", "mixed"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_rows_that_ranks_receive_are_those_they_attend_to(family: str, lengths: list[int], cp_size: int) -> None:
    config = config_of(
        f"parallel.context={cp_size}",
        "parallel.context_heads=1",
        "model.sequence_length=64",
        experiment="gpt_small" if family == "gpt" else "bert_small",
    )
    segments, tokens = np.array(lengths), sum(lengths)
    found = shard_sequence(segments, cp_size, keys=None if family == "gpt" else segments)
    begin = np.repeat(np.cumsum(segments) - segments, segments)
    last = np.arange(tokens) + 1 if family == "gpt" else begin + np.repeat(segments, segments)
    owner = np.full(tokens, -1)
    for cp_rank, first, length in zip(found.cp_rank, found.first, found.length, strict=True):
        assert (owner[first : first + length] == -1).all()
        owner[first : first + length] = cp_rank
    needed = []
    for cp_rank in range(cp_size):
        keys = {key for row in np.flatnonzero(owner == cp_rank) for key in range(begin[row], last[row])}
        needed.append(len(keys - set(np.flatnonzero(owner == cp_rank).tolist())))
    shared = shared_rows(config, [lengths])
    assert shared.received == tuple(needed) and shared.is_known
    assert (
        shared.rows == tokens / cp_size
        and shared.rounds > math.ceil(max(needed) / shared.rows)
        and shared.round_rows <= shared.rows
    )
    pairs = int((last - begin).sum())
    # Kernels take squares whole; of causal ones they skip what other slices have.
    assert 1.0 == shared.squares if family == "bert" else pairs / (segments**2).sum() < shared.squares <= 1.0


def test_a_rank_exchanges_nothing_with_itself() -> None:
    shared = shared_rows(config_of("parallel.context=4", "parallel.context_heads=4"))
    assert (shared.places, shared.received, shared.rounds, shared.squares) == (1, (0.0,), 1, 1.0)
    alone = shared_rows(config_of())
    assert (alone.context, alone.heads, alone.rows, alone.received) == (1, 1, 2 * LENGTH, (0.0,))


def test_documents_that_stay_whole_exchange_less() -> None:
    config = config_of("parallel.context=2", "parallel.context_heads=1", "data.documents=separate")
    unknown = shared_rows(config)
    assert not unknown.is_known
    known = [shared_rows(config, [lengths]) for lengths in ([2048], [1500, 548], [1024, 600, 424])]
    sent = [sum(each.received) for each in known]
    assert all(each.is_known for each in known) and sent[0] >= sent[1] >= sent[2] and sent[0] > 512


def test_ranks_of_a_group_have_their_order() -> None:
    config = config_of("parallel.context=2", "parallel.tensor=2")
    found = [(each.tensor, each.context, each.data, each.data_context) for each in rank_coordinates(config, 8)]
    assert found == [(rank % 2, rank // 2 % 2, rank // 4, rank // 2) for rank in range(8)]


def test_state_is_spread_over_context_ranks_too() -> None:
    plain, shared = config_of(), config_of("parallel.context=2")
    assert state_ranks(plain, 4) == state_ranks(shared, 4) == {"dense": 4, "expert": 4}
    assert buffers(Job(plain, 4, VOCAB_SIZE, "cpu"), 0) == buffers(Job(shared, 4, VOCAB_SIZE, "cpu"), 0)
    both = [make_plan(Job(config, 4, VOCAB_SIZE, "cpu")) for config in (plain, shared)]
    for kind in ("weights", "gradients", "optimizer"):
        assert [getattr(rank, kind) for rank in both[0].memory] == [getattr(rank, kind) for rank in both[1].memory]
    assert both[1].micro_batches == 2 * both[0].micro_batches
    for kind in ("gradient_reduction", "parameter_gather"):
        assert both[0].communication[0][kind] == both[1].communication[0][kind] > 0


# ---------------------------------------------------------------------------------------------------------------------
# Bytes and operations
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "query", "key", "value", "key_heads"),
    [
        ([], 64, 64, 64, 8),
        (["model.num_query_groups=2"], 64, 64, 64, 2),
        (["model.num_query_groups=1"], 64, 64, 64, 1),
        (LATENT, 48, 48, 24, 8),
    ],
    ids=["every", "grouped", "one", "latent"],
)
@pytest.mark.parametrize(("context", "heads"), [(2, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_exchanged_bytes(
    overrides: list[str], query: int, key: int, value: int, key_heads: int, context: int, heads: int, recompute: str
) -> None:
    layout = [f"parallel.context={context}", f"parallel.context_heads={heads}", f"training.recompute={recompute}"]
    config = config_of(*layout, *overrides)
    shared, element = shared_rows(config), 4
    rank_rows = 2 * LENGTH // context
    passes = 2 + (recompute != "none")
    # To each other rank of its cp_rank: the rows of this rank with its heads, and the same back, also as gradients.
    of_keys = max(1, key_heads // heads) * (key + value)
    if overrides == LATENT:  # latents and rotated rotary keys, whole
        of_keys = 64 + 16
    own = 8 // heads * (query + value) + of_keys
    sent = layer_exchange(config, shared)
    assert sent["heads"] == passes * (heads - 1) * rank_rows * own * element
    received = sum(shared.received) / shared.places
    # keys and values with each pass, and their gradients once
    assert sent["rounds"] == (passes + 1) * received * of_keys * element
    step = communication.bytes_per_step(Job(config, context, VOCAB_SIZE, "cpu"))[0]
    calls = config.model.num_layers * 4  # micro-batches
    assert step["context_exchange"] == calls * sum(sent.values())


def test_tensor_ranks_share_heads_first() -> None:
    layout = ["parallel.context=4", "parallel.context_heads=2", "model.num_query_groups=4"]
    config = config_of("parallel.tensor=2", *layout)
    shared = shared_rows(config)
    assert (shared.heads, shared.places) == (2, 2)
    whole = config_of(*layout)
    sharded, every = layer_exchange(config, shared), layer_exchange(whole, shared_rows(whole))
    assert {kind: 2 * number for kind, number in sharded.items()} == every


def test_other_axes_move_the_rows_of_a_rank() -> None:
    layout = ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "training.global_batch_size=16"]
    sent = [
        make_plan(Job(config_of(*layout, f"parallel.context={context}"), 16, VOCAB_SIZE, "cpu")) for context in (1, 2)
    ]
    for before, after in zip(*(plan.communication for plan in sent), strict=True):
        for kind in ("tensor_parallel", "pipeline", "gradient_reduction", "parameter_gather"):
            assert before[kind] == after[kind] > 0  # half the rows in twice as many micro-batches


def test_operations_are_spread_evenly() -> None:
    plain, shared = config_of(), config_of("parallel.context=4", "parallel.context_heads=1")
    assert attention_flops(shared) == attention_flops(plain) / 4
    executed = [executed_flops_per_token(config, VOCAB_SIZE, "cpu") for config in (plain, shared)]
    (attention,) = (
        operation for operation, _ in walk(blueprint.layer(plain, False).operations) if operation.kind == "attention"
    )
    scores = 3.5 * attention.flops * plain.model.num_layers
    squares = shared_rows(shared).squares
    assert 0.5 < squares < 0.75 and executed[0] - executed[1] == pytest.approx(scores * (1 - squares))
    separate = plan_of(4, "parallel.context=4", "data.documents=separate", attended_share=0.25, documents=[[256] * 8])
    assert separate.shared.is_known and separate.as_dict()["flops_per_token"] < plan_of(4).as_dict()["flops_per_token"]


@pytest.mark.parametrize("case", CONTEXT_CASES, ids=lambda case: f"{case.preset} {case.layout}")
def test_cases_that_are_measured_can_be_planned(case: Case) -> None:
    config = make_config([f"experiment={case.preset}", "training.device=cpu", *case.overrides], case.ranks)
    plan = make_plan(Job(config, case.ranks, VOCAB_SIZE, "cpu"))
    for stage, chunks in enumerate(blueprint.model_chunks(config)):
        calls = sum(len(chunk.layers) for chunk in chunks) * plan.micro_batches
        sent = sum(layer_exchange(config, plan.shared).values())
        assert plan.communication[stage]["context_exchange"] == calls * sent > 0


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


def test_tensors_have_a_ranks_rows() -> None:
    sizes = Sizes(config_of("parallel.context=4", "parallel.context_heads=2"))
    assert (sizes.tokens, sizes.own_tokens, sizes.exchanged_tokens) == (LENGTH // 2, LENGTH // 2, LENGTH)
    split = Sizes(config_of("parallel.context=2", "parallel.tensor=2", "parallel.sequence=true"))
    assert (split.tokens, split.own_tokens) == (LENGTH, LENGTH // 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("heads", ["1", "null"])
def test_memory_follows_the_rows_of_a_rank(device: str, heads: str) -> None:
    """The memory of a rank without its state stays the same if samples and context grow alike."""
    layout = [f"parallel.context_heads={heads}", "training.micro_batch_size=1", "training.global_batch_size=1"]
    needs = []
    for context in (2, 4, 8):
        overrides = [*layout, f"parallel.context={context}", f"model.sequence_length={context * 4096}"]
        needs.append(make_plan(Job(config_of(*overrides), context, VOCAB_SIZE, device)).worst.activations)
    exponents = np.diff(np.log(needs)) / math.log(2)
    assert (abs(exponents) < 0.1).all(), needs  # how many exchange heads differs
    whole = make_plan(
        Job(config_of(*layout[1:], "model.sequence_length=32768"), 1, VOCAB_SIZE, device)
    ).worst.activations
    assert 6 < whole / needs[-1] < 9


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", [[], ["model.num_query_groups=2"], LATENT], ids=["every", "grouped", "latent"])
def test_rounds_and_heads_take_buffers(recompute: str, attention: list[str]) -> None:
    layout = ["parallel.context=4", f"training.recompute={recompute}", "training.token_tile=64", *attention]
    every = [config_of(*layout, f"parallel.context_heads={heads}") for heads in (1, 2, 4)]
    needs = [make_plan(Job(config, 4, VOCAB_SIZE, "cuda")).worst.activations for config in every]
    short = config_of(*layout[1:], "model.sequence_length=256")
    alone = make_plan(Job(short, 1, VOCAB_SIZE, "cuda")).worst.activations
    least = 0 if attention == LATENT else alone  # keys and values that are made of latents are not kept
    assert all(least < need < 2 * alone for need in needs), (needs, alone)


def test_a_step_takes_what_the_plan_says() -> None:
    """With tiles, and a window in some layers."""
    sizes = ("model.sequence_length=1024", "training.micro_batch_size=1", "training.global_batch_size=2")
    layout = ("parallel.context=2", "parallel.context_heads=1", "optimizer.distributed=false")
    windows = ("model.sliding_window=64", "model.sliding_window_from=1")
    tiles = ("training.recompute=full", "training.token_tile=128", "model.ffn_hidden_size=1024")
    result = compare(Case("gpt_tiny", "", 2, (*sizes, *layout, *windows, *tiles)))
    assert result["passed"], result
    assert result["exchanged"]["planned"] > 0


# ---------------------------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------------------------


def test_a_plan_says_which_size_pays() -> None:
    long = ["training.micro_batch_size=1", "training.global_batch_size=4", f"model.sequence_length={2 * LENGTH}"]
    plan = plan_of(8, "parallel.context=4", "parallel.context_heads=2", "model.num_query_groups=2", *long)
    words = describe_context(plan)
    assert words in text(plan) and "x context 4 x tensor 1" in text(plan)
    assert "Context: 4 ranks share 2,048 rows of a micro-batch, 512 each" in words
    assert "in 2 group(s) of 2" in words and "attention takes up to 2 round(s)" in words
    sizes = context_sizes(plan.job)
    assert [each.context for each in sizes] == [2, 4, 8]  # 8 data ranks would want 8 samples a step
    assert sizes[0].memory > sizes[1].memory > sizes[2].memory and sizes[0].ratio < sizes[1].ratio < sizes[2].ratio
    assert sizes[1].memory == plan.worst.total and "parallel.context=2 pays most: no other exchanges less" in words
    as_json = json.loads(json.dumps(plan.as_dict()))["context"]
    assert as_json["places"] == 2 and sum(as_json["sent_in_a_layer"].values()) == sizes[1].sent
    plan.job.config.training.memory_limit_gib = (sizes[1].memory + sizes[2].memory) / 2**31
    limited = make_plan(plan.job)
    assert "parallel.context=8 pays most: no other that fits" in describe_context(limited)
    assert "this plan, does not fit" in describe_context(limited)


def test_a_plan_of_short_samples_has_no_word_of_context() -> None:
    assert describe_context(plan_of(4)) == "" and "Context" not in text(plan_of(4))
    long = make_plan(Job(config_of("model.sequence_length=32768"), 4, VOCAB_SIZE, "cuda"))
    assert "parallel.context" in describe_context(long)


def test_a_plan_says_whose_lengths_it_knows() -> None:
    overrides = ["parallel.context=2", "parallel.context_heads=1", "data.documents=separate"]
    overrides.append("training.micro_batch_size=1")
    assert "were samples of one document" in describe_context(plan_of(2, *overrides))
    known = plan_of(2, *overrides, attended_share=0.4, documents=[[700, 324]])
    assert "by the documents' lengths" in describe_context(known)


def test_what_does_not_fit_is_refused_with_more_ranks_for_a_sequence() -> None:
    overrides = ["training.micro_batch_size=1", "training.recompute=full", "model.sequence_length=8192"]
    plan = plan_of(4, *overrides, "training.global_batch_size=8", "parallel.overlap_grad_reduce=false")
    plan.job.config.training.memory_limit_gib = 0.75 * plan.worst.total / 2**30
    with pytest.raises(ConfigError, match=r"Try parallel\.context=2 \(") as refusal:
        refuse_what_cannot_fit(plan)
    plan.job.config.parallel.context = int(str(refusal.value).partition("parallel.context=")[2][0])
    refuse_what_cannot_fit(make_plan(plan.job))
    assert [each.parallel.context for each in layouts(plan.job.config, 4)] == [1, 2, 4]
