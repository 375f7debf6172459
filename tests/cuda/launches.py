"""What a GPU is told to do for an MoE layer and a micro-batch, by place: `python -m tests.cuda.launches` prints it.

The step's launches divided by layers and micro-batches, so attention, loss and the optimizer's share are in it. What is
compiled for a GPU, norms and attention count as the kernels that CUDA has for them; an exchange is none.
"""

from __future__ import annotations

from collections import Counter

from tests import distributed
from tests.cuda import runs

NUM_LAYERS, RANKS = 4, 2
DEGREES = (1, 4)  # chunks of both passes
# By the number of chunks; what there was before is in benchmarks/results/launches.md.
LAUNCHES = {1: 206.25, 4: 315.25}
# Flash attention's over documents that stay apart, of a layer and a micro-batch and each way, whatever their number; by
# the sliding window.
OF_ATTENTION = {"null": 1, "8": 3}


def measure(degree: int) -> Counter[str]:
    """Of one rank's step, by place."""
    overrides = (
        "model=gpt_moe_tiny",
        f"model.num_layers={NUM_LAYERS}",
        f"parallel.expert={RANKS}",
        "training.precision=bf16",
        "moe.memory_strategy=keep",
        f"moe.pipeline_degree={degree}",
        f"moe.backward_pipeline_degree={degree}",
    )
    return distributed.run(runs.train, RANKS, "cuda", overrides, backend=distributed.PRETENDED)[0].launches


def measure_attention(window: str) -> list[float]:
    """Of a layer and a micro-batch: the kernels of a forward and of a backward pass over documents apart."""
    overrides = (
        *("model=gpt_tiny", f"model.num_layers={NUM_LAYERS}", "training.precision=bf16"),
        *("data.documents=separate", f"model.sliding_window={window}"),
    )
    found = distributed.run(runs.train, RANKS, "cuda", overrides, backend=distributed.PRETENDED)[0].launches
    return [per_layer(found)[f"models/attention/kernels.py:launch_{way}"] for way in ("forward", "backward")]


def per_layer(launches: Counter[str]) -> dict[str, float]:
    """By layer and micro-batch."""
    micro_batches = 8 // 2 // RANKS  # see runs.COMMON
    return {call_site: count / (NUM_LAYERS * micro_batches) for call_site, count in launches.items()}


def main() -> None:
    """Print the table as Markdown."""
    by_degree = [per_layer(measure(degree)) for degree in DEGREES]
    print("| place | one chunk | four chunks |\n|---|---|---|")
    print(f"| all | {' | '.join(f'{sum(each.values()):g}' for each in by_degree)} |")
    call_sites = sorted(
        {call_site for each in by_degree for call_site in each}, key=lambda call_site: -by_degree[0].get(call_site, 0)
    )
    for call_site in call_sites:
        print(f"| {call_site} | {' | '.join(f'{each.get(call_site, 0):g}' for each in by_degree)} |")


if __name__ == "__main__":
    main()
