"""Sequences over context ranks: the losses and the gradients of one process, with every other option:
`python -m benchmarks.checks.context_parity [--rows 1 7 ...] [--list] [--steps 20] [--markdown] [--json] [KEY=VALUE
...]`.

A covering list of trainings of the tiny models: each pair of options below that can stand together meets in at least
one row. Each row trains on its ranks and, with the same settings, in one process: texts of 1 to 300 words, many in a
sample, so that separate documents are cut at the ranks' bounds as well. In fp32 every step's losses (also those
of routers and of BERT's sentence head) may differ by 1e-5 relative, and the first step's gradient norm by 1e-6. In
bf16 every step's loss, and the first step's other losses and gradient norm, may differ by 1e-3: a router's losses
drift apart in any layout. The exit status says whether all did. `--list` prints the rows, and the pairs that none has,
with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kit.covering import Pair, Row, covering_rows, excluded_pairs
from benchmarks.kit.tables import headline, line, table
from tests import distributed
from tests.tolerances import CONTEXT_BF16, CONTEXT_GRAD_NORM, FP32_LOSS
from tests.training.helpers import Lines, largest_difference, train_on_ranks

TIMEOUT = 600.0  # seconds for one training
# One sample a micro-batch, which two ranks can share only by cutting it.
MODEL = ("model.num_attention_heads=8", "training.micro_batch_size=1", "training.global_batch_size=8")
LATENT = (
    *("attention=latent", "head_dim=8", "rotary_head_dim=4", "value_head_dim=6", "kv_lora_rank=12", "q_lora_rank=16"),
)
# What each option adds to the overrides: of the model and how it computes, then of the layout.
SETTINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "documents": {"joined": (), "separate": ("data.documents=separate",)},
    "attention": {
        "multi-head": (),
        "grouped": ("model.num_query_groups=4",),
        "one key head": ("model.num_query_groups=1",),
        "latent": tuple(f"model.{each}" for each in LATENT),
    },
    "state": {
        "device": (),
        "host": ("optimizer.state_device=host", "optimizer.bucket_parameters=16384"),
        "disk": ("optimizer.state_device=disk", "optimizer.bucket_parameters=16384"),
    },
    "layer inputs": {"device": (), "host": ("training.activation_offload=auto",)},
    "recompute": {name: (f"training.recompute={name}",) for name in ("none", "selective", "full")},
    "precision": {name: (f"training.precision={name}",) for name in ("fp32", "bf16")},
}
LAYOUT: dict[str, dict[str, tuple[str, ...]]] = {
    "context": {size: (f"parallel.context={size}",) for size in ("2", "4")},
    "heads": {size: (f"parallel.context_heads={size}",) for size in ("1", "2", "4")},
    "beside": {
        "none": (),
        "TP2+SP": ("parallel.tensor=2", "parallel.sequence=true"),
        "PP2": ("parallel.pipeline=2",),
        "PP2xVPP2": ("parallel.pipeline=2", "parallel.virtual_pipeline=2"),
    },
    "experts": {
        "dense": (),
        "EP1": (),
        "EP2": ("parallel.expert=2",),
        "EP4": ("parallel.expert=4",),
        "EP2xETP2": ("parallel.expert=2", "parallel.expert_tensor=2"),
    },
    "placement": {
        "static": (),
        "solve": ("moe.placement.policy=solve", "moe.placement.extra_slots=2", "moe.placement.interval=3"),
    },
}
FACTORS: dict[str, list[str]] = {
    "context": list(LAYOUT["context"]),
    "heads": list(LAYOUT["heads"]),
    "documents": list(SETTINGS["documents"]),
    "family": ["gpt", "bert"],
    **{name: list(LAYOUT[name]) for name in ("beside", "experts", "placement")},
    **{name: list(SETTINGS[name]) for name in ("attention", "state", "layer inputs", "recompute", "precision")},
}
MOST_ROWS = 48
OTHER_LOSSES = ("aux_loss", "z_loss", "sentence_loss")


def conflict(row: Row) -> str | None:
    """Return why some options exclude each other; None: they do not."""
    options = row.get
    if int(options("heads", "1")) > int(options("context", "4")):
        return "parallel.context_heads divides parallel.context"
    if options("family") == "bert" and options("documents") == "separate":
        return "BERT's samples do not cross documents"
    if options("family") == "bert" and options("attention") == "latent":
        return "latent attention is for GPT"
    if options("beside") == "TP2+SP" and options("attention") == "one key head":
        return "parallel.tensor divides model.num_query_groups"
    if options("placement") == "solve" and options("experts") in ("dense", "EP1"):
        return "experts of one rank have no other place"
    if options("layer inputs") == "host" and options("recompute", "full") != "full":
        return "training.activation_offload needs training.recompute=full"
    return None


def ranks_of(row: Row) -> int:
    """Return the fewest ranks that a row's layout takes."""
    stages = 2 if row["beside"].startswith("PP2") else 1
    dense = int(row["context"]) * (2 if row["beside"] == "TP2+SP" else 1) * stages
    experts = {"EP2": 2, "EP4": 4, "EP2xETP2": 4}.get(row["experts"], 1) * stages
    return math.lcm(dense, experts)


