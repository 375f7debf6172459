"""What looking costs: a step with all metrics, loggers and names for traces, against one without; and the report of a
long run.

`python -m benchmarks.speed.observability_cost [--rounds 150] [--steps 1000] [--json] [key=value ...]`

The quickstart's model on one process with one thread. Steps with and without alternate, two on each batch; the ratio of
each pair counts, of wall time and of CPU time (of all threads of the process; less disturbed by others), and its median
is given with the quartiles. "Without" takes everything out: counts and entropy of the routers, gradient norms by part,
memory, files, TensorBoard and Weights & Biases (offline). The time spent in callbacks is also measured by itself. The
names for traces cannot be taken out: their number in a step times what a call costs is given.

Then a made-up run of `--steps` steps, 32 MoE layers of 64 experts, 8 traced ranks, is made into a page: its size and,
where there is a Chromium, the time until it is there, and until the charts that are out of sight are drawn too (median
of 5 new browsers).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kit.browser import Browser, chromium
from benchmarks.kit.tables import table
from configs.compose import compose
from configs.validate import validate

Seconds = tuple[float, float]  # on the wall, and of the process's threads

MAX_COST = 0.01  # of a step
MAX_BYTES, MAX_SECONDS = 5_000_000, 2.0


def _now() -> Seconds:
    return time.perf_counter(), time.process_time()


def _since(start: Seconds) -> Seconds:
    wall, cpu = _now()
    return wall - start[0], cpu - start[1]


def measure_steps(rounds: int, overrides: list[str]) -> dict[str, Any]:
    """Ratios of alternating steps, and what the parts cost by themselves."""
    from moe.router import Router
    from parallel import trace
    from training.starting.run_builder import build_run
    from training.sums import StepSums
    from training.trainer import Trainer

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as built:
        always = [
            f"run_dir={folder}/run",
            "training.steps=1000000",
            "training.eval_interval=0",
            "checkpoint=off",
            "logging.wandb=offline",
        ]
        config = compose(["logging.progress=false", *always, *overrides])
        validate(config, 1)
        trainer = Trainer(config)
        run = build_run(config, trainer.callbacks, built)
        trainer._start(run)
        following = run.loader.next_step
        held: list[Any] = []

        def next_step() -> Any:  # each batch twice: both steps of a pair have the same work
            if held:
                return held.pop()
            held.append(following())
            return held[0]

        run.loader.next_step = next_step  # type: ignore[method-assign]
        engine, watch = run.engine, run.engine.watch
        routers = [module for chunk in engine.bare_chunks for module in chunk.modules() if isinstance(module, Router)]
        hooks = [(router, router._forward_hooks.copy(), router.watch) for router in routers]
        sums = engine.sums
        in_callbacks: list[float] = []

        def with_all() -> Seconds:
            engine.watch, engine.sums = watch, sums
            for router, hook, watched in hooks:
                router._forward_hooks.update(hook)
                router.watch = watched
            start = _now()
            metrics = trainer.train_step(run) or {}
            middle = time.perf_counter()
            for callback in trainer.callbacks:
                callback.after_step(run, metrics)
            in_callbacks.append(time.perf_counter() - middle)
            return _since(start)

        def without() -> Seconds:
            engine.watch, engine.sums = None, StepSums()
            for router, _, _ in hooks:
                router._forward_hooks.clear()
                router.watch = None
            start = _now()
            trainer.train_step(run)
            return _since(start)

        for _ in range(5):  # first calls allocate
            with_all(), without()
        in_callbacks.clear()
        pairs = []
        for i in range(rounds):
            a, b = (with_all, without) if i % 2 == 0 else (without, with_all)
            first, second = a(), b()
            pairs.append((first, second) if i % 2 == 0 else (second, first))
        calls = _count_names(trace, with_all)
        for callback in trainer.callbacks:
            callback.close()
        run.loader.close()
        dist.destroy_process_group()
    wall, cpu = (statistics.quantiles((yes[clock] / no[clock] for yes, no in pairs), n=4) for clock in (0, 1))
    step = statistics.median(no[0] for _, no in pairs)
    return {
        "step_ms": 1000 * step,
        "wall_quartiles": wall,
        "cpu_quartiles": cpu,
        "callbacks_ms": 1000 * statistics.median(in_callbacks),
        "names_per_step": calls,
        "name_off_us": 1e6 * _name_off(trace),
        "names_share": calls * _name_off(trace) / step,
    }


def _count_names(trace: Any, step: Any) -> int:
    """How many names a step puts down where they are in our own code."""
    count = 0

    class Counting:
        def __init__(self, name: str) -> None:
            nonlocal count
            count += 1

        def __enter__(self) -> None: ...
        def __exit__(self, *error: Any) -> None: ...

    original, trace.record_function = trace.record_function, Counting
    try:
        with trace.recording():
            step()
    finally:
        trace.record_function = original
    return count


def _name_off(trace: Any, calls: int = 100_000) -> float:
    """Seconds that a name costs while nothing is recorded, over the call itself."""

    def plain() -> None: ...

    named = trace.named("nothing")(plain)
    best = []
    for function in (named, plain):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times.append((time.perf_counter() - start) / calls)
        best.append(min(times))
    return best[0] - best[1]


def made_up_run(
    folder: Path, steps: int, layers: int, experts: int, ranks: int, spans: int = 1500, seed: int = 1
) -> None:
    """A run's folder with everything that a report shows, of numbers drawn at random."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    moe = {"num_experts": experts, "top_k": 2} if layers else {"num_experts": None}
    config = {
        "name": f"made up, {layers} x {experts}",
        "model": {"family": "gpt", "num_layers": max(layers, 1), "hidden_size": 1024, "sequence_length": 2048},
        "moe": moe,
        "parallel": {"tensor": 1, "pipeline": ranks, "context": 1, "expert": 1},
        "training": {"steps": steps, "global_batch_size": 64, "precision": "bf16"},
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    popularity = torch.ones(layers, experts)
    lines = []
    for step in range(1, steps + 1):
        seconds = 0.5 + 0.1 * draw.random() + (0.5 if draw.random() < 0.01 else 0.0)
        norm = 0.5 + draw.random() + 5 / step
        line: dict[str, Any] = {
            "step": step,
            "loss": 3 + 7 * math.exp(-step / 150) + 0.1 * draw.random(),
            "grad_norm": norm,
            "learning_rate": 3e-4 * min(1, step / 100),
            "tokens": 131072,
            "tokens_per_second": 131072 / seconds,
            "step_seconds": seconds,
            "data_wait_seconds": 1e-4 * draw.random(),
            "peak_memory_bytes": 40 * 2**30,
            "updated": True,
            "mfu": 0.2 / seconds,
            "step_seconds_percentiles": {"p50": 0.55, "p95": 0.6 + 0.01 * draw.random(), "p99": 1.1},
            "grad_norm_by_part": {
                component: norm * draw.random()
                for component in ("embedding", "attention", "norm", "router", "experts", "head")
            },
            "memory": {
                "state_device": 3 * 2**30,
                "state_host": 8 * 2**30,
                "state_disk": 0,
                "layer_inputs_host": 2**28,
                "device": 30 * 2**30,
                "device_peak": 40 * 2**30,
                "host": 5 * 2**30,
                "disk": step * 2**20,
            },
        }
        if step in (1, steps // 2):
            line["memory"]["device_peak_by_rank"] = [int((36 + 4 * draw.random()) * 2**30) for _ in range(ranks)]
        if step % 50 == 0:
            line["validation_loss"] = line["loss"] + 0.1
            line["valid/wiki.v2/loss"] = line["loss"] + 0.2
            by_position = {"0": line["loss"] + 2, "1": line["loss"] + 1, "2-3": line["loss"]}
            line["validation_loss_by_position"] = line["valid/wiki.v2/loss_by_position"] = by_position
            line["validation_loss_by_length"] = {"16-31": line["loss"], "2-3": line["loss"] + 1}
        if layers:
            popularity = (popularity + 0.05 * torch.randn(layers, experts, generator=generator)).clamp(min=0.05)
            counts = (popularity / popularity.sum(dim=1, keepdim=True) * 262144).long()
            per_layer = {
                name: [draw.random() for _ in range(layers)] for name in ("router_entropy", "aux_loss", "z_loss")
            }
            times = {
                f"{kind}_{way}_seconds": [0.01 + 0.001 * draw.random() for _ in range(layers)]
                for kind in ("predicted", "measured")
                for way in ("forward", "backward")
            }
            line |= {"aux_loss": 1 + draw.random() / step, "z_loss": 0.1}
            ratio = counts.max(dim=1).values / counts.double().mean(dim=1)
            line["tokens_per_expert"] = {
                "mean": 4096.0,
                "min": 10,
                "max": 9000,
                "max_over_mean": ratio.tolist(),
                "counts": counts.tolist(),
            }
            line["expert_tiers"] = {
                **{way: 2**28 + draw.randrange(2**20) for way in ("up", "down", "read", "written")},
                "fetched": 4 * layers,
                "asked": 0,
                "wait_seconds": 0.1 * draw.random(),
                "weights_disk": 2**30,
                "gradients_disk": 2**31,
                "staging_host": 2**26,
            }
            words = {"memory_strategy": ["keep"] * layers, "all_to_all": ["flat"] * layers}
            plans = {"degree": [2] * layers, "backward_degree": [4] * layers, **words, **times}
            placed = {"at_home": [1.5 + draw.random() for _ in range(layers)], "placed": [1.01] * layers}
            placed["copies"] = [float(draw.randrange(4)) for _ in range(layers)]
            plans |= placed
            line["moe_layers"] = {"layer": list(range(layers)), "dropped_tokens": [0] * layers, **per_layer, **plans}
            line["placement"] = {
                "at_home": 1.5 + draw.random(),
                "placed": 1.01,
                "predicted_gain": 1.4,
                "measured_gain": 1.5,
                "copies": draw.randrange(9),
                "moved": 2 * (step == 10),
                "ranks_at_home": [2 * draw.random() for _ in range(ranks)],
                "ranks_placed": [1.0] * ranks,
            }
            if step == 10:
                line["placement"]["homes"] = [[expert % ranks for expert in range(experts)]] * layers
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    kinds = ("weights", "gradients", "optimizer", "activations", "buffers")
    plan = [{"rank": rank, **dict.fromkeys(kinds, 7 * 2**30), "total": 35 * 2**30} for rank in range(ranks)]
    (folder / "plan.json").write_text(json.dumps({"memory_per_rank": plan}))
    kept = [
        {"time": 1.7e9 + step, "rank": 0, "kind": "checkpoint_saved", "text": f"step {step} is saved", "step": step}
        for step in range(20, steps, 20)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))
    (folder / "traces").mkdir()
    for rank in range(ranks if spans else 0):
        (folder / "traces" / f"step_{steps // 2:07d}_rank_{rank:05d}.json.gz").write_bytes(
            _made_up_trace(rank, spans, draw)
        )


def _made_up_trace(rank: int, spans: int, draw: random.Random) -> bytes:
    events = []
    now = 100.0 * rank
    for i in range(spans // 4):
        phase = ("forward", "backward", "pipeline exchange")[i % 3]
        length = 200 + 100 * draw.random()
        kinds = (("attention", 0.0, 0.3), ("dispatch", 0.3, 0.1), ("experts", 0.4, 0.5), ("gloo:send", 0.35, 0.4))
        events.append({"ph": "X", "cat": "user_annotation", "name": phase, "ts": now, "dur": length})
        for name, start, share in kinds if phase != "pipeline exchange" else ():
            events.append(
                {"ph": "X", "cat": "user_annotation", "name": name, "ts": now + start * length, "dur": share * length}
            )
        now += length + 5
    events.append({"ph": "X", "cat": "user_annotation", "name": "optimizer", "ts": now, "dur": 900.0})
    return gzip.compress(json.dumps({"baseTimeNanoseconds": 10**18, "traceEvents": events}).encode())


def measure_report(steps: int) -> dict[str, Any]:
    """Size of the made-up run's page, the seconds to write it, and those to open it (None without a Chromium)."""
    from training.report.page import render

    with tempfile.TemporaryDirectory() as folder:
        made_up_run(Path(folder) / "run", steps, layers=32, experts=64, ranks=8)
        start = time.perf_counter()
        path = render.write(Path(folder) / "run")
        result: dict[str, Any] = {"page_bytes": path.stat().st_size, "write_seconds": time.perf_counter() - start}
        result |= {"open_seconds": None, "open_slowest": None, "complaints": None}
        if chromium() is not None:
            opened = []
            for _ in range(5):
                with Browser() as browser:
                    browser.look(width=1440)
                    opened.append(browser.open(path))
            seconds = [each.seconds for each in opened]
            result |= {"open_seconds": statistics.median(seconds), "open_slowest": max(seconds)}
            result["drawn_seconds"] = statistics.median(each.all_seconds for each in opened)
            result["complaints"] = sum(len(each.complaints) for each in opened)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", default=[])
    options = parser.parse_args()
    result = measure_steps(options.rounds, options.overrides) | measure_report(options.steps)
    cost = result["cpu_quartiles"][1] - 1 + result["names_share"]
    opened = (
        "no Chromium"
        if result["open_seconds"] is None
        else f"{result['open_seconds']:.2f} s, all drawn {result['drawn_seconds']:.2f} s"
    )
    table_rows = [
        ["step without", f"{result['step_ms']:.1f} ms", ""],
        *(
            [f"with metrics / without, {name}", f"{median:.4f}", f"{first:.4f} to {third:.4f}"]
            for name, (first, median, third) in (
                ("wall time", result["wall_quartiles"]),
                ("CPU time", result["cpu_quartiles"]),
            )
        ),
        [
            "in callbacks",
            f"{result['callbacks_ms']:.2f} ms",
            f"{result['callbacks_ms'] / result['step_ms']:.2%} of a step",
        ],
        [
            "names for traces, off",
            f"{result['names_per_step']} x {result['name_off_us']:.2f} us",
            f"{result['names_share']:.3%} of a step",
        ],
        ["cost, CPU time", f"{cost:.2%}", f"limit {MAX_COST:.0%}"],
        [f"page of {options.steps} steps", f"{result['page_bytes'] / 1e6:.2f} MB", f"limit {MAX_BYTES / 1e6:.0f} MB"],
        ["written in", f"{result['write_seconds']:.1f} s", ""],
        ["opened in", opened, f"limit {MAX_SECONDS:.0f} s; {result['complaints']} complaints"],
    ]
    print(table(["", "measured", ""], table_rows, markdown=False))
    if options.json:
        print(json.dumps(result | {"cost": cost}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
