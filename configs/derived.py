"""Values that follow from the configuration, worked out in one place for every room.

They assume a configuration that passed `validate`; nothing here raises for a user's mistake.
"""

from __future__ import annotations

import math

from configs.schema import Config


def is_moe(config: Config) -> bool:
    """Whether the model has mixture-of-experts layers."""
    return config.moe.num_experts is not None


def has_dropout(config: Config) -> bool:
    """Whether training draws random numbers to drop hidden states or attention probabilities."""
    return config.model.hidden_dropout > 0 or config.model.attention_dropout > 0


def head_dim(config: Config) -> int:
    """Channels of one attention head."""
    return config.model.head_dim or config.model.hidden_size // config.model.num_attention_heads


def rotary_dim(config: Config) -> int:
    """Channels of a head that turn, where positions rotate."""
    if config.model.attention == "latent":
        return config.model.rotary_head_dim
    return int(head_dim(config) * config.model.rotary_fraction)


def num_query_groups(config: Config) -> int:
    """Key/value heads; equal to the query heads for multi-head attention."""
    return config.model.num_query_groups or config.model.num_attention_heads


def ffn_hidden_size(config: Config) -> int:
    """Width of a dense layer's feed-forward block (of one of the two halves for SwiGLU)."""
    return config.model.ffn_hidden_size or 4 * config.model.hidden_size


def expert_ffn_hidden_size(config: Config) -> int:
    """Width of one routed expert's feed-forward block."""
    return config.moe.ffn_hidden_size or ffn_hidden_size(config)


def moe_layer_pattern(config: Config) -> list[int]:
    """One entry per layer of the whole model: 1 for an MoE layer, 0 for a dense one (Megatron-core's
    `moe_layer_freq`)."""
    num_layers = config.model.num_layers
    if not is_moe(config):
        return [0] * num_layers
    if isinstance(config.moe.layers, list):
        return [int(layer) for layer in config.moe.layers]
    return [int(layer % config.moe.layers == 0) for layer in range(num_layers)]


def window_pattern(config: Config) -> list[int]:
    """One entry per layer of the whole model: 1 where tokens attend to those of the sliding window, 0 where to all."""
    model = config.model
    first = model.num_layers if model.sliding_window is None else model.sliding_window_from
    return [int(layer >= first) for layer in range(model.num_layers)]


def attended_share(config: Config) -> float:
    """Pairs of tokens that attention relates, over those without a sliding window; the mean of the layers."""
    length, window = config.model.sequence_length, config.model.sliding_window
    if window is None or window >= length:
        return 1.0
    within, pattern = (2 * window * length - window * window) / (length * length), window_pattern(config)
    return 1.0 - (1.0 - within) * sum(pattern) / len(pattern)


def pipeline_degrees(config: Config) -> tuple[int | None, int | None]:
    """Chunks that an MoE layer's tokens are split into, in its forward and its backward pass; None is chosen by
    measured costs."""
    moe, least = config.moe, least_pipeline_degree(config)
    forward = None if moe.pipeline_degree == "auto" else max(moe.pipeline_degree, least)
    return forward, forward if moe.backward_pipeline_degree is None else max(moe.backward_pipeline_degree, least)


def least_pipeline_degree(config: Config) -> int:
    """The fewest chunks of which none has more tokens than `moe.token_budget`; alike on all ranks, as they all have as
    many tokens."""
    budget = config.moe.token_budget
    return 1 if budget is None else math.ceil(tokens_per_call(config) / budget)


def dispatch_bound(config: Config) -> int:
    """Bytes of a chunk's rows that a rank may receive, and of what it sends back for them, whatever routing does: all
    tokens of all expert ranks may choose its experts."""
    degree = min(number or least_pipeline_degree(config) for number in pipeline_degrees(config))
    tokens = math.ceil(tokens_per_call(config) / degree) * config.parallel.expert
    return 2 * tokens * config.moe.top_k * config.model.hidden_size * element_size(config)


def places_experts(config: Config) -> bool:
    """Whether experts may be computed on other ranks than their homes."""
    return is_moe(config) and config.moe.placement.policy != "static" and config.parallel.expert > 1


def replays_plans(config: Config) -> bool:
    """Whether experts are placed as a run before has recorded it."""
    return places_experts(config) and config.moe.placement.replay is not None


def limits_load(config: Config) -> bool:
    """Whether there is a limit of what a rank may compute."""
    return places_experts(config) and config.moe.placement.max_load is not None


