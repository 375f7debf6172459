"""Values that follow from the configuration, such as sizes, degrees and shares, computed in one place for all packages.

The functions take a configuration that passed `validate`, and none raises an error for a mistake of the user.
"""

from __future__ import annotations

import math

from configs.schema import Config


def is_moe(config: Config) -> bool:
    """Return whether the model has mixture-of-experts layers."""
    return config.moe.num_experts is not None


def has_dropout(config: Config) -> bool:
    """Return whether training drops hidden states or attention probabilities at random."""
    return config.model.hidden_dropout > 0 or config.model.attention_dropout > 0


def head_dim(config: Config) -> int:
    """Return the number of channels of an attention head."""
    return config.model.head_dim or config.model.hidden_size // config.model.num_attention_heads


def rotary_dim(config: Config) -> int:
    """Return the number of channels of an attention head that rotary positions rotate."""
    if config.model.attention == "latent":
        return config.model.rotary_head_dim
    return int(head_dim(config) * config.model.rotary_fraction)


def num_query_groups(config: Config) -> int:
    """Return the number of key and value heads. It equals the number of query heads for multi-head attention."""
    return config.model.num_query_groups or config.model.num_attention_heads


def ffn_hidden_size(config: Config) -> int:
    """Return the intermediate width of a dense feed-forward layer; with SwiGLU, the width of one of its two halves."""
    return config.model.ffn_hidden_size or 4 * config.model.hidden_size


def expert_ffn_hidden_size(config: Config) -> int:
    """Return the intermediate width of a routed expert."""
    return config.moe.ffn_hidden_size or ffn_hidden_size(config)


def moe_layer_pattern(config: Config) -> list[int]:
    """Return one entry per layer: 1 for an MoE layer, 0 for a dense layer (Megatron-core's `moe_layer_freq`)."""
    num_layers = config.model.num_layers
    if not is_moe(config):
        return [0] * num_layers
    if isinstance(config.moe.layers, list):
        return [int(layer) for layer in config.moe.layers]
    return [int(layer % config.moe.layers == 0) for layer in range(num_layers)]


def window_pattern(config: Config) -> list[int]:
    """Return one entry per layer: 1 if its attention has the sliding window, 0 if its attention is full."""
    model = config.model
    first = model.num_layers if model.sliding_window is None else model.sliding_window_from
    return [int(layer >= first) for layer in range(model.num_layers)]


def attended_share(config: Config) -> float:
    """Return the number of token pairs that attend to each other with the sliding window, divided by the number without
    it, averaged over the layers."""
    length, window = config.model.sequence_length, config.model.sliding_window
    if window is None or window >= length:
        return 1.0
    within, pattern = (2 * window * length - window * window) / (length * length), window_pattern(config)
    return 1.0 - (1.0 - within) * sum(pattern) / len(pattern)


def pipeline_degrees(config: Config) -> tuple[int | None, int | None]:
    """Return the number of chunks of an MoE layer in the forward pass and in the backward pass. None stands for a
    number that the planner chooses by measured costs."""
    moe, least = config.moe, least_pipeline_degree(config)
    forward = None if moe.pipeline_degree == "auto" else max(moe.pipeline_degree, least)
    return forward, forward if moe.backward_pipeline_degree is None else max(moe.backward_pipeline_degree, least)


def least_pipeline_degree(config: Config) -> int:
    """Return the smallest number of chunks per MoE layer with which no chunk exceeds `moe.token_budget` tokens. It is
    equal on all ranks."""
    budget = config.moe.token_budget
    return 1 if budget is None else math.ceil(tokens_per_call(config) / budget)


def dispatch_bound(config: Config) -> int:
    """Return the most bytes that a rank may receive and send back for one chunk of an MoE layer: in the worst case, all
    tokens of all expert-parallel ranks are routed to the rank's experts."""
    degree = min(number or least_pipeline_degree(config) for number in pipeline_degrees(config))
    tokens = math.ceil(tokens_per_call(config) / degree) * config.parallel.expert
    return 2 * tokens * config.moe.top_k * config.model.hidden_size * element_size(config)


def places_experts(config: Config) -> bool:
    """Return whether a placement policy may let ranks compute experts that they do not own."""
    return is_moe(config) and config.moe.placement.policy != "static" and config.parallel.expert > 1


def replays_plans(config: Config) -> bool:
    """Return whether each call of an MoE layer repeats the expert placement that an earlier run recorded."""
    return places_experts(config) and config.moe.placement.replay is not None


def limits_load(config: Config) -> bool:
    """Return whether the number of assignments that a rank computes is limited (`moe.placement.max_load`)."""
    return places_experts(config) and config.moe.placement.max_load is not None


