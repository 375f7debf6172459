"""`python -m training.checkpoint` as it was called before: see checkpoint/__main__.py."""

from checkpoint.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())
