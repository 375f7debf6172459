"""What a step is taken with: model chunks, gradient buffers, optimizer and pipeline schedule; built once and closed
once.

The functions over it are in training/step.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)

# isort: split
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.utils import get_model_config

from configs import derived
from configs.schema import Config
from memory.budgets import open_budgets
from memory.host_link import HostLink
from memory.layer_inputs import LayerInputs
from models.build import build_model, family_module
from models.folder import load_logical_folder
from models.parallelize import frozen_weights, parallelize
from moe.layer import layers_of
from moe.watch import RouterWatch
from optim.build import build_optimizer
from optim.grad_norms import GradNorms
from optim.tiers.tiers import tiers_of
from parallel import by_layer
from parallel.dropout import Dropout
from parallel.megatron.ddp import finalize_gradients, release
from parallel.refusal import raise_together
from parallel.topology import Topology
from training.resilience.rewind import Mark
from training.starting.activations import offload_layer_inputs, reserve_offloads
from training.starting.expert_stream import fillings, stream_experts
from training.sums import StepSums


class TierError(RuntimeError):
    """What a rank keeps off the device cannot be read, written or updated any more."""


class Engine:
    """This rank's model chunks with their gradient buffers and optimizer, and the schedule of passes over them.

    `bare_chunks` are the chunks without their wrappers; `extra_losses` names what is minimised beside the
    language-model loss. `offload_bytes`: of the host, that the MoE layers of a step need with each memory strategy.
    """

    def __init__(self, config: Config, topology: Topology, vocab_size: int, device_room: float = math.inf):
        """A collective call. `device_room`: bytes of the device that optimizer state may take. Raises ConfigError."""
        open_budgets(config.memory)
        self.config, self.topology, self.vocab_size = config, topology, vocab_size
        self.host_link = HostLink(topology.device, config.parallel.timeout_seconds)
        self.family = family_module(config)
        self.bare_chunks = build_model(config, topology, vocab_size, streams=derived.streams_experts(config))
        self.chunks = parallelize(config, topology, self.bare_chunks)
        self.optimizer = build_optimizer(config, topology, self.chunks, self.host_link, device_room)
        self._moe_layers = list(layers_of(self.bare_chunks).values())
        self.experts = stream_experts(config, topology, self.bare_chunks, self.optimizer)
        for layer in self._moe_layers:
            layer.expert_compute.link = self.host_link
        self.offload_bytes = reserve_offloads(config, topology, self.host_link)
        self.dropout = Dropout(config, topology, self.bare_chunks)
        self.layer_inputs = offload_layer_inputs(config, topology, self.bare_chunks, self.host_link)
        self.schedule = _pass_order(config, self.layer_inputs, self.host_link)
        _connect(config, self.chunks, self.scale_loss)
        exactly = derived.block_rows(config) is not None
        self.norms = GradNorms(self.optimizer, self.bare_chunks, topology, exactly)
        self.sums = StepSums()
        self._placements = [layer.placement for layer in self._moe_layers if layer.placement is not None]
        self.watch = _watch(config, topology, self.bare_chunks)
        self.extra_losses = ["sentence_loss"] if config.model.sentence_head != "none" else []
        self._buffers = [buffer for chunk in self.bare_chunks for buffer in chunk.buffers()]

    def load_weights(self, folder: Path) -> None:
        """Start from a folder of logical weights (`python -m models.convert import` writes one). Raises ConfigError for
        another model's."""
        off_device = () if self.experts is None else fillings(self.optimizer)
        load_logical_folder(self.bare_chunks, folder, self.config, self.vocab_size, off_device)
        self.optimizer.reload_model_params()

    def settle(self) -> None:
        """Have all weights as the last step leaves them. A collective call. Raises TierError on every rank where a
        rank's update failed."""
        if (tiers := tiers_of(self.optimizer)) is not None:
            tiers.settle()
            raise_together(tiers.problem(), TierError)

    def frozen_weights(self) -> AbstractContextManager[None]:
        """Context for reading weights between steps: gathers that are still due are finished first, dropout is off."""
        self.settle()
        return frozen_weights(self.chunks)

    def begin_passes(self, num_micro_batches: int, forward_only: bool) -> None:
        """The weights stay until the passes over so many micro-batches are over."""
        num_backwards = 0 if forward_only else num_micro_batches
        if self.experts is not None:
            self.experts.begin_passes(num_micro_batches, forward_only)
        if num_backwards:
            if self.layer_inputs is not None:
                self.layer_inputs.begin()
            needs = [self.offload_bytes.get(layer.plan.memory_strategy, 0) for layer in self._moe_layers]
            self.host_link.step.begin(max(needs, default=0))
        for placement in self._placements:
            placement.begin_passes(num_backwards)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale a micro-batch's loss for its backward pass: times fp16's loss scale, over the number of data and
        context parallel ranks. The schedule takes losses for means over these ranks, and gradients are added up over
        them (parallel/megatron/ddp.py)."""
        scaled, ranks = self.optimizer.scale_loss(loss), self.topology.data_context.size
        return scaled if ranks == 1 else scaled * (1.0 / ranks)  # one rank launches nothing for it

    def on_host(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What this rank needs of a micro-batch of the host, which its data rank's context ranks share: the model's
        `on_host`. Also in the loader's thread."""
        return self.family.on_host(self.config, batch, self.topology.context)  # type: ignore[no-any-return]

    def mark(self) -> Mark:
        """What passes change beside gradients, as it is now, to be put back."""
        return Mark(self._buffers, self.optimizer)

    def close(self) -> None:
        """Let go of the model, so that a process may train one after the other."""
        self.host_link.close()
        if (tiers := tiers_of(self.optimizer)) is not None:
            tiers.close()
        release(self.chunks)
        get_moe_layer_wise_logging_tracker().clear()  # it holds a process group


def _pass_order(config: Config, layer_inputs: LayerInputs | None, link: HostLink) -> Callable[..., list[Any]]:
    """The schedule of a step's passes, called as Megatron's."""
    if config.training.pass_order == "by_layer":
        return partial(by_layer.forward_backward, LayerInputs(link, ()) if layer_inputs is None else layer_inputs)
    assert config.training.pass_order == "by_micro_batch", "chosen before there is an engine"
    return get_forward_backward_func()  # type: ignore[no-any-return]


def _connect(
    config: Config, chunks: list[DistributedDataParallel], scale_loss: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Tell Megatron's schedule how to scale the loss and when to reduce gradients and gather weights."""
    settings = get_model_config(chunks[0])
    settings.grad_scale_func = scale_loss
    settings.finalize_model_grads_func = finalize_gradients
    if config.parallel.overlap_grad_reduce:
        settings.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        settings.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    if derived.overlap_param_gather(config):
        settings.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def _one_or_all(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def _watch(config: Config, topology: Topology, bare_chunks: list[Any]) -> RouterWatch | None:
    moe = config.moe
    if moe.num_experts is None:
        return None
    get_moe_layer_wise_logging_tracker().clear()  # one for the process: an earlier run in it may have had other layers
    coefficients = {
        "aux_loss": moe.aux_loss_coeff,
        "sequence_aux_loss": moe.sequence_aux_loss_coeff,
        "z_loss": moe.z_loss_coeff,
    }
    losses = [name for name, coefficient in coefficients.items() if coefficient > 0]
    return RouterWatch(bare_chunks, config.model.num_layers, moe.num_experts, losses, topology.device)
