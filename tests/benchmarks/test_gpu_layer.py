"""What benchmarks/gpu_layer.py counts: kernels that overlap, floating-point operations, sizes of the layers."""

from __future__ import annotations

import pytest

from benchmarks.gpu_layer import layer_flops, length, make_config, overlap
from training.report.timeline import merged

pytestmark = pytest.mark.fast


def test_intervals_that_touch_become_one() -> None:
    assert merged([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0), (0.5, 1.5)]) == [(0.0, 4.0), (5.0, 6.0)]
    assert length([(0.0, 2.0), (1.0, 3.0)]) == 3.0
    assert merged([]) == [] and length([]) == 0.0


@pytest.mark.parametrize(
    ("communication", "computation", "share"),
    [
        ([(0.0, 4.0)], [(1.0, 3.0)], 0.5),
        ([(0.0, 4.0)], [(4.0, 8.0)], 0.0),
        ([(1.0, 2.0), (5.0, 8.0)], [(0.0, 3.0), (2.0, 6.0)], 0.5),
        ([(1.0, 3.0), (2.0, 4.0)], [(0.0, 9.0)], 1.0),
        ([(0.0, 4.0)], [], 0.0),
        ([], [(0.0, 4.0)], None),
    ],
)
def test_overlap_of_communication_with_computation(
    communication: list[tuple[float, float]], computation: list[tuple[float, float]], share: float | None
) -> None:
    assert overlap(communication, computation) == share


def test_sizes_and_operations_are_those_of_the_published_models() -> None:
    mixtral = make_config("mixtral_8x7b", 1, 8192, small=False)
    assert (mixtral.model.hidden_size, mixtral.moe.num_experts, mixtral.moe.ffn_hidden_size) == (4096, 8, 14336)
    # Forward and twice as many backward: three matrices of each of two experts, and the router, two for each product.
    assert layer_flops(mixtral) == 3 * 2 * 8192 * (2 * 3 * 4096 * 14336 + 4096 * 8)
    deepseek = make_config("deepseek_v3_like", 1, 8192, small=False)
    assert layer_flops(deepseek) == 3 * 2 * 8192 * ((8 + 1) * 3 * 7168 * 2048 + 7168 * 32)


@pytest.mark.parametrize(("world_size", "experts"), [(1, 32), (2, 64), (8, 256)])
def test_a_rank_holds_at_most_32_experts_of_deepseek(world_size: int, experts: int) -> None:
    config = make_config("deepseek_v3_like", world_size, 8192, small=False)
    assert (config.moe.num_experts, config.parallel.expert) == (experts, world_size)
    assert make_config("qwen3_30b_a3b", world_size, 8192, small=False).moe.num_experts == 128
