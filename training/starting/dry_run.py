"""A warm-up batch of random tokens before the first step: it detects within seconds that memory is too small, and the
error then names settings that fit. Weights, optimizer, random number states and routers are restored afterwards, so the
run computes the same numbers with and without the warm-up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from base.errors import ConfigError
from configs import derived
from configs.schema import Config
from parallel.megatron.optimizer import members
from simulator.run_plan import RunPlan, out_of_memory
from training.engine import Engine
from training.step import Batch, run_again


def wanted(config: Config, device: torch.device) -> bool:
    """Return whether to run the warm-up batch: as `training.dry_run` says or, if it is null, on GPUs only."""
    return device.type == "cuda" if config.training.dry_run is None else config.training.dry_run


def first_batch(engine: Engine, plan: RunPlan) -> None:
    """Run one warm-up batch with the largest number of micro-batches that a step has in flight, while memory for the
    optimizer state is reserved. A collective call. Raises ConfigError with settings that fit if memory runs out."""
    config, device = engine.config, engine.topology.device
    pipeline = config.parallel.pipeline
    count = min(plan.micro_batches, 2 * pipeline if pipeline > 1 else 1)
    try:
        with _restored(engine):
            optimizer_state = torch.empty(_missing_state(engine, plan), dtype=torch.uint8, device=device)
            run_again(engine, made_up_batches(config, count, plan.job.vocab_size, pin=device.type == "cuda"))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            del optimizer_state
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "allocate memory" not in str(error):
            raise
        # A host does not report how many bytes a process may take.
        on_gpu = device.type == "cuda"
        capacity = torch.cuda.get_device_properties(device).total_memory if on_gpu else plan.worst.total
        raise ConfigError(out_of_memory(plan, float(capacity))) from None


def made_up_batches(config: Config, count: int, vocab_size: int, seed: int = 0, pin: bool = False) -> list[Batch]:
    """Return `count` micro-batches of random tokens as host tensors. `pin`: whether to pin their memory. Each sample is
    one document, which needs the most memory."""
    generator = torch.Generator().manual_seed(seed)
    size, length = config.training.micro_batch_size, config.model.sequence_length
    batches = []
    for _ in range(count):
        shape = (size, length)
        batch = {name: torch.randint(0, vocab_size, shape, generator=generator) for name in ("tokens", "labels")}
        # Ones for the share of predicted tokens, spread evenly.
        counts = torch.arange(size * length + 1, dtype=torch.float64) * derived.predicted_share(config) + 1e-6
        batch["loss_mask"] = counts.floor().diff().float().view(size, length)
        if config.data.documents == "separate":
            batch["positions"] = torch.arange(length).expand(size, length).contiguous()
        if config.model.family == "bert":
            batch["types"] = torch.randint(0, 2, (size, length), generator=generator)
            batch["padding_mask"] = torch.ones(size, length, dtype=torch.bool)
            batch["sentence_label"] = torch.randint(0, 2, (size,), generator=generator)
        batches.append({name: value.pin_memory() for name, value in batch.items()} if pin else batch)
    return batches


@contextmanager
def _restored(engine: Engine) -> Iterator[None]:
    """Return a context that restores on exit the state that passes change, and resets the memory statistics."""
    device, snapshot = engine.topology.device, engine.snapshot()
    try:
        yield
        for chunk in engine.chunks:  # not after an error: a failed backward pass leaves buffers that cannot be cleared
            chunk.zero_grad_buffer()
    finally:
        snapshot.roll_back()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _missing_state(engine: Engine, plan: RunPlan) -> int:
    """Return the bytes of optimizer state that this rank's first step has yet to allocate."""
    allocated = 0
    for member in members(engine.optimizer):
        if member.optimizer is not None:
            if member.optimizer.state:
                return 0
            if engine.config.training.precision != "fp32":
                groups = member.optimizer.param_groups
                allocated += sum(p.numel() * p.element_size() for group in groups for p in group["params"])
    return max(0, plan.memory[engine.topology.rank].optimizer - allocated)
