"""A model leaves its run: from a checkpoint of any layout to a folder that transformers loads, and back, with the same
tokens."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import export
from configs.architecture import description
from configs.weights import config_from
from inference.decoder import TextBatch
from inference.open_model import open_model
from models import convert, folder
from tests import distributed
from tests.checkpoint.test_export import texts, their_texts
from tests.inference.test_generate import ours, theirs
from tests.models.helpers import relative_error, write_tensors
from tests.tolerances import ORACLE_LOGITS
from tests.training.helpers import train_on_ranks

VOCAB_SIZE = 391  # odd: padded differently in every layout
NUM_TOKENS = 10
PROMPTS = [[5, 7, 9, 11], [3, 200, 390], [17, 2, 3, 4, 5, 6, 7, 8, 9]]
TEXT_PROMPTS = ["def f(x):\n", "</s> is"]  # with the tokens that follow within 32, GPT-2's positions

COMMON = [
    "model=gpt_tiny",
    "model.num_layers=2",
    "model.sequence_length=32",
    "model.hidden_size=48",
    "model.init_std=0.2",
]
GROUPED = ["model.num_attention_heads=6", "model.num_query_groups=2", "model.ffn_hidden_size=72"]
EXPERTS = ["moe.num_experts=4", "moe.top_k=2", "moe.ffn_hidden_size=40"]
UNTIED, DENSE_FIRST = "model.tie_embeddings=false", "moe.layers=[0,1]"
GPT2 = [
    "position_embedding=learned",
    "normalization=layernorm",
    "activation=gelu_tanh",
    "linear_bias=true",
    "ffn_hidden_size=100",
]
DEEPSEEK = [
    "attention=latent",
    "num_attention_heads=6",
    "head_dim=6",
    "kv_lora_rank=14",
    "rotary_head_dim=4",
    "value_head_dim=10",
]
CARRIED = '{"is_llama_config": true, "rope_interleaved": false}'  # as an import of a folder with these keys sets it
RUNS: dict[str, tuple[str, int, list[str]]] = {
    "gpt2": ("gpt2", 2, [*(f"model.{key}" for key in GPT2), "parallel.tensor=2", "parallel.sequence=true"]),
    "llama": ("llama", 2, [*GROUPED, UNTIED, "parallel.pipeline=2", f"model.config_json='{CARRIED}'"]),
    "mixtral": ("mixtral", 2, [*GROUPED, *EXPERTS, "parallel.expert=2", "model.sliding_window=6"]),
    "qwen3_moe": (
        "qwen3_moe",
        2,
        [
            *GROUPED,
            *EXPERTS,
            DENSE_FIRST,
            UNTIED,
            "model.head_dim=10",
            "model.qk_norm=true",
            "parallel.tensor=2",
            "parallel.sequence=true",
        ],
    ),
    "olmoe": (
        "olmoe",
        2,
        [
            *(*GROUPED, *EXPERTS, "moe.normalize_top_k=false", "model.qk_norm=true", "model.qk_norm_over=all_heads"),
            *("parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2"),
        ],
    ),
    "deepseek_v3": (
        "deepseek_v3",
        2,
        [
            *(
                *(f"model.{key}" for key in DEEPSEEK),
                "model.q_lora_rank=16",
                *EXPERTS,
                DENSE_FIRST,
                "moe.shared_expert_ffn_hidden_size=80",
            ),
            *(
                "moe.router_score=sigmoid",
                "moe.expert_bias=true",
                "moe.routed_scaling_factor=1.5",
                "parallel.pipeline=2",
            ),
        ],
    ),
}


def _export(run_dir: Path, target: Path) -> None:
    export.export(run_dir, target / "weights")
    assert convert.main(["export", str(target / "weights"), str(target / "hf"), "--max-shard-size", "40kB"]) == 0


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_any_layout_leaves_for_transformers(name: str, data: list[str], tmp_path: Path) -> None:
    import transformers

    model_type, ranks, overrides = RUNS[name]
    settings = [
        *COMMON,
        *overrides,
        f"model.vocab_size={VOCAB_SIZE}",
        f"run_dir={tmp_path / 'run'}",
        "training.steps=2",
        *data,
    ]
    train_on_ranks(settings, ranks)
    distributed.run(_export, 1, tmp_path / "run", tmp_path)
    config_json = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config_json["model_type"] == model_type
    carried = json.loads(CARRIED) if name == "llama" else {}
    assert carried.items() <= config_json.items()
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert all((tmp_path / "hf" / file).is_file() for file in index["weight_map"].values())
    assert list((tmp_path / "hf").glob("tokenizer*"))
    if model_type != "qwen2":  # whose AutoTokenizer reads another class, which the export says
        theirs_of_text = their_texts(tmp_path / "hf", TEXT_PROMPTS)
        assert distributed.run(texts, 1, tmp_path / "run", TEXT_PROMPTS)[0] == theirs_of_text

    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    expected = [theirs(model.eval(), prompt, NUM_TOKENS) for prompt in PROMPTS]
    layout = [override for override in overrides if override.startswith("parallel.") and "sequence" not in override]
    for tokens in distributed.run(ours, ranks, tmp_path / "run", layout, PROMPTS, NUM_TOKENS):
        assert tokens == expected
    for source in ("hf", "weights"):
        assert distributed.run(ours, 1, tmp_path / source, [], PROMPTS, NUM_TOKENS)[0] == expected
    prompt = [index % VOCAB_SIZE for index in range(5, 5 + 32 * 97, 97)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
    assert relative_error(distributed.run(_logits, ranks, tmp_path / "run", layout, prompt)[0], logits) < ORACLE_LOGITS


def _logits(path: Path, layout: list[str], prompt: list[int]) -> torch.Tensor:
    """After each token of the prompt."""
    tokens = torch.tensor([prompt]).repeat(len(prompt), 1)
    with torch.inference_mode(), open_model(path, layout, device="cpu") as model:
        return model.decoder().prefill_all([TextBatch(tokens, range(1, len(prompt) + 1))])[0].clone()


def _anonymous_memory() -> int:
    """Bytes of this process that lie in no file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def _peak_growth(function: Any, *arguments: Any) -> int:
    start, peak, done = _anonymous_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _anonymous_memory() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        function(*arguments)
    finally:
        done.set()
        watcher.join()
    return peak[0]


