"""The decoder's logits are those of the training model, also where no family of Hugging Face has such a model."""

from __future__ import annotations

import pytest
import torch

from configs.compose import compose
from inference.decoder import Cache, Decoder, TextBatch
from models import gpt
from models.build import build_model
from parallel import topology
from tests import distributed

VOCAB_SIZE, LENGTH = 100, 12


def _logits(*changes: str) -> tuple[torch.Tensor, torch.Tensor]:
    config = compose(["experiment=gpt_moe_tiny", "training.device=cpu", *changes])
    rank_topology = topology.initialize(config)
    chunks = build_model(config, rank_topology, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        tokens = torch.randint(VOCAB_SIZE, (3, LENGTH), generator=generator)
        expected = gpt.logits(chunks[0].eval(), tokens, VOCAB_SIZE)[:, -1]
        decoder = Decoder.of_chunks(chunks, config, rank_topology, VOCAB_SIZE)
        (whole,) = decoder.prefill_all([TextBatch(tokens, [LENGTH] * 3)])
        # Three tokens one by one, behind beginnings of other lengths: the last row is shorter.
        cache, lengths = Cache(LENGTH), [LENGTH - 3, LENGTH - 3, LENGTH - 5]
        decoder.prefill_all([TextBatch(tokens, lengths, cache)])
        for step in range(3):
            tokens_now = torch.stack([row[at + step] for row, at in zip(tokens, lengths)])
            (last,) = decoder.decode_all([(tokens_now, cache)])
        shorter = gpt.logits(chunks[0], tokens[2:, : LENGTH - 2], VOCAB_SIZE)[:, -1]
    return torch.cat([whole, last]), torch.cat([expected, expected[:2], shorter])


LATENT = (
    *("model.attention=latent", "model.num_query_groups=null", "model.head_dim=8", "model.rotary_head_dim=8"),
    *("model.kv_lora_rank=16", "model.value_head_dim=8"),
)
GROUPS = (*("moe.num_experts=8", "moe.top_k=4", "moe.num_groups=4"), *("moe.group_top_k=3", "moe.group_score_top_k=1"))
CASES = {
    "biases, of Megatron-core's router too": ("model.linear_bias=true",),
    "a window": ("model.sliding_window=4",),
    "a window from the second layer on": ("model.sliding_window=5", "model.sliding_window_from=1"),
    "a window of latent attention": (*LATENT, "model.sliding_window=4"),
    "groups by their best expert": GROUPS,
}


@pytest.mark.parametrize("case", CASES)
def test_the_decoder_is_the_model(case: str) -> None:
    ((logits, expected),) = distributed.run(_logits, 1, *CASES[case])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
