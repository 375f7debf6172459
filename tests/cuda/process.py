"""A whole process on the pretended device, all its threads: what `python -m tests.cuda.run` makes of each."""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.cuda import exchanges, streams, stubs
from tests.cuda.device import Device
from tests.cuda.observed import OBSERVED

NCCL = "nccl"


def install() -> None:
    """Put the device in the place of torch's for the rest of this process; what was observed is left at its end."""
    stubs.install()
    # Every rank sees one card, as the only one of its node.
    os.environ.pop("LOCAL_RANK", None)
    dist.init_process_group = _over_gloo(dist.init_process_group)
    dist.new_group = dist.distributed_c10d.new_group = _over_gloo(dist.new_group)
    Device().__enter__()
    torch.autograd.set_multithreading_enabled(False)
    OBSERVED.start(None, early=os.environ["PRETENDED_MODE"] == "early")
    atexit.register(_report, Path(os.environ["PRETENDED_REPORTS"]))


def _over_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if argument == NCCL else argument for argument in args)
        if kwargs.get("backend") == NCCL:
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return make(*args, **kwargs)

    return made


def _report(folder: Path) -> None:
    OBSERVED.fault("exchanges that nobody waited for", exchanges.run_all())
    OBSERVED.fault("copies on side streams that nobody waited for", streams.run_all())
    if not OBSERVED.launches:
        return
    waits = [[kind, place, count] for (kind, place), count in OBSERVED.waits.most_common()]
    text = json.dumps({"command": sys.argv, "waits": waits, "faults": OBSERVED.faults})
    (folder / f"{os.getpid()}.json").write_text(text)
