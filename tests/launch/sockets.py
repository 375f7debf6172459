"""What processes listen on, read from the kernel's tables."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import subprocess
import time
from pathlib import Path

import psutil

LISTEN = "0A"  # <net/tcp_states.h>
POLL = 0.25  # seconds

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening(pid: int) -> dict[tuple[Address, int], list[str]]:
    """Address and port of each TCP socket that a process or a descendant listens on, with the command lines of who
    holds it."""
    inodes: dict[str, list[str]] = {}
    tables: dict[str, str] = {}  # by network namespace
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return {}
    for process in family:
        folder = Path("/proc", str(process.pid))
        try:
            for entry in os.listdir(folder / "fd"):
                with contextlib.suppress(FileNotFoundError):  # it has just been closed
                    found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(folder / "fd" / entry))
                    if found:
                        inodes.setdefault(found[1], []).append(" ".join(process.cmdline()))
            tables[os.readlink(folder / "ns" / "net")] = "".join(
                (folder / "net" / name).read_text() for name in ("tcp", "tcp6")
            )
        except (OSError, psutil.Error):  # it has just ended
            continue
    held: dict[tuple[Address, int], list[str]] = {}
    for line in "".join(tables.values()).splitlines():
        words = line.split()
        if len(words) > 9 and words[3] == LISTEN and words[9] in inodes:
            held[_read_address(words[1])] = inodes[words[9]]
    return held


def _read_address(text: str) -> tuple[Address, int]:
    """From the kernel's notation: the address as 32-bit words of the machine's byte order, and the port, in hexadecimal
    digits."""
    address, port = text.split(":")
    words = b"".join(int(address[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(address), 8))
    found = ipaddress.ip_address(words)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found, int(port, 16)


def listened_on(process: subprocess.Popen[str], seconds: float) -> dict[tuple[Address, int], list[str]]:
    """All that a process and its descendants listen on from now until it ends; it has so many seconds."""
    seen: dict[tuple[Address, int], list[str]] = {}
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        seen.update(listening(process.pid))
        if time.monotonic() > deadline:
            kill_family(process)
            raise TimeoutError(f"{process.args!r} runs for more than {seconds:g} s")
        time.sleep(POLL)
    return seen


def kill_family(process: subprocess.Popen[str]) -> None:
    """End a process and its descendants at once, if it still runs."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
