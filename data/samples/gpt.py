"""Samples of GPT: windows over the concatenated tokens of documents.

A segment is the span of a document within a window. The index tells where segments begin; no token marks it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from base.errors import ConfigError
from data.indexed import documents
from data.prepare import TokenFile
from data.samples.shared import (
    DOCUMENT_ORDER,
    IGNORED,
    SAMPLE_ORDER,
    Blend,
    Epochs,
    Locates,
    check_files,
    of_split,
    open_tokens,
    permutation,
)


class _GPTFile:
    """The windows over one token file."""

    def __init__(self, file: TokenFile, number: int, sequence_length: int, seed: int, shuffle: bool):
        self.file = file
        self.sequence_length = sequence_length
        self.seed, self.number, self.shuffle = seed, number, shuffle
        indexed = open_tokens(file)
        self.tokens = indexed.tokens
        *index, wanted = of_split(file, indexed)
        starts, lengths = documents(*index)
        wanted &= lengths > 0
        self.starts, self.lengths = starts[wanted], lengths[wanted]
        total = int(self.lengths.sum())
        self.num_samples = (total - 1) // sequence_length
        if self.num_samples < 1:
            raise ConfigError(
                f"data.corpus: {file.prefix}.bin ({file.split}) has {total} tokens, but a sample needs "
                f"model.sequence_length + 1 = {sequence_length + 1}. Give more text, or for the validation split raise "
                f"data.validation_fraction, or set model.sequence_length={max(1, (total - 1) // 2)}"
            )
        self.epochs = Epochs(self._epoch)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return, for an epoch, the start of each document in the epoch's order, the documents' ends in their
        concatenation, and the order of the samples."""
        if not self.shuffle:
            return self.starts, np.cumsum(self.lengths), None
        documents = permutation(self.seed, DOCUMENT_ORDER, self.number, epoch, len(self.lengths))
        samples = permutation(self.seed, SAMPLE_ORDER, self.number, epoch, self.num_samples)
        return self.starts[documents], np.cumsum(self.lengths[documents]), samples

    def window(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of sample i of the file, int64 [sequence_length + 1], and its segments' lengths."""
        epoch, position = divmod(i, self.num_samples)
        starts, ends, samples = self.epochs.get(epoch)
        begin = (int(samples[position]) if samples is not None else position) * self.sequence_length
        end = begin + self.sequence_length + 1
        first, last = np.searchsorted(ends, [begin, end - 1], side="right")
        # Ends of the documents in the window, cut to the window, and the offset of each document's tokens in the file.
        stops = np.minimum(ends[first : last + 1], end)
        begins = np.concatenate([[begin], stops[:-1]])
        origins = starts[first : last + 1] - np.concatenate(
            [ends[first - 1 : first] if first else np.zeros(1, np.int64), ends[first:last]]
        )
        tokens = self.tokens.read(list(zip((origins + begins).tolist(), (origins + stops).tolist()))).astype(np.int64)
        return tokens, stops - begins


class GPTSamples:
    """Windows of sequence_length + 1 tokens over documents, concatenated in an order that each epoch shuffles anew.

    shuffle=False, for validation: the order of the files, from the start. separate: documents do not attend to each
    other (data.documents); the windows are the same. Raises ConfigError if there is too little data for one sample, if
    a file is damaged, or (in `batch`) if a token does not fit `vocab_size`.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        sequence_length: int,
        seed: int,
        shuffle: bool = True,
        vocab_size: int | None = None,
        separate: bool = False,
    ):
        check_files(files)
        self.vocab_size, self.separate = vocab_size, separate
        self.files = [_GPTFile(file, number, sequence_length, seed, shuffle) for number, file in enumerate(files)]
        self.blend: Locates = Blend([file.weight for file in files])

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return a batch: tokens and labels int64 [b, s], loss_mask float32 [b, s].

        Separate documents also have positions int64 [b, s], which start at 0 in every segment, and the last token of a
        document has no label.
        """
        windows = []
        for i in indices:
            file, position = self.blend.locate(i)
            windows.append(self.files[file].window(position))
        both = np.stack([tokens for tokens, _ in windows])
        if self.vocab_size is not None and int(both.max()) >= self.vocab_size:
            raise ConfigError(
                f"data.tokenizer: token {int(both.max())} does not fit a vocabulary of {self.vocab_size}. Give the "
                "tokenizer that created the token files in data.corpus"
            )
        # Copies: a window of one sample is contiguous already, and labels are written to below.
        tokens, labels = both[:, :-1].copy(), both[:, 1:].copy()
        batch = {"tokens": tokens, "labels": labels, "loss_mask": np.ones(tokens.shape, dtype=np.float32)}
        if self.separate:
            # Positions start at 0 in each segment; n are the lengths of a window's segments.
            positions = np.stack(
                [np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n) for n in (lengths for _, lengths in windows)]
            )
            foreign = positions[:, 1:] == 0  # the label is the first token of another document
            labels[foreign], batch["loss_mask"][foreign] = IGNORED, 0.0
            batch["positions"] = positions[:, :-1].copy()
        return batch
