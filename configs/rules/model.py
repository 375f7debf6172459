"""Rules of the model and of its MoE layers that do not depend on the layout."""

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
            rule = f"times the head dimension ({size}) must be an even integer: rotary positions rotate channel pairs"
            yield Problem("model.rotary_fraction", rule, 1.0, 0.5, {"model.position_embedding": "learned"})
    if model.sliding_window_from >= model.num_layers:
        rule = f"must be less than model.num_layers ({model.num_layers}); else no layer would have the window"
        yield Problem("model.sliding_window_from", rule, 0)
    if model.attention == "latent":
        for key, value in LATENT_NEEDS.items():
            if get(config, key) != value:
                rule = f"must be {show(value)} with model.attention=latent"
                yield Problem(key, rule, value, {"model.attention": "grouped"})
        if model.rotary_head_dim % 2:
            rule = "must be even, because rotary positions rotate pairs of channels"
            yield Problem("model.rotary_head_dim", rule, model.rotary_head_dim + 1, 64)
    if model.qk_norm_over == "all_heads" and not (model.qk_norm and model.normalization == "rmsnorm"):
        rule = "needs model.qk_norm=true and model.normalization=rmsnorm"
        wanted: Fix = {"model.qk_norm": True, "model.normalization": "rmsnorm"}
        yield Problem("model.qk_norm_over", rule, "head", wanted)
    if model.family == "bert" and model.sequence_length < MIN_BERT_SEQUENCE:
        rule = f"must be at least {MIN_BERT_SEQUENCE} for BERT, whose samples have [CLS], two sentences and two [SEP]"
        yield Problem("model.sequence_length", rule, MIN_BERT_SEQUENCE, 64, 512)
    if model.config_json is not None and not _is_json_object(model.config_json):
        rule = "must be a text that contains a JSON object, as an import writes it"
        yield Problem("model.config_json", rule, None)
    trained_here = config.data.tokenizer == "sentencepiece"
    if trained_here and not MIN_TRAINED_VOCAB <= config.data.vocab_size <= MAX_TRAINED_VOCAB:
        rule = f"must be from {MIN_TRAINED_VOCAB} to {MAX_TRAINED_VOCAB} to train a tokenizer on the corpus"
        nearest = [MIN_TRAINED_VOCAB, 4096] if config.data.vocab_size < MIN_TRAINED_VOCAB else [MAX_TRAINED_VOCAB, 4096]
        yield Problem("data.vocab_size", rule, *nearest)
    if trained_here and model.vocab_size is not None and model.vocab_size < config.data.vocab_size:
        rule = f"must be at least data.vocab_size ({config.data.vocab_size}), the tokenizer's, or null to equal it"
        yield Problem("model.vocab_size", rule, None, config.data.vocab_size)


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
        yield Problem(f"{ROTARY_SCALING}.{fault.key}" if fault.key else ROTARY_SCALING, fault.rule, *fixes)
        return
    if scaling is None or model.position_embedding != "rope":
        return
    pairs = derived.rotary_dim(config) // 2
    for name in ("short_factor", "long_factor"):
        if name in scaling and len(scaling[name]) != pairs:
            rule = f"must have {pairs} numbers, one for each pair of rotated channels"
            yield Problem(f"{ROTARY_SCALING}.{name}", rule, off)
    if scaling["rope_type"] == "yarn" and math.log(model.rotary_base) == 0:
        rule = f"must not be 1 with {ROTARY_SCALING} of rope_type yarn: all channels would have the same frequency"
        yield Problem("model.rotary_base", rule, 10000.0, off)


def moe(config: Config, world_size: int) -> Iterator[Problem]:
    moe, experts = config.moe, config.moe.num_experts
    if experts is None:
        return
    if moe.top_k > experts:
        rule = f"must not exceed moe.num_experts ({experts})"
        yield Problem("moe.top_k", rule, *range(experts, 0, -1), {"moe.num_experts": moe.top_k})
    if moe.top_k == 1 and moe.router_score == "softmax" and moe.normalize_top_k:
        rule = "must be false with moe.top_k=1 and moe.router_score=softmax: a weight of 1 gives the router no gradient"
        yield Problem("moe.normalize_top_k", rule, False, {"moe.top_k": 2})
    if moe.top_k > 1 and moe.router_score == "sigmoid" and not moe.normalize_top_k:
        rule = "must be true with moe.router_score=sigmoid, whose weights Megatron-core always scales to a sum of 1"
        yield Problem("moe.normalize_top_k", rule, True, {"moe.router_score": "softmax"})
    if moe.expert_bias and moe.router_score != "sigmoid":
        rule = "must be sigmoid if moe.expert_bias is true"
        yield Problem("moe.router_score", rule, "sigmoid", {"moe.expert_bias": False})
    if moe.memory_budget is not None and "auto" not in (moe.pipeline_degree, moe.memory_strategy):
        rule = "must be null unless moe.pipeline_degree=auto or moe.memory_strategy=auto, whose choice it limits"
        yield Problem("moe.memory_budget", rule, None, {"moe.memory_strategy": "auto"})
    if config.training.deterministic and derived.plans_moe(config):
        rule = (
            "must be false if moe.pipeline_degree, moe.memory_strategy or moe.all_to_all is auto, which depends on "
            "measured times"
        )
        numbers: Fix = {
            "moe.pipeline_degree": 1,
            "moe.memory_strategy": "keep",
            "moe.all_to_all": "flat",
            "moe.memory_budget": None,
        }
        yield Problem("training.deterministic", rule, False, numbers)
    forward, backward = derived.pipeline_degrees(config)
    if "offload" in moe.memory_strategy and forward != backward:
        rule = (
            f"must be null or equal moe.pipeline_degree ({moe.pipeline_degree}) for "
            f"moe.memory_strategy={moe.memory_strategy}"
        )
        yield Problem("moe.backward_pipeline_degree", rule, None, {"moe.memory_strategy": "keep"})
    yield from _expert_groups(config)
    yield from _placement(config)
    if config.model.linear_bias and moe.shared_expert_ffn_hidden_size is not None:
        rule = "must be false with moe.shared_expert_ffn_hidden_size: Megatron-core's shared experts have no biases"
        yield Problem("model.linear_bias", rule, False, {"moe.shared_expert_ffn_hidden_size": None})
    if config.model.linear_bias and (size := derived.expert_tensor_size(config)) > 1:
        rule = f"must be false if experts are sharded over {size} tensor ranks: each would add the full bias"
        yield Problem("model.linear_bias", rule, False, {"parallel.expert_tensor": 1, "parallel.expert": 2})


