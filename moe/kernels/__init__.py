"""The compiled kernels for experts on the host: this is their whole interface, and `has`... tell what they accept.

They are compiled once with the machine's C++ compiler, kept in the user's cache, and called by address. Without a
compiler, or if the source does not compile, torch's operations do the same work in more passes over memory.
"""

from moe.kernels.ops import (
    activate,
    activate_backward,
    add_up,
    backward_blocks,
    backward_bytes,
    forward_blocks,
    forward_bytes,
    gate,
    takes_top_k,
    top_k,
    weights_blocks,
    weights_bytes,
)
from moe.kernels.shared_object import ALIGNMENT, has, has_blocks, has_tiles

__all__ = [
    "ALIGNMENT",
    "activate",
    "activate_backward",
    "add_up",
    "backward_blocks",
    "backward_bytes",
    "forward_blocks",
    "forward_bytes",
    "gate",
    "has",
    "has_blocks",
    "has_tiles",
    "takes_top_k",
    "top_k",
    "weights_blocks",
    "weights_bytes",
]
