"""Rungs with state on the host: optimizer state, experts, inputs of layers; seconds next to their bound.

The bound is the largest of three: the step with everything on the device, and the bytes that a step copies up and down
at the rates that this machine's pinned copies reach in one direction alone. It leaves out the host's own update.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from benchmarks.card.ladder import Row, Task
from benchmarks.card.training import QWEN, WARM_UP, Case, Meter, batch, in_turns

COPY_RATES = "pinned copies between host and card"
MIB, SMALL_MIB, REPEATS = 512, 1, 5

STATE: dict[str, tuple[str, ...]] = {
    engine: (
        "optimizer.state_device=host",
        f"optimizer.engine={engine}",
    )
    for engine in ("device_stream", "host", "split")
}
# Two of 48 layers, so that their experts with gradients and state fit the host.
# Four micro-batches, so that the two orders of passes move different bytes.
EXPERTS = Case(
    "qwen3_30b_a3b, 2 of 48 layers", (*QWEN.overrides, "model.num_layers=2", *batch(8, 2)), "experts on the host"
)
ON_HOST = ("moe.weights_device=host", "optimizer.state_device=host")
EXPERTS_KEYS: dict[str, tuple[str, ...]] = {
    "by layer": (*ON_HOST, "training.pass_order=by_layer", "training.recompute=full"),
    "by micro-batch": (*ON_HOST, "training.recompute=full"),
}
LAYER_INPUTS = ("training.recompute=full", "training.activation_offload=auto")


def measure_copies(task: Task) -> None:
    """Show bytes per second of copies of one block to the card, from it, and both at once."""
    import torch

    from benchmarks.card.sides import device_of, wait_for

    device = device_of()
    pins, size = device.type == "cuda", (SMALL_MIB if task.is_small else MIB) * 2**20
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=pins).fill_(i) for i in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if pins else [None, None]

    def transfer(up: bool, down: bool) -> None:
        if up:
            with torch.cuda.stream(streams[0]):  # type: ignore[arg-type]
                there[0].copy_(host[0], non_blocking=True)
        if down:
            with torch.cuda.stream(streams[1]):  # type: ignore[arg-type]
                host[1].copy_(there[1], non_blocking=True)

    for name, up, down in (("to the card", True, False), ("from the card", False, True), ("both at once", True, True)):
        seconds = []
        for _ in range(REPEATS):
            wait_for(device)
            before = time.perf_counter()
            transfer(up, down)
            wait_for(device)
            seconds.append(time.perf_counter() - before)
        task.show({"copies": name, "gb_s": (up + down) * size / statistics.median(seconds) / 1e9, "mib": size / 2**20})


def measure(task: Task, case: Case, keys: Sequence[str], what: str, base: Sequence[str] = ()) -> None:
    """Show the step with `keys`, next to the one with `base` alone and everything on the device."""
    from benchmarks.card import sides

    device = sides.device_of()
    seconds: dict[str, float] = {}
    row: Row = {"model": case.name, "off_device": what}
    for name, more in (("resident", base), ("step", keys)):
        config = case.config(task.is_small, device.type, more)
        meter = Meter(device)
        with sides.joined(config) as run_topology, sides.mixtrain(config, run_topology) as side:
            for _ in range(1 if task.is_small else WARM_UP):
                side.step()
            before = side.copied()
            times, _ = in_turns([side], device, task)
            steps = len(times[0])
            seconds[name] = statistics.median(times[0])
            after = side.copied()
            row[f"{name}_peak_gib"] = meter.peak(side)
        del side  # the next one is built without it
        up, down = ((now - then) / steps for now, then in zip(after, before, strict=True))
    rates = {each["copies"]: each["gb_s"] for other in task.others if other.rung == COPY_RATES for each in other.rows}
    bound = None
    if rates:
        bound = max(seconds["resident"], up / 1e9 / rates["to the card"], down / 1e9 / rates["from the card"])
    row |= {"resident_s": seconds["resident"], "step_s": seconds["step"], "gb_up": up / 1e9, "gb_down": down / 1e9}
    row |= {"bound_s": bound, "over_bound": None if bound is None else seconds["step"] / bound - 1}
    task.show(row)
