"""`run_dir/status.json`: the state of a run for launchers and people: running, finished, stopped_early or failed.
`python -m training.status RUN_DIR` prints it, and prints `died` in place of `running` if the run's process no longer
exists."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from base import command, files
from base.errors import ConfigError
from checkpoint import record
from configs.show import visible

STATUS = "status.json"


def write(run_dir: Path, state: str, step: int, text: str, **fields: Any) -> None:
    """Write the run's state to status.json: `text` is a line for people, `step` the number of finished steps. Only one
    rank calls this. Works on a full disk if the file exists already. Raises WriteError."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "")
    content = {"state": state, "step": step, "text": text, "time": time.time(), "launch": launch, **fields}
    files.write_text(run_dir / STATUS, json.dumps(content, indent=1) + "\n", in_place=True)


def read(run_dir: Path) -> dict[str, Any]:
    """Return the content of status.json, or an empty dict if the file is missing or unreadable."""
    try:
        content = json.loads(files.read_regular(run_dir / STATUS))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def now(run_dir: Path) -> dict[str, Any]:
    """Return the content of status.json, with the state `died` if it says `running` but the run's process no longer
    exists. Raises ConfigError if run.json is damaged."""
    content, held = read(run_dir), record.read(run_dir)
    if content.get("state") != "running" or held is None or record.is_alive(held):
        return content
    heartbeat = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(held.heartbeat))
    text = f"process {held.pid} on {held.host} ended without a message; its last heartbeat was at {heartbeat}"
    return {**content, "state": "died", "step": max(content.get("step", 0), record.last_step(run_dir)), "text": text}


def main(arguments: list[str] | None = None) -> int:
    """Print the status of the run whose folder the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m training.status", description="Print the state of a run, and whether its process still runs."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--json", action="store_true", help="print status.json's object, with the state as it is now")
    options = parser.parse_args(arguments)

    def body() -> None:
        content = now(options.run_dir)
        if not content:
            path = options.run_dir / STATUS
            raise ConfigError(f"{path} is missing or cannot be read. Give the run_dir of a run that has started.")
        if options.json:
            print(json.dumps(content))
        else:
            print(visible(f"{content['state']} after step {content['step']}: {content['text']}"))

    return command.run(body)


if __name__ == "__main__":
    raise SystemExit(main())
