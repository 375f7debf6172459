"""`run_dir/status.json`: how the run is, for launchers and people: running, finished, stopped_early or failed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

STATUS = "status.json"


def write(run_dir: Path, state: str, step: int, text: str, **fields: Any) -> None:
    """Say how the run is: `text` is a line for people, `step` counts finished steps. One rank of the job calls it."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "")
    content = {"state": state, "step": step, "text": text, "time": time.time(), "launch": launch, **fields}
    temporary = run_dir / f"{STATUS}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, run_dir / STATUS)


def read(run_dir: Path) -> dict[str, Any]:
    """What the run said of itself last; nothing if it said nothing that can be read."""
    try:
        content = json.loads((run_dir / STATUS).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def of_this_launch(run_dir: Path) -> dict[str, Any]:
    """What an earlier attempt of this launch said, where torchrun has started the ranks again; nothing in the first attempt."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return {}
    content = read(run_dir)
    return content if content.get("launch") == os.environ.get("TORCHELASTIC_RUN_ID", "") else {}
