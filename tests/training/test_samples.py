"""The presets end well as a user types them, and every layout continues a prompt with the same words."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference.decoder import Cache, Decoder, TextBatch
from tests import distributed
from tests.tolerances import ORACLE_LOGITS
from tests.training.helpers import make_config
from tests.waits import LONG
from training.callbacks import samples
from training.run import Run

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    "TP2+SP": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "PP2": (2, ["parallel.pipeline=2"]),
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "EP2": (2, ["parallel.expert=2"]),
    "CP2xEP2": (2, ["parallel.context=2", "parallel.expert=2"]),
}


# What no Hugging Face family has, where there is something; said before the first step.
ALONE = {"gpt_moe_tiny": ["model.rotary_fraction=0.5"], "bert_tiny": []}


@pytest.mark.parametrize("model", ALONE)
def test_a_preset_runs_to_its_end(model: str, data: list[str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "train.py",
        f"model={model}",
        f"run_dir={tmp_path}",
        "training.steps=2",
        "training.eval_batches=1",
    ]
    quiet = ["logging.wandb=off", "sample.num_tokens=4", *data, *ALONE[model]]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *quiet], cwd=ROOT, env=env, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("greedy continuation" in done.stdout) == model.startswith("gpt")
    printed = [line for line in done.stdout.splitlines() if line.startswith("no export to Hugging Face: ")]
    assert len(printed) == len(ALONE[model])
    assert all("can represent this model: model.rotary_fraction (0.5; mixtral has 1.0)." in line for line in printed)
    assert re.search(r"validation loss [\d.]+ nats, [\d.]+ (below|above) the unigram entropy", done.stdout)


def _compare_with_training(run: Run) -> None:
    """The decoder's probabilities against those of the training model's own forward pass, in this layout."""
    from training import step

    tokens = torch.randint(
        0, run.vocab_size, (2, run.config.model.sequence_length), generator=torch.Generator().manual_seed(0)
    )
    logits = step.logits(run.engine, {"tokens": tokens})
    with torch.inference_mode(), run.engine.frozen_weights():
        decoder = Decoder.of_chunks(run.engine.bare_chunks, run.config, run.topology, run.vocab_size)
        log_probs, greedy = decoder.score_all([TextBatch(tokens, [tokens.size(1)] * 2)])[0]
        cache = Cache(len(tokens[0]))
        last = decoder.prefill_all([TextBatch(tokens[:, :-1], [tokens.size(1) - 1] * 2, cache)])[0]
    if logits is not None:
        shards = [torch.empty_like(logits) for _ in range(run.topology.tensor.size)]
        torch.distributed.all_gather(shards, logits, group=run.topology.tensor.group)
        full = torch.cat(shards, dim=2)[..., : run.vocab_size]
        expected = full[:, :-1].log_softmax(dim=2).gather(2, tokens[:, 1:, None]).squeeze(2)
        assert (log_probs - expected).abs().max() < ORACLE_LOGITS
        assert torch.equal(greedy, full[:, :-1].argmax(dim=2) == tokens[:, 1:])
        assert (last - full[:, -2]).abs().max() < ORACLE_LOGITS * full.abs().max()


def _continuation(overrides: list[str], ranks: int) -> str:
    from training.callbacks.samples import continue_text
    from training.starting.run_builder import build_run

    with contextlib.ExitStack() as built:
        run = build_run(make_config(overrides, ranks), [], built)
        _compare_with_training(run)
        return (
            continue_text(run, "def run(self", 12, temperature=0.0)
            + "|"
            + continue_text(run, "", 6, temperature=1.0, top_p=0.9)
        )


@pytest.mark.parametrize(
    ("prompt", "most", "answer_tokens"), [("abc", 2, 2), ("abc", 64, 5), ("abcdefgh", 64, 0), ("abc", 0, 0)]
)
def test_a_prompt_stays_whole(prompt: str, most: int, answer_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []
    printed: list[str] = []
    decoder, done = SimpleNamespace(max_length=8), [SimpleNamespace(tokens=[])]
    monkeypatch.setattr(samples, "Decoder", SimpleNamespace(of_chunks=lambda *_: decoder))

    def generate(_: Any, prompts: list[Any], tokens: int, *__: Any) -> list[Any]:
        asked.append((prompts[0], tokens))
        return done

    monkeypatch.setattr(samples, "generate", generate)
    words = SimpleNamespace(encode_prompt=list, decode="".join, eod=0)
    engine = SimpleNamespace(frozen_weights=contextlib.nullcontext, bare_chunks=[])
    config = SimpleNamespace(training=SimpleNamespace(seed=1))
    run: Any = SimpleNamespace(
        tokenizer=words, engine=engine, config=config, topology=None, vocab_size=9, log=printed.append
    )
    assert samples.continue_text(run, prompt, most, temperature=0.0) == ""
    assert asked == ([(list(prompt), answer_tokens)] if answer_tokens else [])
    full = "a prompt of 8 tokens fills the model's 8 learned positions, so it is not continued"
    assert printed == ([full] if len(prompt) == 8 else [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_continues_a_prompt_alike(layout: str, data: list[str], tmp_path: Path) -> None:
    ranks, overrides = LAYOUTS[layout]
    common = ["model=gpt_moe_tiny", f"run_dir={tmp_path}", *data]
    alone = distributed.run(_continuation, 1, common, 1)
    assert distributed.run(_continuation, ranks, [*common, *overrides], ranks) == alone * ranks
