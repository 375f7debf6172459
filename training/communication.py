"""What each pipeline stage's ranks send in an optimizer step, by kind, in bytes of one rank.

Ring algorithms: of n ranks, an all-reduce of x bytes has each send 2 (n - 1) / n x, a gather or a scatter-reduction half of that.
An exchange between expert parallel ranks sends the rows that travel, with every expert equally busy.
"""

from __future__ import annotations

from configs import derived
from configs.schema import Config
from moe.plan import STRATEGIES
from training.activations import ELEMENT_SIZES, FP32, moe_load, moe_plan
from training.layout import parts
from training.memory_plan import buffers

KINDS = ("gradient_reduction", "parameter_gather", "tensor_parallel", "pipeline", "expert_all_to_all", "tied_embedding")
PAIR_BYTES, PAIR_GRADIENT_BYTES = 8, 4  # of each pair beside its row: code and weight; the weight's gradient


def bytes_per_step(config: Config, vocab_size: int, padded_vocab_size: int, world_size: int, device: str) -> list[dict[str, int]]:
    """By stage: bytes that each of its ranks sends in a step, by kind."""
    return [_stage(config, vocab_size, padded_vocab_size, world_size, device, stage) for stage in range(config.parallel.pipeline)]


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _stage(config: Config, vocab_size: int, padded_vocab_size: int, world_size: int, device: str, stage: int) -> dict[str, int]:
    element, parallel, training = ELEMENT_SIZES[config.training.precision], config.parallel, config.training
    micro_batches = derived.num_micro_batches(config, world_size)
    copies = {"dense": derived.data_parallel_size(config, world_size), "expert": derived.expert_data_parallel_size(config, world_size)}
    numbers = {kind: sum(b.size for b in of_kind) for kind, of_kind in buffers(config, vocab_size, world_size, stage).items()}
    once = sum(size * _share(copies[kind]) for kind, size in numbers.items())
    whole = training.micro_batch_size * config.model.sequence_length * config.model.hidden_size * element
    state = whole // parallel.tensor if parallel.sequence else whole
    last = parallel.pipeline * (parallel.virtual_pipeline or 1) - 1
    sent = tensor = exchanged = 0.0
    for index, part in enumerate(parts(config)[stage]):
        number = index * parallel.pipeline + stage
        sent += micro_batches * state * ((number < last) + (number > 0))
        tensor += micro_batches * _tensor_parallel(config, part.layers, part.is_first, part.is_last, whole)
        exchanged += micro_batches * sum(part.layers) * _exchange(config, device)
    ends = parallel.pipeline > 1 and config.model.tie_embeddings and any(p.is_first or p.is_last for p in parts(config)[stage])
    tied = 2 * _share(2) * padded_vocab_size // parallel.tensor * config.model.hidden_size * FP32 if ends else 0
    return {
        "gradient_reduction": int(once * FP32 * (1 if config.optimizer.distributed else 2)),
        "parameter_gather": int(once * element) if config.optimizer.distributed else 0,
        "tensor_parallel": int(tensor),
        "pipeline": int(sent),
        "expert_all_to_all": int(exchanged),
        "tied_embedding": int(tied),
    }


def _tensor_parallel(config: Config, layers: tuple[int, ...], is_first: bool, is_last: bool, whole: int) -> float:
    """Of one micro-batch: the all-reduces, or with sequence parallelism gathers and scatter-reductions, of a part of the model."""
    size, training = config.parallel.tensor, config.training
    if size == 1:
        return 0.0
    one = _share(size) * whole
    # A pair of linear layers. All-reduce: after it, and of its input's gradient. Sequence parallelism: a gather before and a
    # scatter-reduction after it; back, the gather of the input again, the gather of the gradient, its scatter-reduction.
    pair = one * (5 if config.parallel.sequence else 4)
    forward = one * 2
    attention, feed_forward = pair, pair
    if training.recompute == "full":
        attention, feed_forward = pair + forward, pair + forward
    elif training.recompute == "selective":
        feed_forward = pair + forward
    split = derived.expert_tensor_size(config)
    # Tokens of the expert tensor ranks are gathered, their outputs scatter-reduced, and back the other way round.
    experts = 4 * _share(split) * whole * split / size
    if config.moe.shared_expert_ffn_hidden_size is not None:
        experts += pair
    if training.recompute == "full":
        experts *= 1.5
    total = sum(attention + (experts if is_moe else feed_forward) for is_moe in layers)
    embedding = one * (2 if config.parallel.sequence else 2)
    return total + (embedding if is_first else 0.0) + (one * (3 if config.parallel.sequence else 2) if is_last else 0.0)


def _exchange(config: Config, device: str) -> float:
    """Of one MoE layer and one micro-batch."""
    if not derived.is_moe(config) or config.parallel.expert == 1:
        return 0.0
    load, strategy = moe_load(config, device), STRATEGIES[moe_plan(config).memory_strategy]
    rows = load.away_rows * load.hidden_size * load.element_size
    pairs = load.pairs * load.away_rows / max(load.rows, 1)
    forward = 2 * rows + pairs * PAIR_BYTES
    backward = (3 if strategy.rows == "communicate" else 2) * rows + pairs * PAIR_GRADIENT_BYTES
    return forward * (2 if config.training.recompute == "full" else 1) + backward
