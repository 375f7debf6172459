"""Language-model loss: output layer, softmax and cross entropy by tiles of tokens, without storing all logits."""
