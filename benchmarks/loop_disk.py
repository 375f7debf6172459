"""A disk with a read-ahead of its own: a file behind a loop device, mounted for a while. Needs root. What the machine's
disk is set to stays as it is."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cgroup_controllers import disk_of


def read_ahead_kib(path: Path) -> int:
    """How much the kernel reads at a time of files on the disk of `path`, KiB."""
    return int(Path(f"/sys/dev/block/{disk_of(path)}/queue/read_ahead_kb").read_text())


@contextlib.contextmanager
def loop_disk(folder: Path, num_bytes: int, read_ahead: int) -> Iterator[Path]:
    """Mount point of an ext4 disk of `num_bytes` in `folder`, read `read_ahead` KiB at a time. Reads of it go past the
    page cache of the file that it is in. Nothing is left of it after."""
    image, mount = folder / "loop-disk.img", folder / "loop-disk"
    with contextlib.ExitStack() as stack:
        stack.callback(image.unlink, missing_ok=True)
        with image.open("wb") as file:
            file.truncate(num_bytes)
        _call("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        device = _call("losetup", "--direct-io=on", "--find", "--show", str(image))
        stack.callback(_call, "losetup", "--detach", device)
        Path(f"/sys/block/{Path(device).name}/queue/read_ahead_kb").write_text(str(read_ahead))
        mount.mkdir()
        stack.callback(mount.rmdir)
        _call("mount", device, str(mount))
        stack.callback(_call, "umount", str(mount))
        yield mount


def _call(*command: str) -> str:
    """What a command prints. Raises RuntimeError with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout.strip()
