"""`python -m training.status` as it was called before: see training/resilience/status.py."""

from training.resilience.status import main

if __name__ == "__main__":
    raise SystemExit(main())
