"""docs/results.md and its pages are what benchmarks/results/ says: every figure is taken out of its file again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import summary
from benchmarks.summary import NotFound

pytestmark = pytest.mark.fast

TEXT = """\
# A benchmark

first machine, 1,296 tokens

| size | ms |
| --- | --- |
| 8 | 20.5 |
| 16 | 82.0 |

## Another machine

| 8 | 10.0 |
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy of the results that a test may change."""
    return Path(shutil.copytree(summary.RESULTS, tmp_path / "results"))


@pytest.mark.parametrize("path", summary.pages())
def test_page_says_what_the_results_say(path: str) -> None:
    page = summary.ROOT / "docs" / path
    assert page.read_text(encoding="utf-8") == summary.pages()[path], "run `python -m benchmarks.summary`"


def test_no_other_page_claims_a_machine() -> None:
    found = {f"results/{path.name}" for path in (summary.ROOT / "docs" / "results").glob("*.md")}
    assert found == {path for path in summary.pages() if path != "results.md"}


def test_every_file_of_results_holds_a_claim() -> None:
    assert {path.name for path in summary.RESULTS.glob("*.md")} == {figure.file for figure in summary.figures()}


def test_a_new_measurement_changes_its_page(results: Path) -> None:
    file = results / "loop_overhead.md"
    file.write_text(file.read_text().replace("1.016", "1.234"))
    old, new = summary.pages()["results.md"], summary.pages(results)["results.md"]
    assert old.replace("1.016 of the bare step", "1.234 of the bare step") == new != old


def test_a_figure_that_is_gone_ends_with_its_name(results: Path) -> None:
    file = results / "loop_overhead.md"
    file.write_text(file.read_text().replace("| 1 |", "| one |"))
    with pytest.raises(
        NotFound, match=r"^loop_overhead\.md, 'The loop costs little beside .* on cores: nothing is like"
    ):
        summary.figures(results)


def test_a_claim_stands_once(results: Path) -> None:
    file = results / "claims.yaml"
    file.write_text(file.read_text().replace("claim: The tests", "claim: The quickstart learns within minutes"))
    with pytest.raises(ValueError, match="'The quickstart learns within minutes' is claimed twice"):
        summary.figures(results)


def test_section_is_cut_where_it_is_told() -> None:
    assert summary.section(TEXT, None, None) == TEXT
    assert summary.section(TEXT, "## Another", None) == "## Another machine\n\n| 8 | 10.0 |"
    assert summary.section(TEXT, "size", "16") == "| size | ms |\n| --- | --- |\n| 8 | 20.5 |"
    with pytest.raises(NotFound, match="no line holds 'third'"):
        summary.section(TEXT, "third", None)


def test_values_are_found_and_divided() -> None:
    expressions = {
        "tokens": r"([\d,]+) tokens",
        "small": r"^\| 8 \| ([\d.]+)",
        "large": r"^\| 16 \| ([\d.]+)",
        "ratio": {"divide": ["large", "small"]},
        "least": {"all": r"^\| \d+ \| ([\d.]+)", "take": "min"},
        "rows": {"all": r"^\| (\d+) \|", "take": "count"},
        "last": {"all": r"^\| (\d+) \|", "take": "last"},
    }
    wanted = {"tokens": 1296, "small": 20.5, "large": 82.0, "ratio": 4.0, "least": 10.0, "rows": 3, "last": 8}
    columns = {"small": "ms", "large": ["ms"], "least": "ms", "last": "size"}
    assert summary.values_of(TEXT, expressions, columns) == wanted


@pytest.mark.parametrize(
    ("columns", "message"),
    [({}, "column 'ms', which `columns` does not name"), ({"small": "size"}, "takes '20.5' .* 'ms', not 'size'")],
)
def test_a_value_out_of_another_column_is_refused(columns: dict[str, str], message: str) -> None:
    with pytest.raises(NotFound, match=message):
        summary.values_of(TEXT, {"small": r"^\| 8 .*\| ([\d.]+) \|"}, columns)


@pytest.mark.parametrize(
    ("text", "value"), [("1,296", 1296), ("0.87", 0.87), ("5.9e-16", 5.9e-16), ("+2.12", 2.12), ("-12", -12)]
)
def test_number(text: str, value: float) -> None:
    assert summary.number(text) == value
