"""What is gone through: every preset in its experiment's layout at its real widths, with one layer of each kind per
kind of stage; and layouts of them that no experiment has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from configs import derived
from configs.compose import compose
from configs.overrides import presets_by_group
from configs.schema import Config
from configs.validate import validate
from parallel.pipeline import layers_of_stage

VOCAB_SIZE = 8192  # of presets that leave it to their tokenizer
# Ranks that the experiments name, or a node for those that train on a large batch alone; else one.
WORLD_SIZES = {
    "bert_base": 8,
    "bert_large": 8,
    "deepseek_v3_like": 256,
    "gpt2_124m": 8,
    "llama3_8b": 8,
    "mixtral_8x7b": 32,
    "qwen3_30b_a3b": 16,
}

ALWAYS = ("training.device=cuda", "model.backend=portable", "logging.wandb=off")


@dataclass(frozen=True)
class Case:
    """A preset in a layout; `variant` names what the overrides change, for the table."""

    preset: str
    variant: str = ""
    world_size: int = 1
    overrides: tuple[str, ...] = ()

    def config(self) -> Config:
        """With as few layers and micro-batches as show everything, checked."""
        return _reduced(self)

    def ranks(self) -> list[int]:
        """The first rank of each kind of stage: the first, one in the middle and the last."""
        stages = self.config().parallel.pipeline
        return [stage * self.world_size // stages for stage in sorted({0, stages // 2, stages - 1})]


@cache
def _reduced(case: Case) -> Config:
    asked = [f"experiment={case.preset}", *ALWAYS, *case.overrides]
    whole = compose(asked)
    micro_batches = max(2, whole.parallel.pipeline)  # fills the pipeline
    samples = whole.training.micro_batch_size * derived.data_parallel_size(whole, case.world_size) * micro_batches
    config = compose([*asked, *_fewer_layers(whole), f"training.global_batch_size={samples}"])
    validate(config, case.world_size)
    return config


def _fewer_layers(config: Config) -> list[str]:
    """A layer of each kind that a model chunk has, and as many in all chunks."""
    pattern, parallel = derived.moe_layer_pattern(config), config.parallel
    chunks = [chunk for stage in range(parallel.pipeline) for chunk in layers_of_stage(config, stage)]
    kinds = [list(dict.fromkeys(pattern[layer] for layer in chunk)) for chunk in sorted(chunks, key=lambda c: c.start)]
    most = max(map(len, kinds))
    kept = [kind for of_chunk in kinds for kind in (of_chunk + of_chunk[-1:] * most)[:most]]
    overrides = [f"model.num_layers={len(kept)}"]
    if isinstance(config.moe.layers, list):
        overrides.append(f"moe.layers=[{','.join(map(str, kept))}]")
    return overrides


def presets() -> list[Case]:
    """Every preset as its experiment has it."""
    return [Case(name, "", WORLD_SIZES.get(name, 1)) for name in presets_by_group()["experiment"]]


VARIANTS = [
    Case("gpt_moe_small", "EP4, bf16", 4, ("parallel.expert=4", "training.precision=bf16")),
    Case("gpt_moe_small", "EP2, fp32", 2, ("parallel.expert=2",)),
    Case("bert_moe_small", "bf16", 1, ("training.precision=bf16",)),
    Case("mixtral_8x7b", "VPP2", 32, ("parallel.virtual_pipeline=2",)),
    Case("qwen3_30b_a3b", "4 chunks", 16, ("moe.pipeline_degree=4",)),
    Case(
        "qwen3_30b_a3b",
        "4 chunks, 2 back, recompute",
        16,
        ("moe.pipeline_degree=4", "moe.backward_pipeline_degree=2", "moe.memory_strategy=recompute"),
    ),
    Case("mixtral_8x7b", "2 chunks, offload", 32, ("moe.pipeline_degree=2", "moe.memory_strategy=offload")),
    Case("deepseek_v3_like", "hierarchical", 256, ("moe.all_to_all=hierarchical",)),
    Case("llama3_8b", "documents apart", 8, ("data.documents=separate",)),
    Case("qwen3_30b_a3b", "documents apart", 16, ("data.documents=separate",)),
    Case("deepseek_v3_like", "documents apart", 256, ("data.documents=separate",)),
    Case("gpt_moe_small", "documents apart, window, fp32", 1, ("data.documents=separate", "model.sliding_window=32")),
    Case("mixtral_8x7b", "expert tensor 2", 32, ("parallel.expert=4", "parallel.expert_tensor=2")),
]


def cases(names: list[str]) -> Iterator[Case]:
    """Those of the presets that are named; without names all."""
    for case in (*presets(), *VARIANTS):
        if not names or case.preset in names:
            yield case
