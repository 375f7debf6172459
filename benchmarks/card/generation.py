"""Rungs that generate text: tokens per second with all weights on the device, and with a quarter of them."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.card.ladder import ROOT, Task

GIGABYTES, SMALL = 2.5, {"hidden": 256, "layers": 4, "vocab": 512}  # in bf16: 1.25 billion parameters
PROMPT, SMALL_PROMPT, NEW, SMALL_NEW = 2048, 8, 64, 3  # tokens
BATCHES = (1, 32)
QUARTER = 0.25  # of the weights on the device at once
MIB = 2**20
PREFIX = ".card-model-"
PASS_MIB, SMALL_PASS_MIB = 272.0, 64.0  # of keys and values of a text, and of what a pass over its prompt computes


def resident(task: Task) -> None:
    """Show prefill and decoding at each batch size, weights on the device."""
    _measure(task, BATCHES, None)


def ring(task: Task) -> None:
    """Show decoding of one text with a quarter of the weights on the device."""
    _measure(task, BATCHES[:1], QUARTER)


def _measure(task: Task, batches: tuple[int, ...], share: float | None) -> None:
    from benchmarks.card.sides import device_of
    from benchmarks.kit.made_models import made_config, weights_bytes, write_made_model
    from inference.open_model import open_model

    config = made_config("llama", None if task.is_small else GIGABYTES * 1e9, fixed=SMALL if task.is_small else None)
    for left in ROOT.glob(f"{PREFIX}*"):  # by a call that was killed
        shutil.rmtree(left, ignore_errors=True)
    # Not in /tmp, which may be memory.
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=PREFIX) as folder:
        path = Path(folder) / "model"
        write_made_model(path, config)
        size = weights_bytes(config)
        budget = None
        if share is not None:
            # Beside the weights there are keys, values and what a pass computes.
            budget = share * size / MIB + (SMALL_PASS_MIB if task.is_small else PASS_MIB)
        with open_model(path, precision="bf16", device=device_of().type, budget=budget) as model:
            decoder = model.decoder()
            for batch in batches:
                row = _generated(decoder, model.vocab_size, batch, task.is_small)
                task.show({"model": f"llama, {size / 1e9:.2f} GB in bf16", "share_on_device": share or 1.0, **row})


def _generated(decoder: Any, vocab_size: int, batch: int, is_small: bool) -> dict[str, Any]:
    """Return the seconds to the first token of the batch, and tokens per second after it."""
    import torch

    from inference.generation import generate

    length, new = (SMALL_PROMPT, SMALL_NEW) if is_small else (PROMPT, NEW)
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, vocab_size, (batch, length), generator=generator).tolist()
    times: list[float] = []

    def is_done(tokens: list[int]) -> bool:
        if len(tokens) > len(times):
            times.append(time.perf_counter())
        return False

    generate(decoder, prompts, 2, batch_size=batch)  # what a first pass sets up
    began = time.perf_counter()
    generate(decoder, prompts, new, is_done=is_done, batch_size=batch)
    return {
        "batch": batch,
        "prompt": length,
        "new": new,
        "prefill_s": times[0] - began,
        "decode_tokens_s": batch * (len(times) - 1) / (times[-1] - times[0]),
    }
