"""Bounds of documents in a text file: counted by hand for each rule, and the same however a file is cut into shards."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash

from configs.schema import Config
from data.corpus import parse_corpus, plan_shards, read_span
from data.corpus import shards as shards_module
from data.corpus import text as text_module
from data.corpus.documents import Document
from data.indexed import IndexedTokens
from data.prepare import prepare
from data.prepare.notes import lone_documents
from data.prepare.tokenize_source import read_index
from data.worker import tokenize_shard
from tests.data.test_prepare import documents_of, tree

pytestmark = pytest.mark.fast

BERT_SAMPLE = """\
The rain had ceased, and Mr. Beard rose early.
he found a leak in the roof.
"Indeed," he said.

A second text begins here.
It has two sentences, e.g. this one.
"""
NOVEL = """\
It was a dark and stormy night; the rain fell in torrents, except at
occasional intervals, when it was checked by a violent gust of wind which
swept up the streets.

Through one of the obscurest quarters of London a man was wending his
solitary way.


CHAPTER II
"""
REVIEWS = "A fine film. I liked it.\nToo long, and dull. Avoid.\nBest of the year? Perhaps. See it.\n"
WIKI = (
    " \n = Robert = \n \n Robert is an actor . He had a role in 2000 . \n \n"
    " = = Career = = \n \n In 2006 , he starred . \n"
)
KINDS = {"bert": BERT_SAMPLE, "novel": NOVEL, "reviews": REVIEWS, "wiki": WIKI}


def documents(path: Path, rule: str) -> list[str]:
    """The texts of a file's documents, their segments joined."""
    (source,) = parse_corpus(str(path))
    texts: list[str] = []
    for shard in plan_shards(source.files, {}, rule):
        for span in shard:
            for item in read_span(span, "text"):
                assert isinstance(item, Document)
                texts += [""] * item.begins
                texts[-1] += item.text
    return texts


@pytest.mark.parametrize(
    ("kind", "counts"), [("bert", (1, 2, 5)), ("novel", (1, 3, 6)), ("reviews", (1, 1, 3)), ("wiki", (1, 4, 4))]
)
def test_documents_by_hand(tmp_path, kind, counts):
    path = tmp_path / "a.txt"
    path.write_text(KINDS[kind])
    found = {rule: documents(path, rule) for rule in ("file", "blank_line", "line")}
    assert tuple(map(len, found.values())) == counts
    assert found["file"] == [KINDS[kind]]
    assert found["line"] == [line for line in KINDS[kind].split("\n") if line.strip()]
    if kind == "bert":
        assert found["blank_line"] == [text.rstrip("\n") for text in BERT_SAMPLE.split("\n\n")]


@pytest.mark.parametrize(
    ("content", "file", "blank_line", "line"),
    [
        (b"a\r\nb\r\n\r\nc\r\n", ["a\r\nb\r\n\r\nc\r\n"], ["a\r\nb", "c"], ["a", "b", "c"]),
        (b"a\rb\r\rc", ["a\rb\r\rc"], ["a\rb\r\rc"], ["a\rb\r\rc"]),
        (b"\xef\xbb\xbfa\n\nb\n", ["a\n\nb\n"], ["a", "b"], ["a", "b"]),
        (b"\xef\xbb\xbf\n \na\n", ["\n \na\n"], ["a"], ["a"]),
        (
            "a\u2028b\u2028\u2028c\x85d\n".encode(),
            ["a\u2028b\u2028\u2028c\x85d\n"],
        )
        + (["a\u2028b\u2028\u2028c\x85d"],) * 2,
        (b"a\n\fb\n\f\nc\n \t \nd", ["a\n\fb\n\f\nc\n \t \nd"], ["a\n\fb", "c", "d"], ["a", "\fb", "c", "d"]),
        (b"\n\n  a  \n\n\n\n  b\n   ", ["\n\n  a  \n\n\n\n  b\n   "], ["  a  ", "  b"], ["  a  ", "  b"]),
        (b"", [], [], []),
        (b"\n \n\f\n", [], [], []),
        (b"\xef\xbb\xbf", [], [], []),
    ],
)
def test_line_ends_and_white_space(tmp_path, content, file, blank_line, line):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert [documents(path, rule) for rule in ("file", "blank_line", "line")] == [file, blank_line, line]


def made_up(seed: int) -> str:
    """A text with all that a border may meet: long and empty lines, line ends of both kinds, characters of 1 to 4
    bytes."""
    rng = random.Random(seed)
    alphabet = [
        "a",
        "Word.",
        " ",
        " ",
        "é",
        "語",
        "\U0001f600",
        "\n",
        "\n",
        "\r\n",
        "\n\n",
        "\n \n",
        "\r",
        "\u2028",
        "\f",
    ]
    weights = [rng.random() ** 2 for _ in alphabet]
    return "".join(rng.choices(alphabet, weights, k=3000))


