"""Entry point of `python -m data.prepare`."""

import sys

from data.prepare.command import main

if __name__ == "__main__":
    sys.exit(main())
