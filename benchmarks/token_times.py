"""`python -m inference.generate` with the time of each token: `python -m benchmarks.token_times TIMES_FILE
[--mapped] -- --checkpoint MODEL --ids --prompt "1 2 3" ...`.

What is measured is that command, with a function that looks at the clock where it may ask whether a text is done.
`--mapped` runs the same decoder over the pages of a folder of logical weights (benchmarks/mapped_model.py). The file
gets a JSON object: `begin`, when generation began, and `tokens`, when each token of the first prompt was there, both in
seconds since the process began.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from inference import generate as command


def main(arguments: list[str]) -> int:
    own, rest = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    from inference import generation, open_model

    started = psutil.Process().create_time()
    times: dict[str, Any] = {"begin": 0.0, "tokens": []}
    inner: Callable[..., Any] = generation.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        times["begin"] = time.time() - started

        def is_done(tokens: list[int]) -> bool:
            if len(tokens) > len(times["tokens"]):
                times["tokens"].append(time.time() - started)
            return False

        return inner(*args, **{**kwargs, "is_done": is_done})

    with mock.patch.object(generation, "generate", timed):
        if "--mapped" in own:
            from benchmarks.mapped_model import open_mapped

            with mock.patch.object(open_model, "open_from", open_mapped):
                status = command.main(rest)
        else:
            status = command.main(rest)
    Path(own[0]).write_text(json.dumps(times))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
