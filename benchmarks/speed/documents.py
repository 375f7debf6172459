"""Attention over separate packed documents, against joined ones: `python -m benchmarks.speed.documents
[--lengths 8192 32768] [--rounds 6] [--growth 2048 4096 8192] [--markdown] [--json]`

Speed: forward and backward pass of one layer's attention over samples of the default corpus, one thread. joined:
torch's own function over the whole sample, as trainings of joined documents call it. apart: separate documents, as
slices. In turns on the same samples; all samples' time together, since each has other documents. `allowed` is what the
pairs that are left allow, `share` what of it was reached, with two standard errors over samples. Below: what joined
trainings compute by slices too, a sliding window and latent attention (values narrower than keys), against the mask and
the scores that torch makes for them.

Growth: one micro-batch of a small model, forward and backward pass through the layers, the head and the loss, with
separate documents: the peak bytes of tensors without weights and their gradients, at each length. The exponent is
that of the last doubling. `largest` is the tensor with most numbers, by tokens: no tensor grows with tokens x tokens or
tokens x vocabulary. Real, on this processor.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.kit.rounds import standard_error
from benchmarks.kit.tables import table
from benchmarks.speed.plan_accuracy import LiveBytes
from models.attention.layers import window_mask
from models.attention.sequence_rows import BatchSlices, document_slices, joined_slices
from models.attention.slice_attention import attend
from tests import distributed

HEADS, WIDTH, VALUES, WINDOW = 4, 64, 32, 1024
SCALE = WIDTH**-0.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def draw(length: int, dtype: torch.dtype, values: int = WIDTH) -> Triple:
    """Queries, keys and values `[s, 1, heads, channels]`, as a layer's rotation leaves them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, HEADS, length, width) for width in (WIDTH, WIDTH, values)]
    drawn = (torch.randn(shape, generator=generator).to(dtype).permute(2, 0, 1, 3) for shape in shapes)
    return tuple(each.requires_grad_() for each in drawn)  # type: ignore[return-value]


def plain(inputs: Triple, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Call torch's own function over whole samples."""
    heads_first = (each.permute(1, 2, 0, 3) for each in inputs)
    found = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, is_causal=mask is None, scale=SCALE)
    return found.permute(2, 0, 1, 3).reshape(len(inputs[0]), 1, -1)


def by_slices(inputs: Triple, found: BatchSlices, window: int | None = None) -> torch.Tensor:
    """Call the layer's own attention over slices."""
    return attend(*inputs, found.plan(window), SCALE).flatten(2)


