"""Folders whose config.json lacks the family, or names another class: read by their tensors, with a note, or refused
in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import convert, folder
from models.huggingface.tensors import new_head
from tests.models.mutations import BERT, GPT2, LLAMA, make_bases

pytestmark = pytest.mark.fast

BASES = ("bert", "bert_masked_lm", "gpt2", "llama", "mixtral")
ABSENT = object()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bases")
    make_bases(path, BASES)
    for name in BASES:
        assert convert.main(["import", str(path / name), str(path / "imported" / name)]) == 0
    return path


def _without(path: Path, target: Path, **changes: Any) -> Path:
    """A copy with other keys in config.json; ABSENT drops one."""
    shutil.copytree(path, target)
    config = {**json.loads((target / "config.json").read_text()), **changes}
    (target / "config.json").write_text(json.dumps({key: held for key, held in config.items() if held is not ABSENT}))
    return target


def _import(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    status = convert.main(["import", str(path), str(path.parent / "ours"), *options])
    assert (path.parent / "ours").exists() == (status == 0)
    return status, [line for line in capsys.readouterr().err.splitlines() if not line.startswith("writing")]


def _same(one: Path, other: Path) -> None:
    tensors, expected = load_file(one / folder.SINGLE_NAME), load_file(other / folder.SINGLE_NAME)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert (one / "config.yaml").read_text() == (other / "config.yaml").read_text()


# base, changed keys of config.json, texts of the note or of the error
SAYS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], bool]] = {
    "by_class": ("bert", {"model_type": ABSENT}, ("read as bert", "architectures (BertForPreTraining)"), True),
    "by_class_masked": ("bert_masked_lm", {"model_type": ABSENT}, ("read as bert", "BertForMaskedLM"), True),
    "null": ("llama", {"model_type": None}, ("read as llama", "architectures (LlamaForCausalLM)"), True),
    "gpt2_by_class": ("gpt2", {"model_type": ABSENT}, ("read as gpt2", "architectures (GPT2LMHeadModel)"), True),
    "mixtral_by_class": ("mixtral", {"model_type": None}, ("read as mixtral", "(MixtralForCausalLM)"), True),
    "gpt2_by_tensors": (
        "gpt2",
        {"model_type": ABSENT, "architectures": ABSENT},
        ("read as gpt2", "tensor transformer.h.0.attn.c_attn.weight"),
        True,
    ),
    "bert_by_tensors": (
        "bert",
        {"model_type": ABSENT, "architectures": ABSENT},
        ("read as bert", "tensor bert.encoder.layer.0.attention.self.query.weight"),
        True,
    ),
    "all_heads": ("bert", {"architectures": ["BertModel"]}, ("(BertModel)", "read as BertForPreTraining"), True),
    "one_head": ("bert_masked_lm", {"architectures": ["BertModel"]}, ("read as BertForMaskedLM",), True),
    "a_class_of_theirs": ("bert", {"architectures": ["BertForDates"]}, ("read as BertForPreTraining",), True),
    "no_class": ("bert_masked_lm", {"architectures": ABSENT}, ("no architectures", "read as BertForMaskedLM"), True),
    "no_class_at_all": ("bert", {"architectures": []}, ("no architectures", "read as BertForPreTraining"), True),
    # Llama's tensors are called as those of Mistral, Gemma and others.
    "llama_by_tensors": (
        "llama",
        {"model_type": ABSENT, "architectures": ABSENT},
        ("no model_type", "architectures (null)", "gpt2, llama, mistral"),
        False,
    ),
    "unknown_class": ("bert", {"model_type": ABSENT, "architectures": ["BartModel"]}, ("BartModel", "bert"), False),
    "two_families": (
        "bert",
        {"model_type": ABSENT, "architectures": ["BertModel", "LlamaModel"]},
        ("no model_type", "BertModel"),
        False,
    ),
    "a_word": ("bert", {"model_type": ABSENT, "architectures": "BertModel"}, ("BertModel",), False),
    "wrong_class": ("gpt2", {"model_type": ABSENT, "architectures": ["BertModel"]}, ("bert model",), False),
    "other_class": ("bert", {"architectures": ["RobertaModel"]}, ("architectures (RobertaModel)",), False),
    "empty": ("bert", {"model_type": ""}, ("model_type ()",), False),
    "model_type_of_another": ("llama", {"model_type": "gemma"}, ("model_type (gemma)", "gpt2, llama"), False),
}


@pytest.mark.parametrize("name", SAYS)
def test_a_folder_is_what_it_holds(name: str, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, changes, says, opens = SAYS[name]
    status, lines = _import(_without(bases / base, tmp_path / "hf", **changes), capsys)
    assert (status == 0) == opens, lines
    assert all(text in " ".join(lines) for text in says), lines
    if opens:
        assert all(line.startswith("note: config.json has ") for line in lines)
        _same(tmp_path / "ours", bases / "imported" / base)
    else:
        assert len(lines) == 1


def test_the_first_folders_of_bert_and_gpt2(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder as of 2018 and 2019: no model_type, no architectures, the old format of torch.save, gamma and beta."""
    sizes = "hidden_size intermediate_size num_attention_heads num_hidden_layers vocab_size max_position_embeddings"
    keys = {
        "bert": f"{sizes} attention_probs_dropout_prob hidden_act hidden_dropout_prob type_vocab_size layer_norm_eps",
        "gpt2": "initializer_range layer_norm_epsilon n_ctx n_embd n_head n_layer n_positions vocab_size",
    }
    for base, kept in keys.items():
        path = tmp_path / base / "hf"
        shutil.copytree(bases / base, path)
        config = {**json.loads((path / "config.json").read_text()), "n_ctx": GPT2["n_positions"]}
        tensors = load_file(path / folder.SINGLE_NAME)
        tensors = {
            re.sub(
                "^transformer\\.", "", name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            ): t
            for name, t in tensors.items()
        }
        torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
        for name in (folder.SINGLE_NAME, "config.json"):
            (path / name).unlink()
        old = path / "bert_config.json"
        old.write_text(json.dumps({key: config[key] for key in kept.split()}))
        status, (line,) = _import(path, capsys)
        assert status == 2 and "must hold a config.json" in line and "Rename bert_config.json to config.json" in line
        old.rename(path / "config.json")
        status, lines = _import(path, capsys)
        assert status == 0 and f"read as {base}, because of tensor" in lines[0]
        ours, expected = (
            load_file(at / folder.SINGLE_NAME) for at in (path.parent / "ours", bases / "imported" / base)
        )
        assert ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in ours)


