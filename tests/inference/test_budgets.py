"""Weights that come from the files in every pass give the same bits as weights that stay, whatever the budget. All
families, layouts and folders: benchmarks/checks/ring_parity.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from base.units import MIB
from benchmarks.checks.ring_parity import EP2, PP2, TP2, Case, compare, make_folder, no_memory_for_buffers, with_budgets
from inference.generation import generate
from inference.open_model import open_model
from inference.weights.budget import BudgetTooSmall, HeldSizes, plan_weights
from inference.weights.file_weights import ReadingCounts
from tests import distributed

CASES = [
    *(Case("gpt2_untied", None, "bf16"), Case("llama_tied"), Case("mixtral_tied", None, "bf16"), Case("bert")),
    *(Case("deepseek_v3 fp8"), Case("qwen3_moe", PP2), Case("mixtral", EP2), Case("mixtral bf16", TP2)),
    Case("run of EP2, moved homes"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_with_every_budget(case: Case, data: list[str], tmp_path: Path) -> None:
    found = compare(case, make_folder(case.source, tmp_path, data), [0.0, 0.6])
    assert found.passed, found


def test_batches_share_passes(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path, [])
    ((differing, _, fewer_passes),) = distributed.run(with_budgets, 1, folder, None, None, [0.6])[0].values()
    assert not differing and fewer_passes > 5


def _passes(folder: Path, layout: list[str], budget: float) -> tuple[bool, int, HeldSizes, int]:
    with no_memory_for_buffers(), open_model(folder, layout, device="cpu", budget=budget) as model:
        generate(model.decoder(), [[1, 2], [3], [4, 5, 6], [7]], 3, batch_size=1)
        weights = model.weights
        return weights.streams, weights.counts.passes, weights.sizes, weights._other


def test_batches_that_share_a_pass_leave_memory_for_the_largest_unit(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path, [])
    ((streams, passes, sizes, other),) = distributed.run(_passes, 1, folder, [], 100.0)
    assert (streams, passes) == (False, 12)
    ((streams, passes, _, more),) = distributed.run(_passes, 1, folder, [], (sizes.least + other) / MIB)
    assert streams and passes == 12 and more == other


def test_pipeline_ranks_of_which_one_streams_agree_on_the_batches_of_a_pass(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path, [], vocab_size=2000, num_hidden_layers=16)
    (_, _, of_first, other), (_, _, of_last, _) = distributed.run(_passes, 2, folder, [PP2], 100.0)
    budget = of_last.least + 3 * other  # the first rank reads rows of its table of tokens, and keeps the rest
    assert of_first.total - of_first.words < budget - other < of_last.total
    found = distributed.run(_passes, 2, folder, [PP2], budget / MIB)
    assert [streams for streams, *_ in found] == [False, True]
    assert found[0][1] == found[1][1] < 12


def test_a_budget_beyond_what_is_left_is_not_advised() -> None:
    sizes = HeldSizes(small=0, units=(("a", 4 * MIB), ("b", 4 * MIB)))
    with pytest.raises(BudgetTooSmall, match="Try --memory-budget 5,"):
        plan_weights(sizes, 2 * MIB, MIB, given=2)
    with pytest.raises(BudgetTooSmall, match=r"is left \(2 MiB\) .*Try a machine or a limit that leaves 5 MiB"):
        plan_weights(sizes, 2 * MIB, MIB, given=None)


@pytest.mark.parametrize(("tokens", "said"), [(3000, "1,500 tokens/s"), (5, "2.5 tokens/s")])
def test_rates_are_plain_numbers(tokens: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 3.0)
    assert ReadingCounts(tokens=tokens, started=1.0).line().startswith(said)
