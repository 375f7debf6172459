"""Operations of feed-forward layers: dense, or a mixture of experts with its router and shared expert."""

from __future__ import annotations

from configs import derived
from configs.schema import Config
from models.blueprint.operation import (
    BOOLEAN,
    EXPERT,
    EXPERT_TENSOR,
    FLOAT32,
    PEER_TOKENS,
    SCALAR,
    TENSOR,
    TOKENS,
    Collective,
    ModelOperation,
    Split,
    Tensor,
    Weight,
    changed_copy,
    column_linear,
    hidden,
    own_row_kind,
    recomputed,
    row_linear,
    scatter,
    tiled,
)


def feed_forward(config: Config, x: str, output: str) -> list[ModelOperation]:
    """Return the operations of a dense feed-forward layer, from the normalized hidden state `x` to `output`. The bias
    of `output` is added later."""
    layers = _linears(config, "mlp", x, output, derived.ffn_hidden_size(config), config.model.linear_bias)
    if derived.feed_forward_tile(config) is not None:
        return [tiled("mlp", x, layers)]
    return [recomputed("mlp", (x,), layers)] if config.training.recompute == "selective" else layers


def _linears(config: Config, module: str, x: str, output: str, width: int, bias: bool) -> list[ModelOperation]:
    gated = config.model.activation == "swiglu"
    columns = width * (2 if gated else 1)
    preactivation = Tensor(f"{module}.preactivation", columns, TOKENS, TENSOR)
    active = Tensor(f"{module}.active", width, TOKENS, TENSOR)
    sizes = config.model.hidden_size, columns
    operations = [column_linear(config, f"{module}.linear_fc1", x, preactivation.name, sizes, bias=bias, gated=gated)]
    last = preactivation.name
    if bias:
        biased = Tensor(f"{last}.biased", columns, TOKENS, TENSOR)
        operations.append(changed_copy(module, last, biased, frees=(last,)))
        last = biased.name
    if gated and module != "mlp":  # a shared expert, whose activation Megatron-core computes in separate operations
        gate, up, factor, copied = (
            Tensor(f"{module}.{name}", width, TOKENS, TENSOR) for name in ("gate", "up", "silu", "up.copied")
        )
        factors = factor.name, copied.name
        operations += [
            ModelOperation("split", module, (last,), (gate, up)),
            ModelOperation("activation", module, (gate.name,), (factor,), saved=(gate.name,)),
            changed_copy(module, up.name, copied),
            ModelOperation("multiply", module, factors, (active,), saved=factors, frees=(*factors, last)),
        ]
    else:
        operations.append(ModelOperation("activation", module, (last,), (active,), saved=(last,), frees=(last,)))
    return operations + row_linear(
        config, f"{module}.linear_fc2", active.name, output, width, bias=bias, frees=(active.name,)
    )


