"""Systems that train a model on this process's device: Mixtrain, transformers and a plain script."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import parallel  # noqa: F401  before Megatron-core, which warns of what is not installed

# isort: split
import torch

from benchmarks.card import plain
from benchmarks.speed.mixtrain_side import draw_in_place
from configs import derived
from configs.schema import Config
from parallel import topology
from training.engine import Engine
from training.starting.dry_run import made_up_batches
from training.step import train_step

BATCHES = 4  # other tokens in each step
Batch = dict[str, torch.Tensor]


@dataclass
class Side:
    """A system with a model. `step` takes an optimizer step on its next batch and returns the loss; `copied` returns
    the bytes copied to the device and from it since the side was built."""

    system: str
    step: Callable[[], float]
    notes: str = ""
    copied: Callable[[], tuple[int, int]] = lambda: (0, 0)


def device_of() -> torch.device:
    """Return the GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def joined(config: Config) -> Iterator[topology.Topology]:
    """Open a job of one process with this config's layout."""
    run_topology = topology.initialize(config)
    try:
        yield run_topology
    finally:
        topology.destroy()


@contextlib.contextmanager
def mixtrain(config: Config, run_topology: topology.Topology) -> Iterator[Side]:
    """Open the engine of a training without its callbacks, its weights drawn on the device."""
    vocab_size = vocabulary(config)
    with mock.patch("models.initial_weights.fill", draw_in_place):
        engine = Engine(config, run_topology, vocab_size)
    count = derived.num_micro_batches(config, 1)
    made = [batches_of(config, count, seed) for seed in range(BATCHES)]
    given, numbers, link = itertools.cycle(made), itertools.count(1), engine.host_link
    try:
        yield Side(
            "mixtrain",
            lambda: train_step(engine, next(given), next(numbers)).loss,
            copied=lambda: (link.up.num_bytes, link.down.num_bytes),
        )
        engine.synchronize()
    finally:
        engine.close()


def vocabulary(config: Config) -> int:
    """Return the vocabulary size of a config that sets it."""
    size = config.data.vocab_size or config.model.vocab_size
    assert size is not None
    return size


def batches_of(config: Config, count: int, seed: int) -> list[Batch]:
    """Return micro-batches of random tokens, the same for every system."""
    return made_up_batches(config, count, vocabulary(config), seed=seed, pin=torch.cuda.is_available())


@contextlib.contextmanager
def rival(system: str, config: Config, sizes: plain.LlamaSizes, is_small: bool) -> Iterator[Side]:
    """Open transformers' Llama or the plain one; on a GPU each layer is compiled by itself."""
    device = device_of()
    with device:
        model: Any = plain.PlainLlama(sizes) if system == "plain script" else _transformers(sizes, config, is_small)
    model.to(device)  # a pretended device makes nothing in place
    plain.draw(model)
    model.train()
    layers = model.model.layers
    if not is_small:
        torch._dynamo.config.recompile_limit = 4 * len(layers)  # a layer may be compiled for its number
        for i in range(len(layers)):
            layers[i].compile()
    loss_of = model if system == "plain script" else _loss_of_transformers(model)
    step = plain.training_step(model, loss_of, device)
    count = derived.num_micro_batches(config, 1)
    batches = itertools.cycle([_joined(batches_of(config, count, seed)) for seed in range(BATCHES)])
    try:
        yield Side(system, lambda: step(next(batches)), "layers compiled" if not is_small else "not compiled")
    finally:
        torch._dynamo.reset()


def _joined(batches: Sequence[Batch]) -> Batch:
    if len(batches) != 1:
        raise ValueError(f"a rival takes one micro-batch a step, not {len(batches)}")
    return batches[0]


def _transformers(sizes: plain.LlamaSizes, config: Config, is_small: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.ffn_hidden_size,
            num_attention_heads=sizes.num_attention_heads,
            num_key_value_heads=sizes.num_query_groups,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocab_size,
            max_position_embeddings=config.model.sequence_length,
            tie_word_embeddings=True,
            rms_norm_eps=sizes.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": sizes.rotary_base},
            # A pretended device has no autocast for torch's attention.
            attn_implementation="eager" if is_small else "sdpa",
            use_cache=False,
        )
    )


def _loss_of_transformers(model: Any) -> Callable[..., torch.Tensor]:
    def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens, labels=labels, shift_labels=labels).loss
        return loss

    return loss_of
