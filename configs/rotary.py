"""`model.rotary_scaling`: scaling of the rotary frequencies for texts longer than those of pretraining, in Hugging
Face's format.

linear: position interpolation (Chen et al. 2023, arXiv:2306.15595). llama3: Llama 3.1 (Grattafiori et al. 2024,
arXiv:2407.21783). yarn: Peng et al. 2023, arXiv:2309.00071, with DeepSeek's attention scale. longrope: Ding et al.
2024, arXiv:2402.13753. models/pointwise/rotary.py computes the frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

REQUIRED = object()  # stands for the default of a key that must be given
LARGEST = 2**31 - 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15


@dataclass(frozen=True)
class Item:
    """The rule for the value of one key of a `rotary_scaling` mapping. `rule` completes "must be" in an error message;
    `fits` tells whether a value is legal; `usual` is a legal value for messages. null means the default, unless the key
    has no default or `nullable` is false."""

    rule: str
    fits: Callable[[Any], bool]
    usual: Any  # a legal value, for messages
    default: Any = REQUIRED
    nullable: bool = True

    def takes(self, value: Any) -> bool:
        """Return whether a value is legal for this key."""
        return self.fits(value) if value is not None else self.default is not REQUIRED and self.nullable


def _at_least(low: float, usual: float, default: Any = REQUIRED) -> Item:
    return Item(f"a number of at least {low:g}", lambda value: _is_number(value) and value >= low, usual, default)


def _above_zero(usual: float, default: Any = REQUIRED) -> Item:
    return Item("a number above 0", lambda value: _is_number(value) and value > 0, usual, default)


def _length(low: int) -> Item:
    return Item(
        f"a whole number from {low} to {LARGEST}", lambda value: type(value) is int and low <= value <= LARGEST, 8192
    )


_FACTORS = Item(
    "a list of numbers above 0, one for each pair of rotated channels",
    lambda value: isinstance(value, list) and bool(value) and all(_is_number(item) and item > 0 for item in value),
    None,
)
FACTOR, LENGTH = _at_least(1, 4.0), "original_max_position_embeddings"
KINDS: dict[str, dict[str, Item]] = {
    "linear": {"factor": FACTOR},
    "llama3": {
        "factor": FACTOR,
        "low_freq_factor": _above_zero(1.0),
        "high_freq_factor": _above_zero(4.0),
        LENGTH: _length(1),
    },
    "yarn": {
        "factor": FACTOR,
        LENGTH: _length(1),
        "beta_fast": _above_zero(32.0, 32.0),
        "beta_slow": _above_zero(1.0, 1.0),
        "attention_factor": _above_zero(1.0, None),
        "mscale": _at_least(0, 1.0, None),
        "mscale_all_dim": _at_least(0, 1.0, None),
        "truncate": Item("true or false", lambda value: type(value) is bool, True, True, nullable=False),
    },
    "longrope": {
        "factor": FACTOR,
        LENGTH: _length(2),
        "short_factor": _FACTORS,
        "long_factor": _FACTORS,
        "attention_factor": _above_zero(1.0, None),
    },
}
NAMES = ", ".join(KINDS)


class Fault(NamedTuple):
    """An error in a `rotary_scaling` mapping: the wrong key (an empty string for the mapping itself), the rule that
    follows the value in an error message, and `mended`, the corrected mapping, if there is one."""

    key: str
    rule: str
    mended: dict[str, Any] | None = None


def kind_of(value: dict[str, Any]) -> Any:
    """Return the kind of scaling that a mapping names as `rope_type`, or as `type` for older versions of
    transformers."""
    return value.get("rope_type", value.get("type"))


def faults(value: Any) -> Iterator[Fault]:
    """Yield the errors in a value of `model.rotary_scaling` that do not concern other keys."""
    if value is None:
        return
    if not isinstance(value, dict):
        yield Fault("", "must be null or a mapping such as {rope_type: linear, factor: 4.0}")
        return
    kind = kind_of(value)
    if kind not in KINDS:
        name = next((name for name in ("rope_type", "type") if name in value), "")
        rule = f"one of {NAMES}" if name else f"have rope_type, one of {NAMES}"
        yield Fault(name, f"must be {rule}" if name else f"must {rule}")
        return
    if "type" in value and value["type"] != kind:
        yield Fault("type", f"must be rope_type ({kind}), whose older name it is", {**value, "type": kind})
    items = KINDS[kind]
    unknown = [name for name in value if name not in ("rope_type", "type", *items)]
    if unknown:
        rule = f"must not have {', '.join(map(str, unknown))}: {kind} has {', '.join(items)}"
        yield Fault("", rule, {name: item for name, item in value.items() if name not in unknown})
    missing = [name for name, item in items.items() if item.default is REQUIRED and value.get(name) is None]
    if missing:
        mended = {**value, **{name: items[name].usual for name in missing}}
        rule = f"must have {', '.join(missing)} for rope_type {kind}"
        yield Fault("", rule, None if None in mended.values() else mended)
    for name, item in items.items():
        if name in value and not item.takes(value[name]):
            usual = {**value, name: item.usual}
            yield Fault(name, f"must be {item.rule}", usual if item.usual is not None else None)
            return
    if missing or unknown:
        return
    full = _full(value)
    if kind == "llama3" and full["high_freq_factor"] <= full["low_freq_factor"]:
        low = full["low_freq_factor"]
        mended = {**value, "high_freq_factor": 4 * low}
        yield Fault("high_freq_factor", f"must be greater than low_freq_factor ({low})", mended)
    if kind == "yarn" and full["beta_fast"] < full["beta_slow"]:
        slow = full["beta_slow"]
        rule = f"must not be less than beta_slow ({slow})"
        yield Fault("beta_fast" if "beta_fast" in value else "", rule, {**value, "beta_fast": slow})


def _full(value: dict[str, Any]) -> dict[str, Any]:
    kind = kind_of(value)
    full: dict[str, Any] = {"rope_type": kind}
    for name, item in KINDS[kind].items():
        given = item.default if value.get(name) is None else value[name]
        if isinstance(given, list):
            full[name] = [float(number) for number in given]
        else:
            full[name] = float(given) if type(given) is int and name != LENGTH else given
    return full


def normalised(value: Any) -> Any:
    """Return a scaling with all keys of its kind, so that equal scalings compare equal; illegal ones unchanged."""
    return _full(value) if isinstance(value, dict) and not any(faults(value)) else value


def _concentration(factor: float, scale: float) -> float:
    """Return YaRN's factor "mscale" (arXiv:2309.00071, equation 22), with DeepSeek's weight of the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def attention_factor(scaling: dict[str, Any] | None) -> float:
    """Return the factor by which a legal scaling multiplies cosines and sines, as in transformers."""
    scaling = normalised(scaling)
    if scaling is None or "attention_factor" not in scaling:
        return 1.0
    if scaling["attention_factor"] is not None:
        return float(scaling["attention_factor"])
    factor = scaling["factor"]
    if scaling["rope_type"] == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(scaling[LENGTH]))
    if scaling["mscale"] and scaling["mscale_all_dim"]:
        return _concentration(factor, scaling["mscale"]) / _concentration(factor, scaling["mscale_all_dim"])
    return _concentration(factor, 1.0)


def switches_at(scaling: dict[str, Any] | None) -> int | None:
    """Return the text length beyond which longrope uses its second list of frequencies; None for other scalings."""
    scaling = normalised(scaling)
    return scaling[LENGTH] if scaling is not None and scaling["rope_type"] == "longrope" else None


def scores_factor(scaling: dict[str, Any] | None) -> float:
    """Return DeepSeek's factor on the attention scores of latent attention, from `mscale_all_dim`; else 1.0."""
    scale = (scaling or {}).get("mscale_all_dim")
    return _concentration(scaling["factor"], scale) ** 2 if scaling and scale else 1.0
