"""Context parallelism in the configuration: what it must divide, and who exchanges heads."""

from __future__ import annotations

import itertools

import pytest

from base.errors import ConfigError
from configs import derived
from configs.compose import compose
from configs.schema import Config
from configs.validate import validate
from tests.configs import advice

pytestmark = pytest.mark.fast

TINY, MOE, BERT = "experiment=gpt_tiny", "experiment=gpt_moe_tiny", "experiment=bert_tiny"
LATENT = ("model.attention=latent", "model.kv_lora_rank=32", "model.rotary_head_dim=8", "model.value_head_dim=16")

# overrides, world size, the field that the message starts with, what else it must say
BROKEN: list[tuple[list[str], int, str, str]] = [
    (["parallel.context=0"], 1, "parallel.context", "at least 1"),
    (["parallel.context=3"], 3, "parallel.context", "must divide training.micro_batch_size (2) * model.sequence_len"),
    (["parallel.context=3"], 3, "parallel.context", "model.sequence_length = 128. Try model.sequence_length=63."),
    (["parallel.context=3", "model.sequence_length=1"], 3, "parallel.context", "Try model.sequence_length=3."),
    (
        ["parallel=tp2_sp", "parallel.context=2", "model.sequence_length=63"],
        4,
        "parallel.context",
        "times parallel.tensor (2) must divide",
    ),
    (
        ["parallel.context=4", "parallel.context_heads=3"],
        4,
        "parallel.context_heads",
        "must divide parallel.context (4",
    ),
    (["parallel.context=8", "parallel.context_heads=8"], 8, "parallel.context_heads", "must divide 4, the query heads"),
    (
        ["parallel.context=6", "parallel.context_heads=2", "model.num_attention_heads=12", "model.num_query_groups=3"]
        + ["model.hidden_size=96", "model.sequence_length=96"],
        6,
        "parallel.context_heads",
        "must divide 3, its key heads, or be a multiple of that number. Try parallel.context_heads=1.",
    ),
    (
        ["parallel=tp2_sp", "parallel.context=4", "parallel.context_heads=4"],
        8,
        "parallel.context_heads",
        "must divide 2, the query heads of a tensor rank",
    ),
    (["parallel.context_heads=2"], 1, "parallel.context_heads", "if parallel.context is 1"),
    (
        ["parallel.context=2", "model.attention_dropout=0.1"],
        2,
        "model.attention_dropout",
        "model.attention_dropout=0.0",
    ),
    (["parallel.context=2"], 3, "world_size", "parallel.tensor * parallel.pipeline * parallel.context = 1 * 1 * 2 = 2"),
    (["parallel.context=2", "training.global_batch_size=7"], 4, "training.global_batch_size", "data-parallel size (2)"),
]


@pytest.mark.parametrize(("overrides", "world_size", "field", "said"), BROKEN)
def test_wrong_sizes(overrides: list[str], world_size: int, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(compose([TINY, *overrides]), world_size)
    message = str(caught.value)
    assert message.startswith(f"{field} (") and said in message, message
    tried = advice.split(message)[1]
    assert tried
    for fixes in tried:
        sizes = [int(fix.partition("=")[2]) for fix in fixes if fix.startswith("WORLD_SIZE")]
        validate(
            compose([TINY, *overrides, *(fix for fix in fixes if not fix.startswith("WORLD_SIZE"))]),
            (sizes or [world_size])[0],
        )


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_fewer_key_heads_than_ranks_are_replicated(heads: int, groups: int) -> None:
    words = ["parallel.context=4", f"parallel.context_heads={heads}", f"model.num_query_groups={groups}"]
    config = compose([TINY, *words])
    validate(config, 4)
    assert (derived.context_heads(config), derived.num_cp_ranks(config)) == (heads, 4 // heads)
    assert derived.rank_sequence_rows(config) * 4 == 2 * config.model.sequence_length


def sent(length: int, heads: int, groups: int, dim: int, context: int, ranks: int) -> float:
    """Return the elements that a rank sends for one sample of `length` tokens, counted by chunk: zig-zag over
    `context / ranks` groups, whose `ranks` exchange heads."""
    cp_size = context // ranks
    chunks = 2 * cp_size
    needed = 0  # pairs of a context rank and a chunk of another one to which some of its queries attend
    for cp_rank, chunk in itertools.product(range(cp_size), range(chunks)):
        needed += chunk not in (cp_rank, chunks - 1 - cp_rank) and chunk <= chunks - 1 - cp_rank
    ring = needed / cp_size * length / chunks * max(groups // ranks, 1) * 2 * dim
    each = length / context / ranks * (ranks - 1)  # rows times the fraction of heads that others compute
    return ring + each * (2 * heads * dim + 2 * max(groups, ranks) * dim)


@pytest.mark.parametrize("context", [2, 4, 8, 16])
@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16])
def test_the_chosen_heads_send_least(context: int, groups: int) -> None:
    words = ["model.num_attention_heads=16", "model.hidden_size=256", f"model.num_query_groups={groups}"]
    words += [f"parallel.context={context}", "training.micro_batch_size=1", "model.sequence_length=1024"]
    config = compose([TINY, *words])
    validate(config, context)
    by_heads = {n: sent(1024, 16, groups, 16, context, n) for n in (1, 2, 4, 8, 16) if context % n == 0}
    assert derived.context_heads(config) == min(by_heads, key=lambda n: (by_heads[n], n))


def test_what_is_chosen_is_allowed_and_one_where_nothing_is_joined() -> None:
    few = compose([TINY, "parallel.context=8", "training.micro_batch_size=1", "data.documents=separate"])
    assert derived.context_heads(few) == 1 and derived.num_cp_ranks(few) == 8
    for words in ((TINY,), (MOE,), (BERT,), (TINY, *LATENT), (TINY, "training.micro_batch_size=8")):
        config = compose([*words, "parallel.context=8"])
        assert derived.context_heads(config) in derived.allowed_context_heads(config)
    latent = compose([TINY, *LATENT, "parallel.context=4", "training.micro_batch_size=1"])
    validate(latent, 4)
    assert derived.context_heads(latent) == 1  # a latent is as wide for one head as for all
    whole = compose([TINY, "parallel.context=2", "training.micro_batch_size=2"])
    assert derived.context_heads(whole) == 1  # a sample for each place: nothing travels


@pytest.mark.parametrize("context", [1, 2, 4])
def test_tokens_of_a_call_are_a_ranks_rows(context: int) -> None:
    config = compose([MOE, f"parallel.context={context}"])
    validate(config, context)
    assert derived.tokens_per_call(config) == derived.rank_sequence_rows(config) == 128 // context


def test_the_defaults_share_nothing() -> None:
    assert derived.context_heads(Config()) == derived.num_cp_ranks(Config()) == 1
