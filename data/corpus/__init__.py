"""Documents from the sources that `data.corpus` names: the standard library, text, JSON lines, Parquet, folders, and
blends.

`parse_corpus` turns `data.corpus` into sources; `plan_shards` divides a source's files into shards of work; `read_span`
yields the documents of a span of a file, and each line that cannot be used. A document is

* stdlib: a source file, or a topic of pydoc_data's texts.
* .py, .md, .rst: the file.
* .txt, .raw, .tokens: the file, the text between empty lines, or a line, depending on data.documents_in_text.
* .jsonl, .ndjson, .json: the field data.text_key of a line, or of an object if a .json file is an array.
* .parquet: the column data.text_key of a row.

All but .parquet files may be compressed. The name of a document consists of its file's name and its position in the
file, so it does not depend on the folder of the corpus. This package does not import torch.
"""

from data.corpus.compressed import unpack
from data.corpus.documents import BadLine
from data.corpus.read import read_span
from data.corpus.shards import plan_shards
from data.corpus.sources import File, Source, parse_corpus, parse_validation

__all__ = ["BadLine", "File", "Source", "parse_corpus", "parse_validation", "plan_shards", "read_span", "unpack"]
