"""The Hugging Face model families that can be converted: one file each, built from `keys.py` and `rules.py`."""
