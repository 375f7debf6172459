"""Rotary positions of a config.json: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of 5.

A family that descends from Llama gets them from `read_common` and `write_common` (families/llama.py):

* Its table of keys has `rope_theta`, `rope_scaling`, `rope_parameters` and `original_max_position_embeddings`, as in
  COMMON_KEYS. It passes their values to `read_common`; `head_dim` is the number of channels of a head that may rotate.
* DeepSeek-V2 and V3 scale the scores by `mscale_all_dim`, which `model.attention=latent` implies.
* A family that rotates only some channels of each head (Phi-3, Phi-4) has `partial_rotary_factor` in its table; its
  `_read` sets `model.rotary_fraction` to `rotary_fraction(keys)`, and its `_write` writes the key. In other families
  that key must be 1.
* A family with another name for longrope (Phi-3: `su`, and `yarn` too) replaces the name first:
  `read_common({**keys, **renamed(keys, {"su": "longrope", "yarn": "longrope"})})`.
"""

from __future__ import annotations

from typing import Any

from base.errors import ConfigError
from configs.rotary import KINDS, LENGTH, REQUIRED, faults, kind_of, normalised
from configs.schema import Config
from models.huggingface.families.keys import ADVICE, HfConfig, must, show
from models.huggingface.families.kinds import POSITIVE

SECTIONS = ("rope_parameters", "rope_scaling")
TYPES = ("rope_type", "type")
# Keys that transformers never reads: the origin of a model, and a length in linear scaling, which does not use it.
UNREAD = {kind: ("finetuned", *((LENGTH,) if kind == "linear" else ())) for kind in KINDS}


def rotary_base(keys: HfConfig, default: float) -> float:
    """Return the base of the rotary frequencies (theta). `default` is the family's. Raises ConfigError if two sections
    of config.json disagree, or if their rotary positions are not supported."""
    rotary_scaling(keys)
    outside = keys["rope_theta"]
    bases = {name: keys[name].get("rope_theta") for name in SECTIONS if keys[name]}
    for name, base in bases.items():
        if "rope_theta" in keys[name]:
            must(POSITIVE.fits(base), f"{name}.rope_theta", base, f"be {POSITIVE.rule}")
    for name, base in bases.items():
        if None not in (base, outside):
            _must_agree(name, "rope_theta", base, outside)
    usual = default if outside is None else outside
    found = {usual if base is None else base for base in bases.values()} or {usual}
    if len(found) > 1:
        raise _disagree(keys)
    return float(found.pop())


def rotary_scaling(keys: HfConfig) -> dict[str, Any] | None:
    """Return the rotary scaling of a config.json, as our `model.rotary_scaling` in its normal form. Raises ConfigError
    if two sections of config.json disagree, or if their rotary positions are not supported."""
    found = [_scaling(name, keys) for name in SECTIONS if keys[name]]
    if any(other != found[0] for other in found):
        raise _disagree(keys)
    return found[0] if found else None


def rotary_fraction(keys: HfConfig) -> float:
    """Return the fraction of each head's channels that rotates, for a family whose table has `partial_rotary_factor`.
    Raises ConfigError if two sections of config.json disagree."""
    name, share = "partial_rotary_factor", keys["partial_rotary_factor"]
    for section in SECTIONS:
        stated = (keys[section] or {}).get(name)
        if stated is not None and share is not None:
            _must_agree(section, name, stated, share)
        share = share if stated is None else stated
    return 1.0 if share is None else float(share)


def renamed(keys: HfConfig, names: dict[str, str]) -> HfConfig:
    """Return the rotary sections of a config.json, with each type of scaling that is in `names` replaced by its new
    name there."""
    return {
        section: {key: names.get(str(value), value) if key in TYPES else value for key, value in keys[section].items()}
        for section in SECTIONS
        if keys[section]
    }


