"""Generation on the pretended device from a ring and slots for experts: the CPU's numbers, how often the host waits,
and that every missing wait shows."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from inference.weights.rank_weights import LocalShard, WeightUnit
from memory.copy_stream import PASSES, SAVES
from memory.host_link import HostLink
from tests import distributed
from tests.cuda import generations, sync_points
from tests.cuda.generations import Used
from tests.cuda.pretended.observed import OBSERVED, Mutant
from tests.inference.test_generate import _save
from tests.tolerances import ORACLE_LOGITS
from tests.waits import LONG, until

pytestmark = [pytest.mark.cuda_pretended]


@dataclass(frozen=True)
class Generation:
    """A model in use. `share`: of the weights, that the budget has room for; None: of all."""

    family: str
    share: float | None
    batch_size: int  # texts of a batch
    streams: tuple[bool, bool]  # units, experts
    moe_layers: int = 0
    host_copies: bool = True  # the host keeps what comes and goes
    token: sync_points.Waits = field(default_factory=lambda: sync_points.TOKEN)

    def waits(self, also: sync_points.Waits | None = None) -> Counter[tuple[str, str]]:
        """The host's, in a pass."""
        choices = {key: self.moe_layers * count for key, count in sync_points.CHOICE.items() if self.moe_layers}
        return Counter({**choices, **sync_points.FINITE, **(also or {})})


