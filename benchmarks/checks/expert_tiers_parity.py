"""Experts off the device change no bit: trainings whose experts' weights come from the host or the disk, beside those
whose weights stay on the device: `python -m benchmarks.checks.expert_tiers_parity [--every 4] [--seed 0] [--rows 1 7
...] [--list] [--steps 4] [--markdown] [--json] [KEY=VALUE ...]`.

A covering list of trainings of the tiny models: each pair of options below that can stand together meets in at least
one row. Each row trains twice on its ranks, streamed and resident, with evaluations between steps. Every step's losses,
auxiliary losses, gradient norm, learning rate, routing counts and placement, and each tensor of the last checkpoint,
weights and optimizer state, must be the same bits. A checkpoint says nothing of tiers: rows that go on resume the
streamed run from the resident one's checkpoint, the resident one from the streamed one's, or both from one that another
layout saved. A streamed run by layer stands beside a resident one by micro-batch, unless they share a table.

Three or more ranks that hold the same experts add their gradients up in an order that follows from where these lie:
behind the list stand the rows of DP2 in such layouts, whose losses must agree as those of two layouts.

`--every` takes one row of so many, from one that `--seed` chooses. The exit status says whether all are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

from benchmarks.checks.context_parity import short_texts
from benchmarks.checks.layout_parity import LAYOUTS as COMMON_LAYOUTS
from benchmarks.checks.layout_parity import SINGLE, Layout
from benchmarks.kit.checkpoint_bits import checkpoint_differences
from benchmarks.kit.covering import Row, covering_rows, excluded_pairs
from benchmarks.kit.tables import headline, line, table
from checkpoint import manifest
from configs.schema import Config
from tests import distributed
from tests.tolerances import BF16_LOSS, FP32_LOSS
from tests.training.helpers import Lines, largest_difference, make_config, read_metrics

TIMEOUT = 600.0  # seconds for one training
BATCH = 8  # samples of a global batch; of DP3's 12
# Three or four ranks hold the same experts.
MANY_HOLDERS = {
    "DP3": Layout(3, (f"training.global_batch_size={BATCH // 2 * 3}",)),
    "DP4": Layout(4, ()),
    "context 3": Layout(3, ("parallel.context=3", "model.sequence_length=36", "model.attention_dropout=0")),
}
LAYOUTS = {**COMMON_LAYOUTS, **MANY_HOLDERS}
COMMON = (
    *("checkpoint.interval=2", "checkpoint.keep=0", "training.eval_interval=3", "training.eval_batches=1"),
    *("model.sequence_length=32", "data.validation_fraction=0.2", f"training.global_batch_size={BATCH}"),
    *("optimizer.decay_steps=4", "optimizer.min_lr=0", "moe.global_aux_loss_coeff=0.01"),
)
# What a row's training has in both places.
SETTINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "family": {
        "gpt": ("experiment=gpt_moe_tiny", "model.tie_embeddings=false"),
        "gpt tied": ("experiment=gpt_moe_tiny", "model.tie_embeddings=true"),
        "bert": ("experiment=bert_moe_tiny",),
    },
    "layout": {},  # LAYOUTS
    "precision": {name: (f"training.precision={name}",) for name in ("fp32", "bf16")},
    "exp_avg": {name: (f"optimizer.moment_dtype={name}",) for name in ("fp32", "bf16")},
    "strategy": {
        name: (f"moe.memory_strategy={name}",)
        for name in (
            *("keep", "recompute", "communicate", "communicate_recompute"),
            *("offload", "offload_recompute", "communicate_offload"),
        )
    },
    "chunks": {
        "1": (),
        "2": ("moe.pipeline_degree=2",),
        "4, 2": ("moe.pipeline_degree=4", "moe.backward_pipeline_degree=2"),
        "budget": ("moe.token_budget=24",),
    },
    "capacity": {"dropless": (), "1": ("moe.capacity_factor=1.0",)},
    "shared expert": {"none": (), "one": ("moe.shared_expert_ffn_hidden_size=48",)},
    "bias": {"none": ("model.linear_bias=false",), "all": ("model.linear_bias=true",)},
    "placement": {
        "home": (),
        "scattered": ("moe.placement.policy=solve", "moe.placement.extra_slots=2", "moe.placement.interval=2"),
        "moves": ("moe.placement.policy=least_loaded", "moe.placement.extra_slots=2", "moe.placement.interval=1"),
        "blocks": (
            *("moe.placement.policy=least_loaded", "moe.placement.extra_slots=2", "moe.placement.interval=1"),
            *("moe.placement.bitwise=true", "moe.placement.block_rows=8"),
        ),
    },
    "recompute": {name: (f"training.recompute={name}",) for name in ("none", "selective", "full")},
    "layer inputs": {"device": (), "host": ("training.activation_offload=auto",)},
    "clipped": {"none": ("optimizer.clip_grad=0",), "all": ("optimizer.clip_grad=0.1",)},
    "overlap": {
        name: (f"parallel.overlap_grad_reduce={name}", f"parallel.overlap_param_gather={name}")
        for name in ("true", "false")
    },
    "dropout": {"none": (), "some": ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")},
}
# What the streamed one has besides.
STREAMED: dict[str, dict[str, tuple[str, ...]]] = {
    "weights, state": {
        "host, host": ("moe.weights_device=host", "optimizer.state_device=host"),
        "host, disk": ("moe.weights_device=host", "optimizer.state_device=disk"),
        "disk, disk": ("moe.weights_device=disk", "optimizer.state_device=disk"),
    },
    "alike ranks keep": {"parts": ("moe.shard_weights=true",), "all": ("moe.shard_weights=false",)},
    "slots": {number: (f"moe.weight_slots={number}",) for number in ("2", "1", "3")},
    "order": {name: (f"training.pass_order={name}",) for name in ("by_micro_batch", "by_layer")},
    "buckets": {"cut": ("optimizer.bucket_parameters=4096",), "whole": ()},
    "engine": {
        "host": ("optimizer.engine=host", "optimizer.early_update=never"),
        "host early": ("optimizer.engine=host", "optimizer.early_update=always"),
        "device": ("optimizer.engine=device_stream", "optimizer.early_update=auto"),
    },
}
NAMES = (
    *(SINGLE, "EP2", "DP2", "DP2xEP2", "EP4", "TP2+SP", "TP2+SPxEP2xETP2"),
    *("PP2", "PP2xVPP2", "DP2xPP2xEP2"),
)
FACTORS: dict[str, list[str]] = {
    **{name: list(options) for name, options in STREAMED.items()},
    **{name: list(options) for name, options in SETTINGS.items()},
    "layout": list(NAMES),
    "micro-batches": ["one", "several"],
    "sizes": ["powers of two", "odd"],
    "start": ["fresh", "from resident", "to resident", "other layout"],
}
ENDS = ("step", "loss", "validation_loss", "grad_norm", "learning_rate", "aux_loss", "global_aux_loss", "z_loss")
COMPARED = (*ENDS, "sentence_loss", "tokens", "tokens_per_expert", "dropped_tokens", "placement")


def ranks_of(layout: str) -> int:
    """How many ranks a layout takes."""
    return 1 if layout == SINGLE else LAYOUTS[layout].ranks


def conflict(row: Row) -> str | None:
    """Why some options cannot stand together; None: they can."""
    has = row.get
    layout = has("layout", "EP4")
    if has("placement", "home") != "home" and not any(word in layout for word in ("EP2", "EP4")):
        return "experts of one rank have no other place"
    if has("bias") == "all" and "TP2" in layout:
        return "experts that tensor ranks share have no biases"
    if has("bias") == "all" and has("shared expert") == "one":
        return "shared experts have no biases"
    if has("capacity") == "1" and has("placement", "home") != "home":
        return "placement drops no tokens"
    if has("chunks") == "4, 2" and "offload" in has("strategy", ""):
        return "what chunks leave on the host comes back by chunks"
    if has("placement") == "scattered" and has("start", "").endswith("resident"):
        return "the planner that changes its mind begins anew at a resume"
    if has("chunks") == "4, 2" and has("placement") == "blocks":
        return "blocks have one degree"
    if has("order") == "by_layer" and has("recompute", "full") != "full":
        return "training.pass_order=by_layer needs training.recompute=full"
    if has("order") == "by_layer" and "PP2" in layout:
        return "training.pass_order=by_layer is for one stage"
    if has("layer inputs") == "host" and has("recompute", "full") != "full":
        return "training.activation_offload needs training.recompute=full"
    if has("micro-batches") == "one" and has("layout", SINGLE) == "PP2xVPP2":
        return "interleaved stages take several micro-batches"
    if has("overlap") == "false" and has("engine") == "host early":
        return "early updates need gradients that are reduced early"
    return None


@functools.cache
def all_rows() -> list[Row]:
    """The covering list, and its rows of DP2 with more holders."""
    covering = covering_rows(FACTORS, conflict, cost=lambda row: ranks_of(row["layout"]) ** 0.5, num_drafts=20)
    of_two = [row for row in covering if row["layout"] == "DP2" and row["start"] != "other layout"]
    return [*covering, *({**row, "layout": name} for name in MANY_HOLDERS for row in of_two)]


def settings_of(row: Row, layout: str) -> list[str]:
    """The overrides of a row's resident training in a layout."""
    laid, elsewhere = LAYOUTS[layout].overrides if layout != SINGLE else (), layout != row["layout"]
    left_out = ("layout", "placement") if elsewhere else ("layout",)
    settings = [options[row[name]] for name, options in SETTINGS.items() if name not in left_out]
    experts = {"powers of two": 8, "odd": 12 if "EP4" in row["layout"] else 6 if "EP2" in row["layout"] else 3}
    sizes = [f"moe.num_experts={experts[row['sizes']]}"]
    if row["sizes"] == "odd":
        sizes += ["model.hidden_size=40", "moe.ffn_hidden_size=24"]
    if row["placement"] != "home":  # routers that no loss balances, so that homes move
        sizes += ["optimizer.lr=0.01", "moe.aux_loss_coeff=0"]
    config = make_config([*COMMON, "experiment=gpt_moe_tiny", *laid], ranks_of(layout))
    data = ranks_of(layout) // (config.parallel.tensor * config.parallel.pipeline * config.parallel.context)
    micro = config.training.global_batch_size // data if row["micro-batches"] == "one" else 1
    order = row["order"] if row["family"] != "gpt" and not elsewhere else "by_micro_batch"
    both = [f"training.micro_batch_size={micro}", f"training.pass_order={order}"]
    return [*settings[0], *COMMON, *(each for setting in settings[1:] for each in setting), *sizes, *laid, *both]


