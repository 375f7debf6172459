"""How the host's experts cut their rows into blocks, and the scratch memory that a block takes. Imports torch only for
the kernels'."""

from __future__ import annotations

from moe.chunk_plan import WHOLE, LayerLoad

# Rows that go through an expert at once on the host, so that the activations between the two products stay near the
# core. Measured with one thread of a Xeon with AMX, bf16, hidden 512, forward and backward: 32 experts of width 256,
# 164 ms with blocks of 256 rows, 141 with 512, 128 with 1024 and 127 with 2048; 8 experts of width 1024: 224, 184, 171,
# 175.
BLOCK_ROWS = 1024
STEP_ROWS = 16  # in half precision a block's rows are computed in multiples of it
SPARE_ROWS = 64  # behind the rows of a buffer that blocks are written to: a block may be written longer than it is


# Scratch memory is in numbers of the load's kind, for blocks of up to `rows`. On a GPU, whose products take all experts
# at once, a block is a chunk, and rows that are gathered twice are there twice: see compute.py.


def forward_scratch(load: LayerLoad, rows: int, own_preactivation: bool) -> int:
    """Scratch of the forward pass; `own_preactivation`: nobody else has room for what goes into the activation."""
    if load.tiled:
        from moe import kernels

        return _numbers(load, kernels.forward_bytes(rows, load.hidden_size, load.width, load.hidden_columns))
    if load.block == WHOLE:
        return rows * (load.width + (load.hidden_columns if own_preactivation else 0))
    return rows * (load.hidden_size + load.width + (load.hidden_columns if own_preactivation else 0))


def input_scratch(load: LayerLoad, rows: int, recompute: bool) -> int:
    """Scratch of the input gradients."""
    if load.tiled:
        return _tiled_backward(load, rows, recompute, False)
    if load.block == WHOLE:
        return rows * (load.hidden_size + load.width + (load.hidden_columns if recompute else 0))
    return rows * (load.hidden_size + load.width + (load.hidden_size + load.hidden_columns if recompute else 0))


def weight_scratch(load: LayerLoad, rows: int) -> int:
    """Scratch of the weight gradients."""
    if load.tiled:
        from moe import kernels

        return _numbers(load, kernels.weights_bytes(rows, load.hidden_size, load.width, load.hidden_columns))
    return 2 * rows * load.hidden_size


def both_scratch(load: LayerLoad, rows: int, recompute: bool) -> int:
    """Scratch of both gradients, computed one after the other for each block."""
    if load.tiled:
        return _tiled_backward(load, rows, recompute, True)
    if load.block == WHOLE:
        # The activation's gradient is let go before the weights' gradients are made.
        widest = max(2 * load.hidden_size + 2 * load.width, 3 * load.hidden_size + load.width)
        return rows * (widest + load.hidden_columns * (2 if recompute else 1))
    return rows * (2 * load.hidden_size + 2 * load.width + load.hidden_columns * (2 if recompute else 1))


def _tiled_backward(load: LayerLoad, rows: int, recompute: bool, weights: bool) -> int:
    from moe import kernels

    return _numbers(
        load, kernels.backward_bytes(rows, load.hidden_size, load.width, load.hidden_columns, recompute, weights)
    )


def _numbers(load: LayerLoad, num_bytes: int) -> int:
    return -(-num_bytes // load.element_size)
