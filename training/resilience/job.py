"""Run one process of a job: train, end after a stop or a failure, or wait as a spare rank.

A smaller layout may leave ranks unused. These spare ranks wait without a device until the others end, and end with the
same status. They must not end earlier: when all ranks of a torchrun have ended, it closes the rendezvous, and the other
ranks could not be started again. Without torchrun, whose process holds the job's store, there is nothing to wait for.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from base import exit_handler, progress
from base.errors import ConfigError
from base.exit_handler import STOPPED_EARLY
from base.files import WriteError
from base.ranks import launched, use_fewer
from configs.schema import Config
from configs.validate import usable_world_size
from training.resilience import events, launcher, signals
from training.starting.choices import LayoutChoice

POLL = 1.0  # seconds
CLEAR_SECONDS = 3.0  # in which rank 0 deletes the exit status of an earlier attempt


def run(config: Config, composed: Config, choice: LayoutChoice | None = None) -> int:
    """Train the run of a checked config, and return the exit status: 0 done, 75 stopped early with everything saved.
    `composed`: the config before its `auto` keys were decided, which must be equal on all ranks. `choice`: the layout,
    if it was searched for.

    Other failures than ConfigError end the process with status 1, and the last line names the rank that caused it.
    """
    stop = signals.of_this_process
    stop.end_at_once()  # again, where an earlier run of this process has ended
    if launcher.has_stopped():
        return STOPPED_EARLY  # torchrun took that for a failure, and has started the ranks again
    if launched().rank == 0 and config.logging.progress:
        progress.begin("Loading torch and Megatron-core")
    rank, started = launched()[:2]
    if started > 1:
        _refuse_other_starts(composed)
    used = usable_world_size(config, started) if choice is None else choice.world_size
    if used < started:
        if rank >= used:
            stop.restore(ignore=True)  # the ranks in use handle the signals
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return _wait_for_end(config)
        if rank == 0:
            fit = f"{used} of them fit the layout and the batch; the others wait unused"
            text = f"training.elastic: {started} ranks were started, and {fit}"
            events.log(Path(config.run_dir), "fewer_ranks", text, used=used, started=started)
            if _holds_store():
                _store(config).delete_key(_standby_key())  # left by an earlier attempt
        use_fewer(used)

    from checkpoint.saver import SaveError
    from memory.disk import DiskError
    from training.callbacks.guard import Guard
    from training.engine import OffloadError
    from training.resilience.health import UnhealthyRun
    from training.trainer import Trainer

    guard = Guard(config)
    stop.on_early, launcher.of_this_process.on_gone = guard.asked_to_end, guard.launcher_is_gone
    try:
        finished = Trainer(config, guard=guard, signals=stop, choice=choice).fit()
    except ConfigError:
        raise  # the caller prints it, with a status of its own
    except BaseException as error:
        without_traceback = (UnhealthyRun, SaveError, WriteError, DiskError, OffloadError, KeyboardInterrupt)
        if not guard.is_victim() and not isinstance(error, without_traceback):
            traceback.print_exception(error)
        guard.write_exit_message()
        sys.stdout.flush()
        # the groups of a lost job may block a clean exit
        os._exit(exit_handler.INTERRUPTED if isinstance(error, KeyboardInterrupt) else exit_handler.FAILED)
    exit_status = 0 if finished else STOPPED_EARLY
    if used < started and rank == 0 and _holds_store():
        _store(config).set(_standby_key(), str(exit_status))  # the spare ranks end with it
    return exit_status


def _refuse_other_starts(composed: Config) -> None:
    """End this process if the ranks were started with different configs or do not connect in time. `composed`: the
    config before its `auto` keys were decided."""
    import torch.distributed as dist

    from parallel.liveness import rendezvous, same_start

    launch, timeout = launched(), timedelta(seconds=composed.parallel.timeout_seconds)
    try:
        store = rendezvous.job_store(launch, timeout)
        same_start.refuse_other_starts(same_start.facts_of(composed), store, launch.rank, launch.world_size, timeout)
    except (TimeoutError, dist.DistError) as error:
        exit_handler.log(f"the ranks did not connect: {error}", exit_handler.FAILED)
        sys.exit(exit_handler.FAILED)


def _wait_for_end(config: Config) -> int:
    """Wait on an idle rank until the ranks in use have ended, and return their exit status. Returns 0 at once if
    torchrun does not hold the job's store, and 1 if the store is lost."""
    if not _holds_store():
        return 0
    try:
        store, key = _store(config), _standby_key()
        time.sleep(CLEAR_SECONDS)
        while not store.check([key]):
            time.sleep(POLL)
        return int(store.get(key))
    except RuntimeError:  # torch's errors of stores
        return 1


def _holds_store() -> bool:
    from parallel.liveness import rendezvous

    return rendezvous.launcher_holds_store()


def _store(config: Config) -> Any:
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=config.parallel.timeout_seconds))


def _standby_key() -> str:
    return f"standby/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
