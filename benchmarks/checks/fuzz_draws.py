"""Random trainings for benchmarks.checks.fuzz: a model with its data, in one process and in one or two random layouts.

A draw follows from the seed and the case's number alone. What the rules of the config refuse is drawn again, and
counted by the key that was refused.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from base.errors import ConfigError
from configs import derived
from configs.schema import Config
from tests.training.helpers import make_config

MAX_TRIES = 60  # layouts on some ranks before the model is drawn again, and models before a case is given up
RANKS = (1, 2, 2, 3, 4, 4)
MIXED_LOSSES = ("moe.aux_loss_coeff", "model.hidden_dropout", "model.attention_dropout", "moe.capacity_factor")
Values = dict[str, str]  # key -> value, as on the command line

# Each key is drawn with the probability before it, else it keeps the preset's value.
MODEL: dict[str, tuple[float, Sequence[str]]] = {
    "model.tie_embeddings": (1.0, ("true", "false")),
    "model.position_embedding": (0.5, ("rope", "learned")),
    "model.rotary_fraction": (0.2, ("0.5",)),
    "model.normalization": (0.5, ("rmsnorm", "layernorm")),
    "model.qk_norm": (0.3, ("true",)),
    "model.qk_norm_over": (0.1, ("all_heads",)),
    "model.activation": (0.5, ("swiglu", "gelu", "gelu_tanh")),
    "model.linear_bias": (0.3, ("true", "false")),
    "model.qkv_bias": (0.2, ("true",)),
    "model.sliding_window": (0.2, ("1", "5", "12")),
    "model.sliding_window_from": (0.1, ("1",)),
    "model.hidden_dropout": (0.12, ("0.1",)),
    "model.attention_dropout": (0.05, ("0.1",)),
    "model.ffn_hidden_size": (0.3, ("24", "48", "72")),
    "model.head_dim": (0.2, ("4", "8")),
}
LATENT: Values = {
    "model.attention": "latent",
    "model.head_dim": "8",
    "model.rotary_head_dim": "4",
    "model.value_head_dim": "6",
    "model.kv_lora_rank": "12",
    "model.position_embedding": "rope",
    "model.normalization": "rmsnorm",
    "model.linear_bias": "false",
}
NOT_LATENT = ("model.rotary_fraction", "model.qk_norm", "model.qk_norm_over", "model.qkv_bias")
EXPERTS: dict[str, tuple[float, Sequence[str]]] = {
    "moe.num_experts": (1.0, ("2", "3", "4", "6", "8", "12")),
    "moe.top_k": (1.0, ("1", "2", "2", "3")),
    "moe.ffn_hidden_size": (1.0, ("16", "24", "40")),
    "moe.shared_expert_ffn_hidden_size": (0.25, ("16", "24")),
    "moe.layers": (0.3, ("2", "[0,1,1,1]", "[1,0]")),
    "moe.aux_loss_coeff": (1.0, ("0", "0", "0.01")),
    "moe.sequence_aux_loss_coeff": (0.25, ("0.01",)),
    "moe.global_aux_loss_coeff": (0.35, ("0.01",)),
    "moe.z_loss_coeff": (0.5, ("0", "0.001")),
    "moe.capacity_factor": (0.2, ("0.7", "1.0", "1.5")),
    "moe.drop_policy": (0.2, ("probs", "position")),
    "moe.routed_scaling_factor": (0.2, ("2.5",)),
}
TRAINED: dict[str, tuple[float, Sequence[str]]] = {
    "optimizer.clip_grad": (0.6, ("0", "0.1", "1")),
    "optimizer.moment_dtype": (0.2, ("bf16",)),
    "optimizer.weight_decay": (0.2, ("0",)),
    "optimizer.schedule": (0.4, ("linear", "constant")),
    "optimizer.warmup_steps": (0.3, ("1", "2")),
    "training.deterministic": (0.15, ("true",)),
}
LAYOUT_OPTIONS: dict[str, tuple[float, Sequence[str]]] = {
    "parallel.overlap_grad_reduce": (0.15, ("false",)),
    "parallel.overlap_param_gather": (0.25, ("false",)),
    "training.token_tile": (0.4, ("1", "7", "32", "100")),
    "optimizer.engine": (0.5, ("auto", "device_stream", "host", "split")),
    "optimizer.bucket_parameters": (0.6, ("4096",)),
    "optimizer.early_update": (0.5, ("always", "never", "auto")),
    "optimizer.distributed": (0.1, ("false",)),
    "data.prefetch": (0.2, ("1",)),
    "checkpoint.async_save": (0.3, ("false",)),
}
EXPERT_LAYOUT_OPTIONS: dict[str, tuple[float, Sequence[str]]] = {
    "moe.weight_slots": (0.5, ("1", "2", "3")),
    "moe.shard_weights": (0.5, ("true", "false")),
    "moe.pipeline_degree": (0.5, ("2", "3", "4", "auto")),
    "moe.backward_pipeline_degree": (0.2, ("1", "2", "3")),
    "moe.token_budget": (0.2, ("8", "24")),
    "moe.weight_lag": (0.3, ("0", "2")),
    "moe.memory_strategy": (
        0.6,
        ("recompute", "communicate", "communicate_recompute", "offload", "offload_recompute", "communicate_offload"),
    ),
    "moe.all_to_all": (0.2, ("hierarchical", "auto")),
}
PLACEMENT: dict[str, tuple[float, Sequence[str]]] = {
    "moe.placement.policy": (1.0, ("flex", "least_loaded", "solve", "auto")),
    "moe.placement.extra_slots": (1.0, ("1", "2", "3")),
    "moe.placement.interval": (1.0, ("0", "1", "2")),
    "moe.placement.bitwise": (0.3, ("true",)),
    "moe.placement.block_rows": (0.3, ("8",)),
}
STATES = (("device", "device"), ("device", "host"), ("device", "disk"), ("host", "host"), ("host", "disk"))
TARGETS = (*STATES, ("disk", "disk"))  # of experts' weights, and of optimizer state

# Where two ways of computing the same meet: what the case is, and what each of its layouts is, besides what is drawn.
THRESHOLDS: dict[str, tuple[Values, Values]] = {
    "512 tokens": ({"samples": "4", "model.sequence_length": "256"}, {"micro": "2", "training.token_tile": "null"}),
    "513 tokens": ({"samples": "12", "model.sequence_length": "171"}, {"micro": "3", "training.token_tile": "null"}),
    "tied, by layer, more than 512 tokens": (
        {"samples": "4", "model.sequence_length": "264", "model.tie_embeddings": "true", "family": "gpt"},
        {"micro": "2", "training.pass_order": "by_layer", "training.recompute": "full", "training.token_tile": "null"},
    ),
    "untied, by layer": (
        {"model.tie_embeddings": "false", "family": "gpt"},
        {"training.pass_order": "by_layer", "training.recompute": "full"},
    ),
    "micro-batches of 1": ({"data.documents": "separate", "family": "gpt"}, {"micro": "1"}),
    "micro-batches of 3": ({"data.documents": "separate", "family": "gpt", "samples": "12"}, {"micro": "3"}),
    "one holder of an expert": ({"experts": "yes"}, {"ranks": "2", "parallel.expert": "2", "tier": "host"}),
    "three holders of an expert": ({"experts": "yes", "samples": "12"}, {"ranks": "3", "tier": "host"}),
    "three holders, by context": ({"experts": "yes"}, {"ranks": "3", "parallel.context": "3", "tier": "disk"}),
    "fp16": ({"training.precision": "fp16", "training.initial_loss_scale": "65536"}, {}),
    "bf16 with biases of experts": (
        {"training.precision": "bf16", "experts": "yes", "moe.expert_bias": "true", "model.sequence_length": "136"},
        {},
    ),
    "separate documents over context": (
        {"data.documents": "separate", "family": "gpt", "model.attention_dropout": "0"},
        {"parallel.context": "2", "ranks": "4"},
    ),
    "dropout": ({"model.hidden_dropout": "0.2", "model.attention_dropout": "0"}, {"parallel.context": "1"}),
    "tiles of tokens": ({}, {"training.token_tile": "1", "training.recompute": "full"}),
    "recompute": ({}, {"training.recompute": "full", "training.activation_offload": "auto"}),
}


@dataclass(frozen=True)
class Leg:
    """A part of a case's training on some ranks, until the step `last`."""

    ranks: int
    last: int
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A training: `single` in one process, and `legs` one after the other, each from the checkpoint of the one before.

    `shared`: the overrides of both. `threshold`: of THRESHOLDS, or empty. `refused`: keys of what was drawn and may not
    be.
    """

    number: int
    threshold: str
    steps: int
    text: str
    shared: tuple[str, ...]
    single: tuple[str, ...]
    legs: tuple[Leg, ...]
    refused: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        """All overrides, as one line."""
        legs = (f"{leg.ranks} ranks to step {leg.last}: {' '.join(leg.overrides)}" for leg in self.legs)
        return " | ".join([f"text {self.text}", " ".join(self.shared), f"one process: {' '.join(self.single)}", *legs])


class Draw:
    """The draws of one case: `next_case` gives a legal one, and another at each call."""

    def __init__(self, seed: int, number: int, thresholds: bool):
        self.number = number
        self.random = random.Random(f"{seed} {number} {'thresholds' if thresholds else 'all'}")
        names = list(THRESHOLDS)
        self.threshold = names[(number - 1) % len(names)] if thresholds else ""
        self.refused: Counter[str] = Counter()

    def next_case(self) -> Case:
        """A case that the rules allow. Raises ValueError where none is found."""
        forced, forced_leg = THRESHOLDS[self.threshold] if self.threshold else ({}, {})
        for _ in range(MAX_TRIES):
            case = self._drawn(dict(forced), forced_leg)
            if case is not None:
                return case
        raise ValueError(f"case {self.number}: nothing legal in {MAX_TRIES} draws; refused: {dict(self.refused)}")

    def _drawn(self, forced: Values, forced_leg: Values) -> Case | None:
        text, samples = self.random.choice(("short", "short", "words")), forced.pop("samples", "")
        batch = int(samples or self.random.choice(("4", "6", "8", "12")))
        preset, values = self._model(forced)
        values |= {"training.global_batch_size": str(batch)}
        steps = self.random.choice((3, 4))
        # The mean over a micro-batch is another loss, and its number in the step another mask, where sizes differ.
        tied = any(float(values.get(key, "0")) > 0 for key in MIXED_LOSSES) or values["training.precision"] == "fp16"
        micro = int(forced_leg.get("micro") or self.random.choice([n for n in (1, 2, 3, 4) if batch % n == 0]))
        other = [n for n in range(1, batch + 1) if batch % n == 0 and n != micro]
        single = (f"training.micro_batch_size={micro if tied else self.random.choice(other)}",)
        shared = (f"experiment={preset}", *_overrides(values))
        config = self._legal([*shared, *single, f"training.steps={steps}"], 1)
        if config is None:
            return None
        cut = self.random.randint(1, steps - 1) if self.random.random() < 0.4 else steps
        legs: list[Leg] = []
        for last in dict.fromkeys((cut, steps)):
            ranks = int(forced_leg.get("ranks") or self.random.choice(RANKS))
            for _ in range(MAX_TRIES):
                size = micro if tied or not legs else self.random.choice([n for n in (1, 2, 3, 4) if batch % n == 0])
                layout = self._draw_layout(config, ranks, forced_leg)
                overrides = _overrides({"training.micro_batch_size": str(size), **layout})
                changed = self._legal([*shared, *overrides, f"training.steps={steps}"], ranks)
                if changed is not None and _draws_other_masks(changed):
                    self.refused["(another layout is another draw of dropout)"] += 1
                elif changed is not None:
                    legs.append(Leg(ranks, last, overrides))
                    break
            else:
                return None
        return Case(self.number, self.threshold, steps, text, shared, single, tuple(legs), self.refused)

    def _legal(self, overrides: Sequence[str], ranks: int) -> Config | None:
        try:
            return make_config([*overrides, "memory.disk_dir=."], ranks)
        except ConfigError as error:
            self.refused[str(error).split()[0]] += 1
            return None

    def _some(self, options: Mapping[str, tuple[float, Sequence[str]]]) -> Values:
        drawn = {key: (self.random.random(), self.random.choice(values)) for key, (_, values) in options.items()}
        return {key: value for key, (chance, value) in drawn.items() if chance < options[key][0]}

    def _model(self, forced: Values) -> tuple[str, Values]:
        """A preset, and what the model, its data and its training have besides."""
        pick, chance = self.random.choice, self.random.random
        family = forced.pop("family", "") or pick(("gpt", "gpt", "gpt", "bert"))
        experts = (forced.pop("experts", "") or pick(("yes", "yes", "no"))) == "yes"
        heads = pick(("2", "4"))
        values = {
            "model.num_layers": pick(("2", "4", "4")),
            "model.hidden_size": pick(("16", "24", "32")),
            "model.num_attention_heads": heads,
            "model.sequence_length": pick(("8", "16", "24", "48")),
            "training.precision": pick(("fp32",) * 6 + ("bf16", "fp16")),
            "training.seed": str(self.random.randint(1, 10**6)),
            **self._some(MODEL),
            **self._some(TRAINED),
        }
        if chance() < 0.4:
            values["model.num_query_groups"] = pick(("1", "2"))
        if family == "bert":
            values["model.sentence_head"] = pick(("none", "next_sentence", "sentence_order"))
            values["model.norm_position"] = pick(("pre", "post"))
        else:
            values["data.documents"] = pick(("joined", "separate"))
            if chance() < 0.2:
                values = {**values, **LATENT, **({"model.q_lora_rank": "16"} if chance() < 0.5 else {})}
                for key in (*NOT_LATENT, "model.num_query_groups"):
                    values.pop(key, None)
        if experts:
            values |= self._some(EXPERTS)
            if values.get("moe.layers", "").count(",") + 1 not in (1, int(values["model.num_layers"])):
                values.pop("moe.layers")
            sigmoid = chance() < 0.4 or "moe.expert_bias" in forced
            values["moe.router_score"] = "sigmoid" if sigmoid else "softmax"
            if sigmoid and chance() < 0.6:
                values["moe.expert_bias"] = "true"
            if values["moe.top_k"] == "1":
                values["moe.normalize_top_k"] = "false"
            if int(values["moe.num_experts"]) % 4 == 0 and chance() < 0.2:
                values |= {"moe.num_groups": "2", "moe.group_top_k": "1", "moe.group_score_top_k": "1"}
        return f"{family}_{'moe_tiny' if experts else 'tiny'}", {**values, **forced}

    def _draw_layout(self, config: Config, ranks: int, forced: Values) -> Values:
        """Draw the layout on some ranks, and the offload targets."""
        pick, chance = self.random.choice, self.random.random
        target, forced = forced.get("tier", ""), {key: value for key, value in forced.items() if "." in key}
        values: Values = {}
        left = ranks
        for name in self.random.sample(("tensor", "pipeline", "context"), 3):
            given = forced.get(f"parallel.{name}")
            size = int(given) if given else pick([1, *(n for n in range(1, left + 1) if left % n == 0)])
            values[f"parallel.{name}"], left = str(size), max(1, left // size)
        if values["parallel.tensor"] != "1" and (derived.is_moe(config) or chance() < 0.5):
            values["parallel.sequence"] = "true"
        if values["parallel.pipeline"] != "1" and chance() < 0.4:
            values["parallel.virtual_pipeline"] = "2"
        if values["parallel.context"] != "1" and chance() < 0.5:
            values["parallel.context_heads"] = pick(("1", "2", "4"))
        values |= self._some(LAYOUT_OPTIONS)
        values["training.recompute"] = pick(("none", "selective", "full"))
        if forced.get("training.recompute", values["training.recompute"]) == "full":
            if chance() < 0.4:
                values["training.activation_offload"] = pick(("auto", "0.1"))
            if chance() < 0.5 and values["parallel.pipeline"] == "1":
                values["training.pass_order"] = "by_layer"
        weights, state = "device", pick(STATES)[1]
        if derived.is_moe(config):
            weights, state = pick([each for each in TARGETS if not target or each[0] == target])
            values |= {**self._some(EXPERT_LAYOUT_OPTIONS), "moe.weights_device": weights}
            among = ranks // int(values["parallel.pipeline"])
            values["parallel.expert"] = str(pick([n for n in range(1, among + 1) if among % n == 0]))
            if values["parallel.tensor"] != "1" and chance() < 0.5:
                values["parallel.expert_tensor"] = pick(("1", values["parallel.tensor"]))
            if values["parallel.expert"] != "1" and chance() < 0.4:
                values |= self._some(PLACEMENT)
        values["optimizer.state_device"] = state
        if config.training.deterministic:
            values["optimizer.engine"] = pick(("device_stream", "host"))
        return {**values, **forced}


def _draws_other_masks(config: Config) -> bool:
    """Whether ranks drop by their own share of rows or heads (docs/decisions/dropout-seeds.md)."""
    parallel, model = config.parallel, config.model
    by_rows = model.hidden_dropout > 0 and (parallel.sequence or parallel.context > 1)
    return by_rows or (model.attention_dropout > 0 and parallel.tensor > 1)


def _overrides(values: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in values.items())
