"""Accepted values have an effect: a key that needs another one is refused or named without it, and the proposed fix is
accepted."""

from __future__ import annotations

from typing import Any

import pytest

from base.errors import ConfigError
from configs.changes import changes
from configs.compose import compose
from configs.overrides import presets_by_group
from configs.rules import idle
from configs.schema import KEYS
from configs.show import show
from configs.validate import validate
from tests.configs import advice

pytestmark = pytest.mark.fast

OTHER: dict[str, Any] = {  # a legal value that is not the default, where the schema does not show one
    "moe.layers": 2,
    "moe.pipeline_degree": 2,
    "moe.placement.replay": "runs/one",
    "moe.placement.max_load": 1.5,
    "memory.disk_dir": "/var/tmp",
    "model.rotary_head_dim": 32,
    "model.rotary_scaling": {"rope_type": "linear", "factor": 2.0},
    "training.profile.ranks": [0],
    "data.validation_corpora": {"wiki": "wiki.txt"},
}
# What gives the keys of a line of NEEDS an effect, by its first key, on gpt_moe_tiny.
GIVEN: dict[str, tuple[int, list[str]]] = {
    "moe.all_to_all": (2, ["parallel.expert=2"]),
    "moe.placement.costs": (
        2,
        ["parallel.expert=2", "moe.placement.policy=solve", "moe.placement.extra_slots=2"],
    ),
    "model.sentence_head": (1, ["model=bert_moe_tiny"]),
    "model.sliding_window": (1, []),
    "parallel.context_heads": (2, ["parallel.context=2"]),
    "data.documents": (1, []),
    "model.sliding_window_from": (1, ["model.sliding_window=8"]),
    "moe.group_score_top_k": (1, ["moe.num_groups=2", "moe.group_top_k=1"]),
    "optimizer.engine": (1, ["optimizer.state_device=host"]),
    "optimizer.wsd_decay_steps": (1, ["optimizer.schedule=wsd"]),
}
TAKEN: dict[str, list[str]] = {  # what takes it away, where the preset has it
    "model.rotary_base": ["model.position_embedding=learned"],
    "model.sliding_window": ["model=bert_moe_tiny"],
    "data.documents": ["model=bert_moe_tiny"],
    "optimizer.decay_steps": ["optimizer.schedule=constant"],
    "checkpoint.keep_every": ["checkpoint.keep=0"],
}
DENSE = idle.NEEDS[0].keys


def other(name: str) -> Any:
    """A legal value of a key that is not its default."""
    key = KEYS[name]
    if name in OTHER:
        return OTHER[name]
    if key.choices:
        return next(choice for choice in reversed(key.choices) if choice != key.default)
    if bool in key.kinds:
        return not key.default
    low = key.low if key.low is not None else 1
    if int in key.kinds:
        return (key.default if key.default is not None else low) + 1
    return (key.default or 1.0) / 2


def refusal(overrides: list[str], ranks: int, base: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(compose([base, *overrides]), ranks)
    return str(caught.value)


@pytest.mark.parametrize("needs", idle.NEEDS, ids=lambda needs: needs.keys[0])
def test_what_has_no_effect_is_refused(needs: idle.Needs) -> None:
    dense, first = needs.keys == DENSE, needs.keys[0]
    base = "experiment=gpt_tiny" if dense else "experiment=gpt_moe_tiny"
    for name in needs.keys:
        text = f"{name}={show(other(name))}"
        without = [text, *TAKEN.get(first, [])]
        message = refusal(without, 1, base)
        if name in ("moe.memory_budget", "moe.placement.max_load", "moe.placement.replay", "parallel.expert_tensor"):
            assert message.startswith(f"{name} (")  # or by a rule of their own
        else:
            assert message.startswith(f"{name} ({show(other(name))}) must be {show(KEYS[name].default)} "), message
        for fixes in advice.split(message)[1]:
            validate(compose([base, *without, *fixes]), 1)
        before, after = compose([base, *without]), compose([base, *TAKEN.get(first, [])])
        assert [change.on_resume for change in changes(before, after)] == ["free"]
        if not dense:
            ranks, given = GIVEN[first]
            config = compose([base, *given, text])
            assert name not in [problem.key for problem in idle.idle(config, ranks)]
            if name not in ("model.value_head_dim", "model.norm_position"):
                validate(config, ranks)


@pytest.mark.parametrize("needs", idle.READY, ids=lambda needs: needs.keys[0])
def test_what_stands_ready_is_named(needs: idle.Needs) -> None:
    first = needs.keys[0]
    of_experts = "moe." in needs.otherwise and needs is not idle.READY[0]
    base = ["experiment=gpt_moe_tiny" if of_experts else "experiment=gpt_tiny", *TAKEN.get(first, [])]
    plain = compose([*base, "logging.wandb=off"])
    assert idle.ready(plain) == ""
    for name in needs.keys:
        value = "other" if "wandb" in name else other_or(name)
        changed = compose([*base, "logging.wandb=off", f"{name}={show(value)}"])
        if name not in ("moe.memory_budget", "moe.all_to_all"):  # which other rules refuse
            validate(changed, 1)
        assert idle.ready(changed).startswith(f"without effect here: {name} ("), name
        assert [change.on_resume for change in changes(plain, changed)] == ["free"]  # nothing is another


def other_or(name: str) -> Any:
    """Return the value of `other`, also for a text and a budget."""
    if name == "data.text_key":
        return "body"
    return 64.0 if "_budget" in name and float in KEYS[name].kinds else other(name)


@pytest.mark.parametrize("model", presets_by_group()["model"])
def test_any_model_can_be_dense(model: str) -> None:
    validate(compose([f"model={model}", "moe=dense"]), 1)


@pytest.mark.parametrize(("experts", "ranks"), [(4, 2), (8, 2), (8, 8), (2, 2)])
def test_slots_are_for_experts_of_other_ranks(experts: int, ranks: int) -> None:
    words = [f"moe.num_experts={experts}", f"parallel.expert={ranks}", "moe.placement.policy=solve"]
    most = experts - experts // ranks
    for asked in (0, most + 1, 64):
        message = refusal([*words, f"moe.placement.extra_slots={asked}"], ranks, "experiment=gpt_moe_tiny")
        assert message.startswith(f"moe.placement.extra_slots ({asked}) must be at ")
        assert asked == 0 or f"Try moe.placement.extra_slots={most}" in message
        (fixes,) = advice.split(message)[1]
        validate(compose(["experiment=gpt_moe_tiny", *words, *fixes]), ranks)


def test_measured_costs_are_not_deterministic() -> None:
    words = ["parallel.expert=2", "moe.placement.policy=solve", "moe.placement.extra_slots=2"]
    words += ["moe.placement.costs=measured", "training.deterministic=true"]
    message = refusal(words, 2, "experiment=gpt_moe_tiny")
    assert message.startswith("moe.placement.costs (measured) must be assumed if training.deterministic is true")
    (fixes,) = advice.split(message)[1]
    validate(compose(["experiment=gpt_moe_tiny", *words, *fixes]), 2)
