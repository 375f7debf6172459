"""The portable attention against Megatron-core's DotProductAttention."""

from __future__ import annotations

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from models.attention.layers import ScaledDotProductAttention
from models.transformer_config import transformer_config
from parallel.topology import initialize
from tests.distributed import run
from tests.models.helpers import make_config
from tests.tolerances import FP32_LOSS

SEQUENCE, BATCH, HEADS, HEAD_DIM = 7, 3, 4, 8


def _outputs_and_gradients(causal: bool, num_groups: int) -> list[list[torch.Tensor]]:
    config = make_config(
        {"model": {"num_attention_heads": HEADS, "num_query_groups": num_groups, "head_dim": HEAD_DIM}}
    )
    initialize(config)
    megatron = transformer_config(config)
    mask_type = AttnMaskType.causal if causal else AttnMaskType.padding
    padding = torch.zeros(BATCH, 1, 1, SEQUENCE, dtype=torch.bool)
    padding[0, ..., 4:] = True
    full_mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool() if causal else padding
    results = []
    for module in (DotProductAttention, ScaledDotProductAttention):
        torch.manual_seed(0)
        query = torch.randn(SEQUENCE, BATCH, HEADS, HEAD_DIM, requires_grad=True)
        key, value = (torch.randn(SEQUENCE, BATCH, num_groups, HEAD_DIM, requires_grad=True) for _ in range(2))
        attention = module(config=megatron, layer_number=1, attn_mask_type=mask_type, attention_type="self")
        mask = None if causal and module is ScaledDotProductAttention else full_mask
        output = attention(query, key, value, mask)
        (output * torch.arange(output.numel()).view_as(output) / output.numel()).sum().backward()
        results.append([tensor.detach() for tensor in (output, query.grad, key.grad, value.grad)])
    return results


@pytest.mark.parametrize("num_groups", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_equals_megatron(causal: bool, num_groups: int) -> None:
    for theirs, ours in zip(*run(_outputs_and_gradients, 1, causal, num_groups)[0]):
        torch.testing.assert_close(ours, theirs, rtol=FP32_LOSS, atol=1e-6)


def _dropout_draws() -> tuple[torch.Tensor, torch.Tensor, bool]:
    config = make_config(
        {
            "model": {"num_attention_heads": HEADS, "head_dim": HEAD_DIM, "attention_dropout": 0.5},
            "parallel": {"tensor": 2},
        }
    )
    initialize(config)
    attention = ScaledDotProductAttention(
        config=transformer_config(config), layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"
    )
    torch.manual_seed(0)
    query, key, value = (torch.randn(SEQUENCE, BATCH, HEADS, HEAD_DIM) for _ in range(3))
    before = tensor_parallel.get_cuda_rng_tracker().get_states()
    train = attention(query, key, value, None)
    moved = any(
        not torch.equal(state, before[name])
        for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()
    )
    return train, attention.eval()(query, key, value, None), moved


def test_tensor_ranks_draw_their_own_dropout() -> None:
    (train_0, eval_0, moved_0), (train_1, eval_1, moved_1) = run(_dropout_draws, 2)
    assert moved_0 and moved_1
    assert torch.equal(eval_0, eval_1)
    assert not torch.equal(train_0, train_1)
