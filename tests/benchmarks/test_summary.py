"""docs/results.md and its pages show what benchmarks/results/ says: every figure is read from its page again."""

from __future__ import annotations

import shutil
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
import yaml

from benchmarks.kit import summary
from benchmarks.kit.summary import NotFound

pytestmark = pytest.mark.fast

PAGE = """\
# A benchmark

The first machine, 1,296 tokens:

| size | ms | ratio |
| --- | --- | --- |
| 8 | 20.5 | 0.87 to 1.02 |
| 16 | 82.0 | |

| kind | tokens | half |
|---|---:|:---:|
| all | 1,296 | -12% |

## Another machine

| size | ms | ms |
| --- | --- | --- |
| 8 | 10.0 | 11.0 |
| 8 | 10.0 | 12.0 |
"""
PAGES = summary.pages()
SMALL: dict[str, Any] = {"table": "The first", "row": 8, "column": "ms"}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy of the results that a test may change."""
    return Path(shutil.copytree(summary.RESULTS, tmp_path / "results"))


def change(results: Path, name: str, old: str, new: str) -> None:
    file = results / name
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def claims() -> list[dict[str, Any]]:
    text = (summary.RESULTS / "claims.yaml").read_text(encoding="utf-8")
    return [claim for group in yaml.safe_load(text)["groups"] for claim in group["claims"]]


@pytest.mark.parametrize("path", PAGES)
def test_page_says_what_the_results_say(path: str) -> None:
    page = summary.ROOT / "docs" / path
    assert page.read_text(encoding="utf-8") == PAGES[path], "run `python -m benchmarks.kit.summary`"


def test_no_other_page_is_in_the_folder() -> None:
    found = {f"results/{path.name}" for path in (summary.ROOT / "docs" / "results").glob("*.md")}
    assert found == {path for path in PAGES if path != "results.md"}


def test_every_claim_is_on_one_page_and_thirty_are_on_the_first() -> None:
    machines = yaml.safe_load((summary.RESULTS / "claims.yaml").read_text(encoding="utf-8"))["machines"]
    of_areas = [text for path, text in PAGES.items() if Path(path).stem not in machines]
    for claim in claims():
        assert sum(f"\n| {claim['claim']} |" in text for text in of_areas) == 1, claim["claim"]
        assert (f"\n| {claim['claim']} |" in PAGES["results.md"]) == claim.get("main", False)
    assert sum(claim.get("main", False) for claim in claims()) == 30
    for path in PAGES:
        assert path == "results.md" or f"]({path})" in PAGES["results.md"]


def test_every_file_of_results_holds_a_claim() -> None:
    assert {path.name for path in summary.RESULTS.glob("*.md")} == {figure.file for figure in summary.figures()}


def test_every_value_is_shown() -> None:
    for claim in claims():
        words = claim["figure"] + claim.get("readme", "")
        shown = {name for _, name, _, _ in Formatter().parse(words) if name is not None}
        shown |= {name for value in claim["values"].values() for name in value.get("divide", [])}
        assert shown == set(claim["values"]), claim["claim"]


def test_a_new_measurement_changes_its_page(results: Path) -> None:
    change(results, "loop_overhead.md", "1.016", "1.234")
    old, new = PAGES["results.md"], summary.pages(results)["results.md"]
    assert old.replace("1.016 times the time", "1.234 times the time") == new != old


ROW = "| 1 | 505 ms | 488 ms | 1.016 | from 0.96 | 0.01% of a step |"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("| 1 |", "| one |", "no row has '1' in the column 'ranks'"),
        (f"{ROW}\n", "", "no row has '1' in the column 'ranks'"),
        (ROW, f"{ROW}\n{ROW}", "two rows are equal"),
        (ROW, f"{ROW}\n{ROW.replace('505', '506')}", "2 rows are like this"),
        ("| ratio |", "| quotient |", "0 columns have the header 'ratio'"),
        ("| bare |", "| ratio |", "2 columns have the header 'ratio'"),
        ("1.016", "1.016 of 2", "'1.016 of 2' has 2 numbers"),
        ("1.016", "-", "'-' has 0 numbers"),
        ("1.016 |", "1.016 | |", "has 7 cells"),
        ("| ranks | ours", "Text.\n\n| ranks |\n| --- |\n\n| ranks | ours", "2 tables have this name"),
    ],
)
def test_a_figure_that_is_not_there_once_is_named(results: Path, old: str, new: str, message: str) -> None:
    change(results, "loop_overhead.md", old, new)
    with pytest.raises(NotFound, match=r"^loop_overhead\.md, 'Step time of .* on cores: ") as error:
        summary.figures(results)
    assert message in str(error.value)
    if "cells" not in message:
        assert "ratio: table [], row 1, column 'ratio': " in str(error.value)


def test_swapped_columns_leave_a_figure_and_swapped_headers_change_it(results: Path) -> None:
    change(results, "loop_overhead.md", "| ours | bare |", "| bare | ours |")
    assert summary.figures(results) == summary.figures()
    change(results, "loop_overhead.md", "| bare | ours | ratio |", "| ratio | ours | bare |")
    assert "505.000 times the time of the bare script" in summary.pages(results)["results.md"]


def test_a_claim_is_made_once(results: Path) -> None:
    first, second = (claim["claim"] for claim in claims()[-2:])
    change(results, "claims.yaml", f"claim: {first}", f"claim: {second}")
    with pytest.raises(ValueError, match=f"'{second}' is claimed twice"):
        summary.figures(results)


def test_values_are_found_and_divided() -> None:
    positions: dict[str, Any] = {
        "tokens": {"table": "kind", "row": "all", "column": "tokens"},
        "small": SMALL,
        "large": {**SMALL, "row": {"size": 16, "ms": "82.0"}},
        "ratio": {"divide": ["large", "small"]},
        "low": {**SMALL, "column": "ratio", "part": 1},
        "high": {**SMALL, "column": "ratio", "part": 2},
        "least": {"table": ["# A", "size"], "rows": "all", "column": "ms", "take": "min"},
        "sum": {"table": "The first", "rows": {"size": [8, 16]}, "column": ["size", "ms"], "take": "sum"},
        "cells": {"table": "The first", "rows": "all", "column": "ratio", "take": "count"},
        "last": {"table": "The first", "rows": "all", "column": "size", "take": "last"},
        "half": {"table": "kind", "rows": "all", "column": "half", "take": "max"},
    }
    wanted = {"tokens": 1296, "small": 20.5, "large": 82.0, "ratio": 4.0, "low": 0.87, "high": 1.02, "least": 20.5}
    wanted |= {"sum": 126.5, "cells": 1, "last": 16, "half": -12}
    assert summary.values_of(summary.tables_of(PAGE), positions, []) == wanted
    under = summary.values_of(summary.tables_of(PAGE), {"last": {**positions["last"], "table": "size"}}, ["# A"])
    assert under == {"last": 16}


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ({**SMALL, "table": "size"}, r"table \['size'\], row 8, column 'ms': 2 tables have this name"),
        ({**SMALL, "table": "## Third"}, "0 tables have this name"),
        ({**SMALL, "table": ["The first", "kind"]}, "0 tables have this name"),
        ({**SMALL, "table": "## Another"}, "2 columns have the header 'ms'"),
        ({**SMALL, "table": "## Another", "column": "size"}, "2 rows are like this"),
        ({**SMALL, "row": 9}, "no row has '9' in the column 'size'"),
        ({**SMALL, "row": {"size": 8, "ms": "82.0"}}, "no row has '82.0' in the column 'ms'"),
        ({**SMALL, "row": {"length": 8}}, "0 columns have the header 'length'"),
        ({**SMALL, "column": "ratio"}, "'0.87 to 1.02' has 2 numbers, and part is None"),
        ({**SMALL, "column": "ratio", "part": 3}, "'0.87 to 1.02' has 2 numbers, and part is 3"),
        ({**SMALL, "row": 16, "column": "ratio"}, "'' has 0 numbers"),
        (
            {"table": "The first", "rows": {"size": [8, 17]}, "column": "ms", "take": "min"},
            "no row has '17' in the column 'size'",
        ),
        (
            {"table": "The first", "rows": {"size": 16}, "column": "ratio", "take": "count"},
            "all cells are empty",
        ),
    ],
)
def test_a_position_that_is_not_unique_is_refused(position: dict[str, Any], message: str) -> None:
    with pytest.raises(NotFound, match=message):
        summary.values_of(summary.tables_of(PAGE), {"small": position}, [])


@pytest.mark.parametrize("position", [{**SMALL, "take": "max"}, {**SMALL, "head": 1}, {"column": "ms"}])
def test_a_position_with_other_keys_is_refused(position: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a position has a row, or rows and take"):
        summary.values_of(summary.tables_of(PAGE), {"small": position}, ["The first"])


@pytest.mark.parametrize(
    ("text", "value"), [("1,296", 1296), ("0.87", 0.87), ("5.9e-16", 5.9e-16), ("+2.12", 2.12), ("-12", -12)]
)
def test_number(text: str, value: float) -> None:
    assert summary.number(text) == value


@pytest.mark.parametrize(
    ("cell", "nth", "value"),
    [
        ("0.42 +- 0.07", 1, 0.42),
        ("100.0% ± 0.5%", 2, 0.5),
        ("5e-08 / 4e-07", 2, 4e-07),
        ("336k (56)", 1, 336),
        ("12 of 13", 2, 13),
        ("1.3 s in fp32", None, 1.3),
        ("-0.81%", None, -0.81),
    ],
)
def test_number_in_a_cell(cell: str, nth: int | None, value: float) -> None:
    assert summary.number_in(cell, nth) == value


def test_halves_are_rounded_up(results: Path) -> None:
    change(results, "activation_offload.md", "0.70% | 0.15%", "0.70% | 0.145%")
    assert "(standard error 0.15%)" in summary.pages(results)["results/offloading.md"]
