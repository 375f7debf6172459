"""Pointwise parts of a layer: each direction one function of its inputs, which a GPU runs as one kernel."""
