"""Sequence sharding of micro-batches over ranks of context parallelism: `python -m benchmarks.speed.sequence_sharding
[--rows 131072] [--places 2 4 8 64] [--samples 1 4] [--seeds 3] [--rounds 5] [--markdown] [--json]`

Five mixes of documents, concatenated and cut at the ends of samples: documents of the default corpus in a random order,
code (log-normal), a Zipf tail, one document as long as a sample, and all equal; `many documents` is code of about a
thousand documents, for the time. Over the seeds of a row: `work` is the largest work of a rank divided by the mean;
`exchanged` the mean number of rows that ranks receive, next to the bound, the sum over segments of (k - 1) x rows with
k = max(ceil(rows / (n / ranks)), ceil(work / (1.02 x mean work))), and next to zig-zag, which cuts every document in
2 x ranks chunks and gives each rank the r-th from both ends; `above` the number of seeds that exceed the bound. The
bound is 0 if every segment fits on one rank, even if no whole segments make equal rows. `ms` is the median over seeds
of the fastest of the rounds, processor time of one thread. All numbers but the time are computed. "places" are ranks
of context parallelism.
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

from benchmarks.kit.tables import table
from models.attention.sequence_sharding import SequenceSharding, cut_at_segments, exchanged_rows, shard_sequence

LIMIT = 1.02
MIXES = ("default corpus", "code", "many documents", "Zipf", "one giant", "all equal")
EQUAL = 512  # rows of a document where all are equal


def work_per_rank(
    found: SequenceSharding, lengths: np.ndarray, work: np.ndarray | None = None, keys: np.ndarray | None = None
) -> np.ndarray:
    """Return the attention work of each rank's rows, [cp_size], counted as `shard_sequence` does."""
    lengths = np.asarray(lengths, dtype=np.int64)
    cp_rank, segment, first, end = cut_at_segments(found, lengths)
    if keys is not None:
        each = np.asarray(keys, dtype=np.int64)[segment] * (end - first)
    elif work is None:
        each = (end * (end + 1) - first * (first + 1)) // 2
    else:
        each = np.asarray(work)[end] - np.asarray(work)[first]
    result = np.zeros(found.cp_size, dtype=each.dtype)
    np.add.at(result, cp_rank, each)
    return result


def corpus_lengths() -> np.ndarray:
    """Return the tokens of the documents of the default corpus, int64 [documents]."""
    from configs.compose import compose
    from data.document_lengths import document_lengths
    from data.prepare.run import prepare

    config = compose(["experiment=quickstart"])
    prepared = prepare(config.data, "gpt", show_progress=False)
    return np.concatenate([document_lengths(file) for file in prepared.train])


def segment_lengths(mix: str, num_rows: int, samples: int, seed: int, corpus: np.ndarray) -> np.ndarray:
    """Return the rows of the segments of a micro-batch, int64 [segments]."""
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
                yield int(min(generator.zipf(1.5) * 16, num_rows))
            else:
                yield num_rows if mix == "one giant" else EQUAL

    found: list[int] = []
    source = documents()
    for _ in range(samples):
        left = num_rows // samples
        while left:
            found.append(min(max(1, next(source)), left))
            left -= found[-1]
    return np.array(found, dtype=np.int64)


def bound(lengths: np.ndarray, cp_size: int) -> int:
    """Return the exchanged rows of the claim."""
    rank_rows = lengths.sum() // cp_size
    work = lengths * (lengths + 1) // 2
    by_work = np.ceil(work * cp_size / (LIMIT * work.sum()) - 1e-12).astype(np.int64)
    return int(((np.maximum(-(-lengths // rank_rows), by_work) - 1) * lengths).sum())


def zigzag(lengths: np.ndarray, cp_size: int) -> int:
    """Return the exchanged rows if every document is cut in 2 x cp_size chunks, of which rank r has the r-th from both
    ends."""
    ends = lengths[:, None] * np.arange(2 * cp_size + 1) // (2 * cp_size)
    chunk_rows = np.diff(ends, axis=1)
    near, far = chunk_rows[:, :cp_size], chunk_rows[:, : cp_size - 1 : -1]
    needed = np.where(far > 0, ends[:, :cp_size:-1], np.where(near > 0, ends[:, 1 : cp_size + 1], 0))
    return int((needed - near - far)[needed > 0].sum())


def measure(
    mix: str, num_rows: int, samples: int, cp_size: int, seeds: int, rounds: int, corpus: np.ndarray
) -> dict[str, Any]:
    """Return one row of the table."""
    most, exchanged, bounds, others, seconds, documents = 0.0, [], [], [], [], []
    for seed in range(1 if mix in ("one giant", "all equal") else seeds):
        lengths = segment_lengths(mix, num_rows, samples, seed, corpus)
        times = []
        for _ in range(rounds):
            begin = time.thread_time()
            found = shard_sequence(lengths, cp_size)
            times.append(time.thread_time() - begin)
        work = work_per_rank(found, lengths)
        most = max(most, float(work.max() * cp_size / work.sum()))
        exchanged.append(int(exchanged_rows(found, lengths).sum()))
        bounds.append(bound(lengths, cp_size))
        others.append(zigzag(lengths, cp_size))
        seconds.append(min(times))
        documents.append(len(lengths))
    return {
        "mix": mix,
        "samples": samples,
        "places": cp_size,
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


def report(table_rows: list[dict[str, Any]], markdown: bool) -> str:
    """Return the table."""
    headings = ("mix", "samples", "places", "documents", "work", "exchanged", "bound", "zig-zag", "above", "ms")
    cells = [
        [
            *(str(row[key]) for key in ("mix", "samples", "places")),
            *(f"{row['documents']:.0f}", f"{row['work']:.4f}"),
            *(f"{row[key]:.0f}" for key in ("exchanged", "bound", "zigzag")),
            f"{row['above']} of {row['seeds']}",
            f"{row['milliseconds']:.1f}",
        ]
        for row in table_rows
    ]
    return table(headings, cells, markdown)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if a rank has more than 1.02 of the mean work or more rows are exchanged than by
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
    table_rows = [
        measure(mix, options.rows, samples, cp_size, options.seeds, options.rounds, corpus)
        for mix in MIXES
        for samples in options.samples
        for cp_size in options.places
    ]
    print(report(table_rows, options.markdown))
    if options.json:
        print(json.dumps({"rows": table_rows}))
    return 1 if any(row["work"] > LIMIT or row["above_zigzag"] for row in table_rows) else 0


if __name__ == "__main__":
    sys.exit(main())
