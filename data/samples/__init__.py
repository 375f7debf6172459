"""Samples of token files. Sample i is a pure function of (files, seed, i), for any i, so that a run can resume at any
sample, and be trained longer without changing earlier samples.

Every epoch visits each sample of a file once, in its own order. Blends repeat a fixed pattern in which each file has
its share. All work is vectorised over documents, and tokens are read when they are needed: the cost of a sample does
not grow with the corpus, and the cost of an epoch is a sort.
"""

from data.samples.bert import BertSamples, segment_documents
from data.samples.gpt import GPTSamples
from data.samples.shared import Blend

__all__ = ["BertSamples", "Blend", "GPTSamples", "segment_documents"]
