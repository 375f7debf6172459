"""The longest sequence that one GPU trains on, feature by feature: `python -m benchmarks.speed.longest_context
[--system mixtrain] [--model gpt_1b] [--cap-gib 16] [--seconds 150] [--small] [--json]`

One sample of random tokens a step, joined, in bf16. Each row adds one feature to the row above. A row's peaks of device
memory at two short lengths give a line; its lengths for the device under the cap, and for the whole device, are called
predicted. The last row's context is then confirmed: steps at 0.97 of the prediction under the cap, shorter where they
run out of memory, and one at 1.05 of what the confirmed peak predicts, which should run out. Rows above follow as long
as the seconds last. The cap is torch's own, so that attention, whose time is quadratic, ends; CUDA's context is beside
it. What is kept on the host limits the whole device's prediction to 80% of what was free there.

mixtrain is the engine of a training without its callbacks, its weights drawn on the device. alst is DeepSpeed's
(benchmarks/speed/alst.py), for gpt_1b only: it has no counterpart for experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.kit import tables

ALLOCATOR = "PYTORCH_ALLOC_CONF"
GIB = 2**30
STEP = 256  # lengths are multiples of it
CONFIRM, SHORTER, OVER = 0.97, (1.0, 0.93, 0.8), 1.05
OF_HOST = 0.8  # of what is free there
CONTEXT = GIB  # of the whole device, for CUDA's context and what libraries take
ASSUMED_SPEED = 2.5e14  # FLOP/s, to tell whether a run still fits in the seconds

MODELS: dict[str, dict[str, int]] = {
    # Llama 3.2 1B (1.24 billion parameters), and a mixture of 1.29 billion, 0.24 of them for a token.
    "gpt_1b": {
        "num_layers": 16,
        "hidden_size": 2048,
        "ffn_hidden_size": 8192,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
    },
    "moe_small": {
        "num_layers": 12,
        "hidden_size": 1024,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "head_dim": 64,
        "vocab_size": 32_768,
        "num_experts": 32,
        "top_k": 4,
    },
}
SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_dim": 8,
    "vocab_size": 512,
}


# ---------------------------------------------------------------------------------------------------------------------
# Lines
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PeakLine:
    """Peak memory as a function of a sample's tokens, in bytes."""

    fixed: float
    per_token: float

    @classmethod
    def through(cls, shorter: tuple[int, float], longer: tuple[int, float]) -> PeakLine:
        """Return the line through two (tokens, bytes). Raises ValueError if the lengths are equal."""
        if shorter[0] == longer[0]:
            raise ValueError(f"two lengths are needed, not {shorter[0]} twice")
        slope = (longer[1] - shorter[1]) / (longer[0] - shorter[0])
        return cls(shorter[1] - slope * shorter[0], slope)

    def longest(self, capacity: float) -> int | None:
        """Return the tokens that fit in this many bytes, a multiple of STEP, 0 if none do; None if the line does not
        rise."""
        if self.per_token <= 0:
            return None
        return max(0, int((capacity - self.fixed) / self.per_token) // STEP * STEP)


def of_host(capacity: float, at_none: float, per_token: float) -> int | None:
    """Return the tokens that the host has memory for: of `capacity` bytes, `at_none` are used without any tokens. None:
    any number."""
    return None if per_token <= 0 else max(0, int((capacity - at_none) / per_token))


class TrainedSide(Protocol):
    """A system whose steps are measured; row i uses all `features` up to i."""

    num_parameters: int

    @property
    def features(self) -> Sequence[str]:
        """Names of the rows."""

    def begin(self, feature: int, length: int) -> Callable[[], float]:
        """Return a function that takes a step and returns its loss."""

    def end(self) -> None:
        """Release the objects that `begin` made."""

    def host_bytes(self, feature: int, length: int) -> float:
        """Return the bytes that steps keep on the host."""


# ---------------------------------------------------------------------------------------------------------------------
# The device
# ---------------------------------------------------------------------------------------------------------------------


class MeteredDevice:
    """The memory of the GPU of this process; on a CPU and on a fake CUDA device no cap holds."""

    def __init__(self, is_small: bool) -> None:
        import torch

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.has_cap = self.device.type == "cuda" and not is_small
        self.total = torch.cuda.get_device_properties(0).total_memory if self.device.type == "cuda" else 0

    def cap(self, num_bytes: float) -> None:
        """Let torch's tensors take no more than this."""
        import torch

        if self.has_cap:
            torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / self.total))

    def clear(self) -> None:
        """Free unused memory, and count peaks from now on."""
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> tuple[int, int]:
        """Return the peak bytes of tensors and of torch's blocks since `clear`; on a CPU those of the process."""
        import torch

        from training.report.metrics import peak_memory_bytes

        allocated = peak_memory_bytes(self.device)
        return allocated, torch.cuda.max_memory_reserved() if self.has_cap else allocated

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()


