"""Every rule that types alone cannot hold: ranges, names, divisibility, what goes with what.

A rule yields a `Problem`: the field, its value, the rule, and candidate fixes. `validate` reports the first problem and proposes
the first candidate with which the whole configuration is legal, so that what a message suggests works.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from configs import derived
from configs.keys import Key
from configs.schema import KEYS, Config, ConfigError

Fix = dict[str, Any]  # dotted key -> value; the key WORLD_SIZE stands for the number of processes
WORLD_SIZE = "world_size"
MAX_FIXES = 40  # tried for one problem, nearest first
MAX_PLANNED_COPIES = 64  # of the model, tried for a plan that is told no number of ranks
MIN_SENTENCEPIECE_VOCAB = 300  # 256 bytes, the special pieces and some room to learn
MIN_BERT_SEQUENCE = 8  # [CLS] a [SEP] b [SEP] with something to mask


class Problem(NamedTuple):
    key: str
    rule: str  # reads on from "key (value) "
    fixes: list[Fix]


# What latent attention takes for granted.
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

INF = math.inf


def validate(config: Config, world_size: int) -> None:
    """Check a configuration for a run on `world_size` processes.

    Raises:
        ConfigError: naming the first field that breaks a rule, its value, the rule, and a value that works.
    """
    problem = first_problem(config, world_size)
    if problem is not None:
        value = world_size if problem.key == WORLD_SIZE else get(config, problem.key)
        raise ConfigError(f"{problem.key} ({show(value)}) {problem.rule}. {_advice(config, world_size, problem)}".strip())


def usable_world_size(config: Config, world_size: int) -> int:
    """How many of the started processes take part: all, or with `training.elastic` the most that the configuration allows."""
    if config.training.elastic:
        for size in range(world_size, 0, -1):
            if first_problem(config, size) is None:
                return size
    return world_size


def planned_world_size(config: Config, started: int) -> int:
    """How many processes a plan is for: `plan_world_size`, those started, or without a launcher the fewest that the config allows."""
    if config.plan_world_size is not None:
        return max(1, config.plan_world_size)  # what is less, a rule refuses
    if started > 1:
        return started
    fewest = math.lcm(max(1, derived.model_parallel_size(config)), max(1, derived.expert_model_parallel_size(config)))
    sizes = range(fewest, fewest * MAX_PLANNED_COPIES + 1, fewest)
    return next((size for size in sizes if first_problem(config, size) is None), fewest)


def first_problem(config: Config, world_size: int) -> Problem | None:
    """The first broken rule; later rules may assume that earlier ones hold."""
    for rules in RULES:
        for problem in rules(config, world_size):
            return problem
    return None


def get(config: Config, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def show(value: Any, width: int | None = 60) -> str:
    """A value as it is written on the command line; a list or mapping of more than `width` characters is cut."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, (list, dict)):
        return str(value)
    if isinstance(value, list):
        text = f"[{','.join(show(item, None) for item in value)}]"
    else:
        text = "{" + ", ".join(f"{key}: {show(item, None)}" for key, item in value.items()) + "}"
    return text if width is None or len(text) <= width else f"{text[: width - 10]}...{text[-1]}"


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `names` that a user who typed `name` most likely meant, if any is near."""
    close = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=cutoff)
    return close[0] if close else None


def default(key: str) -> Any:
    """The schema's own value of a key."""
    return get(Config(), key)


def _apply(config: Config, world_size: int, fix: Fix) -> tuple[Config, int]:
    changed = copy.deepcopy(config)
    for key, value in fix.items():
        if key == WORLD_SIZE:
            world_size = value
            continue
        section, _, name = key.rpartition(".")
        setattr(get(changed, section) if section else changed, name, value)
    return changed, world_size


def _advice(config: Config, world_size: int, problem: Problem) -> str:
    """The first fix on the configuration's side and the first on the launch's side that leave nothing wrong."""
    sides = [[fix for fix in problem.fixes if (WORLD_SIZE in fix) == launch] for launch in (False, True)]
    found = [_working(config, world_size, fixes) for fixes in sides]
    advice = [_show_fix(fix) for fix in found if fix is not None]
    if not advice and problem.fixes:  # too much else is wrong: propose what settles this one
        settled = [fix for fix in problem.fixes if _key_after(config, world_size, fix) != problem.key]
        advice = [_show_fix((settled or problem.fixes)[0])]
    return f"Try {' or '.join(advice)}." if advice else ""


