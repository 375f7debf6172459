"""Speed of data.prepare next to sentencepiece's own encoder: python -m benchmarks.speed.prepare_speed [--json].

A: `data.prepare.prepare`, from the .jsonl file to the finished .bin/.idx files, with N worker processes; the tokenizer
exists. The time includes planning, starting the processes, reading, encoding, writing and merging. B: N bare processes,
each with 1/N of the same documents already in memory, that call `SentencePieceProcessor.encode` on one after the other
and keep nothing. The time is that of the slowest process' loop, without start, reading and writing. C: like B, with the
time from the start of the processes to the end of the last, reading the documents included.

A, B and C alternate; the table shows medians. A / C compares like with like: both begin with a file and start their
processes; A also writes the result. A / B charges A alone with starting, reading and writing. CPU seconds are of all
processes together; they are more reliable than wall time on a machine with other work.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configs.schema import DataConfig
from data.corpus import parse_corpus, plan_shards, read_span
from data.corpus.documents import Document
from data.prepare import prepare
from data.tokenizer import train_tokenizer

BARE = """
import json, sys, time
import sentencepiece
model, path, index, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
processor = sentencepiece.SentencePieceProcessor(model_file=model)
with open(path, encoding="utf-8") as file:
    documents = [json.loads(line)["text"] for i, line in enumerate(file) if i % count == index]
print("ready", flush=True)
sys.stdin.readline()
begin, cpu = time.perf_counter(), time.process_time()
for text in documents:
    processor.encode(text)
print(time.perf_counter() - begin, time.process_time() - cpu, flush=True)
"""


def write_corpus(path: Path, num_bytes: int) -> int:
    """Write repeated standard-library documents as .jsonl. Return the bytes of text."""
    spans = [span for source in parse_corpus("stdlib") for shard in plan_shards(source.files, {}) for span in shard]
    documents = [item.text for span in spans for item in read_span(span, "text") if isinstance(item, Document)]
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < num_bytes:
            for text in documents:
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
                if written >= num_bytes:
                    break
    return written


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the children it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def time_prepare(corpus: Path, model: Path, cache: Path, workers: int) -> tuple[float, float]:
    """Return wall seconds and CPU seconds of data.prepare."""
    shutil.rmtree(cache, ignore_errors=True)
    config = DataConfig(corpus=str(corpus), tokenizer=str(model), cache_dir=str(cache), num_workers=workers)
    begin, cpu = time.perf_counter(), cpu_seconds()
    prepare(config, "gpt", show_progress=False)
    return time.perf_counter() - begin, cpu_seconds() - cpu


def time_bare(corpus: Path, model: Path, workers: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return wall and CPU seconds of bare encoding: those of the slowest loop and of all loops, and those from start to
    end."""
    begin, cpu = time.perf_counter(), cpu_seconds()
    processes = []
    for i in range(workers):
        command = [sys.executable, "-c", BARE, str(model), str(corpus), str(i), str(workers)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    loops = [[float(number) for number in process.communicate(timeout=600)[0].split()] for process in processes]
    loop = max(seconds for seconds, _ in loops), sum(seconds for _, seconds in loops)
    return loop, (time.perf_counter() - begin, cpu_seconds() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=240, help="of text")
    parser.add_argument("--workers", type=int, default=2, help="processes on each side")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"A": [], "B": [], "C": []}
    cpu: dict[str, list[float]] = {"A": [], "B": [], "C": []}
    with tempfile.TemporaryDirectory() as folder:
        corpus, model, cache = Path(folder) / "corpus.jsonl", Path(folder) / "speed.model", Path(folder) / "cache"
        num_bytes = write_corpus(corpus, arguments.megabytes * 1_000_000)
        with open(corpus, encoding="utf-8") as file:
            texts = (json.loads(line)["text"] for i, line in enumerate(file) if i < 1000)
            train_tokenizer(texts, arguments.vocab_size, model)
        for _ in range(arguments.runs):
            measured = (
                time_prepare(corpus, model, cache, arguments.workers),
                *time_bare(corpus, model, arguments.workers),
            )
            for name, (wall, processor) in zip("ABC", measured, strict=True):
                seconds[name].append(wall)
                cpu[name].append(processor)
    rates = {name: num_bytes / 1e6 / statistics.median(values) for name, values in seconds.items()}
    used = {name: statistics.median(values) for name, values in cpu.items()}
    labels = {"A": "data.prepare, all of it", "B": "bare encode, loop only", "C": "bare encode, with start and reading"}
    print(
        f"{num_bytes / 1e6:.0f} MB of text, {arguments.workers} processes, {os.cpu_count()} cores, median of "
        f"{arguments.runs} runs"
    )
    print(f"{'':<38}{'MB/s':>8}{'seconds':>10}{'min':>8}{'max':>8}{'CPU s':>8}")
    for name, label in labels.items():
        values = seconds[name]
        wall_columns = f"{statistics.median(values):>10.2f}{min(values):>8.2f}{max(values):>8.2f}"
        print(f"{name}  {label:<35}{rates[name]:>8.1f}{wall_columns}{used[name]:>8.2f}")
    print(f"A / B = {rates['A'] / rates['B']:.2f}   A / C = {rates['A'] / rates['C']:.2f}")
    print(f"in CPU seconds: A / B = {used['B'] / used['A']:.2f}   A / C = {used['C'] / used['A']:.2f}")
    if arguments.json:
        result = {
            "megabytes": num_bytes / 1e6,
            "workers": arguments.workers,
            "runs": arguments.runs,
            "mb_per_second": rates,
        }
        print(
            json.dumps(
                {
                    **result,
                    "ratio": rates["A"] / rates["B"],
                    "ratio_with_start": rates["A"] / rates["C"],
                    "seconds": seconds,
                    "cpu_seconds": cpu,
                }
            )
        )


if __name__ == "__main__":
    main()
