"""The Hugging Face families that convert: one file each, and `rules.py` with what they are made of."""
