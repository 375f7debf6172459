"""Notes for the user on a corpus before it is trained on, one sentence each."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from data.corpus import Source
from data.corpus.file_kinds import TEXT
from data.corpus.sentences import has_a_sentence_a_line, head_of
from data.indexed import IndexedTokens
from data.prepare.prepared import PreparedData
from data.tokenizer import Tokenizer

SHOWN_TOKENS = 5
MOST_ENDS = 20_000  # documents whose last token is read


def written_out(name: str, counts: dict[int, int], tokenizer: Tokenizer) -> str:
    """Return a note about special tokens whose names occur in a corpus. counts: number of occurrences by token id."""
    names = tokenizer.control_tokens()
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{names.get(token, token)!r} {count:,}" for token, count in most[:SHOWN_TOKENS])
    more = f" and {len(most) - SHOWN_TOKENS} others" if len(most) > SHOWN_TOKENS else ""
    total = sum(counts.values())
    text = f"the text of {name} contains {total:,} names of special tokens ({shown}{more}). They become special tokens "
    if "split_special_tokens" in tokenizer.rules:
        return f"{text}here, because {tokenizer.path} has pieces with these names"
    path = Path(tokenizer.path)
    file = (path if path.is_dir() else path.parent) / "tokenizer_config.json"
    return f'{text}here and in transformers; "split_special_tokens": true in {file} makes them plain text in both'


def other_ends(name: str, tokens: IndexedTokens, tokenizer: Tokenizer) -> str | None:
    """Return a note if documents in token files do not end with the tokenizer's end token, else None. Reads the last
    tokens of at most MOST_ENDS documents, evenly chosen."""
    lengths, bounds = tokens.sequence_lengths, tokens.document_bounds
    through = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])[bounds]
    last = bounds[1:][np.diff(through) > 0] - 1  # the last sequence of each document that has a token
    total = len(last)
    if not total:
        return None
    if total > MOST_ENDS:
        last = last[np.linspace(0, total - 1, MOST_ENDS).astype(np.int64)]
    while np.any(empty := lengths[last] == 0):  # skip trailing sequences without a token
        last = last - empty
    positions = (tokens.sequence_starts[last] + lengths[last] - 1).tolist()
    ends, counts = np.unique(tokens.tokens.read([(i, i + 1) for i in positions]), return_counts=True)
    found = dict(zip(ends.tolist(), counts.tolist(), strict=True))
    right, counted = found.get(tokenizer.eod, 0), len(last)
    if right == counted:
        return None

    def shown(token: int) -> str:
        return f"{token} ({tokenizer.token_piece(token)!r})" if 0 <= token < tokenizer.vocab_size else str(token)

    of = f"{counted:,} documents" + (f" (a sample of {total:,})" if counted < total else "")
    wanted = f"the end token of {tokenizer.path}, {shown(tokenizer.eod)}"
    most = max(found, key=lambda token: (found[token], -token))
    if most == tokenizer.eod and found[most] * 2 > counted:
        return f"{counted - right:,} of {of} of {name} do not end with {wanted}, but the others do"
    without = "Create the files with an end token (Megatron-LM: --append-eod)"
    if found[most] * 2 <= counted:
        return (
            f"{right:,} of {of} of {name} end with {wanted}, and no other token ends most of them (the most frequent "
            f"is {shown(most)}, {found[most]:,} times): a model cannot learn where a text ends. {without}"
        )
    text = f"{found[most]:,} of {of} of {name} end with {shown(most)}, and {right:,} with {wanted}: "
    if most not in tokenizer.special_ids():
        return f"{text}token {most} is plain text, so a model cannot learn where a text ends. {without}"
    return (
        f"{text}a model learns to end texts with token {most}, but generation stops only at the end token. Use the "
        f"tokenizer that created the files, or set eos_token to {tokenizer.token_piece(most)!r} in {tokenizer.end_file}"
    )


LEAST_LINES = 1000  # from this number on, the lines of a file without empty lines may be documents
MOST_FILES = 1000  # files of a corpus that are examined
LEAST_SHARE = 0.1  # least share of the text files' bytes for which a note is printed


def fitting_rule(path: str) -> tuple[str, str] | None:
    """Return the value of data.documents_in_text that clearly fits a text file best, and the reason; else None."""
    head, size = head_of(path), os.path.getsize(path)
    read = len(head.encode("utf-8"))
    lines = head.split("\n")
    if len(lines) < 2:
        if head.count("\r") > 1:
            return "", "ends its lines with CR alone, which does not end a line here: convert it with tr '\\r' '\\n'"
        return None
    blank = sum(not line.strip() for line in lines[:-1])
    if blank:
        if has_a_sentence_a_line(head):
            return "blank_line", "has one sentence per line and empty lines between its texts"
        return None
    count = head.count("\n") * max(size, 1) / max(read, 1)
    return ("line", f"has about {round(count, -2):,.0f} lines, none of them empty") if count >= LEAST_LINES else None


def advice(source: Source, unpacked: dict[str, str], rule: str, num_documents: int) -> list[str]:
    """Return a note for each rule (data.documents_in_text) that fits some text files better than `rule` does."""
    files = [file for file in source.files if file.format == TEXT][:MOST_FILES]
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
    """Return a note for each source of only one document, in which BERT's next_sentence finds no second document."""
    if sentence_head != "next_sentence":
        return []
    names = [source["name"] for source in prepared.identity["sources"] if source["documents"] == 1]
    return [
        f"{name} is a single document, so model.sentence_head=next_sentence finds only pairs of consecutive sentences "
        "in it. Set data.documents_in_text to divide text files into documents, or model.sentence_head=sentence_order"
        for name in names
    ]


def _line(rule: str, better: str, found: list[tuple[str, str]], num_documents: int) -> str:
    path, why = found[0]
    others = f" (and {len(found) - 1:,} more such files)" if len(found) > 1 else ""
    finding = f"{path} {why}{others}"
    if not better:
        return finding
    became = "1 document" if num_documents == 1 else f"{num_documents:,} documents"
    meant = "the text between empty lines" if better == "blank_line" else "each line"
    return (
        f"{finding}; with data.documents_in_text={rule} the corpus is {became}. If {meant} is a document, set "
        f"data.documents_in_text={better}"
    )


SHOWN_BAD_LINES = 5
SHOWN_REASONS = 3


def no_documents(name: str, num_bad: int, bad: list[str]) -> str:
    """Return the error message for a corpus without documents. bad: bad lines, of which the message names a few."""
    if not num_bad:
        return f"data.corpus: {name} contains no text. Give a corpus with text"
    by_reason: dict[str, str] = {}
    for line in bad:
        by_reason.setdefault(line.split(": ", 1)[-1], line)
    first = list(by_reason.values())[:SHOWN_REASONS]
    latin = next((line for line in bad if ": not UTF-8" in line or line.endswith("is not UTF-8")), None)
    advice = " Text must be UTF-8: convert it, for example with: iconv -f LATIN1 -t UTF-8 < FILE > NEW" if latin else ""
    which = "its only line is bad" if num_bad == 1 else f"all of its {num_bad:,} lines are bad"
    return f"data.corpus: {name} contains no documents: {which}: {'; '.join(first)}{'.' if advice else ''}{advice}"
