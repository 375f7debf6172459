"""Keys that no table of a family has: carried where transformers' code never reads them, refused where they may change
what is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from base.errors import ConfigError
from benchmarks.kit import transformers_reads
from configs.compose import compose, load, to_yaml
from inference.open_model import open_model
from models import convert
from models.huggingface import translate, unknown_keys
from tests.models.mutations import BASES, make_bases


def test_the_table_is_what_transformers_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If transformers or the families have changed, the command must write the table anew."""
    monkeypatch.setattr(transformers_reads, "TABLE", tmp_path / "table.yaml")
    assert transformers_reads.main([]) == 0
    assert unknown_keys.TABLE.read_text() == (tmp_path / "table.yaml").read_text()


def test_the_table_has_what_a_reader_of_the_code_finds() -> None:
    for key in ("layer_types", "is_causal", "text_config", "attention_chunk_size", "to_dict", "per_layer_config"):
        assert all(key in unknown_keys.reads(family) for family in translate.FAMILIES), key
    assert "embedding_size" in unknown_keys.reads("bert") and "embedding_size" not in unknown_keys.reads("llama")
    assert "clip_qkv" in unknown_keys.reads("olmoe") and "clip_qkv" not in unknown_keys.reads("llama")
    for family in translate.FAMILIES:
        assert not unknown_keys.reads(family) & {"unsloth_version", "is_llama_config", "use_qk_norm", "alibi", "colour"}


def _config(base: str, changes: dict[str, Any]) -> dict[str, Any]:
    import transformers

    class_name, values = BASES[base]
    config = getattr(transformers, class_name).config_class(**values, architectures=[class_name]).to_dict()
    config["id2label"] = None
    return {**config, **changes}


# Nobody reads them, or they have a value that leaves the model what it is.
CARRIED: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}),
    ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
    ("llama", {"internal_version": "7b-v2", "unsloth_version": "2024.9", "unsloth_fixed": True}),
    ("llama", {"sequence_parallel_enabled": False, "max_sequence_length": 2048, "move_model_to_device": True}),
    ("mixtral", {"moe_frequency": 1, "use_flash_attention": True, "pretraining_tp": 1, "norm_topk_prob": True}),
    ("llama", {"use_qk_norm": False, "qk_layernorm": None, "num_experts": 0, "n_shared_experts": None}),
    ("llama", {"logit_scale": 1.0, "embedding_multiplier": 1, "residual_multiplier": None, "scale_embedding": False}),
    ("llama", {"attention_chunk_size": None, "layer_types": ["full_attention"] * 2, "text_config": None}),
    ("llama", {"clip_grad": 1.0, "_pre_quantization_dtype": "bfloat16", "residual_in_fp32": True, "version": "1"}),
    ("llama", {"rotary_pct": 1.0, "use_rope": True, "position_embedding_type": "rope", "rope_dim": None}),
    ("llama", {"parallel_residual": False, "alibi": False, "attention_sinks": [], "clip_qkv": None}),
    ("llama", {"activation_function": "silu", "normalization_type": "RMSNorm", "use_swiglu": True}),
    ("gpt2", {"use_bias": True, "alibi": 0, "position_embedding_type": "absolute", "norm_topk_prob": False}),
    ("bert", {"bias": True, "use_bias": False, "adapters": {"adapters": {}}, "model_max_length": 512}),
    ("deepseek_v3", {"use_qk_norm": False, "index_topk": 0, "router_z_loss_coef": 0.1, "expert_layer_freq": 1}),
    ("olmoe", {"scoring_func": "softmax", "norm_topk": False, "qk_norm": True, "initializer_factor": 2.0}),
    ("llama", {"colour": float("nan"), "\nline": "${oc.env:HOME}", "blob": "x" * 100_000, "nested": [{"a": [1e-9]}]}),
]
# Read by transformers' code, or switches of models with code of their own.
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"qkv_bias": True, "use_qk_norm": True, "shared_expert_intermediate_size": 64}),
    ("qwen3_moe", {"use_qk_norm": False, "n_shared_experts": 1}),
    ("llama", {"rope_interleaved": True, "rotary_pct": 0.5, "use_rope": False, "no_rope_layers": [1]}),
    ("llama", {"logit_scale": 0.5, "embedding_multiplier": 12.0, "residual_multiplier": 0, "logits_scaling": True}),
    ("llama", {"attention_chunk_size": 4, "layer_types": ["sliding_attention"] * 2, "text_config": {"a": 1}}),
    ("llama", {"layer_types": ["full_attention"], "partial_rotary_factor": 0.5, "attn_implementation": "mine"}),
    ("llama", {"parallel_residual": True, "use_alibi": True, "attention_sink": 4, "clip_qkv": 8.0}),
    ("llama", {"activation_function": "gelu", "norm_type": "layernorm", "attn_logit_softcapping": 30.0}),
    ("mixtral", {"norm_topk_prob": False, "scoring_func": "sigmoid", "num_shared_experts": 2}),
    ("llama", {"to_dict": 1, "__class__": "x", "model_debug": True, "scale_depth": float("nan")}),
    ("llama", {"apply_layernorm_1p": True, "attn_output_gate": True, "query_pre_attn_scalar": 4, "quant_method": "x"}),
    ("gpt2", {"use_alibi": True, "position_embedding_type": "rope", "embed_dim": 8}),
    ("bert", {"embedding_size": 8, "per_layer_config": {}, "use_rms_norm": True}),
]