def _expert_groups(config: Config) -> Iterator[Problem]:
    moe, experts = config.moe, config.moe.num_experts
    assert experts is not None
    off: Fix = {"moe.num_groups": None, "moe.group_top_k": None}
    for key, other in (("num_groups", "group_top_k"), ("group_top_k", "num_groups")):
        if getattr(moe, key) is None and getattr(moe, other) is not None:
            rule = f"must be set, because moe.{other} ({getattr(moe, other)}) is set: group-limited routing needs both"
            values = (
                [moe.group_top_k, *divisors(experts, 4)] if key == "num_groups" else range(1, (moe.num_groups or 1) + 1)
            )
            yield Problem(f"moe.{key}", rule, *values, off)
    if moe.num_groups is None or moe.group_top_k is None:
        return
    yield from must_divide(("moe.num_groups", moe.num_groups), ("moe.num_experts", experts), off)
    if moe.group_top_k > moe.num_groups:
        rule = f"must not exceed moe.num_groups ({moe.num_groups})"
        yield Problem("moe.group_top_k", rule, *range(moe.num_groups, 0, -1), off)
    size = experts // moe.num_groups
    if moe.group_score_top_k is None:
        best: Fix = {"moe.group_score_top_k": min(2, size)}
        yield from must_divide(("moe.group_top_k", moe.group_top_k), ("moe.top_k", moe.top_k), off, best)
    elif moe.group_score_top_k > size:
        rule = f"must not exceed {size}, the number of experts in a group"
        yield Problem("moe.group_score_top_k", rule, size, None)
    if moe.top_k > moe.group_top_k * size:
        rule = (
            f"must not exceed {moe.group_top_k * size}, the number of experts in moe.group_top_k ({moe.group_top_k}) "
            f"groups of {size}"
        )
        more_groups = set_to("moe.group_top_k", range(1, moe.num_groups + 1))
        yield Problem("moe.top_k", rule, *range(moe.group_top_k * size, 0, -1), *more_groups, off)


def _placement(config: Config) -> Iterator[Problem]:
    placement, is_static = config.moe.placement, config.moe.placement.policy == "static"
    static: Fix = {"moe.placement.policy": "static", "moe.placement.extra_slots": 0}
    if is_static and placement.extra_slots > 0:
        rule = "must be 0 if moe.placement.policy is static, which replicates no experts"
        yield Problem("moe.placement.extra_slots", rule, {"moe.placement.policy": "solve"}, static)
    if placement.bitwise and None in derived.pipeline_degrees(config):
        rule = "must be a number if moe.placement.bitwise is true, because blocks must not cross chunks"
        yield Problem("moe.pipeline_degree", rule, 1, {"moe.placement.bitwise": False})
    elif placement.bitwise and len(set(derived.pipeline_degrees(config))) > 1:
        rule = f"must be null or equal moe.pipeline_degree ({config.moe.pipeline_degree}) for moe.placement.bitwise"
        yield Problem("moe.backward_pipeline_degree", rule, None, {"moe.placement.bitwise": False})
    if placement.max_load is not None and placement.policy != "solve":
        rule = f"must be null for moe.placement.policy={placement.policy}, which cannot limit the load"
        yield Problem("moe.placement.max_load", rule, None, {"moe.placement.policy": "solve"})
    if placement.over_limit != "warn" and placement.max_load is None:
        rule = "must be warn if moe.placement.max_load is null, because there is no limit then"
        yield Problem("moe.placement.over_limit", rule, "warn")
    if placement.replay is not None and placement.policy in ("static", "auto"):
        rule = f"must be null for moe.placement.policy={placement.policy}: plans do not record calls with replicas"
        yield Problem("moe.placement.replay", rule, None, {"moe.placement.policy": "solve"})
    if is_static:
        return
    if placement.costs == "measured" and config.training.deterministic:
        rule = "must be assumed if training.deterministic is true, because measured costs differ from run to run"
        yield Problem("moe.placement.costs", rule, "assumed", {"training.deterministic": False})
    if config.parallel.expert == 1:
        rule = "must be static if parallel.expert is 1, because each rank has all experts"
        yield Problem("moe.placement.policy", rule, static, {"parallel.expert": 2})
    others = derived.experts_of_other_ranks(config)
    if placement.extra_slots == 0:
        rule = f"must be at least 1 for moe.placement.policy={placement.policy}, which stores replicas in these slots"
        yield Problem("moe.placement.extra_slots", rule, min(2, others), static)
    elif placement.extra_slots > others:
        rule = f"must be at most {others}, the number of experts on other ranks: a rank needs no more replicas"
        yield Problem("moe.placement.extra_slots", rule, others, static)
    if config.moe.capacity_factor is not None:
        rule = f"must be null for moe.placement.policy={placement.policy}, which balances ranks without dropping tokens"
        yield Problem("moe.capacity_factor", rule, None, static)