def _convert_there_and_back(path: Path) -> dict[str, int]:
    file_bytes = 8_000_000
    return {
        "export": _peak_growth(convert.export_folder, path / "ours", path / "hf", file_bytes),
        "import": _peak_growth(convert.import_folder, path / "hf", path / "again", file_bytes),
    }


def test_converting_keeps_little_in_memory(tmp_path: Path) -> None:
    config = config_from(
        {"model": {"num_layers": 24, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1001}}
    )
    (tmp_path / "ours").mkdir()
    folder.write_config(tmp_path / "ours", description(config, 1001))
    shapes = {
        "linear_qkv": (3 * 512, 512),
        "linear_proj": (512, 512),
        "linear_fc1": (4096, 512),
        "linear_fc2": (512, 2048),
    }
    total, weights = 0, {"decoder.final_layernorm.weight": torch.ones(512)}
    for layer in range(24):
        prefix = f"decoder.layers.{layer}."
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(512)
        for name, shape in shapes.items():
            submodule = "self_attention" if name in ("linear_qkv", "linear_proj") else "mlp"
            weights[f"{prefix}{submodule}.{name}.weight"] = torch.full((1, 1), float(layer)).expand(shape)
            total += 4 * shape[0] * shape[1]
    weights["embedding.word_embeddings.weight"] = torch.ones(1001, 512)
    write_tensors(tmp_path / "ours", weights, max_file_bytes=8_000_000)
    for direction, peak in distributed.run(_convert_there_and_back, 1, tmp_path)[0].items():
        assert peak < total / 8, (direction, peak, total)
    first, again = folder.Reader(tmp_path / "ours"), folder.Reader(tmp_path / "again")
    assert first.names() == again.names()
    assert all(torch.equal(first.get(name), again.get(name)) for name in sorted(first.names())[::9])
