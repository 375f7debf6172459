"""Mutated configs and damaged folders of tiny Hugging Face models, each opened by transformers and by us.

A case ends in one of two ways: we compute the logits that transformers computes from the same folder, or we refuse the
folder in one line that names the key or the tensor. Anything else is a `wrong` verdict. What transformers cannot load,
or fills with random weights, we must refuse.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models import convert
from models.huggingface.translate import FAMILIES
from models.weight_files.choice import INDEX_NAME, PICKLED_SINGLE_NAME, SINGLE_NAME
from tests.models.helpers import opened_logits, random_batch, relative_error
from tests.models.real_configs import COMPUTED_AS
from tests.tolerances import ORACLE_LOGITS

VOCAB_SIZE, LENGTH = 61, 9
COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
LLAMA = {**COMMON, **SIZES, "num_key_value_heads": 2, "rms_norm_eps": 1e-3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    **LLAMA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 0,
}
DEEPSEEK_V2 = {
    **{key: value for key, value in DEEPSEEK.items() if key != "num_nextn_predict_layers"},
    "num_experts_per_tok": 3,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 3.0,
}
GPT2 = {**COMMON, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "layer_norm_epsilon": 1e-3}
BERT = {**COMMON, **SIZES, "layer_norm_eps": 1e-3}
# Each family twice: the class that transformers makes, and its config.
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2_untied": (
        "GPT2LMHeadModel",
        {**GPT2, "n_inner": 20, "tie_word_embeddings": False, "activation_function": "gelu"},
    ),
    "llama": ("LlamaForCausalLM", {**LLAMA, "head_dim": 6, "rope_theta": 500.0}),
    "llama_tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_tied": (
        "MixtralForCausalLM",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 5}),
    "mistral_plain": ("MistralForCausalLM", {**LLAMA, "head_dim": 6, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2ForCausalLM",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 6}),
    "qwen3_tied": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 4, "tie_word_embeddings": True}),
    "phi3": ("Phi3ForCausalLM", {**LLAMA, "pad_token_id": 0}),
    "phi3_partial": (
        "Phi3ForCausalLM",
        {
            **LLAMA,
            "pad_token_id": 0,
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**LLAMA, **EXPERTS, "head_dim": 6, "moe_intermediate_size": 12, "mlp_only_layers": [1]},
    ),
    "qwen3_moe_normalized": (
        "Qwen3MoeForCausalLM",
        {**LLAMA, **EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "olmoe": ("OlmoeForCausalLM", {**LLAMA, **EXPERTS}),
    "olmoe_tied": ("OlmoeForCausalLM", {**LLAMA, **EXPERTS, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "deepseek_v3_plain": ("DeepseekV3ForCausalLM", {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "kimi_k2": ("DeepseekV3ForCausalLM", {**DEEPSEEK, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK_V2),
    "deepseek_v2_lite": (
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK_V2, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "bert": ("BertForPreTraining", BERT),
    "bert_untied": ("BertForPreTraining", {**BERT, "tie_word_embeddings": False}),
    "bert_masked_lm": ("BertForMaskedLM", BERT),
}


def family_of(base: str) -> str:
    """Return the family that a base's name begins with."""
    return max((family for family in FAMILIES if base.startswith(family)), key=len)


Config = dict[str, Any]
AS_PUBLISHED = "as published"
DROP = "(dropped)"  # a text, which stays itself when copied


@dataclass(frozen=True)
class Case:
    """`change` edits a copy of a base's folder. `names` stand in the line of a refusal, one of them at least; with
    `opens` there must be no refusal."""

    base: str
    kind: str
    what: str
    change: Callable[[Path], object]
    names: tuple[str, ...]
    opens: bool = False

    @property
    def family(self) -> str:
        return self.base.partition(":")[0] if ":" in self.base else family_of(self.base)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case: agrees, refused or wrong, with the reason."""

    word: str
    why: str


def make_bases(folder: Path, names: Sequence[str] = tuple(BASES)) -> None:
    """Write these bases to `folder`/NAME, and as several files to `folder`/NAME.parts."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in names:
        class_name, values = BASES[name]
        torch.manual_seed(0)
        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**values, architectures=[class_name]))
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.add_(0.1 * torch.randn_like(tensor))  # norms and biases too
        model.save_pretrained(folder / name)
        model.save_pretrained(folder / f"{name}.parts", max_shard_size="5KB")
        for path in (folder / name, folder / f"{name}.parts"):
            changed({"model_type": family_of(name)})(path)
        assert (folder / f"{name}.parts" / INDEX_NAME).is_file()


