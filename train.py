"""Train a model: `python train.py [key=value ...]`, or the same under torchrun on many ranks.

The config is composed and checked before anything heavy is imported; training/resilience/job.py and `Trainer.fit` do
the rest. Signals are answered from the first line on.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from configs import last_words
from training.resilience import launcher, signals

if TYPE_CHECKING:
    from configs.schema import Config


def main(config: Config, given: frozenset[str]) -> int:
    """Build the run of a checked config and train it, or print its plan; the exit status. `given`: the keys of the
    command line."""
    if config.plan:
        from training.starting import plans

        signals.of_this_process.restore(ignore=False)
        return plans.show(config, given)
    from training.starting import experts_choice, layout_choice

    composed, choice = config, layout_choice.choose(config, given)
    config = experts_choice.place_experts(config if choice is None else choice.config, given)
    from parallel import card

    card.set_environment(config)
    from training.resilience import job
    from training.starting import preflight  # a wrong config and --help need not wait for these either

    preflight.check(config)
    return job.run(config, composed, choice)


if __name__ == "__main__":
    last_words.of_exceptions()
    signals.of_this_process.end_at_once()
    launcher.of_this_process.watch()
    from configs.compose import run  # behind what must be there from the first line on

    try:
        run(main)
    finally:
        gc.freeze()  # the process ends: to take all apart would need a second more
