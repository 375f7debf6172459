"""Floating-point operations of the model per token, of its matrix products: a fold over the blueprint.

Two counts. The model's (`forward_flops_per_token`, `training_flops_per_token`) is the convention of model FLOPs
utilisation (PaLM, appendix B): a multiply-add is 2 operations, backward costs twice the forward, recomputation and the
vocabulary's padding do not count, and attention counts its full square for BERT and half of it for causal GPT. Of that
half it counts the pairs that a sliding window and separate documents leave. BERT's head counts the tokens that are
predicted. MFU everywhere is made of it.

The machine's (`executed_flops_per_token`) is what PyTorch's FlopCounterMode counts over a step on all ranks: the full
square, the fused attention's backward pass with its scores computed again (2.5 times the forward), whatever
training.recompute and moe.memory_strategy compute again, the padding, and what every tensor rank computes alike. Of
separate documents it counts the squares' share that attends; of sequences that context ranks share, the squares of the
runs that these got, and all that lies before them. On a CPU in half precision, where moe/experts computes an
expert's rows in blocks of a few sizes, half a step of these for each block. Both leave out look-ups, norms, softmax and
sums.

`attended_share`: pairs of tokens that attend, over those of samples of one document without a sliding window; None:
what the config alone says (`derived.attended_share`), which is the most that separate documents can have.
"""

from __future__ import annotations

from collections.abc import Iterator

from configs import derived
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import ModelOperation, unknown, walk
from moe.experts.sizes import BLOCK_ROWS, STEP_ROWS
from simulator.context.rows import SharedRows, shared_rows

# Categories by the beginning of an operation's name, the first that fits.
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
# kinds of operations that have some
PRODUCTS = (
    *("column_linear", "row_linear", "linear", "attention", "latent_attention", "expansion"),
    *("router", "experts", "pooler", "token_loss"),
)
ATTENTION = ("attention", "latent_attention")
OTHERS = (  # that have none, or none that are counted
    *(
        "add",
        "activation",
        "cast",
        "concatenate",
        "copy",
        "dropout",
        "embedding",
        "gather",
        "multiply",
        "norm",
    ),
    *("exchange", "reshape", "rotary", "scatter", "select", "split", "sum", "vocabulary_embedding"),
)


def has_fused_attention(config: Config, device: str) -> bool:
    """Whether attention makes no scores; on a CPU there is no kernel with dropout for it."""
    return device == "cuda" or config.model.attention_dropout == 0


def computes_slices(config: Config, device: str) -> bool:
    """Whether attention is computed by slices (models/attention/sliced.py), and not by torch's own function."""
    model = config.model
    if model.attention_dropout > 0:
        return False
    apart = config.data.documents == "separate" or config.parallel.context > 1
    slides = derived.attended_share(config) < 1
    return model.family == "bert" or apart or slides or _is_padded(config, device)


def _is_padded(config: Config, device: str) -> bool:
    """Whether a kernel gets values, or keys, with zeros behind them, as the CPU's wants one width."""
    model = config.model
    if model.attention == "grouped" or device == "cuda" or model.attention_dropout > 0:
        return False
    return derived.head_dim(config) + model.rotary_head_dim != model.value_head_dim


def forward_operations(config: Config, vocab_size: int) -> dict[str, float]:
    """Operations of the forward pass per token by category; attention's scores with their full square, without the
    sentence head.

    Raises ValueError for an operation that it does not know.
    """
    result = dict.fromkeys(_categories(config), 0.0)
    for category, operation, _ in _counted(config, vocab_size):
        if category != "sentence_head":
            result[category] += operation.flops
    return result


def forward_flops_per_token(config: Config, vocab_size: int, attended_share: float | None = None) -> float:
    """Operations of one forward pass divided by its tokens; embeddings look-ups, norms and softmax are left out."""
    operations = forward_operations(config, vocab_size)
    if config.model.family == "gpt":
        share = derived.attended_share(config) if attended_share is None else attended_share
        operations["attention_scores"] *= share / 2
    return sum(operations.values())


def training_flops_per_token(config: Config, vocab_size: int, attended_share: float | None = None) -> float:
    """Forward and backward together: three times the forward."""
    return 3 * forward_flops_per_token(config, vocab_size, attended_share)


def executed_flops_per_token(
    config: Config,
    padded_vocab_size: int,
    device: str,
    attended_share: float | None = None,
    shared: SharedRows | None = None,
) -> float:
    """Operations of forward and backward pass that all ranks together carry out, divided by the tokens. `shared`: as
    in simulator/communication.py."""
    shared = shared or shared_rows(config)
    counts: dict[str, dict[float, float]] = {}  # by category: by how often they run, those of the forward pass
    for category, operation, forwards in _counted(config, padded_vocab_size):
        times = _times(config, operation.kind, device) + forwards - 1
        flops = operation.flops * _copies(config, operation.kind)
        if operation.kind in ATTENTION:
            flops *= shared.squares * _computed_share(config, device, attended_share)
        if operation.kind == "expansion":  # of the rows that arrive too
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
    """The category of every operation with products, the operation, and how often its forward pass runs."""
    for block in blueprint.blocks(config, vocab_size, blueprint.whole(config)):
        for operation, forwards in walk(block.operations):
            if operation.kind in PRODUCTS:
                category = next(
                    (value for prefix, value in CATEGORIES.items() if operation.name.startswith(prefix)), None
                )
                yield category or unknown("flops", "operation", operation.name), operation, forwards
            elif operation.kind not in OTHERS:
                unknown("flops", f"kind of operation of {operation.name}", operation.kind)


def _times(config: Config, kind: str, device: str) -> float:
    """Forward and backward pass together over the forward pass, each once."""
    if kind in ATTENTION and has_fused_attention(config, device):
        return 3.5
    if kind == "expansion":
        return 4.0  # going back, once more before its gradients
    if kind == "router" and device == "cpu" and config.training.precision == "bf16":
        return 5.0  # its backward pass takes the gradient as a sum of two bf16 numbers
    if kind == "experts" and "recompute" in config.moe.memory_strategy:
        return 3.0 + (2 / 3 if config.model.activation == "swiglu" else 1 / 2)
    return 3.0


def _computed_share(config: Config, device: str, attended_share: float | None) -> float:
    """What is computed of the full square of attention over one document without a sliding window."""
    share = 1.0
    if computes_slices(config, device):
        share = derived.attended_share(config) if attended_share is None else attended_share
    if _is_padded(config, device):
        keys, values = derived.head_dim(config) + config.model.rotary_head_dim, config.model.value_head_dim
        share *= 2 * max(keys, values) / (keys + values)
    return share


def _copies(config: Config, kind: str) -> int:
    """Tensor ranks that compute the same where nothing is split."""
    if kind == "pooler" or (kind == "linear" and not config.parallel.sequence):
        return config.parallel.tensor
    return 1


def _padded_rows(config: Config) -> float:
    """Rows that an even load computes in half precision on a CPU, over those that it has; see moe/experts/blocks.py's
    padded."""
    moe, degree = config.moe, derived.pipeline_degrees(config)[0] or 1
    kept = moe.top_k * derived.kept_share(config)  # of a token's assignments
    rows = derived.tokens_per_call(config) * kept * config.parallel.expert / (moe.num_experts or 1) / degree
    block = rows / max(1, -(-rows // BLOCK_ROWS))
    return (block + STEP_ROWS / 2) / block
