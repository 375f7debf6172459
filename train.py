"""Train a model: `python train.py [key=value ...]`, or the same arguments under torchrun on several ranks. The config
is composed and checked before any large library is imported. Then training/resilience/job.py runs `Trainer.fit`. Signal
handlers are installed first."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from base import exit_handler
from training.resilience import launcher, signals

if TYPE_CHECKING:
    from configs.schema import Config


def main(config: Config, given: frozenset[str]) -> int:
    """Train the run that a checked config describes, or print its plan if `config.plan` is set; return the exit status.
    `given`: the keys that the command line sets."""
    if config.plan:
        from training.starting import plans

        signals.of_this_process.restore(ignore=False)
        return plans.show(config, given)
    from training.starting import choices

    composed, choice = config, choices.choose_layout(config, given)
    config = choices.choose_experts(config if choice is None else choice.config, given)
    from parallel import card

    card.set_environment(config)
    from training.resilience import job
    from training.starting import preflight  # imported late: a wrong config and --help need not wait for these

    preflight.check(config)
    return job.run(config, composed, choice)


if __name__ == "__main__":
    exit_handler.log_exceptions()
    signals.of_this_process.end_at_once()
    launcher.of_this_process.watch()
    from configs.compose import run  # after the handlers, which must be installed first

    try:
        run(main)
    finally:
        gc.freeze()  # the process ends: collecting all objects would take a second more
