"""Where the decoder's weights come from: the chunks of a model in training, or files, through a ring of slots."""
