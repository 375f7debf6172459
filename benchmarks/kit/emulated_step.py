"""The time of a training's optimizer step on an emulated cluster with a virtual accelerator, for any config:
`python -m benchmarks.kit.emulated_step [--ranks 2] [--rate 500mbit] [--rounds 3] [--json] key=value ...`

Each rank is a node with a link of its own and runs the engine of a training: real data parallelism, schedules,
exchanges, optimizer and tiers. Products and attention take their operations' time on a virtual accelerator
(virtual_device.py), collectives use links both ways at once (full_duplex.py), copies to the host and disks are held to
a rate. Numbers mean nothing, times do: a step's is the slowest rank's.

Several settings are measured in turns, each round on a new cluster, whose ranks build one training after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.kit import emulated_rank, link
from benchmarks.kit.cluster import Cluster, ClusterError
from benchmarks.kit.emulated_settings import Machine, Setting
from benchmarks.kit.rounds import standard_error

STEPS = 2
TIMEOUT = 600.0  # seconds for one setting in one round


@dataclass
class Measured:
    """Of a setting: seconds of a step by round, bytes per second of the links then, and what a rank's step was made of
    at most: seconds of its virtual accelerator and of cores."""

    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    device: float = 0.0
    cpu: float = 0.0

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Bytes per second of a link."""
        return statistics.median(self.rates)


def measure(
    settings: Sequence[Setting],
    ranks: int,
    rate: str,
    rounds: int,
    machine: Machine,
    told: Callable[[int, Measured], None] = lambda index, measured: None,
) -> list[Measured]:
    """Each setting on so many ranks, in turns; `told` hears of each as it is measured. Raises ClusterError."""
    found = [Measured() for _ in settings]
    for number in range(rounds):
        with Cluster(nodes=ranks, rate=rate) as cluster:
            bytes_per_second = max(link.measured_rate(cluster) for _ in range(3)) / 8  # less is somebody else's load
            for turn in range(len(settings)):
                index = (turn + number) % len(settings)
                one_round(cluster, settings[index], machine, found[index], bytes_per_second)
                told(index, found[index])
    return found


def one_round(
    cluster: Cluster, setting: Setting, machine: Machine, measured: Measured, bytes_per_second: float
) -> None:
    """Build a setting's training on a cluster's ranks, and add the seconds of its steps."""
    outcomes: list[dict[str, Any]] = cluster.call(emulated_rank.run, setting, machine, STEPS, timeout=TIMEOUT)
    measured.seconds.append(max(outcome["step"] for outcome in outcomes))
    measured.rates.append(bytes_per_second)
    measured.device = max(outcome["device"] for outcome in outcomes)
    measured.cpu = max(outcome["cpu"] for outcome in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="500mbit", help="of each rank's link, each way, as tc writes it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    setting = Setting(tuple(options.overrides), options.vocab_size)
    try:
        (found,) = measure([setting], options.ranks, options.rate, options.rounds, Machine())
    except (ClusterError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{found.median:.3f} s a step, +- {standard_error(found.seconds):.3f} over {len(found.seconds)} clusters; "
        f"virtual accelerator {found.device:.3f} s, a rank's cores {found.cpu:.3f} s; "
        f"links {8e-6 * found.rate:.0f} Mbit/s"
    )
    if options.json:
        print(json.dumps({"seconds": found.seconds, "device": found.device, "cpu": found.cpu, "rate": found.rate}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
