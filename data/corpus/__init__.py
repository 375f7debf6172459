"""Documents from sources: the standard library, text, JSON lines, Parquet, folders and blends of them.

`parse_corpus` turns `data.corpus` into sources; `plan_parts` cuts a source's files into parts of work; `read_span`
yields the documents of one piece of a file, and every line that could not be used. What a document is:

* stdlib: a source file; a topic of pydoc_data's prose.
* .py, .md, .rst: the whole file.
* .txt, .raw, .tokens: as data.documents_in_text says, the file, what lies between empty lines, or a line.
* .jsonl, .ndjson, .json: a line's field data.text_key; in a .json that is an array, an object's.
* .parquet: a row's column data.text_key.

All but .parquet may be compressed. A document's name is its file and place in it, so it is the same wherever the corpus
lies. torch is not imported here.
"""

from data.corpus.compressed import unpack, unpacked_blocks
from data.corpus.documents import BadLine, Document, Span, document_hash
from data.corpus.parts import plan_parts
from data.corpus.read import read_span
from data.corpus.sentences import has_a_sentence_a_line, head_of, split_sentences
from data.corpus.sources import File, Source, naming_validation, parse_corpus, parse_validation

__all__ = [
    "BadLine",
    "Document",
    "File",
    "Source",
    "Span",
    "document_hash",
    "has_a_sentence_a_line",
    "head_of",
    "naming_validation",
    "parse_corpus",
    "parse_validation",
    "plan_parts",
    "read_span",
    "split_sentences",
    "unpack",
    "unpacked_blocks",
]
