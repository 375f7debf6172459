"""The engine of a run: model chunks, gradient buffers, optimizer and pipeline schedule, built once and closed once.
training/step.py has the functions that take steps with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)

# isort: split
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.utils import get_model_config

from configs import derived
from configs.job import Job
from configs.schema import Config
from memory.budgets import open_budgets
from memory.host_link import HostLink
from memory.layer_inputs import LayerInputs
from models.build import build_model, family_module
from models.folder import load_logical_folder
from models.parallelize import frozen_weights, parallelize
from moe.layer import layers_of
from moe.watch import RouterWatch
from optim.grad_norms import GradNorms
from optim.offload.optimizer import offload_of
from optim.optimizer import build_optimizer
from parallel import layer_wise
from parallel.dropout import Dropout
from parallel.joint_errors import raise_together
from parallel.megatron.ddp import finalize_gradients, release
from parallel.megatron.optimizer import members
from parallel.megatron.random_state import random_states, restore_random_states
from parallel.topology import Topology
from training.starting.offload import fillings, offload_layer_inputs, reserve_offloads, stream_experts
from training.sums import StepSums


class OffloadError(RuntimeError):
    """Raised when state that a rank offloads to host or disk can no longer be read, written or updated."""


class StepSnapshot:
    """Copies of the state, other than gradients, that forward and backward passes change: random number states, the
    routers' biases and token counts, and the fp16 loss scale. `roll_back` restores them, so that a rejected step has no
    effect: later steps are the same whether this run rejects the batch or skips it because an earlier run did."""

    def __init__(self, buffers: Sequence[torch.Tensor], optimizer: Any):
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        self._random = {name: state.clone() for name, state in random_states().items()}
        scalers = {getattr(member, "grad_scaler", None) for member in members(optimizer)} - {None}
        # The scale is a tensor that is replaced, never changed in place: keeping it costs no wait for the device.
        self._scalers = [(scaler, dict(vars(scaler))) for scaler in scalers]

    @torch.no_grad()
    def roll_back(self) -> None:
        """Restore the random number states, router buffers and loss scale as they were when the snapshot was taken."""
        self.roll_back_routers()
        restore_random_states(self._random)
        for scaler, before in self._scalers:
            vars(scaler).update(before)

    @torch.no_grad()
    def roll_back_routers(self) -> None:
        """Restore only the routers' biases and token counts. Used after a step whose fp16 gradients overflowed, because
        such a step keeps only the lowered loss scale."""
        for buffer, before in self._buffers:
            buffer.copy_(before)


class Engine:
    """This rank's model chunks with their gradient buffers and optimizer, and the pipeline schedule that runs passes
    over the chunks.

    `bare_chunks` are the chunks without Megatron's wrappers. `extra_losses` names the losses that are minimised in
    addition to the language-model loss. `offload_bytes` maps each memory strategy of the MoE layers to the host bytes
    that it needs in one step.
    """

    def __init__(self, config: Config, topology: Topology, vocab_size: int, device_capacity: float = math.inf):
        """Build model, optimizer and schedule. A collective call. `device_capacity`: the maximum bytes of optimizer
        state on the device. Raises ConfigError."""
        open_budgets(config.memory)
        self.config, self.topology, self.vocab_size = config, topology, vocab_size
        self.host_link = HostLink(topology.device, config.parallel.timeout_seconds)
        self.family = family_module(config)
        self.bare_chunks = build_model(config, topology, vocab_size, streams=derived.streams_experts(config))
        self.chunks = parallelize(config, topology, self.bare_chunks)
        self.optimizer = build_optimizer(config, topology, self.chunks, self.host_link, device_capacity)
        self._moe_layers = list(layers_of(self.bare_chunks).values())
        self.experts = stream_experts(config, topology, self.bare_chunks, self.optimizer)
        for layer in self._moe_layers:
            layer.copy_through(self.host_link)
        self.offload_bytes = reserve_offloads(config, topology, self.host_link)
        self.dropout = Dropout(config, topology, self.bare_chunks)
        self.layer_inputs = offload_layer_inputs(config, topology, self.bare_chunks, self.host_link)
        if config.training.pass_order == "by_layer":
            layer_inputs = LayerInputs(self.host_link, ()) if self.layer_inputs is None else self.layer_inputs
            self.schedule: Callable[..., list[Any]] = partial(layer_wise.forward_backward, layer_inputs)
        else:
            assert config.training.pass_order == "by_micro_batch", "chosen before there is an engine"
            self.schedule = get_forward_backward_func()
        settings = get_model_config(self.chunks[0])  # of Megatron's schedule
        settings.grad_scale_func = self.scale_loss
        settings.finalize_model_grads_func = finalize_gradients
        if config.parallel.overlap_grad_reduce:
            settings.no_sync_func = _one_or_all([chunk.no_sync for chunk in self.chunks])
            settings.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in self.chunks])
        if derived.overlap_param_gather(config):
            settings.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in self.chunks])
        self.norms = GradNorms(self.optimizer, self.bare_chunks, topology, derived.block_rows(config) is not None)
        self.sums = StepSums()
        self._placements = [layer.placement for layer in self._moe_layers if layer.placement is not None]
        self.watch: RouterWatch | None = None
        if (moe := config.moe).num_experts is not None:
            get_moe_layer_wise_logging_tracker().clear()  # the process' own: an earlier run may have had other layers
            names = ("aux_loss", "sequence_aux_loss", "z_loss")
            used, num_layers = [name for name in names if getattr(moe, f"{name}_coeff") > 0], config.model.num_layers
            self.watch = RouterWatch(self.bare_chunks, num_layers, moe.num_experts, used, topology.device)
        self.extra_losses = ["sentence_loss"] if config.model.sentence_head != "none" else []
        self._buffers = [buffer for chunk in self.bare_chunks for buffer in chunk.buffers()]

    @property
    def job(self) -> Job:
        """Config, number of ranks, vocabulary size and device type that this engine was built for."""
        return Job(self.config, self.topology.world_size, self.vocab_size, self.topology.device.type)

    def load_weights(self, folder: Path) -> None:
        """Load model weights from a folder that models.convert wrote. Raises ConfigError if they belong to another
        model."""
        off_device = () if self.experts is None else fillings(self.optimizer)
        load_logical_folder(self.bare_chunks, folder, self.config, self.vocab_size, off_device)
        self.optimizer.reload_model_params()

    def synchronize(self) -> None:
        """Wait until the last step has updated all weights, including offloaded weights. A collective call. Raises
        OffloadError on every rank if the update failed on any rank."""
        if (offload := offload_of(self.optimizer)) is not None:
            offload.synchronize()
            raise_together(offload.problem(), OffloadError)

    def frozen_weights(self) -> AbstractContextManager[None]:
        """Return a context for reading the weights between steps, in which pending parameter gathers are finished and
        dropout is off."""
        self.synchronize()
        return frozen_weights(self.chunks)

    def begin_passes(self, num_micro_batches: int, forward_only: bool) -> None:
        """Prepare expert streaming, offload memory and expert placement for passes over `num_micro_batches`
        micro-batches."""
        if self.experts is not None:
            self.experts.begin_passes(num_micro_batches, forward_only)
        if not forward_only:
            if self.layer_inputs is not None:
                self.layer_inputs.begin()
            needs = [self.offload_bytes.get(layer.plan.memory_strategy, 0) for layer in self._moe_layers]
            self.host_link.step.begin(max(needs, default=0))
        for placement in self._placements:
            placement.begin_passes(0 if forward_only else num_micro_batches)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's loss multiplied by fp16's loss scale and divided by the number of data and context
        parallel ranks. Megatron's schedule expects means over these ranks, but parallel/megatron/ddp.py sums gradients
        over them."""
        scaled, ranks = self.optimizer.scale_loss(loss), self.topology.data_context.size
        return scaled if ranks == 1 else scaled * (1.0 / ranks)  # one rank launches no kernel for it

    def on_host(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this context-parallel rank's shard of a micro-batch of its data-parallel rank, as host tensors. May
        run in the data loader's thread."""
        return self.family.on_host(self.config, batch, self.topology.context)  # type: ignore[no-any-return]

    def snapshot(self) -> StepSnapshot:
        """Copy the state, other than gradients, that passes change, so that a rejected step can be rolled back."""
        return StepSnapshot(self._buffers, self.optimizer)

    def close(self) -> None:
        """Free the model, so that this process can train a different model."""
        self.host_link.close()
        if (offload := offload_of(self.optimizer)) is not None:
            offload.close()
        release(self.chunks)
        get_moe_layer_wise_logging_tracker().clear()  # it holds a process group


def _one_or_all(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]
