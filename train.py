"""Train a model: `python train.py [key=value ...]`, or the same under torchrun on many ranks.

The config is composed and checked before anything heavy is imported; training/job.py and `Trainer.fit` do the rest.
"""

from __future__ import annotations

from configs import last_words
from configs.compose import run
from configs.ranks import world_size
from configs.schema import Config
from configs.validate import planned_world_size


def main(config: Config) -> int:
    """Build the run of a checked config and train it, or print its plan; the exit status."""
    if config.plan:
        from training import plan_text  # imports torch, seconds that a wrong config need not wait for

        return plan_text.show(config, planned_world_size(config, world_size()))
    from training import job, preflight  # a wrong config and --help need not wait for these either

    preflight.check(config)
    return job.run(config)


if __name__ == "__main__":
    last_words.of_exceptions()
    run(main)
