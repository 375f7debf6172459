"""Train a model: `python train.py [key=value ...]`, or the same under torchrun on many ranks.

The config is composed and checked before anything heavy is imported; `Trainer.fit` does the rest.
"""

from __future__ import annotations

from configs.compose import run
from configs.schema import Config
from training import preflight


def main(config: Config) -> int:
    """Build the run of a checked config and train it; the exit status."""
    preflight.check(config)
    from training.trainer import Trainer  # imports torch and Megatron-core, seconds that a wrong config need not wait for

    Trainer(config).fit()
    return 0


if __name__ == "__main__":
    run(main)
