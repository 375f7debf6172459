"""Pointwise operations of a layer: each direction is one function of its inputs, which a GPU runs as one kernel."""
