"""GPT and BERT on Megatron-core's parts."""

import parallel  # noqa: F401  (before Megatron-core is imported: it silences notes that nobody can act on)
