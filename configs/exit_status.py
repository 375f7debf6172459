"""Exit statuses that say more than that something failed. Imports nothing, for launchers' sake."""

from __future__ import annotations

FAILED = 1  # of everything else that ends with an error
WRONG_CONFIG = 2  # of every program that a wrong configuration or argument stops
STOPPED_EARLY = 75  # of a run that stopped on purpose with everything saved: start it again to go on (EX_TEMPFAIL)
INTERRUPTED = 130  # by Ctrl-C, as shells have it
