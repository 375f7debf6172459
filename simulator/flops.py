"""FLOPs of the model's matmuls per token, counted over the blueprint's operations. There are two counts.

The model's count (`forward_flops_per_token`, `training_flops_per_token`) follows the convention of model FLOPs
utilisation (PaLM, appendix B): a multiply-add is 2 operations, and the backward pass costs twice the forward pass.
Recomputation and the vocabulary's padding do not count. Attention counts its full square for BERT and half of it for
causal GPT; of that half, only the pairs that a sliding window and separate documents leave. BERT's head counts the
predicted tokens. All MFU figures use this count.

The machine's count (`executed_flops_per_token`) is that of PyTorch's FlopCounterMode over a step on all ranks. It
includes the full square, the fused attention's backward pass with recomputed scores (2.5 times the forward), the
recomputation of training.recompute and moe.memory_strategy, the padding, and matmuls that every tensor rank repeats.
For separate documents it counts the attended share of the square; for sequences on several context ranks, the squares
of each rank's runs and all rows before them. On a CPU in half precision moe/experts pads an expert's rows to blocks of
a few sizes: half a step of padding per block is counted.

Both counts leave out look-ups, norms, softmax and sums. `attended_share`: pairs of tokens that attend, divided by the
pairs of one-document samples without a sliding window. None: the share that follows from the config alone
(`derived.attended_share`), an upper bound for separate documents.
"""

from __future__ import annotations

from collections.abc import Iterator

from configs import derived
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import ModelOperation, unknown, walk
from moe.experts.sizes import BLOCK_ROWS, STEP_ROWS
from simulator.context.shared_rows import SharedRows, shared_rows

# Categories by the beginning of an operation's name; the first that fits is taken.
CATEGORIES = {
    "self_attention.core_attention": "attention_scores",
    "self_attention.": "attention_projections",
    "mlp.router": "router",
    "mlp.experts": "experts",
    "mlp.shared_experts.": "shared_expert",
    "mlp.": "feed_forward",
    "output_layer": "logits",
    "lm_head.": "head",
    "pooler": "sentence_head",
}
# kinds of operations with matmuls
PRODUCTS = (
    *("column_linear", "row_linear", "linear", "attention", "latent_attention", "expansion"),
    *("router", "experts", "pooler", "token_loss"),
)
ATTENTION = ("attention", "latent_attention")
OTHERS = (  # kinds without matmuls, or whose matmuls are not counted
    *("add", "activation", "cast", "concatenate", "copy", "dropout", "embedding", "gather", "multiply", "norm"),
    *("exchange", "reshape", "rotary", "scatter", "select", "split", "sum", "vocabulary_embedding"),
)


def has_fused_attention(config: Config, device: str) -> bool:
    """Return whether the attention kernel never stores its scores; a CPU has no such kernel with dropout."""
    return device == "cuda" or config.model.attention_dropout == 0


def computes_slices(config: Config, device: str) -> bool:
    """Return whether attention is computed in slices (blocks of its mask) instead of by torch's function."""
    model = config.model
    if model.attention_dropout > 0:
        return False
    is_cut = config.data.documents == "separate" or config.parallel.context > 1
    slides = derived.attended_share(config) < 1
    return model.family == "bert" or is_cut or slides or _is_padded(config, device)


def _is_padded(config: Config, device: str) -> bool:
    """Return whether keys or values are padded with zeros, because the CPU's kernel needs equal widths."""
    model = config.model
    if model.attention == "grouped" or device == "cuda" or model.attention_dropout > 0:
        return False
    return derived.head_dim(config) + model.rotary_head_dim != model.value_head_dim


def forward_operations(config: Config, vocab_size: int) -> dict[str, float]:
    """Return the FLOPs per token of a forward pass by category, counting the full square of attention.

    BERT's sentence head does not count. Raises ValueError for an unknown operation.
    """
    result = dict.fromkeys(_categories(config), 0.0)
    for category, operation, _ in _counted(config, vocab_size):
        if category != "sentence_head":
            result[category] += operation.flops
    return result


def forward_flops_per_token(config: Config, vocab_size: int, attended_share: float | None = None) -> float:
    """Return the FLOPs of one forward pass per token, without look-ups, norms and softmax."""
    operations = forward_operations(config, vocab_size)
    if config.model.family == "gpt":
        share = derived.attended_share(config) if attended_share is None else attended_share
        operations["attention_scores"] *= share / 2
    return sum(operations.values())