def _carried(config: dict[str, Any]) -> dict[str, Any]:
    text = translate.read_config(config)[2]["model"].get("config_json")
    return {} if text is None else json.loads(text)


@pytest.mark.parametrize(("base", "keys"), CARRIED)
def test_keys_that_change_nothing_are_carried(base: str, keys: dict[str, Any]) -> None:
    assert str(_carried(_config(base, keys))) == str(dict(sorted(keys.items())))  # NaN is not equal to itself


@pytest.mark.parametrize(("base", "keys"), REFUSED)
def test_keys_that_may_change_numbers_are_refused_together(base: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        translate.read_config(_config(base, {**keys, "colour": "red"}))
    text = str(error.value)
    assert all(f"{key} (" in text for key in keys) and "colour" not in text and "\n" not in text
    assert f"{len(keys)} keys" in text and f"for model_type {base} " in text
    # the advice: what changes nothing is removed
    assert _carried(_config(base, {"colour": "red"})) == {"colour": "red"}


def test_one_key_is_refused_by_its_name() -> None:
    with pytest.raises(
        ConfigError, match=r"has a key that .* for model_type llama .*: logit_scale \(0.5\)\. Remove it if"
    ):
        translate.read_config(_config("llama", {"logit_scale": 0.5}))


ODD = {"colour": float("nan"), "\nline": "${oc.env:HOME} ???", "blob": "x" * 300, "is_llama_config": True}


def test_carried_keys_come_back_at_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    make_bases(tmp_path, ["llama"])
    path = tmp_path / "llama" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **ODD, "layer_types": ["full_attention"] * 2}))
    capsys.readouterr()
    assert convert.main(["import", str(path.parent), str(tmp_path / "ours")]) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("note"))
    assert "llama" in line and len(line) < 600 and "layer_types" not in line
    assert all(said in line for said in ("colour (NaN)", "is_llama_config (true)", '"\\nline" (', 'blob ("xxx'))
    assert "is_llama_config" in (tmp_path / "ours" / "config.yaml").read_text()

    with open_model(path.parent, device="cpu"):
        assert "is_llama_config (true)" in capsys.readouterr().err

    # a run from these weights, and its resolved config read again
    (tmp_path / "ours" / "tokenizer.model").write_bytes(b"")
    run = compose([f"checkpoint.weights={tmp_path / 'ours'}"])
    (tmp_path / "run.yaml").write_text(to_yaml(run))
    for config in (run, load(tmp_path / "run.yaml")):
        family, _ = translate.write_config(config)
        written, left_out = unknown_keys.of_family(config, family)
        assert str(written) == str(dict(sorted({**ODD, "layer_types": ["full_attention"] * 2}.items())))
        assert not left_out

    assert convert.main(["export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert str({key: back[key] for key in ODD}) == str(ODD)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").config.is_llama_config is True


def test_keys_that_another_family_means_otherwise_are_left_out() -> None:
    config = compose(["model=gpt_tiny", "model.vocab_size=99"])
    config.model.config_json = '{"colour": "red", "n_embd": 8, "alibi": true}'
    written, left_out = unknown_keys.of_family(config, translate.FAMILIES["gpt2"])
    assert written == {"colour": "red"} and left_out == {"n_embd": 8, "alibi": True}


@pytest.mark.parametrize("text", ["[]", "{", "colour"])
def test_a_text_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    config = compose(["model=gpt_tiny", "model.vocab_size=99"])
    config.model.config_json = text
    with pytest.raises(ConfigError, match="model.config_json"):
        unknown_keys.of_family(config, translate.FAMILIES["llama"])


def test_the_text_stands_in_a_yaml_file() -> None:
    text = unknown_keys.to_text({"a": "${b} $c", "d": None})
    assert text is not None and "$" not in text
    assert json.loads(yaml.safe_load(yaml.safe_dump({"x": text}))["x"]) == {"a": "${b} $c", "d": None}