def attempt(side: TrainedSide, meter: MeteredDevice, feature: int, length: int, steps: int) -> dict[str, Any]:
    """Take steps of one length; return peaks, seconds of each and the last loss, or `out_of_memory`, or `failed` with
    the reason."""
    import torch

    step: Callable[[], float] | None = None
    found: dict[str, Any] = {"row": side.features[feature], "length": length, "seconds": []}
    try:
        meter.clear()
        step = side.begin(feature, length)
        for _ in range(steps):
            meter.synchronize()
            before = time.perf_counter()
            found["loss"] = step()
            meter.synchronize()
            found["seconds"].append(round(time.perf_counter() - before, 6))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        ran_out = isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text
        found["out_of_memory" if ran_out else "failed"] = text
    found["peak"], found["reserved"] = meter.peaks()
    step = None  # it may hold the model
    try:
        side.end()
    except Exception as error:
        found["end_failed"] = f"{type(error).__name__}: {error}"[:300]
    meter.clear()
    return found


def went_well(found: dict[str, Any]) -> bool:
    """Whether all steps of an attempt were taken."""
    return "out_of_memory" not in found and "failed" not in found


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


class Ladder:
    """Measures all rows of one system."""

    def __init__(
        self, side: TrainedSide, meter: MeteredDevice, flops: Callable[[int], float], arguments: argparse.Namespace
    ) -> None:
        """flops: the model's operations of a training step of this many tokens."""
        from memory import host_memory

        self.side, self.meter, self.flops = side, meter, flops
        self.cap = arguments.cap_gib * GIB
        self.is_small, self.end = arguments.small, arguments.began + arguments.seconds
        self.as_json = arguments.json
        self.host_capacity = OF_HOST * host_memory.available()
        self.fits: dict[int, PeakLine] = {}
        self.points: dict[int, tuple[int, float]] = {}  # the longest measured length of each row
        self.name = {"system": arguments.system, "model": arguments.model}

    def log(self, what: str, **found: Any) -> None:
        """Print a line at once."""
        line = {**self.name, "what": what, **found, "left_s": round(self.end - time.monotonic())}
        print(json.dumps(line) if self.as_json else "  ".join(f"{k} {v}" for k, v in line.items()), flush=True)

    def fit(self, feature: int) -> None:
        """Fit the line of a row, at two lengths and with the whole device."""
        self.meter.cap(self.meter.total)
        # Where little is kept, a short sample's peak is that of the tiles, which does not rise with its tokens.
        shortest = 4096 if feature < 2 else 16_384 if feature < len(self.side.features) - 1 else 32_768
        lengths = (1280, 2560) if self.is_small else (shortest, 2 * shortest)
        points = []
        for length in lengths:
            found = attempt(self.side, self.meter, feature, length, steps=2)
            self.log("measured", **found)
            if not went_well(found):
                return
            points.append((length, float(found["peak"])))
        self.fits[feature], self.points[feature] = PeakLine.through(*points), points[-1]
        self.log("predicted", **self.predicted(feature))

    def predicted(self, feature: int) -> dict[str, Any]:
        """Return the prediction of a row's line for the device under the cap, and for the whole device with this
        host."""
        line, none = self.fits[feature], self.side.host_bytes(feature, 0)
        host = of_host(self.host_capacity, none, (self.side.host_bytes(feature, 10**6) - none) / 10**6)
        device = line.longest(self.meter.total - CONTEXT)
        whole = device if host is None or device is None else min(host, device)
        return {
            "row": self.side.features[feature],
            "fixed_gib": round(line.fixed / GIB, 3),
            "kib_per_token": round(line.per_token / 1024, 2),
            "longest_under_cap": line.longest(self.cap),
            "longest_whole_device": device,
            "host_has_memory_for": host,
            "longest_with_this_host": whole,
        }

    def confirm(self, feature: int, over: bool) -> None:
        """Train at the length that a row's line predicts under the cap; `over`: and at a length that should run out of
        memory."""
        wanted = self.fits[feature].longest(self.cap)
        if not wanted:
            return
        self.meter.cap(self.cap)
        for share in SHORTER:
            length = int(CONFIRM * share * wanted) // STEP * STEP
            expected = self.expected_seconds(length)
            if expected > self.end - time.monotonic():
                self.log("not begun", row=self.side.features[feature], length=length, expected_s=round(expected))
                return
            steps = 2 if 6 * expected < self.end - time.monotonic() else 1  # the first may include set-up
            found = attempt(self.side, self.meter, feature, length, steps)
            if went_well(found):
                seconds = max(found["seconds"][-1], 1e-6)
                flops = self.flops(length) / seconds
                speed = {"tokens_per_second": round(length / seconds), "tflops": round(flops / 1e12)}
                self.log("confirmed", **found, **speed, share_of_predicted=round(length / wanted, 3))
                self.fits[feature] = PeakLine.through(self.points[feature], (length, found["peak"]))
                self.log("predicted from the confirmed peak", **self.predicted(feature))
                break
            self.log("ran out below the prediction" if "out_of_memory" in found else "failed", **found)
        else:
            return
        wanted = self.fits[feature].longest(self.cap) or wanted
        length = int(OVER * wanted) // STEP * STEP
        if over and self.expected_seconds(length) < self.end - time.monotonic():
            found = attempt(self.side, self.meter, feature, length, steps=1)
            self.log("over: fits" if went_well(found) else "over: did not fit", **found)

    def expected_seconds(self, length: int) -> float:
        """Return the seconds of a step, including recomputation."""
        return 0.0 if self.is_small else 4 / 3 * self.flops(length) / ASSUMED_SPEED

    def climb(self) -> None:
        """Fit all rows, then confirm them, the last one first."""
        for feature in range(len(self.side.features)):
            if time.monotonic() < self.end:
                self.fit(feature)
        last = len(self.side.features) - 1
        for feature in sorted(self.fits, reverse=True):
            if time.monotonic() < self.end and self.meter.has_cap:
                self.confirm(feature, over=feature == last)


