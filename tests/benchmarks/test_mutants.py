"""The list of mutants fits the code and the tests, and a mutant is graded by its tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checks import mutants
from benchmarks.checks.mutants import MUTANTS, ROOT, Mutant

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_the_line_is_there_once_and_so_are_the_tests(mutant: Mutant) -> None:
    """If code was rewritten, its mutant must get the new text."""
    assert (ROOT / mutant.file).read_text().count(mutant.before) == 1
    assert mutant.after != mutant.before
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in text, test


def test_there_are_thirty_of_all_subjects() -> None:
    assert len(MUTANTS) >= 30 and len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)
    subjects = {"schedule", "placement", "tiers", "resume", "checkpoint", "data", "attention", "lost waits"}
    assert {mutant.subject for mutant in MUTANTS} == subjects


def test_a_mutant_is_noticed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_small_tree(tree: Path) -> None:
        (tree / "tests").mkdir()
        (tree / "some.py").write_text("A = 1\nB = 1\n")
        (tree / "tests" / "test_some.py").write_text("import some\n\ndef test_a():\n    assert some.A == 1\n")

    monkeypatch.setattr(mutants, "copy_tree", write_small_tree)
    lines = ("A = 1", "B = 1", "C")
    of_a, of_b, gone = (Mutant(line, "data", "some.py", line, f"{line}0", ("test_some.py",)) for line in lines)
    assert mutants.check_unchanged([of_a, of_b]) is None
    noticed = mutants.grade(of_a)
    assert noticed.noticed and noticed.by == "test_some.py::test_a"
    assert not mutants.grade(of_b).noticed
    missing = mutants.grade(gone)
    assert not missing.noticed and "0 times, not once" in missing.by
