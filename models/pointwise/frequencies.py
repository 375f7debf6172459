"""The frequencies of rotary positions, plain and stretched (configs/rotary.py), and Megatron-core's module with them.

Stretched ones are computed on the host in fp32, in the order of transformers' modeling_rope_utils.py: at position
100,000 the last bit of a frequency is a hundredth of a radian.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from configs import derived
from configs.rotary import LENGTH, attention_factor, normalised
from configs.schema import Config


class Rotary(RotaryEmbedding):
    """Megatron-core's rotary positions with our frequencies: angles `[s, 1, 1, rotating channels]` of s positions.

    With `with_factor` it stands for Megatron-core's YaRN module, and returns what cosines and sines are multiplied by
    beside the angles.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: Config, cp_group: Any, with_factor: bool = False) -> None:
        super().__init__(derived.rotary_dim(config), 1.0, rotary_base=config.model.rotary_base, cp_group=cp_group)
        self.factor = attention_factor(config.model.rotary_scaling) if with_factor else None
        device = self.inv_freq.device
        self.switches_at = switches_at(config)
        self.short = self.long = inverse_frequencies(config, device)
        if self.switches_at is not None:
            self.long = inverse_frequencies(config, device, is_long=True)

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Any:
        """Angles of `max_seq_len` positions from `offset` on."""
        is_long = self.switches_at is not None and max_seq_len + offset > self.switches_at
        self.inv_freq = self.long if is_long else self.short
        return super().get_emb(max_seq_len, offset)

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
        """The angles, alone or with the factor; kept by Megatron-core."""
        angles = super().forward(max_seq_len, *args, **kwargs)
        return angles if self.factor is None else (angles, self.factor)


def switches_at(config: Config) -> int | None:
    """The length of a text beyond which all of its positions turn by longrope's other frequencies; None where there is
    one set of them."""
    scaling = normalised(config.model.rotary_scaling)
    return scaling[LENGTH] if scaling is not None and scaling["rope_type"] == "longrope" else None


def inverse_frequencies(config: Config, device: torch.device, is_long: bool = False) -> torch.Tensor:
    """Radians of a position, fp32 `[rotating channels / 2]`; `is_long`: of a text beyond `switches_at`."""
    scaling, base, dim = normalised(config.model.rotary_scaling), config.model.rotary_base, derived.rotary_dim(config)
    # plain ones are made on the device, as Megatron-core makes them
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device if scaling is None else "cpu")
    powers = base ** (steps / dim)
    return 1.0 / powers if scaling is None else _stretched(powers, scaling, base, dim, is_long).to(device)


def _stretched(powers: torch.Tensor, scaling: dict[str, Any], base: float, dim: int, is_long: bool) -> torch.Tensor:
    kind = scaling["rope_type"]
    if kind == "linear":
        return 1.0 / powers / scaling["factor"]
    if kind == "llama3":
        return _llama3(1.0 / powers, scaling)
    if kind == "yarn":
        return _yarn(powers, scaling, base, dim)
    factors = scaling["long_factor" if is_long else "short_factor"]
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers)


def _llama3(plain: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Slow channels are slowed down by `factor`, quick ones are not, those between in between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / plain
    slowed = torch.where(wavelengths > scaling[LENGTH] / low, plain / factor, plain)
    share = (scaling[LENGTH] / wavelengths - low) / (high - low)
    between = (1 - share) * slowed / factor + share * slowed
    outside = (wavelengths < scaling[LENGTH] / high) | (wavelengths > scaling[LENGTH] / low)
    return torch.where(outside, slowed, between)


def _yarn(powers: torch.Tensor, scaling: dict[str, Any], base: float, dim: int) -> torch.Tensor:
    """Channels that turn more than `beta_fast` times within the first length stay, those that turn less than
    `beta_slow` times are slowed down, with a ramp between (arXiv:2309.00071, section 3.2)."""

    def channel(turns: float) -> float:
        return (dim * math.log(scaling[LENGTH] / (turns * 2 * math.pi))) / (2 * math.log(base))

    first, last = channel(scaling["beta_fast"]), channel(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((ramp - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling["factor"] * powers) * (1 - kept) + 1.0 / powers * kept