def llama_sizes(sizes: dict[str, int], length: int) -> dict[str, Any]:
    """Return a model's sizes in Hugging Face's names, for texts of up to `length` tokens."""
    return {
        "num_hidden_layers": sizes["num_layers"],
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["ffn_hidden_size"],
        "num_attention_heads": sizes["num_attention_heads"],
        "num_key_value_heads": sizes["num_query_groups"],
        "head_dim": sizes["head_dim"],
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": length,
        "tie_word_embeddings": False,  # DeepSpeed's tiled loss fails an assertion of ZeRO-3 on a tied one
        "rms_norm_eps": 1e-5,
    }


def table(paths: Sequence[Path]) -> str:
    """Return the lines that `--json` printed into files as a table in Markdown."""
    table_rows = []
    for line in (json.loads(text) for path in paths for text in path.read_text().splitlines() if text[:1] == "{"):
        if line["what"] == "measured":
            numbers = [f"{line['peak'] / GIB:.2f}", f"{line['reserved'] / GIB:.2f}", f"{line['seconds'][-1]:.2f}", ""]
        elif line["what"] == "confirmed":
            numbers = [f"{line['peak'] / GIB:.2f}", f"{line['reserved'] / GIB:.2f}", f"{line['seconds'][-1]:.2f}"]
            numbers.append(f"{line['tokens_per_second']:,} tokens/s, {line['tflops']} TFLOP/s")
        elif line["what"].startswith("predicted"):
            slope = f"{line['fixed_gib']:.2f} GiB + {line['kib_per_token']:.2f} KiB a token"
            longest = line["longest_with_this_host"]
            numbers = ["", "", "", f"{slope}; whole device and this host: {longest:,} tokens"]
        elif "row" in line:
            numbers = ["", "", "", line.get("failed", "")]
        else:
            continue
        length = f"{line['length']:,}" if "length" in line else ""
        table_rows.append([line["system"], line["model"], line["row"], line["what"], length, *numbers])
    headings = ["system", "model", "row", "what", "tokens", "peak GiB", "reserved GiB", "step s", "says"]
    return tables.table(headings, table_rows, markdown=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--system", choices=("mixtrain", "alst"), default="mixtrain")
    parser.add_argument("--model", choices=tuple(MODELS), default="gpt_1b")
    parser.add_argument("--cap-gib", type=float, default=16.0, help="of device memory, for the runs that confirm")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which nothing is begun")
    parser.add_argument("--weights", choices=("host", "device"), default="host", help="where alst keeps weights")
    parser.add_argument("--small", action="store_true", help="tiny sizes and no cap, for a device without speed")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    parser.add_argument("--table", nargs="+", type=Path, help="print what --json wrote into files, and measure nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.table))
        return 0
    if arguments.system == "alst" and arguments.model != "gpt_1b":
        parser.error(f"--model {arguments.model}: alst has gpt_1b only; DeepSpeed's tiles have no experts")
    arguments.began = time.monotonic()
    os.environ.setdefault(ALLOCATOR, "expandable_segments:True")  # as a training sets it, before torch is there
    from benchmarks.speed.mixtrain_side import MixtrainSide, training_flops

    sizes = dict(MODELS[arguments.model])
    if arguments.small:
        sizes |= SMALL | ({"num_experts": 4, "top_k": 2} if "num_experts" in sizes else {})
    meter = MeteredDevice(arguments.small)
    side: TrainedSide
    if arguments.system == "mixtrain":
        side = MixtrainSide(sizes, meter.device)
    else:
        from benchmarks.speed.alst import AlstSide

        side = AlstSide(llama_sizes(sizes, 2**24), meter.device, arguments.weights == "host")
    ladder = Ladder(side, meter, lambda length: training_flops(sizes, length), arguments)
    ladder.log(
        "begun", parameters=side.num_parameters, device_gib=round(meter.total / GIB, 1), cap_gib=arguments.cap_gib
    )
    ladder.climb()
    return 0


if __name__ == "__main__":
    sys.exit(main())
