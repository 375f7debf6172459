"""Samples of GPT: windows over the concatenated tokens of documents.

A segment is the span of a document within a window. The index tells where segments begin; no token marks it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from base.errors import ConfigError
from data.indexed import documents
from data.prepare import TokenFile
from data.samples import shared


class _GPTFile:
    """The samples of one token file: windows over its documents."""

    def __init__(self, file: TokenFile, number: int, sequence_length: int, seed: int, shuffle: bool):
        self.sequence_length = sequence_length
        self.seed, self.number, self.shuffle = seed, number, shuffle
        indexed = shared.open_tokens(file)
        self.tokens = indexed.tokens
        *index, wanted = shared.of_split(file, indexed)
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
        self.epochs = shared.Epochs(self._epoch)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the order of an epoch: the starts of the documents in this order, their ends when concatenated, and
        the order of the samples (None: ascending)."""
        if not self.shuffle:
            return self.starts, np.cumsum(self.lengths), None
        documents = shared.permutation(self.seed, shared.DOCUMENT_ORDER, self.number, epoch, len(self.lengths))
        samples = shared.permutation(self.seed, shared.SAMPLE_ORDER, self.number, epoch, self.num_samples)
        return self.starts[documents], np.cumsum(self.lengths[documents]), samples

    def window(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the file's sample `i`, int64 [sequence_length + 1], and the lengths of its segments."""
        epoch, position = divmod(i, self.num_samples)
        starts, ends, samples = self.epochs.get(epoch)
        begin = (int(samples[position]) if samples is not None else position) * self.sequence_length
        end = begin + self.sequence_length + 1
        first, last = np.searchsorted(ends, [begin, end - 1], side="right")
        # Ends of the documents in the window, cut to the window, and the offset of each document's tokens in the file.
        stops = np.minimum(ends[first : last + 1], end)
        begins = np.concatenate([[begin], stops[:-1]])
        before = ends[first - 1 : first] if first else np.zeros(1, np.int64)
        origins = starts[first : last + 1] - np.concatenate([before, ends[first:last]])
        tokens = self.tokens.read(list(zip((origins + begins).tolist(), (origins + stops).tolist()))).astype(np.int64)
        return tokens, stops - begins


class GPTSamples:
    """Windows of sequence_length + 1 tokens over documents, concatenated in a different random order in each epoch.

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
        shared.check_files(files)
        self.vocab_size, self.separate = vocab_size, separate
        self.files = [_GPTFile(file, number, sequence_length, seed, shuffle) for number, file in enumerate(files)]
        self.blend: shared.Locates = shared.Blend([file.weight for file in files])

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the batch with the samples `indices`: tokens and labels int64 [b, s], loss_mask float32 [b, s].

        If documents are separate, also positions int64 [b, s], which start at 0 in every segment; then the last token
        of a document has no label.
        """
        windows = [self.files[file].window(position) for file, position in map(self.blend.locate, indices)]
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
            positions = np.stack([np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n) for _, n in windows])
            foreign = positions[:, 1:] == 0  # the label is the first token of another document
            labels[foreign], batch["loss_mask"][foreign] = shared.IGNORED, 0.0
            batch["positions"] = positions[:, :-1].copy()
        return batch
