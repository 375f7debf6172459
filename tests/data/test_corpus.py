import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from base.errors import ConfigError
from data.corpus import BadLine, parse_corpus, plan_shards, read_span, unpack
from data.corpus.documents import Document
from data.corpus.sentences import split_sentences

pytestmark = pytest.mark.fast


def read(corpus, scratch: Path, text_key: str = "text", rule: str = "file") -> tuple[list[Document], list[BadLine]]:
    """Documents and bad lines of a corpus, in order, after unpacking."""
    documents: list[Document] = []
    bad: list[BadLine] = []
    for source in parse_corpus(corpus):
        unpacked = {}
        for i, file in enumerate(file for file in source.files if file.compression):
            unpacked[file.path] = str(scratch / f"unpacked{i}")
            unpack(file.path, unpacked[file.path])
        for shard in plan_shards(source.files, unpacked, rule):
            for span in shard:
                for item in read_span(span, text_key):
                    if isinstance(item, Document):
                        documents.append(item)
                    else:
                        bad.append(item)
    return documents, bad


def test_stdlib_is_the_same_every_time_and_about_30_megabytes(tmp_path):
    documents, bad = read("stdlib", tmp_path)
    assert not bad
    assert 10e6 < sum(len(document.text) for document in documents) < 45e6
    names = [document.name for document in documents]
    assert len(set(names)) == len(names) and "stdlib/argparse.py" in names
    prose = [document for document in documents if document.name == "stdlib/pydoc_data/topics.py@assert"]
    assert prose and prose[0].text.startswith('The "assert" statement')
    assert not any("site-packages" in name for name in names)


def test_every_format_gives_the_same_documents(tmp_path, texts):
    lines = "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    half = len(lines) // 2  # two frames, as from concatenated files
    compressor = zstandard.ZstdCompressor()
    (tmp_path / "c.jsonl.zst").write_bytes(compressor.compress(lines[:half]) + compressor.compress(lines[half:]))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "d.parquet", row_group_size=7)
    without_blank_lines = [text.replace("\n\n", "\n") for text in texts]
    (tmp_path / "e.txt").write_text("\n\n\n\n".join(without_blank_lines))
    (tmp_path / "f.txt.gz").write_bytes(gzip.compress("\n\n".join(without_blank_lines).encode()))
    for path in sorted(tmp_path.glob("?.*")):
        documents, bad = read(str(path), tmp_path, rule="blank_line")
        assert [document.text for document in documents] == (without_blank_lines if ".txt" in path.name else texts), (
            path
        )
        assert len({document.name for document in documents}) == len(texts) and not bad
    # The name does not depend on the compression, so neither does the split.
    assert [d.name[1:] for d in read(str(tmp_path / "a.jsonl"), tmp_path)[0]] == [
        d.name[1:] for d in read(str(tmp_path / "b.jsonl.gz"), tmp_path)[0]
    ]


def test_other_text_key(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}')
    assert [document.text for document in read(str(tmp_path / "a.jsonl"), tmp_path, "body")[0]] == ["one", "two"]


def test_folders_are_read_recursively_and_in_order(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.txt", "a.md", "sub/c.py", "sub/d.rst", "ignored.png", ".hidden.txt"):
        (folder / name).write_text(f"text of {name}\n\n\n\nmore")
    documents, _ = read(str(folder), tmp_path)
    assert [document.name for document in documents] == ["a.md", "b.txt", "sub/c.py", "sub/d.rst"]


def test_bad_lines_are_reported_with_file_and_number(tmp_path):
    good = json.dumps({"text": "good"}).encode()
    json_lines = [
        good,
        b"{",
        good,
        b'{"other": 1}',
        b"[1]",
        b'{"text": null}',
        b'{"text": " "}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"",
        good,
    ]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(json_lines))
    documents, bad = read(str(path), tmp_path)
    assert len(documents) == 3
    assert [line.line for line in bad] == [2, 4, 5, 6, 7, 8, 9]
    assert (
        str(bad[0]).startswith(f"{path}:2: not JSON") and "'other'" in bad[1].reason and "surrogate" in bad[-1].reason
    )


