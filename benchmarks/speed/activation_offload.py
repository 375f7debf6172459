"""What keeping layer inputs on the host saves on the device, and what it costs in time, on a virtual accelerator.

`python -m benchmarks.speed.activation_offload [--links 0.25 0.5 1] [--rounds 8] [--json] [--markdown]`

24 layers of width 512 with sequences of 1,024 tokens, fully recomputed, in one process. A layer takes the time that it
would take on an accelerator, without using a core; copies are real, and held to a rate in each direction (the link is
emulated). A link is the time of a layer input's copy by that of the layer's forward pass. In each round the passes of
a step run once with each budget, in turns, beside those without offload. Loss: 1 less the mean over rounds of their
paired ratio of throughputs, with its standard error; times are medians. What is on the device is counted. Where a copy
takes up to half of a layer's forward pass, the loss must stay below 2% plus two standard errors.

The largest batch is the plan's for a GPU in bf16: the most samples that fit into what a batch of 32 needs without
offload, weights and optimizer state included. With offload there must be at least 17.65% more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kit.accelerator import Clock
from benchmarks.kit.tables import table
from configs import derived
from configs.compose import compose
from configs.job import Job
from configs.schema import Config
from configs.validate import validate
from memory.layer_inputs import LayerInputs
from parallel import topology
from parallel.megatron.checkpoints import around_checkpoints
from simulator.layer_inputs import layer_inputs
from simulator.memory import rank_memory
from training.engine import Engine
from training.starting.dry_run import made_up_batches
from training.step import gradients

LAYERS, HIDDEN, LENGTH, VOCAB_SIZE = 24, 512, 1024, 512
MICRO_BATCHES = 2
FORWARD_SECONDS = 0.016  # of a layer and micro-batch; its backward pass takes twice as long
BUDGETS = (6, 12, 18, 24)  # layer inputs
LEAVES_TIME = 0.5
MOST_LOST, GROWS_BY = 0.02, 0.1765  # the second: arXiv 2609.14306, section 5
BATCH = 32
MIB = 2**20


def _config(*overrides: str) -> Config:
    config = compose(
        [
            "model=gpt_small",
            f"model.num_layers={LAYERS}",
            f"model.hidden_size={HIDDEN}",
            "model.num_attention_heads=8",
            "model.num_query_groups=null",
            f"model.sequence_length={LENGTH}",
            "training.recompute=full",
            *overrides,
        ]
    )
    validate(config, 1)
    return config


class _Pass(torch.autograd.Function):
    """Of a layer: its time, and a copy for a result."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, hidden: torch.Tensor) -> torch.Tensor:
        ctx.clock = clock
        clock.work(FORWARD_SECONDS)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, output_grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.clock.work(2 * FORWARD_SECONDS)
        return None, output_grad.clone()