# ---------------------------------------------------------------------------------------------------------------------
# Configs
# ---------------------------------------------------------------------------------------------------------------------

OTHER_TYPES: tuple[Any, ...] = (
    None,
    True,
    "3",
    "",
    [],
    [1],
    {},
    {"a": 1},
    -1,
    0,
    1,
    1.5,
    -0.5,
    float("nan"),
    float("inf"),
)
FOREIGN: dict[str, tuple[Any, ...]] = {
    # Keys of other models, or that transformers' own code reads wherever they stand.
    "is_causal": (False, True),
    "partial_rotary_factor": (0.5, 1.0),
    "attention_chunk_size": (4,),
    "layer_types": (["full_attention", "full_attention"], ["sliding_attention", "full_attention"]),
    "sliding_window": (4, None),
    "use_sliding_window": (True, False),
    "rope_local_base_freq": (100.0,),
    "attn_logit_softcapping": (5.0,),
    "final_logit_softcapping": (5.0,),
    "logit_scale": (0.5,),
    "query_pre_attn_scalar": (4,),
    "embedding_multiplier": (2.0,),
    "residual_multiplier": (0.5,),
    "use_qk_norm": (True,),
    "qk_layernorm": (True,),
    "embedding_size": (8,),
    "layer_type": ("full_attention",),
    "per_layer_config": ({"0": {"intermediate_size": 8}},),
    "position_embedding_type": ("relative_key", "absolute"),
    "scale_attn_by_inverse_layer_idx": (True, False),
    "scale_attn_weights": (False,),
    "reorder_and_upcast_attn": (True,),
    "add_cross_attention": (True, False),
    "is_decoder": (True,),
    "is_encoder_decoder": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "clip_qkv": (0.05, None),
    "norm_topk_prob": (True, False),
    "router_jitter_noise": (0.5,),
    "decoder_sparse_step": (2,),
    "mlp_only_layers": ([0], []),
    "moe_layer_freq": (2, 1),
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "noaux_tc"),
    "rope_interleave": (False,),
    "routed_scaling_factor": (3.0,),
    "quantization_config": ({"quant_method": "fp8"}, {}, None),
    "quant_method": ("fp8",),
    "chunk_size_feed_forward": (3, 0),
    "pruned_heads": ({"0": [1]}, {}),
    "transformers_weights": ("other.safetensors",),
    "configuration_files": (["config.4.0.0.json"],),
    "pretraining_tp": (2,),
    "hidden_size": (16, 8),
    "num_experts": (4, 2),
    "num_local_experts": (4, 8),
    "num_hidden_layers": (2, 1),
    "head_dim": (4, 8),
    "qk_head_dim": (10, 4),
    "max_position_embeddings": (16, 8),
    "n_ctx": (16, 8),
    "tie_encoder_decoder": (True,),
    "output_attentions": (True,),
    "problem_type": ("regression",),
    "id2label": ({"0": "a", "1": "b"}, {"x": 1}),
    "use_cache": (False,),
    "temperature": (0.3,),
    "torch_dtype": ("float32", "bfloat16", "int8", 3),
    "max_window_layers": (1,),
    "output_router_logits": (True,),
    "num_mtp_layers": (1, 0),
    "summary_type": ("last",),
    "auto_map": ({"AutoModelForCausalLM": "modeling.Other"},),
    "colour": ("red",),
}
# Names that no family's table has: notes of tools, switches of models with code of their own, attributes of
# transformers' classes.
UNKNOWN = (
    *(
        "unsloth_version",
        "unsloth_fixed",
        "is_llama_config",
        "internal_version",
        "transformers.js_config",
        "seq_length",
    ),
    *("sequence_parallel_enabled", "move_model_to_device", "use_flash_attention", "moe_frequency", "full_attn_mod"),
    *("interpolate_factor", "model_max_length", "n_ctx_", "dim", "n_layers", "d_model", "num_layers", "multi_query"),
    *("rope_interleaved", "rotary_pct", "rotary_dim", "use_rope", "rope_dim", "rope_ratio", "position_embedding"),
    *("qkv_bias", "use_bias", "no_bias", "lm_head_bias", "use_qk_norm", "qk_layernorm", "norm_type", "use_rms_norm"),
    *("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts", "moe_layer_freq", "scoring_func"),
    *("embedding_multiplier", "logits_scaling", "scale_depth", "scale_emb", "mup", "parallel_residual", "alibi"),
    *("attention_sinks", "attn_windows", "sliding_window_size", "sliding_window_pattern", "no_rope_layers", "causal"),
    *("activation", "swiglu", "tie_lm_head", "use_bidirectional_attention", "lora_rank", "index_topk", "loss_type"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"),
    *("to_dict", "__class__", "__dict__", "attribute_map", "sub_configs", "base_model_tp_plan", "is_heterogeneous"),
    *("text_config", "vision_config", "decoder", "encoder", "generator", "hidden_sizes", "is_quantized", "tokenizer"),
    *("initializer_factor", "init_std", "classifier_dropout", "mask_token_id", "num_mtp_layers", "auto_map"),
    *("use_return_dict", "name", "label", "version", "bits", "output_size", "a key", "\n", "", "0", "nan"),
    *("mtp_layer_types", "mlp_layer_types", "model_debug", "trust_remote_code", "revision", "token", "return_unused"),
)
TEXTS: dict[str, tuple[str, ...]] = {
    "hidden_act": ("gelu", "relu", "silu", "swish", "gelu_new", "quick_gelu"),
    "activation_function": ("gelu", "relu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "model_type": (*FAMILIES, "mamba"),
}


def _write_config(path: Path, edit: Callable[[Config], object]) -> None:
    config = json.loads((path / "config.json").read_text())
    edit(config)
    (path / "config.json").write_text(json.dumps(config))


def changed(changes: dict[str, Any]) -> Callable[[Path], object]:
    def edit(config: Config) -> None:
        for key, value in changes.items():
            config[key] = copy.deepcopy(value)
            if value is DROP:
                del config[key]

    return lambda path: _write_config(path, edit)


def _legal(key: str, value: Any, generator: random.Random) -> Any:
    """Return another value of the same type."""
    if key in TEXTS:
        return generator.choice([text for text in TEXTS[key] if text != value])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = (value + 1, value - 1, 2 * value, value // 2, value // 4, 4 * value, 1, 2, 3)
        return generator.choice([other for other in near if other != value])
    if isinstance(value, float):
        return generator.choice([2 * value, value / 10, value + 0.125, 0.0, 1.0, 100.0])
    if value is None:
        return generator.choice([1, 2, 4, 8, 0.5, True, "absolute"])
    if isinstance(value, list):
        return generator.choice(
            [[], [0], [1], [0, 1], [5], ["LlamaModel"], ["BertForMaskedLM"], ["BertForPreTraining"], ["BertModel"]]
        )
    return {}


def _rope(config: Config, generator: random.Random) -> dict[str, Any]:
    """Another way to write rotary positions: the same, another base, other positions, or a contradiction."""
    theta = generator.choice([500.0, 10000.0, 10000, 1e6, 123.0])
    plain: dict[str, Any] = generator.choice(
        [{"rope_type": "default"}, {"type": "default"}, dict.fromkeys(("rope_type", "type"), "default"), {}]
    )
    scaled: dict[str, Any] = generator.choice(
        [
            {"rope_type": "linear", "factor": 2.0},
            {"type": "linear", "factor": 2.0},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
            {
                "type": "yarn",
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8,
            },
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            {"rope_type": "yarn", "factor": 4, "mscale": 0.5, "mscale_all_dim": 1},
            {"rope_type": "yarn", "factor": 4.0, "mscale": 0, "mscale_all_dim": 0.7, "beta_fast": None},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "truncate": False,
                "beta_fast": 2,
                "beta_slow": 0.5,
                "finetuned": True,
            },
            {"rope_type": "yarn", "factor": 4.0, "truncate": None},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": generator.choice([None, 1, 0.5, 0, -1.0, True])},
            {"rope_type": "yarn", "factor": generator.choice([None, 1, 0.5, "4", True])},
            {"rope_type": "yarn", "type": "linear", "factor": 4.0},
            {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 8},
            {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0},
            {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [3.0, 4], "factor": 4.0},
            {"type": "longrope", "short_factor": [1, 1.5, 2.0], "long_factor": [3.0, 4.0, 5.0]},
            {"type": "su", "short_factor": [1.0, 1.5], "long_factor": [3.0, 4.0]},
            {"type": "mrope", "mrope_section": [1, 1]},
            {"factor": 2.0},
            {"rope_type": "default", "factor": 2.0},
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            {"full_attention": {"rope_type": "default", "rope_theta": 77.0}},
            {"rope_type": None},
            {"rope_theta": None},
            {"rope_theta": "500"},
            {"rope_theta": -1.0},
        ]
    )
    other = generator.choice([500.0, 10000.0, 1e6])
    return generator.choice(
        [
            {"rope_parameters": DROP},
            {"rope_parameters": None},
            {"rope_parameters": {}},
            {"rope_parameters": DROP, "rope_theta": theta},
            {"rope_parameters": DROP, "rope_theta": theta, "rope_scaling": None},
            {"rope_parameters": DROP, "rope_theta": theta, "rope_scaling": plain},
            {"rope_parameters": DROP, "rope_theta": theta, "rope_scaling": scaled},
            {"rope_parameters": DROP, "rope_scaling": {**plain, "rope_theta": theta}},
            {"rope_parameters": DROP, "rope_theta": other, "rope_scaling": {**plain, "rope_theta": theta}},
            {"rope_parameters": {**plain, "rope_theta": theta}},
            {"rope_parameters": {**scaled, "rope_theta": theta}},
            {"rope_parameters": scaled},
            {"rope_parameters": {**plain, "rope_theta": theta}, "rope_theta": other},
            {"rope_parameters": {**plain, "rope_theta": theta}, "rope_scaling": plain},
            {"rope_parameters": {**plain, "rope_theta": theta}, "rope_scaling": scaled},
            {"rope_parameters": {**plain, "rope_theta": theta}, "rope_scaling": {**plain, "rope_theta": other}},
            {"rope_parameters": plain, "rope_scaling": plain, "rope_theta": theta},
            {"rope_theta": other, "original_max_position_embeddings": 8},
            {"rope_parameters": DROP, "rope_scaling": scaled, "original_max_position_embeddings": 6},
            {"rope_parameters": {**scaled, "rope_theta": theta}, "rope_scaling": scaled, "rope_theta": theta},
            {"rope_theta": other},
            {"rope_theta": 0},
            {"rope_theta": None},
            {"rope_scaling": scaled},
            {"rope_scaling": "linear"},
            {"rope_parameters": "default"},
        ]
    )


def _config_change(kind: str, base: Config, generator: random.Random) -> dict[str, Any]:
    keys = sorted(base)
    if kind == "dropped":
        return {generator.choice(keys): DROP}
    if kind == "other value":
        key = generator.choice(keys)
        return {key: _legal(key, base[key], generator)}
    if kind == "other type":
        return {generator.choice(keys): generator.choice(OTHER_TYPES)}
    if kind == "foreign key":
        key = generator.choice(sorted(FOREIGN))
        return {key: generator.choice(FOREIGN[key])}
    if kind == "unknown key":
        likely = ("silu", "softmax", "rope", "rmsnorm", "eager", ["full_attention"] * 2, {"AutoConfig": "a.B"}, 8, 0.0)
        return {generator.choice(UNKNOWN): generator.choice((*OTHER_TYPES, *likely, False, False, 1.0))}
    if kind == "rotary" and base.keys() & {"rope_parameters", "rope_theta", "rope_scaling"}:
        return _rope(base, generator)
    if kind == "rotary":  # families without: what they call their sizes
        key = generator.choice(
            [
                "n_embd",
                "n_layer",
                "hidden_size",
                "num_attention_heads",
                "n_inner",
                "intermediate_size",
                "tie_word_embeddings",
            ]
        )
        return {key: generator.choice([16, 8, 24, None, True, False])}
    changes: dict[str, Any] = {}
    while len(changes) < 2:
        changes |= _config_change(generator.choice(CONFIG_KINDS[:-1]), base, generator)
    return changes


CONFIG_KINDS = ("dropped", "other value", "other type", "foreign key", "unknown key", "rotary", "two at once")


def config_cases(folder: Path, number: int, seed: int, bases: Sequence[str] = tuple(BASES)) -> Iterator[Case]:
    """Cases with a changed config.json, all families and kinds in turn."""
    generator = random.Random(seed)
    for i in range(number):
        base, kind = bases[i % len(bases)], CONFIG_KINDS[i // len(bases) % len(CONFIG_KINDS)]
        changes = _config_change(kind, json.loads((folder / base / "config.json").read_text()), generator)

        what = ", ".join(
            f"no {key}" if value is DROP else f"{key}={json.dumps(value)}" for key, value in changes.items()
        )
        # Another family may miss any key.
        more = ("config.json",) if "model_type" in changes else ()
        yield Case(base, kind, what, changed(changes), (*changes, "tensor", *more))


# ---------------------------------------------------------------------------------------------------------------------
# Damaged folders
# ---------------------------------------------------------------------------------------------------------------------


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / SINGLE_NAME)
    edit(tensors)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path / SINGLE_NAME, {"format": "pt"}
    )


def _tensor_damages(
    generator: random.Random, names: list[str], shapes: dict[str, torch.Size]
) -> list[tuple[str, Any, tuple[str, ...]]]:
    name = generator.choice(names)
    layer = generator.choice([other for other in names if re.search(r"\.\d+\.", other)])
    alike = [other for other in names if other != name and shapes[other] == shapes[name]]
    other = generator.choice(alike or [other for other in names if other != name])
    dtype = generator.choice(
        [torch.float64, torch.int32, torch.float16, torch.bfloat16, torch.bool, torch.int8, torch.float8_e4m3fn]
    )
    half = generator.choice([torch.float16, torch.bfloat16])

    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors[name]
        layouts = [
            tensor[..., :-1],
            tensor[None],
            torch.cat([tensor, tensor[:1]]),
            tensor.flatten()[0],
            tensor[:0],
            torch.cat([tensor] * 2, -1),
        ]
        layouts += [tensor.t()] if tensor.dim() == 2 else []
        tensors[name] = generator.choice(layouts)

    def resplit(tensors: dict[str, torch.Tensor]) -> None:
        # Gate and up of unequal widths, with the same sum.
        twins = {"gate_proj": "up_proj", "w1": "w3", "query": "key", "q_proj": "k_proj", "fc": "fc"}
        pairs = [
            (key, key.replace(one, other))
            for key in sorted(tensors)
            for one, other in twins.items()
            if key.endswith(f"{one}.weight") and key.replace(one, other) in tensors
        ]
        gate, up = generator.choice(pairs or [(name, name)])
        tensors[gate], tensors[up] = torch.cat([tensors[gate], tensors[up][:2]]), tensors[up][2:]

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name], tensors[other] = tensors[other], tensors[name]

    def twin(tensors: dict[str, torch.Tensor]) -> None:
        head = "cls.predictions.decoder.weight" if "cls.predictions.bias" in tensors else "lm_head.weight"
        embedding = next(
            value for key, value in tensors.items() if re.search(r"(wte|embed_tokens|word_embeddings)\.weight", key)
        )
        tensors[head] = embedding if generator.random() < 0.5 else embedding + 0.5

    prefix = name.split(".")[0] + "."
    return [
        ("shape", reshape, ("tensor",)),
        ("unequal parts", resplit, ("tensor",)),
        (f"type {dtype}", lambda tensors: tensors.update({name: tensors[name].to(dtype)}), ("tensor",)),
        (
            f"all {half}",
            lambda tensors: tensors.update({key: tensor.to(half) for key, tensor in tensors.items()}),
            ("dtype",),
        ),
        ("missing", lambda tensors: tensors.pop(name), ("tensor",)),
        ("missing in a layer", lambda tensors: tensors.pop(layer), ("tensor",)),
        ("extra", lambda tensors: tensors.update({f"{name}_scale": torch.ones(1)}), ("tensor",)),
        (
            "extra layer",
            lambda tensors: tensors.update({re.sub(r"\.\d+\.", ".7.", layer, count=1): torch.ones(2)}),
            ("tensor",),
        ),
        ("extra bias", lambda tensors: tensors.update({layer.replace("weight", "bias2"): torch.ones(2)}), ("tensor",)),
        ("swapped", swap, ("tensor",)),
        ("renamed", lambda tensors: tensors.update({f"{name}s": tensors.pop(name)}), ("tensor",)),
        ("second head", twin, ("tensor",)),
        (
            "no prefix",
            lambda tensors: [tensors.update({key.removeprefix(prefix): tensors.pop(key)}) for key in list(tensors)],
            ("tensor",),
        ),
        (
            "twice by prefix",
            lambda tensors: tensors.update({name.removeprefix(prefix): tensors[name] + 1}),
            ("tensor",),
        ),
        (
            "old mask",
            lambda tensors: tensors.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}),
            ("tensor",),
        ),
    ]