@pytest.mark.parametrize("rule", ["file", "blank_line", "line"])
@pytest.mark.parametrize("seed", range(6))
def test_documents_are_the_same_in_any_parts(tmp_path, monkeypatch, rule, seed):
    path = tmp_path / "a.txt"
    path.write_bytes(made_up(seed).encode())
    whole = documents(path, rule)
    monkeypatch.setattr(text_module, "CELL_BYTES", 256)
    monkeypatch.setattr(shards_module, "CELL_BYTES", 256)
    monkeypatch.setattr(text_module, "REACH_BYTES", 64)
    seen = []
    for shard_bytes in (256, 1000, 1 << 20):
        monkeypatch.setattr(shards_module, "MIN_SHARD_BYTES", shard_bytes)
        (source,) = parse_corpus(str(path))
        shards = plan_shards(source.files, {}, rule)
        assert (len(shards) > 5) == (shard_bytes < 2000)
        spans = [span for shard in shards for span in shard]
        assert [0, *(span.end for span in spans)] == [*(span.start for span in spans), path.stat().st_size]
        items = [item for span in spans for item in read_span(span, "text")]
        seen.append([(item.text, item.begins, item.ends) for item in items if isinstance(item, Document)])
    assert seen[0] == seen[1] == seen[2]  # the segments too, and so the tokens
    assert all(one[2] == other[1] for one, other in pairwise(seen[0]))  # each ends where the next begins
    assert max(len(text.encode()) for text, _, _ in seen[0]) <= 256 + 64 + 3
    joined = documents(path, rule)
    if rule == "file":
        assert joined == whole
    assert [text.strip() for text in joined] == [text.strip() for text in whole]


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_text_has_one_hash_however_it_is_cut(tmp_path, monkeypatch, tokenizer, family):
    """The hash of a document that is read in segments equals that of the same text in a line of JSON."""
    for module in (text_module, shards_module):
        monkeypatch.setattr(module, "CELL_BYTES", 256)
    monkeypatch.setattr(text_module, "REACH_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + made_up(1).encode())
    (tmp_path / "b.md").write_bytes(made_up(1).encode())
    files = [file for name in ("a.txt", "b.md", "a.txt") for file in parse_corpus(str(tmp_path / name))[0].files]
    for rule in ("file", "blank_line", "line"):
        seen = []
        for shard_bytes in (256, 1000, 1 << 20):
            monkeypatch.setattr(shards_module, "MIN_SHARD_BYTES", shard_bytes)
            outs = []
            for i, shard in enumerate(plan_shards(files, {}, rule)):
                outs.append(tmp_path / f"{i}.npz")
                tokenize_shard(tokenizer, shard, "text", family, outs[-1])
            seen.append(read_index(outs, family, "a").texts.tolist())
        own = [xxhash.xxh3_64_intdigest(text.encode()) for text in documents(path, rule)]
        whole = xxhash.xxh3_64_intdigest((tmp_path / "b.md").read_bytes())
        assert seen == [[*own, whole, *own]] * 3 and (rule != "file" or own == [whole])


def test_borders_lie_where_a_tokenizer_would_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "CELL_BYTES", 256)
    monkeypatch.setattr(text_module, "REACH_BYTES", 64)
    for content, expected in (
        (b"x" * 250 + b" y\nab\n \nnext" + b"z" * 300, b"next"),
        (b"x" * 250 + b" y ab\n  indented\nnext" + b"z" * 300, b"next"),
        (b"x" * 250 + b" y ab  word" + b"z" * 300, b" word"),
        (b"x" * 255 + "語".encode() * 100, "語".encode()),
        (b"x" * 600, b"x" * 280),
    ):
        border = text_module.next_border(content, 256, "file")
        assert content[border:].startswith(expected) and border <= 256 + 64 + 3


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_large_file_is_one_document_for_any_number_of_workers(config, tmp_path, tokenizer, family):
    """A file of four shards; validation is its end, cut in the last but one."""
    rng = random.Random(0)
    lines = [f"{' '.join(rng.choices(['a', 'model', 'learns', 'tokens'], k=9)).capitalize()}.\n" for _ in range(70_000)]
    path = tmp_path / "large.txt"
    path.write_text("".join(lines))
    assert path.stat().st_size > 3 << 20
    trees = []
    for workers in (1, 2):
        settings = replace(
            config,
            corpus=str(path),
            num_workers=workers,
            cache_dir=str(tmp_path / f"{workers}"),
            validation_fraction=0.4,
        )
        prepared = prepare(settings, family, False)
        trees.append(tree(tmp_path / f"{workers}"))
    assert trees[0] == trees[1] and prepared.num_documents == 1 and prepared.num_bytes == path.stat().st_size
    ids = {name: IndexedTokens(file.prefix).tokens[:] for name, (file,) in zip("tv", (prepared.train, prepared.valid))}
    ends = [tokenizer.eod] if family == "gpt" else []
    whole = tokenizer.encode("".join(lines))
    assert [*ids["t"], *ids["v"]] == [
        *whole[: len(ids["t"]) - len(ends)],
        *ends,
        *whole[len(ids["t"]) - len(ends) :],
        *ends,
    ]
    assert abs(len(ids["v"]) / (len(ids["t"]) + len(ids["v"])) - 0.4) < 0.01
    for file in (*prepared.train, *prepared.valid):
        index = IndexedTokens(file.prefix)
        assert len(index.document_bounds) == 2
        assert len(index.sequence_lengths) == (1 if family == "gpt" else tokenizer.decode(index.tokens[:]).count("\n"))