def streamed_of(row: Row, folder: Path) -> list[str]:
    """What its streamed training has besides. `folder`: on a disk."""
    return [f"memory.disk_dir={folder}", *(each for name, options in STREAMED.items() for each in options[row[name]])]


# The layouts that save what both of a row's trainings go on from.
OTHER = {
    SINGLE: "PP2",
    "EP2": "DP2",
    "DP2": SINGLE,
    "DP2xEP2": "EP2",
    "EP4": "DP2xEP2",
    "TP2+SP": "DP2",
    "TP2+SPxEP2xETP2": "PP2",
    "PP2": "DP2",
    "PP2xVPP2": "PP2",
    "DP2xPP2xEP2": "EP2",
}


@dataclass(frozen=True)
class Compared:
    """A row's streamed training beside the resident one. `differences`: what is not the same bits, or with many holders
    not close enough."""

    number: int
    row: Row
    tensors: int = 0
    steps: int = 0
    copies: int = 0  # of experts that travelled
    moved: int = 0  # experts that got another home
    last_loss: float = 0.0
    distance: float = 0.0  # largest relative difference of a loss
    seconds: float = 0.0
    differences: list[str] = field(default_factory=list)


def train_on_rank(config: Config, scattered: bool) -> None:
    """Train; every call is planned by the planner that changes its mind if `scattered`."""
    from tests.moe.placement.scattered import Scattered
    from training.trainer import Trainer

    with contextlib.ExitStack() as patches:
        if scattered:
            patches.enter_context(mock.patch.dict("moe.placement.policy.POLICIES", {"solve": Scattered()}))
        Trainer(config).fit()


