"""Logical tensors of a trained model, read from the files that it lies in: without a model, and without a second
copy."""
