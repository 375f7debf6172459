"""The command `python -m training.status`: see training/resilience/status.py."""

from training.resilience.status import main

if __name__ == "__main__":
    raise SystemExit(main())
