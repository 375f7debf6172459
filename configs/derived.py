"""Values that follow from the configuration, computed in one place for every package.

The functions assume a configuration that passed `validate`; none raises for a user's mistake.
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
    """Return the channels of one attention head."""
    return config.model.head_dim or config.model.hidden_size // config.model.num_attention_heads


def rotary_dim(config: Config) -> int:
    """Return the channels of a head that rotate with rotary positions."""
    if config.model.attention == "latent":
        return config.model.rotary_head_dim
    return int(head_dim(config) * config.model.rotary_fraction)


def num_query_groups(config: Config) -> int:
    """Return the number of key and value heads; equal to the query heads for multi-head attention."""
    return config.model.num_query_groups or config.model.num_attention_heads


def ffn_hidden_size(config: Config) -> int:
    """Return the width of a dense feed-forward layer (of one of the two halves for SwiGLU)."""
    return config.model.ffn_hidden_size or 4 * config.model.hidden_size


def expert_ffn_hidden_size(config: Config) -> int:
    """Return the width of one routed expert."""
    return config.moe.ffn_hidden_size or ffn_hidden_size(config)


def moe_layer_pattern(config: Config) -> list[int]:
    """Return one entry per layer of the whole model: 1 for an MoE layer, 0 for a dense one (Megatron-core's
    `moe_layer_freq`)."""
    num_layers = config.model.num_layers
    if not is_moe(config):
        return [0] * num_layers
    if isinstance(config.moe.layers, list):
        return [int(layer) for layer in config.moe.layers]
    return [int(layer % config.moe.layers == 0) for layer in range(num_layers)]


def window_pattern(config: Config) -> list[int]:
    """Return one entry per layer of the whole model: 1 with the sliding window, 0 where tokens attend to all."""
    model = config.model
    first = model.num_layers if model.sliding_window is None else model.sliding_window_from
    return [int(layer >= first) for layer in range(model.num_layers)]


def attended_share(config: Config) -> float:
    """Return the token pairs that attention computes as a fraction of those without a sliding window, averaged over
    layers."""
    length, window = config.model.sequence_length, config.model.sliding_window
    if window is None or window >= length:
        return 1.0
    within, pattern = (2 * window * length - window * window) / (length * length), window_pattern(config)
    return 1.0 - (1.0 - within) * sum(pattern) / len(pattern)


def pipeline_degrees(config: Config) -> tuple[int | None, int | None]:
    """Return the chunks per MoE layer in the forward and the backward pass; None: chosen by measured costs."""
    moe, least = config.moe, least_pipeline_degree(config)
    forward = None if moe.pipeline_degree == "auto" else max(moe.pipeline_degree, least)
    return forward, forward if moe.backward_pipeline_degree is None else max(moe.backward_pipeline_degree, least)


def least_pipeline_degree(config: Config) -> int:
    """Return the fewest chunks that keep each one within `moe.token_budget`; equal on all ranks, which have the same
    number of tokens."""
    budget = config.moe.token_budget
    return 1 if budget is None else math.ceil(tokens_per_call(config) / budget)


def dispatch_bound(config: Config) -> int:
    """Return the most bytes of a chunk's tokens that a rank may receive and return: all tokens of all expert ranks may
    be routed to its experts."""
    degree = min(number or least_pipeline_degree(config) for number in pipeline_degrees(config))
    tokens = math.ceil(tokens_per_call(config) / degree) * config.parallel.expert
    return 2 * tokens * config.moe.top_k * config.model.hidden_size * element_size(config)


def places_experts(config: Config) -> bool:
    """Whether experts may be computed on ranks other than their primaries'."""
    return is_moe(config) and config.moe.placement.policy != "static" and config.parallel.expert > 1


def replays_plans(config: Config) -> bool:
    """Whether experts are placed as recorded by an earlier run."""
    return places_experts(config) and config.moe.placement.replay is not None


def limits_load(config: Config) -> bool:
    """Whether the load of a rank is limited (`moe.placement.max_load`)."""
    return places_experts(config) and config.moe.placement.max_load is not None


