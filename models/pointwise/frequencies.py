"""The frequencies of rotary positions, plain and stretched (configs/rotary.py), and the angles of positions.

Frequencies, and their products with positions, are computed on the host in fp64, less whole turns, and then kept in
fp32: in fp32 the last bit of a frequency is a hundredth of a radian at position 100,000. Stretched ones follow
transformers' modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from configs import derived
from configs.rotary import LENGTH, attention_factor, normalised, switches_at
from configs.schema import Config

HOST = torch.device("cpu")


class Rotary:
    """The angles of a model's positions, kept for the last number of positions that was asked for."""

    def __init__(self, config: Config) -> None:
        self.factor = attention_factor(config.model.rotary_scaling)  # of cosines and sines
        self.switches_at = switches_at(config.model.rotary_scaling)
        self._config = config
        self._kept: tuple[Any, torch.Tensor] | None = None

    def of_length(self, length: int, device: torch.device) -> torch.Tensor:
        """Angles of the positions of a text of `length` tokens: fp32 `[length, 1, 1, rotating channels]`."""
        return self._angles(device, (length, self.switches_at is not None and length > self.switches_at))

    def of_pieces(self, length: int, device: torch.device) -> torch.Tensor:
        """The same for texts of at most `length` tokens, where there are two sets of frequencies with those of texts
        beyond `switches_at` behind them: `[length or 2 * length, 1, 1, rotating channels]`."""
        sets = [(length, False)] if self.switches_at is None else [(length, False), (length, True)]
        return self._angles(device, *sets)

    def _angles(self, device: torch.device, *sets: tuple[int, bool]) -> torch.Tensor:
        asked = (device, sets)
        if self._kept is None or self._kept[0] != asked:
            with torch.inference_mode(False):
                both = torch.cat([self._exact(*each, device) for each in sets])
                self._kept = asked, torch.cat([both, both], dim=-1)[:, None, None]
        return self._kept[1]

    def _exact(self, length: int, is_long: bool, device: torch.device) -> torch.Tensor:
        return angles(length, inverse_frequencies(self._config, HOST, is_long, torch.float64)).to(device)


def angles(length: int, frequencies: torch.Tensor) -> torch.Tensor:
    """Angles of positions 0 to `length`, between -pi and pi, fp32 `[length, n]` of the host. frequencies: fp64
    `[n]`."""
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    whole = torch.outer(positions, frequencies)
    return whole.sub_(whole.div(2 * math.pi).round_().mul_(2 * math.pi)).float()


def inverse_frequencies(
    config: Config, device: torch.device, is_long: bool = False, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Radians of a position, `[rotating channels / 2]`; `is_long`: of a text beyond `switches_at`."""
    scaling, base, dim = normalised(config.model.rotary_scaling), config.model.rotary_base, derived.rotary_dim(config)
    # plain ones are made on the device, as Megatron-core makes them
    steps = torch.arange(0, dim, 2, dtype=dtype, device=device if scaling is None else "cpu")
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
    return 1.0 / (torch.tensor(factors, dtype=powers.dtype, device="cpu") * powers)


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
    ramp = torch.arange(dim // 2, dtype=powers.dtype, device="cpu")
    kept = 1 - ((ramp - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling["factor"] * powers) * (1 - kept) + 1.0 / powers * kept