def _working(config: Config, world_size: int, fixes: list[Fix], more: int = 1) -> Fix | None:
    """The first fix that works alone, else the first that works with one fix of what it leaves wrong."""
    left: list[tuple[Fix, Problem]] = []
    for fix in fixes[:MAX_FIXES]:
        problem = first_problem(*_apply(config, world_size, fix))
        if problem is None:
            return fix
        left.append((fix, problem))
    for fix, problem in left if more else []:
        rest = _working(
            *_apply(config, world_size, fix), [f for f in problem.fixes if WORLD_SIZE not in f and not f.keys() & fix], more - 1
        )
        if rest is not None:
            return fix | rest
    return None


def _key_after(config: Config, world_size: int, fix: Fix) -> str | None:
    problem = first_problem(*_apply(config, world_size, fix))
    return problem.key if problem else None


def _show_fix(fix: Fix) -> str:
    keys = " ".join(f"{key}={show(value)}" for key, value in fix.items() if key != WORLD_SIZE)
    if WORLD_SIZE not in fix:
        return keys
    return f"{fix[WORLD_SIZE]} processes (torchrun --nproc-per-node)" + (f" with {keys}" if keys else "")


def _divisors(number: int, near: int) -> list[int]:
    """Divisors of a number, those nearest to `near` first and the smaller of two equally near."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, key=lambda d: (abs(d - near), d))


def _multiples(number: int, near: int) -> list[int]:
    """A few positive multiples of a number, nearest to `near` first."""
    around = {number * max(1, near // number + step) for step in range(-1, 4)}
    return sorted(around, key=lambda m: (abs(m - near), m))


def _set(key: str, values: Iterable[Any]) -> list[Fix]:
    return [{key: value} for value in values]


def _must_divide(divisor: tuple[str, int], number: tuple[str, int], *other_fixes: Fix) -> Iterator[Problem]:
    (key, small), (other_key, large) = divisor, number
    if large % small:
        fixes = [*_set(key, _divisors(large, small)), *other_fixes, *_set(other_key, _multiples(small, large))]
        yield Problem(key, f"must divide {other_key} ({large})", fixes)


# The rules, in the order in which they are checked.


def _values(config: Config, world_size: int) -> Iterator[Problem]:
    """What the schema says of each key by itself."""
    for name, key in KEYS.items():
        value = get(config, name)
        if isinstance(value, str) and not key.choices and not value.strip():
            yield Problem(name, "must not be empty", _set(name, [default(name)]))
        rule = key.broken_rule(value)
        if rule is not None:
            yield Problem(name, f"must be {rule}", _set(name, _legal_values(key, value)))
    for name in config.checkpoint.accept_changes:
        yield from _accepted(config, name)


def _legal_values(key: Key, value: Any) -> list[Any]:
    """Values that the schema allows in place of one that it does not, nearest first."""
    close = nearest(value, key.choices) if key.choices else None
    edge = [int(key.low)] if key.low is not None and isinstance(value, int) else []
    tried = [*([close] if close else []), *edge, key.fresh_default(), *(key.choices or (1, 0.5)), None]
    return [new for new in tried if key.broken_rule(new) is None and (new is not None or key.nullable)]


def _accepted(config: Config, name: str) -> Iterator[Problem]:
    """checkpoint.accept_changes lists what a resume would refuse, and no more."""
    key = "checkpoint.accept_changes"
    acceptable = [other for other in KEYS if KEYS[other].acceptable]
    if name in acceptable:
        return
    if name not in KEYS:
        rule = f"lists {name}, which is no known key"
    elif KEYS[name].architecture:
        rule = f"lists {name}, which makes another model"
    else:
        rule = f"lists {name}, whose change a resume does not refuse"
    rest = [other for other in config.checkpoint.accept_changes if other != name]
    by_last = {other.rpartition(".")[2]: other for other in acceptable}
    close = (nearest(name, acceptable) or by_last.get(nearest(name, by_last) or "")) if name not in KEYS else None
    rule += "" if close else f"; it may list {', '.join(acceptable)}"
    yield Problem(key, rule, _set(key, [*([[*rest, close]] if close and close not in rest else []), rest]))


def _loose_values(config: Config, world_size: int) -> Iterator[Problem]:
    """The few keys that take values of several types."""
    corpus = config.data.corpus
    items = corpus if isinstance(corpus, list) else [] if isinstance(corpus, dict) else [corpus]
    for item in items:
        path, weight = (item.get("path"), item.get("weight", 1.0)) if isinstance(item, dict) else (item, 1.0)
        unknown = set(item) - {"path", "weight"} if isinstance(item, dict) else set()
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 < weight < INF
        if not isinstance(path, str) or not path.strip() or not number or unknown:
            items = []
    if not items:
        rule = "must be stdlib, a path, or a list of paths or of {path: a path, weight: a number above 0}"
        yield Problem("data.corpus", rule, _set("data.corpus", ["stdlib"]))

    profile, steps = config.training.profile, config.training.steps
    if any(not 1 <= step <= steps for step in profile.steps):
        rule = f"must be numbers of steps from 1 to training.steps ({steps})"
        yield Problem("training.profile.steps", rule, _set("training.profile.steps", [[min(10, steps)], []]))
    listed = isinstance(profile.ranks, list) and all(type(rank) is int and 0 <= rank < world_size for rank in profile.ranks)
    if profile.ranks != "all" and not (listed and profile.ranks):
        rule = f"must be all, or a list of ranks from 0 to {world_size - 1}"
        yield Problem("training.profile.ranks", rule, _set("training.profile.ranks", ["all"]))

    degree = config.moe.pipeline_degree
    if degree != "auto" and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
        yield Problem("moe.pipeline_degree", "must be an integer of at least 1, or auto", _set("moe.pipeline_degree", ["auto", 1]))

    if config.plan not in (False, True, "json") or isinstance(config.plan, (int, float)) and not isinstance(config.plan, bool):
        yield Problem("plan", "must be true, false or json", _set("plan", [True]))
    if config.plan_world_size is not None and config.plan_world_size < 1:
        yield Problem("plan_world_size", "must be at least 1, or null", _set("plan_world_size", [1, None]))
    if config.plan_world_size is not None and config.plan is False:
        rule = "is for plan=true: a run takes the processes that are started"
        yield Problem("plan_world_size", rule, [{"plan": True}, {"plan_world_size": None}])

    layers, num_layers = config.moe.layers, config.model.num_layers
    if isinstance(layers, list):
        if len(layers) != num_layers or any(layer not in (0, 1) for layer in layers) or not any(layers):
            spread = [int(layers[i % len(layers)] in (1, True)) if layers else 1 for i in range(num_layers)]
            rule = f"must be a list of one 0 or 1 for each of model.num_layers ({num_layers}), with at least one 1, or an integer"
            yield Problem("moe.layers", rule, _set("moe.layers", [*([spread] if any(spread) and num_layers <= 16 else []), 1]))
    elif not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        rule = "must be an integer n of at least 1 (every n-th layer is MoE) or a list of 0 and 1, one per layer"
        yield Problem("moe.layers", rule, _set("moe.layers", [1]))


def _model(config: Config, world_size: int) -> Iterator[Problem]:
    model = config.model
    heads = ("model.num_attention_heads", model.num_attention_heads)
    if model.head_dim is None:
        yield from _must_divide(heads, ("model.hidden_size", model.hidden_size))
    if model.num_query_groups is not None:
        yield from _must_divide(("model.num_query_groups", model.num_query_groups), heads)
    if model.position_embedding == "rope" and model.attention == "grouped":
        rotating = derived.head_dim(config) * model.rotary_fraction
        if rotating != int(rotating) or int(rotating) % 2:
            size = derived.head_dim(config)
            rule = f"of the {size} channels of a head must be an even number, because rotary positions turn pairs of channels"
            fixes = [*_set("model.rotary_fraction", [1.0, 0.5]), {"model.position_embedding": "learned"}]
            yield Problem("model.rotary_fraction", rule, fixes)
    if model.attention == "latent":
        for key, value in LATENT_NEEDS.items():
            if get(config, key) != value:
                rule = f"must be {show(value)} with model.attention=latent"
                yield Problem(key, rule, [{key: value}, {"model.attention": "grouped"}])
        if model.rotary_head_dim % 2:
            rule = "must be even, because rotary positions turn pairs of channels"
            yield Problem("model.rotary_head_dim", rule, _set("model.rotary_head_dim", [model.rotary_head_dim + 1, 64]))
    if model.qk_norm_over == "all_heads" and not (model.qk_norm and model.normalization == "rmsnorm"):
        rule = "needs model.qk_norm=true and model.normalization=rmsnorm"
        wanted: Fix = {"model.qk_norm": True, "model.normalization": "rmsnorm"}
        yield Problem("model.qk_norm_over", rule, [{"model.qk_norm_over": "head"}, wanted])
    if model.family == "bert" and model.sequence_length < MIN_BERT_SEQUENCE:
        rule = f"must be at least {MIN_BERT_SEQUENCE} for BERT, whose samples hold [CLS], two sentences and two [SEP]"
        yield Problem("model.sequence_length", rule, _set("model.sequence_length", [MIN_BERT_SEQUENCE, 64, 512]))
    for key, value in (("model.sentence_head", "none"), ("model.norm_position", "pre")):
        if model.family != "bert" and get(config, key) != value:
            yield Problem(key, f"must be {value} unless model.family is bert", [{key: value}, {"model.family": "bert"}])
    trained_here = config.data.tokenizer == "sentencepiece"
    if trained_here and config.data.vocab_size < MIN_SENTENCEPIECE_VOCAB:
        rule = f"must be at least {MIN_SENTENCEPIECE_VOCAB} for a sentencepiece tokenizer with byte fallback"
        yield Problem("data.vocab_size", rule, _set("data.vocab_size", [MIN_SENTENCEPIECE_VOCAB, 4096]))
    if trained_here and model.vocab_size is not None and model.vocab_size < config.data.vocab_size:
        rule = f"must hold the tokenizer's data.vocab_size ({config.data.vocab_size}), or be null to follow it"
        yield Problem("model.vocab_size", rule, _set("model.vocab_size", [None, config.data.vocab_size]))


def _moe(config: Config, world_size: int) -> Iterator[Problem]:
    moe, experts = config.moe, config.moe.num_experts
    if experts is None:
        unset: Fix = {"ffn_hidden_size": None, "shared_expert_ffn_hidden_size": None, "expert_bias": False}
        unset |= {"capacity_factor": None, "num_groups": None, "group_top_k": None}
        for name, value in unset.items():
            if getattr(moe, name) != value:
                rule = f"must be {show(value)} in a dense model (moe.num_experts is null)"
                yield Problem(f"moe.{name}", rule, [{f"moe.{name}": value}, {"moe.num_experts": 8}])
        return
    if moe.top_k > experts:
        rule = f"must not exceed moe.num_experts ({experts})"
        yield Problem("moe.top_k", rule, [*_set("moe.top_k", range(experts, 0, -1)), {"moe.num_experts": moe.top_k}])
    if moe.top_k == 1 and moe.router_score == "softmax" and moe.normalize_top_k:
        rule = "must be false for top_k=1 with softmax scores: a single weight that is scaled to 1 gives the router no gradient"
        yield Problem("moe.normalize_top_k", rule, [{"moe.normalize_top_k": False}, {"moe.top_k": 2}])
    if moe.top_k > 1 and moe.router_score == "sigmoid" and not moe.normalize_top_k:
        rule = "must be true for sigmoid scores, which Megatron-core always scales to sum 1"
        yield Problem("moe.normalize_top_k", rule, [{"moe.normalize_top_k": True}, {"moe.router_score": "softmax"}])
    if moe.expert_bias and moe.router_score != "sigmoid":
        fixes: list[Fix] = [{"moe.router_score": "sigmoid"}, {"moe.expert_bias": False}]
        yield Problem("moe.router_score", "must be sigmoid for moe.expert_bias", fixes)
    if moe.memory_budget is not None and not derived.plans_moe(config):
        rule = "is for what moe.pipeline_degree=auto or moe.memory_strategy=auto choose; neither is auto"
        yield Problem("moe.memory_budget", rule, [{"moe.memory_budget": None}, {"moe.memory_strategy": "auto"}])
    if config.training.deterministic and derived.plans_moe(config):
        rule = "must be false where pipeline_degree, memory_strategy or all_to_all of moe is auto, which follows measured times"
        numbers: Fix = {"moe.pipeline_degree": 1, "moe.memory_strategy": "keep", "moe.all_to_all": "flat", "moe.memory_budget": None}
        yield Problem("training.deterministic", rule, [{"training.deterministic": False}, numbers])
    forward, backward = derived.pipeline_degrees(config)
    if "offload" in moe.memory_strategy and forward != backward:
        rule = f"must equal moe.pipeline_degree ({moe.pipeline_degree}) for moe.memory_strategy={moe.memory_strategy}, or be null"
        yield Problem("moe.backward_pipeline_degree", rule, [{"moe.backward_pipeline_degree": None}, {"moe.memory_strategy": "keep"}])
    yield from _expert_groups(config)
    if config.model.linear_bias and moe.shared_expert_ffn_hidden_size is not None:
        rule = "must be false with moe.shared_expert_ffn_hidden_size: Megatron-core's shared experts have no biases"
        fixes = [{"model.linear_bias": False}, {"moe.shared_expert_ffn_hidden_size": None}]
        yield Problem("model.linear_bias", rule, fixes)
    if config.model.linear_bias and derived.expert_tensor_size(config) > 1:
        size = derived.expert_tensor_size(config)
        rule = f"must be false when experts are split over {size} tensor ranks: Megatron-core would add a split expert's bias {size} times"
        fixes = [{"model.linear_bias": False}, {"parallel.expert_tensor": 1, "parallel.expert": 2}]
        yield Problem("model.linear_bias", rule, fixes)


def _expert_groups(config: Config) -> Iterator[Problem]:
    moe, experts = config.moe, config.moe.num_experts
    assert experts is not None
    off: Fix = {"moe.num_groups": None, "moe.group_top_k": None}
    for key, other in (("num_groups", "group_top_k"), ("group_top_k", "num_groups")):
        if getattr(moe, key) is None and getattr(moe, other) is not None:
            rule = f"must be set too for group-limited routing (moe.{other} is {getattr(moe, other)})"
            values = [moe.group_top_k, *_divisors(experts, 4)] if key == "num_groups" else range(1, (moe.num_groups or 1) + 1)
            yield Problem(f"moe.{key}", rule, [*_set(f"moe.{key}", values), off])
    if moe.num_groups is None or moe.group_top_k is None:
        return
    yield from _must_divide(("moe.num_groups", moe.num_groups), ("moe.num_experts", experts), off)
    if moe.group_top_k > moe.num_groups:
        rule = f"must not exceed moe.num_groups ({moe.num_groups})"
        yield Problem("moe.group_top_k", rule, [*_set("moe.group_top_k", range(moe.num_groups, 0, -1)), off])
    # A group's score is the sum of its best top_k / group_top_k experts.
    yield from _must_divide(("moe.group_top_k", moe.group_top_k), ("moe.top_k", moe.top_k), off)
    size = experts // moe.num_groups
    if moe.top_k > moe.group_top_k * size:
        rule = f"must not exceed the {moe.group_top_k * size} experts of moe.group_top_k ({moe.group_top_k}) groups of {size}"
        fixes = [*_set("moe.top_k", range(moe.group_top_k * size, 0, -1)), *_set("moe.group_top_k", range(1, moe.num_groups + 1)), off]
        yield Problem("moe.top_k", rule, fixes)


def _tensor(config: Config, world_size: int) -> Iterator[Problem]:
    model, parallel = config.model, config.parallel
    tensor = ("parallel.tensor", parallel.tensor)
    yield from _must_divide(tensor, ("model.num_attention_heads", model.num_attention_heads))
    yield from _must_divide(tensor, ("model.num_query_groups", derived.num_query_groups(config)))
    if model.attention == "latent":
        width = model.kv_lora_rank + model.rotary_head_dim
        if width % parallel.tensor:
            rule = f"must divide model.kv_lora_rank + model.rotary_head_dim ({width})"
            yield Problem("parallel.tensor", rule, _set("parallel.tensor", _divisors(width, parallel.tensor)))
        if model.q_lora_rank is not None:
            yield from _must_divide(tensor, ("model.q_lora_rank", model.q_lora_rank))
    if parallel.sequence and parallel.tensor == 1:
        fixes: list[Fix] = [{"parallel.sequence": False}, *_set("parallel.tensor", [2])]
        yield Problem("parallel.sequence", "needs parallel.tensor (1) above 1: it splits the sequence over tensor ranks", fixes)
    if parallel.sequence:
        yield from _must_divide(tensor, ("model.sequence_length", model.sequence_length))
    if derived.is_moe(config) and parallel.tensor > 1 and not parallel.sequence:
        rule = f"must be true for an MoE model with parallel.tensor ({parallel.tensor}) above 1: Megatron-core routes each token once"
        fixes = [{"parallel.sequence": True}, {"parallel.tensor": 1}]
        yield Problem("parallel.sequence", rule, fixes)
    if 0 in derived.moe_layer_pattern(config):
        yield from _must_divide(tensor, ("model.ffn_hidden_size", derived.ffn_hidden_size(config)))
    if derived.is_moe(config) and config.moe.shared_expert_ffn_hidden_size is not None:
        yield from _must_divide(tensor, ("moe.shared_expert_ffn_hidden_size", config.moe.shared_expert_ffn_hidden_size))


def _experts(config: Config, world_size: int) -> Iterator[Problem]:
    parallel, experts = config.parallel, config.moe.num_experts
    if experts is None and parallel.expert > 1:
        fixes: list[Fix] = [{"parallel.expert": 1}, {"moe.num_experts": _multiples(parallel.expert, 8)[0]}]
        yield Problem("parallel.expert", "must be 1 in a dense model (moe.num_experts is null)", fixes)
    if experts is not None:
        yield from _must_divide(("parallel.expert", parallel.expert), ("moe.num_experts", experts))
    if parallel.expert == 1 and derived.expert_tensor_size(config) != parallel.tensor:
        # Megatron-core 0.16.1 reduces the gradients of such experts over the wrong group (NVIDIA/Megatron-LM#1628).
        rule = f"must be null or equal parallel.tensor ({parallel.tensor}) while parallel.expert is 1"
        yield Problem("parallel.expert_tensor", rule, [*_set("parallel.expert_tensor", [None]), *_set("parallel.expert", [2, 4, 8])])
    if experts is not None:
        key = "parallel.expert_tensor" if parallel.expert_tensor is not None else "parallel.tensor"
        width = ("moe.ffn_hidden_size", derived.expert_ffn_hidden_size(config))
        yield from _must_divide((key, derived.expert_tensor_size(config)), width)


def _pipeline(config: Config, world_size: int) -> Iterator[Problem]:
    parallel, num_layers = config.parallel, config.model.num_layers
    chunks = parallel.virtual_pipeline
    if chunks is not None and parallel.pipeline == 1:
        fixes: list[Fix] = [{"parallel.virtual_pipeline": None}, {"parallel.pipeline": 2}]
        yield Problem("parallel.virtual_pipeline", "needs parallel.pipeline (1) above 1", fixes)
    if chunks is None:
        yield from _must_divide(("parallel.pipeline", parallel.pipeline), ("model.num_layers", num_layers))
    elif num_layers % (parallel.pipeline * chunks):
        product = parallel.pipeline * chunks
        rule = f"times parallel.pipeline ({parallel.pipeline}) must divide model.num_layers ({num_layers})"
        fits = [d for d in _divisors(num_layers, product) if d % parallel.pipeline == 0 and d > parallel.pipeline]
        fixes = [
            *_set("parallel.virtual_pipeline", [*(d // parallel.pipeline for d in fits), None]),
            *_set("parallel.pipeline", _divisors(num_layers, parallel.pipeline)),
            *_set("model.num_layers", _multiples(product, num_layers)),
        ]
        yield Problem("parallel.virtual_pipeline", rule, fixes)


def _world(config: Config, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    names = ("tensor", "pipeline", "context", "expert")
    dense, expert = derived.model_parallel_size(config), derived.expert_model_parallel_size(config)
    both = math.lcm(dense, expert)
    # The one size to change, tried in every section and at every value that divides the world; then the number of processes.
    smaller: list[Fix] = []
    for name in sorted(names, key=lambda name: -getattr(parallel, name)):
        size = getattr(parallel, name)
        smaller += _set(f"parallel.{name}", [d for d in _divisors(world_size, size) if d != size])
    alone: Fix = {"tensor": 1, "sequence": False, "pipeline": 1, "virtual_pipeline": None, "expert": 1, "expert_tensor": None}
    alone = {f"parallel.{name}": value for name, value in alone.items() if getattr(parallel, name) != value}
    launch = _set(WORLD_SIZE, _multiples(both, world_size))
    product = "parallel.tensor * parallel.pipeline * parallel.context"
    if world_size % dense:
        sizes = f"{parallel.tensor} * {parallel.pipeline} * {parallel.context} = {dense}"
        yield Problem(WORLD_SIZE, f"must be divisible by {product} = {sizes}", [*smaller, alone, *launch])
    if derived.is_moe(config) and world_size % expert:
        sizes = f"{parallel.expert} * {derived.expert_tensor_size(config)} * {parallel.pipeline} = {expert}"
        rule = f"must be divisible by parallel.expert * parallel.expert_tensor * parallel.pipeline = {sizes}"
        yield Problem(WORLD_SIZE, rule, [*smaller, alone, *launch])


def _batch(config: Config, world_size: int) -> Iterator[Problem]:
    training, parallel = config.training, config.parallel
    copies = derived.data_parallel_size(config, world_size)
    size, micro = training.global_batch_size, training.micro_batch_size
    if size % (micro * copies):
        rule = f"must be divisible by training.micro_batch_size ({micro}) times the data-parallel size ({copies})"
        smaller = [d for d in _divisors(size // copies, micro) if d < micro] if size % copies == 0 else []
        fixes = [*_set("training.micro_batch_size", smaller), *_set("training.global_batch_size", _multiples(micro * copies, size))]
        if parallel.virtual_pipeline is not None:
            fixes += _set("training.global_batch_size", _multiples(micro * copies * parallel.pipeline, size))
        yield Problem("training.global_batch_size", rule, fixes)
    count = derived.num_micro_batches(config, world_size)
    if parallel.virtual_pipeline is not None and count % parallel.pipeline:
        rule = (
            f"makes {count} micro-batches a step, which must be a multiple of parallel.pipeline ({parallel.pipeline}) "
            "when parallel.virtual_pipeline is set"
        )
        fixes = [
            *_set("training.micro_batch_size", _divisors(size // copies, micro)),
            *_set("training.global_batch_size", _multiples(micro * copies * parallel.pipeline, size)),
            {"parallel.virtual_pipeline": None},
        ]
        yield Problem("training.global_batch_size", rule, fixes)


def _optimizer(config: Config, world_size: int) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        rule = f"must not exceed optimizer.lr ({show(optimizer.lr)})"
        yield Problem("optimizer.min_lr", rule, _set("optimizer.min_lr", [float(f"{optimizer.lr / 10:.6g}"), optimizer.lr, 0.0]))
    end, warmup = derived.decay_steps(config), optimizer.warmup_steps
    end_key = "training.steps" if optimizer.decay_steps is None else "optimizer.decay_steps"
    if warmup >= end:
        fixes = [*_set("optimizer.warmup_steps", [end // 10, 0]), {end_key: warmup * 10}]
        yield Problem("optimizer.warmup_steps", f"must be less than {end_key} ({end})", fixes)
    tail = optimizer.wsd_decay_steps
    if optimizer.schedule == "wsd" and not 1 <= tail <= end - warmup:
        rule = f"must be between 1 and {end_key} ({end}) minus optimizer.warmup_steps ({warmup}) for the wsd schedule"
        yield Problem("optimizer.wsd_decay_steps", rule, _set("optimizer.wsd_decay_steps", [max(1, (end - warmup) // 5)]))
    if optimizer.schedule != "wsd" and tail:
        rule = f"must be 0 for the {optimizer.schedule} schedule: only wsd has a final decay of its own"
        fixes = [{"optimizer.wsd_decay_steps": 0}, {"optimizer.schedule": "wsd"}]
        yield Problem("optimizer.wsd_decay_steps", rule, fixes)


RULES: list[Callable[[Config, int], Iterator[Problem]]] = [
    _values,
    _loose_values,
    _model,
    _moe,
    _tensor,
    _experts,
    _pipeline,
    _world,
    _batch,
    _optimizer,
]
