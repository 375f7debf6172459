"""Train a model: `python train.py [key=value ...]`, or the same under torchrun on many ranks.

The config is composed and checked before anything heavy is imported; training/resilience/job.py and `Trainer.fit` do
the rest. Signals are answered from the first line on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs import last_words
from training.resilience import launcher, signals

if TYPE_CHECKING:
    from configs.schema import Config


def main(config: Config) -> int:
    """Build the run of a checked config and train it, or print its plan; the exit status."""
    from configs.ranks import world_size
    from configs.validate import planned_world_size

    if config.plan:
        from data.pieces import planned_pieces, planned_share
        from data.vocabulary import expected_vocab_size
        from simulator import text as plan_text

        signals.of_this_process.restore(ignore=False)
        ranks, vocab_size = planned_world_size(config, world_size()), expected_vocab_size(config)
        return plan_text.show(config, ranks, vocab_size, planned_share(config), planned_pieces(config))
    from parallel import card

    card.set_environment(config)
    from training.resilience import job
    from training.starting import preflight  # a wrong config and --help need not wait for these either

    preflight.check(config)
    return job.run(config)


if __name__ == "__main__":
    last_words.of_exceptions()
    signals.of_this_process.end_at_once()
    launcher.of_this_process.watch()
    from configs.compose import run  # behind what must be there from the first line on

    run(main)
