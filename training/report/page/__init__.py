"""The page of a run: what was read becomes numbers by section, and these one HTML file."""

from training.report.page.render import write

__all__ = ["write"]
