"""`python -m training.fill_mask` as it was called before: see inference/fill_mask.py."""

from inference.fill_mask import main

if __name__ == "__main__":
    raise SystemExit(main())
