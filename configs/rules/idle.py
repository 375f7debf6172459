"""Keys whose values have no effect in combination with the values of other keys.

If such a value requests a feature that the other keys exclude, it is an error (`idle`). Other such values, often set in
advance for a feature that is off, are only listed by the run and by its plan (`ready`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from configs import derived
from configs.keys import get
from configs.rules.problem import Fix, Problem
from configs.schema import KEYS, Config
from configs.show import show


class Needs(NamedTuple):
    """Keys that have an effect only if a condition holds: `holds` checks the condition in a configuration, and
    `otherwise` is the reason why the keys have no effect without it."""

    keys: tuple[str, ...]
    holds: Callable[[Config], bool]
    otherwise: str


def _of(section: str) -> tuple[str, ...]:
    return tuple(name for name in KEYS if name.startswith(f"{section}."))


# Errors, in the order in which they are checked. `otherwise` follows "must be <default> " in the error message.
NEEDS = [
    Needs(
        (
            *("moe.ffn_hidden_size", "moe.shared_expert_ffn_hidden_size", "moe.expert_bias", "moe.capacity_factor"),
            *("moe.global_aux_loss_coeff", "moe.num_groups", "moe.group_top_k", "moe.group_score_top_k"),
            "parallel.expert_tensor",
            *_of("moe.placement"),
        ),
        derived.is_moe,
        "in a dense model (moe.num_experts is null)",
    ),
    Needs(
        ("moe.all_to_all", "moe.placement.bitwise"),
        lambda c: c.parallel.expert > 1,
        "if parallel.expert is 1: each rank has all experts and exchanges no tokens",
    ),
    Needs(
        ("moe.placement.costs",),
        lambda c: c.moe.placement.policy != "static",
        "if moe.placement.policy is static: it needs no planning",
    ),
    Needs(
        ("model.sentence_head", "model.norm_position"),
        lambda c: c.model.family == "bert",
        "unless model.family is bert",
    ),
    Needs(("model.sliding_window",), lambda c: c.model.family == "gpt", "unless model.family is gpt"),
    Needs(
        ("parallel.context_heads",),
        lambda c: c.parallel.context > 1,
        "if parallel.context is 1: each rank has its sequences in full",
    ),
    Needs(
        ("data.documents",),
        lambda c: c.model.family == "gpt",
        "unless model.family is gpt: a sample of BERT never crosses documents",
    ),
    Needs(
        ("model.sliding_window_from",), lambda c: c.model.sliding_window is not None, "if model.sliding_window is null"
    ),
    Needs(
        ("moe.group_score_top_k",),
        lambda c: c.moe.num_groups is not None,
        "if moe.num_groups and moe.group_top_k are null: there are no groups",
    ),
    Needs(
        ("optimizer.engine", "optimizer.early_update"),
        lambda c: c.optimizer.state_device != "device",
        "if optimizer.state_device is device: the key is for offloaded state",
    ),
    Needs(
        ("optimizer.wsd_decay_steps",),
        lambda c: c.optimizer.schedule == "wsd",
        "unless optimizer.schedule is wsd: other schedules have no separate final decay",
    ),
]

# Values that are only listed, with the first reason that holds. `otherwise` follows "<key> (" in the line.
READY = [
    Needs(
        tuple(name for name in _of("moe") if name != "moe.num_experts" and name not in NEEDS[0].keys),
        derived.is_moe,
        "moe.num_experts is null",
    ),
    Needs(
        ("model.ffn_hidden_size",),
        lambda c: 0 in derived.moe_layer_pattern(c) or c.moe.ffn_hidden_size is None,
        "all layers have experts, whose width is moe.ffn_hidden_size",
    ),
    Needs(("moe.expert_bias_rate",), lambda c: c.moe.expert_bias, "moe.expert_bias is false"),
    Needs(("moe.drop_policy",), lambda c: c.moe.capacity_factor is not None, "moe.capacity_factor is null"),
    Needs(
        ("moe.weight_lag",),
        lambda c: c.parallel.expert > 1 and not derived.plans_moe(c) and (derived.pipeline_degrees(c)[1] or 0) > 1,
        "it needs parallel.expert above 1 and a fixed number of chunks (moe.backward_pipeline_degree) above 1",
    ),
    Needs(
        ("moe.memory_strategy",),
        lambda c: c.parallel.expert > 1 or "communicate" not in c.moe.memory_strategy,
        "parallel.expert is 1, so no tokens are sent",
    ),
    Needs(
        ("moe.shard_weights", "moe.weight_slots"),
        lambda c: c.moe.weights_device != "device",
        "moe.weights_device is device",
    ),
    Needs(("moe.placement.block_rows",), lambda c: c.moe.placement.bitwise, "moe.placement.bitwise is false"),
    Needs(
        ("moe.placement.interval",),
        lambda c: c.moe.placement.policy != "static",
        "moe.placement.policy is static: experts do not migrate",
    ),
    Needs(
        ("model.q_lora_rank", "model.kv_lora_rank", "model.rotary_head_dim", "model.value_head_dim"),
        lambda c: c.model.attention == "latent",
        "model.attention is not latent",
    ),
    Needs(
        ("model.rotary_base", "model.rotary_fraction", "model.rotary_scaling", "model.max_positions"),
        lambda c: c.model.position_embedding == "rope",
        "model.position_embedding is not rope",
    ),
    Needs(
        ("data.mask_probability", "data.short_sequence_probability"),
        lambda c: c.model.family == "bert",
        "model.family is not bert",
    ),
    Needs(
        ("optimizer.decay_steps",),
        lambda c: c.optimizer.schedule != "constant",
        "optimizer.schedule is constant: the learning rate does not decay",
    ),
    Needs(("training.spike",), lambda c: c.training.spike_factor is not None, "training.spike_factor is null"),
    Needs(("training.profile.ranks",), lambda c: bool(c.training.profile.steps), "training.profile.steps is []"),
    Needs(
        ("checkpoint.keep_every",), lambda c: c.checkpoint.keep > 0, "checkpoint.keep is 0: all checkpoints are kept"
    ),
    Needs(
        ("optimizer.bucket_parameters",),
        derived.has_own_optimizer_state,
        "optimizer.state_device is device and optimizer.moment_dtype is fp32",
    ),
    Needs(
        ("memory.disk_dir",),
        lambda c: c.optimizer.state_device in ("disk", "auto"),
        "optimizer.state_device is neither disk nor auto",
    ),
    Needs(
        ("memory.disk_budget",),
        lambda c: c.optimizer.state_device in ("disk", "auto") and c.memory.disk_dir is not None,
        "no optimizer state is stored in memory.disk_dir",
    ),
    Needs(("memory.host_budget",), derived.uses_host, "optimizer state, activations and experts stay on the device"),
    Needs(
        ("sample.num_tokens", "sample.temperature", "sample.top_p"),
        lambda c: bool(c.sample.prompts),
        "sample.prompts is []",
    ),
    Needs(("training.initial_loss_scale",), lambda c: c.training.precision == "fp16", "training.precision is not fp16"),
    Needs(("logging.wandb_project",), lambda c: c.logging.wandb != "off", "logging.wandb is off"),
    Needs(
        ("data.text_key", "data.documents_in_text"),
        lambda c: c.data.corpus != "stdlib" or bool(c.data.validation_corpora),
        "data.corpus is stdlib",
    ),
    Needs(
        ("data.validation_corpora",),
        lambda c: c.training.eval_interval > 0,
        "training.eval_interval is 0: there are no evaluations",
    ),
]


def _idle(config: Config, table: list[Needs]) -> dict[str, str]:
    """Return the keys in `table` that have no effect in this configuration although their values are not the defaults,
    each with the first reason why."""
    found: dict[str, str] = {}
    for keys, holds, otherwise in table:
        if not holds(config):
            changed = (key for key in keys if get(config, key) != KEYS[key].default)
            found |= {key: otherwise for key in changed if key not in found}
    return found


def idle(config: Config, world_size: int) -> Iterator[Problem]:
    """Yield a problem for each key that must keep its default, because it has no effect in this configuration. The fix
    resets all of these keys."""
    found = _idle(config, NEEDS)
    back: Fix = {key: KEYS[key].fresh_default() for key in found}
    for key, otherwise in found.items():
        yield Problem(key, f"must be {show(back[key])} {otherwise}", back)


def has_no_effect(key: str, config: Config) -> bool:
    """Return whether the value of a key has no effect in this configuration."""
    return any(key in needs.keys and not needs.holds(config) for needs in (*NEEDS, *READY))


def ready(config: Config) -> str:
    """Return one line that lists the values without effect, or an empty string if there are none."""
    found = [f"{key} ({why})" for key, why in _idle(config, READY).items()]
    return f"without effect here: {'; '.join(found)}" if found else ""
