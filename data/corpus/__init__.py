"""Documents from sources: the standard library, text, JSON lines, Parquet, folders and blends of them.

`parse_corpus` turns `data.corpus` into sources; `plan_parts` cuts a source's files into parts of work; `read_span`
yields the documents of one piece of a file, and every line that could not be used. What a document is:

* stdlib: a source file; a topic of pydoc_data's prose.
* .py, .md, .rst: the whole file.
* .txt: what lies between runs of two or more empty lines; longer documents are cut at a line end after 64 KiB.
* .jsonl: a line's field data.text_key. .parquet: a row's column data.text_key.
* .txt, .jsonl, .md, .rst and .py may be compressed as .gz or .zst.

A document's name is its file and place in it, so it is the same wherever the corpus lies. torch is not imported here.
"""

from data.corpus.compressed import unpack
from data.corpus.documents import BadLine, Document, Span, document_hash
from data.corpus.parts import plan_parts
from data.corpus.read import read_span
from data.corpus.sentences import split_sentences
from data.corpus.sources import File, Source, parse_corpus

__all__ = [
    "BadLine",
    "Document",
    "File",
    "Source",
    "Span",
    "document_hash",
    "parse_corpus",
    "plan_parts",
    "read_span",
    "split_sentences",
    "unpack",
]