def experts_of_other_ranks(config: Config) -> int:
    """Return the number of experts with their primary on another rank, which a rank may replicate; at least 1."""
    experts, ranks = config.moe.num_experts or 0, config.parallel.expert
    return max(experts - experts // ranks, 1)


def block_rows(config: Config) -> int | None:
    """Return the assignments per block of an expert with `moe.placement.bitwise`, else None."""
    placement = config.moe.placement
    return placement.block_rows if placement.bitwise and is_moe(config) and config.parallel.expert > 1 else None


def replica_bytes(config: Config) -> int:
    """Return the bytes of the weights of all expert replicas that a rank may hold for one layer."""
    return config.moe.placement.extra_slots * expert_numel(config) * element_size(config)


def expert_numel(config: Config) -> int:
    """Return the number of parameters of one expert on one rank."""
    return sum(expert_numel_by_matrix(config))


def expert_numel_by_matrix(config: Config) -> list[int]:
    """Return the number of parameters of an expert's first and second matrix, and of any biases, on one rank."""
    hidden, width = config.model.hidden_size, expert_ffn_hidden_size(config) // expert_tensor_size(config)
    outer = width * (2 if config.model.activation == "swiglu" else 1)
    return [outer * hidden, hidden * width, *([outer, hidden] if config.model.linear_bias else [])]


def plans_moe(config: Config) -> bool:
    """Whether the planner chooses some of the MoE layers' schedule."""
    moe = config.moe
    return moe.num_experts is not None and "auto" in (moe.pipeline_degree, moe.memory_strategy, moe.all_to_all)


def expert_tensor_size(config: Config) -> int:
    """Return the ranks over which one expert is sharded: `parallel.expert_tensor`, else `tensor` without expert
    parallelism, else 1."""
    parallel = config.parallel
    if parallel.expert_tensor is not None:
        return parallel.expert_tensor
    return parallel.tensor if parallel.expert == 1 else 1


def model_parallel_size(config: Config) -> int:
    """Return the number of ranks that hold one replica of the dense parameters."""
    return config.parallel.tensor * config.parallel.pipeline * config.parallel.context


def rank_sequence_rows(config: Config) -> int:
    """Return the sequence rows (tokens of all samples) of a micro-batch on one context rank."""
    return config.training.micro_batch_size * config.model.sequence_length // config.parallel.context


def feed_forward_tile(config: Config) -> int | None:
    """Return the sequence rows that a dense feed-forward layer computes at once; None: all of the rank's."""
    training, tensor = config.training, config.parallel.tensor if config.parallel.sequence else 1
    if training.recompute != "full" or training.token_tile is None:
        return None
    return training.token_tile if rank_sequence_rows(config) // tensor > training.token_tile else None


def num_cp_ranks(config: Config) -> int:
    """Return the number of groups of context ranks over which sequence rows are sharded. The groups exchange keys and
    values, the ranks of a group heads for rows."""
    return config.parallel.context // context_heads(config)


def context_heads(config: Config) -> int:
    """Return the context ranks that exchange heads for rows: `parallel.context_heads`; null: the number with which a
    rank sends least, or 1 with separate documents, most of which stay whole on a rank."""
    if config.parallel.context_heads is not None:
        return config.parallel.context_heads
    if config.parallel.context == 1 or config.data.documents == "separate":
        return 1
    return min(allowed_context_heads(config), key=lambda heads: (_sent_by_context(config, heads), heads))


def allowed_context_heads(config: Config) -> list[int]:
    """Return every number of ranks that can exchange heads in a layout, ascending."""
    context = config.parallel.context
    return [n for n in range(1, context + 1) if context % n == 0 and shares_query_heads(config, n)]


def shares_query_heads(config: Config, ranks: int) -> bool:
    """Whether a tensor rank's heads can be divided over `ranks`: query heads evenly, key heads evenly or each shared by
    equally many ranks."""
    queries, keys = heads_of_tensor_rank(config)
    return queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


def heads_of_tensor_rank(config: Config) -> tuple[int, int]:
    """Return the query heads and the key heads of one tensor rank."""
    tensor = config.parallel.tensor
    return config.model.num_attention_heads // tensor, num_query_groups(config) // tensor


def _sent_by_context(config: Config, heads: int) -> float:
    """Estimate the elements that a rank sends in a layer's forward pass, with samples on as few context ranks as
    possible."""
    model, training, context = config.model, config.training, config.parallel.context
    queries, keys = heads_of_tensor_rank(config)
    cp_size = context // heads
    if model.attention == "latent":  # each row sends its whole latent vector, from which keys and values are computed
        key_width, value_width = head_dim(config) + model.rotary_head_dim, model.value_head_dim
        per_row = model.kv_lora_rank + model.rotary_head_dim
        per_row_all_heads = per_row * heads
    else:
        key_width = value_width = head_dim(config)
        per_row = max(keys // heads, 1) * (key_width + value_width)
        per_row_all_heads = max(keys, heads) * (key_width + value_width)
    swapped = rank_sequence_rows(config) * (1 - 1 / heads) * (queries * (key_width + value_width) + per_row_all_heads)
    spread = max(cp_size / training.micro_batch_size, 1)  # context ranks of one sample
    attended = 3 / 4 if model.family == "gpt" else 1  # fraction of the other ranks' rows, with balanced work
    elsewhere = attended * model.sequence_length * (1 - 1 / spread)
    return swapped + elsewhere * per_row


def expert_model_parallel_size(config: Config) -> int:
    """Return the number of ranks that hold one replica of all experts."""
    return expert_tensor_size(config) * config.parallel.expert * config.parallel.pipeline


def data_parallel_size(config: Config, world_size: int) -> int:
    """Return the number of replicas of the dense parameters, which read different samples."""
    return world_size // model_parallel_size(config)


def expert_data_parallel_size(config: Config, world_size: int) -> int:
    """Return the number of data-parallel replicas of each expert."""
    return world_size // expert_model_parallel_size(config)


def num_micro_batches(config: Config, world_size: int) -> int:
    """Return the micro-batches that one rank runs in an optimizer step."""
    return config.training.global_batch_size // (
        config.training.micro_batch_size * data_parallel_size(config, world_size)
    )


def predicted_share(config: Config) -> float:
    """Return the fraction of tokens with a prediction; the others do not reach the output layer."""
    return config.data.mask_probability if config.model.family == "bert" else 1.0


def tokens_per_call(config: Config) -> int:
    """Return the tokens of a micro-batch that one rank's MoE layers process in a call, including those of its expert
    tensor peers."""
    parallel, training = config.parallel, config.training
    samples = training.micro_batch_size * expert_tensor_size(config)
    return samples * config.model.sequence_length // (parallel.tensor * parallel.context)


def expert_capacity(tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Return the most tokens of a micro-batch that an expert accepts: `factor` times an even share, rounded up."""
    return math.ceil(tokens * top_k / num_experts * factor)


def kept_share(config: Config) -> float:
    """Return the fraction of assignments that `moe.capacity_factor` keeps under even routing; 1.0 without a capacity.
    Dropped assignments are neither computed nor padded."""
    moe = config.moe
    if moe.num_experts is None or moe.capacity_factor is None:
        return 1.0
    tokens = config.training.micro_batch_size * config.model.sequence_length
    capacity = expert_capacity(tokens, moe.num_experts, moe.top_k, moe.capacity_factor)
    return min(1.0, capacity * moe.num_experts / (tokens * moe.top_k))


def element_size(config: Config) -> int:
    """Return the bytes of an element in the forward and the backward pass."""
    return 4 if config.training.precision == "fp32" else 2


def layer_input_bytes(config: Config) -> int:
    """Return the bytes of a layer's input on one rank, for the rank's tokens of a micro-batch."""
    parallel = config.parallel
    tokens = config.training.micro_batch_size * config.model.sequence_length // parallel.context
    return tokens // (parallel.tensor if parallel.sequence else 1) * config.model.hidden_size * element_size(config)


def decay_steps(config: Config) -> int:
    """Return the step at which the learning rate reaches `min_lr`."""
    return config.training.steps if config.optimizer.decay_steps is None else config.optimizer.decay_steps


def overlap_param_gather(config: Config) -> bool:
    """Whether parameters are gathered during the forward pass: requested, and possible (Megatron's DDP needs both other
    options)."""
    return config.parallel.overlap_param_gather and config.parallel.overlap_grad_reduce and config.optimizer.distributed


def has_own_optimizer_state(config: Config) -> bool:
    """Whether optimizer state is kept in buckets of our own rather than Megatron-core's."""
    return config.optimizer.state_device != "device" or config.optimizer.moment_dtype != "fp32"


def streams_experts(config: Config) -> bool:
    """Whether the routed experts' weights are offloaded and loaded to the device for their uses."""
    return is_moe(config) and config.moe.weights_device in ("host", "disk")


def may_save(config: Config) -> bool:
    """Whether a run may write a checkpoint when it is stopped."""
    return config.checkpoint.interval > 0 or config.checkpoint.at_end


def uses_host(config: Config) -> bool:
    """Whether host memory is used under `memory.host_budget`."""
    offloads = is_moe(config) and any(word in config.moe.memory_strategy for word in ("offload", "auto"))
    is_offloaded = config.optimizer.state_device != "device" or streams_experts(config)
    return is_offloaded or config.training.activation_offload != "none" or offloads


def exchange_sms(config: Config) -> int:
    """Return the multiprocessors that the experts' products leave free for exchanges. 20 of a Hopper's 132 keep NVLink
    and InfiniBand busy (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.2)."""
    if config.parallel.exchange_sms is not None:
        return config.parallel.exchange_sms
    return 20 if config.parallel.expert > 1 else 0


def device_connections(config: Config) -> int | None:
    """Return the number of hardware queues that a GPU's streams share; None: the driver's default.

    With one queue kernels start in launch order. Up to Hopper, Megatron-core's tensor parallelism depends on that to
    start a collective before the product that hides it. Expert exchanges need several: in one queue a chunk's products
    would wait for the exchange of the next chunk.
    """
    parallel = config.parallel
    if parallel.device_connections is not None:
        return parallel.device_connections
    return 32 if parallel.expert > 1 else 1 if parallel.tensor > 1 else None


def is_reduced_at_step_end(name: str, *, alike: bool, shared: bool, tensor: int, pipeline: int) -> bool:
    """Whether Megatron-core 0.16.1 reduces a parameter's gradient once more after its reduction over the data-parallel
    ranks: over the tensor ranks if each has the whole parameter (`alike`), over stages that share an embedding."""
    over_tensor = tensor > 1 and (alike or "layernorm" in name or ".router." in name)
    over_pipeline = pipeline > 1 and (shared or "embedding" in name or "output_layer" in name)
    return over_tensor or over_pipeline
