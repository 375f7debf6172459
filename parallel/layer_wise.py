"""The layer-wise schedule: all micro-batches of a step pass one layer before any passes the next (as in GreedySnake).

So the weights of a layer are needed once per pass of the step instead of once per micro-batch, and its gradient is
final once the layer's backward passes are done. The output head runs forward and backward after each micro-batch's last
layer; the embedding runs directly before the first layer, and backward directly after it. memory/layer_inputs.py stores
the tensors between layers, and the input of every layer until its backward pass. Gradients are added in the order of
Megatron-core's schedule, with the same bits, except those of an embedding table that is shared with the head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)

# isort: split
import torch
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.module import Float16Module, float16_to_fp32
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_model_config, make_viewless_tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from memory.layer_inputs import LayerInputs
from parallel.megatron.checkpoints import CheckpointedCall
from parallel.megatron.random_state import PassId, current_pass, set_current_pass
from parallel.pipeline import LayerPass, layer_passes
from parallel.trace import named


class StartedPass(NamedTuple):
    """A model chunk's forward pass up to its first layer. `hidden`: input of the layers [s, b, H], or None if another
    stage sends it; `settings`: keyword arguments of each layer; `end`: computes the chunk's output from that of the
    layers."""

    hidden: torch.Tensor | None
    settings: dict[str, Any]
    end: Callable[[torch.Tensor], Any]


@dataclass
class _MicroBatch:
    """The state of a micro-batch that a step stores between its embedding and its last backward pass."""

    settings: dict[str, Any]
    end: Callable[[torch.Tensor], Any]
    loss: Callable[..., Any]
    pass_id: PassId | None
    embedding: GradientEdge  # through which the first layer's input gets its gradient


def forward_backward(
    store: LayerInputs,
    /,
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    pg_collection: Any = None,
    **others: Any,
) -> list[Any]:
    """Run a step's passes layer-wise, with arguments and results of Megatron-core's `forward_backward_no_pipelining`.

    `store` has the tensors between layers. With `forward_only`, Megatron-core's own function runs. The model must be
    one chunk with a method `begin` (see StartedPass), which `forward_step_func` calls with keyword arguments without
    reading its output.
    """
    if forward_only:
        return schedules.forward_backward_no_pipelining(  # type: ignore[no-any-return]
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            forward_only=True,
            collect_non_loss_data=collect_non_loss_data,
            pg_collection=pg_collection,
            **others,
        )
    model, data_iterator = (each[0] if isinstance(each, list) else each for each in (model, data_iterator))
    step = _LayerWiseStep(store, model, forward_step_func, data_iterator, num_microbatches)
    results = step.run(collect_non_loss_data)
    config = get_model_config(model)
    if config.finalize_model_grads_func is not None:
        force, tokens = others.get("force_all_reduce", False), None
        config.finalize_model_grads_func([model], tokens, pg_collection=pg_collection, force_all_reduce=force)
    return results


class _LayerWiseStep:
    """Runs the forward and backward passes of one step, layer by layer."""

    def __init__(self, store: LayerInputs, model: Any, forward_step: Any, data_iterator: Any, count: int) -> None:
        self._store, self._model, self._count = store, model, count
        self._forward_step, self._iterator = forward_step, data_iterator
        self._config = get_model_config(model)
        assert not self._config.calculate_per_token_loss, "losses are summed by the caller"
        self._chunk, self._is_half = model, False
        while not hasattr(self._chunk, "begin"):
            self._is_half = self._is_half or isinstance(self._chunk, Float16Module)
            self._chunk = self._chunk.module
        (self._block,) = (module for module in self._chunk.modules() if isinstance(module, TransformerBlock))
        self._micro_batches: list[_MicroBatch] = []
        self._calls: dict[tuple[int, int], CheckpointedCall] = {}
        # Both by layer and micro-batch; gradients are those of the layers' outputs.
        self._inputs: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], Any] = {}
        self._results: list[Any] = []

    def run(self, collect_non_loss_data: bool) -> list[Any]:
        """Run all passes of the step. Returns the results in the form of Megatron-core's schedule."""
        self._collects = collect_non_loss_data
        self._store.begin()
        no_sync = self._config.no_sync_func
        passes = [*layer_passes(len(self._block.layers), self._count)]
        for now, following in zip(passes, [*passes[1:], None], strict=True):
            # Gradients are reduced over the data parallel ranks with each layer's last micro-batch.
            is_synced = no_sync is None or now.micro_batch == self._count - 1
            with contextlib.nullcontext() if is_synced else no_sync():
                (self._forward if now.is_forward else self._backward)(now, following)
        return self._results

    def _read(self, now: LayerPass | None) -> list[Any]:
        """Return the stored layer inputs and gradients that the pass `now` will read, if they are stored already."""
        if now is None:
            return []
        kept = [self._inputs] if now.is_forward else [self._gradients, self._inputs]
        return [each[now[1:]] for each in kept if now[1:] in each]

    @named("forward")
    def _forward(self, now: LayerPass, following: LayerPass | None) -> None:
        layer, number = now[1:]
        if layer == 0:
            self._inputs[now[1:]] = self._store.put(self._start(number))
        module, settings = self._block.layers[layer], self._micro_batches[number].settings
        call = self._calls[now[1:]] = CheckpointedCall(
            lambda hidden: module(hidden_states=hidden, context=None, context_mask=None, **settings)[0]
        )
        # With sequence parallelism, tensor ranks have different tokens and, as in Megatron, different random numbers.
        tracker = tensor_parallel.get_cuda_rng_tracker()
        forked = tracker.fork() if self._config.sequence_parallel else contextlib.nullcontext()
        set_current_pass(self._micro_batches[number].pass_id)
        with forked:
            output = call.forward(*self._store.take(*self._read(now), again=True, then=self._read(following)))
        if layer + 1 < len(self._block.layers):
            self._inputs[layer + 1, number] = self._store.put(output)
        else:
            self._gradients[now[1:]] = self._store.put(self._head(number, output))

    def _start(self, number: int) -> torch.Tensor:
        """Start a micro-batch with the caller's forward step. Returns the input of the first layer."""
        if number == 0 and hasattr(self._model, "set_is_first_microbatch"):
            self._model.set_is_first_microbatch()
        # Instead of the chunk, the forward step calls `begin`, which only starts the pass.
        started, loss = self._forward_step(self._iterator, self._chunk.begin)
        hidden = started.hidden
        edge = get_gradient_edge(hidden)
        self._micro_batches.append(_MicroBatch(started.settings, started.end, loss, current_pass(), edge))
        return hidden.detach()  # type: ignore[no-any-return]

    @named("head")
    def _head(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """Run the output head forward and backward for a micro-batch. Returns the gradient of the layers' output."""
        micro_batch, hidden = self._micro_batches[number], hidden.detach().requires_grad_()
        output = hidden
        if self._block.final_layernorm is not None:
            output = make_viewless_tensor(self._block.final_layernorm(output), requires_grad=True, keep_graph=True)
        output = micro_batch.end(output)
        if self._is_half:
            output = float16_to_fp32(output)
        # The last two: the size of context parallelism, and that this is the last pipeline stage.
        output, _ = schedules.forward_step_calc_loss(
            self._model,
            output,
            micro_batch.loss,
            self._config,
            None,
            self._collects,
            self._count,
            self._results,
            self._config.context_parallel_size,
            True,
        )
        del micro_batch.loss, micro_batch.end  # they have references to the batch
        return schedules.backward_step(hidden, output, None, None, self._config)  # type: ignore[no-any-return]

    @named("backward")
    def _backward(self, now: LayerPass, following: LayerPass | None) -> None:
        layer, number = now[1:]
        grad, hidden = self._store.take(*self._read(now), then=self._read(following))
        del self._gradients[now[1:]], self._inputs[now[1:]]
        grad = self._calls.pop(now[1:]).backward(hidden, grad)
        del hidden
        if layer > 0:
            self._gradients[layer - 1, number] = self._store.put(grad)
        else:
            torch.autograd.backward(self._micro_batches[number].embedding, grad)
