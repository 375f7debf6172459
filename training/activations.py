"""What one micro-batch's pass through a part of the model keeps and takes: the model's operations, as models/ has them, on a tape.

Shapes in the comments: T tokens of a micro-batch (of one sample s of them), of which a rank has T / tensor under sequence
parallelism outside of the linear layers; H hidden size, F width of this rank's part of a feed-forward layer, V rows of its vocabulary.
On a CPU, attention and RMSNorm are those that torch has there; a GPU's kernels keep less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from configs import derived
from configs.schema import Config
from models.build import padded_vocab_size
from moe import blocks, footprint
from moe.blocks import SPARE_ROWS
from moe.load import Shape
from moe.plan import STRATEGIES, Load, Plan
from parallel.dtypes import DTYPES
from training.flops import has_fused_attention
from training.tape import Function, Profile, Tape, Tensor, recomputed

ELEMENT_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32, INT64 = 4, 8
ROPE_WORK = 2.75  # times a tensor's bytes: the turned halves and their sums in the backward pass
ROUTER_EXPERT_BYTES, ROUTER_PAIR_BYTES = 17, 12  # of a token: logits, probabilities, maps; chosen experts with their scores
LOCAL_PAIR_BYTES = 56  # of a pair that does not travel: its indices
LABEL_BYTES = 13  # of a token: label, mask, target


@dataclass(frozen=True)
class Part:
    """Consecutive layers on one rank: 1 for an MoE layer, 0 for a dense one; with the embedding before and the head after them."""

    layers: tuple[int, ...]
    is_first: bool
    is_last: bool


class Activations:
    """The operations of one rank's parts of the model, in bytes."""

    def __init__(self, config: Config, vocab_size: int, device: str, plan: Plan | None = None) -> None:
        model, parallel = config.model, config.parallel
        self.config, self.on_gpu = config, device == "cuda"
        self.fused_attention = has_fused_attention(config, device)
        self.tensor, self.sequence = parallel.tensor, parallel.sequence
        self.element = ELEMENT_SIZES[config.training.precision]
        self.samples, self.length = config.training.micro_batch_size, model.sequence_length
        self.tokens = self.samples * self.length
        self.own_tokens = self.tokens // self.tensor if self.sequence else self.tokens
        self.hidden = model.hidden_size
        self.heads, self.groups = model.num_attention_heads // self.tensor, derived.num_query_groups(config) // self.tensor
        self.head_dim = derived.head_dim(config)
        self.vocab_rows = padded_vocab_size(vocab_size, self.tensor) // self.tensor
        self.row = self.hidden * self.element  # bytes of one token's hidden state
        self.state = self.own_tokens * self.row
        self.whole = self.tokens * self.row
        self.load = moe_load(config, device) if derived.is_moe(config) else None
        self.plan = plan or moe_plan(config)

    # -- the parts -----------------------------------------------------------------------------------------------------

    def profile(self, part: Part) -> Profile:
        """What a micro-batch takes in one part of the model, with the state that comes in and, at the end, its gradient."""
        tape = Tape()
        tied = part.is_first and part.is_last and self.config.model.tie_embeddings
        state = self._embedding(tape, tied) if part.is_first else tape.hold(tape.new(self.state))  # the schedule holds what it received
        for is_moe in part.layers:
            layer = self._layer(bool(is_moe))
            after = recomputed(tape, layer, state) if self.config.training.recompute == "full" else layer(tape, state)
            tape.drop(state)
            state = after
        output = self._head(tape, state, tied) if part.is_last else state
        forward, kept = tape.peak, tape.now
        if self.on_gpu and not part.is_last:
            kept -= output.bytes  # what was sent on is let go
            tape.drop(output)
        tape.peak = 0
        tape.backward(output)
        return Profile(forward, kept, tape.peak)

    def _embedding(self, tape: Tape, tied: bool) -> Tensor:
        model = self.config.model
        weight = self.vocab_rows * self.row
        ids = self.tokens * INT64
        # Tied: the sum of both gradients is a third one.
        state = tape.apply(self.whole, extra=ids, weight=weight, work=2 * weight if tied else weight)

        def add(state: Tensor, rows: int) -> Tensor:
            other = tape.apply(self.whole, extra=ids, weight=rows * self.row)
            both = tape.apply(self.whole, passes=[state, other])
            tape.drop(state, other)
            return both

        if model.family == "bert":
            state = add(state, 2)
        if model.position_embedding == "learned":
            state = add(state, model.sequence_length)
        if self.samples > 1:
            state = self._replace(tape, state, self.whole)
        if self.sequence:
            own = tape.apply(self.state, [state])
            tape.drop(state)
            state = own
        if model.family == "bert":
            state = self._then(tape, self._norm, state)
        return self._dropout(tape, state)

    def _head(self, tape: Tape, state: Tensor, tied: bool) -> Tensor:
        model, inner = self.config.model, state
        if model.norm_position == "pre":
            inner = self._norm(tape, state)
        if model.family == "bert":
            if model.sentence_head != "none":
                pooled = tape.apply(self.samples * self.row, [inner], during=self.whole if self.sequence else 0)
                tape.drop(pooled)
            dense = tape.apply(self.state, [inner], keeps=[inner], weight=self.hidden * self.row)
            active = tape.apply(self.state, [dense], keeps=[dense])
            normed = self._norm(tape, active)
            tape.drop(dense, active)
        else:
            normed = tape.hold(inner)
        # Until the loss is there, the hidden state and the logits are held.
        logits = self._column(tape, normed, self.vocab_rows, model.family == "bert", waits=tied)
        wide = logits if self.element == FP32 else tape.apply(self.tokens * self.vocab_rows * FP32, [logits])
        loss = tape.apply(self.tokens * FP32, keeps=[wide], extra=self.tokens * LABEL_BYTES, in_place=wide)
        tape.drop(normed, wide, *([state] if inner is not state else []), inner)
        if wide is not logits:
            tape.drop(logits)
        if model.family == "bert" and model.sentence_head != "none":
            total = tape.apply(FP32, [loss, pooled])
            tape.drop(loss)
            return total
        return loss

    def _layer(self, is_moe: bool) -> Function:
        attention = self._latent_attention if self.config.model.attention == "latent" else self._attention

        def pre_norm(tape: Tape, state: Tensor) -> Tensor:
            normed = self._norm(tape, state)
            attended = attention(tape, normed)
            tape.drop(normed)
            middle = self._add(tape, attended, state)
            tape.drop(attended)
            normed = self._norm(tape, middle)
            output = self._experts(tape, normed) if is_moe else self._feed_forward(tape, normed)
            result = self._add(tape, output, middle, biased=not is_moe)
            tape.drop(normed, output, middle)
            return result

        def post_norm(tape: Tape, state: Tensor) -> Tensor:
            attended = attention(tape, state)
            added = self._add(tape, attended, state)
            middle = self._norm(tape, added)
            tape.drop(attended, added)
            output = self._experts(tape, middle) if is_moe else self._feed_forward(tape, middle)
            added = self._add(tape, output, middle, biased=not is_moe)
            result = self._norm(tape, added)
            tape.drop(output, added, middle)
            return result

        return pre_norm if self.config.model.norm_position == "pre" else post_norm

    # -- attention -----------------------------------------------------------------------------------------------------

    def _attention(self, tape: Tape, x: Tensor) -> Tensor:
        model = self.config.model
        head = self.tokens * self.head_dim * self.element
        query_size, key_size = self.heads * head, self.groups * head
        bias = model.qkv_bias or model.linear_bias
        mixed = self._column(tape, x, (self.heads + 2 * self.groups) * self.head_dim, bias)
        query, key, value = tape.split(mixed, query_size, key_size, key_size)
        held = [mixed]

        def then(tensor: Tensor, result: Tensor) -> Tensor:
            if tensor in held:
                held.remove(tensor)
                tape.drop(tensor)
            held.append(result)
            return result

        if 1 < self.groups < self.heads:
            query = then(query, tape.apply(query_size, [query]))  # the heads of a group do not lie apart alike
        if model.qk_norm:
            query = then(query, self._norm_heads(tape, query, self.heads))
            key = then(key, self._norm_heads(tape, key, self.groups))
        if model.position_embedding == "rope":
            query, key = then(query, self._rotate(tape, query)), then(key, self._rotate(tape, key))
        context = self._attended(tape, query, key, value)
        output = self._row(tape, context, self.heads * self.head_dim)
        tape.drop(context, *held)
        return output

    def _attended(self, tape: Tape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.config.training.recompute == "selective":
            return recomputed(tape, self._attend, query, key, value)
        return self._attend(tape, query, key, value)

    def _latent_attention(self, tape: Tape, x: Tensor) -> Tensor:
        """Queries, and keys and values, each through a narrow layer; one rotating key for all heads."""
        model, own, token = self.config.model, self.own_tokens * self.element, self.tokens * self.element
        rotating, value_dim, rank = model.rotary_head_dim, model.value_head_dim, model.kv_lora_rank

        def narrow(width: int) -> Tensor:
            part = self._column(tape, x, width // self.tensor)
            if self.tensor == 1:
                return part
            whole = tape.apply(token * width, [part])
            tape.drop(part)
            if not self.sequence:
                return whole
            mine = tape.apply(own * width, [whole])
            tape.drop(whole)
            return mine

        query_rank = model.q_lora_rank
        low_query = x if query_rank is None else narrow(query_rank)
        low = narrow(rank + rotating)
        low_keys, turning = tape.split(low, own * rank, own * rotating)
        held = [low]
        if self.sequence:
            turning = tape.apply(token * rotating, [turning])
            held.append(turning)
        if query_rank is not None:
            held.append(low_query)
            low_query = self._norm(tape, low_query, self.own_tokens, query_rank)
            held.append(low_query)
        low_keys = self._norm(tape, low_keys, self.own_tokens, rank)
        held.append(low_keys)
        head = self.heads * token
        queries = self._column(tape, low_query, self.heads * (self.head_dim + rotating), width=query_rank or self.hidden)
        both = self._column(tape, low_keys, self.heads * (self.head_dim + value_dim), width=rank)
        plain, turned = tape.split(queries, head * self.head_dim, head * rotating)
        plain_keys, values = tape.split(both, head * self.head_dim, head * value_dim)
        turned, turning = self._rotate(tape, turned, rotating), self._rotate(tape, turning, rotating)
        query = tape.apply(head * (self.head_dim + rotating), passes=[plain, turned])
        key = tape.apply(query.bytes, [turning], passes=[plain_keys])
        value = tape.apply(values.bytes, passes=[values])
        tape.drop(queries, both, turned, turning)
        context = self._attended(tape, query, key, value)
        output = self._row(tape, context, self.heads * value_dim)
        tape.drop(context, query, key, value, *held)
        return output

    def _rotate(self, tape: Tape, tensor: Tensor, channels: int | None = None) -> Tensor:
        channels = channels or int(self.head_dim * self.config.model.rotary_fraction)
        tables = 2 * self.length * channels * self.element
        return tape.apply(tensor.bytes, [tensor], extra=tables, during=2 * tensor.bytes, work=int(ROPE_WORK * tensor.bytes))

    def _attend(self, tape: Tape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.fused_attention:
            sums = self.tokens * self.heads * FP32
            return tape.apply(
                value.bytes * query.bytes // key.bytes, [query, key, value], keeps=[query, key, value], extra=sums, keeps_output=True
            )
        # The scores are made, one by one, in fp32.
        scores_size = self.samples * self.heads * self.length**2 * FP32
        held: list[Tensor] = []

        def wide(tensor: Tensor) -> Tensor:
            if self.element < FP32:
                held.append(tape.apply(tensor.bytes * FP32 // self.element, [tensor]))
                return held[-1]
            return tensor

        if self.groups < self.heads:  # keys and values are repeated for each query head
            held += [tape.apply(query.bytes, [key]), tape.apply(query.bytes, [value])]
            key, value = held
        query, key, value = wide(query), wide(key), wide(value)
        scaled = [tape.apply(query.bytes, [query]), tape.apply(key.bytes, [key])]
        scores = tape.apply(scores_size, scaled, keeps=scaled)
        tape.drop(*scaled)
        scores = self._replace(tape, scores, scores_size)  # the mask is added
        weights = tape.apply(scores_size, [scores], keeps_output=True)
        tape.drop(scores)
        left = tape.hold(weights)
        if self.config.model.attention_dropout > 0:
            tape.drop(left)
            left = tape.apply(scores_size, [weights], extra=scores_size)
        copy = scores_size // 2 if self.element < FP32 else 0
        context = tape.apply(value.bytes, [left, value], keeps=[left, value], during=copy)
        tape.drop(weights, left, *held)
        if self.element < FP32:
            narrow = tape.apply(context.bytes * self.element // FP32, [context])
            tape.drop(context)
            context = narrow
        return self._replace(tape, context, context.bytes)

    # -- feed-forward layers -------------------------------------------------------------------------------------------

    def _feed_forward(self, tape: Tape, x: Tensor) -> Tensor:
        width = derived.ffn_hidden_size(self.config) // self.tensor
        if self.config.training.recompute == "selective":
            return recomputed(tape, lambda inner, x: self._mlp(inner, x, width), x)
        return self._mlp(tape, x, width)

    def _mlp(self, tape: Tape, x: Tensor, width: int) -> Tensor:
        model = self.config.model
        size, gated = self.tokens * width * self.element, model.activation == "swiglu"
        hidden = self._column(tape, x, width * (2 if gated else 1))
        if model.linear_bias:
            hidden = self._replace(tape, hidden, hidden.bytes)
        if gated:
            gate, up = tape.split(hidden, size, size)
            factors = [tape.apply(size, [gate], keeps=[gate]), tape.apply(size, passes=[up])]
            active = tape.apply(size, factors, keeps=factors)
            tape.drop(*factors)
        else:
            active = tape.apply(size, [hidden], keeps=[hidden])
        tape.drop(hidden)
        output = self._row(tape, active, width)
        tape.drop(active)
        return output

    def _experts(self, tape: Tape, x: Tensor) -> Tensor:
        """An MoE layer: the router, the routed experts (moe/footprint.py where they are on several ranks), the shared expert."""
        moe, load, plan = self.config.moe, self.load, self.plan
        assert load is not None and moe.num_experts is not None
        kept = self.own_tokens * (ROUTER_EXPERT_BYTES * moe.num_experts + ROUTER_PAIR_BYTES * moe.top_k)
        router = tape.apply(self.own_tokens * moe.num_experts * FP32, [x], keeps=[x], extra=kept, weight=moe.num_experts * self.row)
        source, split = x, derived.expert_tensor_size(self.config)
        if split > 1:
            source = tape.apply(split * self.state, [x])
        strategy = STRATEGIES[plan.memory_strategy]
        experts = moe.num_experts // self.config.parallel.expert
        weight = experts * (load.hidden_columns + load.width) * self.row
        if self.config.parallel.expert > 1:
            extra = footprint.kept_bytes(load, strategy)
            during = footprint.forward_bytes(load, strategy, plan.degree)
            same = plan.degree == plan.backward_degree
            work = footprint.backward_bytes(load, strategy, plan.backward_degree, plan.weight_lag, same)
        else:
            extra, during, work = local_experts(load, plan, self.on_gpu)
        routed = tape.apply(
            source.bytes,
            [source, router],
            keeps=[source],
            extra=extra,
            during=max(0, during - source.bytes),
            work=work + weight,
            weight=weight,
        )
        tape.drop(router)
        if split > 1:
            part = tape.apply(self.state, [routed])
            tape.drop(source, routed)
            routed = part
        if moe.shared_expert_ffn_hidden_size is None:
            return routed
        shared = self._mlp(tape, x, moe.shared_expert_ffn_hidden_size // self.tensor)
        both = tape.apply(self.state, passes=[routed, shared])
        tape.drop(routed, shared)
        return both

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _column(self, tape: Tape, x: Tensor, features: int, bias: bool = False, waits: bool = False, width: int | None = None) -> Tensor:
        """A linear layer whose outputs are split over the tensor ranks: [own tokens, H or `width`] -> [T, features]."""
        row = (width or self.hidden) * self.element
        output, weight = self.tokens * features * self.element, features * row
        work = (self.tokens + self.own_tokens) * row + weight if self.sequence else None
        return tape.apply(output, [x], keeps=[x], during=output if bias else 0, work=work, weight=weight, weight_waits=waits)

    def _row(self, tape: Tape, x: Tensor, features: int) -> Tensor:
        """A linear layer whose inputs are split: [T, features] -> [own tokens, H]."""
        output = tape.apply(self.whole, [x], keeps=[x], weight=features * self.row)
        if not self.sequence:
            return output
        own = tape.apply(self.state, [output])
        tape.drop(output)
        return own

    def _norm(self, tape: Tape, x: Tensor, rows: int | None = None, width: int | None = None) -> Tensor:
        rows, width = rows or self.own_tokens, width or self.hidden
        wide, output = rows * width * FP32, rows * width * self.element
        if self.on_gpu or self.config.model.normalization == "layernorm":
            return tape.apply(output, [x], keeps=[x], extra=2 * rows * FP32)
        # torch's RMSNorm on a CPU is put together: the input in fp32 and the normalized one are kept.
        if self.element == FP32:
            return tape.apply(output, [x], keeps=[x], extra=wide + rows * FP32, work=3 * wide)
        return tape.apply(output, [x], extra=2 * wide + rows * FP32, during=wide, work=4 * wide - output)

    def _norm_heads(self, tape: Tape, x: Tensor, heads: int) -> Tensor:
        if self.config.model.qk_norm_over == "head":
            return self._norm(tape, x, self.tokens * heads, self.head_dim)
        together = tape.apply(x.bytes, [x])  # the heads lie apart, between those of the others
        output = self._norm(tape, together, self.tokens, heads * self.head_dim)
        tape.drop(together)
        return output

    def _add(self, tape: Tape, x: Tensor, residual: Tensor, biased: bool = True) -> Tensor:
        """Bias, dropout and residual sum. The caller still holds `x`."""
        tape.hold(x)
        if self.config.model.linear_bias and biased:
            x = self._replace(tape, x, x.bytes)
        x = self._dropout(tape, x)
        output = tape.apply(x.bytes, passes=[x, residual])
        tape.drop(x)
        return output

    def _dropout(self, tape: Tape, x: Tensor) -> Tensor:
        if self.config.model.hidden_dropout == 0:
            return x
        mask = x.bytes // self.element if self.on_gpu else x.bytes
        output = tape.apply(x.bytes, [x], extra=mask)
        tape.drop(x)
        return output

    def _replace(self, tape: Tape, x: Tensor, size: int) -> Tensor:
        """A changed copy, whose gradient is the other's."""
        output = tape.apply(size, passes=[x])
        tape.drop(x)
        return output

    def _then(self, tape: Tape, function: Function, x: Tensor) -> Tensor:
        output = function(tape, x)
        tape.drop(x)
        return output


def moe_plan(config: Config) -> Plan:
    """The plan of the MoE layers where the config fixes it; what is left to be chosen counts as what needs least measuring: one chunk."""
    degree, backward_degree = derived.pipeline_degrees(config)
    strategy = "keep" if config.moe.memory_strategy == "auto" else config.moe.memory_strategy
    return Plan(degree or 1, backward_degree or 1, strategy, config.moe.weight_lag)


def moe_shape(config: Config, device: str) -> Shape:
    """What one call of an MoE layer gets on one rank, as training/callbacks/expert_planning.py measures it."""
    split = derived.expert_tensor_size(config)
    training, width = config.training, derived.expert_ffn_hidden_size(config) // split
    return Shape(
        tokens=training.micro_batch_size * config.model.sequence_length * split // config.parallel.tensor,
        num_experts=config.moe.num_experts or 0,
        num_ranks=config.parallel.expert,
        top_k=config.moe.top_k,
        hidden_size=config.model.hidden_size,
        width=width,
        gated=config.model.activation == "swiglu",
        element_size=ELEMENT_SIZES[training.precision],
        whole=device == "cuda",
        tiled=blocks.are_tiled(device, DTYPES[training.precision], config.model.hidden_size, width),
    )


def moe_load(config: Config, device: str) -> Load:
    """A call where every expert gets as many tokens."""
    load = moe_shape(config, device).even()
    if config.moe.capacity_factor is not None and config.moe.capacity_factor < 1:
        share = config.moe.capacity_factor
        load = replace(load, pairs=int(load.pairs * share), expert_pairs=int(load.expert_pairs * share))
    return load


def local_experts(load: Load, plan: Plan, on_gpu: bool) -> tuple[int, int, int]:
    """(kept, most of the forward pass, most of the backward pass beside the weights' gradients) of a call without other ranks, as
    moe/schedule.py's _LocalCall has it."""
    strategy, size, element = STRATEGIES[plan.memory_strategy], load.hidden_size, load.element_size
    keeps = strategy.hidden == "keep"
    spare = 0 if on_gpu else SPARE_ROWS
    kept = load.pairs * LOCAL_PAIR_BYTES + ((load.pairs + spare) * load.hidden_columns * element if keeps else 0)

    def chunk(degree: int) -> tuple[int, int, int]:
        pairs = -(-load.pairs // degree)
        block = pairs if on_gpu else min(pairs, load.block, -(-load.expert_pairs // degree))
        return pairs + spare, block, -(-load.tokens // degree) * size + (load.tokens * size if degree > 1 else 0)

    pairs, block, output = chunk(plan.degree)
    scratch = blocks.forward_scratch(load, block, on_gpu or not keeps)
    forward = pairs * size + max(scratch, output)
    pairs, block, output = chunk(plan.backward_degree)
    scratch = blocks.both_scratch(load, block, not keeps)
    regrouped = pairs * load.hidden_columns if keeps and plan.degree != plan.backward_degree else 0
    backward = pairs * size + regrouped + max(scratch, output)
    return kept, forward * element, backward * element
