"""The interface of the compiled CPU kernels for experts. `has`, `has_blocks` and `has_tiles` check what they accept.

The kernels are compiled once with the machine's C++ compiler, stored in the user's cache, and called by address.
Without a compiler, or if the source does not compile, torch's operations do the same in more passes over memory.
"""

from moe.kernels.ops import (  # noqa: F401
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
from moe.kernels.shared_object import ALIGNMENT, has, has_blocks, has_tiles  # noqa: F401
