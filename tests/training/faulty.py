"""train.py with a fault at one step on one rank: `python -m tests.training.faulty FAULT:RANK:STEP key=value ...`.

FAULT: raise | hang | kill | stop (SIGSTOP), or a signal's name, as from outside. It happens in the first attempt only,
inside the training step, when all ranks are under way; at step 0, when the model is being built.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    kind, rank, step = sys.argv[1].split(":")
    sys.argv = ["train.py", *sys.argv[2:]]
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and int(os.environ["RANK"]) == int(rank):
        from training import step as step_module
        from training.engine import Engine

        gradients, init = step_module.gradients, Engine.__init__

        def faulty_init(self: Engine, *arguments: Any) -> None:
            if step == "0":
                _do(kind)
                time.sleep(600)  # a signal's thread acts meanwhile
            init(self, *arguments)

        def faulty(engine: Engine, batches: Any, number: int) -> Any:
            if number == int(step):
                _do(kind)
            return gradients(engine, batches, number)

        step_module.gradients = faulty  # type: ignore[assignment]
        Engine.__init__ = faulty_init  # type: ignore[method-assign, assignment]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def _do(kind: str) -> None:
    if kind == "raise":
        raise ZeroDivisionError("planted here")
    if kind == "hang":
        time.sleep(600)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(kind) or signal.Signals[kind])


if __name__ == "__main__":
    main()
