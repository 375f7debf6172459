"""Random trainings give in every layout what they give in one process: `python -m benchmarks.checks.fuzz --seed 1
[--cases 200] [--thresholds] [--only 7 12 ...] [--list] [--markdown] [--json] [KEY=VALUE ...]`.

Each case draws a tiny model, its data and its training (benchmarks/checks/fuzz_draws.py), trains it in one process with
everything plain, and then on 1 to 4 ranks in a random layout, with random tiers, recomputation, micro-batch size and
order of passes; two cases in five save half way and go on in another such layout. Every step's losses may differ by
1e-5 in fp32 and by 1e-2 in half precision, a gradient norm in fp32 by 1e-4 (tests/tolerances.py). Besides, exactly:
the same tokens, learning rates and updated steps; biases of experts as their rule makes them of the recorded counts;
and where experts' weights or optimizer state are off the device, every number of the same layout without that, if at
most two ranks hold the same experts.

`--thresholds` draws around the points where two ways of computing the same meet, such as 512 tokens or micro-batches
of 1. A case follows from the seed and its number. One that crashes or differs is a line with all its overrides, and the
exit status is then 1. Further arguments are overrides for every training.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from base.errors import ConfigError
from benchmarks.checks.context_parity import short_texts
from benchmarks.checks.fuzz_draws import Case, Draw, Leg
from benchmarks.kit.checkpoint_bits import checkpoint_tensors
from benchmarks.kit.tables import table
from checkpoint import manifest
from configs import derived
from configs.schema import Config
from tests import distributed
from tests.tolerances import BF16_LOSS, FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import Lines, make_config, read_metrics, train

TIMEOUT = 300.0  # seconds for one training
MAX_REFUSALS = 20  # by ranks, of what the rules allowed, before a case counts as failed
COMMON = ("training.eval_batches=1", "data.validation_fraction=0.2", "checkpoint.keep=0")
LOSSES = ("loss", "validation_loss", "sentence_loss")
ROUTING_LOSSES = ("aux_loss", "sequence_aux_loss", "global_aux_loss", "z_loss")
EXACT = ("tokens", "predicted_tokens", "learning_rate", "updated")
RESIDENT = {
    "moe.weights_device": "device",
    "optimizer.state_device": "device",
    "optimizer.engine": "auto",
    "optimizer.early_update": "auto",
}
HALF = ("bf16", "fp16")


@dataclass
class Found:
    """A case beside one process: largest relative differences, and what is not as it must be."""

    case: Case
    loss: float = 0.0
    grad_norm: float = 0.0
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)  # by the ranks

    @property
    def precision(self) -> str:
        return next(each.split("=")[1] for each in self.case.shared if each.startswith("training.precision="))


@contextlib.contextmanager
def texts() -> Iterator[tuple[Path, dict[str, list[str]]]]:
    """A folder for runs, and for each kind of text the overrides that train on it: many documents in a sample, and
    documents of so few words that a micro-batch may have next to nothing to predict."""
    draw, words = random.Random(1), Path(random.__file__).read_text(encoding="utf-8").split()
    with short_texts() as (folder, short):
        with open(folder / "words.jsonl", "w", encoding="utf-8") as stream:
            for length in draw.choices([1, 1, 1, 2, 3], k=6000):
                stream.write(json.dumps({"text": " ".join(draw.choices(words, k=length))}) + "\n")
        yield folder, {"short": short, "words": [f"data.corpus={folder / 'words.jsonl'}", *short[1:]]}


def check(draw: Draw, folder: Path, data: dict[str, list[str]], overrides: Sequence[str]) -> Found:
    """Train a case in one process and in its layouts. What the ranks refuse is drawn again."""
    begin, refused = time.perf_counter(), Counter[str]()
    for _ in range(MAX_REFUSALS):
        case = draw.next_case()
        with tempfile.TemporaryDirectory(dir=folder) as case_folder:
            try:
                found = _compared(case, Path(case_folder), [*data[case.text], *COMMON, *overrides])
            except distributed.RankError as error:
                if isinstance(error.__cause__, ConfigError):
                    refused[str(error.__cause__).split()[0]] += 1
                    continue
                found = Found(case, faults=[f"FAILED: {_last_line(error)}"])
                print(f"case {case.number}: {error}", file=sys.stderr, flush=True)
            except (distributed.RankHang, distributed.RankDied, OSError, ValueError) as error:
                found = Found(case, faults=[f"FAILED: {_last_line(error)}"])
                print(f"case {case.number}: {error}", file=sys.stderr, flush=True)
        break
    else:
        found = Found(case, faults=[f"FAILED: refused by the ranks {MAX_REFUSALS} times: {dict(refused)}"])
    found.seconds, found.refused = time.perf_counter() - begin, refused
    return found


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1]


def _compared(case: Case, case_folder: Path, common: Sequence[str]) -> Found:
    shared = [*case.shared, *common, f"memory.disk_dir={case_folder}"]
    single_leg = Leg(1, case.steps, case.single)
    _, single = _train(case, single_leg, shared, case_folder / "single")
    found = Found(case)
    lines: Lines = []
    before: Path | None = None
    for number, leg in enumerate(case.legs):
        run_dir = case_folder / f"leg{number}"
        config, taken = _train(case, leg, shared, run_dir, before)
        plain = _resident(config, leg)
        if plain is not None:
            _, other = _train(case, plain, shared, case_folder / f"resident{number}", before)
            found.faults += different_bits(taken, other)
        lines += taken
        before = manifest.folder_of(run_dir, leg.last)
        found.faults += wrong_biases(
            config, [each for each in lines if each["step"] <= leg.last], checkpoint_tensors(before)
        )
    compare(found, lines, single)
    return found


def _train(
    case: Case, leg: Leg, shared: Sequence[str], run_dir: Path, before: Path | None = None
) -> tuple[Config, Lines]:
    """Train on the leg's ranks, from a checkpoint if there is one; the metrics of the steps taken."""
    start = "never" if before is None else str(before)
    steps = [f"training.steps={leg.last}", f"optimizer.decay_steps={case.steps}"]
    given = [*shared, *leg.overrides, *steps, f"run_dir={run_dir}", f"checkpoint.resume={start}"]
    config = make_config([*given, "training.eval_interval=2"], leg.ranks)  # after the helper's own
    with contextlib.redirect_stdout(io.StringIO()):  # what the ranks print of themselves
        distributed.run(train, leg.ranks, config, timeout=TIMEOUT)
    return config, read_metrics(run_dir)


