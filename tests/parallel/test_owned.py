"""Parameters outside Megatron-core's buffers: a training comes to the same whether a weight is owned or not."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.checks import offload_parity
from configs.schema import Config
from tests import distributed
from tests.optim.offload import parity, test_parity
from tests.optim.offload.parity import Variant
from tests.parallel.owned_user import (
    Numbers,
    Training,
    checkpoint_of,
    differences,
    largest,
    taking,
    train,
)
from tests.tolerances import BF16_LOSS, FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import make_config
from tests.training.test_step import SAMPLES, SMALL, batches_of, build

STEPS = 4
FP16_SCALE = 2**20  # overflows in the first steps, which are not taken
WHOLE_NORM = "optimizer.clip_grad=0"  # nothing depends on the norm, whose squares are added up in another order


def config_of(precision: str, ranks: int, micro: int, *overrides: str) -> Config:
    sizes = [f"training.global_batch_size={SAMPLES}", f"training.micro_batch_size={micro}"]
    settings = [f"training.precision={precision}", f"training.initial_loss_scale={FP16_SCALE}"]
    return make_config(["experiment=gpt_tiny", *SMALL, *sizes, *settings, *overrides], ranks)


def on_ranks(ranks: int, training: Training, first: int = 1, last: int = STEPS) -> Numbers:
    return distributed.run(train, ranks, training, first, last)[0]  # type: ignore[no-any-return]


# One and several micro-batches a step.
@pytest.mark.parametrize(
    ("precision", "ranks", "micro"),
    [("fp32", 1, 4), ("fp32", 2, 2), ("fp32", 2, 4), ("bf16", 2, 2), ("bf16", 2, 4), ("fp16", 1, 2), ("fp16", 2, 2)],
)
def test_an_owned_weight_is_trained_as_any_other(tmp_path: Path, precision: str, ranks: int, micro: int) -> None:
    config = config_of(precision, ranks, micro, WHOLE_NORM)
    plain = Training(config, "none", tmp_path / "none")
    expected = on_ranks(ranks, plain)
    updated = [step[2] for step in expected]
    assert all(updated) if precision != "fp16" else True in updated and False in updated
    for user in ("whole", "part"):
        ours = Training(config, user, tmp_path / user)
        found = on_ranks(ranks, ours)
        assert [step[2] for step in found] == updated
        assert largest(found, expected, 1) < FP32_GRAD_NORM
        # A part's gradients are added up over the ranks in each micro-batch: sums differ where there are several.
        if user == "whole" or ranks == 1 or micro * ranks == SAMPLES:
            assert [step[0] for step in found] == [step[0] for step in expected]
            assert differences(checkpoint_of(ours, STEPS), checkpoint_of(plain, STEPS)) == []
        else:
            assert largest(found, expected, 0) < (FP32_LOSS if precision == "fp32" else BF16_LOSS)


def test_a_gradient_may_be_narrow() -> None:
    config = config_of("bf16", 2, 2)
    expected, found = on_ranks(2, Training(config)), on_ranks(2, Training(config, "narrow"))
    assert found != expected and largest(found, expected, 0) < BF16_LOSS


@pytest.mark.parametrize(
    ("user", "layout"),
    [
        ("whole", ()),
        ("part", ()),
        ("part", ("optimizer.distributed=false", "parallel.overlap_grad_reduce=false")),
        ("whole", ("parallel.tensor=2", "parallel.sequence=true")),
        ("whole", ("parallel.pipeline=2",)),  # of the first stage alone
    ],
    ids=str,
)
def test_clipping_knows_the_norm_of_all(user: str, layout: tuple[str, ...]) -> None:
    config = config_of("fp32", 2, 2, "optimizer.clip_grad=0.5", *layout)
    expected, found = on_ranks(2, Training(config)), on_ranks(2, Training(config, user))
    assert all(norm > 0.5 for _, norm, _ in expected)
    assert largest(found, expected, 0) < FP32_LOSS and largest(found, expected, 1) < FP32_GRAD_NORM


def test_a_checkpoint_fits_both(tmp_path: Path) -> None:
    """Saved by one kind and gone on with by the other, and by the same, at every step: bit for bit one training."""
    config = config_of("bf16", 2, 4, WHOLE_NORM)
    turns = ("whole", "whole", "none", "part", "part", "none")
    expected = on_ranks(2, whole := Training(config, "none", tmp_path / "all"), 1, len(turns))
    found, last = [], None
    for step, user in enumerate(turns, start=1):
        training = Training(config, user, tmp_path / "turns", last)
        found += on_ranks(2, training, step, step)
        last = checkpoint_of(training, step)
    assert [step[0] for step in found] == [step[0] for step in expected]
    assert last is not None and differences(last, checkpoint_of(whole, len(turns))) == []


def overflowing(config: Any) -> tuple[list[bool], bool]:
    """Two steps, in the second of which a part's gradient overflows on the last rank alone: which steps were taken, and
    whether the second changed a weight."""
    from parallel.owned import OwnedParameter
    from training.step import train_step

    with taking("part"):
        engine = build(config)
    data, add = engine.topology.data, OwnedParameter.add_grad

    def add_too_much(owner: Any, grad: torch.Tensor) -> None:
        add(owner, grad * (float("inf") if data.is_last else 1))

    taken = [train_step(engine, batches_of(config, 1)[data.rank :: data.size], 1).updated]
    with engine.frozen_weights():
        before = [parameter.detach().clone() for parameter in engine.bare_chunks[0].parameters()]
    with mock.patch.object(OwnedParameter, "add_grad", add_too_much):
        taken.append(train_step(engine, batches_of(config, 2)[data.rank :: data.size], 2).updated)
    with engine.frozen_weights():
        after = engine.bare_chunks[0].parameters()
    return taken, any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_overflow_of_a_part_ends_the_step_on_all_ranks() -> None:
    config = config_of("fp16", 2, 2, "training.initial_loss_scale=1024")
    assert distributed.run(overflowing, 2, config) == [([True, False], False)] * 2


def in_tiers(user: str, *arguments: Any) -> Any:
    with taking(user):
        return parity.outcomes(*arguments)


@pytest.mark.parametrize(
    ("user", "layout", "precision", "clip", "variant"),
    [
        ("whole", "single", "fp16", "some", Variant("auto", "split", "always")),
        ("whole", "DP2", "bf16", "none", Variant("disk", "host", "always", pace="slow")),
        ("part", "DP2", "fp32", "some", Variant(pace="slow")),
    ],
    ids=str,
)
def test_tiers_hold_it_as_any_other(
    tmp_path: Path, user: str, layout: str, precision: str, clip: str, variant: Variant
) -> None:
    config, ranks = offload_parity.config_of("gpt", layout, precision, "fp32")
    found = distributed.run(in_tiers, ranks, user, config, clip, [variant], STEPS, str(tmp_path))
    assert parity.problems(variant, clip, [of_rank[0] for of_rank in found]) == []


def test_tiers_write_what_the_device_does(tmp_path: Path) -> None:
    plain, tiers = (config_of("bf16", 2, 4, WHOLE_NORM, f"optimizer.state_device={it}") for it in ("device", "host"))
    on_ranks(2, expected := Training(plain, "none", tmp_path / "none"))
    for user in ("whole", "part"):
        on_ranks(2, ours := Training(tiers, user, tmp_path / user))
        assert differences(checkpoint_of(ours, STEPS), checkpoint_of(expected, STEPS)) == []
    again = Training(tiers, "whole", tmp_path / "again", checkpoint_of(ours, STEPS))
    on_ranks(2, again, STEPS + 1, STEPS + 1)
    on_ranks(2, more := Training(plain, "none", tmp_path / "more"), 1, STEPS + 1)
    assert differences(checkpoint_of(again, STEPS + 1), checkpoint_of(more, STEPS + 1)) == []


def after_a_refusal(user: str, config: Any, variant: Variant) -> Any:
    with taking(user):
        return test_parity.after_a_refusal(config, variant)


def test_a_refused_step_leaves_no_trace() -> None:
    config, ranks = offload_parity.config_of("gpt", "DP2", "fp32", "fp32")
    ((_, config),) = parity.limits(config, STEPS, ["none"])
    found = distributed.run(after_a_refusal, ranks, "whole", config, Variant(engine="host", early="always"))
    assert [differences for differences, *_ in found] == [()] * ranks


def closed(config: Any) -> tuple[int, bool]:
    """How many owners a model has, and whether its owned parameters are gone when it is closed."""
    from parallel.owned import owners
    from training.step import train_step

    with taking("whole"):
        engine = build(config)
    train_step(engine, batches_of(config, 1), 1)
    owned = [weakref.ref(owner.parameter) for owner in owners(engine.bare_chunks[0].parameters())]
    engine.close()
    del engine
    gc.collect()
    return len(owned), all(parameter() is None for parameter in owned)


def test_a_closed_model_is_gone() -> None:
    assert distributed.run(closed, 1, config_of("fp32", 1, 2)) == [(2, True)]


def test_what_cannot_be_owned_is_refused() -> None:
    from parallel.owned import ShardBox, own

    weight = torch.nn.Parameter(torch.zeros(4, 3))
    for shape, offset in (((8, 3), (5, 0)), ((8,), (0,)), ((8, 2), (0, 0)), ((8, 3), (-1, 0))):
        with pytest.raises(ValueError, match="must be inside its parameter"):
            own(weight, None, box=ShardBox(shape, offset))
    own(weight, None, box=ShardBox((8, 3), (4, 0)))
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    for refused, fault in ((weight, "is owned already"), (frozen, "needs no gradient")):
        with pytest.raises(ValueError, match=f"The parameter of shape .* {fault}. Own only a parameter that needs a"):
            own(refused, None)