def test_bad_lines_have_the_right_number_in_every_part(tmp_path):
    line = json.dumps({"text": "x" * 1000})
    path = tmp_path / "large.jsonl"
    path.write_text("".join(f"{line}\n" if i % 1000 else "bad\n" for i in range(1, 4001)))
    source = parse_corpus(str(path))[0]
    assert len(plan_shards(source.files, {})) > 2
    documents, bad = read(str(path), tmp_path)
    assert [line.line for line in bad] == [1000, 2000, 3000, 4000] and len(documents) == 3996
    assert len({document.name for document in documents}) == 3996


def test_bad_bytes_in_text_cost_one_line(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"one\ntwo\n\n\n\nthree\nfo\xfcr\nfive\n")
    for rule, expected in (
        ("file", ["one\ntwo\n\n\n\nthree\nfive\n"]),
        ("blank_line", ["one\ntwo", "three\nfive"]),
        ("line", ["one", "two", "three", "five"]),
    ):
        documents, bad = read(str(path), tmp_path, rule=rule)
        assert [document.text for document in documents] == expected
        assert [line.line for line in bad] == [7]


def test_bad_rows_of_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b", "", "c"]}), path, row_group_size=2)
    documents, bad = read(str(path), tmp_path)
    assert [document.text for document in documents] == ["a", "b", "c"] and [line.line for line in bad] == [2, 4]
    with pytest.raises(ConfigError, match="data.text_key=body.*columns are text"):
        read(str(path), tmp_path, "body")


def test_blends(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    a, b = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    assert [source.weight for source in parse_corpus([{"path": a, "weight": 0.7}, {"path": b, "weight": 0.3}])] == [
        0.7,
        0.3,
    ]
    merged = parse_corpus([a, b])
    assert len(merged) == 1 and [file.name for file in merged[0].files] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("corpus", "words"),
    [
        ("missing.jsonl", "data.corpus=missing.jsonl: .*missing.jsonl does not exist"),
        (["stdlib", "missing.txt"], "missing.txt"),
        ([], "at least one source"),
        ([{"path": "stdlib", "weight": -1}], r"weight of stdlib \(-1\) must be"),
        ([{"path": "stdlib", "weight": 1}, "stdlib"], "a weight to every source"),
        ([{"file": "stdlib"}], "is not a source"),
        (7, "is not a source"),
    ],
)
def test_wrong_corpus(corpus, words):
    with pytest.raises(ConfigError, match=words):
        parse_corpus(corpus)


def test_wrong_files(tmp_path):
    (tmp_path / "a.docx").write_text("x")
    (tmp_path / "only.bin").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "not.parquet").write_text("x")
    for name, words in (
        ("a.docx", "files of this kind cannot be read"),
        ("only.bin", "pairs"),
        ("empty", "no file that can be read"),
        ("not.parquet", "Parquet"),
    ):
        with pytest.raises(ConfigError, match=f"data.corpus.*{words}"):
            read(str(tmp_path / name), tmp_path)
    packed = gzip.compress(b"text " * 100_000)
    (tmp_path / "a.txt.gz").write_bytes(packed[:-20])
    (tmp_path / "b.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(b"text " * 100_000)[:-5])
    (tmp_path / "c.txt.zst").write_bytes(b"no archive")
    for name in ("a.txt.gz", "b.txt.zst", "c.txt.zst"):
        with pytest.raises(ConfigError, match=f"{name}.*damaged or truncated"):
            read(str(tmp_path / name), tmp_path)
    assert not list(tmp_path.glob("*tmp*"))


def test_sentences():
    text = 'He came. "Why?" she asked (twice). E.g. this one, v1.2\nis wrapped!\n\nNew paragraph\n\n\n'
    assert split_sentences(text, by_line=False) == [
        "He came. ",
        '"Why?" she asked (twice). ',
        "E.g. this one, v1.2\nis wrapped!\n\n",
        "New paragraph\n\n\n",
    ]
    code = "\n\ndef f():\n    return 1\n\n\nclass A:\n    x = 2"
    assert split_sentences(code, by_line=True) == ["\n\ndef f():\n", "    return 1\n\n\n", "class A:\n", "    x = 2"]
    for sample in (text, code, "x" * 3000, "word " * 1000, "a", "a\n", "\n a \n"):
        for by_line in (False, True):
            sentences = split_sentences(sample, by_line)
            assert (
                "".join(sentences) == sample
                and all(sentence.strip() for sentence in sentences)
                and max(map(len, sentences)) <= 410
            )
    assert split_sentences(" \n", False) == []
