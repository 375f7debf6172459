"""A GPT that continues text: the weights of the training model, run without autograd and with a key-value cache.

Megatron-core's modules spend more time per call than one token's products take. The decoder takes weights by their
logical names, from a model in training or from files, and applies them with a few torch calls per layer; only experts
that a token chose are computed. It runs in every layout: tensor ranks sum their shards' outputs, expert ranks compute
their own experts for all tokens, pipeline ranks pass the hidden state on. All ranks of a job hold the same tokens. A
capacity factor is not applied: no token is dropped.

Shapes: b texts, s tokens of a text, T = b * s tokens, H hidden size, g key/value heads of this rank, r query
heads for each of them, d channels of a head, L tokens that the cache can hold, V vocabulary, k experts of a token.
"""

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported)

# isort: split
from inference.decoder.decode import Decoder, TextBatch
from inference.decoder.encode import Encoder
from inference.decoder.step import Cache

__all__ = ["Cache", "Decoder", "Encoder", "TextBatch"]
