"""Rotary position embedding (Su et al., arXiv:2104.09864): frequencies, plain or scaled (configs/rotary.py), angles of
positions, and the rotation of queries and keys.

Frequencies and their products with positions are computed on the host in fp64, reduced to one turn, and then stored in
fp32: in fp32 the last bit of a frequency is a hundredth of a radian at position 100,000. Scaled frequencies follow
transformers' modeling_rope_utils.py.

Megatron-core's rotation is about twenty operations on a GPU for each layer; here forward and backward are one function
each, which a GPU runs as one kernel. The order of roundings is Megatron's.

Shapes: s sequence, b batch, g key/value heads of this rank, r query heads for each of them, n = g * r, d channels of a
head, of which the first ones rotate.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from configs import derived
from configs.rotary import LENGTH, attention_factor, normalised, switches_at
from configs.schema import Config
from parallel.fused import fused, product_into

HOST = torch.device("cpu")


class Rotary:
    """The rotary angles of a model's positions, cached for the last length and device."""

    def __init__(self, config: Config) -> None:
        self.factor = attention_factor(config.model.rotary_scaling)  # of cosines and sines
        self.switches_at = switches_at(config.model.rotary_scaling)
        self._config = config
        self._kept: tuple[Any, torch.Tensor] | None = None

    def of_length(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the angles of the positions in a text of `length` tokens: fp32 `[length, 1, 1, rotating channels]`."""
        return self._angles(device, (length, self.switches_at is not None and length > self.switches_at))

    def of_segments(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the rotary angles for texts of at most `length` tokens: `[length or 2 * length, 1, 1, rotating
        channels]`. The second half exists if the model has a second set of frequencies, for texts longer than a certain
        length."""
        sets = [(length, False)] if self.switches_at is None else [(length, False), (length, True)]
        return self._angles(device, *sets)

    def _angles(self, device: torch.device, *sets: tuple[int, bool]) -> torch.Tensor:
        asked = (device, sets)
        if self._kept is None or self._kept[0] != asked:
            with torch.inference_mode(False):
                exact = [
                    angles(length, inverse_frequencies(self._config, HOST, is_long, torch.float64)).to(device)
                    for length, is_long in sets
                ]
                both = torch.cat(exact)
                self._kept = asked, torch.cat([both, both], dim=-1)[:, None, None]
        return self._kept[1]


def angles(length: int, frequencies: torch.Tensor) -> torch.Tensor:
    """Return the angles of positions 0 to `length` - 1, between -pi and pi, fp32 `[length, n]`, on the host.
    `frequencies`: fp64 `[n]`."""
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    whole = torch.outer(positions, frequencies)
    return whole.sub_(whole.div(2 * math.pi).round_().mul_(2 * math.pi)).float()


def inverse_frequencies(
    config: Config, device: torch.device, is_long: bool = False, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the rotary frequencies in radians per position, `[rotating channels / 2]`. `is_long`: those for texts
    longer than the length at which the model's frequencies change."""
    scaling, base, dim = normalised(config.model.rotary_scaling), config.model.rotary_base, derived.rotary_dim(config)
    # Frequencies without scaling are computed on the device, as in Megatron-core.
    steps = torch.arange(0, dim, 2, dtype=dtype, device=device if scaling is None else "cpu")
    powers = base ** (steps / dim)
    return 1.0 / powers if scaling is None else _stretched(powers, scaling, base, dim, is_long).to(device)


def _stretched(powers: torch.Tensor, scaling: dict[str, Any], base: float, dim: int, is_long: bool) -> torch.Tensor:
    kind = scaling["rope_type"]
    if kind == "linear":
        return 1.0 / powers / scaling["factor"]
    if kind == "llama3":
        # Channels of long wavelengths slow down by `factor`, those of short ones do not, and others are in between.
        factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
        plain = 1.0 / powers
        wavelengths = 2 * math.pi / plain
        slowed = torch.where(wavelengths > scaling[LENGTH] / low, plain / factor, plain)
        share = (scaling[LENGTH] / wavelengths - low) / (high - low)
        between = (1 - share) * slowed / factor + share * slowed
        outside = (wavelengths < scaling[LENGTH] / high) | (wavelengths > scaling[LENGTH] / low)
        return torch.where(outside, slowed, between)
    if kind == "yarn":
        return _yarn(powers, scaling, base, dim)
    factors = scaling["long_factor" if is_long else "short_factor"]
    return 1.0 / (torch.tensor(factors, dtype=powers.dtype, device="cpu") * powers)


def _yarn(powers: torch.Tensor, scaling: dict[str, Any], base: float, dim: int) -> torch.Tensor:
    """Return YaRN's frequencies (arXiv:2309.00071, section 3.2): unchanged for channels that rotate more than
    `beta_fast` times within the original length, slowed down below `beta_slow` times, with a ramp between."""

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


# -- rotation ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def tables(angles: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines, and sines with the first half negated, of angles `[s, 1, 1, rotating channels]`: `[s, 1, 1, 1,
    rotating channels]` each, times a factor. Cached, as Megatron-core caches angles."""
    sin = (torch.sin(angles) * factor).to(dtype)
    first, second = sin.chunk(2, dim=-1)
    return (torch.cos(angles) * factor).to(dtype).unsqueeze(2), torch.cat([-first, second], dim=-1).unsqueeze(2)


def _rotate_into(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `x` `[s, b, g, r, d]` and write the result to `out`."""
    num_rotating = cos.size(-1)
    half = num_rotating // 2
    rotating, rotated = x[..., :num_rotating], out[..., :num_rotating]
    crossed = torch.empty_like(rotated)
    product_into(crossed[..., :half], rotating[..., half:], sin[..., :half])
    product_into(crossed[..., half:], rotating[..., :half], sin[..., half:])
    product_into(rotated, rotating, cos)
    rotated.add_(crossed)
    if num_rotating < x.size(-1):
        out[..., num_rotating:].copy_(x[..., num_rotating:])


def _empty_heads(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor like `x` `[s, b, g, r, d]`. On a CPU each head is contiguous for its attention
    kernel; otherwise a head's rows are a power of two bytes apart and fall into few cache sets."""
    if x.device.type != "cpu":
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    s, b, g, r, d = x.shape
    return x.new_empty(b, g, r, s, d).permute(3, 0, 1, 2, 4)


@fused
def _split_forward(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = mixed.split([mixed.size(3) - 2, 1, 1], dim=3)
    results = _empty_heads(query), _empty_heads(key), _empty_heads(value)
    _rotate_into(results[0], query, cos, sin)
    _rotate_into(results[1], key, cos, sin)
    results[2].copy_(value)
    return results


@fused
def _split_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    s, b, g, r, d = query.shape
    mixed = query.new_empty(s, b, g, r + 2, d)
    _rotate_into(mixed[:, :, :, :r], query, cos, -sin)
    _rotate_into(mixed[:, :, :, r : r + 1], key, cos, -sin)
    mixed[:, :, :, r + 1 :].copy_(value)
    return mixed


@fused
def _rotated_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rotate_into(result, x, cos, -sin)
    return result


@fused
def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    result = _empty_heads(x)
    _rotate_into(result, x, cos, sin)
    return result


class _SplitAndRotate(torch.autograd.Function):
    """Autograd function that splits the fused query-key-value projection and rotates queries and keys. It saves only
    the tables of cosines and sines."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return _split_forward(mixed, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        return _split_backward(*grads, *ctx.saved_tensors), None, None


class _Rotate(torch.autograd.Function):
    """Autograd function that rotates heads. It saves only the tables of cosines and sines."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated_back(grad, cos, sin), None, None


def split_and_rotate(
    mixed: torch.Tensor, num_groups: int, head_dim: int, cos_sin: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split Megatron's fused query-key-value projection `[s, b, g * (r + 2) * d]` (per group r queries, key, value)
    into query `[s, b, n, d]` and key `[s, b, g, d]`, both rotated, and value `[s, b, g, d]`."""
    s, b, _ = mixed.shape
    query, key, value = _SplitAndRotate.apply(mixed.view(s, b, num_groups, -1, head_dim), *cos_sin)
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads `[s, b, n, d]` by the cosines and signed sines (first half negated) of their rotary angles."""
    return _Rotate.apply(x.unsqueeze(3), cos, sin).flatten(2, 3)
