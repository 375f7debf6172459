"""Attention over context ranks against the critical path of its rounds: `python -m benchmarks.speed.context_exchange
[--ranks 2 4] [--rate 50mbit] [--rounds 7] [--tokens 32768] [--anyway] [--markdown] [--json]`

Links are emulated, the accelerator is virtual: kernels sleep for as long as their pairs take, all else is real, on this
processor's cores. A step is a forward and a backward pass of attention with one head of 32 channels in fp32. Its
communication is the bytes that the busiest rank sends or receives, divided by the link's measured rate; its computation
is that of the busiest rank. The accelerator's rate sets their ratio. All variants run in turns.

Overlap: one joined sample (causal), and documents whose lengths fall as one by their rank (packed), sharded as in
trainings. `best` is the critical path of the same rounds, computed; `reached` is `best` divided by the measured time.
`bound` is the longer of communication and computation. Dealing: the packed documents, balanced, against a zig-zag of
each over all ranks, with the same links, accelerator and code; the ratio is that of the balanced sharding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.kit import rounds
from benchmarks.kit.cluster import Cluster
from benchmarks.kit.link import in_words, measured_rate
from benchmarks.kit.rounds import Rounds, measure, standard_error
from benchmarks.kit.tables import table
from benchmarks.speed.context_layer import BALANCED, ZIG_ZAG, Mix, critical_path, outputs, run, work_of, zipf

RATIOS = (0.25, 0.5, 1.0)
DOCUMENTS = 64
SMALL = 1024  # tokens, where numbers are compared


class Variant(NamedTuple):
    """A variant to run: `mix` at an accelerator's rate, with its time at best and its times of communication and
    computation alone, in seconds."""

    mix: Mix
    operations_per_second: float
    best: float
    communication: float
    computation: float


def variants_of(ranks: int, tokens: int, rate: float) -> dict[str, Variant]:
    """Return each mix at each ratio, by name. rate: bytes per second of a link."""
    found = {}
    mixes = {"causal": Mix((tokens,)), "packed": Mix(zipf(tokens, DOCUMENTS))}
    for name, mix in mixes.items():
        work = work_of(mix, ranks)
        for ratio in RATIOS:
            speed = work.operations().max() / (work.bytes_each_way().max() / rate / ratio)
            found[f"{name}, {ratio:g}"] = variant(mix, ranks, rate, speed)
            if name == "packed":
                found[f"{ZIG_ZAG}, {ratio:g}"] = variant(Mix(mix.lengths, ZIG_ZAG), ranks, rate, speed)
    return found


def variant(mix: Mix, ranks: int, rate: float, speed: float) -> Variant:
    """A mix on an accelerator of this speed."""
    work = work_of(mix, ranks)
    alone = work.bytes_each_way().max() / rate, work.operations().max() / speed
    return Variant(mix, speed, critical_path(work, rate, speed), *map(float, alone))


def overlap_rows(ranks: int, variants: dict[str, Variant], found: Rounds) -> list[dict[str, Any]]:
    """Return how close each variant is to its critical path."""
    table_rows = []
    for name, each in variants.items():
        seconds = found.seconds[name]["step"]
        reached = [each.best / one for one in seconds]
        table_rows.append(
            {
                "ranks": ranks,
                "input": name.partition(",")[0],
                "ratio": float(name.rpartition(" ")[2]),
                "communication": each.communication,
                "computation": each.computation,
                "bound": max(each.communication, each.computation),
                "best": each.best,
                "seconds": statistics.median(seconds),
                "reached": statistics.median(reached),
                "error": standard_error(reached),
            }
        )
    return table_rows


def sharding_rows(ranks: int, variants: dict[str, Variant], found: Rounds) -> list[dict[str, Any]]:
    """Return how much faster balanced sharding is than zig-zag."""
    table_rows = []
    for ratio in RATIOS:
        ours, theirs = f"packed, {ratio:g}", f"{ZIG_ZAG}, {ratio:g}"
        pairs = zip(found.seconds[theirs]["step"], found.seconds[ours]["step"])
        times = [base / own for base, own in pairs]
        table_rows.append(
            {
                "ranks": ranks,
                "ratio": ratio,
                "zig_zag_ratio": variants[theirs].communication / variants[theirs].computation,
                "dealt": found.median(ours, "step"),
                "zig_zag": found.median(theirs, "step"),
                "at_best": variants[theirs].best / variants[ours].best,
                "times": statistics.median(times),
                "error": standard_error(times),
            }
        )
    return table_rows


def of_ranks(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return all measurements on this many ranks, each a node."""
    with Cluster(nodes=ranks, rate=options.rate) as cluster:
        rate = max(measured_rate(cluster) for _ in range(3))  # a lower rate is due to other load
        words = in_words(cluster, rate)
        small = zipf(SMALL, DOCUMENTS // 4)
        numbers = cluster.call(outputs, [Mix(small, BALANCED), Mix(small, ZIG_ZAG), Mix((SMALL,))])
        variants = variants_of(ranks, options.tokens, rate / 8)
        calls = {name: (each.mix, each.operations_per_second) for name, each in variants.items()}
        found = measure(cluster, run, calls, options.rounds)
    off = max(value for of_rank in numbers for each in of_rank for value in each[1:])
    balanced, zig_zag = numbers[0][0][0], numbers[0][1][0]
    return {
        "link": words,
        "overlap": overlap_rows(ranks, variants, found),
        "dealing": sharding_rows(ranks, variants, found),
        "numbers_off": off,
        "losses_apart": abs(balanced - zig_zag) / abs(zig_zag),
        "rounds": found.num_rounds,
        "dropped": found.num_dropped,
    }


def report(found: Sequence[dict[str, Any]], markdown: bool) -> str:
    """Return both tables."""
    overlap = [
        [
            *(str(row["ranks"]), row["input"], f"{row['ratio']:g}"),
            *(f"{row[key]:.3f}" for key in ("communication", "computation", "bound", "best", "seconds")),
            f"{row['reached']:.1%} ± {row['error']:.1%}",
        ]
        for each in found
        for row in each["overlap"]
    ]
    sharding = [
        [
            *(str(row["ranks"]), f"{row['ratio']:g}", f"{row['zig_zag_ratio']:.2f}"),
            *(f"{row[key]:.3f}" for key in ("dealt", "zig_zag")),
            *(f"{row['at_best']:.2f}", f"{row['times']:.2f} ± {row['error']:.2f}"),
        ]
        for each in found
        for row in each["dealing"]
    ]
    lines = [
        f"{each['link']}; numbers of the shardings at most {each['numbers_off']:.1e} off one process's, losses "
        f"{each['losses_apart']:.1e} apart; {each['rounds']} rounds, {each['dropped']} dropped"
        for each in found
    ]
    headings = ("ranks", "input", "ratio", "comm. s", "comp. s", "bound s", "best s", "measured s", "reached")
    against = ("ranks", "ratio", "of zig-zag", "dealt s", "zig-zag s", "faster at best", "faster")
    return "\n\n".join([*lines, table(headings, overlap, markdown), table(against, sharding, markdown)])


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", default="50mbit", help="of each rank's link, each way, as tc writes it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32768, help="of the sample")
    parser.add_argument("--anyway", action="store_true", help="keep rounds in which other processes took much")
    parser.add_argument("--markdown", action="store_true", help="print markdown tables")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args(arguments)
    if options.anyway:
        rounds.DISTURBED = float("inf")
    found = [of_ranks(ranks, options) for ranks in options.ranks]
    print(report(found, options.markdown))
    if options.json:
        print(json.dumps({"ranks": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
