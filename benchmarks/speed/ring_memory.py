"""Generation in a quarter of the weights: `python -m benchmarks.speed.ring_memory [--models llama qwen3_moe] [--folder
DIR] [--json]`. Needs root: limits are control groups.

The peak of a one-layer model in an unlimited group, plus a quarter of the full model's weights, is the limit of the
full model's group. The command is the same, and so must the tokens be as in a run without a limit. Page cache is
dropped before each run, so that the pages of files that a run reads count as its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from benchmarks.kit.cgroups import can_limit_memory
from benchmarks.kit.ring_rig import (
    MIB,
    MadeModel,
    budget_arguments,
    generate_command,
    last_line,
    make_models,
    models_folder,
    peak_of,
    rig_parser,
    run_cold,
    tokens_of,
)
from benchmarks.kit.tables import headline, line

TOKENS = 8


@dataclass(frozen=True)
class RingMemory:
    """One model; bytes with pages of files, but for `held_bytes`, and tokens per second of the whole command."""

    model: str
    weights_bytes: int
    one_layer_bytes: int
    whole_bytes: int
    whole_seconds: float
    limit_bytes: int
    peak_bytes: int
    held_bytes: int
    seconds: float
    verdict: str
    said: str
    same_tokens: bool

    @property
    def holds(self) -> bool:
        return self.verdict == "ran" and self.same_tokens


def measure_memory(model: MadeModel, rest: list[str], without_pages: bool, num_tokens: int) -> RingMemory:
    one = run_cold(generate_command(model.one, num_tokens, rest), model.one)
    peak = peak_of(one, without_pages)
    limit = peak + model.num_bytes // 4
    whole = run_cold(generate_command(model.full, num_tokens), model.full)  # as without a budget
    limited = run_cold(generate_command(model.full, num_tokens, rest), model.full, memory_bytes=limit)
    expected = tokens_of(whole)
    assert whole.peak_bytes is not None and limited.peak_bytes is not None and limited.peak_held_bytes is not None
    return RingMemory(
        model.family,
        model.num_bytes,
        peak,
        whole.peak_bytes,
        whole.seconds,
        limit,
        limited.peak_bytes,
        limited.peak_held_bytes,
        limited.seconds,
        limited.verdict(),
        last_line(limited.stderr),
        expected is not None and tokens_of(limited) == expected,
    )


def main() -> int:
    parser = rig_parser(__doc__, ["llama", "qwen3_moe"])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    if (reason := can_limit_memory()) is not None:
        print(f"skipped: {reason}")
        return 0
    headings = ["model", "weights MiB", "one layer", "whole", "limit", "peak", "without pages", "s", "whole s", "run"]
    headings.append("same tokens")
    print(headline(headings, markdown=False))
    results = []
    with models_folder(options.folder) as folder:
        for family in options.models:
            model = make_models(folder, family, options.gigabytes, options.dtype)
            row = measure_memory(model, budget_arguments(options), options.without_pages, options.tokens)
            results.append(row)
            sizes = (row.weights_bytes, row.one_layer_bytes, row.whole_bytes, row.limit_bytes, row.peak_bytes)
            cells = [row.model, *(f"{size / MIB:.0f}" for size in (*sizes, row.held_bytes))]
            cells += [f"{row.seconds:.1f}", f"{row.whole_seconds:.1f}", row.verdict, "yes" if row.same_tokens else "NO"]
            print(line(cells, headings, markdown=False), flush=True)
            print(f"    {model.describe()}; it said last: {row.said}", flush=True)
    if options.json:
        print(json.dumps([asdict(row) for row in results]))
    return 0 if all(row.holds for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
