"""On a GPU: the portable backend against the CPU's figures, and TransformerEngine's specs against the portable
backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.attention import mask_slices
from parallel.megatron.startup import transformer_engine_fault
from tests.distributed import run
from tests.models.helpers import make_config, random_batch, run_model
from tests.models.test_layouts import BERT, GPT_MOE, SMALL, Overrides
from tests.models.test_separate import MODEL as WIDE
from tests.models.test_separate import MODELS as SEPARATE_MODELS
from tests.models.test_separate import SEGMENTS, SEPARATE, batch_of, one_by_one
from tests.models.test_separate import VOCAB_SIZE as SEPARATE_VOCABULARY
from tests.models.test_slices import DTYPES, SHAPES, deviation, positions_of
from tests.tolerances import BF16_LOSS, FP32_LOSS

VOCAB_SIZE = 131
MODELS: dict[str, list[Overrides]] = {
    "gpt": [{"model": {"head_dim": 16}}],
    "gpt_moe": [GPT_MOE, {"model": {"head_dim": 16}}],
    "bert": [BERT, {"model": {"head_dim": 16}}],
    "bert_pre_norm": [BERT, {"model": {"head_dim": 16, "norm_position": "pre"}}],
}


def _run(model: str, values: Overrides) -> dict[str, Any]:
    config = make_config(SMALL, *MODELS[model], values)
    return run_model(config, VOCAB_SIZE, random_batch(VOCAB_SIZE, num_samples=4, length=12))


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_gpu_gives_the_losses_of_the_cpu(model: str) -> None:
    portable: Overrides = {"model": {"backend": "portable"}}
    expected = run(_run, 1, model, portable)[0]
    result = run(_run, 1, model, portable, backend="nccl")[0]
    assert result["loss"] == pytest.approx(expected["loss"], rel=FP32_LOSS)


@pytest.mark.gpu
@pytest.mark.skipif(transformer_engine_fault() is not None, reason=f"TransformerEngine: {transformer_engine_fault()}")
@pytest.mark.parametrize("model", MODELS)
def test_transformer_engine_gives_the_losses_of_the_portable_backend(model: str) -> None:
    expected, result = (
        run(_run, 1, model, {"model": {"backend": backend}, "training": {"precision": "bf16"}}, backend="nccl")[0]
        for backend in ("portable", "transformer_engine")
    )
    assert result["weights"].keys() == expected["weights"].keys()
    assert result["loss"] == pytest.approx(expected["loss"], rel=BF16_LOSS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 16])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 2, 4, 2, 64, 64), (70, 1, 2, 2, 24, 16)])
def test_slices_are_one_masked_softmax(shape: tuple[int, ...], window: int | None, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_name() == "pretended" and dtype == torch.float32 and shape[-1] != shape[-2]:
        pytest.skip("the CPU's kernel, which the pretended device runs, has no values narrower than keys")
    found = mask_slices.of_documents(positions_of(shape[1], shape[0]))
    found = found if window is None else mask_slices.windowed(found, window)
    assert deviation(found, shape, dtype, "cuda") < 2 * DTYPES[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["grouped", "window", "latent", "learned"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_separate_on_a_gpu_is_one_by_one_on_the_cpu(model: str, precision: str) -> None:
    if torch.cuda.get_device_name() == "pretended":
        pytest.skip("the pretended device takes the weights of a rank on the CPU, too")
    changes: list[Overrides] = [WIDE, *SEPARATE_MODELS[model], {"model": {"backend": "portable"}}]
    batch = batch_of(SEGMENTS)
    loss, _ = run(one_by_one, 1, make_config(*changes), batch)[0]
    config = make_config(*changes, SEPARATE, {"training": {"precision": precision}})
    packed = run(run_model, 1, config, SEPARATE_VOCABULARY, batch, backend="nccl")[0]
    assert packed["loss"] == pytest.approx(loss, rel=FP32_LOSS if precision == "fp32" else BF16_LOSS)
