"""The longest sample that devices hold, by their memory, as planned: python -m benchmarks.speed.longest_planned
[--json] [--markdown].

With all keys of the guide to long context: full recomputation, layer inputs and optimizer state on the host, tokens in
tiles of 2,048, experts' exchange in chunks of at most 4,096, and as many context ranks as there are devices, over all
of which experts are spread. As many of them exchange heads as needs least memory. One sample of one document is a
micro-batch, in bf16. Nothing runs but the plan, of which a tenth of the device is left to libraries and gaps, as
`plan=true` leaves it; the host has what it needs, which is printed: GiB of one rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import asdict, dataclass

from benchmarks.kit.tables import table
from configs.compose import compose
from configs.derived import allowed_context_heads
from configs.job import Job
from configs.schema import Config
from configs.validate import validate
from simulator.memory import RankMemory, rank_memory
from simulator.run_plan import TOLERANCE

GIB = 2**30
DEVICES = (16, 24, 40, 80, 141)  # GiB
CONTEXTS = (1, 2, 4, 8)
STEP, MOST = 2**12, 2**26  # tokens: lengths are multiples of the first and end at the second
MODELS: dict[str, tuple[str, ...]] = {
    "1B GPT": (
        *("experiment=llama3_8b", "model.num_layers=16", "model.hidden_size=2048", "model.ffn_hidden_size=8192"),
        *("model.num_attention_heads=32", "model.num_query_groups=8", "model.tie_embeddings=true"),
    ),
    "llama3_8b": ("experiment=llama3_8b",),
    "qwen3_30b_a3b": ("experiment=qwen3_30b_a3b", "moe.token_budget=4096"),
}
RECIPE = (
    *("training.device=cuda", "model.backend=portable", "logging.wandb=off", "training.precision=bf16"),
    *("training.micro_batch_size=1", "training.global_batch_size=1"),
    *("parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=1"),
    *("training.recompute=full", "training.activation_offload=auto", "training.token_tile=2048"),
    "optimizer.state_device=host",
)


@dataclass(frozen=True)
class LongestSample:
    """Tokens of the longest sample, 0 where none fits; bytes of the fullest rank, and of its host."""

    model: str
    context: int
    heads: int  # parallel.context_heads
    device: int  # GiB
    tokens: int
    total: int
    host: int


def config_of(model: str, context: int, heads: int | None, tokens: int) -> Config:
    """Return the checked config. Raises ConfigError if the layout breaks a rule."""
    layout = [f"parallel.context={context}", f"model.sequence_length={tokens}"]
    layout.append(f"parallel.context_heads={heads or 'null'}")
    layout += [f"parallel.expert={context}"] if "qwen3" in model else []
    config = compose([*MODELS[model], *RECIPE, *layout])
    validate(config, context)
    return config


@functools.cache
def need(model: str, context: int, heads: int | None, tokens: int) -> RankMemory:
    """Return the memory of the fullest rank."""
    config = config_of(model, context, heads, tokens)
    assert config.model.vocab_size is not None
    return max(rank_memory(Job(config, context, config.model.vocab_size, "cuda")), key=lambda rank: rank.total)


@functools.cache
def best_heads(model: str, context: int) -> int | None:
    """Return the number of context ranks that exchange heads with which a long sample needs least memory; the smallest
    of equals."""
    if context == 1:
        return None
    tokens = context * 2**19
    allowed = allowed_context_heads(config_of(model, context, None, tokens))
    return min(allowed, key=lambda heads: need(model, context, heads, tokens).total)


def longest(model: str, context: int, device: int) -> LongestSample:
    """Return the longest sample, by bisection: the memory of a rank grows with the sample."""
    capacity = (1 - TOLERANCE) * device * GIB
    heads = best_heads(model, context)
    low, high = 0, MOST // STEP
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if need(model, context, heads, middle * STEP).total <= capacity else (low, middle)
    if not low:
        return LongestSample(model, context, heads or 1, device, 0, 0, 0)
    found = need(model, context, heads, low * STEP)
    return LongestSample(model, context, heads or 1, device, low * STEP, found.total, found.host)


def cell(of: LongestSample) -> str:
    """Return thousands of tokens, and GiB of the host."""
    return f"{of.tokens // 1024:,}k ({of.host / GIB:,.0f})" if of.tokens else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    found = {
        (model, context): [longest(model, context, device) for device in DEVICES]
        for model in MODELS
        for context in CONTEXTS
    }
    print("Planned: k (1,024) tokens of the longest sample, and of one rank's host GiB.\n")
    headings = ["model", "context ranks", "context heads", *(f"{device} GiB" for device in DEVICES)]
    table_rows = [[model, str(context), str(of[0].heads), *map(cell, of)] for (model, context), of in found.items()]
    print(table(headings, table_rows, arguments.markdown))
    if arguments.json:
        print(json.dumps([asdict(each) for samples in found.values() for each in samples]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
