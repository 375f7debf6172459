"""Read the logical tensors of a trained model directly from its files, without a model and without a second copy."""