def _text(name: str, text: bytes) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(text)


def _file_damages(
    generator: random.Random, in_files: bool
) -> list[tuple[str, Callable[[Path], object], tuple[str, ...]]]:
    def chosen_file(path: Path) -> Path:
        return generator.choice(sorted(path.glob("*.safetensors")))

    def cut(path: Path) -> None:
        file = chosen_file(path)
        content = file.read_bytes()
        file.write_bytes(content[: generator.randrange(len(content))])

    def longer(path: Path) -> None:
        file = chosen_file(path)
        file.write_bytes(file.read_bytes() + b"\0" * 8)

    def garbage(path: Path) -> None:
        file = chosen_file(path)
        content = bytearray(file.read_bytes())
        for _ in range(20):
            content[generator.randrange(200)] = generator.randrange(256)
        file.write_bytes(bytes(content))

    def as_folder(name: str) -> Callable[[Path], object]:
        def damage(path: Path) -> None:
            (path / name).unlink(missing_ok=True)
            (path / name).mkdir()

        return damage

    weights = INDEX_NAME if in_files else SINGLE_NAME
    damages: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
        ("cut", cut, (".safetensors",)),
        ("longer", longer, (".safetensors",)),
        ("garbage in the header", garbage, (".safetensors",)),
        ("empty", lambda path: chosen_file(path).write_bytes(b""), (".safetensors",)),
        ("missing", lambda path: chosen_file(path).unlink(), (".safetensors",)),
        ("a folder", as_folder(weights), (weights,)),
        ("config a folder", as_folder("config.json"), ("config.json",)),
        ("config missing", lambda path: (path / "config.json").unlink(), ("config.json",)),
        (
            "config cut",
            lambda path: (path / "config.json").write_text((path / "config.json").read_text()[:-9]),
            ("config.json",),
        ),
        ("config a list", _text("config.json", b"[]"), ("config.json",)),
        ("config of bytes", _text("config.json", b"\xfe\xff\x00{"), ("config.json",)),
    ]

    def index(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
        def damage(path: Path) -> None:
            content = json.loads((path / INDEX_NAME).read_text())
            edit(content)
            (path / INDEX_NAME).write_text(json.dumps(content))

        return damage

    def name_of(content: dict[str, Any]) -> str:
        return generator.choice(sorted(content["weight_map"]))

    def shift(content: dict[str, Any]) -> None:
        others = sorted(set(content["weight_map"].values()))
        content["weight_map"][name_of(content)] = generator.choice(others)

    if in_files:
        damages += [
            (
                "index cut",
                lambda path: (path / INDEX_NAME).write_text((path / INDEX_NAME).read_text()[:-9]),
                (INDEX_NAME,),
            ),
            ("index a list", _text(INDEX_NAME, b"[3]"), (INDEX_NAME,)),
            ("index without a map", index(lambda content: content.pop("weight_map")), (INDEX_NAME,)),
            (
                "index of a number",
                index(lambda content: content["weight_map"].update({name_of(content): 3})),
                (INDEX_NAME,),
            ),
            (
                "index elsewhere",
                index(lambda content: content["weight_map"].update({name_of(content): "../x.safetensors"})),
                (INDEX_NAME,),
            ),
            (
                "index of a missing part",
                index(lambda content: content["weight_map"].update({name_of(content): "y.safetensors"})),
                (INDEX_NAME, "y.safe"),
            ),
            ("index of another part", index(shift), (INDEX_NAME,)),
            ("index lacks a tensor", index(lambda content: content["weight_map"].pop(name_of(content))), (INDEX_NAME,)),
            (
                "a single file too",
                lambda path: save_file(load_file(chosen_file(path)), path / SINGLE_NAME, {"format": "pt"}),
                (SINGLE_NAME,),
            ),
        ]
    return damages


def damage_cases(folder: Path, number: int, seed: int, bases: Sequence[str] = tuple(BASES)) -> Iterator[Case]:
    """Yield cases with damaged files, all families in turn: tensors, a single file, one of several files."""
    generator = random.Random(seed)
    for i in range(number):
        base, kind = bases[i % len(bases)], ("tensors", "tensors", "file", "parts")[i // len(bases) % 4]
        if kind == "tensors":
            held = load_file(folder / base / SINGLE_NAME)
            what, edit, names = generator.choice(
                _tensor_damages(generator, sorted(held), {name: t.shape for name, t in held.items()})
            )

            def change(path: Path, edit: Any = edit) -> None:
                edit_tensors(path, edit)

            yield Case(base, kind, what, change, names)
        else:
            what, damage, names = generator.choice(_file_damages(generator, kind == "parts"))
            yield Case(base + (".parts" if kind == "parts" else ""), kind, what, damage, names)


def as_pickled(path: Path, zipped: bool) -> None:
    """Move a folder's tensors to a file of torch.save, of today or of before torch 1.6."""
    torch.save(load_file(path / SINGLE_NAME), path / PICKLED_SINGLE_NAME, _use_new_zipfile_serialization=zipped)
    (path / SINGLE_NAME).unlink()


def same_meaning_cases() -> Iterator[Case]:
    """Yield other spellings of the base's content, which must open."""

    def case(base: str, what: str, changes: dict[str, Any]) -> Case:
        return Case(
            base,
            "same meaning",
            what,
            changed(changes),
            (),
            opens=True,
        )

    old = {"rope_parameters": DROP, "dtype": DROP, "torch_dtype": "float32", "rope_scaling": None}
    for base in BASES:
        yield case(base, "no dtype", {"dtype": DROP, "transformers_version": DROP})
        yield case(
            base,
            "notes",
            {
                "_name_or_path": "here",
                "use_cache": False,
                "max_length": 20,
                "id2label": {"0": "a"},
                "label2id": {"a": 0},
            },
        )
        if base.startswith(("gpt2", "bert")):
            continue
        theta = {"llama": 500.0, "mixtral": 1e6, "mixtral_tied": 1e6, "phi3_partial": 500.0}.get(base, 10000.0)
        share = {"partial_rotary_factor": 0.5} if base == "phi3_partial" else {}
        yield case(base, "as transformers 4 writes it", {**old, "rope_theta": theta, **share})
        if base not in ("llama", "phi3_partial"):
            yield case(base, "the family's own rotary base", {**old, "rope_scaling": DROP})
        yield case(
            base,
            "rotary base twice",
            {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta, **share}},
        )
    yield case("gpt2", "n_ctx", {"n_ctx": 16, "torch_dtype": "float32", "dtype": DROP})
    yield case(
        "bert",
        "as the first folders",
        {"position_embedding_type": "absolute", "directionality": "bidi", "gradient_checkpointing": False},
    )
    yield case("olmoe", "num_local_experts", {"num_experts": DROP, "num_local_experts": 4})
    yield case("bert", "masked words only", {"architectures": ["BertForMaskedLM"]})
    yield case("bert", "an encoder", {"architectures": ["BertModel"]})
    yield case("bert_masked_lm", "another head", {"architectures": ["BertForSequenceClassification"]})
    for base, zipped in (("bert", True), ("mixtral_tied", True), ("gpt2", False)):
        yield Case(
            base, "same meaning", "torch.save's file", functools.partial(as_pickled, zipped=zipped), (), opens=True
        )
    for base in ("bert_untied", "gpt2"):
        yield case(base, "by its tensors", {"architectures": DROP, "model_type": DROP})
    for base in ("olmoe", "deepseek_v3", "llama_tied"):
        yield case(base, "by its class", {"model_type": DROP})


def start_cases(starts: Sequence[str]) -> Iterator[Case]:
    """Published configs as they are, but for their sizes."""
    for base in starts:
        yield Case(base, AS_PUBLISHED, "but for its sizes", lambda path: None, ("config.json", "tensor"))


# ---------------------------------------------------------------------------------------------------------------------
# Both on the same folder
# ---------------------------------------------------------------------------------------------------------------------


class Grader:
    """Opens cases with transformers and with us, in this process, which must have no process group: each opening makes
    its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batch = random_batch(VOCAB_SIZE, 2, LENGTH)

    def verdict(self, case: Case) -> Verdict:
        """Return the verdict on a case."""
        path = self.folder / "case"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.folder / case.base, path)
        case.change(path)
        words, target = io.StringIO(), self.folder / "imported"
        shutil.rmtree(target, ignore_errors=True)
        try:
            with contextlib.redirect_stderr(words), contextlib.redirect_stdout(io.StringIO()):
                status = convert.main(["import", str(path), str(target)])
        except BaseException as error:  # also what argparse would raise
            return Verdict("wrong", f"import raises {type(error).__name__}: {error}")
        line = words.getvalue().strip()
        try:
            ours = opened_logits(path, self.batch)
        except ValueError as error:
            if status == 0:
                return Verdict("wrong", f"imported, but opening it says: {error}")
            if status != 2 or target.exists():
                return Verdict(
                    "wrong",
                    f"refused, but status {status}, and {target} is {'there' if target.exists() else 'not there'}",
                )
            for said in (line, str(error)):
                if case.opens or "\n" in said or not any(name in said for name in case.names):
                    return Verdict("wrong", f"refused: {said}")
            return Verdict("refused", line)
        except Exception as error:
            return Verdict("wrong", f"opening raises {type(error).__name__}: {error}")
        if status != 0:
            return Verdict("wrong", f"opened, but import says: {line}")
        try:
            theirs = self._theirs(path, self._class_of(case.base))
        except Exception as error:
            return Verdict(
                "wrong", f"opened, but transformers says {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            )
        if isinstance(theirs, str):
            return Verdict("wrong", f"opened, but in transformers {theirs}")
        distance = relative_error(ours, theirs) if ours.shape == theirs.shape else float("inf")
        return Verdict("agrees" if distance < ORACLE_LOGITS else "wrong", f"logits differ by {distance:.1e}")

    def _class_of(self, base: str) -> str:
        """Return the class of transformers that a base was saved as; a published config names it."""
        if base.removesuffix(".parts") in BASES:
            return BASES[base.removesuffix(".parts")][0]
        return str(json.loads((self.folder / base / "config.json").read_text())["architectures"][0])

    def _theirs(self, path: Path, saved_as: str) -> torch.Tensor | str:
        """Logits, or what of them is not from the folder, which was saved as a model of this class."""
        import transformers

        config = json.loads((path / "config.json").read_text())
        if config.get("model_type") in COMPUTED_AS:
            changed({"model_type": COMPUTED_AS[config["model_type"]]})(path)
        is_bert, said = saved_as.startswith("Bert"), (config.get("architectures") or [saved_as])[0]
        name = "AutoModelForCausalLM"
        if is_bert and said in ("BertForPreTraining", "BertForMaskedLM"):
            name = said
        elif is_bert or config.get("model_type") is None:  # programs that read such a folder are given the class
            name = saved_as
            known = getattr(transformers, saved_as).config_class.model_type
            (path / "config.json").write_text(json.dumps({**config, "model_type": known}))
        with warnings.catch_warnings(), torch.inference_mode(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            loaded = getattr(transformers, name).from_pretrained(path, dtype=torch.float32, output_loading_info=True)
            model, report = loaded[0].eval(), loaded[1]
            # No computation uses the second name of an untied BERT's output bias.
            missing = {key for key in report["missing_keys"] if key != "cls.predictions.bias"}
            if missing or report["mismatched_keys"]:
                return f"weights are random: {sorted(missing) or report['mismatched_keys']}"
            inputs = {"input_ids": self.batch["tokens"]}
            if is_bert:
                inputs |= {"token_type_ids": self.batch["types"], "attention_mask": self.batch["padding_mask"].long()}
            output = model(**inputs)
            return output.prediction_logits if "prediction_logits" in output else output.logits


def graded(folder: Path, cases: Iterator[Case]) -> Iterator[tuple[Case, Verdict]]:
    """Yield each case with its verdict."""
    grader = Grader(folder)
    for case in cases:
        yield case, grader.verdict(case)
