"""Where another data.documents_in_text may fit a corpus' text files better than the one it was prepared with."""

from __future__ import annotations

import os

from data.corpus import Source, has_a_sentence_a_line, head_of
from data.corpus.kinds import TEXT
from data.prepare.prepared import PreparedData

LEAST_LINES = 1000  # of a file without an empty line, from which its lines may be documents
LOOKED_AT = 1000  # files of a corpus
LEAST_SHARE = 0.1  # of the text files' bytes


def fitting_rule(path: str) -> tuple[str, str] | None:
    """The value of data.documents_in_text that a file looks made for, and what shows it; None where none stands out."""
    head, size = head_of(path), os.path.getsize(path)
    read = len(head.encode("utf-8"))
    lines = head.split("\n")
    if len(lines) < 2:
        if head.count("\r") > 1:
            return "", "ends its lines with CR alone, which ends no line here: convert it with tr '\\r' '\\n'"
        return None
    blank = sum(not line.strip() for line in lines[:-1])
    if blank:
        if has_a_sentence_a_line(head):
            return "blank_line", "has a sentence a line and empty lines between its texts"
        return None
    count = head.count("\n") * max(size, 1) / max(read, 1)
    return ("line", f"has about {round(count, -2):,.0f} lines and no empty one") if count >= LEAST_LINES else None


def advice(source: Source, unpacked: dict[str, str], rule: str, num_documents: int) -> list[str]:
    """A line for each rule that some text files look made for, and were not prepared with."""
    files = [file for file in source.files if file.format == TEXT][:LOOKED_AT]
    by_rule: dict[str, list[tuple[str, str]]] = {}
    sizes: dict[str, int] = {}
    for file in files:
        fits = fitting_rule(unpacked.get(file.path, file.path))
        if fits and fits[0] != rule:
            by_rule.setdefault(fits[0], []).append((file.path, fits[1]))
            sizes[fits[0]] = sizes.get(fits[0], 0) + file.size
    least = LEAST_SHARE * sum(file.size for file in files)
    rules = sorted(better for better in by_rule if sizes[better] >= least)
    return [_line(rule, better, by_rule[better], num_documents) for better in rules]


def lone_documents(prepared: PreparedData, sentence_head: str) -> list[str]:
    """A line for each source that BERT's next_sentence finds no second document in."""
    if sentence_head != "next_sentence":
        return []
    names = [source["name"] for source in prepared.identity["sources"] if source["documents"] == 1]
    return [
        f"model.sentence_head=next_sentence has one document in {name}: every pair of it is of sentences that follow "
        "each other. data.documents_in_text says what a document is in a text file; sentence_order needs no second one"
        for name in names
    ]


def _line(rule: str, better: str, found: list[tuple[str, str]], num_documents: int) -> str:
    path, why = found[0]
    others = f" (and {len(found) - 1:,} more such files)" if len(found) > 1 else ""
    said = f"{path} {why}{others}"
    if not better:
        return said
    became = "1 document" if num_documents == 1 else f"{num_documents:,} documents"
    meant = "what lies between empty lines" if better == "blank_line" else "each line"
    return (
        f"{said}; with data.documents_in_text={rule} the corpus is {became}. Where {meant} is a document, set "
        f"data.documents_in_text={better}"
    )
