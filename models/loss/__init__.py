"""The language-model loss: output layer, softmax and cross entropy in tiles of tokens, without the logits of all."""
