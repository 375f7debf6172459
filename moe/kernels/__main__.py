"""Compile the kernels ahead of the first training: `python -m moe.kernels`."""

from moe.kernels.compiler import cache_folder
from moe.kernels.shared_object import can_multiply_tiles, loaded

if loaded() is not None:
    print(
        "kernels: compiled for this CPU, in "
        f"{cache_folder()}{', with bfloat16 matmuls' if can_multiply_tiles() else ''}"
    )