# class, its sizes, the tensor that is named as missing (none where the embedding is the output layer), what is left out
HEADLESS: dict[str, tuple[str, dict[str, Any], str | None, str]] = {
    "BertModel": ("bert", BERT, "cls.predictions.transform.dense.weight", ""),
    "BertForSequenceClassification": ("bert", BERT, "cls.predictions.transform.dense.weight", "classifier.bias"),
    "BertForTokenClassification": ("bert", BERT, "cls.predictions.transform.dense.weight", "classifier.weight"),
    "BertForQuestionAnswering": ("bert", BERT, "cls.predictions.transform.dense.weight", "qa_outputs.weight"),
    "BertForMultipleChoice": ("bert", BERT, "cls.predictions.transform.dense.weight", "classifier.weight"),
    "BertForNextSentencePrediction": ("bert", BERT, "cls.predictions.transform.dense.weight", ""),
    "LlamaModel": ("llama", LLAMA, "lm_head.weight", ""),
    "LlamaForSequenceClassification": ("llama", LLAMA, "lm_head.weight", "score.weight"),
    "LlamaForTokenClassification": ("llama", LLAMA, "lm_head.weight", "score.bias"),
    "GPT2Model": ("gpt2", GPT2, None, ""),
    "GPT2ForSequenceClassification": ("gpt2", GPT2, None, "score.weight"),
    "GPT2DoubleHeadsModel": ("gpt2", GPT2, None, "multiple_choice_head.summary.weight"),
}


@pytest.mark.parametrize("name", HEADLESS)
def test_a_model_without_an_output_layer(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    family, values, missing, left_out = HEADLESS[name]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**values, pad_token_id=0))
    model.save_pretrained(tmp_path / "hf")
    status, lines = _import(tmp_path / "hf", capsys)
    if missing is None:
        assert status == 0
        seed: list[str] = []
    else:
        (line,) = lines
        assert status == 2 and f"no tensor {missing}" in line and name in line
        advice = re.search(r"python -m models.convert import FOLDER OUT (--new-head) SEED", line)
        assert advice is not None
        seed = [advice[1], "7"]
        status, lines = _import(tmp_path / "hf", capsys, *seed)
        assert status == 0 and any(f"{missing}" in line and "drawn with seed 7" in line for line in lines)
    assert any("for another task" in line and left_out in line for line in lines) == bool(left_out)
    if seed:
        config = folder.config_from(folder.read_config(tmp_path / "ours"))
        ours, drawn = load_file(tmp_path / "ours" / folder.SINGLE_NAME), new_head(config, 7)
        fresh = {key: drawn(key, torch.float32) for key in ours if key.startswith(("lm_head.", "output_layer."))}
        assert all(torch.equal(ours[key], tensor) for key, tensor in fresh.items())
        assert any(tensor.std() > 0 for tensor in fresh.values())
    # What the folder holds is what transformers' own model of it holds.
    assert convert.main(["export", str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    again, report = transformers.AutoModel.from_pretrained(tmp_path / "again", output_loading_info=True)
    held = model.base_model.state_dict()
    for key, tensor in again.state_dict().items():
        if not key.startswith("pooler.") or "NextSentence" in name:
            assert torch.equal(tensor, held[key]), key
    assert {key for key in report["missing_keys"] if "pooler" not in key} == set()


def test_a_new_head_is_for_who_has_none(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(bases / "bert", tmp_path / "hf")
    status, (line,) = _import(tmp_path / "hf", capsys, "--new-head", "3")
    assert status == 2 and "--new-head (3)" in line and "has one" in line
    with pytest.raises(SystemExit):
        convert.main(["export", str(bases / "imported" / "bert"), str(tmp_path / "out"), "--new-head", "3"])


def test_an_output_layer_may_be_the_embedding(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tied model whose config.json lacks the key, which is false by default for Llama."""
    path = _without(bases / "llama", tmp_path / "hf", tie_word_embeddings=ABSENT)
    tensors = load_file(path / folder.SINGLE_NAME)
    del tensors["lm_head.weight"]
    save_file(tensors, path / folder.SINGLE_NAME)
    status, (line,) = _import(path, capsys)
    assert status == 2 and "no tensor lm_head.weight" in line and "set tie_word_embeddings to true" in line
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert _import(path, capsys) == (0, [])


def test_half_a_head_is_no_head_to_be_drawn(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(bases / "bert", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / folder.SINGLE_NAME)
    del tensors["cls.predictions.transform.dense.weight"]
    save_file(tensors, tmp_path / "hf" / folder.SINGLE_NAME)
    for options in ([], ["--new-head", "3"]):
        status, (line,) = _import(tmp_path / "hf", capsys, *options)
        assert status == 2 and "no tensor cls.predictions.transform.dense.weight, which" in line
