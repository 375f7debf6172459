"""Samples of BERT: segments of documents, with masked tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from base.errors import ConfigError
from data.prepare import TokenFile
from data.samples import shared
from data.tokenizer import Tokenizer


def segment_documents(
    sequence_lengths: np.ndarray, document_bounds: np.ndarray, target: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into runs of consecutive sentences ("segments") of about `target` tokens.

    sequence_lengths [n], document_bounds [d + 1] -> first sentence and end (exclusive) of each segment, int64 [k]. A
    sentence at token offset `i` of its document is in segment `i // target`, so segments never cross documents.
    """
    lengths = np.asarray(sequence_lengths, dtype=np.int64)
    bounds = np.asarray(document_bounds, dtype=np.int64)
    if not len(lengths):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    offsets = np.cumsum(lengths) - lengths
    sizes = np.diff(bounds)
    document_starts = bounds[:-1][sizes > 0]
    in_document = offsets - np.repeat(offsets[document_starts], sizes[sizes > 0])
    changes = np.diff(in_document // target, prepend=-1) != 0
    changes[document_starts] = True
    firsts = np.flatnonzero(changes)
    return firsts, np.append(firsts[1:], len(lengths))


class _BertFile:
    """The segments of a token file, which each epoch uses in a different order."""

    def __init__(self, file: TokenFile, number: int, target: int, least_tokens: int, seed: int, shuffle: bool):
        self.shuffle = shuffle
        indexed = shared.open_tokens(file)
        self.tokens = indexed.tokens
        starts, lengths, bounds, in_split = shared.of_split(file, indexed)
        self.firsts, self.lasts = segment_documents(lengths, bounds, target)
        # The start of each sentence, in tokens; one more entry for the end.
        self.sentence_starts = np.concatenate([starts, [len(self.tokens)]])
        self.documents = np.searchsorted(bounds, self.firsts, side="right") - 1
        wanted = in_split[self.documents]
        wanted &= self.sentence_starts[self.lasts] - self.sentence_starts[self.firsts] >= least_tokens
        self.firsts, self.lasts, self.documents = self.firsts[wanted], self.lasts[wanted], self.documents[wanted]
        self.num_samples = len(self.firsts)
        if not self.num_samples:
            raise ConfigError(
                f"data.corpus: {file.prefix}.bin ({file.split}) has {len(self.tokens)} tokens in {len(lengths)} "
                f"sentences, but a BERT sample needs a segment of at least {least_tokens} tokens. Give more text"
            )
        self.epochs = shared.Epochs(
            lambda epoch: shared.permutation(seed, shared.SAMPLE_ORDER, number, epoch, self.num_samples)
        )

    def segment(self, i: int) -> int:
        """Return the number of the segment that sample i consists of."""
        epoch, position = divmod(i, self.num_samples)
        return int(self.epochs.get(epoch)[position]) if self.shuffle else position

    def sentences(self, segment: int) -> np.ndarray:
        """Return the bounds of the sentences in a segment, in tokens of the file: int64 [number of sentences + 1]."""
        return self.sentence_starts[self.firsts[segment] : self.lasts[segment] + 1]

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return tokens [begin, end) of the file, int64."""
        return self.tokens[begin:end].astype(np.int64)

    def other_document(self, segment: int, draw: float) -> int | None:
        """Return a segment of a different document, chosen uniformly by `draw` in [0, 1); None if there is none."""
        document = self.documents[segment]
        begin, end = np.searchsorted(self.documents, [document, document + 1])
        others = self.num_samples - int(end - begin)
        if not others:
            return None
        chosen = int(draw * others)
        return chosen if chosen < begin else chosen + int(end - begin)


class BertSamples:
    """Masked-LM samples of consecutive sentences, with whole-word masking as in BERT (80% mask token, 10% random token,
    10% unchanged).

    sentence_head none: [CLS] a [SEP]. next_sentence: [CLS] a [SEP] b [SEP], where b follows a (label 0) or is from
    another document (label 1). sentence_order (ALBERT): b follows a (label 0), or both are swapped (label 1). Devlin et
    al. 2018, arXiv:1810.04805; Lan et al. 2019, arXiv:1909.11942.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        tokenizer: Tokenizer,
        sequence_length: int,
        seed: int,
        sentence_head: str = "none",
        mask_probability: float = 0.15,
        short_sequence_probability: float = 0.1,
        shuffle: bool = True,
    ):
        shared.check_files(files)
        if not 0 < mask_probability <= 1:
            raise ConfigError(
                f"data.mask_probability={mask_probability} must be above 0 and at most 1, for example 0.15"
            )
        if not 0 <= short_sequence_probability <= 1:
            raise ConfigError(
                f"data.short_sequence_probability={short_sequence_probability} must be from 0 to 1, for example 0.1"
            )
        self.pairs = sentence_head != "none"
        self.sentence_head, self.seed, self.sequence_length = sentence_head, seed, sequence_length
        self.max_text_tokens = sequence_length - (3 if self.pairs else 2)  # without [CLS] and [SEP]
        least = 2 if self.pairs else 1
        if self.max_text_tokens < least:
            needed = sequence_length - self.max_text_tokens + least
            raise ConfigError(
                f"model.sequence_length={sequence_length} must be at least {needed} for BERT with "
                f"model.sentence_head={sentence_head}"
            )
        self.mask_probability, self.short_probability = mask_probability, short_sequence_probability
        self.cls, self.sep, self.mask, self.pad = tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad
        self.vocab_size = tokenizer.vocab_size
        self.starts, self.ends = tokenizer.word_starts(), tokenizer.word_ends()
        special = [*tokenizer.special_ids(), self.cls, self.sep, self.mask, self.pad]
        self.ordinary = np.setdiff1d(np.arange(self.vocab_size), special)
        target = self.max_text_tokens
        self.files = [_BertFile(file, number, target, least, seed, shuffle) for number, file in enumerate(files)]
        self.blend: shared.Locates = shared.Blend([file.weight for file in files])

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the batch with the samples `indices`: tokens (masked), labels, types int64 [b, s]; loss_mask float32
        [b, s]; padding_mask bool [b, s], True for real tokens; with a sentence head, sentence_label int64 [b]."""
        shape = (len(indices), self.sequence_length)
        batch: dict[str, np.ndarray] = {
            "tokens": np.full(shape, self.pad, dtype=np.int64),
            "labels": np.full(shape, shared.IGNORED, dtype=np.int64),
            "loss_mask": np.zeros(shape, dtype=np.float32),
            "types": np.zeros(shape, dtype=np.int64),
            "padding_mask": np.zeros(shape, dtype=bool),
        }
        tokens, labels, loss_mask, types, padding_mask = batch.values()
        sentence_label = np.zeros(len(indices), dtype=np.int64)
        for row, i in enumerate(indices):
            random = np.random.Generator(shared.random_of(self.seed, shared.SAMPLE, i))
            texts, sentence_label[row] = self._texts(i, random)
            original = np.concatenate([[self.cls], *(ids for text in texts for ids in (text, [self.sep]))])
            n = len(original)
            if int(original.max()) >= self.vocab_size:
                raise ConfigError(
                    f"data.tokenizer: token {int(original.max())} does not fit a vocabulary of {self.vocab_size}. Give "
                    "the tokenizer that created the token files in data.corpus"
                )
            maskable = np.ones(n, dtype=bool)
            maskable[[0, len(texts[0]) + 1, n - 1]] = False
            tokens[row, :n], predicted = self._mask(original, maskable, random)
            labels[row, :n] = np.where(predicted, original, shared.IGNORED)
            loss_mask[row, :n] = predicted
            padding_mask[row, :n] = True
            types[row, len(texts[0]) + 2 : n] = 1
        return {**batch, "sentence_label": sentence_label} if self.pairs else batch

    def _texts(self, i: int, random: np.random.Generator) -> tuple[list[np.ndarray], int]:
        """Return the tokens of the one or two texts in sample i, cut to fit, and the sentence label."""
        number, position = self.blend.locate(i)
        file = self.files[number]
        segment = file.segment(position)
        bounds = file.sentences(segment)
        short, length, split, flip, other, where = random.random(6).tolist()
        most, least = self.max_text_tokens, 2 if self.pairs else 1
        if short < self.short_probability:
            most = least + int(length * (most - least + 1))
        if not self.pairs:
            begin = int(bounds[0])
            return [file.read(begin, min(int(bounds[-1]), begin + most))], 0
        # Cut between two sentences within `most` tokens; a single sentence is cut in the middle.
        begin, end = int(bounds[0]), min(int(bounds[-1]), int(bounds[0]) + most)
        inner = bounds[(bounds > begin) & (bounds < end)]
        middle = int(inner[int(split * len(inner))]) if len(inner) else (begin + end) // 2
        first, second = file.read(begin, middle), file.read(middle, end)
        if flip < 0.5:
            return [first, second], 0
        if self.sentence_head == "sentence_order":
            return [second, first], 1
        elsewhere = file.other_document(segment, other)
        if elsewhere is None:
            return [first, second], 0
        bounds = file.sentences(elsewhere)
        start = int(bounds[int(where * (len(bounds) - 1))])
        return [first, file.read(start, min(int(bounds[-1]), start + most - len(first)))], 1

    def _mask(
        self, original: np.ndarray, maskable: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mask whole words, on average a share mask_probability of the tokens. Returns the masked tokens [n], and which
        of them are predicted, bool [n]."""
        begins = self.starts[original]
        begins[1:] |= self.ends[original[:-1]] | ~maskable[:-1]
        begins |= ~maskable
        word = np.cumsum(begins) - 1
        sizes = np.bincount(word, weights=maskable).astype(np.int64)
        draws = random.random((2, len(original)))
        words = np.flatnonzero(sizes)
        words = words[np.argsort(draws[0, : len(words)], kind="stable")]
        taken = np.cumsum(sizes[words])
        budget = self.mask_probability * int(maskable.sum())
        # The word that crosses the budget is chosen at random, with the probability that makes the mean exact.
        num_chosen = int(np.searchsorted(taken, budget, side="right"))
        if num_chosen < len(words):
            rest = (budget - (taken[num_chosen - 1] if num_chosen else 0)) / sizes[words[num_chosen]]
            num_chosen += int(random.random() < rest)
        chosen = np.zeros(len(sizes), dtype=bool)
        chosen[words[: max(1, num_chosen)]] = True
        predicted = chosen[word] & maskable
        masked = np.where(predicted & (draws[1] < 0.8), self.mask, original)
        replaced = predicted & (draws[1] >= 0.9)
        masked[replaced] = self.ordinary[(random.random(int(replaced.sum())) * len(self.ordinary)).astype(np.int64)]
        return masked, predicted
