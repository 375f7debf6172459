"""Token files to samples. Sample i is a pure function of (files, seed, i), for any i, so that a run can resume anywhere
and be trained longer without changing what it has seen.

Every epoch visits each sample of a file once, in an order of its own. Blends repeat a fixed pattern in which each file
has its share. Everything is vectorised over documents and memory-mapped: the cost of a sample does not grow with the
corpus, the cost of an epoch is a sort.
"""

from data.samples.bert import BertSamples, segment_documents
from data.samples.gpt import GPTSamples
from data.samples.shared import Blend

__all__ = ["BertSamples", "Blend", "GPTSamples", "segment_documents"]
