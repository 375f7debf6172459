"""Documents from sources: the standard library, text, JSON lines, Parquet, folders and blends of them.

`parse_corpus` turns `data.corpus` into sources; `plan_shards` cuts a source's files into shards of work; `read_span`
yields the documents of a span of a file, and every line that could not be used. A document is

* stdlib: a source file; a topic of pydoc_data's prose.
* .py, .md, .rst: the whole file.
* .txt, .raw, .tokens: by data.documents_in_text the file, the text between empty lines, or a line.
* .jsonl, .ndjson, .json: the field data.text_key of a line; of an object, if a .json file is an array.
* .parquet: the column data.text_key of a row.

All but .parquet may be compressed. A document's name is made of its file's name and its position there, so it does not
depend on the corpus' folder. This package does not import torch.
"""

from data.corpus.compressed import unpack, unpacked_blocks
from data.corpus.documents import BadLine, Document, Span, document_hash
from data.corpus.read import read_span
from data.corpus.sentences import has_a_sentence_a_line, head_of, split_sentences
from data.corpus.shards import plan_shards
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
    "plan_shards",
    "read_span",
    "split_sentences",
    "unpack",
    "unpacked_blocks",
]
