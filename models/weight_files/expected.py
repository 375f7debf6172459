"""Which logical weights a model has, from its configuration alone. Without torch."""

from __future__ import annotations

from configs.schema import Config
from models.blueprint import weights, whole

EXPERTS = ".mlp.experts."  # stands before the number of a routed expert
# Endings of names of weights that stay in fp32 in every precision: a router adds them to its scores, which are fp32.
FP32_NAMES = ("router.expert_bias",)


def logical_shapes(config: Config, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The name and the shape of every logical weight, each routed expert by itself, in the order of Megatron-core's
    modules."""
    found: dict[str, tuple[int, ...]] = {}
    for name, weight in weights(config, vocab_size, whole(config)):
        if weight.is_expert:
            layer, _, rest = name.partition(EXPERTS)
            found |= {f"{layer}{EXPERTS}{expert}.{rest}": weight.shape[1:] for expert in range(weight.shape[0])}
        else:
            found[name] = weight.shape
    return found