class Rig:
    """An engine with virtual layers, and a store of layer inputs for each budget (None: no offload)."""

    def __init__(self) -> None:
        self.config = _config(
            "model.ffn_hidden_size=64",  # of weights that nobody uses
            "training.device=cpu",
            "training.micro_batch_size=1",
            f"training.global_batch_size={MICRO_BATCHES}",
            "parallel.overlap_grad_reduce=false",  # the layers' weights get no gradients
        )
        layout = topology.initialize(self.config)
        self.engine = Engine(self.config, layout, VOCAB_SIZE)
        self.batches = made_up_batches(self.config, MICRO_BATCHES, VOCAB_SIZE, seed=0)
        clock = Clock(1.0)  # its work is in seconds

        def forward(hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return _Pass.apply(clock, hidden_states), None

        (chunk,) = self.engine.bare_chunks
        for layer in chunk.decoder.layers:
            layer.forward = forward
        self.size = derived.layer_input_bytes(self.config)
        self.link = self.engine.host_link
        buffers = [torch.zeros(self.size, dtype=torch.uint8) for _ in range(max(BUDGETS))]
        self.stores = {number: LayerInputs(self.link, buffers[:number]) for number in BUDGETS}
        self._use(0)
        around_checkpoints(chunk, self._kept)

    def _use(self, budget: int) -> None:
        self.engine.layer_inputs = self.stores.get(budget)

    def _kept(self, is_within: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
        store = self.engine.layer_inputs
        return contextlib.nullcontext() if store is None else store.kept(0, is_within)

    def step(self, budget: int) -> float:
        """Seconds of the passes of a step."""
        self._use(budget)
        before = time.perf_counter()
        gradients(self.engine, self.batches, 1)
        return time.perf_counter() - before

    def device_peak(self, budget: int) -> int:
        """Bytes of layer inputs on the device, as the last step with this budget counted them."""
        return self.stores[budget].counts.device_peak if budget else LAYERS * self.size

    def measure(self, link: float, rounds: int) -> dict[int, list[float]]:
        """Seconds of each round's step, by budget."""
        self.link.up.rate = self.link.down.rate = self.size / (link * FORWARD_SECONDS)
        budgets = (0, *BUDGETS)
        seconds: dict[int, list[float]] = {budget: [] for budget in budgets}
        for number in range(-1, rounds):  # the first to warm up
            turn = number % len(budgets)
            for budget in budgets[turn:] + budgets[:turn]:
                taken = self.step(budget)
                if number >= 0:
                    seconds[budget].append(taken)
        return seconds

    def close(self) -> None:
        """End the threads."""
        self.engine.close()


def planned_peak(budget: int) -> int:
    """What the plan says for `Rig.device_peak`."""
    offload = budget * LENGTH * HIDDEN * 4 / MIB if budget else "none"
    config = _config(
        "training.micro_batch_size=1",
        f"training.global_batch_size={MICRO_BATCHES}",
        f"training.activation_offload={offload}",
    )
    return layer_inputs(config, 1, 0).device_peak


def _planned_bytes(batch: int, offload: str) -> int:
    sizes = f"training.micro_batch_size={batch}", f"training.global_batch_size={batch}"
    config = _config("training.precision=bf16", *sizes, f"training.activation_offload={offload}")
    return rank_memory(Job(config, 1, VOCAB_SIZE, "cuda"))[0].total


def largest_batch(limit: int, offload: str) -> int:
    """The most samples that the plan sees fit into `limit` bytes of a GPU."""
    batch = BATCH
    while _planned_bytes(batch + 1, offload) <= limit:
        batch += 1
    return batch


def _row(rig: Rig, link: float, budget: int, seconds: dict[int, list[float]]) -> dict[str, float]:
    ratios = [base / own for base, own in zip(seconds[0], seconds[budget], strict=True)]
    return {
        "link": link,
        "budget": budget,
        "host_bytes": budget * rig.size,
        "device_peak": rig.device_peak(budget),
        "planned_peak": planned_peak(budget),
        "seconds": statistics.median(seconds[budget]),
        "loss": 1 - statistics.mean(ratios),
        "standard_error": statistics.stdev(ratios) / math.sqrt(len(ratios)),
    }


def _cells(row: dict[str, float]) -> list[str]:
    return [
        f"{row['link']:g}",
        f"{row['budget']:.0f} of {LAYERS}",
        f"{row['host_bytes'] / MIB:.0f}",
        f"{row['device_peak'] / MIB:.0f}",
        f"{row['planned_peak'] / MIB:.0f}",
        f"{1000 * row['seconds']:.1f}",
        f"{100 * row['loss']:.2f}%" if row["budget"] else "",
        f"{100 * row['standard_error']:.2f}%" if row["budget"] else "",
    ]


def _wrong(results: list[dict[str, float]], growth: float) -> list[str]:
    wrong = []
    for row in results:
        case = f"link {row['link']:g}, budget {row['budget']:.0f}"
        if row["device_peak"] != row["planned_peak"]:
            wrong.append(f"{case}: the plan counts {row['planned_peak']:.0f} bytes")
        if row["link"] <= LEAVES_TIME and row["loss"] > MOST_LOST + 2 * row["standard_error"]:
            wrong.append(f"{case}: loses {row['loss']:.1%}")
    peaks = [row["device_peak"] for row in results[: 1 + len(BUDGETS)]]
    if sorted(set(peaks), reverse=True) != peaks:
        wrong.append(f"peaks {peaks} do not fall with each step of the budget")
    if growth < GROWS_BY:
        wrong.append(f"the largest batch grows by {growth:.1%}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--links", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="copy by forward pass")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rig, results = Rig(), []
    for link in options.links:
        seconds = rig.measure(link, options.rounds)
        results += [_row(rig, link, budget, seconds) for budget in (0, *BUDGETS)]
    rig.close()
    topology.destroy()
    headings = ["link", "budget", "host MiB", "device peak MiB", "planned", "passes ms", "loss", "standard error"]
    print(
        f"Virtual accelerator, emulated link, {options.rounds} paired rounds; {MICRO_BATCHES} micro-batches a step.\n"
    )
    print(table(headings, [_cells(row) for row in results], options.markdown))
    limit = _planned_bytes(BATCH, "none")
    grown = largest_batch(limit, "auto")
    growth = grown / BATCH - 1
    print(
        f"\nLargest batch in {limit / 2**30:.2f} GiB of a GPU (plan, bf16, all inputs of layers on the host): "
        f"{grown} instead of {BATCH}, {100 * growth:.1f}% more."
    )
    wrong = _wrong(results, growth)
    print("\n".join(wrong) if wrong else "Within all bars.")
    if options.json:
        print(json.dumps({"rows": results, "limit": limit, "batch": BATCH, "largest_batch": grown, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
