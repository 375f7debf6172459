"""GPT and BERT, built from Megatron-core's modules."""
