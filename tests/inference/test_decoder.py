"""The decoder's logits are those of the training model, also where no family of Hugging Face has such a model."""

from __future__ import annotations

import torch

from configs.compose import compose
from inference.decoder.run import Decoder
from models import gpt
from models.build import build_model
from parallel import topology
from tests import distributed

VOCAB_SIZE, LENGTH = 100, 12


def _logits(*changes: str) -> tuple[torch.Tensor, torch.Tensor]:
    config = compose(["experiment=gpt_moe_tiny", "training.device=cpu", *changes])
    place = topology.initialize(config)
    chunks = build_model(config, place, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        tokens = torch.randint(VOCAB_SIZE, (3, LENGTH), generator=generator)
        expected = gpt.logits(chunks[0].eval(), tokens, VOCAB_SIZE)[:, -1]
        return Decoder(chunks, config, place, VOCAB_SIZE).prefill(tokens, [LENGTH] * 3, None), expected


def test_experts_with_biases() -> None:
    """Megatron-core's router has one too then."""
    ((logits, expected),) = distributed.run(_logits, 1, "model.linear_bias=true")
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
