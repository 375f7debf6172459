"""What `training.deterministic` tells the libraries that a GPU computes with."""

from __future__ import annotations

import os

import pytest
import torch

from configs.compose import compose
from training.trainer import Trainer


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.setenv(name, "")  # to be put back
        monkeypatch.delenv(name)
    try:
        Trainer(compose(["model=gpt_tiny", "training.deterministic=true"]))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    finally:
        torch.use_deterministic_algorithms(False)
