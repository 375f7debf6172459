"""Hugging Face model families that can be converted: one file each, built from `keys.py`, `kinds.py` and `rules.py`."""
