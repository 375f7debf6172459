"""`python -m training.evaluate` as it was called before: see inference/evaluate.py."""

from inference.evaluate import main

if __name__ == "__main__":
    raise SystemExit(main())
