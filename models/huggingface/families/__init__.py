"""The Hugging Face families that can be converted: one file each, built from `keys.py` and `rules.py`."""
