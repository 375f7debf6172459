"""GPT and BERT on Megatron-core's parts."""
