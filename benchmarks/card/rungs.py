"""All rungs, in the order of their value to a user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from base.errors import ConfigError
from benchmarks.card import clock, generation, gpu_tests, layers, longest, off_device, training
from benchmarks.card.ladder import Rung, Task
from benchmarks.card.training import Case

# What every training goes through; experts are in `moe`.
OF_PASSES = ("models", "parallel", "memory", "training/engine.py", "training/step.py", "training/sums.py")
OF_MEASURING = ("benchmarks/card/training.py", "benchmarks/card/sides.py")
OF_TRAINING = (*OF_PASSES, "optim", "training/loss_buckets.py", *OF_MEASURING)
OF_EXPERTS = ("moe",)
OF_LAYER = (*OF_PASSES, *OF_EXPERTS, "benchmarks/card/layers.py", "benchmarks/kit/megatron_layer.py")
OF_HOST = (*OF_TRAINING, "benchmarks/card/off_device.py")
OF_GENERATION = ("inference", "models", "memory", "checkpoint/logical", "benchmarks/card/generation.py")
OF_CLOCK = (
    "simulator/clock",
    "simulator/fit.py",
    "simulator/measured_steps.py",
    "simulator/flops.py",
    "benchmarks/card/clock.py",
)
OF_LONGEST = (
    *OF_TRAINING,
    "benchmarks/speed/longest_context.py",
    "benchmarks/speed/mixtrain_side.py",
    "benchmarks/speed/alst.py",
)
LONGEST_SECONDS = 200.0
OF_TINY = 20.0  # seconds
RIVALS = ("transformers", "plain script")


OF_TESTS = (*OF_TRAINING, *OF_EXPERTS, *gpu_tests.files())


def rungs(is_small: bool) -> list[Rung]:
    """Return the ladder; is_small: with the costs of tiny sizes on two cores."""
    found = [Rung("tests marked gpu: a sample", 60.0, OF_TESTS, gpu_tests.sample)]
    found += [_trained(case, 25.0) for case in (training.GPT2, training.LLAMA)]
    for system in RIVALS:
        name = f"llama_1b next to {system}"
        found.append(_trained(training.LLAMA, 55.0, ("benchmarks/card/plain.py",), name, (system,)))
    found += [_trained(training.LLAMA_8B, 30.0)]
    found += [_trained(case, 40.0, OF_EXPERTS) for case in (training.QWEN, training.MIXTRAL, training.MOE_SMALL)]
    for shape in layers.SHAPES:
        found.append(Rung(f"one layer of {shape}", 30.0, OF_LAYER, partial(layers.measure_shape, shape=shape), shape))
    found += [_traced(training.LLAMA), _traced(training.QWEN, OF_EXPERTS)]
    found.append(Rung(off_device.COPY_RATES, 10.0, ("benchmarks/card/off_device.py",), off_device.measure_copies))
    for engine, keys in off_device.STATE.items():
        found.append(_off_device(training.LLAMA, keys, f"optimizer state on the host, {engine}"))
    for order, keys in off_device.EXPERTS_KEYS.items():
        base = tuple(key for key in keys if key.startswith("training."))
        found.append(_off_device(off_device.EXPERTS, keys, f"experts on the host, {order}", base, OF_EXPERTS))
    kept = off_device.LAYER_INPUTS
    found.append(_off_device(training.LLAMA, kept, "inputs of layers on the host", kept[:1]))
    trained = tuple(f"training of {case.name}" for case in clock.CASES)
    found.append(Rung("the clock, fitted and predicting", 20.0, OF_CLOCK, clock.measure, made_from=trained))
    found.append(Rung("generation", 50.0, OF_GENERATION, generation.resident))
    found.append(Rung("generation with a quarter on the device", 50.0, OF_GENERATION, generation.ring))
    found.append(Rung("the longest context", LONGEST_SECONDS, OF_LONGEST, longest.measure, most=LONGEST_SECONDS))
    found.append(Rung("tests marked gpu: the rest", 60.0, OF_TESTS, gpu_tests.rest))
    names = [rung.name for rung in found]
    assert len(set(names)) == len(names)
    return [replace(rung, seconds=min(rung.seconds, OF_TINY)) for rung in found] if is_small else found


def _trained(
    case: Case, seconds: float, also: tuple[str, ...] = (), name: str = "", rivals: tuple[str, ...] = ()
) -> Rung:
    measure: Callable[[Task], None] = partial(training.measure, case=case, rivals=rivals)
    paths = (*OF_TRAINING, *also, *case.files)
    return Rung(name or f"training of {case.name}", seconds, paths, measure, " ".join(case.overrides))


def _traced(case: Case, also: tuple[str, ...] = ()) -> Rung:
    paths = (*OF_TRAINING, *also, "benchmarks/card/kernels.py", *case.files)
    measure = partial(training.trace, case=case)
    return Rung(f"kernels and gaps of {case.name}", 35.0, paths, measure, " ".join(case.overrides))


def _off_device(
    case: Case, keys: tuple[str, ...], what: str, base: tuple[str, ...] = (), also: tuple[str, ...] = ()
) -> Rung:
    measure = partial(off_device.measure, case=case, keys=keys, what=what, base=base)
    return Rung(what, 45.0, (*OF_HOST, *also, *case.files), measure, " ".join((*case.overrides, *keys)))


def by_name(words: list[str], every: list[Rung]) -> list[Rung]:
    """Return the rungs whose name has one of these words, in any case; all without words. Raises ConfigError for a word
    of no rung."""
    for word in words:
        if not any(word.lower() in rung.name.lower() for rung in every):
            raise ConfigError(f"--only {word}: no rung's name has that word. Without it, --list prints the names.")
    return [rung for rung in every if not words or any(word.lower() in rung.name.lower() for word in words)]
