"""The experts of a layer in one tensor, as transformers 5 keeps them in memory and writes them with
save_pretrained(save_original_format=False), read as the tensors of single experts.

X.experts.gate_up_proj [E, 2F, H] has each expert's gate above its up projection, X.experts.down_proj [E, H, F] its down
projection. E experts, F their width, H hidden size.
"""

from __future__ import annotations

import re

from configs.schema import Config, ConfigError
from models.folder import Reader
from models.huggingface.families.rules import Family, Rule, sizes

FUSED = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.\w+\.experts\.(?P<part>gate_up_proj|down_proj)")


def split_fused_experts(reader: Reader, family: Family, config: Config) -> None:
    """Give the rows of each expert the names that the family's rules have for them. Raises ConfigError for a tensor
    that is not of this model's shape."""
    rules: dict[str, Rule] = {
        "gate_up_proj" if len(rule.theirs) == 2 else "down_proj": rule for rule in family.rules if "{e}" in rule.ours
    }
    lengths = sizes(config)
    for name in sorted(reader.names()):
        match = FUSED.fullmatch(name)
        if match is None or match["part"] not in rules:
            continue
        rule = rules[match["part"]]
        shapes = rule.shapes(lengths)
        (columns,) = {shape[1] for shape in shapes}
        expected = (lengths["experts"], sum(shape[0] for shape in shapes), columns)
        if reader.shape(name) != expected:
            raise ConfigError(
                f"{reader.folder}: tensor {name} has shape {list(reader.shape(name))}, but config.json calls for "
                f"{list(expected)}."
            )
        parts = [
            (theirs.format(l=match["layer"], e=expert), shape)
            for expert in range(lengths["experts"])
            for theirs, shape in zip(rule.theirs, shapes, strict=True)
        ]
        reader.split_rows(name, parts)
