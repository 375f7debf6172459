"""The host's update of a bucket against a loop with the same reads and writes: `python -m benchmarks.speed.host_update
[--parameters 8388608] [--threads 1 2] [--rounds 15] [--deepspeed FOLDER] [--markdown] [--json]`

A bucket's gradient, master weights and moments in fp32, and its weights in bf16. ours: what a run's host stream does
(optim/offload/kernel.py), PyTorch's fused AdamW, then the weights' copy: 20 bytes read and 14 written for a parameter.
loop: the same tensors read and written as often by C++ with an addition each, vectorised, with as many threads. one
pass: that loop where it need not read the masters again. DeepSpeed's CPUAdam, where a folder with its sources is given:
compiled for this processor, the weights' copy as ours. All in turns, the order turning too; ratios are medians over
rounds of one round's. Real, on this processor.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.rounds import standard_error
from benchmarks.kit.tables import table
from moe.kernels.compiler import FLAGS, cache_folder, compile_library
from optim.offload.kernel import State, UpdateScalars, adamw

RATES = UpdateScalars(1e-4, 0.1, 0.9, 0.95, 1e-8)
Update = Callable[[], object]


class Bucket:
    """A bucket's tensors on the host."""

    def __init__(self, numel: int):
        generator = torch.Generator().manual_seed(1)
        self.numel, self.step = numel, torch.ones(())
        self.grad, self.master, self.exp_avg = (torch.randn(numel, generator=generator) * 0.01 for _ in range(3))
        self.exp_avg_sq = torch.rand(numel, generator=generator) * 1e-4
        self.weight = torch.zeros(numel, dtype=torch.bfloat16)

    def ours(self) -> Update:
        """As optim/offload/bucket_jobs.py updates it."""
        state, scratch = State([self.master], [self.exp_avg], [self.exp_avg_sq]), torch.empty(0)

        def work() -> None:
            adamw(state, [self.grad], self.step, [RATES], scratch)
            self.weight.copy_(self.master)

        return work

    def loop(self, name: str) -> Update:
        """A function of same_traffic.cpp."""
        source = Path(__file__).with_name("same_traffic.cpp")
        library = ctypes.CDLL(str(compile_library(source, cache_folder(), FLAGS)))
        tensors = (self.master, self.exp_avg, self.exp_avg_sq, self.grad, self.weight)
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        return lambda: library[name](*addresses, ctypes.c_int64(self.numel), torch.get_num_threads())

    def deepspeed(self, folder: Path, scratch: str) -> Update:
        """CPUAdam from the sources in a folder."""
        from torch.utils.cpp_extension import load

        flags = ["-O3", "-std=c++20", "-march=native", "-fopenmp", "-D__DISABLE_CUDA__"]
        capable = torch.backends.cpu.get_cpu_capability()
        flags += {"AVX512": ["-D__AVX512__"], "AVX2": ["-D__AVX256__"]}.get(capable, [])
        sources = [str(folder / "csrc/adam" / name) for name in ("cpu_adam.cpp", "cpu_adam_impl.cpp")]
        includes = [str(folder / "csrc/includes")]
        library = load("cpu_adam", sources, flags, extra_include_paths=includes, build_directory=scratch)
        rates = (RATES.lr, RATES.beta1, RATES.beta2, RATES.epsilon, RATES.weight_decay)
        library.create_adam(0, *rates, True, False)
        tensors = (self.master, self.grad, self.exp_avg, self.exp_avg_sq)

        def work() -> None:
            library.adam_update(0, 1, *rates, True, *tensors)
            self.weight.copy_(self.master)

        return work


@torch.no_grad()
def compare(updates: dict[str, Update], rounds: int) -> dict[str, list[float]]:
    """Seconds of each update in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    names = list(updates)
    for turn in range(-1, rounds):  # the first one touches the memory
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            before = time.perf_counter()
            updates[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - before)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=2**23, help="of the bucket")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--deepspeed", type=Path, metavar="FOLDER", help="with DeepSpeed's sources")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    bucket, results = Bucket(args.parameters), []
    with tempfile.TemporaryDirectory() as scratch:
        updates = {"ours": bucket.ours(), "loop": bucket.loop("two_passes"), "one pass": bucket.loop("one_pass")}
        if args.deepspeed is not None:
            updates["DeepSpeed"] = bucket.deepspeed(args.deepspeed, scratch)
        for threads in args.threads:
            torch.set_num_threads(threads)
            seconds = compare(updates, args.rounds)
            for name, own in seconds.items():
                ratios = [loop / each for loop, each in zip(seconds["loop"], own, strict=True)]
                results.append(_row(name, threads, own, ratios))
    headings = ["update", "threads", "ms", "of the loop's speed", "error"]
    lines = [
        [row["update"], str(row["threads"]), f"{1e3 * row['seconds']:.1f}"]
        + [f"{row['share']:.0%}", f"{row['error']:.1%}"]
        for row in results
    ]
    print(table(headings, lines, args.markdown))
    if args.json:
        print(json.dumps({"rows": results}))


def _row(name: str, threads: int, seconds: list[float], ratios: list[float]) -> dict[str, Any]:
    middle = statistics.median(seconds)
    error = standard_error(ratios)
    share = statistics.median(ratios)
    return {"update": name, "threads": threads, "seconds": middle, "share": share, "error": error}


if __name__ == "__main__":
    main()