def experts(config: Config, x: str, output: str) -> list[ModelOperation]:
    """Return the operations of an MoE layer: the router, `top_k` routed experts per token, and the shared expert if
    there is one."""
    moe, size, split = config.moe, config.model.hidden_size, derived.expert_tensor_size(config)
    assert moe.num_experts is not None, "a dense model has no experts"
    router = [Weight("mlp.router.weight", (moe.num_experts, size), "matrix")]
    router += [Weight("mlp.router.bias", (moe.num_experts,), "bias")] if config.model.linear_bias else []
    router += [Weight("mlp.router.expert_bias", (moe.num_experts,), "router_bias")] if moe.expert_bias else []
    probs = Tensor("probs", moe.num_experts, own_row_kind(config), dtype=FLOAT32)
    flops, exchange = 2.0 * moe.num_experts * size, _capacity_exchange(config)
    operations = [
        ModelOperation(
            "router", "mlp.router", (x,), (probs,), saved=(x,), weights=tuple(router), flops=flops, collectives=exchange
        )
    ]
    source, name = x, output if moe.shared_expert_ffn_hidden_size is None else f"{output}.routed"
    if split > 1:
        peers = Tensor("peer_tokens", size, PEER_TOKENS)
        peer_probs = Tensor("peer_probs", moe.num_experts, PEER_TOKENS, dtype=FLOAT32)
        peer_choices = Tensor("peer_choices", moe.num_experts, PEER_TOKENS, dtype=BOOLEAN)
        gathering = (
            *(Collective("all_gather", EXPERT_TENSOR, each) for each in (peers, peer_probs, peer_choices)),
            *(Collective("reduce_scatter", EXPERT_TENSOR, each, is_backward=True) for each in (peers, peer_probs)),
        )
        operations.append(ModelOperation("gather", "mlp.experts", (x,), (peers,), collectives=gathering))
        routed = Tensor(f"{name}.partial", size, PEER_TOKENS)
        source = peers.name
    else:
        routed = hidden(config, name)
    kept = moe.top_k * derived.kept_share(config)  # assignments per token
    matrices = 3 if config.model.activation == "swiglu" else 2
    operations.append(
        ModelOperation(
            "experts",
            "mlp.experts",
            (source, "probs"),
            (routed,),
            saved=(source,),
            frees=("probs",),
            weights=_expert_weights(config),
            flops=2.0 * matrices * size * derived.expert_ffn_hidden_size(config) * kept,
            collectives=(Collective("all_to_all", EXPERT, routed),),
        )
    )
    if split > 1:
        operations.append(scatter("mlp.experts", routed, hidden(config, name), (source, routed.name), EXPERT_TENSOR))
    if moe.shared_expert_ffn_hidden_size is None:
        return operations
    shared = f"{output}.shared"
    operations += _linears(config, "mlp.shared_experts", x, shared, moe.shared_expert_ffn_hidden_size, bias=False)
    both = ModelOperation(
        "add", "mlp.shared_experts", outputs=(hidden(config, output),), passes=(name, shared), frees=(name, shared)
    )
    return [*operations, both]


def _capacity_exchange(config: Config) -> tuple[Collective, ...]:
    """Return the all-gather that lets an expert's capacity count the tokens of all tensor ranks (moe/capacity.py);
    empty if none is needed."""
    moe, tensor = config.moe, config.parallel.tensor
    if moe.capacity_factor is None or not config.parallel.sequence:
        return ()
    assert moe.num_experts is not None
    tokens = config.training.micro_batch_size * config.model.sequence_length
    capacity = derived.expert_capacity(tokens, moe.num_experts, moe.top_k, moe.capacity_factor)
    if capacity >= tokens:
        return ()
    candidates = 1 if moe.drop_policy == "position" else min(capacity, tokens // tensor)
    everywhere = Tensor("candidates", tensor * candidates * moe.num_experts, SCALAR, dtype=FLOAT32)
    return (Collective("all_gather", TENSOR, everywhere),)


def _expert_weights(config: Config) -> tuple[Weight, ...]:
    count, size, width = config.moe.num_experts or 0, config.model.hidden_size, derived.expert_ffn_hidden_size(config)
    gated = config.model.activation == "swiglu"
    columns = width * (2 if gated else 1)
    of_rank, outputs, inputs = Split(0, EXPERT), Split(1, EXPERT_TENSOR), Split(2, EXPERT_TENSOR)
    bias = config.model.linear_bias
    weights = [Weight("mlp.experts.linear_fc1.weight", (count, columns, size), "matrix", (of_rank, outputs), gated)]
    if bias:
        weights += [Weight("mlp.experts.linear_fc1.bias", (count, columns), "bias", (of_rank, outputs), gated)]
    weights += [Weight("mlp.experts.linear_fc2.weight", (count, size, width), "output_matrix", (of_rank, inputs))]
    weights += [Weight("mlp.experts.linear_fc2.bias", (count, size), "bias", (of_rank,))] if bias else []
    return tuple(weights)
