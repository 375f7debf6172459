"""Optimizer state off the device changes no bit of a training: ten cases that cover the tiers, engines and layouts, and
two faults that they must notice."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.checks.offload_parity import config_of, one
from configs.schema import Config
from tests import distributed
from tests.optim.offload import parity
from tests.optim.offload.parity import LARGE, Variant

STEPS = 4
MOMENTS = {"bf16": "bf16"}  # of exp_avg; fp32 in other precisions
# All of them: python -m benchmarks.checks.offload_parity
CASES = {
    ("gpt", "single", "bf16", "most"): [Variant(pace="slow"), Variant("auto", "host", "always", pace="eager")],
    ("gpt moe", "single", "fp32", "some"): [Variant("disk", early="auto"), Variant("host", "split", pace="slow")],
    ("bert", "single", "fp16", "some"): [Variant("auto", "split", "always"), Variant("disk", bucket=LARGE)],
    ("gpt tied", "PP2", "fp32", "some"): [Variant("disk", "host", "always", pace="eager")],
    ("gpt moe", "TP2+SP", "fp32", "some"): [Variant(early="always", pace="eager")],
    ("bert moe", "DP2", "fp16", "most"): [Variant("disk", "split", pace="slow")],
    ("gpt", "PP2xVPP2", "bf16", "none"): [Variant("host", "host", "auto", pace="slow")],
    ("gpt moe", "EP2", "bf16", "most"): [Variant("auto", early="always", bucket=LARGE, pace="slow")],
    ("bert moe", "TP2+SP", "bf16", "none"): [Variant("host", "split", "always")],
    ("gpt moe", "DP2xPP2xEP2", "bf16", "some"): [Variant("disk", "host", "always", pace="slow")],
}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_same_bits(case: tuple[str, str, str, str], tmp_path: Path) -> None:
    outcomes = one(*case, CASES[case], STEPS, MOMENTS.get(case[2], "fp32"), str(tmp_path))
    assert [row.problems for row in outcomes] == [[]] * len(CASES[case])


def without(fault: str, config: Any, variant: Variant) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """On a rank: what differs from the state on the device as it is, and where a part is left out."""
    ((_, config),) = parity.limits(config, STEPS, ["none"])  # what is clipped is computed again
    device, variant_config = parity.run(config, STEPS), parity.with_variant(config, variant, "")
    sound = parity.run(variant_config, STEPS, variant.pace)
    with FAULTS[fault]():
        faulty = parity.run(variant_config, STEPS, variant.pace)
    return parity.differences(sound, device), parity.differences(faulty, device)


def _routers_are_never_late() -> Any:
    from parallel.megatron import offloaded

    is_reduced_at_end = offloaded.is_reduced_at_step_end

    def without_routers(name: str, *rest: Any) -> bool:
        return ".router." not in name and is_reduced_at_end(name, *rest)

    return mock.patch.object(offloaded, "is_reduced_at_step_end", without_routers)


def _nothing_waits_for_weights() -> Any:
    return mock.patch("optim.offload.optimizer.OffloadedOptimizer.gate", lambda self, parameter: None)


FAULTS = {"late": _routers_are_never_late, "gate": _nothing_waits_for_weights}


@pytest.mark.parametrize(
    ("fault", "layout", "variant"),
    [("late", "TP2+SP", Variant(early="always", pace="eager")), ("gate", "single", Variant(pace="slow"))],
)
def test_faults_are_noticed(fault: str, layout: str, variant: Variant) -> None:
    config, ranks = config_of("gpt moe", layout, "fp32", "fp32")
    for sound, faulty in distributed.run(without, ranks, fault, config, variant):
        assert sound == () and any(name.startswith("step") for name in faulty)
        assert fault != "late" or any(".router." in name for name in faulty)


def refused(config: Any, pace: str) -> parity.Snapshot:
    """On a rank: a training with a step that is refused, run again to look at, and an evaluation after it."""
    from training import step

    with parity.Training(config, pace) as training:
        engine, data = training.engine, training.topology.data
        numbers = [training.step(1)]
        batches, before = parity.batches_of(config, 2, data.rank, data.size), engine.snapshot()
        step.gradients(engine, batches, 2)
        before.roll_back()
        step.run_again(engine, batches)
        numbers.append((step.evaluate(engine, iter([batches])), 0.0, False))
        numbers += [training.step(3), training.step(4)]
        return training.snapshot(numbers)


def after_a_refusal(config: Any, variant: Variant) -> tuple[tuple[str, ...], int, int]:
    """On a rank: what differs from the state on the device, and the early updates that were kept and dropped."""
    device, ours = refused(config, "free"), refused(parity.with_variant(config, variant, ""), variant.pace)
    return parity.differences(ours, device), ours.committed, ours.dropped


def test_a_refused_step_leaves_no_trace() -> None:
    config, ranks = config_of("gpt moe", "EP2", "fp16", "fp32")
    ((_, config),) = parity.limits(config, STEPS, ["none"])
    for differences, kept, dropped in distributed.run(
        after_a_refusal, ranks, config, Variant(engine="split", early="always", pace="slow")
    ):
        assert differences == () and kept > 0 and dropped > 0


def with_products_that_add(config: Config, variant: Variant) -> tuple[tuple[str, ...], int]:
    """On a rank, where linear layers' gradients are added to the buffer, as TransformerEngine's: what differs from the
    state on the device, and how many buckets' updates go on when a step begins."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    with contextlib.ExitStack() as marked:
        for layer in (ColumnParallelLinear, RowParallelLinear):
            marked.enter_context(mock.patch.object(layer, "fuse_wgrad_accumulation", True, create=True))
        device, elsewhere = parity.run(config, STEPS), parity.with_variant(config, variant, "")
        ours = parity.run(elsewhere, STEPS, variant.pace)
        with parity.Training(elsewhere, variant.pace) as training:
            training.step(1)
            for chunk in training.engine.chunks:
                chunk.zero_grad_buffer()
            assert training.tiers is not None
            return parity.differences(ours, device), len(training.tiers._back)


def test_products_that_add_to_the_buffer_find_zeros_and_wait_for_their_bucket_alone() -> None:
    config, ranks = config_of("gpt", "single", "bf16", "fp32")
    config = replace(config, optimizer=replace(config.optimizer, clip_grad=1e4))
    ((differences, going_on),) = distributed.run(with_products_that_add, ranks, config, Variant(pace="slow"))
    assert differences == () and going_on > 1