GENERATIONS = {
    "whole": Generation("phi3", None, 3, (False, False)),
    "layers": Generation("mistral", 0.3, 3, (True, False)),
    "experts": Generation("qwen3_moe_normalized", 0.5, 1, (False, True), 2),
    "layers and experts": Generation("deepseek_v3", 0.1, 3, (True, True), 1),
    "layers and experts from files": Generation("qwen3_moe_normalized", 0.2, 2, (True, True), 2, host_copies=False),
    "BERT": Generation("bert", 0.3, 3, (True, False), token={}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family."""
    made = {case.family: tmp_path_factory.mktemp(case.family) for case in GENERATIONS.values()}
    for family, folder in made.items():
        _save(family, folder)
    return made


@functools.cache
def _cpu(name: str, folder: Path) -> tuple[float | None, Used]:
    case = GENERATIONS[name]
    (found,) = distributed.run(generations.on_cpu, 1, folder, case.share, case.batch_size)
    return found  # type: ignore[no-any-return]


def _run(name: str, folder: Path, early: bool = False, mutant: Mutant | None = None) -> Used:
    case = GENERATIONS[name]
    arguments = folder, _cpu(name, folder)[0], case.batch_size, early, mutant, case.host_copies
    (used,) = distributed.run(generations.use, 1, *arguments, backend=distributed.PRETENDED)
    assert isinstance(used, Used)
    return used


@functools.cache
def _late(name: str, folder: Path) -> Used:
    return _run(name, folder)


EARLY = ["layers", "layers and experts from files"]


@pytest.mark.parametrize("name", GENERATIONS)
def test_numbers_are_the_cpus(name: str, folders: dict[str, Path]) -> None:
    folder = folders[GENERATIONS[name].family]
    _compare(name, _late(name, folder), folder)


@pytest.mark.parametrize("name", EARLY)
def test_numbers_are_the_cpus_where_everything_comes_early(name: str, folders: dict[str, Path]) -> None:
    folder = folders[GENERATIONS[name].family]
    _compare(name, _run(name, folder, early=True), folder)


def _compare(name: str, used: Used, folder: Path) -> None:
    _, of_cpu = _cpu(name, folder)
    assert used.faults == []
    assert used.streams == of_cpu.streams == GENERATIONS[name].streams
    assert (used.tokens, used.drawn) == (of_cpu.tokens, of_cpu.drawn)
    assert torch.allclose(used.numbers, of_cpu.numbers, rtol=ORACLE_LOGITS, atol=ORACLE_LOGITS)


@pytest.mark.parametrize("name", GENERATIONS)
def test_waits(name: str, folders: dict[str, Path]) -> None:
    """The host waits for the device where the table says, and nowhere else; threads wait for the last copy out of what
    they read into; nothing is pinned but small numbers."""
    case, used = GENERATIONS[name], _late(name, folders[GENERATIONS[name].family])
    if case.token:
        assert used.prefill == case.waits()
        assert used.each_token and all(found == case.waits(case.token) for found in used.each_token), used.each_token
        assert used.each_drawn and all(found == case.waits(sync_points.DRAWN) for found in used.each_drawn), (
            used.each_drawn
        )
        assert used.scoring == case.waits(sync_points.SCORES)
    else:
        assert used.scoring == Counter(sync_points.FINITE)
    assert set(used.pinned) <= {sync_points.SMALL}
    kinds = {(thread, kind) for thread, kind, call_site in used.worker_waits if call_site != sync_points.STREAMS_END}
    assert kinds <= {("disk read stream", "event.synchronize")}


@pytest.mark.parametrize("name", ["layers", "experts"])
def test_the_host_keeps_what_comes_and_goes(name: str, folders: dict[str, Path]) -> None:
    """Once it has been read the files are asked for rows of the table of tokens alone."""
    folder = folders[GENERATIONS[name].family]
    of_gpu, of_cpu = _late(name, folder), _cpu(name, folder)[1]
    hidden = 24 * 4  # bytes of a row
    num_rows = sum(map(len, generations.PROMPTS)) + 3 * generations.NEW_TOKENS
    assert 0 <= of_gpu.bytes_read[1] - of_gpu.bytes_read[0] <= num_rows * hidden
    assert of_cpu.bytes_read[1] - of_cpu.bytes_read[0] > 4 * num_rows * hidden
    assert of_gpu.host_bytes["weights"] > 0


WAIT, LOADER = "memory/copy_stream.py:CopyStream._wait", "inference/weights/loader.py:UnitLoader.wait"
MUTANTS = {
    "a ring's slot that is used again": ("layers", WAIT, "to device stream"),
    "an expert's slot that is used again": ("experts", WAIT, "to device stream"),
    "layers that are not there": ("layers", LOADER, "MainThread"),
    "experts that are not there": ("experts", LOADER, "MainThread"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_is_noticed(name: str, folders: dict[str, Path]) -> None:
    case, call_site, thread = MUTANTS[name]
    used = _run(case, folders[GENERATIONS[case].family], mutant=Mutant("wait_event", call_site, thread=thread))
    assert used.left_out
    assert any("did not wait for what" in fault for fault in used.faults), used.faults


class _Numbers:
    """Weights that are their names; the first one waits until it may come."""

    def __init__(self) -> None:
        self.may_come, self.filled = threading.Event(), list[str]()

    def fill(self, name: str, target: torch.Tensor, at: tuple[int, ...] | None = None) -> None:
        assert self.may_come.wait(LONG)
        self.filled.append(name)
        target.fill_(float(name))

    def file_of(self, name: str) -> Path:
        return Path(name)


def _through_stages(cancelled: tuple[str, ...], mutant: Mutant | None) -> tuple[list[str], list[float], list[str]]:
    """Five units on their way through two staging pieces, of which some are left out before they are read."""
    from inference.weights.loader import UnitLoader
    from tests.cuda import runs

    with runs.pretended(mutant, False):
        link = HostLink(torch.device("cuda", 0), timeout=LONG)
        files = _Numbers()
        loader = UnitLoader(files, link, torch.float32, LONG)
        units = [WeightUnit(str(number), (LocalShard(str(number), (16,)),)) for number in range(5)]
        memories = [loader.allocate(loader.num_bytes(unit)) for unit in units]
        priorities = [PASSES, SAVES, SAVES, PASSES, PASSES]
        coming = []
        for unit, memory, priority in zip(units, memories, priorities, strict=True):
            coming.append(loader.load(unit, memory, (), priority))
            if unit.key in cancelled:
                assert coming[-1].cancel()
        files.may_come.set()
        for done in coming:  # late: nobody has waited for a copy
            until(lambda done=done: done.is_issued, "a copy to be issued")  # type: ignore[misc]
        found = []
        for unit, memory, done in zip(units, memories, coming, strict=True):
            if unit.key not in cancelled:
                loader.wait(unit, done)
                found.append(float(loader.views(unit, memory)[unit.key].mean().item()))
        assert link.close() == []
    return files.filled, found, sorted(OBSERVED.faults)


def test_a_staging_piece_is_read_into_once_its_copy_is_over() -> None:
    def run(cancelled: tuple[str, ...] = (), mutant: Mutant | None = None) -> tuple[list[str], list[float], list[str]]:
        (found,) = distributed.run(_through_stages, 1, cancelled, mutant, backend=distributed.PRETENDED)
        return found  # type: ignore[no-any-return]

    assert run()[1:] == ([0.0, 1.0, 2.0, 3.0, 4.0], [])
    # What nobody wants is not read, and does not come over what is.
    assert run(("1", "2")) == (["0", "3", "4"], [0.0, 3.0, 4.0], [])
    early = Mutant("event.synchronize", WAIT, thread="disk read stream")
    assert run(mutant=early)[1] != [0.0, 1.0, 2.0, 3.0, 4.0]
