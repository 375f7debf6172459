"""Block sizes of experts on the host, and scratch memory of a block. Imports torch only for the compiled kernels."""

from __future__ import annotations

from moe.chunk_plan import WHOLE, LayerLoad

# Rows that an expert computes at once on the host, so that the activations between the two matmuls stay in the cache.
# Measured with one thread of a Xeon with AMX, bf16, hidden 512, forward and backward: 32 experts of width 256,
# 164 ms with blocks of 256 rows, 141 with 512, 128 with 1024 and 127 with 2048; 8 experts of width 1024: 224, 184, 171,
# 175.
BLOCK_ROWS = 1024
STEP_ROWS = 16  # in half precision a block's rows are computed in multiples of it
SPARE_ROWS = 64  # extra rows of a buffer to which blocks are written, because a block is written with padding


# Scratch memory is in elements of the load's dtype, for blocks of up to `num_rows`. On a GPU, whose matmuls compute
# all experts at once, a block is a chunk, and rows that are gathered twice count twice: see compute.py.


def forward_scratch(load: LayerLoad, num_rows: int, own_preactivation: bool) -> int:
    """Return the elements of scratch memory for a block's forward pass; `own_preactivation`: plus the preactivation."""
    if load.tiled:
        from moe import kernels

        return _elements(load, kernels.forward_bytes(num_rows, load.hidden_size, load.width, load.hidden_columns))
    if load.block == WHOLE:
        return num_rows * (load.width + (load.hidden_columns if own_preactivation else 0))
    return num_rows * (load.hidden_size + load.width + (load.hidden_columns if own_preactivation else 0))


def input_scratch(load: LayerLoad, num_rows: int, recompute: bool) -> int:
    """Return the elements of scratch memory for a block's input gradients and, with `recompute`, its preactivation."""
    if load.tiled:
        return _tiled_backward(load, num_rows, recompute, False)
    if load.block == WHOLE:
        return num_rows * (load.hidden_size + load.width + (load.hidden_columns if recompute else 0))
    return num_rows * (load.hidden_size + load.width + (load.hidden_size + load.hidden_columns if recompute else 0))


def weight_scratch(load: LayerLoad, num_rows: int) -> int:
    """Return the elements of scratch memory for a block's weight gradients."""
    if load.tiled:
        from moe import kernels

        return _elements(load, kernels.weights_bytes(num_rows, load.hidden_size, load.width, load.hidden_columns))
    return 2 * num_rows * load.hidden_size


def both_scratch(load: LayerLoad, num_rows: int, recompute: bool) -> int:
    """Return the elements of scratch memory for a block's input gradients, followed at once by its weight gradients."""
    if load.tiled:
        return _tiled_backward(load, num_rows, recompute, True)
    if load.block == WHOLE:
        # The activation's gradient is freed before the weights' gradients are allocated.
        widest = max(2 * load.hidden_size + 2 * load.width, 3 * load.hidden_size + load.width)
        return num_rows * (widest + load.hidden_columns * (2 if recompute else 1))
    return num_rows * (2 * load.hidden_size + 2 * load.width + load.hidden_columns * (2 if recompute else 1))


def _tiled_backward(load: LayerLoad, num_rows: int, recompute: bool, weights: bool) -> int:
    from moe import kernels

    sizes = num_rows, load.hidden_size, load.width, load.hidden_columns
    return _elements(load, kernels.backward_bytes(*sizes, recompute, weights))


def _elements(load: LayerLoad, num_bytes: int) -> int:
    return -(-num_bytes // load.element_size)
