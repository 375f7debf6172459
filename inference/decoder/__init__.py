"""The decoder: a GPT generates text with the weights of the training model, without autograd and with a key-value
cache.

For one token, the Python overhead of Megatron-core's modules exceeds the time of the matrix multiplications. The
decoder therefore takes weights by their logical names, from a model in training or from files, and applies them with a
few torch calls per layer. Only experts that a token chose are computed. The decoder runs in every layout: tensor ranks
all-reduce the outputs of their shards, expert ranks compute their own experts for all tokens, and pipeline ranks send
hidden states to the next stage. All ranks of a job have the same tokens. No token is dropped, even if the config sets a
capacity factor.

Shapes: b texts, s tokens of a text, T = b * s tokens, H hidden size, g key/value heads of this rank, r query heads for
each of them, d channels of a head, L tokens that the cache can hold, V vocabulary, k experts of a token.
"""

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported)

# isort: split
from inference.decoder.decode import Decoder, TextBatch
from inference.decoder.encode import Encoder
from inference.decoder.step import Cache

__all__ = ["Cache", "Decoder", "Encoder", "TextBatch"]
