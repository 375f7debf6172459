"""Samples of token files. Sample i depends only on the files, the seed and i, so that a run can resume at any sample,
and can be trained longer without a change of earlier samples.

Each epoch visits every sample of a file once, in a different order. A blend repeats a fixed pattern, in which each file
has its share. All work is vectorised over documents, and tokens are read on demand: the cost of a sample does not grow
with the corpus, and the cost of an epoch is a sort.
"""

from data.samples.bert import BertSamples, segment_documents
from data.samples.gpt import GPTSamples
from data.samples.shared import Blend

__all__ = ["BertSamples", "Blend", "GPTSamples", "segment_documents"]
