"""Limits of the shell that a rank cannot run under are named at the start, with a command that helps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from base.errors import ConfigError
from tests.test_packages import ROOT
from training.starting import limits

UNLIMITED = limits.resource.RLIM_INFINITY


def limited(monkeypatch: pytest.MonkeyPatch, files: tuple[int, int], addresses: int = UNLIMITED) -> list[int]:
    """Pretend these limits; what is set of the open files."""
    found = {limits.resource.RLIMIT_NOFILE: files, limits.resource.RLIMIT_AS: (addresses, UNLIMITED)}
    raised: list[int] = []
    monkeypatch.setattr(limits.resource, "getrlimit", found.__getitem__)
    monkeypatch.setattr(limits.resource, "setrlimit", lambda _, limit: raised.append(limit[0]))
    return raised


@pytest.mark.fast
@pytest.mark.parametrize(
    ("ranks", "gpu", "least"), [(1, False, 128), (4, False, 200), (64, False, 1640), (64, True, 1024), (1, True, 128)]
)
def test_open_files_on_both_sides_of_the_limit(
    monkeypatch: pytest.MonkeyPatch, ranks: int, gpu: bool, least: int
) -> None:
    for files, is_raised in (((64, least), True), ((64, UNLIMITED), True), ((least, least), False)):
        assert limited(monkeypatch, files) == []
        raised = limited(monkeypatch, files)
        limits.check(ranks, gpu)
        assert raised == ([least] if is_raised else [])
    limited(monkeypatch, (64, least - 1))
    with pytest.raises(ConfigError, match=rf"\(ulimit -n, {least - 1}\) must be at least {least} .* Try ulimit -n "):
        limits.check(ranks, gpu)


@pytest.mark.fast
def test_addresses_on_both_sides_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, (4096, 4096), limits.ADDRESSES)
    limits.check(2, False)
    with pytest.raises(ConfigError, match=r"\(ulimit -v, 3145728 KiB\) must be at least 3145729 KiB"):
        limits.check_addresses(1024)
    limited(monkeypatch, (4096, 4096), limits.ADDRESSES - 1024)
    with pytest.raises(ConfigError, match=r"\(ulimit -v, 3145727 KiB\) must be at least 3145728 KiB"):
        limits.check(1, False)


@pytest.mark.parametrize("limit", ["-n 64", "-v 2000000"])
def test_the_last_line_names_the_limit(tmp_path: Path, limit: str) -> None:
    """Under the real limit of a shell, also for modules that the start imports before it looks."""
    command = f'ulimit {limit}; exec "$0" train.py model=gpt_tiny run_dir={tmp_path}/run'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("config error: the limit on ") and f"(ulimit {limit.split()[0]}" in last