def write_rotary(config: Config) -> HfConfig:
    """Return the rotary keys of a config.json for transformers 4 and 5, without values that equal their defaults."""
    base, scaling = config.model.rotary_base, normalised(config.model.rotary_scaling)
    if scaling is None:
        return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    items = KINDS[scaling["rope_type"]]
    written = {key: value for key, value in scaling.items() if key not in items or value != items[key].default}
    return {
        "rope_theta": base,
        "rope_parameters": {**written, "rope_theta": base},
        "rope_scaling": {**written, "type": scaling["rope_type"]},
    }


def _must_agree(section: str, key: str, inside: Any, outside: Any) -> None:
    """Raise ConfigError if a key of config.json has different values `inside` and `outside` a section."""
    if inside != outside:
        raise ConfigError(
            f"config.json {section}.{key} ({show(inside)}) and {key} ({show(outside)}) mean the same and must agree. "
            "Remove the wrong one."
        )


def _disagree(keys: HfConfig) -> ConfigError:
    both = " and ".join(f"{name} ({show(keys[name])})" for name in SECTIONS if keys[name])
    return ConfigError(f"config.json {both} mean the same and must agree. Remove the wrong one.")


def _scaling(section: str, keys: HfConfig) -> dict[str, Any] | None:
    parameters = keys[section]
    kind = kind_of(parameters) if any(name in parameters for name in TYPES) else "default"
    for name in TYPES:
        if name in parameters:
            value, supported = parameters[name], ("default", *KINDS)
            fits = isinstance(value, str) and value in supported
            must(fits, f"{section}.{name}", value, f"be one of {', '.join(supported)}: others are not supported")
            must(value == kind, f"{section}.type", value, f"be {section}.rope_type ({kind}): type is its old name")
    rest = {key: value for key, value in parameters.items() if key not in (*TYPES, "rope_theta")}
    share = rest.pop("partial_rotary_factor", None)
    if share is not None and "partial_rotary_factor" not in keys:
        must(share == 1, f"{section}.partial_rotary_factor", share, "be 1: here all channels of a head rotate")
    items = KINDS.get(kind, {})
    unknown = [key for key in rest if key not in items and key not in UNREAD.get(kind, ())]
    if unknown:
        named = " and ".join(f"{section}.{key} ({show(rest[key])})" for key in unknown)
        has = f"{kind} positions have {', '.join(items)}" if items else "plain rotary positions have only rope_theta"
        raise ConfigError(f"config.json {named} {'is' if len(unknown) == 1 else 'are'} not supported: {has}. {ADVICE}")
    if not items:
        return None
    scaling = {"rope_type": kind, **{key: value for key, value in rest.items() if key in items}}
    if LENGTH in items:
        # The length of the first training may be a key outside the section; without it transformers takes the model's.
        outside = keys.get(LENGTH)
        if outside is not None:
            _must_agree(section, LENGTH, scaling.get(LENGTH, outside), outside)
        scaling.setdefault(LENGTH, keys["max_position_embeddings"] if outside is None else outside)
    if kind == "longrope" and scaling.get("factor") is None and type(scaling[LENGTH]) is int:
        scaling["factor"] = max(1.0, keys["max_position_embeddings"] / max(1, scaling[LENGTH]))
    missing = [key for key, item in items.items() if item.default is REQUIRED and key not in scaling]
    must(not missing, section, parameters, f"have {', '.join(missing)} for rope_type {kind}")
    for fault in faults(scaling):
        name = f"{section}.{fault.key}" if fault.key else section
        raise ConfigError(f"config.json {name} ({show(scaling.get(fault.key, parameters))}) {fault.rule}. {ADVICE}")
    if kind == "longrope":
        channels = keys.get("head_dim") or keys["hidden_size"] // keys["num_attention_heads"]
        pairs = int(channels * (rotary_fraction(keys) if "partial_rotary_factor" in keys else 1.0)) // 2
        for key in ("short_factor", "long_factor"):
            must(len(scaling[key]) == pairs, f"{section}.{key}", scaling[key], f"have {pairs} numbers")
    return normalised(scaling)