def training_flops_per_token(config: Config, vocab_size: int, attended_share: float | None = None) -> float:
    """Return the FLOPs of forward and backward pass per token: three times those of the forward pass."""
    return 3 * forward_flops_per_token(config, vocab_size, attended_share)


def executed_flops_per_token(
    config: Config,
    padded_vocab_size: int,
    device: str,
    attended_share: float | None = None,
    shared: SharedRows | None = None,
) -> float:
    """Return the FLOPs per token that all ranks together execute in forward and backward pass.

    `shared`: sharding of sequences over context ranks, if the documents' lengths are known.
    """
    shared = shared or shared_rows(config)
    counts: dict[str, dict[float, float]] = {}  # by category and number of executions: operations of the forward pass
    for category, operation, forwards in _counted(config, padded_vocab_size):
        times = _times(config, operation.kind, device) + forwards - 1
        flops = operation.flops
        if operation.kind == "pooler" or (operation.kind == "linear" and not config.parallel.sequence):
            flops *= config.parallel.tensor  # every tensor rank repeats the matmul
        if operation.kind in ATTENTION:
            flops *= shared.squares * _computed_share(config, device, attended_share)
        if operation.kind == "expansion":  # received rows are expanded, too
            flops *= shared.own_parts + shared.mean_received() / (shared.rows * shared.heads)
        of_category = counts.setdefault(category, {})
        of_category[times] = of_category.get(times, 0.0) + flops
    if device == "cpu" and config.training.precision != "fp32" and "experts" in counts:
        counts["experts"] = {times: count * _padded_rows(config) for times, count in counts["experts"].items()}
    order = (*_categories(config), "sentence_head")
    return sum(count * times for category in order for times, count in counts.get(category, {}).items())


def _categories(config: Config) -> list[str]:
    names = ["attention_projections", "attention_scores", "feed_forward", "logits"]
    names += ["router", "experts", "shared_expert"] if derived.is_moe(config) else []
    return names + (["head"] if config.model.family == "bert" else [])


def _counted(config: Config, vocab_size: int) -> Iterator[tuple[str, ModelOperation, int]]:
    """Yield (category, operation, number of its forward passes) for every operation that has matmuls."""
    for block in blueprint.blocks(config, vocab_size, blueprint.whole_model(config)):
        for operation, forwards in walk(block.operations):
            if operation.kind in PRODUCTS:
                category = next(
                    (value for prefix, value in CATEGORIES.items() if operation.name.startswith(prefix)), None
                )
                yield category or unknown("flops", "name of an operation", operation.name), operation, forwards
            elif operation.kind not in OTHERS:
                unknown("flops", f"kind of operation of {operation.name}", operation.kind)


def _times(config: Config, kind: str, device: str) -> float:
    """Return the FLOPs of an operation's forward and backward pass, divided by those of its forward pass."""
    if kind in ATTENTION and has_fused_attention(config, device):
        return 3.5
    if kind == "expansion":
        return 4.0  # the backward pass repeats the forward pass before the gradients
    if kind == "router" and device == "cpu" and config.training.precision == "bf16":
        return 5.0  # its backward pass takes the gradient as a sum of two bf16 numbers
    if kind == "experts" and "recompute" in config.moe.memory_strategy:
        return 3.0 + (2 / 3 if config.model.activation == "swiglu" else 1 / 2)
    return 3.0


def _computed_share(config: Config, device: str, attended_share: float | None) -> float:
    """Return the share of the full attention square that a device computes, with zero padding of keys or values."""
    share = 1.0
    if computes_slices(config, device):
        share = derived.attended_share(config) if attended_share is None else attended_share
    if _is_padded(config, device):
        keys, values = derived.head_dim(config) + config.model.rotary_head_dim, config.model.value_head_dim
        share *= 2 * max(keys, values) / (keys + values)
    return share


def _padded_rows(config: Config) -> float:
    """Return the rows that experts compute in half precision on a CPU, divided by the rows without padding.

    Each expert's rows are padded to blocks; the load is even.
    """
    moe, degree = config.moe, derived.pipeline_degrees(config)[0] or 1
    kept = moe.top_k * derived.kept_share(config)  # of a token's assignments
    expert_rows = derived.tokens_per_call(config) * kept * config.parallel.expert / (moe.num_experts or 1) / degree
    block = expert_rows / max(1, -(-expert_rows // BLOCK_ROWS))
    return (block + STEP_ROWS / 2) / block
