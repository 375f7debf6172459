"""Vocabularies of other formats as a Hugging Face tokenizer.json."""
