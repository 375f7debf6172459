"""Measure the seconds that a generation waits for experts, with and without prefetch of the next layer's predicted
ones: `python -m benchmarks.speed.expert_waits [--cases NAME ...] [--rounds 5] [--tokens 48] [--markdown] [--json]`.

Models are made (benchmarks/kit/made_models.py) of random weights whose routing differs from token to token; there are
slots for a fraction of the experts. Each round opens the model with and without prefetch, in alternating order,
generates once to fill the slots, and measures the next generation. "Waited" are the seconds that passes waited for
experts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from base.units import MIB
from benchmarks.kit.ring_rig import make_models, models_folder
from benchmarks.kit.tables import headline, line
from inference.generation import Sampling, generate
from inference.open_model import open_model
from inference.weights.file_weights import FileWeights


@dataclass(frozen=True)
class WaitCase:
    """A generation: a made model, the share of its experts that fit the slots, the number of prompts, the
    temperature."""

    family: str
    gigabytes: float
    share: float
    num_prompts: int = 1
    temperature: float = 1.0


CASES = {
    "qwen3_moe, sampled": WaitCase("qwen3_moe", 2.0, 0.5),
    "qwen3_moe, greedy": WaitCase("qwen3_moe", 2.0, 0.5, temperature=0.0),
    "qwen3_moe, four prompts": WaitCase("qwen3_moe", 2.0, 0.6, num_prompts=4),
    "deepseek_v3, sampled": WaitCase("deepseek_v3", 2.0, 0.5),
    "mixtral, sampled": WaitCase("mixtral", 2.0, 0.75),
}


@dataclass(frozen=True)
class WaitRow:
    """Medians of a case: seconds waited and of the generation, with and without prefetch; the ratio of the waits with
    its standard error over the rounds; and the share of wanted experts that were loaded or in flight."""

    case: str
    with_waited: float
    without_waited: float
    with_seconds: float
    without_seconds: float
    ratio: float
    error: float
    with_there: float
    without_there: float


def measure(folder: Path, case: WaitCase, ahead: bool, tokens: int) -> tuple[float, float, float]:
    """Return seconds waited, seconds of the generation, and the share of wanted experts that were loaded or in
    flight."""
    model = make_models(folder, case.family, case.gigabytes, logical=True)
    prompts = [[11, 23, 5, 7, 101, 42, 9, 2 + number] for number in range(case.num_prompts)]
    with mock.patch.object(FileWeights, "expect", FileWeights.expect if ahead else lambda *_: None):
        with open_model(model.full, device="cpu", budget=_budget(model.full, case)) as opened:
            decoder, counts = opened.decoder(), opened.weights.counts
            generate(decoder, prompts, tokens, Sampling(case.temperature, seed=3))
            counts = opened.weights.counts
            before, begin = counts.expert_seconds_waited, time.perf_counter()
            there, missed = counts.experts.hits + counts.experts.coming, counts.experts.misses
            generate(decoder, prompts, tokens, Sampling(case.temperature, seed=5))
            seconds = time.perf_counter() - begin
            assert counts is opened.weights.counts, "the plan changed"
            there, missed = counts.experts.hits + counts.experts.coming - there, counts.experts.misses - missed
            return counts.expert_seconds_waited - before, seconds, there / (there + missed)


def _budget(folder: Path, case: WaitCase) -> float:
    """Return the MiB that give the case's share of experts slots."""
    with open_model(folder, device="cpu") as opened:
        sizes = opened.weights.sizes
    num_slots = int(case.share * sizes.num_experts)
    return (sizes.total - (sizes.num_experts - num_slots) * sizes.expert + 64 * MIB) / MIB


def run_case(folder: Path, name: str, rounds: int, tokens: int) -> WaitRow:
    """Measure a case with and without prefetch, in alternating order."""
    found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    for number in range(rounds):
        for ahead in (True, False) if number % 2 == 0 else (False, True):
            found[ahead].append(measure(folder, CASES[name], ahead, tokens))
    ratios = [one[0] / other[0] for one, other in zip(found[True], found[False], strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    medians = {
        ahead: [statistics.median(values) for values in zip(*measured, strict=True)]
        for ahead, measured in found.items()
    }
    return WaitRow(
        name,
        *(medians[True][0], medians[False][0], medians[True][1], medians[False][1]),
        *(statistics.median(ratios), error, medians[True][2], medians[False][2]),
    )


def _cells(row: WaitRow) -> list[str]:
    return [
        row.case,
        *(f"{row.with_waited:.2f}", f"{row.without_waited:.2f}", f"{row.with_seconds:.2f}"),
        *(f"{row.without_seconds:.2f}", f"{row.with_there:.1%}", f"{row.without_there:.1%}"),
        f"{row.ratio:.2f} +- {row.error:.2f}",
        "met" if row.ratio <= 0.5 else "missed",
    ]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 if prefetch leaves more than half of a wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="of a generation (48)")
    parser.add_argument("--folder", type=Path, help="where models are kept for another run; default: removed")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    headings = ["generation", "waited s", "without", "of s", "without", "there or coming", "without", "waits", "bar"]
    print(headline(headings, options.markdown), flush=True)
    results = []
    with models_folder(options.folder) as folder:
        for name in options.cases:
            results.append(run_case(folder, name, options.rounds, options.tokens))
            print(line(_cells(results[-1]), headings, options.markdown), flush=True)
    if options.json:
        print(json.dumps([asdict(row) for row in results]))
    return int(any(row.ratio > 0.5 for row in results))


if __name__ == "__main__":
    sys.exit(main())
