"""The documents hold together: links lead somewhere, named files exist, decisions have their form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs.schema import KEYS
from tests.distributed import ROOT

pytestmark = pytest.mark.fast

DOCS = ROOT / "docs"
DECISIONS = sorted(path for path in (DOCS / "decisions").glob("*.md") if path.name != "README.md")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted(DOCS.rglob("*.md"))]
NAMED = [page for page in PAGES if page not in DECISIONS]  # a decision may name what is gone
MOST_WORDS = 250  # of a decision, without tables

LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:\.?\w+/)+[\w.-]+\.(?:py|sh|md|yaml|sbatch|png|txt|cpp))`")
FILE_OF_A_USER = re.compile(r"(FOLDER|runs|presets|presets/\w+|tokenizer|checkpoints|huggingface|imported|exported)/")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n\n[a](page.md#a-title) [b](page.md#another) [c](gone.md) [d](https://example.com) `[e](f)` "
        "[g](#a-title)\n"
    )
    assert broken_links(page) == ["page.md#another", "gone.md"]


@pytest.mark.parametrize("page", NAMED, ids=name)
def test_named_files_exist(page: Path) -> None:
    named = {file for file in FILE.findall(page.read_text(encoding="utf-8")) if not FILE_OF_A_USER.match(file)}
    assert {file for file in named if not (ROOT / file).exists()} == set()


@pytest.mark.parametrize("page", DECISIONS, ids=name)
def test_decision_has_its_form(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    form = (
        r"# [^\n]+\n\n\d{4}-\d\d-\d\d\n\n\*\*Context\.\*\* .+\n\n\*\*Decision\.\*\* .+\n\n\*\*Consequences\.\*\* .+?\n"
    )
    assert re.fullmatch(form + r"(\n\*\*Superseded by\*\* \[[^\n]+\]\([\w-]+\.md\)\.\n)?", text, re.S)
    assert len(re.sub(r"^\|.*$", "", text, flags=re.M).split()) <= MOST_WORDS


def test_contents_of_the_decisions_list_each_once() -> None:
    listed = re.findall(
        r"^\* \[(.*)\]\(([\w-]+\.md)\)( \(superseded\))?$", (DOCS / "decisions" / "README.md").read_text(), re.M
    )
    found = []
    for page in DECISIONS:
        text = page.read_text(encoding="utf-8")
        found.append((text.splitlines()[0][2:], page.name, " (superseded)" if "**Superseded by**" in text else ""))
    assert sorted(listed) == sorted(found)


def unknown_keys(text: str) -> list[str]:
    """Config keys in code spans that the schema does not have."""
    sections = "|".join(sorted({key.partition(".")[0] for key in KEYS if "." in key}))
    named = [
        re.match(rf"({sections})(\.[a-z_]+)+(?=$|=)", word)
        for span in re.findall(r"`([^`\n]+)`", text)
        for word in span.split()
    ]
    keys = {found[0] for found in named if found is not None}
    keys = {key for key in keys if not re.search(r"\.(md|json|safetensors)$", key)}
    modules = {key for key in keys if ROOT.joinpath(*key.split(".")).with_suffix(".py").is_file()}
    metrics = {f"memory.state_{tier}" for tier in ("device", "host", "disk")} | {"memory.stayed_on_device"}
    return sorted(keys - modules - metrics - KEYS.keys() - {"data.prepare", "training.report"})


@pytest.mark.parametrize("page", [*NAMED, ROOT / "CHANGELOG.md"], ids=name)
def test_keys_that_are_named_exist(page: Path) -> None:
    assert unknown_keys(page.read_text(encoding="utf-8")) == []


def test_unknown_keys_are_found() -> None:
    assert unknown_keys("`moe.palcement=1`, `training.steps=3 model.stesp`, `docs/moe.md`") == [
        "model.stesp",
        "moe.palcement",
    ]


def test_nothing_is_said_to_be_missing() -> None:
    for page in [*NAMED, ROOT / "CHANGELOG.md"]:
        assert not re.search(r"do(es)? not move yet|has no effect\.", page.read_text(encoding="utf-8")), name(page)