@pytest.mark.parametrize(
    ("kind", "sentences"),
    [("bert", [3, 2]), ("novel", [1, 1, 1]), ("reviews", [7]), ("wiki", [1, 2, 1, 1])],
)
def test_sentences_by_hand(config, tmp_path, kind, sentences):
    """BERT's sentences are a file's own lines where it has one a line: "Mr. Beard" and "he found" are in one each."""
    path = tmp_path / "a.txt"
    path.write_text(KINDS[kind])
    settings = replace(config, corpus=str(path), documents_in_text="blank_line", validation_fraction=0.01)
    splits = documents_of(prepare(settings, "bert", False))
    found = [len(document) for document in splits["train"] + splits["valid"]]
    assert sorted(found) == sorted(sentences)


@pytest.mark.parametrize(
    ("text", "rule", "said"),
    [
        (
            BERT_SAMPLE,
            "file",
            "1 document. If the text between empty lines is a document, set data.documents_in_text=blank_line",
        ),
        (BERT_SAMPLE, "blank_line", ""),
        (NOVEL, "file", ""),
        (WIKI, "file", ""),
        (
            REVIEWS * 400,
            "file",
            "about 1,200 lines, none of them empty; with data.documents_in_text=file the corpus is 1 document.",
        ),
        (REVIEWS * 400, "line", ""),
        ("word\r" * 100, "file", "ends its lines with CR alone"),
    ],
)
def test_a_rule_that_fits_better_is_named(config, tmp_path, text, rule, said):
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    settings = replace(config, corpus=str(path), documents_in_text=rule, validation_fraction=0.01)
    for _ in range(2):  # the second time from the cache
        notes = prepare(settings, "gpt", False).notes
        assert len(notes) == bool(said) and all(said in note and "\n" not in note for note in notes)


def test_a_small_file_among_many_says_nothing_and_a_lone_document_has_no_other(config, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text(NOVEL * 20)
    (folder / "b.txt").write_text(BERT_SAMPLE)
    prepared = prepare(replace(config, corpus=str(folder)), "bert", False)
    assert prepared.notes == [] == lone_documents(prepared, "next_sentence")
    prepared = prepare(replace(config, corpus=str(folder / "a.txt")), "bert", False)
    assert lone_documents(prepared, "sentence_order") == []
    (line,) = lone_documents(prepared, "next_sentence")
    assert "is a single document" in line and "data.documents_in_text" in line


def test_documents_end_as_in_the_checkpoint(tmp_path, monkeypatch):
    from checkpoint import start as start_module
    from checkpoint.record import new
    from checkpoint.start import Start

    config = Config()
    found, fresh = Start(new(config, None), tmp_path, False), Start(new(config, None), None, True)
    line = {"documents_in_text": "line"}
    for sources, rule in (
        ([{"documents_in_text": None}, line], "line"),
        ([], "file"),
        (None, "file"),
    ):
        state: dict[str, object] = {} if sources is None else {"data": {"sources": sources}}
        monkeypatch.setattr(start_module, "read_state", {tmp_path: state}.__getitem__)
        assert start_module.documents_in_text(config, found) == rule
        assert start_module.documents_in_text(config, fresh) == "file"
    config.checkpoint.accept_changes = ["data.documents_in_text"]
    config.data.documents_in_text = "blank_line"
    assert start_module.documents_in_text(config, found) == "blank_line"