def compare(number: int, folder: Path, overrides: Sequence[str], steps: int) -> Compared:
    """Train a row, numbered from 1, in both places. `folder`: for the runs and their records."""
    row, begin = all_rows()[number - 1], time.perf_counter()
    layout = row["layout"]

    def trained(name: str, streams: bool, layout: str = layout, start: str = "", last: int = steps) -> Lines:
        more = [*(streamed_of(row, folder) if streams else ()), *([f"checkpoint.resume={start}"] if start else ())]
        given = [*settings_of(row, layout), *more, f"training.steps={last}", f"run_dir={folder / name}", *overrides]
        config = make_config(given, ranks_of(layout))
        with contextlib.redirect_stdout(io.StringIO()):  # what the ranks print of themselves would break the table
            scattered = row["placement"] == "scattered" and layout == row["layout"]
            distributed.run(train_on_rank, ranks_of(layout), config, scattered, timeout=TIMEOUT)
        return read_metrics(folder / name)

    def saved(name: str, step: int) -> Path:
        return manifest.folder_of(folder / name, step)

    try:
        if row["start"] == "fresh":
            resident, streamed = trained("resident", False), trained("streamed", True)
        elif row["start"] == "from resident":
            resident = trained("resident", False)
            streamed = trained("streamed", True, start=str(saved("resident", 2)))
        elif row["start"] == "to resident":
            streamed = trained("streamed", True)
            resident = trained("resident", False, start=str(saved("streamed", 2)))
        else:
            other = OTHER[layout]
            streams = conflict({**row, "layout": other, "placement": "home"}) is None
            trained("other", streams, other, last=2)
            resident = trained("resident", False, start=str(saved("other", 2)))
            streamed = trained("streamed", True, start=str(saved("other", 2)))
    except (distributed.RankError, distributed.RankHang, distributed.RankDied) as error:
        print(f"row {number}: {error}", file=sys.stderr, flush=True)
        failed = str(error).strip().splitlines()[-1]
        return Compared(number, row, seconds=time.perf_counter() - begin, differences=[f"FAILED: {failed}"])
    compared, differ = checkpoint_differences(saved("streamed", steps), saved("resident", steps))
    placed = [each["placement"] for each in streamed if "placement" in each]
    distance, differences = loss_distance(streamed, resident), [*step_differences(streamed, resident), *differ]
    if layout in MANY_HOLDERS:
        bar = FP32_LOSS if row["precision"] == "fp32" else BF16_LOSS
        differences = [] if distance <= bar else [f"losses differ by {distance:.1e}"]
    return Compared(
        *(number, row, compared, min(len(resident), len(streamed))),
        copies=sum(each.get("copies", 0) for each in placed),
        moved=sum(each.get("moved", 0) for each in placed),
        last_loss=streamed[-1]["loss"],
        distance=distance,
        seconds=time.perf_counter() - begin,
        differences=differences,
    )


