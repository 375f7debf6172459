"""Pointwise operations of a layer: forward and backward are one function each, which a GPU runs as a single kernel."""
