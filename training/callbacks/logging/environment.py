"""Writes down what a run is started on."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from configs.files import spared
from training.report import environment
from training.run import Callback, Run


class Environment(Callback):
    """Writes `environment.json` when the run starts or goes on."""

    def on_start(self, run: Run) -> None:
        ranks: list[dict[str, Any]] = [{}] * run.topology.world_size
        dist.all_gather_object(ranks, environment.of_this_rank(run.topology.device))
        if run.is_main:
            with spared(run.run_dir / environment.ENVIRONMENT):
                environment.write(run.run_dir, ranks)
