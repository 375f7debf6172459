"""`python -m training.generate` as it was called before: see inference/generate.py."""

from inference.generate import main

if __name__ == "__main__":
    raise SystemExit(main())
