"""What a folder is where its config.json does not say it: its family, and which heads its weights have.

Nothing is guessed that cannot be checked: keys, names and shapes of all tensors must then be those of the family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from configs.schema import ConfigError
from models.huggingface.families.keys import HfConfig, show
from models.huggingface.families.rules import Family

# What transformers calls the classes of one family, behind the family's own name.
CLASS = re.compile(r"(\w+?)(Model|LMHeadModel|DoubleHeadsModel|For[A-Z]\w*)")
# Heads that transformers' classes put on a model for other tasks than predicting tokens.
OTHER_HEADS = re.compile(r"(classifier|score|qa_outputs|multiple_choice_head\.summary)\.(weight|bias)")

Names = Callable[[], set[str]]  # of the folder's tensors, which are asked for only where they are needed


def identify(hf: HfConfig, names: Names, families: Mapping[str, Family]) -> tuple[HfConfig, list[str]]:
    """A config.json with what the folder's tensors add to it, and a line for the user on each thing that was taken from
    elsewhere. Raises ConfigError where the family cannot be told."""
    notes: list[str] = []
    if hf.get("model_type") is None:
        model_type, because = _model_type(hf, names, families)
        hf = {**hf, "model_type": model_type}
        notes.append(f"config.json has no model_type: the folder is read as {model_type}, because of {because}")
    model_type = hf["model_type"]
    family = families.get(model_type) if isinstance(model_type, str) else None
    if family is not None and family.class_by_tensors is not None:
        settled = family.class_by_tensors(hf, names)
        if settled is not None:
            said = hf.get("architectures")
            notes.append(
                f"config.json has {'no architectures' if not said else f'architectures ({show(said[0])})'}: the folder "
                f"is read as {settled}, by its tensors"
            )
            hf = {**hf, "architectures": [settled]}
    return hf, notes


def _model_type(hf: HfConfig, names: Names, families: Mapping[str, Family]) -> tuple[str, str]:
    known = {name.replace("_", ""): name for name in families}
    classes = hf.get("architectures")
    if isinstance(classes, list) and classes and all(isinstance(name, str) for name in classes):
        found = {match[1].lower() if (match := CLASS.fullmatch(name)) else name for name in classes}
        if len(found) == 1 and found <= known.keys():
            return known[found.pop()], f"architectures ({classes[0]})"
    else:
        there = sorted(names())
        telling = {
            family.model_type: next((name for name in there if re.fullmatch(family.telling, name)), None)
            for family in families.values()
            if family.telling is not None
        }
        told = {model_type: name for model_type, name in telling.items() if name is not None}
        if len(told) == 1:
            ((model_type, name),) = told.items()
            return model_type, f"tensor {name}"
    raise ConfigError(
        f"config.json has no model_type, and neither architectures ({show(classes)}) nor the tensors' names say what "
        f"the model is: add it. It must be one of {', '.join(families)}."
    )