def experts_of_other_ranks(config: Config) -> int:
    """Experts whose home is on another rank: those that a rank may hold a copy of; at least one with several ranks."""
    experts, ranks = config.moe.num_experts or 0, config.parallel.expert
    return max(experts - experts // ranks, 1)


def block_rows(config: Config) -> int | None:
    """Assignments of a block of one expert's, where the same bits are asked for whatever the placement."""
    placement = config.moe.placement
    return placement.block_rows if placement.bitwise and is_moe(config) and config.parallel.expert > 1 else None


def copy_bytes(config: Config) -> int:
    """Bytes of the weights of all copies of experts that a rank may hold of a layer."""
    return config.moe.placement.extra_slots * expert_numbers(config) * element_size(config)


def expert_numbers(config: Config) -> int:
    """Parameters of one expert on one rank."""
    return sum(expert_numbers_by_kind(config))


def expert_numbers_by_kind(config: Config) -> list[int]:
    """The same of its first matrix, its second and, where it has them, their biases."""
    hidden, width = config.model.hidden_size, expert_ffn_hidden_size(config) // expert_tensor_size(config)
    outer = width * (2 if config.model.activation == "swiglu" else 1)
    return [outer * hidden, hidden * width, *([outer, hidden] if config.model.linear_bias else [])]


def plans_moe(config: Config) -> bool:
    """Whether something of the MoE layers' schedule is left to the planner."""
    moe = config.moe
    return moe.num_experts is not None and "auto" in (moe.pipeline_degree, moe.memory_strategy, moe.all_to_all)


def expert_tensor_size(config: Config) -> int:
    """Ranks that one expert's weights are split over: `parallel.expert_tensor`, else `tensor` without expert
    parallelism, else 1."""
    parallel = config.parallel
    if parallel.expert_tensor is not None:
        return parallel.expert_tensor
    return parallel.tensor if parallel.expert == 1 else 1


def model_parallel_size(config: Config) -> int:
    """Ranks that hold one copy of the dense part of the model."""
    return config.parallel.tensor * config.parallel.pipeline * config.parallel.context


def rows_of_rank(config: Config) -> int:
    """Rows of a micro-batch, tokens of all its samples, that a context rank holds."""
    return config.training.micro_batch_size * config.model.sequence_length // config.parallel.context


def feed_forward_tile(config: Config) -> int | None:
    """Rows of a rank that a dense feed-forward layer computes at once; None: all of them."""
    training, tensor = config.training, config.parallel.tensor if config.parallel.sequence else 1
    if training.recompute != "full" or training.token_tile is None:
        return None
    return training.token_tile if rows_of_rank(config) // tensor > training.token_tile else None


def context_places(config: Config) -> int:
    """Groups of context ranks that rows are dealt to; the ranks of a group exchange heads for rows, the groups keys and
    values."""
    return config.parallel.context // context_heads(config)


def context_heads(config: Config) -> int:
    """Context ranks that exchange heads for rows: `parallel.context_heads`; null: with joined documents the number with
    which a rank sends least, with separate ones 1, as most of them stay whole on a rank."""
    if config.parallel.context_heads is not None:
        return config.parallel.context_heads
    if config.parallel.context == 1 or config.data.documents == "separate":
        return 1
    return min(allowed_context_heads(config), key=lambda heads: (_sent_by_context(config, heads), heads))


def allowed_context_heads(config: Config) -> list[int]:
    """Every number of ranks that can exchange heads in a layout, ascending."""
    context = config.parallel.context
    return [n for n in range(1, context + 1) if context % n == 0 and shares_query_heads(config, n)]


def shares_query_heads(config: Config, ranks: int) -> bool:
    """Whether a tensor rank's query heads and its key heads can be shared by so many ranks: the latter evenly, or each
    by as many ranks as others."""
    queries, keys = heads_of_tensor_rank(config)
    return queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


def heads_of_tensor_rank(config: Config) -> tuple[int, int]:
    """Query and key heads of one tensor rank."""
    return config.model.num_attention_heads // config.parallel.tensor, num_query_groups(
        config
    ) // config.parallel.tensor


def _sent_by_context(config: Config, heads: int) -> float:
    """Numbers that a rank sends in a layer's forward pass, about: samples lie on as few places as they can."""
    model, training, context = config.model, config.training, config.parallel.context
    queries, keys = heads_of_tensor_rank(config)
    places = context // heads
    if model.attention == "latent":  # of a row travels what keys and values are made of, whole
        key_width, value_width = head_dim(config) + model.rotary_head_dim, model.value_head_dim
        of_row = of_rows_heads = model.kv_lora_rank + model.rotary_head_dim
        of_rows_heads *= heads
    else:
        key_width = value_width = head_dim(config)
        of_row = max(keys // heads, 1) * (key_width + value_width)
        of_rows_heads = max(keys, heads) * (key_width + value_width)
    rows = rows_of_rank(config)
    swapped = rows * (1 - 1 / heads) * (queries * (key_width + value_width) + of_rows_heads)
    spread = max(places / training.micro_batch_size, 1)  # places that a sample lies on
    attended = 3 / 4 if model.family == "gpt" else 1  # of the rows elsewhere, where each place has as much to compute
    elsewhere = attended * model.sequence_length * (1 - 1 / spread)
    return swapped + elsewhere * of_row


def expert_model_parallel_size(config: Config) -> int:
    """Ranks that hold one copy of all experts."""
    return expert_tensor_size(config) * config.parallel.expert * config.parallel.pipeline


def data_parallel_size(config: Config, world_size: int) -> int:
    """Copies of the dense part of the model: the ranks that read different samples."""
    return world_size // model_parallel_size(config)


def expert_data_parallel_size(config: Config, world_size: int) -> int:
    """Copies of each expert."""
    return world_size // expert_model_parallel_size(config)


def num_micro_batches(config: Config, world_size: int) -> int:
    """Micro-batches that one rank runs in an optimizer step."""
    return config.training.global_batch_size // (
        config.training.micro_batch_size * data_parallel_size(config, world_size)
    )


