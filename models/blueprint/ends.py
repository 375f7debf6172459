"""Operations at the two ends of the model: the embedding before the layers, and the head with the loss after them."""

from __future__ import annotations

from dataclasses import replace

from configs import derived
from configs.schema import Config
from models.blueprint.operation import (
    FLOAT32,
    INPUT,
    OWN_PREDICTED,
    PREDICTED,
    SAMPLES,
    SCALAR,
    TENSOR,
    TOKENS,
    Collective,
    ModelOperation,
    Split,
    Tensor,
    Weight,
    changed_copy,
    dropout,
    hidden,
    norm,
    scatter,
    transformer_name,
)

VOCAB_MULTIPLE = 128  # rows per tensor rank: matrix kernels like sizes that are multiples of 128
NUM_TOKEN_TYPES = 2  # of BERT: first and second sentence


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Return the number of vocabulary rows that all tensor ranks store together, padding included."""
    multiple = VOCAB_MULTIPLE * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def embedding(config: Config, vocab_size: int, is_last: bool) -> list[ModelOperation]:
    """Return the operations that embed words, positions and token types. `is_last`: this rank also has the head."""
    model, size = config.model, config.model.hidden_size
    bert, sequence = model.family == "bert", config.parallel.sequence
    # Position and token type embeddings are added to word embeddings that are summed over the ranks already.
    adds = bert or model.position_embedding == "learned"
    state = Tensor("words", size)
    summed = (Collective("all_reduce", TENSOR, state),) if adds or not sequence else ()
    weight = (_vocabulary(config, "embedding.word_embeddings", vocab_size, is_first=True, is_last=is_last),)
    operations = [
        ModelOperation(
            "vocabulary_embedding", "embedding.word_embeddings", outputs=(state,), weights=weight, collectives=summed
        )
    ]

    def add(module: str, num_rows: int) -> None:
        nonlocal state
        other, both = Tensor(module, size), Tensor(f"{state.name}+{module}", size)
        table = (Weight(f"embedding.{module}.weight", (num_rows, size), "matrix"),)
        operations.append(ModelOperation("embedding", f"embedding.{module}", outputs=(other,), weights=table))
        operations.append(
            ModelOperation(
                "add", "embedding", outputs=(both,), passes=(state.name, other.name), frees=(state.name, other.name)
            )
        )
        state = both

    if bert:
        add("tokentype_embeddings", NUM_TOKEN_TYPES)
    if model.position_embedding == "learned":
        add("position_embeddings", model.sequence_length)
    if config.training.micro_batch_size > 1 and config.parallel.context == 1:  # [b, s, h] -> [s, b, h]
        operations.append(changed_copy("embedding", state.name, Tensor("transposed", size), frees=(state.name,)))
        state = operations[-1].output
    if sequence:
        cut = scatter("embedding", state, hidden(config, "own"), frees=(state.name,))
        # no reduce-scatter: the embeddings were summed over the ranks before
        operations.append(replace(cut, collectives=cut.collectives[1:]) if adds else cut)
        state = cut.output
    if bert:
        operations.append(
            norm(config, "embedding.layer_norm", state.name, hidden(config, "normed"), size, frees=(state.name,))
        )
        state = operations[-1].output
    return operations + dropout(config, state.name, hidden(config, "dropped"), frees=(state.name,))


def head(config: Config, vocab_size: int, is_first: bool) -> list[ModelOperation]:
    """Return the operations of the final norm, the output layer and the loss. `is_first`: this rank also has the
    embedding."""
    model, size = config.model, config.model.hidden_size
    bert, sentences = model.family == "bert", model.family == "bert" and model.sentence_head != "none"
    operations, last, done = list[ModelOperation](), INPUT, [INPUT]
    if model.norm_position == "pre":
        operations.append(
            norm(config, f"{transformer_name(config)}.final_layernorm", INPUT, hidden(config, "final"), size)
        )
        last = "final"
        done.append(last)
    if bert:
        operations += _pooler(config, last) if sentences else []
        operations += _language_model_head(config, last)
        last = "transformed"
        done.append(last)
    weights = [_vocabulary(config, "output_layer", vocab_size, is_first=is_first, is_last=True)]
    if bert:
        padded = padded_vocab_size(vocab_size, config.parallel.tensor)
        weights.append(Weight("output_layer.bias", (vocab_size,), "bias", (Split(0, TENSOR),), stored_rows=padded))
    whole = Tensor(last, size, PREDICTED if bert else TOKENS)
    sums = Tensor("softmax", 3, whole.row_kind, dtype=FLOAT32)  # per token: largest logit, sum, label's logit
    gathered = [Collective("all_gather", TENSOR, whole), Collective("reduce_scatter", TENSOR, whole)]
    exchanged = gathered if config.parallel.sequence else [Collective("all_reduce", TENSOR, whole)]
    operations.append(
        ModelOperation(
            "token_loss",
            "output_layer",
            (last,),
            (Tensor("loss", 1, dtype=FLOAT32),),
            frees=tuple(done),  # the hidden states are held until the loss is computed
            weights=tuple(weights),
            flops=2.0 * size * vocab_size * derived.predicted_share(config),
            collectives=(*exchanged, Collective("all_reduce", TENSOR, sums)),
        )
    )
    if sentences:
        total = Tensor("total_loss", 1, SCALAR, dtype=FLOAT32)
        operations.append(ModelOperation("sum", "loss", ("loss", "pooled"), (total,), frees=("loss",)))
    return operations


def _vocabulary(config: Config, module: str, vocab_size: int, *, is_first: bool, is_last: bool) -> Weight:
    """Return the weight of the embedding or output layer, with one row per token of the vocabulary. If the two are
    tied, the last pipeline stage stores a copy."""
    tied = config.model.tie_embeddings
    return Weight(
        "embedding.word_embeddings.weight" if tied else f"{module}.weight",
        (vocab_size, config.model.hidden_size),
        "matrix",
        (Split(0, TENSOR),),
        stored_rows=padded_vocab_size(vocab_size, config.parallel.tensor),
        uses=2 if tied and is_first and is_last else 1,
        is_shared=tied and config.parallel.pipeline > 1,
        is_copy=tied and module == "output_layer",
    )


def _language_model_head(config: Config, x: str) -> list[ModelOperation]:
    """Return the operations of BERT's head before the output layer: select the tokens to predict, and transform their
    hidden states."""
    size = config.model.hidden_size
    weights = Weight("lm_head.dense.weight", (size, size), "matrix"), Weight("lm_head.dense.bias", (size,), "bias")
    selected, dense, active, transformed = (
        Tensor(name, size, OWN_PREDICTED) for name in ("selected", "dense", "active", "transformed")
    )
    flops = 2.0 * size * size * derived.predicted_share(config)
    frees = ("selected", "dense", "active")
    return [
        ModelOperation("select", "lm_head", (x,), (selected,)),
        ModelOperation(
            "linear", "lm_head.dense", ("selected",), (dense,), saved=("selected",), weights=weights, flops=flops
        ),
        ModelOperation("activation", "lm_head", ("dense",), (active,), saved=("dense",)),
        norm(config, "lm_head.layer_norm", "active", transformed, size, frees=frees),
    ]


def _pooler(config: Config, x: str) -> list[ModelOperation]:
    """Return the operations of BERT's head for sentence pairs, which reads the first token of each sample."""
    size = config.model.hidden_size
    weights = (
        Weight("pooler.dense.weight", (size, size), "matrix"),
        Weight("pooler.dense.bias", (size,), "bias"),
        Weight("binary_head.weight", (2, size), "matrix"),
        Weight("binary_head.bias", (2,), "bias"),
    )
    gathered = (Collective("all_gather", TENSOR, Tensor(x, size)),) if config.parallel.sequence else ()
    pooled = Tensor("pooled", size, SAMPLES)
    flops = 2.0 * size * (size + 2) / config.model.sequence_length
    return [
        ModelOperation(
            "pooler", "pooler", (x,), (pooled,), frees=("pooled",), weights=weights, flops=flops, collectives=gathered
        )
    ]
