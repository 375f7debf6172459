"""Start any command on the pretended device: `python -m tests.cuda.run [--early] [--waits] -- COMMAND ...`.

Every Python process of the command that imports torch sees one CUDA device, on this machine's memory. Its numbers are
right and its times mean nothing. With --early what may be late is done at once. With --waits the host's waits are
listed at the end, by kind and place. The exit status is the command's, or 1 where it went well and the device met a
fault, such as an exchange that nobody waited for, or ranks that told a communicator different things.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.cuda.pretended import build

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).with_name("pretended") / "site"


def environment(folder: Path, early: bool) -> dict[str, str]:
    """Of a command on the device, whose processes leave what they observed in `folder`."""
    (folder / "libcuda.so.1").symlink_to(build.driver())
    return {
        **os.environ,
        "PYTHONPATH": _first("PYTHONPATH", SITE, ROOT),
        "LD_LIBRARY_PATH": _first("LD_LIBRARY_PATH", folder),
        "PRETENDED_GUARD": str(build.guard()),
        "PRETENDED_MODE": "early" if early else "late",
        "PRETENDED_REPORTS": str(folder),
    }


def _first(variable: str, *paths: Path) -> str:
    """A variable that lists folders, with these in front."""
    before = os.environ.get(variable, "").split(os.pathsep)
    return os.pathsep.join([*map(str, paths), *filter(None, before)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        env = environment(Path(folder), arguments.early)
        status = subprocess.run(arguments.command, env=env, check=False).returncode
        # The command's processes wrote them. Reading them imports torch.
        reports = [pickle.loads(path.read_bytes()) for path in Path(folder).glob("*.pickle")]
    if not reports:
        return status
    from tests.cuda.pretended.process import differences

    waits: Counter[str] = Counter()
    faults: Counter[str] = Counter(differences(reports))
    for report in reports:
        faults.update(report.faults)
        waits.update({f"waits: {kind} in {call_site}": count for (kind, call_site), count in report.waits.items()})
        for (thread, kind, call_site), count in report.worker_waits.items():
            waits[f"waits of {thread}: {kind} in {call_site}"] += count
    for what, count in waits.most_common() if arguments.waits else ():
        print(f"pretended device: {count} {what}", file=sys.stderr)
    for what, count in faults.items():
        print(f"pretended device: {count} faults: {what}", file=sys.stderr)
    return status or int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
