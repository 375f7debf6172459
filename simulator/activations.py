"""Activation memory of one micro-batch in a model chunk (the layers that one rank runs without a pipeline transfer).

The blueprint's operations are applied to a memory tape. On a CPU, attention and RMSNorm are torch's implementations; a
GPU's kernels keep less memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from configs import derived
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import CONTEXT_HEADS, INPUT, ModelOperation, Weight, unknown
from models.loss.tiles import BLOCK_NUMBERS, HALF_GROUP, WIDE_GROUP, token_tile
from moe.chunk_plan import STRATEGIES, Plan
from moe.planning import footprint
from moe.planning.inputs import fullest_load, initial_plan
from simulator.context.attention_bytes import AttentionBytes
from simulator.context.shared_rows import shared_rows
from simulator.flops import computes_slices, has_fused_attention
from simulator.memory_tape import MemoryProfile, OperationBytes, Tape, TapeTensor, profile, recomputed
from simulator.sizes import FP32, INT64, Sizes

ROPE_WORK = 2  # times a tensor's bytes: its gradient and the swapped halves
LATENT_ROPE_WORK = 2.75  # the same of Megatron-core's latent attention: rotated halves and their sums
# per token and expert: logits, probabilities, maps; per assignment: expert and score
ROUTER_EXPERT_BYTES, ROUTER_ASSIGNMENT_BYTES = (17, 12)
LABEL_BYTES = 13  # per token: label, mask, target
PLAIN = (
    *("add", "cast", "concatenate", "copy", "gather", "linear", "multiply", "reshape", "row_linear", "scatter"),
    *("select", "sum"),
)
# Kinds of weights, and whether the bytes of their gradients are counted.
MATRICES = {"matrix": True, "output_matrix": True, "norm": False, "bias": False, "router_bias": False}

Held = dict[str, TapeTensor]  # tensors by their names in the blueprint
Rule = Callable[[Tape, ModelOperation, Held], Sequence[TapeTensor]]


class Activations:
    """Simulates the activation memory of a model's operations on one rank, with a rule per kind of operation."""

    def __init__(self, config: Config, vocab_size: int, device: str, plan: Plan | None = None) -> None:
        self.config, self.vocab_size, self.on_gpu = config, vocab_size, device == "cuda"
        self.fused_attention, self.by_slices = has_fused_attention(config, device), computes_slices(config, device)
        self.sizes = Sizes(config)
        self.attention = AttentionBytes(config, self.sizes, shared_rows(config), self.on_gpu)
        self.by_positions = config.data.documents == "separate" or config.parallel.context > 1
        self.tile = token_tile(self.sizes.tokens, config.training.token_tile)
        self.is_one_tile = self.tile == self.sizes.tokens
        self.load = fullest_load(config, device) if derived.is_moe(config) else None
        self.plan, self._to_leave = plan or initial_plan(config), 0
        self._rules: dict[str, Rule] = {
            **dict.fromkeys(PLAIN, self._plain),
            "activation": self._activation,
            "attention": self._attention,
            "column_linear": self._column_linear,
            "dropout": self._dropout,
            "embedding": self._embedding,
            "exchange": self._exchange,
            "expansion": lambda *_: (),  # attention's rule counts its output
            "experts": self._experts,
            "latent_attention": self._latent_attention,
            "norm": self._norm,
            "pooler": self._pooler,
            "recomputed": self._recomputed,
            "rotary": self._rotary,
            "router": self._router,
            "split": self._split,
            "tiled": self._tiled,
            "token_loss": self._token_loss,
            "vocabulary_embedding": self._vocabulary_embedding,
        }

    def profile(self, chunk: blueprint.ModelChunk, leaving: int = 0) -> MemoryProfile:
        """Return the memory of one micro-batch in a model chunk, with the received hidden states and their gradient.

        The inputs of the first `leaving` layers are on the host between forward and backward pass. Raises ValueError
        for an unknown operation, kind of weight or axis.
        """
        tape, state = Tape(), None
        self._to_leave = leaving
        tape.new(self.rotary_bytes)
        if self.config.training.recompute != "full":
            tape.new(self.attention.leaving)
        if not chunk.is_first:
            received = tape.new(self.sizes.own_tokens * self.config.model.hidden_size * self.sizes.element)
            state = tape.hold(received)  # the schedule keeps the received hidden states
        for block in blueprint.blocks(self.config, self.vocab_size, chunk):
            held = {} if state is None else {INPUT: state}
            output = self.run(tape, block.operations, held)
            if state is not None and block.prefix:  # the head frees its input itself
                tape.drop(state)
            state = output
        assert state is not None, "a chunk has layers"
        forward, kept = tape.peak, tape.now
        if self.on_gpu and not chunk.is_last:
            kept -= state.bytes  # the output is freed once it was sent
            tape.drop(state)
        if tape.leaving is not None:
            kept -= tape.leaving.bytes
        tape.peak = 0
        tape.backward(state)
        return MemoryProfile(forward, kept, tape.peak)

    @property
    def rotary_bytes(self) -> int:
        """Bytes per micro-batch for rotary positions: cosines and sines, or the angles in latent attention."""
        if not self.by_positions or self.config.model.position_embedding != "rope":
            return 0
        element = FP32 if self.config.model.attention == "latent" else 2 * self.sizes.element
        return self.sizes.tokens * derived.rotary_dim(self.config) * element

    def run(self, tape: Tape, operations: Sequence[ModelOperation], held: Held) -> TapeTensor:
        """Simulate a part of the model: record operations on the tape, with inputs by name from `held`, to which their
        outputs are added. Returns the last output."""
        for operation in operations:
            if operation.kind not in self._rules:
                unknown("memory", f"kind of operation of {operation.name}", operation.kind)
            outputs = self._rules[operation.kind](tape, operation, held)
            held.update(zip((tensor.name for tensor in operation.outputs), outputs, strict=True))
            tape.drop(*(held[name] for name in operation.frees))
        return held[operations[-1].outputs[-1].name]

    def _apply(self, tape: Tape, operation: ModelOperation, held: Held, takes: OperationBytes) -> list[TapeTensor]:
        """Record one operation on the tape, with the tensors that autograd saves and the gradients that it makes.

        `held`: tensors by name. `takes`: the operation's other bytes.
        """
        name = operation.output.name
        inputs, passes = ([held[each] for each in names] for names in (operation.inputs, operation.passes))
        keeps = [held[each] for each in operation.saved if each != name]
        size, keeps_output = self.sizes.bytes(operation.output), name in operation.saved
        return [tape.apply(size, inputs, passes=passes, keeps=keeps, keeps_output=keeps_output, takes=takes)]

    def _weight_bytes(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of the weights' gradients on one rank; only gradients of matrices count."""
        numbers = 0
        for weight in weights:
            if weight.kind not in MATRICES:
                unknown("memory", f"kind of weight of {weight.name}", weight.kind)
            if MATRICES[weight.kind]:
                numbers += math.prod(blueprint.local_shape(weight, self.sizes.ranks))
        return numbers * self.sizes.element

    # -- rules ---------------------------------------------------------------------------------------------------------

    def _plain(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        return self._apply(tape, operation, held, OperationBytes(weight=self._weight_bytes(operation.weights)))

    def _activation(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        output, (name,) = self.sizes.bytes(operation.output), operation.inputs
        # The backward pass recomputes the gate's activation; on a GPU this happens within one kernel.
        gated = held[name].bytes > output and not self.on_gpu
        return self._apply(tape, operation, held, OperationBytes(work=held[name].bytes + output if gated else None))

    def _split(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        (name,) = operation.inputs
        return tape.split(held[name], *(self.sizes.bytes(tensor) for tensor in operation.outputs))

    def _recomputed(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        def body(inner: Tape, *tensors: TapeTensor) -> TapeTensor:
            return self.run(inner, operation.body, dict(zip(operation.inputs, tensors, strict=True)))

        output = recomputed(tape, body, *(held[name] for name in operation.inputs))
        if operation.name == "layer":
            tape.end_layer(held[operation.inputs[0]], leaves=self._to_leave > 0)
            self._to_leave -= 1
        return [output]

    def _tiled(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        """Compute the feed-forward layer in tiles of a rank's sequence rows.

        The backward pass recomputes each tile, and keeps all weight gradients until they are added to the gradient
        buffers.
        """
        (name,) = operation.inputs
        whole, tile = self.sizes, derived.feed_forward_tile(self.config)
        assert tile is not None, "a layer in tiles"

        def body(inner: Tape, tile_rows: TapeTensor) -> TapeTensor:
            return self.run(inner, operation.body, {name: tile_rows})

        self.sizes = Sizes(self.config, tile)
        tile_rows = TapeTensor(held[name].bytes * tile // whole.own_tokens)
        first = Tape(keeps=False)
        body(first, first.new(tile_rows.bytes))
        again = profile(body, tile_rows)
        self.sizes = whole
        matrices = [self._weight_bytes(each.weights) for each in operation.body]
        others = sum(matrices) - next((size for size in matrices if size), 0)  # the first one's is counted in its pass
        work = held[name].bytes + max(again.forward, again.backward + others)
        return self._apply(tape, operation, held, OperationBytes(during=first.peak - tile_rows.bytes, work=work))

    def _vocabulary_embedding(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        kept, weight = self.sizes.tokens * INT64, self._weight_bytes(operation.weights)
        # Tied to an output layer whose gradient autograd adds: the sum of both gradients is a third tensor.
        work = max(each.uses for each in operation.weights) * weight if self.is_one_tile else weight
        return self._apply(tape, operation, held, OperationBytes(kept=kept, weight=weight, work=work))

    def _embedding(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        kept, weight = self.sizes.tokens * INT64, self._weight_bytes(operation.weights)
        return self._apply(tape, operation, held, OperationBytes(kept=kept, weight=weight))

    def _column_linear(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        sizes, matrix = self.sizes, operation.weights[0]
        output, weight = sizes.bytes(operation.output), self._weight_bytes(operation.weights)
        gathered = (sizes.tokens + sizes.own_tokens) * matrix.shape[1] * sizes.element
        work = gathered + weight if self.config.parallel.sequence else None
        during = output if len(operation.weights) > 1 else 0  # adding the bias allocates a new tensor
        return self._apply(tape, operation, held, OperationBytes(during=during, work=work, weight=weight))

    def _norm(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        numbers = self.sizes.numbers(operation.output)
        sequence_rows, wide = numbers // operation.channels, numbers * FP32
        if self.on_gpu or self.config.model.normalization == "layernorm":
            return self._apply(tape, operation, held, OperationBytes(kept=2 * sequence_rows * FP32))
        # torch's RMSNorm on a CPU consists of several operations: the fp32 input and the normalized one are kept.
        output = self.sizes.bytes(operation.output)
        if self.sizes.element == FP32:
            return self._apply(tape, operation, held, OperationBytes(kept=wide + sequence_rows * FP32, work=3 * wide))
        (name,) = operation.inputs
        takes = OperationBytes(kept=2 * wide + sequence_rows * FP32, during=wide, work=4 * wide - output)
        return [tape.apply(output, [held[name]], takes=takes)]

    def _dropout(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        size = self.sizes.bytes(operation.output)
        kept = size // self.sizes.element if self.on_gpu else size
        return self._apply(tape, operation, held, OperationBytes(kept=kept))

    def _rotary(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        size = self.sizes.bytes(operation.output)
        if self.config.model.attention != "latent":
            return self._apply(tape, operation, held, OperationBytes(during=size, work=ROPE_WORK * size))
        sequence_rows = self.sizes.tokens if self.by_positions else self.sizes.length
        tables = 2 * sequence_rows * operation.channels * self.sizes.element
        takes = OperationBytes(kept=tables, during=2 * size, work=int(LATENT_ROPE_WORK * size))
        return self._apply(tape, operation, held, takes)

    def _pooler(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        gathered = sum(self.sizes.bytes(collective.whole) for collective in operation.collectives)
        return self._apply(tape, operation, held, OperationBytes(during=gathered))

    def _token_loss(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        """Record the output layer with its loss, which compute all gradients tile by tile in the forward pass and keep
        the gradient of the hidden states."""
        sizes, matrix = self.sizes, operation.weights[0]
        hidden_size, element, weight = matrix.shape[1], sizes.element, self._weight_bytes(operation.weights)
        tile_rows = min(self.tile, sizes.predicted)
        numbers = blueprint.local_shape(matrix, sizes.ranks)[0]
        in_group = 1 if self.is_one_tile else WIDE_GROUP if element == FP32 else HALF_GROUP
        group = min(tile_rows * in_group, sizes.predicted)
        during = group * numbers * element + (tile_rows * numbers * FP32 if element < FP32 else 0)
        if self.config.parallel.sequence:
            during += (group + tile_rows) * hidden_size * element
        if not self.is_one_tile and element < FP32:
            during += min(weight, BLOCK_NUMBERS * element)
        made, waits = weight if self.is_one_tile else 0, self.is_one_tile and matrix.uses > 1
        takes = OperationBytes(kept=sizes.tokens * LABEL_BYTES, during=during, made=made, weight_waits=waits)
        (name,) = operation.inputs
        return [tape.apply(sizes.bytes(operation.output), makes=[held[name]], takes=takes)]

    def _attention(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        if self.fused_attention:
            takes = OperationBytes(kept=self.attention.sums)
            if self.by_slices:
                given = [held[name].bytes for name in operation.inputs]
                takes = self._with_leaving(self.attention.of_slices(given, self.sizes.bytes(operation.output)))
            return self._apply(tape, operation, held, takes)
        query, key, value = (held[name] for name in operation.inputs)
        return [self._unfused_attention(tape, query, key, value)]

    def _latent_attention(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        query, latents = (held[name].bytes for name in operation.inputs)
        takes = self._with_leaving(self.attention.of_latents(query, latents, self.sizes.bytes(operation.output)))
        return self._apply(tape, operation, held, takes)

    def _with_leaving(self, takes: OperationBytes) -> OperationBytes:
        """Return `takes` (an operation's bytes) plus key and value rows in flight, freed by the next backward pass.

        With full recomputation, that is the same layer's backward pass. Otherwise one layer's rows are counted for the
        whole micro-batch, so nothing is added here.
        """
        if self.config.training.recompute != "full":
            return takes
        return replace(takes, kept=takes.kept + self.attention.leaving)

    def _exchange(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        """Exchange heads for sequence rows, or back. Each direction copies the data of other ranks to a buffer."""
        sizes = [self.sizes.bytes(tensor) for tensor in operation.outputs]
        whole = max(sum(sizes), sum(held[name].bytes for name in operation.inputs))
        away = whole - whole // self.sizes.ranks[CONTEXT_HEADS]
        last, outputs = len(sizes) - 1, list[TapeTensor]()
        during, work = (3 * away, max(4 * away, whole + away)) if last else (away, whole + away)
        for number, (name, size) in enumerate(zip(operation.inputs, sizes, strict=True)):
            takes = OperationBytes(during=during, work=work) if number == last else OperationBytes()
            outputs.append(tape.apply(size, [held[name]], takes=takes))
        return outputs

    def _unfused_attention(self, tape: Tape, query: TapeTensor, key: TapeTensor, value: TapeTensor) -> TapeTensor:
        """Apply attention that stores its scores in fp32, as separate operations."""
        config, element = self.config, self.sizes.element
        heads = config.model.num_attention_heads // config.parallel.tensor
        scores_size = self.sizes.samples * heads * self.sizes.length**2 * FP32
        held: list[TapeTensor] = []

        def wide(tensor: TapeTensor) -> TapeTensor:
            if element == FP32:
                return tensor
            held.append(tape.apply(tensor.bytes * FP32 // element, [tensor]))
            return held[-1]

        def replace(x: TapeTensor) -> TapeTensor:
            """Apply an operation whose output has the size and the gradient of its input `x`, and free `x`."""
            output = tape.apply(x.bytes, passes=[x])
            tape.drop(x)
            return output

        # keys and values are repeated for each query head
        if derived.num_query_groups(config) < config.model.num_attention_heads:
            held += [tape.apply(query.bytes, [key]), tape.apply(query.bytes, [value])]
            key, value = held
        query, key, value = wide(query), wide(key), wide(value)
        scaled = [tape.apply(query.bytes, [query]), tape.apply(key.bytes, [key])]
        scores = tape.apply(scores_size, scaled, keeps=scaled)
        tape.drop(*scaled)
        scores = replace(scores)  # add the mask
        probs = tape.apply(scores_size, [scores], keeps_output=True)
        tape.drop(scores)
        left = tape.hold(probs)
        if config.model.attention_dropout > 0:
            tape.drop(left)
            left = tape.apply(scores_size, [probs], takes=OperationBytes(kept=scores_size))
        half_scores = scores_size // 2 if element < FP32 else 0
        context = tape.apply(value.bytes, [left, value], keeps=[left, value], takes=OperationBytes(during=half_scores))
        tape.drop(probs, left, *held)
        if element < FP32:
            narrow = tape.apply(context.bytes * element // FP32, [context])
            tape.drop(context)
            context = narrow
        return replace(context)

    def _router(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        moe = self.config.moe
        per_token = ROUTER_EXPERT_BYTES * (moe.num_experts or 0) + ROUTER_ASSIGNMENT_BYTES * moe.top_k
        gathered = sum(self.sizes.bytes(collective.whole) for collective in operation.collectives)
        extra, weight = self.sizes.own_tokens * per_token, self._weight_bytes(operation.weights)
        return self._apply(tape, operation, held, OperationBytes(kept=extra, during=gathered, weight=weight))

    def _experts(self, tape: Tape, operation: ModelOperation, held: Held) -> list[TapeTensor]:
        """Apply the routed experts; their bytes depend on the number of chunks and memory strategy of MoE layers."""
        load, plan, element = self.load, self.plan, self.sizes.element
        assert load is not None, "a model with experts"
        strategy, weight = STRATEGIES[plan.memory_strategy], self._weight_bytes(operation.weights)
        if self.config.parallel.expert > 1:
            extra = footprint.kept_bytes(load, strategy)
            during = footprint.forward_bytes(load, strategy, plan.degree)
            same = plan.degree == plan.backward_degree
            work = footprint.backward_bytes(load, strategy, plan.backward_degree, plan.weight_lag, same)
        else:
            extra, during, work = footprint.local_bytes(load, plan)
            if self.on_gpu:  # the activation's gradient is freed before the weights' gradients are made
                expert_rows = load.assignments // plan.backward_degree
                freed = max(0, expert_rows * (load.width - load.hidden_size) * element)
                work -= min(weight, freed)
        during = max(0, during - self.sizes.bytes(operation.output))
        if derived.block_rows(self.config) is not None:
            # fp32 sums of the experts' gradients, one block's gradients and, at the end, those in the weights' dtype.
            expert = derived.expert_numel(self.config) * element
            primaries = (self.config.moe.num_experts or 0) // self.config.parallel.expert
            work += expert + (primaries * expert * FP32 // element if element < FP32 else 0)
        takes = OperationBytes(kept=extra, during=during, work=work + weight, weight=weight)
        return self._apply(tape, operation, held, takes)