def seconds(attention: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of a forward and a backward pass."""
    begin = time.perf_counter()
    output = attention()
    output.backward(torch.ones_like(output))
    return time.perf_counter() - begin


def samples(length: int, number: int) -> list[BatchSlices]:
    """The slices of the first samples of the default corpus."""
    from configs.compose import compose
    from data.loader import make_samples
    from data.prepare.run import prepare

    config = compose(["experiment=quickstart", "data.documents=separate", f"model.sequence_length={length}"])
    prepared = prepare(config.data, "gpt", show_progress=False)
    found = make_samples(config, prepared, prepared.train, shuffle=True)
    return [document_slices(torch.from_numpy(found.batch([i])["positions"])) for i in range(number)]


def in_turns(pairs: Sequence[tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]]) -> list[list[float]]:
    """Seconds of each pair's two, the first one first in every other round."""
    found: list[list[float]] = [[], []]
    for number, pair in enumerate([pairs[0], *pairs]):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            found[which].append(seconds(pair[which]))
    return [each[1:] for each in found]  # the first round makes kernels


def speed(length: int, precision: str, rounds: int) -> dict[str, Any]:
    """Compare joined and separate documents on the same samples."""
    inputs, documents = draw(length, DTYPES[precision]), samples(length, rounds)
    joined, separate = in_turns([(partial(plain, inputs), partial(by_slices, inputs, each)) for each in documents])
    left = [each.found.pairs / (length * (length + 1) / 2) for each in documents]
    allowed, reached = len(left) / sum(left), sum(joined) / sum(separate)
    shares = [own / sliced * kept for own, sliced, kept in zip(joined, separate, left)]
    return {
        "length": length,
        "precision": precision,
        "documents": sum(len(each.found) for each in documents) / len(documents),
        "joined_seconds": statistics.median(joined),
        "apart_seconds": statistics.median(separate),
        "allowed": allowed,
        "reached": reached,
        "share": reached / allowed,
        "two_standard_errors": 2 * standard_error(shares),
    }


def others(length: int, rounds: int) -> list[dict[str, Any]]:
    """Compare the cases of joined documents that slices compute: a window, and values narrower than keys."""
    found = []
    for precision, dtype in DTYPES.items():
        inputs, mask = draw(length, dtype), window_mask(length, WINDOW, torch.device("cpu"))
        narrow, whole = draw(length, dtype, VALUES), joined_slices(1, length)
        cases = {
            f"window of {WINDOW}": (partial(plain, inputs, mask), partial(by_slices, inputs, whole, WINDOW)),
            f"values of {VALUES} channels": (partial(plain, narrow), partial(by_slices, narrow, whole)),
        }
        for name, pair in cases.items():
            before, now = in_turns([pair] * rounds)
            ratios = [old / new for old, new in zip(before, now)]
            found.append(
                {
                    "case": name,
                    "length": length,
                    "precision": precision,
                    "speedup": statistics.median(ratios),
                    "two_standard_errors": 2 * standard_error(ratios),
                }
            )
    return found


class Largest(TorchDispatchMode):
    """The most numbers that a tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.element_size()
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor)
        ]
        self.numel = max([self.numel, *sizes])
        return result


def growth(lengths: Sequence[int], vocab_size: int) -> list[dict[str, Any]]:
    """The most bytes of a micro-batch at each length."""
    from configs.compose import compose
    from parallel import topology
    from training.engine import Engine
    from training.starting.dry_run import made_up_batches
    from training.step import train_step

    found: list[dict[str, Any]] = []
    run_topology = None
    for length in lengths:
        config = compose(
            [
                *("experiment=gpt_tiny", "model.num_layers=2", "data.documents=separate", "training.device=cpu"),
                *(f"model.sequence_length={length}", "training.micro_batch_size=1", "training.global_batch_size=1"),
            ]
        )
        run_topology = run_topology or topology.initialize(config)
        model = Engine(config, run_topology, vocab_size)
        (batch,) = made_up_batches(config, 1, vocab_size)
        batch["positions"] = torch.arange(length)[None] % (length // 3)
        train_step(model, [batch], 1)
        with LiveBytes() as live:
            train_step(model, [batch], 2)
        with Largest() as largest:
            train_step(model, [batch], 3)
        model.close()
        found.append({"tokens": length, "peak_bytes": live.peak, "largest_numel": largest.numel})
    return found


def report(tables_rows: dict[str, list[dict[str, Any]]], markdown: bool) -> str:
    """The three tables."""
    fast = [
        [
            *(str(row["length"]), row["precision"], f"{row['documents']:.1f}"),
            *(f"{row[key]:.3f}" for key in ("joined_seconds", "apart_seconds")),
            *(f"{row[key]:.2f}" for key in ("allowed", "reached")),
            f"{row['share']:.2f} ± {row['two_standard_errors']:.2f}",
        ]
        for row in tables_rows["speed"]
    ]
    also = [
        [row["case"], str(row["length"]), row["precision"], f"{row['speedup']:.2f} ± {row['two_standard_errors']:.2f}"]
        for row in tables_rows["others"]
    ]
    sizes = [
        [str(row["tokens"]), f"{row['peak_bytes'] / 2**20:.1f}", f"{row['largest_numel'] / row['tokens']:.0f}"]
        for row in tables_rows["growth"]
    ]
    headings = ("tokens", "numbers", "documents", "joined s", "apart s", "allowed", "reached", "share")
    tables = [
        table(headings, fast, markdown),
        table(("joined, by slices", "tokens", "numbers", "faster"), also, markdown),
        table(("tokens", "peak MiB", "largest / tokens"), sizes, markdown),
    ]
    return "\n\n".join([*tables, f"exponent of the peak: {exponent(tables_rows['growth']):.3f}"])


def exponent(growth_rows: Sequence[dict[str, Any]]) -> float:
    """Return the exponent of the peak's growth with the tokens, between the last two lengths."""
    before, last = growth_rows[-2:]
    return math.log(last["peak_bytes"] / before["peak_bytes"]) / math.log(last["tokens"] / before["tokens"])


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768], help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=6, help="samples, and turns")
    parser.add_argument("--growth", type=int, nargs="+", default=[4096, 8192, 16384], help="tokens, for the memory")
    parser.add_argument("--vocab-size", type=int, default=32000, help="tokens of the vocabulary, for the memory")
    parser.add_argument("--markdown", action="store_true", help="print markdown tables")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args(arguments)
    if len(options.growth) < 2:
        parser.error("--growth takes at least two lengths")
    from benchmarks.speed import documents  # as ranks import it

    torch.set_num_threads(1)
    results = {
        "speed": [speed(each, name, options.rounds) for each in options.lengths for name in DTYPES],
        "others": others(options.lengths[0], options.rounds),
        "growth": distributed.run(documents.growth, 1, options.growth, options.vocab_size, timeout=1800.0)[0],
    }
    print(report(results, options.markdown))
    if options.json:
        print(json.dumps({**results, "exponent": exponent(results["growth"])}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
