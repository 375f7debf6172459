"""GPT and BERT on Megatron-core's parts."""

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)
