"""Stretched rotary positions: the frequencies against transformers' bit for bit, their keys in a config.json in
both spellings, and the modules that use them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention

from base.errors import ConfigError
from configs import rotary
from configs.architecture import architecture
from configs.compose import compose
from configs.schema import Config
from models.attention.layers import RotarySelfAttention
from models.attention.sequence_rows import MicroBatchRows, document_slices
from models.folder import config_from
from models.huggingface import translate
from models.norm import norm_class
from models.pointwise.rotary import Rotary, inverse_frequencies, tables
from models.specs import Backend, _attention
from models.transformer_config import transformer_config

pytestmark = pytest.mark.fast

HOST = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 131072,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1 + i / 64 for i in range(64)], "long_factor": [1 + i for i in range(64)]}
# As published: rope_theta, and a scaling. The numbers are those of Llama 3.1 and 3.2, Qwen, DeepSeek, Kimi and Phi.
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "linear": (100000, {"type": "linear", "factor": 4.0}),
    "llama_3_1": (500000.0, {**LLAMA3, "original_max_position_embeddings": 8192}),
    "llama_3_2": (500000.0, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}),
    "llama3_without_a_length": (500000.0, LLAMA3),
    "qwen": (1000000.0, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "deepseek": (10000, {**YARN, "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "deepseek_unequal": (10000, {**YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 1.5}),
    "one_mscale": (10000, {**YARN, "mscale": 0.707, "mscale_all_dim": 0}),
    "kimi": (50000.0, {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1, "mscale_all_dim": 1}),
    "not_truncated": (150000, {**YARN, "truncate": False, "beta_fast": None}),
    "attention_factor": (10000.0, {**YARN, "attention_factor": 0.75}),
    "phi": (10000.0, {"type": "longrope", "original_max_position_embeddings": 4096, **LONG}),
    "phi_with_factors": (10000.0, {"type": "longrope", "factor": 1, "attention_factor": 1.19, **LONG}),
}


def _read(**changes: Any) -> Config:
    return config_from(translate.read_config(json.loads(json.dumps({**LLAMA, **changes})))[2])


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta, scaling = PUBLISHED[name]
    theirs = transformers.LlamaConfig(**LLAMA, rope_theta=theta, rope_scaling=json.loads(json.dumps(scaling)))
    ours = _read(rope_theta=theta, rope_scaling=scaling)
    compute = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]]
    for is_long in (False, True):
        frequencies, factor = compute(theirs, seq_len=LLAMA["max_position_embeddings"] + 1 if is_long else None)
        assert torch.equal(inverse_frequencies(ours, HOST, is_long), frequencies)
        assert rotary.attention_factor(ours.model.rotary_scaling) == factor

    family, written = translate.write_config(ours)
    again = config_from(translate.read_config(written)[2])
    assert family.model_type == "llama" and architecture(again, 99) == architecture(ours, 99)
    # transformers takes the same from the file, in its old and in its new spelling
    for leave_out in ("rope_scaling", "rope_parameters"):
        file = {key: value for key, value in written.items() if key not in (leave_out, "model_type")}
        frequencies, factor = compute(transformers.LlamaConfig(**json.loads(json.dumps(file))))
        assert torch.equal(inverse_frequencies(ours, HOST), frequencies)
        assert rotary.attention_factor(ours.model.rotary_scaling) == factor


def test_a_scaling_has_one_form() -> None:
    one = _read(rope_theta=7.0, rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768})
    other = _read(rope_parameters={**YARN, "rope_theta": 7, "beta_fast": 32, "mscale": None, "finetuned": True})
    assert one.model.rotary_scaling == other.model.rotary_scaling == rotary.normalised(YARN)
    beside = _read(rope_theta=7.0, rope_scaling={**YARN, "type": "yarn"}, rope_parameters={**YARN, "rope_theta": 7.0})
    assert architecture(beside, 99) == architecture(one, 99)
    outside = _read(rope_scaling={"type": "yarn", "factor": 4.0}, original_max_position_embeddings=32768)
    assert outside.model.rotary_scaling == one.model.rotary_scaling
    typed = compose(["model.rotary_scaling={type: yarn, factor: 4, original_max_position_embeddings: 32768}"])
    assert typed.model.rotary_scaling == one.model.rotary_scaling
    assert rotary.normalised(one.model.rotary_scaling) == one.model.rotary_scaling
    with pytest.raises(ConfigError, match="rope_parameters .* and rope_scaling .* must agree"):
        _read(rope_theta=7.0, rope_scaling=YARN, rope_parameters={**YARN, "factor": 5.0})


def test_scores_are_scaled_for_latent_attention_alone() -> None:
    scaling = rotary.normalised({**YARN, "factor": 40, "mscale_all_dim": 1.0})
    assert rotary.scores_factor(scaling) == pytest.approx((0.1 * 3.6888794541139363 + 1) ** 2)
    assert rotary.scores_factor(rotary.normalised(YARN)) == rotary.scores_factor(None) == 1.0
    text = f"model.rotary_scaling={{rope_type: yarn, factor: 40, {rotary.LENGTH}: 8, mscale: 1, mscale_all_dim: 1}}"
    base = ["experiment=gpt_tiny", "model.attention=latent"]
    latent: Any = transformer_config(compose([*base, text]))
    assert (latent.rope_type, latent.rotary_scaling_factor, latent.mscale_all_dim) == ("rope", 40.0, 1.0)
    latent = transformer_config(compose([*base, text.replace("mscale: 1", "mscale: 2")]))
    assert (latent.rope_type, latent.rotary_scaling_factor, latent.mscale_all_dim) == ("yarn", 40.0, 1.0)


@pytest.mark.parametrize(("scaling", "ours"), [(None, False), ({**LLAMA3, rotary.LENGTH: 8}, False), (YARN, True)])
def test_transformer_engine_turns_where_there_is_no_factor(scaling: Any, ours: bool) -> None:
    config = compose(["experiment=llama3_8b"])
    config.model.rotary_scaling = rotary.normalised(scaling)
    megatron = transformer_config(config)
    norm = norm_class(megatron)
    backend = Backend(norm, norm, DotProductAttention, ColumnParallelLinear, RowParallelLinear, ColumnParallelLinear)
    spec = _attention(backend, megatron, None, config.model, None)  # type: ignore[arg-type]
    assert (spec.module is RotarySelfAttention) == ours
    factor = rotary.attention_factor(config.model.rotary_scaling)
    assert spec.params.get("rotary_factor", 1.0) == factor and (factor != 1.0) == ours


@pytest.mark.parametrize("scaling", [None, YARN, {**LLAMA3, rotary.LENGTH: 8192}, PUBLISHED["phi"][1]])
def test_angles_of_a_million_positions(scaling: Any) -> None:
    """Within 1e-6 of fp64, whose frequencies and products are not rounded."""
    config = _read(rope_theta=10000.0, rope_scaling=scaling)
    length, last = 2**20, torch.tensor([0, 1, 2**17, 2**20 - 2, 2**20 - 1])
    found = Rotary(config).of_length(length, HOST)[last, 0, 0]
    exact = inverse_frequencies(config, HOST, scaling == PUBLISHED["phi"][1], torch.float64)
    exact = torch.outer(last.double(), torch.cat([exact, exact]))
    cos, sin = tables(found[:, None, None], torch.float32)
    first, second = exact.sin().chunk(2, dim=-1)
    assert (cos.squeeze().double() - exact.cos()).abs().max() < 1e-6
    assert (sin.squeeze().double() - torch.cat([-first, second], dim=-1)).abs().max() < 1e-6


def test_plain_frequencies_by_their_formula() -> None:
    exact = 10000.0 ** -(np.arange(0, 128, 2) / 128)
    found = inverse_frequencies(_read(rope_theta=10000.0), HOST, dtype=torch.float64)
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-15)


def test_rows_turn_by_their_positions() -> None:
    """Attention does not depend on a shift of a whole document; its tables of angles do."""
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 6]])
    for scaling, sets in ((None, 1), ({**PUBLISHED["phi"][1], rotary.LENGTH: 3}, 2)):
        config = _read(rope_theta=10000.0, rope_scaling=scaling)
        ours, slices = (
            Rotary(config),
            document_slices(positions, rotary.switches_at(config.model.rotary_scaling)),
        )
        micro_batch_rows = MicroBatchRows(torch.zeros(2, 8, dtype=torch.int64), ours, slices, positions)
        every = ours.of_segments(8, HOST)
        assert len(every) == sets * 8
        is_long = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1]]) * (sets - 1)
        index = (positions + 8 * is_long).t()
        assert micro_batch_rows.angles is not None and torch.equal(micro_batch_rows.angles, every[index][:, :, 0])
        for mine, whole in zip(
            micro_batch_rows.tables(torch.float32, ours.factor), tables(every, torch.float32, ours.factor)
        ):
            assert torch.equal(mine, whole[index][:, :, 0])
