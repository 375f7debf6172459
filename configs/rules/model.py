"""Rules of the model and of its MoE layers, whatever the layout."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from configs import derived
from configs.keys import get
from configs.rotary import faults
from configs.rules.problem import Fix, Problem, divisors, must_divide, set_to
from configs.schema import Config
from configs.show import show

MIN_TRAINED_VOCAB = 320  # tokens: 256 bytes, 7 special symbols and a few learned ones
MAX_TRAINED_VOCAB = 1_000_000  # sentencepiece takes minutes beyond it, and does not end near 2**31
MIN_BERT_SEQUENCE = 8  # [CLS] a [SEP] b [SEP] with something to mask

# Values that latent attention requires.
LATENT_NEEDS: dict[str, Any] = {
    "model.family": "gpt",
    "model.position_embedding": "rope",
    "model.rotary_fraction": 1.0,
    "model.normalization": "rmsnorm",
    "model.num_query_groups": None,
    "model.qk_norm": False,
    "model.linear_bias": False,
    "model.qkv_bias": False,
}
ROTARY_SCALING = "model.rotary_scaling"


def model(config: Config, world_size: int) -> Iterator[Problem]:
    model = config.model
    heads = ("model.num_attention_heads", model.num_attention_heads)
    if model.head_dim is None:
        yield from must_divide(heads, ("model.hidden_size", model.hidden_size))
    if model.num_query_groups is not None:
        yield from must_divide(("model.num_query_groups", model.num_query_groups), heads)
    if model.position_embedding == "rope" and model.attention == "grouped":
        rotating = derived.head_dim(config) * model.rotary_fraction
        if rotating != int(rotating) or int(rotating) % 2:
            size = derived.head_dim(config)
            rule = (
                f"of the {size} channels of a head must be an even number, because rotary positions turn pairs of "
                "channels"
            )
            fixes = [*set_to("model.rotary_fraction", [1.0, 0.5]), {"model.position_embedding": "learned"}]
            yield Problem("model.rotary_fraction", rule, fixes)
    if model.sliding_window_from >= model.num_layers:
        rule = f"must be less than model.num_layers ({model.num_layers}): no layer would have the window"
        yield Problem("model.sliding_window_from", rule, [{"model.sliding_window_from": 0}])
    if model.attention == "latent":
        for key, value in LATENT_NEEDS.items():
            if get(config, key) != value:
                rule = f"must be {show(value)} with model.attention=latent"
                yield Problem(key, rule, [{key: value}, {"model.attention": "grouped"}])
        if model.rotary_head_dim % 2:
            rule = "must be even, because rotary positions turn pairs of channels"
            yield Problem(
                "model.rotary_head_dim", rule, set_to("model.rotary_head_dim", [model.rotary_head_dim + 1, 64])
            )
    if model.qk_norm_over == "all_heads" and not (model.qk_norm and model.normalization == "rmsnorm"):
        rule = "needs model.qk_norm=true and model.normalization=rmsnorm"
        wanted: Fix = {"model.qk_norm": True, "model.normalization": "rmsnorm"}
        yield Problem("model.qk_norm_over", rule, [{"model.qk_norm_over": "head"}, wanted])
    if model.family == "bert" and model.sequence_length < MIN_BERT_SEQUENCE:
        rule = f"must be at least {MIN_BERT_SEQUENCE} for BERT, whose samples hold [CLS], two sentences and two [SEP]"
        yield Problem("model.sequence_length", rule, set_to("model.sequence_length", [MIN_BERT_SEQUENCE, 64, 512]))
    if model.config_json is not None and not _is_json_object(model.config_json):
        rule = "must be a JSON object in a text, as an import writes it"
        yield Problem("model.config_json", rule, [{"model.config_json": None}])
    trained_here = config.data.tokenizer == "sentencepiece"
    if trained_here and not MIN_TRAINED_VOCAB <= config.data.vocab_size <= MAX_TRAINED_VOCAB:
        rule = f"must be from {MIN_TRAINED_VOCAB} to {MAX_TRAINED_VOCAB} for a tokenizer that is trained on the corpus"
        nearest = [MIN_TRAINED_VOCAB, 4096] if config.data.vocab_size < MIN_TRAINED_VOCAB else [MAX_TRAINED_VOCAB, 4096]
        yield Problem("data.vocab_size", rule, set_to("data.vocab_size", nearest))
    if trained_here and model.vocab_size is not None and model.vocab_size < config.data.vocab_size:
        rule = f"must hold the tokenizer's data.vocab_size ({config.data.vocab_size}), or be null to follow it"
        yield Problem("model.vocab_size", rule, set_to("model.vocab_size", [None, config.data.vocab_size]))


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def rotary_scaling(config: Config, world_size: int) -> Iterator[Problem]:
    model, scaling = config.model, config.model.rotary_scaling
    off: Fix = {ROTARY_SCALING: None}
    for fault in faults(scaling):
        fixes = [*([{ROTARY_SCALING: fault.mended}] if fault.mended is not None else []), off]
        yield Problem(f"{ROTARY_SCALING}.{fault.key}" if fault.key else ROTARY_SCALING, fault.rule, fixes)
        return
    if scaling is None or model.position_embedding != "rope":
        return
    pairs = derived.rotary_dim(config) // 2
    for name in ("short_factor", "long_factor"):
        if name in scaling and len(scaling[name]) != pairs:
            rule = f"must have {pairs} numbers, one for each pair of channels that turns"
            yield Problem(f"{ROTARY_SCALING}.{name}", rule, [off])
    if scaling["rope_type"] == "yarn" and math.log(model.rotary_base) == 0:
        rule = f"must not be 1 with {ROTARY_SCALING} of rope_type yarn: all channels would turn alike"
        yield Problem("model.rotary_base", rule, [*set_to("model.rotary_base", [10000.0]), off])


def moe(config: Config, world_size: int) -> Iterator[Problem]:
    moe, experts = config.moe, config.moe.num_experts
    if experts is None:
        return
    if moe.top_k > experts:
        rule = f"must not exceed moe.num_experts ({experts})"
        yield Problem("moe.top_k", rule, [*set_to("moe.top_k", range(experts, 0, -1)), {"moe.num_experts": moe.top_k}])
    if moe.top_k == 1 and moe.router_score == "softmax" and moe.normalize_top_k:
        rule = (
            "must be false for top_k=1 with softmax scores: a single weight that is scaled to 1 gives the router no "
            "gradient"
        )
        yield Problem("moe.normalize_top_k", rule, [{"moe.normalize_top_k": False}, {"moe.top_k": 2}])
    if moe.top_k > 1 and moe.router_score == "sigmoid" and not moe.normalize_top_k:
        rule = "must be true for sigmoid scores, which Megatron-core always scales to sum 1"
        yield Problem("moe.normalize_top_k", rule, [{"moe.normalize_top_k": True}, {"moe.router_score": "softmax"}])
    if moe.expert_bias and moe.router_score != "sigmoid":
        fixes: list[Fix] = [{"moe.router_score": "sigmoid"}, {"moe.expert_bias": False}]
        yield Problem("moe.router_score", "must be sigmoid for moe.expert_bias", fixes)
    if moe.memory_budget is not None and "auto" not in (moe.pipeline_degree, moe.memory_strategy):
        rule = "is for what moe.pipeline_degree=auto or moe.memory_strategy=auto choose; neither is auto"
        yield Problem("moe.memory_budget", rule, [{"moe.memory_budget": None}, {"moe.memory_strategy": "auto"}])
    if config.training.deterministic and derived.plans_moe(config):
        rule = (
            "must be false where pipeline_degree, memory_strategy or all_to_all of moe is auto, which follows "
            "measured times"
        )
        numbers: Fix = {
            "moe.pipeline_degree": 1,
            "moe.memory_strategy": "keep",
            "moe.all_to_all": "flat",
            "moe.memory_budget": None,
        }
        yield Problem("training.deterministic", rule, [{"training.deterministic": False}, numbers])
    forward, backward = derived.pipeline_degrees(config)
    if "offload" in moe.memory_strategy and forward != backward:
        rule = (
            f"must equal moe.pipeline_degree ({moe.pipeline_degree}) for moe.memory_strategy={moe.memory_strategy}, "
            "or be null"
        )
        yield Problem(
            "moe.backward_pipeline_degree",
            rule,
            [{"moe.backward_pipeline_degree": None}, {"moe.memory_strategy": "keep"}],
        )
    yield from _expert_groups(config)
    yield from _placement(config)
    if config.model.linear_bias and moe.shared_expert_ffn_hidden_size is not None:
        rule = "must be false with moe.shared_expert_ffn_hidden_size: Megatron-core's shared experts have no biases"
        fixes = [{"model.linear_bias": False}, {"moe.shared_expert_ffn_hidden_size": None}]
        yield Problem("model.linear_bias", rule, fixes)
    if config.model.linear_bias and derived.expert_tensor_size(config) > 1:
        size = derived.expert_tensor_size(config)
        rule = (
            f"must be false when experts are split over {size} tensor ranks: Megatron-core would add a split "
            f"expert's bias {size} times"
        )
        fixes = [{"model.linear_bias": False}, {"parallel.expert_tensor": 1, "parallel.expert": 2}]
        yield Problem("model.linear_bias", rule, fixes)


def _expert_groups(config: Config) -> Iterator[Problem]:
    moe, experts = config.moe, config.moe.num_experts
    assert experts is not None
    off: Fix = {"moe.num_groups": None, "moe.group_top_k": None}
    for key, other in (("num_groups", "group_top_k"), ("group_top_k", "num_groups")):
        if getattr(moe, key) is None and getattr(moe, other) is not None:
            rule = f"must be set too for group-limited routing (moe.{other} is {getattr(moe, other)})"
            values = (
                [moe.group_top_k, *divisors(experts, 4)] if key == "num_groups" else range(1, (moe.num_groups or 1) + 1)
            )
            yield Problem(f"moe.{key}", rule, [*set_to(f"moe.{key}", values), off])
    if moe.num_groups is None or moe.group_top_k is None:
        return
    yield from must_divide(("moe.num_groups", moe.num_groups), ("moe.num_experts", experts), off)
    if moe.group_top_k > moe.num_groups:
        rule = f"must not exceed moe.num_groups ({moe.num_groups})"
        yield Problem("moe.group_top_k", rule, [*set_to("moe.group_top_k", range(moe.num_groups, 0, -1)), off])
    size = experts // moe.num_groups
    if moe.group_score_top_k is None:
        best: Fix = {"moe.group_score_top_k": min(2, size)}
        yield from must_divide(("moe.group_top_k", moe.group_top_k), ("moe.top_k", moe.top_k), off, best)
    elif moe.group_score_top_k > size:
        rule = f"must not exceed the {size} experts of a group"
        yield Problem("moe.group_score_top_k", rule, set_to("moe.group_score_top_k", [size, None]))
    if moe.top_k > moe.group_top_k * size:
        rule = (
            f"must not exceed the {moe.group_top_k * size} experts of moe.group_top_k ({moe.group_top_k}) groups of "
            f"{size}"
        )
        fixes = [
            *set_to("moe.top_k", range(moe.group_top_k * size, 0, -1)),
            *set_to("moe.group_top_k", range(1, moe.num_groups + 1)),
            off,
        ]
        yield Problem("moe.top_k", rule, fixes)


def _placement(config: Config) -> Iterator[Problem]:
    placement, is_static = config.moe.placement, config.moe.placement.policy == "static"
    static: Fix = {"moe.placement.policy": "static", "moe.placement.extra_slots": 0}
    if is_static and placement.extra_slots > 0:
        rule = "must be 0 where moe.placement.policy is static, which copies nothing"
        yield Problem("moe.placement.extra_slots", rule, [{"moe.placement.policy": "solve"}, static])
    if placement.bitwise and None in derived.pipeline_degrees(config):
        rule = "must be a number for moe.placement.bitwise: blocks are cut inside chunks"
        yield Problem("moe.pipeline_degree", rule, [{"moe.pipeline_degree": 1}, {"moe.placement.bitwise": False}])
    elif placement.bitwise and len(set(derived.pipeline_degrees(config))) > 1:
        rule = f"must be null or moe.pipeline_degree ({config.moe.pipeline_degree}) for moe.placement.bitwise"
        fixes: list[Fix] = [{"moe.backward_pipeline_degree": None}, {"moe.placement.bitwise": False}]
        yield Problem("moe.backward_pipeline_degree", rule, fixes)
    if placement.max_load is not None and placement.policy != "solve":
        rule = f"must be null for moe.placement.policy={placement.policy}, which keeps no limit"
        yield Problem(
            "moe.placement.max_load", rule, [{"moe.placement.max_load": None}, {"moe.placement.policy": "solve"}]
        )
    if placement.over_limit != "warn" and placement.max_load is None:
        rule = "must be warn where moe.placement.max_load is null: there is no limit"
        yield Problem("moe.placement.over_limit", rule, [{"moe.placement.over_limit": "warn"}])
    if placement.replay is not None and placement.policy in ("static", "auto"):
        rule = f"must be null for moe.placement.policy={placement.policy}: which calls have copies is not in a plan"
        yield Problem("moe.placement.replay", rule, [{"moe.placement.replay": None}, {"moe.placement.policy": "solve"}])
    if is_static:
        return
    if placement.costs == "measured" and config.training.deterministic:
        rule = "must be assumed for training.deterministic: measured costs are other ones in every run"
        fixes = [{"moe.placement.costs": "assumed"}, {"training.deterministic": False}]
        yield Problem("moe.placement.costs", rule, fixes)
    if config.parallel.expert == 1:
        rule = "must be static where parallel.expert is 1: a rank has all experts"
        yield Problem("moe.placement.policy", rule, [static, {"parallel.expert": 2}])
    others = derived.experts_of_other_ranks(config)
    if placement.extra_slots == 0:
        rule = f"must be at least 1 for moe.placement.policy={placement.policy}, whose copies lie there"
        yield Problem("moe.placement.extra_slots", rule, [{"moe.placement.extra_slots": min(2, others)}, static])
    elif placement.extra_slots > others:
        rule = f"must be at most {others}, the experts of the other ranks: a rank has no use for more copies"
        yield Problem("moe.placement.extra_slots", rule, [{"moe.placement.extra_slots": others}, static])
    if config.moe.capacity_factor is not None:
        rule = f"must be null for moe.placement.policy={placement.policy}, which balances ranks without dropping tokens"
        yield Problem("moe.capacity_factor", rule, [{"moe.capacity_factor": None}, static])
