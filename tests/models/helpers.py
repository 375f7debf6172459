"""Run a model once in any layout, and return its loss, logits and gradients in logical form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from checkpoint.logical.reader import open_logical
from configs.architecture import for_use
from configs.schema import Config
from models.attention.sequence_rows import SLICES, gather_rows
from models.build import build_model, family_module
from models.parallelize import mark_tensor_parallel
from models.weight_files.writer import MAX_FILE_BYTES, TensorSpec, Writer
from models.weights import gather_logical, load_logical
from parallel.topology import destroy, initialize, leave_layout

NUM_MICRO_BATCHES = 2
Batch = dict[str, torch.Tensor]


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write tensors to a folder as a model's weights."""
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    writer = Writer(path, specs, max_file_bytes)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()


def make_config(*overrides: dict[str, dict[str, Any]]) -> Config:
    """A Config with the given sections' keys replaced, e.g. `{"model": {"num_layers": 4}}`; later overrides win."""
    config = Config()
    for section_values in overrides:
        for section, values in section_values.items():
            target = getattr(config, section)
            assert is_dataclass(target)
            names = {field.name for field in fields(target)}
            for key, value in values.items():
                assert key in names, f"unknown key {section}.{key}"
                setattr(target, key, value)
    return config


def random_batch(vocab_size: int, num_samples: int, length: int, seed: int = 0) -> Batch:
    """A batch with every key that GPT and BERT read; some samples end in padding."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randint, size=(num_samples, length), generator=generator)
    padding_mask = torch.ones(num_samples, length, dtype=torch.bool)
    padding_mask[0, length - 3 :] = False
    return {
        "tokens": draw(0, vocab_size),
        "labels": draw(0, vocab_size),
        "loss_mask": (torch.rand(num_samples, length, generator=generator) < 0.6).float() * padding_mask,
        "types": draw(0, 2),
        "padding_mask": padding_mask,
        "sentence_label": torch.randint(0, 2, (num_samples,), generator=generator),
    }


def run_model(
    config: Config, vocab_size: int, batch: Batch, load: Callable[[list[torch.nn.Module]], None] | None = None
) -> dict[str, Any]:
    """Build the model in the process group's layout, load weights, and run one forward and backward pass of `batch`.

    The batch is split over data parallel ranks and micro-batches. Returns the mean loss per predicted token plus extra
    losses (`loss`), full logits of this rank's samples where this rank has the last stage (`logits`), and all weights
    and gradients by logical name (`weights`, `gradients`).
    """
    topology = initialize(config)
    family = family_module(config)
    chunks = build_model(config, topology, vocab_size)
    mark_tensor_parallel(chunks)
    if load is not None:
        load(chunks)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks]
    num_tokens = batch["loss_mask"].sum().to(topology.device)
    share = len(batch["tokens"]) // (topology.data.size * NUM_MICRO_BATCHES)
    batch_slices = [slice((topology.data.rank * NUM_MICRO_BATCHES + i) * share, None) for i in range(NUM_MICRO_BATCHES)]
    whole = [{key: value[row][:share] for key, value in batch.items()} for row in batch_slices]
    of_host = [family.on_host(config, each, topology.context) for each in whole]
    micro_batches = [
        {key: value.to(topology.device) if isinstance(value, torch.Tensor) else value for key, value in each.items()}
        for each in of_host
    ]

    def step(with_loss: bool, iterator: Any, model: torch.nn.Module) -> tuple[Any, Callable[[Any], Any]]:
        micro_batch = next(iterator)

        def mean_loss(output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss_sum, extra = family.loss(output, micro_batch)
            # The schedule divides by the number of micro-batches, DDP by the number of data parallel ranks.
            loss = loss_sum / num_tokens * NUM_MICRO_BATCHES * topology.data.size + sum(extra.values())
            return loss, {"loss": loss.detach().clone()}  # the schedule divides in place

        def keep_logits(output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            logits = output[0] if isinstance(output, tuple) else output
            slices = [torch.empty_like(logits) for _ in range(topology.tensor.size)]
            torch.distributed.all_gather(slices, logits.contiguous(), group=topology.tensor.group)
            logits = torch.cat(slices, dim=-1)[..., :vocab_size]
            if topology.context.size > 1:
                logits = gather_rows(logits[0], micro_batch[SLICES].sequence_rows, topology.context, share)
            return torch.zeros((), device=topology.device), {"logits": logits}

        if with_loss:
            return family.forward(model, micro_batch), mean_loss
        micro_batch = {key: value for key, value in micro_batch.items() if key != "labels"}
        return family.forward(model, micro_batch), keep_logits

    def run(with_loss: bool) -> list[dict[str, torch.Tensor]]:
        iterators = [iter(micro_batches) for _ in wrapped]
        return get_forward_backward_func()(
            forward_step_func=functools.partial(step, with_loss),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=NUM_MICRO_BATCHES,
            seq_length=batch["tokens"].size(1) * (share if topology.context.size > 1 else 1),
            micro_batch_size=1 if topology.context.size > 1 else share,
            forward_only=not with_loss,
        )

    with torch.no_grad():
        logits = [result["logits"] for result in run(with_loss=False)]
    losses = [result["loss"] for result in run(with_loss=True)]
    finalize_model_grads(wrapped)
    loss = torch.stack(losses).mean() if losses else torch.zeros((), device=topology.device)
    torch.distributed.all_reduce(loss)
    # Each context rank has a share of the sum, which the schedule multiplies by their number afterwards.
    loss /= topology.data.size * topology.tensor.size
    return {
        "loss": loss.item(),
        "logits": torch.cat(logits).cpu() if logits else None,
        "weights": {name: weight.cpu() for name, weight in gather_logical(chunks)},
        "gradients": {name: grad.cpu() for name, grad in gather_logical(chunks, gradient)},
        "data_rank": topology.data.rank,
    }


def opened_logits(path: Path, batch: Batch) -> torch.Tensor:
    """Return the logits `[b, s, vocab_size]` in fp32 of a training model with the weights at a path."""
    given = {key: value for key, value in batch.items() if key != "labels"}
    reader = open_logical(path)
    config = for_use(reader.config)
    config.training.precision, config.training.device, config.model.backend = "fp32", "cpu", "portable"
    joined = torch.distributed.is_initialized()
    topology = initialize(config)
    try:
        with torch.inference_mode():
            chunks = build_model(config, topology, reader.vocab_size, fill=False)
            load_logical(chunks, reader.get)
            output = family_module(config).forward(chunks[0].eval(), given)
            logits = output if config.model.family == "gpt" else output[0]
            return logits[..., : reader.vocab_size].clone()
    finally:
        leave_layout() if joined else destroy()


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient that DDP accumulated for a parameter; buffers have none."""
    return getattr(tensor, "main_grad", torch.zeros_like(tensor))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)).item()
