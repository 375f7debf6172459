"""GPT and BERT, built of Megatron-core's modules."""
