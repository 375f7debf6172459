"""`python -m training.export` as it was called before: see checkpoint/export.py."""

from checkpoint.export import main

if __name__ == "__main__":
    raise SystemExit(main())
