"""Mixtrain's side of benchmarks/speed/longest_context.py: an engine for each configuration and length, built and
closed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from unittest import mock

import parallel  # noqa: F401  before Megatron-core, which warns of what is not installed

# isort: split
import torch

from configs.compose import compose
from configs.schema import KEYS, Config
from configs.validate import validate
from models.initial_weights import distribution
from models.weights import LogicalTensor
from parallel import topology
from simulator.flops import training_flops_per_token
from training.engine import Engine
from training.starting.dry_run import made_up_batches
from training.step import train_step

TILE, BUDGET = 1024, 4096  # tokens
DRAWN_ON_HOST = 2**16  # numbers of a weight on the host that are drawn: one core draws a billion in 20 seconds
ELEMENT_ON_HOST = 12  # bytes a parameter: fp32 master weight and two moments
# The keys of each part. The device's state is by far the most at short lengths, so it goes first.
FEATURES: dict[str, tuple[str, ...]] = {
    "all on the device": (),
    "state on host": ("optimizer.state_device=host", "optimizer.engine=host", "optimizer.early_update=never"),
    "recompute": ("training.recompute=full",),
    "layer inputs on host": ("training.activation_offload=auto",),
    "tiles": (f"training.token_tile={TILE}",),
}
OF_EXPERTS = {"token budget": (f"moe.token_budget={BUDGET}",)} if "moe.token_budget" in KEYS else {}


def config_of(sizes: dict[str, int], length: int, device: str, overrides: Sequence[str] = ()) -> Config:
    """A model of these sizes, one sample of so many tokens a step. Raises ConfigError."""
    experts = {"num_experts", "top_k"} & set(sizes)
    of_model = [f"model.{name}={value}" for name, value in sizes.items() if name not in ("num_experts", "top_k")]
    of_moe = [f"moe.{name}={sizes[name]}" for name in sorted(experts)]
    if experts:
        of_moe += [f"moe.ffn_hidden_size={sizes['ffn_hidden_size']}", "moe.pipeline_degree=1"]
    config = compose(
        [
            *("experiment=llama3_8b", "parallel=single", *of_model, *of_moe, f"model.sequence_length={length}"),
            f"data.vocab_size={sizes['vocab_size']}",
            *("model.tie_embeddings=true", "training.micro_batch_size=1", "training.global_batch_size=1"),
            *("training.precision=bf16", f"training.device={device}", "training.recompute=none", *overrides),
        ]
    )
    validate(config, 1)
    return config


def training_flops(sizes: dict[str, int], length: int) -> float:
    """Return the model's FLOPs of a step, without recomputation."""
    return length * training_flops_per_token(config_of(sizes, length, "cpu"), sizes["vocab_size"])


class MixtrainSide:
    """Trains one configuration after the other."""

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        self._sizes, self._device = sizes, device.type
        self._ladder = FEATURES | (OF_EXPERTS if "num_experts" in sizes else {})
        self.features = list(self._ladder)
        self._topology = topology.initialize(config_of(sizes, 256, self._device))
        self._engine: Engine | None = None
        self.num_parameters = _count(sizes)

    def begin(self, feature: int, length: int) -> Callable[[], float]:
        """Return a function that takes a step of `length` tokens with `feature + 1` features and returns its loss."""
        config = config_of(self._sizes, length, self._device, self._keys(feature))
        vocab_size = self._sizes["vocab_size"]
        with mock.patch("models.initial_weights.fill", draw_in_place):
            engine = self._engine = Engine(config, self._topology, vocab_size)
        batches = made_up_batches(config, 1, vocab_size, pin=self._device == "cuda")
        numbers = itertools.count(1)
        return lambda: train_step(engine, batches, next(numbers)).loss

    def end(self) -> None:
        """Close the engine, also of a failed step."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        with contextlib.suppress(Exception):  # what a step that ran out of memory left undone
            engine.synchronize()
        engine.close()

    def close(self) -> None:
        """Leave the job."""
        topology.destroy()

    def host_bytes(self, feature: int, length: int) -> float:
        """Of state, and of the inputs of all layers."""
        state = ELEMENT_ON_HOST * self.num_parameters if feature >= self.features.index("state on host") else 0
        kept = feature >= self.features.index("layer inputs on host")
        return state + (2 * self._sizes["num_layers"] * self._sizes["hidden_size"] * length if kept else 0)

    def _keys(self, feature: int) -> list[str]:
        return [key for name in self.features[: feature + 1] for key in self._ladder[name]]


def _count(sizes: dict[str, int]) -> int:
    hidden, heads, groups, head = (
        sizes[name] for name in ("hidden_size", "num_attention_heads", "num_query_groups", "head_dim")
    )
    experts = sizes.get("num_experts", 1)
    attention = hidden * head * (2 * heads + 2 * groups)
    feed_forward = 3 * hidden * sizes["ffn_hidden_size"] * experts + (hidden * experts if experts > 1 else 0)
    return int(sizes["num_layers"] * (attention + feed_forward + 2 * hidden) + hidden * (sizes["vocab_size"] + 1))


def draw_in_place(item: LogicalTensor, config: Config) -> None:
    """Draw a weight of the right distribution where it is: a billion take a minute on a host, and are not the run's."""
    mean, std = distribution(item.name, item.kind, config)
    if std == 0:
        item.local.fill_(mean)
    elif item.local.device.type != "cpu" or not item.local.is_contiguous():
        item.local.normal_(mean, std)
    else:
        first, *rest = item.local.view(-1).split(DRAWN_ON_HOST)
        first.normal_(mean, std)
        for chunk in rest:  # the same numbers again
            chunk.copy_(first[: len(chunk)])
