"""Sources of the decoder's weights: the chunks of a model in training, or files, through a ring of slots."""
