"""The README is short, and each figure that it gives stands in a file of benchmarks/results/.

A measured figure is a number that a run, a test or a benchmark came up with. So it is every number of the README's
prose and of the output that it shows, but for versions, numbers inside of names (GPT-2, bf16), code spans, commands,
time stamps, and config errors, which test_commands.py makes again. A number in the prose belongs to the `readme` words
of a claim in benchmarks/results/claims.yaml, whose values are taken out of the results. A line of output stands in a
file of results as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from benchmarks.kit import summary
from tests.distributed import ROOT
from tests.test_commands import COMMAND

pytestmark = pytest.mark.fast

MOST_LINES = 110
MOST_COLUMNS = 100
MOST_FIGURES = 30

NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
VERSIONS = re.compile(r"(?:Python|torch|Megatron-core) \d[\d.]*(?:(?:,| or| and)+ \d[\d.]*)*\b")
STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Where figures of claims are quoted: the README, and the pages that were part of it.
TEXT = "\n".join(
    [README, *((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("README.md", "checked.md"))]
)


@dataclass
class Figures:
    """The figures of a text: their number, and those that nothing verifies."""

    num: int
    unheld: list[str]


def output_and_prose(text: str) -> tuple[list[str], str]:
    """Return the lines of output in indented code blocks, and all prose on one line without code spans and link
    targets. Fenced blocks are pictures."""
    text = re.sub(r"```.*?```", "", re.sub(r"\s*\\\n\s*", " ", text), flags=re.DOTALL)
    blocks = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    output = [
        line for line in blocks if not COMMAND.match(line.removeprefix("$ ")) and not line.startswith("config error:")
    ]
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    prose = re.sub(r"`[^`]*`", "", prose)
    prose = re.sub(r"\]\([^)]*\)", "", prose).replace("[", "")
    return [line for line in output if NUMBER.search(line)], " ".join(prose.split())


def figures_of(text: str, claimed: list[str], results: str) -> Figures:
    """Counts the measured figures; each is in the words of a claim, or on a line of the results."""
    output, prose = output_and_prose(text)
    found = Figures(0, [line for line in output if line not in results])
    found.num = sum(len(NUMBER.findall(STAMP.sub("", line))) for line in output)
    for words in claimed:
        if prose.count(words) != 1:
            found.unheld.append(words)
        found.num += len(NUMBER.findall(words))
        prose = prose.replace(words, "")
    found.unheld += NUMBER.findall(VERSIONS.sub("", prose))
    return found


def held() -> tuple[list[str], str]:
    claimed = [figure.readme for figure in summary.figures() if figure.readme is not None]
    return claimed, "\n".join(path.read_text(encoding="utf-8") for path in summary.RESULTS.glob("*.md"))


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    assert [line for line in README.splitlines() if len(line) > MOST_COLUMNS] == []
    pictures = re.findall(r"```.*?```", README, flags=re.DOTALL)  # figures and commands are checked elsewhere only
    assert not any(COMMAND.match(line) for picture in pictures for line in picture.splitlines())


def test_every_figure_of_the_readme_stands_in_its_file() -> None:
    figures = figures_of(TEXT, *held())
    assert figures.unheld == []
    assert 0 < figures.num <= MOST_FIGURES


PAGE = """\
# A page for Python 3.11 or 3.12

It [trains 1.5 times as fast](file9.md) as `peer 7`, in bf16.

    python train.py training.steps=7
    2026-11-23 12:39:41 step 2/2 | loss 3.25
"""
CLAIMED, RESULTS = ["trains 1.5 times as fast"], "    2026-11-23 12:39:41 step 2/2 | loss 3.25\n"


@pytest.mark.parametrize(
    ("old", "new", "num", "unheld"),
    [
        ("", "", 4, []),
        ("in bf16", "in bf16 on torch 2.11, 2.12 and 2.13", 4, []),
        ("trains 1.5", "trains 1.6", 4, ["trains 1.5 times as fast", "1.6"]),
        ("in bf16", "in 12 layouts", 4, ["12"]),
        ("in bf16", "for 7.5e-3", 4, ["7.5e-3"]),
        ("loss 3.25", "loss 3.26", 4, ["2026-11-23 12:39:41 step 2/2 | loss 3.26"]),
    ],
)
def test_a_figure_that_no_file_holds_is_found(old: str, new: str, num: int, unheld: list[str]) -> None:
    assert figures_of(PAGE.replace(old, new), CLAIMED, RESULTS) == Figures(num, unheld)
