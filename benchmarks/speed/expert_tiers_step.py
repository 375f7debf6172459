"""Steps whose experts lie off the device, against what binds them: `python -m benchmarks.speed.expert_tiers_step
[ratios] [overlap] [layers] [shards] [--rounds 5] [--ratios 0.25 0.5 1 2 4] [--tiers host disk] [--orders by_layer]
[--micro-batches 2] [--slots 2] [--early] [--seconds 2.5] [--markdown] [--json]`

Virtual accelerator, emulated link (benchmarks/kit/expert_tiers_rig.py): each rank's disk is throttled by a blkio
control group, or emulated where there can be none, which is said. Trainings that are compared run in turns, each in
processes of its own.

ratios: a step by tokens of an expert between two transfers of its weights, in break-evens (FLOP/s over bytes/s, times
bytes of a weight over 2; the disk is as fast as the link). bound: the most of the resident training's passes alone,
bytes over the link in its busier direction, and the disk's in its; and filling: one layer's weights come, one layer's
gradient leaves, one layer is updated. phases: the same with a forward pass apart from a backward one, as weights that
a step changes cannot come before it, nor gradients leave before they are made.
overlap: a step against the resident one, where computing is predicted to hide all.
layers: passes by layer against by micro-batch, where the link binds.
shards: ranks that hold the same experts keep a part each, where each rank's disk binds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.kit.expert_tiers_rig import Ranks, Rates, StepMoves
from benchmarks.kit.rounds import standard_error
from benchmarks.kit.tables import table
from optim.arrangement.experts import ExpertTraffic

BAR, OVERLAP, BY_LAYER, SHARDS = 1.08, 0.97, 1.9, {2: 1.7, 4: 3.0}


@dataclass(frozen=True)
class RatioRow:
    """A case of tokens by break-even; seconds."""

    tier: str
    order: str
    ratio: float
    link_rate: float  # bytes per second
    alone: float
    link: float
    disk: float
    filling: float
    phases: float
    step: float
    error: float
    weights_waited: float
    grads_waited: float

    @property
    def bound(self) -> float:
        return max(self.alone, self.link, self.disk) + self.filling

    @property
    def binds(self) -> str:
        """Name of the resource with the longest busy time."""
        sections = {"computing": self.alone, "link": self.link, "disk": self.disk}
        return max(sections, key=sections.__getitem__)

    @property
    def holds(self) -> bool:
        """Within the bar, or two standard errors of that."""
        return self.within(self.bound)

    def within(self, bound: float) -> bool:
        """The same of another bound."""
        return self.step <= BAR * bound + 2 * self.error


def report(found: dict[str, Any], markdown: bool) -> list[str]:
    """Tables of what was measured."""
    sections = []
    if results := found.get("ratios"):
        headings = ["experts on", "order", "break-evens", "link MB/s", "passes s", "link s", "disk s", "filling s"]
        headings += ["step s", "error s", "step by bound", "by phases", "waits s", "binds", "holds"]
        cells = [
            [
                row.tier,
                row.order,
                f"{row.ratio:g}",
                f"{row.link_rate / 1e6:.1f}",
                *(f"{value:.3f}" for value in (row.alone, row.link, row.disk, row.filling, row.step, row.error)),
                f"{row.step / row.bound:.3f}",
                f"{row.step / row.phases:.3f}",
                f"{row.weights_waited + row.grads_waited:.3f}",
                row.binds,
                "yes" if row.holds else "no",
            ]
            for row in results
        ]
        sections.append(table(headings, cells, markdown))
    if results := found.get("overlap"):
        headings = ["order", "break-evens", "step s", "by resident passes", "by resident steps", "by recompute=none"]
        names = ("passes", "resident", "none")
        cells = [
            [
                row["order"],
                f"{row['ratio']:g}",
                f"{row['step']:.3f}",
                *(f"{row[name]:.3f} +- {row[name + '_error']:.3f}" for name in names),
                "yes" if row["passes"] >= OVERLAP - 2 * row["passes_error"] else "no",
            ]
            for row in results
        ]
        sections.append(table([*headings, "holds"], cells, markdown))
    if results := found.get("layers"):
        headings = [
            "precision",
            "micro-batches",
            "weights by inputs",
            "transfers",
            "slots kept",
            "step s",
            "speedup",
            "holds",
        ]
        cells = [
            [
                row["precision"],
                str(row["micro_batches"]),
                f"{row['weights_by_inputs']:.2f}",
                *(f"{a} : {b}" for a, b in (row["fills"], row["kept"])),
                "{:.3f} : {:.3f}".format(*row["steps"]),
                f"{row['speedup']:.2f} +- {row['error']:.2f}",
                "yes" if row["speedup"] + 2 * row["error"] >= BY_LAYER else "no",
            ]
            for row in results
        ]
        sections.append(table(headings, cells, markdown))
    if results := found.get("shards"):
        headings = ["ranks", "bytes read a rank", "step s", "speedup", "holds"]
        cells = [
            [
                str(row["ranks"]),
                "{:,} : {:,}".format(*row["read"]),
                "{:.3f} : {:.3f}".format(*row["steps"]),
                f"{row['speedup']:.2f} +- {row['error']:.2f}",
                "yes" if row["speedup"] + 2 * row["error"] >= SHARDS[row["ranks"]] else "no",
            ]
            for row in results
        ]
        sections.append(table(headings, cells, markdown))
    return sections


RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
FULL_OVERLAP = 4.0  # break-evens at which computing is predicted to hide all
DENSE = 1.3  # operations of a model by those of its experts
FAST = Rates(1e15, 1e12, 1e12)
FORWARD = 0.25  # of the passes' operations, with whole layers computed again
ORDERS = ("by_micro_batch", "by_layer")


@dataclass(frozen=True)
class Shape:
    """Sizes of a training, MoE layers alone."""

    layers: int = 8
    hidden: int = 128
    width: int = 320
    experts: int = 8
    top_k: int = 2
    length: int = 64
    samples: int = 4  # of a micro-batch
    micro_batches: int = 2
    precision: str = "bf16"
    bucket: int = 2**17  # parameters: eight buckets of a layer
    weight_slots: int = 2  # of the device, each for a layer's weights
    early: bool = False  # updates come early, to shadows; nothing is clipped

    @property
    def weights(self) -> int:
        """Parameters of one layer's experts."""
        return self.experts * 3 * self.hidden * self.width

    @property
    def weight_bytes(self) -> int:
        """Of a parameter."""
        return 2 if self.precision == "bf16" else 4

    @property
    def tokens(self) -> float:
        """Of an expert in a micro-batch."""
        return self.samples * self.length * self.top_k / self.experts

    def overrides(self, weights: str, order: str, ranks: int = 1, recompute: str = "full") -> list[str]:
        """Keys of a config with its experts there."""
        return [
            "model=gpt_moe_tiny",
            f"model.num_layers={self.layers}",
            f"model.hidden_size={self.hidden}",
            f"model.sequence_length={self.length}",
            f"moe.num_experts={self.experts}",
            f"moe.top_k={self.top_k}",
            f"moe.ffn_hidden_size={self.width}",
            f"moe.weights_device={weights}",
            f"moe.weight_slots={self.weight_slots}",
            f"optimizer.state_device={weights}",
            f"training.pass_order={order}",
            f"training.recompute={recompute}",
            f"training.micro_batch_size={self.samples}",
            f"training.global_batch_size={self.samples * self.micro_batches * ranks}",
            f"training.precision={self.precision}",
            f"optimizer.bucket_parameters={self.bucket}",
            *(("optimizer.early_update=always", "optimizer.clip_grad=0") if self.early and weights != "device" else ()),
            "training.device=cpu",
            "training.steps=1000000",
        ]

    def per_byte(self, ratio: float, order: str) -> float:
        """FLOP/s by the link's bytes per second, for so many break-evens."""
        calls = self.micro_batches if order == "by_layer" else 1
        return 2 * calls * self.tokens / (ratio * self.weight_bytes)

    @property
    def operations(self) -> float:
        """Of a step, about."""
        return 8 * self.weights * self.tokens * self.micro_batches * self.layers * DENSE


