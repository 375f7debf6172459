"""A config.json has one meaning, whatever is installed: values that a family's table does not allow are refused, and
transformers agrees on the others."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from base.errors import ConfigError
from configs.weights import config_from
from models import convert
from models.huggingface import translate
from models.huggingface.families.keys import REQUIRED, read_keys, show
from models.huggingface.translate import FAMILIES
from tests.models import mutations
from tests.models.mutations import (
    BASES,
    Case,
    config_cases,
    damage_cases,
    graded,
    make_bases,
    same_meaning_cases,
    start_cases,
)
from tests.models.real_configs import PUBLISHED, make_starts, scaled

# Defaults of transformers' classes that differ from its table, and why.
OTHER_DEFAULTS = {
    # transformers 4 has no such key; without it a folder holds no further layers
    *((family, "num_nextn_predict_layers") for family in ("deepseek_v3", "kimi_k2")),
    # the class turns its 4096 into null unless use_sliding_window is true
    *((family, "sliding_window") for family in ("qwen2", "qwen3", "qwen3_moe")),
}


def _config(base: str, **changes: Any) -> dict[str, Any]:
    """The config.json that transformers writes for a base, with keys changed; "(dropped)" drops one."""
    import transformers

    class_name, values = BASES[base]
    config = (
        getattr(transformers, class_name)
        .config_class(**values, architectures=[class_name], id2label={"0": "a"})
        .to_dict()
    )
    config["id2label"] = None
    config["model_type"] = mutations.family_of(base)
    return {key: value for key, value in {**config, **changes}.items() if value is not mutations.DROP}


def _read(config: dict[str, Any]) -> dict[str, Any]:
    return translate.read_config(config)[2]["model"]


@pytest.mark.parametrize("base", BASES)
def test_what_transformers_writes_is_in_the_table(base: str) -> None:
    config = _config(base)
    assert translate.read_config(config)[0].model_type == config["model_type"]


@pytest.mark.parametrize("base", FAMILIES)
def test_absent_keys_mean_what_transformers_means(base: str) -> None:
    import transformers

    config_class = getattr(transformers, BASES[base][0]).config_class
    plain = config_class()
    fields = {field.name for field in dataclasses.fields(config_class)}
    table = FAMILIES[base].keys
    spellings = {spelling for key, row in table.items() for spelling in (key, *row.also)}
    assert not (fields - spellings), "keys of the class that the table lacks"
    for key, row in table.items():
        name = next((spelling for spelling in (key, *row.also) if spelling in fields), None)
        compared = (
            name is not None
            and row.default is not REQUIRED
            and row.default is not None
            and (base, key) not in OTHER_DEFAULTS
        )
        if compared:
            assert name is not None
            assert getattr(plain, name) == row.default, key
    if "rope_theta" in table:
        absent = dict.fromkeys(("rope_theta", "rope_parameters", "rope_scaling"), mutations.DROP)
        assert _read(_config(base, **absent))["rotary_base"] == plain.rope_parameters["rope_theta"]


def _only(scaling: dict[str, Any]) -> dict[str, Any]:
    """Scaled positions as transformers 4 writes them."""
    return {"rope_parameters": mutations.DROP, "rope_theta": 500.0, "rope_scaling": scaling}


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "unknown_and_read": ("llama", {"attention_chunk_size": 4}, ("attention_chunk_size (4)", "llama")),
    "not_causal": ("llama", {"is_causal": False}, ("is_causal (false)", "true")),
    "two_scalings": (
        "llama",
        {"rope_scaling": {"rope_type": "default", "rope_theta": 7.0}},
        ("rope_parameters", "rope_scaling", "agree"),
    ),
    "scaled_beside_plain": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        ("rope_parameters ({", "rope_scaling ({", "linear", "agree"),
    ),
    "scaled_without_a_type": ("llama", {"rope_scaling": {"factor": 2.0}}, ("rope_scaling.factor (2.0)",)),
    "scaled_by_length": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 40}},
        ("rope_parameters.rope_type (dynamic)", "default, linear, llama3, yarn, longrope"),
    ),
    "scaled_in_sections": ("llama", _only({"type": "mrope", "mrope_section": [2, 1]}), ("rope_scaling.type (mrope)",)),
    "scaled_by_nothing": ("llama", _only({"type": "llama3", "factor": 8}), ("low_freq_factor, high_freq_factor",)),
    "scaled_by_a_half": ("llama", _only({"type": "linear", "factor": 0.5}), ("rope_scaling.factor (0.5)", "least 1")),
    "scaled_by_true": ("llama", _only({"type": "yarn", "factor": True}), ("rope_scaling.factor (true)", "number")),
    "scaled_twice": (
        "llama",
        _only({"type": "linear", "rope_type": "yarn", "factor": 2}),
        ("rope_scaling.type (linear)", "rope_type (yarn)"),
    ),
    "scaled_for_another": (
        "llama",
        _only({"type": "linear", "factor": 2.0, "mscale": 1.0, "colour": "red"}),
        ("rope_scaling.mscale (1.0)", "rope_scaling.colour (red)", "linear positions have factor"),
    ),
    "truncate_null": (
        "llama",
        _only({"type": "yarn", "factor": 2.0, "truncate": None}),
        ("rope_scaling.truncate (null)",),
    ),
    "scaled_partly": (
        "llama",
        _only({"type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}),
        ("rope_scaling.partial_rotary_factor (0.5)",),
    ),
    "two_first_lengths": (
        "llama",
        {
            **_only({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}),
            "original_max_position_embeddings": 9,
        },
        ("rope_scaling.original_max_position_embeddings (8)", "original_max_position_embeddings (9)", "agree"),
    ),
    "too_few_factors": (
        "llama",
        _only({"type": "longrope", "factor": 2.0, "short_factor": [], "long_factor": [1.0]}),
        ("rope_scaling.short_factor ([])", "list of numbers"),
    ),
    "two_bases": ("llama", {"rope_theta": 7.0}, ("rope_parameters.rope_theta (500.0)", "rope_theta (7.0)", "agree")),
    "base_zero": ("llama", {"rope_parameters": {"rope_theta": 0}}, ("rope_parameters.rope_theta (0)", "above 0")),
    "windows_before_others": (
        "qwen2_window",
        {"layer_types": ["sliding_attention", "full_attention"]},
        ("layer_types", "full_attention layer after a sliding_attention layer"),
    ),
    "windows_of_no_size": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
        ("layer_types", "unless use_sliding_window"),
    ),
    "too_few_kinds_of_layers": ("qwen3", {"layer_types": ["full_attention"]}, ("layer_types", "num_hidden_layers (2)")),
    "other_kinds_of_layers": ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, ("layer_types",)),
    "biases_of_attention_alone": ("llama", {"attention_bias": True}, ("mlp_bias (false)", "attention_bias (true)")),
    "biases_of_qwen3": ("qwen3", {"attention_bias": True}, ("attention_bias (true)",)),
    "rotates_an_odd_share": ("phi3", {"partial_rotary_factor": 0.75, "rope_parameters": None}, ("0.75", "even")),
    "two_shares": ("phi3_partial", {"partial_rotary_factor": 1.0}, ("partial_rotary_factor (1.0)", "0.5")),
    "normalized": ("deepseek_v2", {"norm_topk_prob": True}, ("norm_topk_prob (true)", "false")),
    "other_routing": ("deepseek_v2", {"topk_method": "noaux_tc"}, ("topk_method (noaux_tc)",)),
    "limited_to_unsaid_groups": ("deepseek_v2", {"n_group": None}, ("n_group (null)", "group_limited_greedy")),
    "more_than_groups_hold": (
        "deepseek_v2",
        {"num_experts_per_tok": 5},
        ("num_experts_per_tok (5)", "must not exceed 4, the number of experts in"),
    ),
    "pairs_behind_an_odd_number": ("deepseek_v2", {"qk_nope_head_dim": 5}, ("qk_nope_head_dim (5)", "even")),
    "kimi_states_its_groups": ("kimi_k2", {"n_group": mutations.DROP}, ("kimi_k2", "'n_group'")),
    "two_numbers_of_experts": (
        "olmoe",
        {"num_local_experts": 8},
        ("num_experts (4)", "num_local_experts (8)", "must be equal"),
    ),
    "too_many_of_few": ("olmoe", {"num_experts_per_tok": 5}, ("num_experts_per_tok (5)", "4")),
    "clipped": ("olmoe", {"clip_qkv": 8.0}, ("clip_qkv (8.0)", "null")),
    "heads_of_another_size": ("olmoe", {"head_dim": 8}, ("head_dim (8)",)),
    "odd_heads": ("llama", {"head_dim": 5}, ("head_dim (5)", "even")),
    "half_as_many_dropouts": ("gpt2", {"embd_pdrop": 0.5}, ("embd_pdrop (0.5)", "resid_pdrop")),
    "scaled_by_layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx (true)",)),
    "one_is_not_true": ("gpt2", {"scale_attn_weights": 1}, ("scale_attn_weights (1)", "true")),
    "relative_positions": (
        "bert",
        {"position_embedding_type": "relative_key"},
        ("position_embedding_type (relative_key)",),
    ),
    "decoder": ("bert", {"is_decoder": True}, ("is_decoder (true)",)),
    "other_head": ("bert", {"architectures": ["BertModel"]}, ("architectures (BertModel)",)),
    "padding_outside": ("bert", {"pad_token_id": 61}, ("pad_token_id (61)", "61")),
    "groups_by_default": ("deepseek_v3", {"n_group": mutations.DROP, "topk_group": mutations.DROP}, ("n_group (8)",)),
    "not_normalized": ("deepseek_v3", {"norm_topk_prob": False}, ("norm_topk_prob (false)",)),
    "not_interleaved": ("deepseek_v3", {"rope_interleave": None}, ("rope_interleave (null)",)),
    "latent_groups": ("deepseek_v3", {"num_key_value_heads": 2}, ("num_key_value_heads (2)",)),
    "layers_a_text": ("llama", {"num_hidden_layers": "2"}, ('num_hidden_layers ("2")', "whole number")),
    "layers_true": ("llama", {"num_hidden_layers": True}, ("num_hidden_layers (true)",)),
    "layers_many": ("qwen3_moe", {"num_hidden_layers": 10**18}, ("num_hidden_layers (1000000000000000000)",)),
    "width_negative": ("llama", {"intermediate_size": -24}, ("intermediate_size (-24)",)),
    "code_null": ("llama", {"auto_map": None}, ("auto_map (null)", "names of classes")),
    "kv_heads_null": ("mixtral", {"num_key_value_heads": None}, ("num_key_value_heads (null)",)),
    "labels_null": ("bert", {"num_labels": None}, ("num_labels (null)",)),
    "epsilon_nan": ("llama", {"rms_norm_eps": float("nan")}, ("rms_norm_eps (NaN)",)),
    "epsilon_zero": ("bert", {"layer_norm_eps": 0.0}, ("layer_norm_eps (0.0)",)),
    "tied_null": ("gpt2", {"tie_word_embeddings": None}, ("tie_word_embeddings (null)", "true or false")),
    "end_a_text": ("gpt2", {"eos_token_id": "</s>"}, ('eos_token_id ("</s>")',)),
    "required": ("llama", {"intermediate_size": mutations.DROP}, ("'intermediate_size'",)),
    "two_types": (
        "llama",
        {"dtype": "float32", "torch_dtype": "bfloat16"},
        ("dtype (float32)", "torch_dtype (bfloat16)"),
    ),
    "quantized": ("llama", {"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_table_does_not_hold_is_refused(name: str) -> None:
    base, changes, says = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        translate.read_config(_config(base, **changes))
    assert all(projection in str(error.value) for projection in says), error.value
    assert "\n" not in str(error.value)


def test_every_key_refuses_values_of_another_kind() -> None:
    for family in FAMILIES.values():
        base = _config(family.model_type)
        for key, row in family.keys.items():
            for value in mutations.OTHER_TYPES:
                fits = row.kind.fits(value) and (
                    not row.only or any(show(value) == show(allowed) for allowed in row.only)
                )
                if fits or key == "model_type":
                    continue
                config = {other: held for other, held in base.items() if other not in row.also}
                with pytest.raises(ConfigError, match=key):
                    read_keys({**config, key: value}, family.model_type, family.keys)


def test_old_and_new_spellings_are_one_model() -> None:
    new = _read(_config("mixtral"))
    for change in (
        {"rope_parameters": mutations.DROP},  # Mixtral's own base
        {"rope_parameters": mutations.DROP, "rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": None, "rope_scaling": {"type": "default"}, "rope_theta": 1000000},
        {"dtype": mutations.DROP, "torch_dtype": "float32"},
        {"num_local_experts": mutations.DROP, "num_experts": 4},
    ):
        assert _read(_config("mixtral", **change)) == new
    assert _read(_config("llama", rope_parameters={"type": "default", "rope_theta": 5}))["rotary_base"] == 5.0


WINDOWS: dict[str, tuple[str, dict[str, Any], tuple[int | None, int]]] = {
    "mistral": ("mistral", {}, (5, 0)),
    "mistral's default": ("mistral", {"sliding_window": mutations.DROP}, (4096, 0)),
    "mistral without": ("mistral", {"sliding_window": None}, (None, 0)),
    "mixtral": ("mixtral", {"sliding_window": 4}, (4, 0)),
    "phi3": ("phi3", {"sliding_window": 2047}, (2047, 0)),
    "qwen2, not used": ("qwen2", {"sliding_window": 4, "layer_types": mutations.DROP}, (None, 0)),
    "qwen2, the second layer": ("qwen2_window", {"layer_types": mutations.DROP}, (4, 1)),
    "qwen2, said of each layer": ("qwen2_window", {"layer_types": ["sliding_attention"] * 2}, (4, 0)),
    "qwen2, no layer": ("qwen2_window", {"layer_types": mutations.DROP, "max_window_layers": 2}, (None, 0)),
    "qwen3_moe": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, (4, 0)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_comes_in_and_leaves(name: str) -> None:
    base, changes, expected = WINDOWS[name]
    family, _, overrides = translate.read_config(_config(base, **changes))
    config = config_from(overrides)
    assert (config.model.sliding_window, config.model.sliding_window_from) == expected
    leaves, hf = translate.write_config(config)
    assert translate.read_config(hf)[2] == overrides
    assert (leaves, hf["sliding_window"]) == (family, expected[0])


# Keys of widely used folders, besides the sizes.
IN_USE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-medium": (
        "gpt2",
        {
            "n_ctx": 8,
            "auto_map": {"AutoTokenizer": ["tokenization.Other", None]},
            "n_special": 0,
            "predict_special_tokens": True,
            "output_past": True,
            "_num_labels": 1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        },
    ),
    "bert-base-chinese": (
        "bert",
        {
            "directionality": "bidi",
            "pooler_fc_size": 768,
            "pooler_num_attention_heads": 12,
            "pooler_num_fc_layers": 3,
            "pooler_size_per_head": 128,
            "pooler_type": "first_token_transform",
            "position_embedding_type": "absolute",
            "gradient_checkpointing": False,
            "type_vocab_size": 2,
            "transformers_version": "4.6.0.dev0",
        },
    ),
    "Llama-2-7b": (
        "llama",
        {
            "_name_or_path": "x",
            "pretraining_tp": 1,
            "rope_scaling": None,
            "max_length": 4096,
            "temperature": 0.9,
            "top_p": 0.6,
        },
    ),
    "Mixtral-8x7B": (
        "mixtral",
        {"sliding_window": None, "output_router_logits": False, "router_aux_loss_coef": 0.02, "use_cache": True},
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "max_window_layers": 48,
            "sliding_window": None,
            "use_sliding_window": False,
            "rope_scaling": None,
            "decoder_sparse_step": 1,
        },
    ),
    "Qwen2.5-7B": (
        "qwen2",
        {"max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "layer_types": mutations.DROP},
    ),
    "Qwen3-8B": (
        "qwen3",
        {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False, "attention_bias": False},
    ),
    "Phi-3-mini": (
        "phi3",
        {
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "attention_bias": False,
            "embd_pdrop": 0.0,
            "original_max_position_embeddings": 4096,
            "resid_pdrop": 0.0,
            "rope_scaling": None,
        },
    ),
    "Kimi-K2": (
        "kimi_k2",
        {
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            "aux_loss_alpha": 0.001,
            "ep_size": 1,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "scoring_func": "sigmoid",
            "seq_aux": True,
            "topk_method": "noaux_tc",
        },
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2_lite",
        {
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
            "aux_loss_alpha": 0.001,
            "ep_size": 1,
            "moe_layer_freq": 1,
            "pretraining_tp": 1,
            "scoring_func": "softmax",
            "seq_aux": True,
        },
    ),
    "OLMoE-1B-7B": (
        "olmoe",
        {"head_dim": None, "add_cross_attention": None, "is_decoder": None, "pruned_heads": None}
        | {"clip_qkv": None, "rope_scaling": None, "attention_bias": False, "router_aux_loss_coef": 0.01},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            "ep_size": 1,
            "moe_layer_freq": 1,
            "pretraining_tp": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 1,
            "aux_loss_alpha": 0.001,
            "seq_aux": True,
        },
    ),
}


@pytest.mark.parametrize("name", IN_USE)
def test_keys_in_use_are_read(name: str) -> None:
    base, keys = IN_USE[name]
    assert _read(_config(base, **keys)) == _read(_config(base))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bases")
    make_bases(path, SAMPLED)
    assert not make_starts(path, {name: scaled(config) for name, config in PUBLISHED.items()})
    return path


SAMPLED = ("gpt2", "llama", "mixtral_tied", "qwen3_moe", "olmoe", "deepseek_v3", "bert_untied")
KNOWN: dict[str, tuple[str, dict[str, Any], str]] = {
    # Cases that were wrong without a word: what must become of each.
    "scaling beside parameters": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "refused"),
    "no rotary base": ("mixtral_tied", {"rope_parameters": mutations.DROP}, "agrees"),
    "not causal": ("olmoe", {"is_causal": False}, "refused"),
    "an output of its own": ("bert_untied", {}, "agrees"),
}


def _verdicts(folder: Path, cases: list[Case]) -> dict[str, str]:
    found = {f"{case.base} {case.what}": verdict for case, verdict in graded(folder, iter(cases))}
    wrong = {name: verdict.why for name, verdict in found.items() if verdict.word == "wrong"}
    assert not wrong
    return {name: verdict.word for name, verdict in found.items()}


def test_what_was_silently_wrong(folder: Path) -> None:
    cases = [
        Case(base, "known", name, mutations.changed(changes), (*changes,)) for name, (base, changes, _) in KNOWN.items()
    ]
    verdicts = _verdicts(folder, cases)
    assert verdicts == {f"{base} {name}": word for name, (base, _, word) in KNOWN.items()}


def _unequal(tensors: dict[str, torch.Tensor]) -> None:
    gate, up = (f"model.layers.0.mlp.{projection}_proj.weight" for projection in ("gate", "up"))
    tensors[gate], tensors[up] = torch.cat([tensors[gate], tensors[up][:2]]), tensors[up][2:]


def _other_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def _same_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("base", "edit", "word", "says"),
    [
        (
            "llama",
            _unequal,
            "refused",
            "model.layers.0.mlp.gate_proj.weight has shape [26, 16], but config.json calls for [24, 16]",
        ),
        ("mixtral_tied", _other_head, "refused", "lm_head.weight"),
        ("mixtral_tied", _same_head, "agrees", "logits"),
    ],
)
def test_tensors_are_checked_by_name(folder: Path, base: str, edit: Any, word: str, says: str) -> None:
    case = Case(base, "tensors", "", lambda path: mutations.edit_tensors(path, edit), ("tensor",))
    ((_, verdict),) = graded(folder, iter([case]))
    assert verdict.word == word, verdict.why
    assert says in verdict.why


def test_a_sample_of_mutations_and_damages(folder: Path) -> None:
    """The rest is `python -m benchmarks.checks.huggingface_mutations`."""
    cases = itertools.chain(
        itertools.islice((case for case in same_meaning_cases() if case.base in SAMPLED), 0, None, 6),
        itertools.islice(config_cases(folder, 42, seed=3, bases=SAMPLED), 0, None, 5),
        itertools.islice(damage_cases(folder, 28, seed=3, bases=SAMPLED), 0, None, 4),
    )
    assert set(_verdicts(folder, list(cases)).values()) == {"agrees", "refused"}


def test_published_configs_open_and_their_mutations_have_no_third_outcome(folder: Path) -> None:
    """More, from a folder of such files: `python -m benchmarks.checks.huggingface_mutations --published FOLDER`."""
    assert set(_verdicts(folder, list(start_cases(tuple(PUBLISHED)))).values()) == {"agrees"}
    cases = itertools.islice(config_cases(folder, 84, seed=3, bases=tuple(PUBLISHED)), 0, None, 5)
    assert set(_verdicts(folder, list(cases)).values()) == {"agrees", "refused"}


def test_an_untied_bert_leaves_as_it_came(folder: Path, tmp_path: Path) -> None:
    import transformers

    for arguments in (
        ["import", str(folder / "bert_untied"), str(tmp_path / "ours")],
        ["export", str(tmp_path / "ours"), str(tmp_path / "hf")],
    ):
        assert convert.main(arguments) == 0
    model, report = transformers.BertForPreTraining.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    head = model.cls.predictions
    assert torch.equal(head.bias, head.decoder.bias)  # for transformers 4, where they are one
    before = transformers.BertForPreTraining.from_pretrained(folder / "bert_untied")
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).prediction_logits, before(tokens).prediction_logits)