def _resident(config: Config, leg: Leg) -> Leg | None:
    """The same with experts' weights and optimizer state on the device; None where that is the same run, or need not
    have the same bits: three ranks or more hold the same experts, or measured times choose a schedule."""
    moe, parallel = config.moe, config.parallel
    streams = derived.is_moe(config) and moe.weights_device != "device"
    if not streams and config.optimizer.state_device == "device":
        return None
    if streams and leg.ranks // (parallel.pipeline * parallel.expert * derived.expert_tensor_size(config)) > 2:
        return None
    if derived.plans_moe(config):
        return None
    values = dict(each.split("=", 1) for each in leg.overrides)
    return Leg(leg.ranks, leg.last, tuple(f"{key}={value}" for key, value in {**values, **RESIDENT}.items()))


def different_bits(ours: Lines, theirs: Lines) -> list[str]:
    """List the numbers in which a run with offloaded parts differs from the one without, a line each."""
    keys = (*LOSSES, *ROUTING_LOSSES, *EXACT, "grad_norm", "tokens_per_expert")
    return [
        f"step {one['step']}: off the device {key} {one.get(key)}, on it {other.get(key)}"
        for one, other in zip(ours, theirs, strict=True)
        for key in keys
        if repr(one.get(key)) != repr(other.get(key))
    ][:1]