def in_turns(calls: Sequence[Callable[[], StepMoves]], rounds: int) -> list[list[StepMoves]]:
    """What each call gave in each round; another one begins each time."""
    found: list[list[StepMoves]] = [[] for _ in calls]
    for turn in range(rounds):
        for number in range(len(calls)):
            index = (turn + number) % len(calls)
            found[index].append(calls[index]())
    return found


def seconds(moves: Sequence[StepMoves]) -> list[float]:
    """Of each round's step."""
    return [each.seconds for each in moves]


def exact_bytes(ranks: Ranks) -> tuple[StepMoves, ExpertTraffic]:
    """(bytes of a step of the first rank, what its plan says of experts). Raises AssertionError where they differ."""
    ranks.hold(FAST)
    counted, experts = ranks.call("bytes_of", 1)[0]
    expected: ExpertTraffic = ranks.call("expected")[0]
    total = expected.total
    found = {name: experts[name] for name in ("up", "down", "read", "written")}
    assert found == {name: getattr(total, name) for name in found}, (found, total)
    return counted, expected


def ratio_rows(tier: str, order: str, shape: Shape, ratios: Sequence[float], rounds: int, of: float) -> list[RatioRow]:
    """Cases of one tier and order. `of`: seconds that what binds a step takes, about."""
    results = []
    with (
        Ranks(shape.overrides("device", order)) as resident,
        Ranks(shape.overrides(tier, order), disk=tier == "disk") as streamed,
    ):
        counted, traffic = exact_bytes(streamed)
        for ratio in ratios:
            per_byte = shape.per_byte(ratio, order)
            most = max(counted.up, counted.down, counted.read, counted.written, shape.operations / per_byte)
            link = most / of
            rates = Rates(per_byte * link, link, link)
            for each in (resident, streamed):
                each.hold(rates)
            alone, steps = in_turns([lambda: resident.steps(1, False), lambda: streamed.steps(2)], rounds)
            passes = statistics.median(seconds(alone))
            host = statistics.median(each.host for each in steps)
            results.append(
                RatioRow(
                    tier,
                    order,
                    ratio,
                    link,
                    passes,
                    max(counted.up, counted.down) / link,
                    max(counted.read, counted.written) / link,
                    filling(traffic, rates, host),
                    phases(traffic, rates, passes, shape, order) + filling(traffic, rates, host),
                    statistics.median(seconds(steps)),
                    standard_error(seconds(steps)),
                    statistics.median(each.weights_waited for each in steps),
                    statistics.median(each.grads_waited for each in steps),
                )
            )
            print(words(results[-1]), flush=True)
    return results


