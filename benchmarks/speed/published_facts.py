"""Published figures of others beside what the clock predicts for the same model, layout and machine.

    python -m benchmarks.speed.published_facts [--only WORDS] [--json]

A row a fact: what was published and where, what is predicted with the figures of configs/hardware, and the error; or
why it is not modelled. Nothing was fitted to these rows. What a source does not print stands under "taken": it is a
guess that the row depends on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from benchmarks.kit.facts import FACTS, PublishedFact
from benchmarks.kit.tables import table
from configs.job import Job
from configs.schema import Config
from models.blueprint import padded_vocab_size
from simulator.clock.hardware import Hardware
from simulator.clock.predict import StepClock
from simulator.clock.prediction import Prediction, describe_back_tests
from simulator.flops import training_flops_per_token

UPDATE = ("update", "host_update", "host_link", "disk")  # reasons of an update off the device


def figure_of(fact: PublishedFact, config: Config, prediction: Prediction) -> float:
    """A prediction in the fact's unit."""
    tokens = config.training.global_batch_size * config.model.sequence_length
    if fact.unit == "tokens/s/GPU":
        return tokens / prediction.seconds / fact.ranks
    if fact.unit == "TFLOP/s/GPU":
        flops = fact.own_flops or tokens * training_flops_per_token(config, config.model.vocab_size or 0)
        return flops / prediction.seconds / fact.ranks / 1e12
    assert fact.unit == "s of an update", fact.unit
    return sum(seconds for name, seconds in prediction.reasons.items() if name.partition(":")[0] in UPDATE)


def predict(fact: PublishedFact, config: Config, machine: Hardware, vocab_size: int) -> Prediction:
    """The step of a fact's trainer."""
    return StepClock(Job(config, fact.ranks, vocab_size, "cuda"), machine, recipe=fact.recipe).predict()


def row(fact: PublishedFact) -> dict[str, Any]:
    """A fact with what is predicted, and the error in percent of what was published."""
    found: dict[str, Any] = {"name": fact.name, "source": fact.source, "published": fact.published, "unit": fact.unit}
    if fact.missing:
        return found | {"predicted": None, "error_percent": None, "not_modelled": fact.missing}
    config, machine = fact.config(), fact.machine()
    vocab_size = config.model.vocab_size
    assert vocab_size is not None and padded_vocab_size(vocab_size, config.parallel.tensor) >= vocab_size
    predicted = figure_of(fact, config, predict(fact, config, machine, vocab_size))
    error = 100 * (predicted / fact.published - 1)
    return found | {
        "predicted": predicted,
        "error_percent": error,
        "taken": fact.taken,
        "hardware": fact.hardware,
        "back_test": describe_back_tests(machine.errors),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.speed.published_facts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="facts whose name has these words")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    fact_rows = [row(fact) for fact in FACTS if options.only in fact.name]
    modelled = [each for each in fact_rows if each["predicted"] is not None]
    headings = ["fact", "published", "predicted", "error", "unit", "taken", "hardware", "back-test", "source"]
    lines = [
        [
            each["name"],
            f"{each['published']:g}",
            f"{each['predicted']:.4g}",
            f"{each['error_percent']:+.0f}%",
            each["unit"],
            each["taken"],
            each["hardware"],
            each["back_test"],
            each["source"],
        ]
        for each in modelled
    ]
    print(table(headings, lines, True))
    print("\nNot modelled:\n")
    left = [
        [each["name"], f"{each['published']:g} {each['unit']}", each["not_modelled"], each["source"]]
        for each in fact_rows
        if each["predicted"] is None
    ]
    print(table(["fact", "published", "why", "source"], left, True))
    mean = statistics.fmean(abs(each["error_percent"]) for each in modelled) if modelled else None
    if mean is not None:
        print(f"\nmean error {mean:.1f}% over {len(modelled)} facts")
    if options.json:
        print(json.dumps({"mean_absolute_error_percent": mean, "rows": fact_rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
