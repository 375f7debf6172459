"""Separate documents from the token file to the loss, for micro-batches of one to three samples, against transformers:
each segment of a document alone, read from the flat list of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from configs.schema import Config
from data.loader import Loader
from data.prepare import TokenFile
from data.samples import GPTSamples
from models import convert, folder
from tests.data.token_files import write_tokens
from tests.distributed import run
from tests.tolerances import FP32_LOSS

VOCAB_SIZE, LENGTH, SAMPLES = 90, 16, 6
LENGTHS = [4, 1, 7, 16, 2, 30, 5, 1, 1, 29] * 2


def trained_loss(config: Config, source: Path, path: Path, size: int) -> float:
    """The loss of one global batch, in micro-batches of this size."""
    from parallel.topology import initialize
    from training.engine import Engine
    from training.step import evaluate

    samples = GPTSamples([TokenFile(str(source), 1.0, sum(LENGTHS))], LENGTH, 0, False, separate=True)
    config.training.micro_batch_size, config.training.global_batch_size = size, SAMPLES
    engine = Engine(config, initialize(config), VOCAB_SIZE)
    folder.load_logical_folder(engine.bare_chunks, folder=path, config=config, vocab_size=VOCAB_SIZE)
    loader = Loader(samples, global_batch_size=SAMPLES, micro_batch_size=size, prefetch=0)
    return evaluate(engine, iter([loader.next_step()]))[0]


def test_batches_of_any_size_have_the_loss_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **sizes, **heads)).eval()
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    assert convert.main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    stream = np.random.default_rng(0).integers(1, VOCAB_SIZE, sum(LENGTHS))
    bounds = np.cumsum([0, *LENGTHS]).tolist()
    write_tokens(tmp_path / "part", np.uint16, [[stream[a:b]] for a, b in zip(bounds, bounds[1:])])
    total, count = 0.0, 0
    for first in range(0, SAMPLES * LENGTH, LENGTH):
        for a, b in zip(bounds, bounds[1:]):
            low, high = max(a, first), min(b, first + LENGTH + 1)  # a sample's last token predicts the one behind it
            if high - low >= 2:
                segment = torch.from_numpy(stream[low:high])[None]
                with torch.no_grad():
                    logits = model(input_ids=segment[:, :-1]).logits[0]
                total += F.cross_entropy(logits, segment[0, 1:], reduction="sum").item()
                count += high - low - 1
    config = folder.config_from(folder.read_config(tmp_path / "ours"))
    config.data.documents, config.model.sequence_length = "separate", LENGTH
    found = [run(trained_loss, 1, config, tmp_path / "part", tmp_path / "ours", size)[0] for size in (1, 2, 3)]
    assert found == pytest.approx([total / count] * 3, rel=FP32_LOSS)