def loss_distance(ours: Lines, theirs: Lines) -> float:
    """The largest relative difference of a loss in the steps that both have on record."""
    steps = {each["step"] for each in ours} & {each["step"] for each in theirs}
    both = [[each for each in lines if each["step"] in steps] for lines in (ours, theirs)]
    return largest_difference(both[0], both[1], "loss") if steps else math.inf


def step_differences(ours: Lines, theirs: Lines) -> list[str]:
    """What two runs say differently of the steps that both have on record."""
    by_step = {each["step"]: each for each in theirs}
    both = [(each, by_step[each["step"]]) for each in ours if each["step"] in by_step]
    if not both:
        return ["the runs have no step in common"]
    return [
        f"step {one['step']}: {key} {one.get(key)} and {other.get(key)}"
        for one, other in both
        for key in COMPARED
        if one.get(key) != other.get(key)
    ]


def compare_all(
    numbers: Sequence[int],
    overrides: Sequence[str],
    steps: int,
    disk: str | None = None,
    on_row: Callable[[Compared], None] = lambda row: None,
) -> list[Compared]:
    """Compare these rows. `on_row` hears of each as soon as it is known; `disk`: folder for all runs."""
    found = []
    with short_texts() as (_, data):
        for number in numbers:
            folder = Path(tempfile.mkdtemp(dir=disk))
            try:
                found.append(compare(number, folder, [*data, *overrides], steps))
            finally:
                shutil.rmtree(folder)
            on_row(found[-1])
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What is printed
# ---------------------------------------------------------------------------------------------------------------------