@functools.cache
def covering_list() -> list[Row]:
    """Return the covering list."""
    return covering_rows(FACTORS, conflict, cost=lambda row: ranks_of(row) ** 0.5)


def settings_of(row: Row) -> list[str]:
    """Return the overrides of a row's training in one process."""
    model = f"{row['family']}_{'tiny' if row['experts'] == 'dense' else 'moe_tiny'}"
    groups = [MODEL, *(options[row[name]] for name, options in SETTINGS.items())]
    return [f"experiment={model}", "checkpoint=off", *(each for group in groups for each in group)]


def layout_of(row: Row) -> list[str]:
    """Return the additional overrides of a row's training on several ranks."""
    return [each for name, options in LAYOUT.items() for each in options[row[name]]]


@dataclass(frozen=True)
class Compared:
    """A row against one process: largest relative differences of a step's losses, and of the first gradient norm.
    `failed`: the error of a rank."""

    number: int
    row: Row
    ranks: int
    loss: float = math.nan
    other_losses: float = math.nan
    first_norm: float = math.nan
    last_loss: float = math.nan
    seconds: float = 0.0
    failed: str = ""

    @property
    def passed(self) -> bool:
        bf16 = self.row["precision"] == "bf16"
        most, norm = (CONTEXT_BF16, CONTEXT_BF16) if bf16 else (FP32_LOSS, CONTEXT_GRAD_NORM)
        return max(self.loss, self.other_losses) <= most and self.first_norm <= norm


def compare(number: int, folder: Path, overrides: Sequence[str]) -> Compared:
    """Train a row, numbered from 1, and the same in one process. `folder`: for the runs and their state."""
    row, begin = covering_list()[number - 1], time.perf_counter()
    ranks = ranks_of(row)
    settings = [*settings_of(row), *overrides]
    if row["state"] == "disk":
        settings.append(f"memory.disk_dir={folder}")
    try:
        single = _train([*settings, f"run_dir={folder / 'single'}"], 1)
        lines = _train([*settings, *layout_of(row), f"run_dir={folder / 'ranks'}"], ranks)
    except (distributed.RankError, distributed.RankHang, distributed.RankDied) as error:
        print(f"row {number}: {error}", file=sys.stderr, flush=True)
        text = str(error).strip().splitlines()[-1]
        return Compared(number, row, ranks, seconds=time.perf_counter() - begin, failed=text)
    num_checked = 1 if row["precision"] == "bf16" else len(single)
    others = [
        largest_difference(lines[:num_checked], single[:num_checked], name)
        for name in OTHER_LOSSES
        if name in single[0]
    ]
    return Compared(
        *(number, row, ranks, largest_difference(lines, single, "loss")),
        other_losses=max(others, default=0.0),
        first_norm=largest_difference(lines[:1], single[:1], "grad_norm"),
        last_loss=lines[-1]["loss"],
        seconds=time.perf_counter() - begin,
    )


