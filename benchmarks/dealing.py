"""Rows of a micro-batch dealt to the places of context parallelism: `python -m benchmarks.dealing
[--rows 131072] [--places 2 4 8 64] [--samples 1 4] [--seeds 3] [--rounds 5] [--markdown] [--json]`

Five mixes of documents, laid end to end and cut where samples end: those of the default corpus in a drawn order, code
(log-normal), a Zipf tail, one document as long as a sample, and all equal; `many documents` is code of about a thousand
documents, for the time. Of the seeds of a row: `work` is the most that a place has, of the mean; `exchanged` the mean
of the rows that places receive, beside the bound, sum over pieces of (k - 1) x rows with
k = max(ceil(rows / (n / places)), ceil(work / (1.02 x mean work))), and beside zig-zag, which cuts every document in
2 x places chunks and gives each place the r-th from both ends; `above` in how many seeds the bound was not kept. The
bound is 0 where every piece fits on a place by itself, even where no whole pieces make equal rows. `ms` is the median
over seeds of the least of the rounds, in time of the processor, one thread. Computed, except the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.tables import table
from models.attention.dealing import deal, exchanged_rows, work_of

LIMIT = 1.02
MIXES = ("default corpus", "code", "many documents", "Zipf", "one giant", "all equal")
EQUAL = 512  # rows of a document where all are equal


def corpus_lengths() -> np.ndarray:
    """Tokens int64 [documents] of the default corpus."""
    from configs.compose import compose
    from data.pieces import document_lengths
    from data.prepare.run import prepare

    config = compose(["experiment=quickstart"])
    prepared = prepare(config.data, "gpt", show_progress=False)
    return np.concatenate([document_lengths(file) for file in prepared.train])


def pieces(mix: str, rows: int, samples: int, seed: int, corpus: np.ndarray) -> np.ndarray:
    """Rows int64 [pieces] of the pieces of a micro-batch."""
    generator = np.random.default_rng(seed)

    def documents() -> Iterator[int]:
        while True:
            if mix == "default corpus":
                yield from generator.permutation(corpus).tolist()
            elif mix == "code":
                yield int(generator.lognormal(6, 1.4))
            elif mix == "many documents":
                yield int(generator.lognormal(4.1, 1.2))
            elif mix == "Zipf":
                yield int(min(generator.zipf(1.5) * 16, rows))
            else:
                yield rows if mix == "one giant" else EQUAL

    found: list[int] = []
    source = documents()
    for _ in range(samples):
        left = rows // samples
        while left:
            found.append(min(max(1, next(source)), left))
            left -= found[-1]
    return np.array(found, dtype=np.int64)


def bound(lengths: np.ndarray, places: int) -> int:
    """The exchanged rows of the claim."""
    rows = lengths.sum() // places
    work = lengths * (lengths + 1) // 2
    by_work = np.ceil(work * places / (LIMIT * work.sum()) - 1e-12).astype(np.int64)
    return int(((np.maximum(-(-lengths // rows), by_work) - 1) * lengths).sum())


def zigzag(lengths: np.ndarray, places: int) -> int:
    """Exchanged rows where every document is cut in 2 x places chunks, of which place r has those r from both ends."""
    ends = lengths[:, None] * np.arange(2 * places + 1) // (2 * places)
    rows = np.diff(ends, axis=1)
    near, far = rows[:, :places], rows[:, : places - 1 : -1]
    needed = np.where(far > 0, ends[:, :places:-1], np.where(near > 0, ends[:, 1 : places + 1], 0))
    return int((needed - near - far)[needed > 0].sum())


def measure(
    mix: str, rows: int, samples: int, places: int, seeds: int, rounds: int, corpus: np.ndarray
) -> dict[str, Any]:
    """One row of the table."""
    most, exchanged, bounds, others, seconds, documents = 0.0, [], [], [], [], []
    for seed in range(1 if mix in ("one giant", "all equal") else seeds):
        lengths = pieces(mix, rows, samples, seed, corpus)
        times = []
        for _ in range(rounds):
            begin = time.thread_time()
            found = deal(lengths, places)
            times.append(time.thread_time() - begin)
        work = work_of(found, lengths)
        most = max(most, float(work.max() * places / work.sum()))
        exchanged.append(int(exchanged_rows(found, lengths).sum()))
        bounds.append(bound(lengths, places))
        others.append(zigzag(lengths, places))
        seconds.append(min(times))
        documents.append(len(lengths))
    return {
        "mix": mix,
        "samples": samples,
        "places": places,
        "documents": statistics.mean(documents),
        "work": most,
        "exchanged": statistics.mean(exchanged),
        "bound": statistics.mean(bounds),
        "zigzag": statistics.mean(others),
        "seeds": len(exchanged),
        "above": sum(own > allowed for own, allowed in zip(exchanged, bounds)),
        "above_zigzag": sum(own > other for own, other in zip(exchanged, others)),
        "milliseconds": 1000 * statistics.median(seconds),
    }


def report(rows: list[dict[str, Any]], markdown: bool) -> str:
    """The table."""
    headings = ("mix", "samples", "places", "documents", "work", "exchanged", "bound", "zig-zag", "above", "ms")
    cells = [
        [
            *(str(row[key]) for key in ("mix", "samples", "places")),
            *(f"{row['documents']:.0f}", f"{row['work']:.4f}"),
            *(f"{row[key]:.0f}" for key in ("exchanged", "bound", "zigzag")),
            f"{row['above']} of {row['seeds']}",
            f"{row['milliseconds']:.1f}",
        ]
        for row in rows
    ]
    return table(headings, cells, markdown)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 where a place has more work than 1.02 of the mean or more is exchanged than by
    zig-zag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=131072, help="of a micro-batch")
    parser.add_argument("--places", type=int, nargs="+", default=[2, 4, 8, 64])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4], help="of a micro-batch")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", action="store_true", help="print a markdown table")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args(arguments)
    corpus = corpus_lengths()
    rows = [
        measure(mix, options.rows, samples, places, options.seeds, options.rounds, corpus)
        for mix in MIXES
        for samples in options.samples
        for places in options.places
    ]
    print(report(rows, options.markdown))
    if options.json:
        print(json.dumps({"rows": rows}))
    return 1 if any(row["work"] > LIMIT or row["above_zigzag"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
