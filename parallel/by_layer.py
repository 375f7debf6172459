"""All micro-batches of a step go through a layer before the next: its weights are wanted once per pass of the step and
not once per micro-batch, and its gradient is final when the layer is done (GreedySnake, the vertical schedule).

The head follows each micro-batch's last layer, forward and backward; the embedding's passes lie beside the first
layer's. What one layer hands to the next, and every layer's input until its backward pass, lies in memory/layer_inputs.
Within each layer gradients are added up in the order of the micro-batches, as in Megatron-core's schedule: the same
bits. Only a table that the embedding shares with the head gets its gradients in another order.
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
from parallel.megatron.random_state import Place, place, set_place
from parallel.pipeline import LayerPass, layer_passes
from parallel.trace import named


class BegunPass(NamedTuple):
    """A chunk's forward pass before its layers: hidden [s, b, H] that goes into them (None: the pipeline brings it),
    keywords that each gets, and what makes the chunk's output of what comes out."""

    hidden: torch.Tensor | None
    settings: dict[str, Any]
    end: Callable[[torch.Tensor], Any]


@dataclass
class _MicroBatch:
    """What stays of a micro-batch from its embedding on."""

    settings: dict[str, Any]
    end: Callable[[torch.Tensor], Any]
    loss: Callable[..., Any]
    place: Place | None
    embedding: GradientEdge  # where the gradient of the first layer's input goes


class _Entrance:
    """Stands in a forward step for the chunk, and only begins the pass."""

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk

    def __call__(self, **inputs: Any) -> BegunPass:
        return self._chunk.begin(**inputs)  # type: ignore[no-any-return]


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
    """Megatron-core's `forward_backward_no_pipelining` by layer, with the same arguments and results; `store` keeps
    what lies between the layers. A pass without a backward one is Megatron's own.

    The model is one chunk with `begin` (see BegunPass), which `forward_step_func` calls with keywords and whose
    output it leaves alone.
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
    step = _ByLayerStep(store, model, forward_step_func, data_iterator, num_microbatches)
    results = step.run(collect_non_loss_data)
    config = get_model_config(model)
    if config.finalize_model_grads_func is not None:
        force, tokens = others.get("force_all_reduce", False), None
        config.finalize_model_grads_func([model], tokens, pg_collection=pg_collection, force_all_reduce=force)
    return results


class _ByLayerStep:
    """The passes of one step."""

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
        # By layer and micro-batch; a gradient is that of the layer's output.
        self._inputs: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], Any] = {}
        self._results: list[Any] = []

    def run(self, collect_non_loss_data: bool) -> list[Any]:
        """All of them; what Megatron's schedule returns."""
        self._collects = collect_non_loss_data
        self._store.begin()
        passes = [*layer_passes(len(self._block.layers), self._count)]
        for now, following in zip(passes, [*passes[1:], None], strict=True):
            with self._syncing(now.micro_batch):
                (self._forward if now.is_forward else self._backward)(now, following)
        return self._results

    def _syncing(self, micro_batch: int) -> Any:
        """Gradients are reduced over the data parallel ranks with each part's last micro-batch."""
        no_sync = self._config.no_sync_func
        return contextlib.nullcontext() if no_sync is None or micro_batch == self._count - 1 else no_sync()

    def _read(self, now: LayerPass | None) -> list[Any]:
        """What a pass reads of the store, as far as it is there."""
        if now is None:
            return []
        kept = [self._inputs] if now.is_forward else [self._gradients, self._inputs]
        return [each[now[1:]] for each in kept if now[1:] in each]

    @named("forward")
    def _forward(self, now: LayerPass, following: LayerPass | None) -> None:
        layer, number = now[1:]
        if layer == 0:
            self._inputs[now[1:]] = self._store.put(self._begin(number))
        call = self._calls[now[1:]] = CheckpointedCall(self._layer(*now[1:]))
        # Under sequence parallelism tensor ranks hold other rows: Megatron's block has them draw other numbers.
        tracker = tensor_parallel.get_cuda_rng_tracker()
        forked = tracker.fork() if self._config.sequence_parallel else contextlib.nullcontext()
        set_place(self._micro_batches[number].place)
        with forked:
            output = call.forward(*self._store.take(*self._read(now), again=True, then=self._read(following)))
        if layer + 1 < len(self._block.layers):
            self._inputs[layer + 1, number] = self._store.put(output)
        else:
            self._gradients[now[1:]] = self._store.put(self._head(number, output))

    def _layer(self, layer: int, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        module, settings = self._block.layers[layer], self._micro_batches[number].settings
        return lambda hidden: module(hidden_states=hidden, context=None, context_mask=None, **settings)[0]

    def _begin(self, number: int) -> torch.Tensor:
        """Call the caller's forward step for a micro-batch, up to the first layer's input."""
        if number == 0 and hasattr(self._model, "set_is_first_microbatch"):
            self._model.set_is_first_microbatch()
        begun, loss = self._forward_step(self._iterator, _Entrance(self._chunk))
        hidden = begun.hidden
        edge = get_gradient_edge(hidden)
        self._micro_batches.append(_MicroBatch(begun.settings, begun.end, loss, place(), edge))
        return hidden.detach()  # type: ignore[no-any-return]

    @named("head")
    def _head(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """Both passes of what follows the layers; the gradient of what comes out of them."""
        micro_batch, hidden = self._micro_batches[number], hidden.detach().requires_grad_()
        output = hidden
        if self._block.final_layernorm is not None:
            output = make_viewless_tensor(self._block.final_layernorm(output), requires_grad=True, keep_graph=True)
        output = micro_batch.end(output)
        if self._is_half:
            output = float16_to_fp32(output)
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
        micro_batch.loss = micro_batch.end = _over  # they hold the batch
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


def _over(*_: Any) -> None:
    raise AssertionError("a micro-batch has one head")
