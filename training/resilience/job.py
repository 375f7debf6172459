"""One process of a job: the training, with what happens around it when it is stopped from outside or fails."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from configs import last_words, progress
from configs.exit_status import STOPPED_EARLY
from configs.files import WriteError
from configs.ranks import launched, use_fewer
from configs.schema import Config, ConfigError
from configs.validate import usable_world_size
from training.resilience import attempts, events, launcher, signals
from training.starting.layout_choice import LayoutChoice


def run(config: Config, composed: Config, choice: LayoutChoice | None = None) -> int:
    """Train the run of a checked config; the exit status: 0 done, 75 stopped early with everything saved.

    composed: the config before its `auto` keys were decided, which must be the same on all ranks. choice: of the
    config's layout, where it was searched for.

    A failure ends the process from here, with status 1 and the culprit's name in the last line. Raises ConfigError.
    """
    run_dir = Path(config.run_dir)
    stop = signals.of_this_process
    stop.end_at_once()  # again, where an earlier run of this process has ended
    if attempts.stopped():
        return STOPPED_EARLY  # torchrun takes that for a failure, and has started the ranks again
    if launched().rank == 0 and config.logging.progress:
        progress.begin("Loading torch and Megatron-core")
    from training.resilience import (
        spare_ranks,  # imports torch, as the rest does: seconds that a wrong config need not wait for
    )

    rank, started = launched()[:2]
    if started > 1:
        _refuse_other_starts(composed)
    used = usable_world_size(config, started) if choice is None else choice.world_size
    if used < started:
        if rank >= used:
            stop.restore(ignore=True)  # the others answer
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return spare_ranks.wait_for_end(config)
        text = (
            f"training.elastic: {started} ranks were started, and {used} of them fit the layout and the batch; the "
            "others stand by"
        )
        if rank == 0:
            print(text, flush=True)
            events.record(run_dir, "fewer_ranks", text, used=used, started=started)
            spare_ranks.clear(config)
        use_fewer(used)

    from checkpoint.saver import SaveError
    from memory.disk import DiskError
    from training.callbacks.guard import Guard
    from training.engine import TierError
    from training.resilience.health import UnhealthyRun
    from training.trainer import Trainer

    guard = Guard(config)
    stop.on_early, launcher.of_this_process.on_gone = guard.asked_to_end, guard.launcher_is_gone
    try:
        finished = Trainer(config, guard=guard, signals=stop, choice=choice).fit()
    except ConfigError:
        raise  # a line and a status of its own
    except BaseException as error:
        said = (UnhealthyRun, SaveError, WriteError, DiskError, TierError, KeyboardInterrupt)  # in a line of their own
        if not guard.is_victim() and not isinstance(error, said):
            traceback.print_exception(error)
        guard.say_last_words()
        sys.stdout.flush()
        # what is left of a lost job's groups may block a clean exit
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    exit_status = 0 if finished else STOPPED_EARLY
    if used < started and rank == 0:
        spare_ranks.release(config, exit_status)
    return exit_status


def _refuse_other_starts(composed: Config) -> None:
    import torch.distributed as dist

    from parallel.liveness import rendezvous, same_start

    launch, timeout = launched(), timedelta(seconds=composed.parallel.timeout_seconds)
    try:
        store = rendezvous.job_store(launch, timeout)
        same_start.refuse_other_starts(same_start.facts_of(composed), store, launch.rank, launch.world_size, timeout)
    except (TimeoutError, dist.DistError) as error:
        last_words.say(f"the ranks did not meet: {error}", 1)
        sys.exit(1)
