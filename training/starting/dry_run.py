"""A made-up batch before the first step: what does not fit in memory is found out in seconds, and with what would fit.

Weights, optimizer, random numbers and routers are afterwards as they were, so a run is the same with it and without.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from configs import derived
from configs.schema import Config, ConfigError
from parallel.megatron.optimizer import members
from simulator.run_plan import RunPlan, out_of_memory
from training.engine import Engine
from training.step import Batch, run_again


def wanted(config: Config, device: torch.device) -> bool:
    """`training.dry_run`, by default on a GPU."""
    return device.type == "cuda" if config.training.dry_run is None else config.training.dry_run


def first_batch(engine: Engine, plan: RunPlan) -> None:
    """Forward and backward passes of as many micro-batches as are in flight at once, beside room for the optimizer's
    state.

    A collective call. Raises ConfigError with what would fit where memory runs out.
    """
    config, device = engine.config, engine.topology.device
    pipeline = config.parallel.pipeline
    count = min(plan.micro_batches, 2 * pipeline if pipeline > 1 else 1)
    try:
        with _left_as_it_was(engine):
            room = torch.empty(_missing_state(engine, plan), dtype=torch.uint8, device=device)
            run_again(engine, made_up_batches(config, count, plan.vocab_size, pin=device.type == "cuda"))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            del room
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if (
            isinstance(error, RuntimeError)
            and not isinstance(error, torch.OutOfMemoryError)
            and "allocate memory" not in str(error)
        ):
            raise
        raise ConfigError(out_of_memory(plan, _there_is(device, plan))) from None


def made_up_batches(config: Config, count: int, vocab_size: int, seed: int = 0, pin: bool = False) -> list[Batch]:
    """Micro-batches of random tokens, on the host; `pin`: in pinned memory, for a run on a GPU. A sample is one
    document, which is the hardest."""
    generator = torch.Generator().manual_seed(seed)
    size, length = config.training.micro_batch_size, config.model.sequence_length
    batches = []
    for _ in range(count):
        batch = {
            name: torch.randint(0, vocab_size, (size, length), generator=generator) for name in ("tokens", "labels")
        }
        batch["loss_mask"] = _made_up_mask(size * length, derived.predicted_share(config)).view(size, length)
        if config.data.documents == "separate":
            batch["positions"] = torch.arange(length).expand(size, length).contiguous()
        if config.model.family == "bert":
            batch["types"] = torch.randint(0, 2, (size, length), generator=generator)
            batch["padding_mask"] = torch.ones(size, length, dtype=torch.bool)
            batch["sentence_label"] = torch.randint(0, 2, (size,), generator=generator)
        batches.append({name: value.pin_memory() for name, value in batch.items()} if pin else batch)
    return batches


def _made_up_mask(tokens: int, share: float) -> torch.Tensor:
    """Ones for a share of the tokens, spread evenly."""
    counts = (torch.arange(tokens + 1, dtype=torch.float64) * share + 1e-6).floor()
    return (counts[1:] - counts[:-1]).float()


@contextmanager
def _left_as_it_was(engine: Engine) -> Iterator[None]:
    device, mark = engine.topology.device, engine.mark()
    try:
        yield
        for chunk in engine.chunks:  # what fails within a backward pass leaves buffers that nobody can clear
            chunk.zero_grad_buffer()
    finally:
        mark.restore()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _missing_state(engine: Engine, plan: RunPlan) -> int:
    """Bytes of optimizer state that the first step will make."""
    there = 0
    for member in members(engine.optimizer):
        if member.optimizer is not None:
            if member.optimizer.state:
                return 0
            if engine.config.training.precision != "fp32":
                there += sum(
                    p.numel() * p.element_size() for group in member.optimizer.param_groups for p in group["params"]
                )
    return max(0, plan.memory[engine.topology.rank].optimizer - there)


def _there_is(device: torch.device, plan: RunPlan) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(plan.worst.total)  # a host does not say how much a process may take
