"""Weights that come as they are needed, in generation from less memory than a model takes."""
