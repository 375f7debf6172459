"""Apertus' published pairs of experts on the device and experts streamed from the host, ordered by prediction.

    python -m benchmarks.speed.apertus_order [--markdown]

Theirs are four layers on 32 GH200 in one sequence of 4,096 tokens by 2; the sizes are in why-offloading-experts.md of
FFGGSSJJ/moe_model_architecture, those of 27B in offload-experts.md. Their trainer fetches each layer's experts in the
forward and again in the backward pass, in chunks beside the grouped products of that layer alone; gradients and
optimizer state stay on the device; a token travels once for each of its experts. It is modelled so, with the figures of
configs/hardware/gh200.yaml as they are. Nothing was fitted to these rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from benchmarks.kit.facts import APERTUS, OFF, keys
from benchmarks.kit.tables import table
from configs import derived
from configs.compose import compose
from configs.job import Job
from configs.schema import Config
from configs.validate import validate
from simulator.clock.experts import ExpertCalls
from simulator.clock.hardware import load_hardware
from simulator.clock.passes import BlockSeconds, Reasons
from simulator.clock.predict import StepClock
from simulator.clock.stages import rates

RANKS = 32
SAMPLES = 1024  # of a step
FETCHED = 16  # experts of a chunk of weights
CHUNKS = 4  # of a call, where exchanges go on beside products
# What the source does not print.
TAKEN = (
    f"{SAMPLES:,} samples a step, the batch of Apertus 8B as remembered; a vocabulary of 131,072; nothing is computed "
    "again; heads of 32 channels, by hidden size over heads; experts' products in bf16 also where theirs were in FP8; "
    f"exchanges beside products in {CHUNKS} chunks of a call, theirs between halves of a micro-batch; weights come in "
    f"chunks of {FETCHED} experts, as in their test of the link, of which the first is waited for"
)


@dataclass(frozen=True)
class ApertusRun:
    """A published throughput. `overlap`: exchanges of experts' tokens go on beside products; `streamed`: weights come
    from the host."""

    model: str
    experts: int
    top_k: int
    expert: int  # parallel.expert
    published: float  # tokens/s/GPU
    tensor: int = 4
    overlap: bool = False
    streamed: bool = False
    fp8: bool = False

    @property
    def name(self) -> str:
        """Description of the layout."""
        words = [f"EP{self.expert}"] + ["overlap"] * self.overlap + ["streamed"] * self.streamed + ["FP8"] * self.fp8
        return ", ".join(words)

    def config(self) -> Config:
        """Return the config, checked for the ranks, with its experts on the device. Raises ConfigError."""
        overrides = keys(
            model__num_layers=4,
            model__hidden_size=4096,
            model__ffn_hidden_size=16384,
            model__num_attention_heads=128,
            model__num_query_groups=128,
            model__vocab_size=131072,
            model__sequence_length=4096,
            moe__num_experts=self.experts,
            moe__top_k=self.top_k,
            moe__ffn_hidden_size=2048,
            moe__shared_expert_ffn_hidden_size=2048,
            moe__pipeline_degree=CHUNKS if self.overlap else 1,
            parallel__tensor=self.tensor,
            parallel__sequence="true",
            parallel__expert=self.expert,
            training__micro_batch_size=2,
            training__global_batch_size=SAMPLES,
            training__recompute="none",
        )
        config = compose(["model=mixtral_8x7b", *OFF, *overrides])
        validate(config, RANKS)
        return config


A7B, A4B, A2B, A3B = ("46B-A7B", 448, 56), ("46B-A4B", 448, 28), ("46B-A2B", 448, 14), ("27B-A3B", 256, 16)
PAIRS = [  # streamed, then resident
    (ApertusRun(*A7B, 4, 7400, streamed=True, fp8=True), ApertusRun(*A7B, 8, 5100, overlap=True)),
    (ApertusRun(*A4B, 4, 8700, streamed=True), ApertusRun(*A4B, 8, 9400, overlap=True)),
    (ApertusRun(*A4B, 4, 8700, streamed=True), ApertusRun(*A4B, 8, 6830)),
    (ApertusRun(*A4B, 4, 8700, streamed=True), ApertusRun(*A4B, 16, 5790, overlap=True)),
    (ApertusRun(*A2B, 4, 12000, streamed=True, fp8=True), ApertusRun(*A2B, 8, 16100, overlap=True)),
    (ApertusRun(*A2B, 4, 12000, streamed=True, fp8=True), ApertusRun(*A2B, 16, 10900, overlap=True)),
    (ApertusRun(*A2B, 8, 15000, overlap=True, streamed=True, fp8=True), ApertusRun(*A2B, 8, 16100, overlap=True)),
    (ApertusRun(*A3B, 4, 17000, tensor=2, streamed=True), ApertusRun(*A3B, 4, 18100, tensor=2)),
]


class ApertusClock(StepClock):
    """A step of their trainer, whose exchanges send a row for each token and expert."""

    @cached_property
    def _expert_calls(self) -> ExpertCalls:
        calls = super()._expert_calls
        load, ranks = calls.load, self.config.parallel.expert
        away_rows = load.assignments * (ranks - 1) // ranks
        calls.load = replace(load, token_rows=load.assignments, away_rows=away_rows)
        return calls


class ChunkedClock(ApertusClock):
    """The same with weights of MoE layers that are copied from the host during the products of their own layer."""

    def _block(self, name: tuple[Any, ...], stage: int) -> BlockSeconds:
        seconds = super()._block(name, stage)
        work = self._work(name)
        if not work.forward.moe:
            return seconds
        calls = self._expert_calls.of(work, stage)
        numbers = (self.config.moe.num_experts or 0) // self.config.parallel.expert * derived.expert_numel(self.config)
        coming = numbers * derived.element_size(self.config) / rates(self.hardware, self.job.world_size).up
        forward, backward = Reasons(seconds.forward), Reasons(seconds.backward)
        first = coming * min(1.0, FETCHED * self.config.parallel.expert / (self.config.moe.num_experts or 1))
        for reasons, call in zip((forward, backward), calls, strict=True):
            reasons["host_link"] += first + max(0.0, coming - first - call["products"])
        return BlockSeconds(forward, backward)


def predicted(run: ApertusRun) -> float:
    """Return the predicted tokens per second and GPU."""
    config, machine = run.config(), load_hardware("gh200")
    kind = ChunkedClock if run.streamed else ApertusClock
    job = Job(config, RANKS, config.model.vocab_size or 0, machine.kind)
    seconds = kind(job, machine).predict().seconds
    return config.training.global_batch_size * config.model.sequence_length / seconds / RANKS


@dataclass(frozen=True)
class OrderedPair:
    """A pair with its predictions."""

    streamed: ApertusRun
    resident: ApertusRun
    predicted: tuple[float, float]

    @property
    def ratios(self) -> tuple[float, float]:
        """Ratio of streamed to resident throughput: published, predicted."""
        return self.streamed.published / self.resident.published, self.predicted[0] / self.predicted[1]

    @property
    def is_ordered(self) -> bool:
        """Whether the same run of the pair is faster in both."""
        return (self.ratios[0] > 1) == (self.ratios[1] > 1)


def ordered_pairs(pairs: Sequence[tuple[ApertusRun, ApertusRun]] = PAIRS) -> list[OrderedPair]:
    """Return every pair with its predictions."""
    return [OrderedPair(one, two, (predicted(one), predicted(two))) for one, two in pairs]


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.speed.apertus_order", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    found = ordered_pairs()
    headings = ["model", "streamed", "resident", "published", "ratio", "predicted", "ratio predicted", "as published"]
    table_rows = [
        [
            pair.streamed.model,
            pair.streamed.name,
            pair.resident.name,
            f"{pair.streamed.published:,.0f} / {pair.resident.published:,.0f}",
            f"{pair.ratios[0]:.2f}",
            f"{pair.predicted[0]:,.0f} / {pair.predicted[1]:,.0f}",
            f"{pair.ratios[1]:.2f}",
            "yes" if pair.is_ordered else "no",
        ]
        for pair in found
    ]
    print(table(headings, table_rows, options.markdown))
    worst = max(abs(pair.ratios[1] / pair.ratios[0] - 1) for pair in found)
    mean = sum(abs(pair.ratios[1] / pair.ratios[0] - 1) for pair in found) / len(found)
    print(f"\n{sum(pair.is_ordered for pair in found)} of {len(found)} pairs ordered as published")
    print(f"ratios: mean error {mean:.0%}, at most {worst:.0%}")
    print(f"tokens/s/GPU; source: {APERTUS}\ntaken: {TAKEN}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
