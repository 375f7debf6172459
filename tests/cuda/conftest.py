"""The small corpus of the training tests."""

from tests.training.conftest import data

__all__ = ["data"]