def experts_of_other_ranks(config: Config) -> int:
    """Return the number of experts that other ranks own, which is the most that a rank could replicate; at least 1."""
    experts, ranks = config.moe.num_experts or 0, config.parallel.expert
    return max(experts - experts // ranks, 1)


def block_rows(config: Config) -> int | None:
    """Return the number of assignments per block of an expert's computation with `moe.placement.bitwise`, else None."""
    placement = config.moe.placement
    return placement.block_rows if placement.bitwise and is_moe(config) and config.parallel.expert > 1 else None


def replica_bytes(config: Config) -> int:
    """Return the bytes of the weights of all expert replicas that a rank may have in one layer."""
    return config.moe.placement.extra_slots * expert_numel(config) * element_size(config)


def expert_numel(config: Config) -> int:
    """Return the number of parameters that one rank stores of each expert."""
    return sum(expert_numel_by_matrix(config))


def expert_numel_by_matrix(config: Config) -> list[int]:
    """Return the number of parameters that one rank stores of an expert's first matrix and second matrix, and of its
    two biases if experts have biases."""
    hidden, width = config.model.hidden_size, expert_ffn_hidden_size(config) // expert_tensor_size(config)
    outer = width * (2 if config.model.activation == "swiglu" else 1)
    return [outer * hidden, hidden * width, *([outer, hidden] if config.model.linear_bias else [])]


def plans_moe(config: Config) -> bool:
    """Return whether the planner chooses `moe.pipeline_degree`, `moe.memory_strategy` or `moe.all_to_all`."""
    moe = config.moe
    return moe.num_experts is not None and "auto" in (moe.pipeline_degree, moe.memory_strategy, moe.all_to_all)


def expert_tensor_size(config: Config) -> int:
    """Return the number of ranks over which each expert is sharded: `parallel.expert_tensor` if it is set, else
    `parallel.tensor` without expert parallelism and 1 with it."""
    parallel = config.parallel
    if parallel.expert_tensor is not None:
        return parallel.expert_tensor
    return parallel.tensor if parallel.expert == 1 else 1


def model_parallel_size(config: Config) -> int:
    """Return the number of ranks that together store one replica of the dense parameters."""
    return config.parallel.tensor * config.parallel.pipeline * config.parallel.context


def rank_sequence_rows(config: Config) -> int:
    """Return the number of sequence rows (tokens of all samples) of a micro-batch on one context-parallel rank."""
    return config.training.micro_batch_size * config.model.sequence_length // config.parallel.context


def feed_forward_tile(config: Config) -> int | None:
    """Return the number of sequence rows in each tile of a dense feed-forward layer; None if the layer is not tiled."""
    training, tensor = config.training, config.parallel.tensor if config.parallel.sequence else 1
    if training.recompute != "full" or training.token_tile is None:
        return None
    return training.token_tile if rank_sequence_rows(config) // tensor > training.token_tile else None


def num_cp_ranks(config: Config) -> int:
    """Return the number of groups of context-parallel ranks over which a sequence is sharded. Ranks of a group exchange
    heads for sequence rows; the groups exchange keys and values."""
    return config.parallel.context // context_heads(config)


def context_heads(config: Config) -> int:
    """Return the number of context-parallel ranks that exchange heads for sequence rows. The default is the number that
    minimizes the sent elements, or 1 with separate documents, most of which are not cut."""
    if config.parallel.context_heads is not None:
        return config.parallel.context_heads
    if config.parallel.context == 1 or config.data.documents == "separate":
        return 1
    return min(allowed_context_heads(config), key=lambda heads: (_sent_by_context(config, heads), heads))


def allowed_context_heads(config: Config) -> list[int]:
    """Return every number of context-parallel ranks that may exchange heads for sequence rows, ascending."""
    context = config.parallel.context
    return [n for n in range(1, context + 1) if context % n == 0 and shares_query_heads(config, n)]


def shares_query_heads(config: Config, ranks: int) -> bool:
    """Return whether `ranks` ranks can divide the heads of a tensor-parallel rank: query heads evenly; key heads
    evenly, or each shared by an equal number of ranks."""
    queries, keys = heads_of_tensor_rank(config)
    return queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


def heads_of_tensor_rank(config: Config) -> tuple[int, int]:
    """Return the number of query heads and the number of key heads of one tensor-parallel rank."""
    tensor = config.parallel.tensor
    return config.model.num_attention_heads // tensor, num_query_groups(config) // tensor


def _sent_by_context(config: Config, heads: int) -> float:
    """Estimate the number of elements that a rank sends for context parallelism in the forward pass of one layer.
    `heads`: number of context-parallel ranks that exchange attention heads for sequence rows. Each sample is sharded
    over as few ranks as possible."""
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
    spread = max(cp_size / training.micro_batch_size, 1)  # context-parallel ranks that share one sample
    attended = 3 / 4 if model.family == "gpt" else 1  # fraction of the other ranks' rows that a rank needs
    elsewhere = attended * model.sequence_length * (1 - 1 / spread)
    return swapped + elsewhere * per_row


def expert_model_parallel_size(config: Config) -> int:
    """Return the number of ranks that together store one replica of all experts."""
    return expert_tensor_size(config) * config.parallel.expert * config.parallel.pipeline


def data_parallel_size(config: Config, world_size: int) -> int:
    """Return the number of replicas of the dense parameters. Each replica reads different samples."""
    return world_size // model_parallel_size(config)


def expert_data_parallel_size(config: Config, world_size: int) -> int:
    """Return the number of data-parallel replicas of each expert."""
    return world_size // expert_model_parallel_size(config)


def num_micro_batches(config: Config, world_size: int) -> int:
    """Return the number of micro-batches that a rank computes in one optimizer step."""
    num_samples = config.training.micro_batch_size * data_parallel_size(config, world_size)
    return config.training.global_batch_size // num_samples


def predicted_share(config: Config) -> float:
    """Return the fraction of the tokens that have a label; only these reach the output layer."""
    return config.data.mask_probability if config.model.family == "bert" else 1.0


def tokens_per_call(config: Config) -> int:
    """Return the number of tokens that the MoE layer of a rank processes per micro-batch, including those that it
    gathers from the ranks with other shards of its experts."""
    parallel, training = config.parallel, config.training
    samples = training.micro_batch_size * expert_tensor_size(config)
    return samples * config.model.sequence_length // (parallel.tensor * parallel.context)


def expert_capacity(tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Return the most tokens of a micro-batch that an expert accepts: an even share times `factor`, rounded up."""
    return math.ceil(tokens * top_k / num_experts * factor)


def kept_share(config: Config) -> float:
    """Return the fraction of assignments that `moe.capacity_factor` lets pass if routing is even; 1.0 without a
    capacity. Dropped assignments are neither computed nor padded."""
    moe = config.moe
    if moe.num_experts is None or moe.capacity_factor is None:
        return 1.0
    tokens = config.training.micro_batch_size * config.model.sequence_length
    capacity = expert_capacity(tokens, moe.num_experts, moe.top_k, moe.capacity_factor)
    return min(1.0, capacity * moe.num_experts / (tokens * moe.top_k))


def element_size(config: Config) -> int:
    """Return the bytes of one element in the forward and backward pass."""
    return 4 if config.training.precision == "fp32" else 2


def layer_input_bytes(config: Config) -> int:
    """Return the bytes of a transformer layer's input on one rank, for one micro-batch."""
    tokens = rank_sequence_rows(config) // (config.parallel.tensor if config.parallel.sequence else 1)
    return tokens * config.model.hidden_size * element_size(config)


def decay_steps(config: Config) -> int:
    """Return the optimizer step at which the learning rate reaches `min_lr`."""
    return config.training.steps if config.optimizer.decay_steps is None else config.optimizer.decay_steps


def overlap_param_gather(config: Config) -> bool:
    """Return whether parameters are gathered during the forward pass. For this, Megatron's DDP also needs
    overlap_grad_reduce and the distributed optimizer."""
    return config.parallel.overlap_param_gather and config.parallel.overlap_grad_reduce and config.optimizer.distributed


def has_own_optimizer_state(config: Config) -> bool:
    """Return whether Mixtrain's own buckets of parameters store the optimizer state, rather than Megatron-core."""
    return config.optimizer.state_device != "device" or config.optimizer.moment_dtype != "fp32"


def streams_experts(config: Config) -> bool:
    """Return whether the weights of routed experts are offloaded and copied to the device each time they are used."""
    return is_moe(config) and config.moe.weights_device in ("host", "disk")


def may_save(config: Config) -> bool:
    """Return whether a run writes a checkpoint if it is stopped early."""
    return config.checkpoint.interval > 0 or config.checkpoint.at_end


def uses_host(config: Config) -> bool:
    """Return whether the run offloads anything to host memory, which `memory.host_budget` limits."""
    offloads = is_moe(config) and any(word in config.moe.memory_strategy for word in ("offload", "auto"))
    is_offloaded = config.optimizer.state_device != "device" or streams_experts(config)
    return is_offloaded or config.training.activation_offload != "none" or offloads


def exchange_sms(config: Config) -> int:
    """Return the number of GPU multiprocessors that the experts' matmuls leave free for concurrent exchanges. 20 of a
    Hopper's 132 saturate NVLink and InfiniBand (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.2)."""
    if config.parallel.exchange_sms is not None:
        return config.parallel.exchange_sms
    return 20 if config.parallel.expert > 1 else 0


def device_connections(config: Config) -> int | None:
    """Return the number of hardware queues that the streams of a GPU share; None for the driver's default.

    With a single queue, kernels start in launch order. Up to Hopper, Megatron-core's tensor parallelism relies on this
    order to start a collective before the matmul that overlaps it. Expert exchanges need several queues: in a single
    one, the matmuls of a chunk would wait for the exchange of the next chunk.
    """
    parallel = config.parallel
    if parallel.device_connections is not None:
        return parallel.device_connections
    return 32 if parallel.expert > 1 else 1 if parallel.tensor > 1 else None


def is_reduced_at_step_end(name: str, *, alike: bool, shared: bool, tensor: int, pipeline: int) -> bool:
    """Return whether Megatron-core 0.16.1 all-reduces the gradient of parameter `name` again after the data-parallel
    reduction: over tensor-parallel ranks that replicate the parameter (`alike`), or over pipeline stages that share an
    embedding (`shared`). tensor, pipeline: the parallel sizes."""
    over_tensor = tensor > 1 and (alike or "layernorm" in name or ".router." in name)
    over_pipeline = pipeline > 1 and (shared or "embedding" in name or "output_layer" in name)
    return over_tensor or over_pipeline