def _train(overrides: Sequence[str], ranks: int) -> Lines:
    with contextlib.redirect_stdout(io.StringIO()):  # what the ranks print of themselves would break the table
        return train_on_ranks(overrides, ranks, TIMEOUT)


@contextlib.contextmanager
def short_texts() -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder for runs, and overrides that train on texts of 1 to 300 words in sentences, many in a sample."""
    draw = random.Random(0)
    words = Path(random.__file__).read_text(encoding="utf-8").split()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open(folder / "texts.jsonl", "w", encoding="utf-8") as stream:
            for length in draw.choices([1, 2, 5, 10, 40, 300], k=1500):
                chosen = draw.choices(words, k=length)
                text = "\n".join(" ".join(chosen[at : at + 8]) + "." for at in range(0, length, 8))
                stream.write(json.dumps({"text": text}) + "\n")
        data = [f"data.corpus={folder / 'texts.jsonl'}", f"data.cache_dir={folder / 'cache'}"]
        yield folder, [*data, "data.vocab_size=384", "data.num_workers=1"]


def compare_all(
    numbers: Sequence[int], overrides: Sequence[str], on_row: Callable[[Compared], None] = lambda row: None
) -> list[Compared]:
    """Compare these rows. `on_row` is called with each as soon as it is known."""
    found = []
    with short_texts() as (folder, data):
        for number in numbers:
            with tempfile.TemporaryDirectory(dir=folder) as run_folder:
                found.append(compare(number, Path(run_folder), [*data, *overrides]))
            on_row(found[-1])
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What is printed
# ---------------------------------------------------------------------------------------------------------------------

HEADINGS = ["row", *FACTORS, "ranks", "loss", "other losses", "first norm", "seconds", ""]


def _cells(found: Compared) -> list[str]:
    differences = [f"{each:.0e}" for each in (found.loss, found.other_losses, found.first_norm)]
    verdict = found.failed or ("" if found.passed else "TOO FAR")
    return [str(found.number), *found.row.values(), str(found.ranks), *differences, f"{found.seconds:.0f}", verdict]


def excluded() -> list[str]:
    """Return a line for each reason, with the pairs that it excludes."""
    by_reason: dict[str, list[Pair]] = {}
    for pair, reason in excluded_pairs(FACTORS, conflict).items():
        by_reason.setdefault(reason, []).append(pair)
    return [
        f"{reason}: {'; '.join(f'{a} {x} with {b} {y}' for (a, x), (b, y) in pairs)}"
        for reason, pairs in by_reason.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = range(1, len(covering_list()) + 1)
    parser.add_argument("--rows", nargs="+", type=int, choices=every, default=list(every), metavar="NUMBER")
    parser.add_argument("--list", action="store_true", help="print the rows and the pairs that none has; train nothing")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--markdown", action="store_true", help="print the tables in markdown")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all runs; after -- if a list is before")
    arguments = parser.parse_args()
    if arguments.list:
        cells = [[str(i), *row.values(), str(ranks_of(row))] for i, row in enumerate(covering_list(), 1)]
        print(table(["row", *FACTORS, "ranks"], cells, arguments.markdown))
        print("\n".join(["", *excluded()]))
        return 0
    print(headline(HEADINGS, arguments.markdown), flush=True)
    begin = time.perf_counter()
    overrides = [f"training.steps={arguments.steps}", *arguments.overrides]
    try:
        found = compare_all(
            arguments.rows, overrides, lambda row: print(line(_cells(row), HEADINGS, arguments.markdown), flush=True)
        )
    finally:
        distributed.shutdown()
    good = sum(each.passed for each in found)
    print(f"\n{good} of {len(found)} rows within the bounds, in {time.perf_counter() - begin:.0f} s")
    if arguments.json:
        print(json.dumps({"steps": arguments.steps, "rows": [asdict(each) for each in found]}))
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
