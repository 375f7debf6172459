"""The CUDA path on a pretended device, against the same layout on the CPU; and how often its host waits.

See docs/decisions/fake-cuda-device.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests import distributed
from tests.cuda import cases, launches, matrix, runs, sync_points
from tests.cuda.cases import CASES
from tests.cuda.pretended import logs
from tests.cuda.pretended.observed import OBSERVED
from tests.waits import LONG

# the first test of a session starts up to eight processes
pytestmark = [pytest.mark.cuda_pretended]

LATE = [name for name in CASES if name not in cases.MATRIX_ONLY]
EARLY = ["keep, chunks", "offload, chunks", "hierarchical", "pipeline", "layer inputs on the host"]


@functools.cache
def _on_device(name: str) -> list[runs.Outcome]:
    return cases.run(name, "cuda")


@functools.cache
def _on_cpu(name: str) -> list[runs.Outcome]:
    return cases.run(name, "cpu")


@pytest.mark.parametrize("name", LATE)
def test_numbers_are_the_cpus(name: str) -> None:
    _compare(name, _on_device(name))


@pytest.mark.parametrize("name", EARLY)
def test_numbers_are_the_cpus_where_everything_comes_early(name: str) -> None:
    _compare(name, cases.run(name, "cuda", early=True))


def _compare(name: str, outcomes: list[runs.Outcome]) -> None:
    assert {outcome.device for outcome in outcomes} == {"cuda:0"}
    assert not cases.faults(outcomes), "\n".join(cases.faults(outcomes))
    loss, norm = CASES[name].tolerances
    of_loss, of_norm = cases.deviations(outcomes, _on_cpu(name))
    assert of_loss <= loss and of_norm <= norm, (of_loss, of_norm)


@pytest.mark.parametrize("name", LATE)
def test_waits(name: str) -> None:
    """The host waits for the device where the table says, and nowhere else."""
    wrong = cases.wrong_waits(name, _on_device(name))
    assert not wrong, "host synchronisations of one step, against tests/cuda/sync_points.py:\n" + "\n".join(wrong)


def test_groups_without_rows_were_there() -> None:
    assert sum(outcome.empty_groups for outcome in _on_device("empty groups")) > 0


def test_a_run_leaves_no_optimizer_state_behind() -> None:
    first, second = (cases.run("state streamed early", "cuda")[0].peak_bytes for _ in range(2))
    assert second < first + 2**16  # what is left of DDP's own is less


@pytest.mark.parametrize("degree", launches.DEGREES)
def test_launches(degree: int) -> None:
    """The table in benchmarks/results/launches.md."""
    found = launches.per_layer(launches.measure(degree))
    assert sum(found.values()) == launches.LAUNCHES[degree], found


@pytest.mark.parametrize("window", launches.OF_ATTENTION)
def test_launches_of_attention(window: str) -> None:
    """The backward pass brings the sums into order beside its kernel."""
    number = launches.OF_ATTENTION[window]
    assert launches.measure_attention(window) == [number, 2 * number]


@pytest.mark.parametrize("name", sync_points.MUTANTS_OF_TESTS)
def test_a_missing_wait_is_noticed(name: str) -> None:
    """The case passes as it is, see above; without the call its numbers are no numbers, or something refuses it."""
    mutant, case = sync_points.MUTANTS[name]
    assert cases.noticed(case, mutant)


def test_the_matrix_says_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrix.main(["--markdown", "--cases", "dense"]) == 0
    printed = capsys.readouterr().out
    assert "| dense | late |" in printed and "| dense | early |" in printed and "2 rows, 0 wrong." in printed
    monkeypatch.setitem(CASES, "dense", dataclasses.replace(CASES["dense"], waits={}))
    assert matrix.main(["--cases", "dense"]) == 1
    assert "dense, late: 1 new: copy to host in training/step.py:_sum_over_ranks" in capsys.readouterr().out


def _kinds_of_waits() -> dict[str, int]:
    from tests.cuda.pretended.device import Device

    with Device():
        values, host = torch.arange(6, device="cuda"), torch.zeros(6, dtype=torch.int64)
        pinned = torch.zeros(6, dtype=torch.int64, pin_memory=True)
        OBSERVED.start(None)
        # None of these waits.
        values.copy_(pinned, non_blocking=True)
        pinned.copy_(values, non_blocking=True)
        pinned[:3].to("cuda", non_blocking=True)
        torch.nonzero_static(values, size=6)
        values[values > 3] = 0
        values[torch.tensor(2)] += 1
        assert not OBSERVED.waits, OBSERVED.waits
        assert not OBSERVED.faults, OBSERVED.faults
        values.sum().item()
        bool(values.any())
        values.tolist()
        values.nonzero()
        values[values > 3]
        values[torch.tensor([1, 2])]
        values.cpu()
        values.copy_(host)
        host.copy_(values, non_blocking=True)  # to memory that is not pinned
        host.to("cuda", non_blocking=True)
        torch.tensor([1, 2], device="cuda")
        torch.repeat_interleave(values, values)
        torch.bincount(values)
        torch.cuda.Event().synchronize()
        torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()
        counts: Counter[str] = Counter()
        for (kind, _), count in OBSERVED.waits.items():
            counts[kind] += count
        return dict(counts)


def test_every_kind_of_wait_is_counted() -> None:
    assert distributed.run(_kinds_of_waits, 1, backend=distributed.PRETENDED) == [
        {
            "item": 2,
            "tolist": 1,
            "nonzero": 1,
            "boolean index": 1,
            "host index": 1,
            "copy to host": 2,
            "copy to device": 3,
            "repeat_interleave": 1,
            "bincount": 1,
            "event.synchronize": 1,
            "stream.synchronize": 1,
            "device synchronize": 1,
        }
    ]


def _pinned_or_not() -> list[str]:
    from tests.cuda.pretended.device import Device

    with Device():
        OBSERVED.start(None)
        values, host = torch.arange(6, device="cuda"), torch.zeros(6, dtype=torch.int64)
        host.copy_(values, non_blocking=True)
        values.copy_(host, non_blocking=True)
        assert OBSERVED.to_host.total() == OBSERVED.to_device.total() == 6 * 8
        return sorted(OBSERVED.faults)


def test_non_blocking_copies_of_memory_that_is_not_pinned_are_refused() -> None:
    (found,) = distributed.run(_pinned_or_not, 1, backend=distributed.PRETENDED)
    assert found == [
        f"a non-blocking copy to {where} of memory that is not pinned, in autograd" for where in ("device", "host")
    ]


def _kept_on_the_host(lost: bool) -> tuple[list[int], list[int], list[str], bool]:
    """Three steps of three tensors, for which the first has room for two. `lost`: two do not come back in it."""
    from memory.budgets import HOST
    from memory.host_link import HostLink, OffloadedTensor
    from tests.cuda.pretended.device import Device

    with Device():
        OBSERVED.start(None)
        link, held, stayed, equal = HostLink(torch.device("cuda", 0)), [HOST.held["experts"]], [], []
        for step in range(3):
            link.step.begin(1024)
            pinned = OBSERVED.pinned.total()
            token_rows = [torch.full((6, 4), step + index, device="cuda", dtype=torch.float32) for index in range(3)]
            away = [OffloadedTensor(tensor, link) for tensor in token_rows]
            for index in range(3):
                away[index].fetch()
            if lost and step == 0:
                del away[1:]
            equal += [torch.equal(each.get().cpu(), torch.full((6, 4), step + i)) for i, each in enumerate(away)]
            held.append(HOST.held["experts"])
            stayed.append(link.step.stayed)
            assert OBSERVED.pinned.total() == pinned
        del away
        link.close()
        held.append(HOST.held["experts"])
        return held, stayed, sorted(OBSERVED.faults), all(equal)


@pytest.mark.parametrize("lost", [False, True])
def test_what_experts_offload_is_pinned_between_steps_and_stays_without_capacity(lost: bool) -> None:
    found = distributed.run(_kept_on_the_host, 1, lost, backend=distributed.PRETENDED)
    assert found == [([0, 1024, 1536, 1536, 0], [96, 0, 0], [], True)]


def _read_before_it_has_come() -> tuple[int, int]:
    from tests.cuda.pretended.device import Device

    with Device():
        OBSERVED.start(None)
        values, pinned = torch.arange(6, device="cuda"), torch.zeros(6, dtype=torch.int64, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        values += 1  # which the copy does not see
        before = pinned[5].item()
        event.synchronize()
        return int(before), int(pinned[5].item())


def test_what_is_copied_to_the_host_is_there_once_the_host_has_waited() -> None:
    ((before, after),) = distributed.run(_read_before_it_has_come, 1, backend=distributed.PRETENDED)
    assert before < 0 and after == 5


def _given_back(records: bool) -> tuple[list[str], list[int], int, int]:
    from tests.cuda.pretended import memory, streams
    from tests.cuda.pretended.device import Device

    with Device():
        OBSERVED.start(None)
        memory.start()
        before = memory.Bytes.now
        source, stored = torch.arange(6, device="cuda"), torch.empty(6, dtype=torch.int64, pin_memory=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            stored.copy_(source, non_blocking=True)
        if records:
            source.record_stream(stream)
        del source
        kept = memory.Bytes.now - before
        stream.synchronize()
        streams.forget()
        return sorted(OBSERVED.faults), stored.tolist(), kept, memory.Bytes.peak - before


def test_memory_that_is_given_back_while_a_stream_reads_it_is_reported() -> None:
    ((faults, stored, kept, peak),) = distributed.run(_given_back, 1, False, backend=distributed.PRETENDED)
    assert len(faults) == 1 and "still used memory that was given back" in faults[0]
    assert stored != list(range(6)) and kept == 0 and peak == 6 * 8
    ((faults, stored, kept, _),) = distributed.run(_given_back, 1, True, backend=distributed.PRETENDED)
    assert not faults and stored == list(range(6)) and kept == 6 * 8


def _wait_in_a_thread() -> tuple[dict[str, int], dict[str, int], list[str]]:
    from tests.cuda.pretended.device import Device

    with Device():
        OBSERVED.start(None)
        values = torch.arange(6, device="cuda")
        event = torch.cuda.Event()
        event.record()
        for work in (event.synchronize, values.tolist):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(timeout=LONG)
        main = {kind: n for (kind, _), n in OBSERVED.waits.items()}
        worker = {kind: n for (_, kind, _), n in OBSERVED.worker_waits.items()}
        return main, worker, sorted(OBSERVED.faults)


def test_worker_threads_wait_for_events_only() -> None:
    ((main, worker, faults),) = distributed.run(_wait_in_a_thread, 1, backend=distributed.PRETENDED)
    assert main == {} and worker == {"event.synchronize": 1, "tolist": 1}
    assert faults == ["a thread beside the main one waited by tolist, in autograd"]


def _order(swapped: bool) -> logs.Log:
    from tests.cuda.pretended import exchanges
    from tests.cuda.pretended.device import Device

    with Device():
        OBSERVED.start(None)
        tensors = [torch.ones(4, device="cuda"), torch.ones(4, dtype=torch.int32, device="cuda")]
        if swapped and dist.get_rank() == 1:
            tensors.reverse()
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        log = exchanges.take_log()
        exchanges.forget()
        return log


def test_another_order_of_operations_is_reported() -> None:
    assert logs.compare(distributed.run(_order, 2, False, backend=distributed.PRETENDED)) == []
    (found,) = logs.compare(distributed.run(_order, 2, True, backend=distributed.PRETENDED))
    assert "operation 1: rank 0 has allreduce ('float32', (4,))" in found
    assert "rank 1 has allreduce ('int32', (4,))" in found


def test_messages_need_their_other_end() -> None:
    def message(name: str, number: int) -> logs.Operation:
        end = ((1 - number, 4, "float32"),)
        return logs.Operation(name, None, "here", end if name == "send" else (), end if name == "recv" else ())

    key: logs.Key = "0, messages of [0, 1]", (0, 1)
    good = [{key: [message("send", 0), message("recv", 0)]}, {key: [message("recv", 1), message("send", 1)]}]
    assert logs.compare(good) == []
    both_send = [{key: [message("send", rank), message("recv", rank)]} for rank in (0, 1)]
    assert "rank 0 has send, 4 float32 to 1 in here; rank 1 has send" in logs.compare(both_send)[0]
    assert "rank 1 has no more" in logs.compare([good[0], {key: [message("recv", 1)]}])[0]


def _written_under_way() -> tuple[float, float, list[str]]:
    from tests.cuda.pretended import exchanges
    from tests.cuda.pretended.device import Device

    with Device():
        OBSERVED.start(None)
        values, other = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
        works = [dist.all_reduce(values, async_op=True), dist.all_reduce(other, async_op=True)]
        early = values.sum().item()
        other.zero_()
        for work in works:
            work.wait()
        exchanges.forget()
        return early, values.sum().item(), sorted(OBSERVED.faults)


def test_results_are_no_numbers_until_somebody_waits() -> None:
    for early, late, faults in distributed.run(_written_under_way, 2, backend=distributed.PRETENDED):
        assert math.isnan(early) and late == 8
        assert any("was under way when somebody wrote to its result" in fault for fault in faults)
        assert any("did not wait for what allreduce" in fault for fault in faults)


def _mix() -> None:
    from tests.cuda.pretended.device import Device

    with Device():
        torch.ones(3, device="cuda") + torch.ones(3)


def test_mixed_devices_are_refused() -> None:
    with pytest.raises(distributed.RankError, match=r"aten.add.Tensor got a tensor \(3,\) of the host"):
        distributed.run(_mix, 1, backend=distributed.PRETENDED)