def predicted_share(config: Config) -> float:
    """Share of the tokens that predict something: the others never reach the output layer."""
    return config.data.mask_probability if config.model.family == "bert" else 1.0


def tokens_per_call(config: Config) -> int:
    """Tokens of a micro-batch that one rank's MoE layers get in a call, with those of its expert tensor peers."""
    parallel, training = config.parallel, config.training
    samples = training.micro_batch_size * expert_tensor_size(config)
    return samples * config.model.sequence_length // (parallel.tensor * parallel.context)


def expert_capacity(tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """The most of a micro-batch's tokens that an expert takes: `factor` times an even share, rounded up."""
    return math.ceil(tokens * top_k / num_experts * factor)


def kept_share(config: Config) -> float:
    """The share of assignments that `moe.capacity_factor` keeps where the router spreads tokens evenly: 1.0 without a
    capacity. Dropped assignments are not computed, and nothing is padded in their place."""
    moe = config.moe
    if moe.num_experts is None or moe.capacity_factor is None:
        return 1.0
    tokens = config.training.micro_batch_size * config.model.sequence_length
    capacity = expert_capacity(tokens, moe.num_experts, moe.top_k, moe.capacity_factor)
    return min(1.0, capacity * moe.num_experts / (tokens * moe.top_k))


def element_size(config: Config) -> int:
    """Bytes of a number of the forward and the backward pass."""
    return 4 if config.training.precision == "fp32" else 2


def layer_input_bytes(config: Config) -> int:
    """What goes into a layer on one rank: of a micro-batch, its part of the tokens."""
    parallel = config.parallel
    tokens = config.training.micro_batch_size * config.model.sequence_length // parallel.context
    return tokens // (parallel.tensor if parallel.sequence else 1) * config.model.hidden_size * element_size(config)


def decay_steps(config: Config) -> int:
    """Step at which the learning rate reaches `min_lr`."""
    return config.training.steps if config.optimizer.decay_steps is None else config.optimizer.decay_steps


def overlap_param_gather(config: Config) -> bool:
    """Whether parameters are gathered during the forward pass: asked for, and possible (Megatron's DDP needs both other
    options)."""
    return config.parallel.overlap_param_gather and config.parallel.overlap_grad_reduce and config.optimizer.distributed


def has_tiers(config: Config) -> bool:
    """Whether the optimizer's state is kept in buckets of our own, and not as Megatron-core keeps it."""
    return config.optimizer.state_device != "device" or config.optimizer.moment_dtype != "fp32"


def streams_experts(config: Config) -> bool:
    """Whether the routed experts' weights lie off the device and come to it for their uses."""
    return is_moe(config) and config.moe.weights_device in ("host", "disk")


def may_save(config: Config) -> bool:
    """Whether a run may write a checkpoint when it is stopped."""
    return config.checkpoint.interval > 0 or config.checkpoint.at_end


def uses_host(config: Config) -> bool:
    """Whether something is kept on the host under `memory.host_budget`."""
    offloads = is_moe(config) and any(word in config.moe.memory_strategy for word in ("offload", "auto"))
    leaves = config.optimizer.state_device != "device" or streams_experts(config)
    return leaves or config.training.activation_offload != "none" or offloads


def exchange_sms(config: Config) -> int:
    """Multiprocessors of a GPU that the experts' products leave to exchanges. 20 of a Hopper's 132 keep NVLink and
    InfiniBand busy (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.2)."""
    if config.parallel.exchange_sms is not None:
        return config.parallel.exchange_sms
    return 20 if config.parallel.expert > 1 else 0


def device_connections(config: Config) -> int | None:
    """Hardware queues that a GPU's streams share, None for the driver's own number.

    With one queue kernels start in the order of their launches: Megatron-core's tensor parallelism counts on that, up
    to Hopper, to start a collective before the product that hides it. Exchanges between experts need the opposite: in
    one queue a chunk's products would stand behind the exchange of the next.
    """
    parallel = config.parallel
    if parallel.device_connections is not None:
        return parallel.device_connections
    return 32 if parallel.expert > 1 else 1 if parallel.tensor > 1 else None


def is_added_late(name: str, *, alike: bool, shared: bool, tensor: int, pipeline: int) -> bool:
    """Whether Megatron-core 0.16.1 adds to a parameter's gradient once it is reduced over the data parallel ranks: over
    the tensor ranks where each has it whole (`alike`), over the stages where two of them share an embedding."""
    over_tensor = tensor > 1 and (alike or "layernorm" in name or ".router." in name)
    over_pipeline = pipeline > 1 and (shared or "embedding" in name or "output_layer" in name)
    return over_tensor or over_pipeline