HEADINGS = ["row", *FACTORS, "tensors", "copies", "moved", "seconds", ""]


def _cells(found: Compared) -> list[str]:
    numbers = [str(each) for each in (found.tensors, found.copies, found.moved)]
    verdict = f"{len(found.differences)} DIFFER: {found.differences[0]}" if found.differences else ""
    return [str(found.number), *found.row.values(), *numbers, f"{found.seconds:.0f}", verdict]


def summary(found: Sequence[Compared], markdown: bool) -> str:
    """A line for each layout: first those whose bits are the same."""
    lines = []
    for layout in NAMES:
        here = [each for each in found if each.row["layout"] == layout]
        counts = [sum(getattr(each, name) for each in here) for name in ("steps", "tensors", "copies", "moved")]
        differ = sum(bool(each.differences) for each in here)
        lines.append([layout, *(str(number) for number in (ranks_of(layout), len(here), *counts, differ))])
    heads = ["layout", "ranks", "trainings", "steps", "tensors", "copies", "moved", "differ"]
    far = []
    for layout in MANY_HOLDERS:
        here = [each for each in found if each.row["layout"] == layout]
        steps, distance = sum(each.steps for each in here), max((each.distance for each in here), default=0.0)
        far.append([layout, f"{ranks_of(layout)} holders", str(len(here)), str(steps), f"{distance:.0e}"])
    further = table(["layout", "of an expert", "trainings", "steps", "losses differ by"], far, markdown)
    return f"{table(heads, lines, markdown)}\n\n{further}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = range(1, len(all_rows()) + 1)
    parser.add_argument("--rows", nargs="+", type=int, choices=every, default=list(every), metavar="NUMBER")
    parser.add_argument("--every", type=int, default=1, help="take one row of so many")
    parser.add_argument("--seed", type=int, default=0, help="says with which row that begins")
    parser.add_argument("--list", action="store_true", help="print the rows and the pairs that none has; train nothing")
    parser.add_argument("--steps", type=int, default=4, help="of each training; at least 3")
    parser.add_argument("--disk-dir", help="folder on a disk, for runs and records; the system's for temporary files")
    parser.add_argument("--markdown", action="store_true", help="print the tables in markdown")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all runs; after -- if a list is before")
    arguments = parser.parse_args()
    if arguments.list:
        cells = [[str(i), *row.values()] for i, row in enumerate(all_rows(), 1)]
        print(table(["row", *FACTORS], cells, arguments.markdown))
        for (a, x), (b, y) in (reasons := excluded_pairs(FACTORS, conflict)):
            print(f"{a} {x} with {b} {y}: {reasons[(a, x), (b, y)]}")
        return 0
    print(headline(HEADINGS, arguments.markdown), flush=True)
    begin, chosen = time.perf_counter(), arguments.rows[arguments.seed % arguments.every :: arguments.every]
    try:
        found = compare_all(
            *(chosen, arguments.overrides, arguments.steps, arguments.disk_dir),
            on_row=lambda row: print(line(_cells(row), HEADINGS, arguments.markdown), flush=True),
        )
    finally:
        distributed.shutdown()
    many = [each for each in found if each.row["layout"] in MANY_HOLDERS]
    good, close = (
        sum(not each.differences and (each in many) == is_many for each in found) for is_many in (False, True)
    )
    print(f"\n{summary(found, arguments.markdown)}\n")
    minutes = (time.perf_counter() - begin) / 60
    few = len(found) - len(many)
    print(f"{good} of {few} streamed trainings have the bits of the resident ones, in {minutes:.0f} minutes")
    print(f"{close} of {len(many)} with three or four holders of an expert have their losses within the bar")
    if arguments.json:
        print(json.dumps({"steps": arguments.steps, "rows": [asdict(each) for each in found]}))
    return 0 if good + close == len(found) else 1


if __name__ == "__main__":
    from benchmarks.checks import expert_tiers_parity  # under the name by which ranks find its functions

    sys.exit(expert_tiers_parity.main())
