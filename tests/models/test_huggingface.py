"""The oracle: the same weights in Hugging Face transformers and here, for every family, after import, in layouts, and
back."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from base.errors import ConfigError
from configs.architecture import description
from models import convert, folder
from models.huggingface import tensors, translate
from tests.distributed import run
from tests.models.helpers import Batch, random_batch, relative_error, run_model, write_tensors
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS, ORACLE_GRADS, ORACLE_LOGITS

VOCAB_SIZE = 99  # odd
LENGTH = 10

LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 12,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-3,  # large, so that a wrong one shows
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DEEPSEEK = {
    **LLAMA,
    "num_key_value_heads": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 5,
    "v_head_dim": 7,
    "num_nextn_predict_layers": 0,
}
# Texts of LENGTH tokens go beyond the first training's length.
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "yarn_spelled_out": {
        "type": "yarn",
        "factor": 3,
        "original_max_position_embeddings": 8,
        "beta_fast": 2,
        "beta_slow": 0.25,
        "attention_factor": 0.8,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 3.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.5],
        "long_factor": [9.25],
    },
    "deepseek": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 8,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "deepseek_unequal": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 8,
        "mscale": 0.707,
        "mscale_all_dim": 1.5,
    },
}
DEEPSEEK_V2 = {
    **{key: value for key, value in DEEPSEEK.items() if key != "num_nextn_predict_layers"},
    "num_key_value_heads": None,
    "qk_nope_head_dim": 4,
    "n_routed_experts": 12,
    "num_experts_per_tok": 5,
    "n_group": 4,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 3.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 12,
            "initializer_range": 0.2,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "gpt2_untied": (
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 20,
            "n_inner": 36,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 12,
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": False,
            "initializer_range": 0.2,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "llama": ("LlamaForCausalLM", {**LLAMA, "head_dim": 8, "rope_theta": 500.0}),
    "llama_tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True, "rope_scaling": SCALINGS["llama3"]}),
    "mixtral": (
        "MixtralForCausalLM",
        {
            **LLAMA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "mixtral_tied": (
        "MixtralForCausalLM",
        {
            **LLAMA,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
            "rope_scaling": SCALINGS["linear"],
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **LLAMA,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe_normalized": (
        "Qwen3MoeForCausalLM",
        {
            **LLAMA,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "rope_scaling": SCALINGS["yarn"],
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {**LLAMA, "num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe_normalized": (
        "OlmoeForCausalLM",
        {
            **LLAMA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 6,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "rope_theta": 500.0,
            "rope_scaling": SCALINGS["yarn_spelled_out"],
        },
    ),
    "llama_with_biases": ("LlamaForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen2_window": (
        "Qwen2ForCausalLM",
        {**LLAMA, "num_key_value_heads": 6, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}),
    "phi3": (
        "Phi3ForCausalLM",
        {
            **LLAMA,
            "rope_parameters": {**SCALINGS["longrope"], "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 8,
            "pad_token_id": 0,
        },
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**DEEPSEEK, "rope_scaling": SCALINGS["deepseek_unequal"]}),
    # always two experts of a group score it; in Megatron-core it would be three, or no whole number
    "deepseek_v3_six_of_two_groups": (
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "num_experts_per_tok": 6, "n_routed_experts": 12, "n_group": 3, "n_shared_experts": 1},
    ),
    "deepseek_v3_five_of_two_groups": (
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "num_experts_per_tok": 5, "n_routed_experts": 12, "n_group": 3, "n_shared_experts": 3},
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK_V2),
    "deepseek_v2_lite": (
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK_V2, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3_plain_queries": (
        "DeepseekV3ForCausalLM",
        {
            **DEEPSEEK,
            "rope_scaling": SCALINGS["deepseek"],
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 6,
            "tie_word_embeddings": True,
        },
    ),
    "bert": (
        "BertForPreTraining",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 12,
            "initializer_range": 0.2,
        },
    ),
    "bert_masked_lm": (
        "BertForMaskedLM",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 12,
            "layer_norm_eps": 1e-3,
            "initializer_range": 0.2,
        },
    ),
}
# Layers that another of the table has in every layout, under other names.
ALREADY_SPLIT = (
    *("mistral", "qwen2", "qwen3", "phi3", "deepseek_v2_lite"),
    *("deepseek_v3_six_of_two_groups", "deepseek_v3_five_of_two_groups"),
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2, "sequence": True}),
    "pp2": (2, {"pipeline": 2}),
    "ep2": (2, {"expert": 2}),
}


def _oracle(name: str, batch: Batch) -> Any:
    """The Hugging Face model with random weights, gradients of the batch's loss in `.grad`; its logits and loss as
    attributes."""
    import transformers

    class_name, values = FAMILIES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    config = model_class.config_class(**values)
    config.architectures = [class_name]
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # norms and biases too
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    if "Bert" in class_name:
        output = model(
            input_ids=batch["tokens"], token_type_ids=batch["types"], attention_mask=batch["padding_mask"].long()
        )
        logits = output["prediction_logits" if class_name == "BertForPreTraining" else "logits"]
    else:
        logits = model(input_ids=batch["tokens"]).logits
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    loss = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    if class_name == "BertForPreTraining":
        loss = loss + F.cross_entropy(output["seq_relationship_logits"], batch["sentence_label"])
    loss.backward()
    model.oracle_logits, model.oracle_loss = logits.detach(), loss.item()
    return model


def _run_folder(path: Path, layout: dict[str, Any], batch: Batch) -> dict[str, Any]:
    config = folder.config_from({**folder.read_config(path), "parallel": layout})
    config.model.hidden_dropout = config.model.attention_dropout = 0.0
    load = functools.partial(folder.load_logical_folder, folder=path, config=config, vocab_size=VOCAB_SIZE)
    return run_model(config, VOCAB_SIZE, batch, load)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    reader = folder.Reader(path)
    return {name: reader.get(name) for name in reader.names()}


@pytest.mark.parametrize("name", FAMILIES)
def test_family_against_transformers(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    batch = random_batch(VOCAB_SIZE, num_samples=4, length=LENGTH)
    model = _oracle(name, batch)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    expected = _tensors(tmp_path / "hf")
    # Gradients under the names of files: save a model whose weights they are.
    gradients_as_weights = copy.deepcopy(model)
    for (_, parameter), (_, with_grad) in zip(gradients_as_weights.named_parameters(), model.named_parameters()):
        parameter.data = with_grad.grad
    for buffer in gradients_as_weights.buffers():
        buffer.zero_()
    gradients_as_weights.save_pretrained(tmp_path / "gradients")
    expected_gradients = _tensors(tmp_path / "gradients")

    assert convert.main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    result = run(_run_folder, 1, tmp_path / "ours", {}, batch)[0]
    assert relative_error(result["logits"], model.oracle_logits) < ORACLE_LOGITS
    assert result["loss"] == pytest.approx(model.oracle_loss, rel=ORACLE_GRADS)
    family, _, _ = translate.read_config(json.loads((tmp_path / "hf" / "config.json").read_text()))
    config = folder.config_from(folder.read_config(tmp_path / "ours"))

    def fill_box(name: str, target: torch.Tensor, at: tuple[int, ...]) -> None:
        target.copy_(result["gradients"][name][at[0] : at[0] + len(target)])

    plan = tensors.export_plan(family, config)
    gradients = {planned.name: planned.make(fill_box, torch.float32) for planned in plan}
    assert gradients.keys() == expected_gradients.keys()
    largest = max(grad.abs().max().item() for grad in expected_gradients.values())
    for key, grad in gradients.items():
        # A bias of keys has no gradient at all: softmax does not see it. Noise is compared with the other gradients.
        error = (grad - expected_gradients[key]).abs().max().item()
        assert error < ORACLE_GRADS * max(expected_gradients[key].abs().max().item(), 1e-3 * largest), key

    for layout, (world_size, parallel) in LAYOUTS.items():
        if name in ALREADY_SPLIT or ("expert" in parallel and config.moe.num_experts is None):
            continue
        for split in run(_run_folder, world_size, tmp_path / "ours", parallel, batch):
            assert split["loss"] == pytest.approx(result["loss"], rel=FP32_LOSS), layout
            if split["logits"] is not None:
                first = split["data_rank"] * len(split["logits"])
                assert (
                    relative_error(split["logits"], result["logits"][first : first + len(split["logits"])])
                    < ORACLE_LOGITS
                ), layout
            for key, grad in result["gradients"].items():
                error = (split["gradients"][key] - grad).abs().max().item()
                assert error < FP32_GRAD_NORM * max(grad.abs().max().item(), 1e-3 * largest), (layout, key)

    assert convert.main(["export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    notes = capsys.readouterr().err
    assert ("always uses the class Qwen2Tokenizer; the folder names none." in notes) == name.startswith("qwen2")
    assert ".partial-" not in notes  # a name that nobody can open
    back = _tensors(tmp_path / "back")
    assert back.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(back[key], tensor), key
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    reloaded, report = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    inputs = {"input_ids": batch["tokens"]}
    if "bert" in name:
        inputs |= {"token_type_ids": batch["types"], "attention_mask": batch["padding_mask"].long()}
    output = reloaded.eval()(**inputs)
    logits = output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
    assert torch.equal(logits, model.oracle_logits)
    assert isinstance(reloaded, transformers.PreTrainedModel)


def _save_and_load(path: Path, layout: dict[str, Any], save: bool) -> dict[str, Any]:
    config = folder.config_from(
        {"model": {"num_layers": 2, "hidden_size": 32}, "moe": {"num_experts": 4}, "parallel": layout}
    )

    def load(chunks: list[torch.nn.Module]) -> None:
        if save:
            folder.save_logical_folder(chunks, path, config, VOCAB_SIZE)
        else:
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.data.zero_()
            folder.load_logical_folder(chunks, path, config, VOCAB_SIZE)

    return run_model(config, VOCAB_SIZE, random_batch(VOCAB_SIZE, 4, LENGTH), load)


def test_logical_folder_moves_weights_between_layouts(tmp_path: Path) -> None:
    saved = run(_save_and_load, 2, tmp_path / "weights", {"expert": 2}, True)[0]
    for world_size, layout in [(1, {}), (2, {"pipeline": 2}), (2, {"tensor": 2, "sequence": True})]:
        loaded = run(_save_and_load, world_size, tmp_path / "weights", layout, False)[0]
        for name, weight in saved["weights"].items():
            assert torch.equal(loaded["weights"][name], weight), name


def test_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    config = folder.config_from({"model": {"num_layers": 3, "sequence_length": 8}})
    folder.write_config(tmp_path, description(config, VOCAB_SIZE))
    config.model.num_layers, config.model.sequence_length = 2, 16
    with pytest.raises(ConfigError, match="model.num_layers is 2 in this run and 3 in the folder") as error:
        folder.load_logical_folder([], tmp_path, config, VOCAB_SIZE)
    assert "sequence_length" not in str(error.value)
    with pytest.raises(ConfigError, match="config.yaml of format .*, but it has no config.yaml"):
        folder.load_logical_folder([], tmp_path / "nowhere", config, VOCAB_SIZE)
    config.model.num_layers = 3
    with pytest.raises(ConfigError, match="model.safetensors"):
        folder.load_logical_folder([], tmp_path, config, VOCAB_SIZE)


OLD_NAMES: dict[str, tuple[str, list[tuple[str, str]], list[str]]] = {
    "gpt2": ("transformer.", [], ["h.0.attn.bias", "h.0.attn.masked_bias"]),
    "bert": (
        "",
        [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")],
        ["bert.embeddings.position_ids"],
    ),
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_names_of_old_files(name: str, tmp_path: Path) -> None:
    _oracle(name, random_batch(VOCAB_SIZE, 2, LENGTH)).save_pretrained(tmp_path / "hf")
    assert convert.main(["import", str(tmp_path / "hf"), str(tmp_path / "new")]) == 0
    prefix, renamed, extra = OLD_NAMES[name]
    tensors = _tensors(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    old_names = {}
    for key, tensor in tensors.items():
        key = key.removeprefix(prefix)
        for now, before in renamed:
            key = key.replace(now, before)
        old_names[key] = tensor
    write_tensors(tmp_path / "hf", old_names | {key: torch.zeros(1) for key in extra})
    assert convert.main(["import", str(tmp_path / "hf"), str(tmp_path / "old")]) == 0
    new, old = _tensors(tmp_path / "new"), _tensors(tmp_path / "old")
    assert new.keys() == old.keys()
    assert all(torch.equal(new[key], old[key]) for key in new)


def test_writer_splits_and_indexes(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(5, i + 1) for i in range(4)}
    write_tensors(tmp_path, tensors, max_file_bytes=100)
    index = json.loads((tmp_path / folder.INDEX_NAME).read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in tensors.values())
    for name, tensor in _tensors(tmp_path).items():
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model_type": "mamba"}, "model_type (mamba)"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type (dynamic)"),
        ({"hidden_act": "relu"}, "hidden_act (relu)"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "do not belong to the llama model"),
        ({"hidden_size": None}, "'hidden_size'"),
    ],
)
def test_import_refuses_what_it_cannot_do(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    values = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None or key not in change}))
    assert convert.main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "mixtral",
            {"num_experts_per_tok": 1},
            "num_experts_per_tok (1) must be at least 2 if the probabilities of a token's experts",
        ),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 1, "topk_group": 4},
            "num_experts_per_tok (1) must be at least 2 if the probabilities of a token's experts",
        ),
        (
            "qwen3_moe",
            {"mlp_only_layers": [0, 1]},
            "mlp_only_layers ([0, 1]) and decoder_sparse_step (1) leave no layer with experts",
        ),
    ],
)
def test_import_refuses_routing_that_it_does_not_have(family: str, change: dict[str, Any], message: str) -> None:
    import transformers

    class_name, values = FAMILIES[family]
    config = getattr(transformers, class_name).config_class(**values, architectures=[class_name]).to_dict()
    with pytest.raises(ConfigError) as error:
        translate.read_config({**config, **change})
    assert message in str(error.value)


def test_export_names_what_no_family_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = folder.config_from({"model": {"rotary_fraction": 0.5, "qk_norm": True}})
    folder.write_config(tmp_path, description(config, VOCAB_SIZE))
    assert convert.main(["export", str(tmp_path), str(tmp_path / "hf")]) == 2
    assert "model.rotary_fraction (0.5; qwen3 has 1.0)" in capsys.readouterr().err
