"""Readers that convert tokenizers of other formats to a Hugging Face tokenizer.json."""