def filling(traffic: ExpertTraffic, rates: Rates, host: float) -> float:
    """Seconds in which nothing can hide a layer: its weights come first, its gradient leaves last, it is updated.
    `host`: of all host updates."""
    layer = traffic.layer
    fetch, gone, update = layer.fetch(), layer.gradient(layer.num_gradients == 1, True), layer.update()
    link = (fetch.up + gone.up + gone.down) / rates.link
    disk = (fetch.read + gone.read + gone.written + update.read + update.written) / rates.disk
    return link + disk + host / layer.records.num_layers


def phases(traffic: ExpertTraffic, rates: Rates, alone: float, shape: Shape, order: str) -> float:
    """Seconds of a step's forward and backward passes one after the other, each what has most to do in it; the update
    goes on in the first forward pass, an early one in the last backward pass."""
    count = 1 if order == "by_layer" else shape.micro_batches
    turn = max(shape.layers - 1, 1)
    ahead = sum(fill.visit == 0 or (fill.visit - 1) // turn % 2 == 0 for fill in traffic.fills)
    fetch, left, update = traffic.layer.fetch(), traffic.layer.gradients_out, traffic.layer.updates
    forward, back = fetch.times(ahead), fetch.times(len(traffic.fills) - ahead) + left
    link, disk = rates.link * count, rates.disk * count
    others = max(FORWARD * alone / count, forward.up / link, forward.read / disk)
    back_alone = max((1 - FORWARD) * alone / count, back.up / link, back.down / link)
    ahead_read, back_read, written = forward.read / disk, back.read / disk, back.written / disk
    read, changed = update.read / rates.disk, update.written / rates.disk
    backward = max(back_alone, back_read, written)
    first, last = max(others, ahead_read + read, changed), backward
    if shape.early:
        first, last = others, max(back_alone, back_read + read, written + changed)
    return first + last + (count - 1) * (others + backward)


def words(row: RatioRow) -> str:
    """A line of a case, as it is measured."""
    return (
        f"{row.tier}, {row.order}, {row.ratio:g} break-evens: step {row.step:.3f} s, {row.step / row.bound:.3f} of its "
        f"bound, {row.step / row.phases:.3f} by phases"
    )


def overlap_rows(shape: Shape, ratio: float, rounds: int, of: float) -> list[dict[str, Any]]:
    """Streamed from the host against resident, in both orders, at so many break-evens."""
    results = []
    for order in ORDERS:
        with (
            Ranks(shape.overrides("device", order)) as resident,
            Ranks(shape.overrides("device", "by_micro_batch", recompute="none")) as kept,
            Ranks(shape.overrides("host", order)) as streamed,
        ):
            per_byte = shape.per_byte(ratio, order)
            link = shape.operations / per_byte / of
            for each in (resident, kept, streamed):
                each.hold(Rates(per_byte * link, link))
            calls = [lambda: resident.steps(2, False), lambda: resident.steps(2), lambda: kept.steps(2)]
            passes, whole, none, steps = map(seconds, in_turns([*calls, lambda: streamed.steps(2)], rounds))
        shares = {
            name: [a / b for a, b in zip(base, steps, strict=True)]
            for name, base in (("passes", passes), ("resident", whole), ("none", none))
        }
        row: dict[str, Any] = {"order": order, "ratio": ratio, "step": statistics.median(steps)}
        for name, values in shares.items():
            row |= {name: statistics.median(values), f"{name}_error": standard_error(values)}
        results.append(row)
        print(f"overlap, {order}: {row['passes']:.3f} of the resident passes' speed", flush=True)
    return results


def layer_row(shape: Shape, rounds: int, of: float) -> dict[str, Any]:
    """By layer against by micro-batch with layer inputs on the host too, at a quarter of the break-even."""
    offload = ["training.activation_offload=auto"]
    with (
        Ranks([*shape.overrides("host", "by_micro_batch"), *offload]) as one,
        Ranks([*shape.overrides("host", "by_layer"), *offload]) as other,
    ):
        (counted, many), (_, few) = exact_bytes(one), exact_bytes(other)
        link = max(counted.up, counted.down) / of
        for each in (one, other):
            each.hold(Rates(shape.per_byte(0.25, "by_layer") * link, link))
        slow, fast = map(seconds, in_turns([lambda: one.steps(2), lambda: other.steps(2)], rounds))
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    whole = 2 * shape.layers
    row = {
        "precision": shape.precision,
        "micro_batches": shape.micro_batches,
        "weights_by_inputs": shape.weights / (shape.hidden * shape.samples * shape.length * shape.micro_batches),
        "up": [many.fetched.up, few.fetched.up],
        "kept": [whole * shape.micro_batches - len(many.fills), whole - len(few.fills)],
        "fills": [len(many.fills), len(few.fills)],
        "steps": [statistics.median(slow), statistics.median(fast)],
        "speedup": statistics.median(ratios),
        "error": standard_error(ratios),
    }
    print(f"by layer, {shape.precision}: {row['speedup']:.2f} times as fast", flush=True)
    return row


def shard_row(count: int, shape: Shape, rounds: int, of: float) -> dict[str, Any]:
    """So many ranks that hold the same experts, all of them or a part each, on disks that bind."""
    shape = replace(shape, micro_batches=1)
    of_all, of_part = (
        Ranks([*shape.overrides("disk", "by_layer", count), f"moe.shard_weights={value}"], count, disk=True)
        for value in ("false", "true")
    )
    with of_all as whole, of_part as shards:
        (counted, alike), (_, sharded) = exact_bytes(whole), exact_bytes(shards)
        disk = max(counted.read, counted.written) / of
        for each in (whole, shards):
            each.hold(Rates(1e12, 1e10, disk))
        slow, fast = map(seconds, in_turns([lambda: whole.steps(2), lambda: shards.steps(2)], rounds))
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    row = {
        "ranks": count,
        "read": [alike.total.read, sharded.total.read],
        "steps": [statistics.median(slow), statistics.median(fast)],
        "speedup": statistics.median(ratios),
        "error": standard_error(ratios),
        "emulated": whole.emulated,
    }
    print(f"{count} ranks: {row['speedup']:.2f} times as fast", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ["ratios", "overlap", "layers", "shards"]
    parser.add_argument("parts", nargs="*", default=sections, help=f"of {', '.join(sections)}; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--tiers", nargs="+", default=["host", "disk"])
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=ORDERS, help="of passes, for ratios")
    parser.add_argument("--micro-batches", type=int, default=Shape.micro_batches, help="of a step, for ratios")
    parser.add_argument("--slots", type=int, default=Shape.weight_slots, help="moe.weight_slots, for ratios")
    parser.add_argument("--early", action="store_true", help="early updates, nothing clipped; for ratios")
    parser.add_argument("--seconds", type=float, default=2.5, help="that what binds a step takes, about")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shape, found = Shape(), dict[str, Any]()
    if "ratios" in args.parts:
        cases = [(tier, order) for tier in args.tiers for order in args.orders]
        of = replace(shape, micro_batches=args.micro_batches, weight_slots=args.slots, early=args.early)
        made = [ratio_rows(*case, of, args.ratios, args.rounds, args.seconds) for case in cases]
        found["ratios"] = [row for results in made for row in results]
    if "overlap" in args.parts:
        found["overlap"] = overlap_rows(shape, FULL_OVERLAP, args.rounds, args.seconds)
    if "layers" in args.parts:
        sizes = replace(shape, micro_batches=4, length=120)
        each = [replace(sizes, precision=precision) for precision in ("bf16", "fp32")]
        found["layers"] = [layer_row(one, args.rounds, 2 * args.seconds) for one in each]
    if "shards" in args.parts:
        sizes = replace(shape, layers=4)
        found["shards"] = [shard_row(count, sizes, args.rounds, 2 * args.seconds) for count in SHARDS]
    why = Ranks([], disk=True).emulated
    disk = "each rank's disk throttled by a blkio control group" if why is None else f"emulated disk ({why})"
    print(f"\nvirtual accelerator, emulated link, {disk}; {args.rounds} rounds\n")
    if results := found.get("ratios"):
        right, near = sum(row.holds for row in results), sum(row.within(row.phases) for row in results)
        print(f"{right} of {len(results)} within {BAR - 1:.0%} of the bound, {near} of {len(results)} by phases\n")
    print("\n\n".join(report(found, args.markdown)))
    if args.json:
        results = [asdict(row) for row in found.pop("ratios", [])]
        print(json.dumps({"ratios": results, **found}))


if __name__ == "__main__":
    main()