def wrong_biases(config: Config, lines: Lines, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Biases of a checkpoint that are not what the rule makes of the counts on record: each bias takes a step of
    moe.expert_bias_rate towards an even load, at each update."""
    if not config.moe.expert_bias or config.moe.capacity_factor is not None:
        return []
    faults = []
    for index, layer in enumerate(lines[0]["moe_layers"]["layer"]):
        bias = torch.zeros(config.moe.num_experts or 0)
        for each in lines:
            if each["updated"]:
                counts = torch.tensor(each["tokens_per_expert"]["counts"][index], dtype=torch.float64)
                bias += torch.sign(counts.mean() - counts).float() * config.moe.expert_bias_rate
        saved = next(value for key, value in tensors.items() if f"layers.{layer}.mlp.router.expert_bias" in key)
        if not torch.equal(bias, saved.float()):
            faults.append(f"layer {layer}: biases {saved.tolist()}, by the counts {bias.tolist()}")
    return faults[:1]


def compare(found: Found, lines: Lines, single: Lines) -> None:
    """Compare the steps with those of one process."""
    half = found.precision in HALF
    steps, ends = [each["step"] for each in single], {leg.last for leg in found.case.legs}
    if [each["step"] for each in lines] != steps:
        found.faults.append(f"steps {[each['step'] for each in lines]}, one process {steps}")
        return
    for one, other in zip(lines, single, strict=True):
        for key in EXACT:
            if one.get(key) != other.get(key):
                found.faults.append(f"step {one['step']}: {key} {one.get(key)}, one process {other.get(key)}")
        limits = dict.fromkeys((*LOSSES, *ROUTING_LOSSES), BF16_LOSS if half else FP32_LOSS)
        if not half:
            limits["grad_norm"] = FP32_GRAD_NORM
        for key, limit in limits.items():
            if key == "aux_loss" and not _same_micro_batches(found.case):
                continue  # a loss of each micro-batch
            if key == "validation_loss" and one["step"] in ends and key not in other:
                continue  # a run evaluates at its end too
            distance = _relative_difference(one.get(key), other.get(key))
            if key in LOSSES:
                found.loss = max(found.loss, distance)
            if key == "grad_norm":
                found.grad_norm = max(found.grad_norm, distance)
            if not distance <= limit:
                routed = one.get("tokens_per_expert") == other.get("tokens_per_expert")
                also = "" if routed else "; other tokens per expert"
                values = f"{key} {one.get(key)}, one process {other.get(key)}"
                found.faults.append(f"step {one['step']}: {values}: {distance:.1e} apart, allowed {limit:.0e}{also}")


def _same_micro_batches(case: Case) -> bool:
    """Whether the layouts train on the micro-batches of one process."""
    return all(each in leg.overrides for leg in case.legs for each in case.single)


def _relative_difference(one: Any, other: Any) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if repr(one) == repr(other) else math.inf
    return abs(one - other) / max(abs(other), 1e-30) if one != other else 0.0


def check_all(
    seed: int,
    numbers: Sequence[int],
    thresholds: bool,
    overrides: Sequence[str] = (),
    on_case: Callable[[Found], None] = lambda found: None,
) -> list[Found]:
    """Check these cases. `on_case` hears of each as soon as it is known."""
    found = []
    with texts() as (folder, data):
        for number in numbers:
            found.append(check(Draw(seed, number, thresholds), folder, data, overrides))
            on_case(found[-1])
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What is printed
# ---------------------------------------------------------------------------------------------------------------------


def summary(found: Sequence[Found], markdown: bool) -> str:
    """A line for each precision and threshold."""
    table_rows = []
    groups = dict.fromkeys((each.case.threshold or "any", each.precision) for each in found)
    for group in sorted(groups):
        here = [each for each in found if (each.case.threshold or "any", each.precision) == group]
        worst = [max(getattr(each, name) for each in here) for name in ("loss", "grad_norm")]
        legs = sum(len(each.case.legs) for each in here)
        ranks = "/".join(str(n) for n in sorted({leg.ranks for each in here for leg in each.case.legs}))
        differ = sum(bool(each.faults) for each in here)
        table_rows.append([*group, str(len(here)), str(legs), ranks, *(f"{n:.1e}" for n in worst), str(differ)])
    heads = ["cases", "precision", "number", "layouts", "ranks", "loss", "grad norm", "differ"]
    return table(heads, table_rows, markdown)


def _show(found: Found, seed: int) -> None:
    case = found.case
    what = f" ({case.threshold})" if case.threshold else ""
    ranks = " then ".join(str(leg.ranks) for leg in case.legs)
    distance = f"loss {found.loss:.1e}, grad norm {found.grad_norm:.1e}"
    print(f"case {case.number}{what}: {found.precision}, {ranks} ranks, {distance}, {found.seconds:.0f} s", flush=True)
    if found.faults:
        again = f"--seed {seed}{' --thresholds' if case.threshold else ''} --only {case.number}"
        print(f"  DIFFERS: {found.faults[0]} [{again}] {case.line()}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="of the draws; a fresh one finds what others did not")
    parser.add_argument("--cases", type=int, default=200, help="how many; default: 200")
    parser.add_argument("--only", nargs="+", type=int, metavar="NUMBER", help="these cases alone, numbered from 1")
    parser.add_argument("--thresholds", action="store_true", help="draw around thresholds")
    parser.add_argument("--list", action="store_true", help="print the cases; train nothing")
    parser.add_argument("--markdown", action="store_true", help="print the table in markdown")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all runs; after -- if a list is before")
    arguments = parser.parse_args()
    numbers = arguments.only or range(1, arguments.cases + 1)
    if arguments.list:
        for number in numbers:
            print(f"case {number}: {Draw(arguments.seed, number, arguments.thresholds).next_case().line()}")
        return 0
    begin = time.perf_counter()
    try:
        found = check_all(
            *(arguments.seed, numbers, arguments.thresholds, arguments.overrides),
            on_case=lambda case: _show(case, arguments.seed),
        )
    finally:
        distributed.shutdown()
    good = sum(not each.faults for each in found)
    refused = sum((each.case.refused + each.refused for each in found), Counter[str]())
    print(f"\n{summary(found, arguments.markdown)}\n")
    print(
        "drawn again, by the key that was refused:", ", ".join(f"{k} {n}" for k, n in refused.most_common()) or "none"
    )
    minutes = (time.perf_counter() - begin) / 60
    where = " around thresholds" if arguments.thresholds else ""
    print(f"{good} of {len(found)} random trainings{where} are those of one process, in {minutes:.0f} minutes")
    if arguments.json:
        table_rows = [[each.case.number, each.loss, each.grad_norm, each.seconds, each.faults] for each in found]
        print(json.dumps({"seed": arguments.seed, "thresholds": arguments.thresholds, "cases": table_rows}))
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
