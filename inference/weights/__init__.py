"""Sources of the decoder's weights: a model in training, or files, streamed if they do not fit into memory."""
