"""Token files to samples. Sample i is a pure function of (files, seed, i), for any i, so that a run can resume anywhere and be
trained longer without changing what it has seen.

Every epoch visits each sample of a file once, in an order of its own. Blends repeat a fixed pattern in which each file has its
share. Everything is vectorised over documents and memory-mapped: the cost of a sample does not grow with the corpus, the cost of
an epoch is a sort.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from configs.schema import ConfigError
from data.indexed import IndexedTokens, documents
from data.prepare import TokenFile
from data.split import split_index
from data.tokenizer import Tokenizer

BLEND_PERIOD = 10_000  # samples after which the pattern of a blend repeats; weights are rounded to 1/BLEND_PERIOD
IGNORED = 0  # label of positions that are not predicted; their loss_mask is 0

# Purposes of the random streams that are drawn from one seed.
DOCUMENT_ORDER, SAMPLE_ORDER, SAMPLE = range(3)


def _random(seed: int, purpose: int, *index: int) -> np.random.Philox:
    return np.random.Philox(np.random.SeedSequence([seed, purpose, *index]))


def _permutation(seed: int, purpose: int, file: int, epoch: int, n: int) -> np.ndarray:
    """A permutation of range(n), int64 [n]. From raw bits, so that it is the same under every version of numpy."""
    return np.argsort(_random(seed, purpose, file, epoch).random_raw(n), kind="stable")


class Blend:
    """Which file, and which of its samples, sample i of a blend is."""

    def __init__(self, weights: Sequence[float]):
        shares = np.asarray(weights, dtype=np.float64) / sum(weights) * BLEND_PERIOD
        if len(weights) > BLEND_PERIOD // 10 or shares.min() < 0.5:
            least = min(weights) / sum(weights)
            raise ConfigError(
                f"data.corpus: {len(weights)} sources, the least with {least:.2g} of the weight; at most {BLEND_PERIOD // 10} sources "
                f"with at least {0.5 / BLEND_PERIOD} each can be blended; merge the small ones into a folder"
            )
        self.counts = np.maximum(np.round(shares), 1).astype(np.int64)
        # The k-th of a file's c samples stands at (k + 1/2) / c of the pattern: as even as can be.
        file = np.repeat(np.arange(len(weights)), self.counts)
        rank = np.concatenate([np.arange(count) for count in self.counts])
        order = np.argsort((rank + 0.5) / self.counts[file], kind="stable")
        self.file, self.rank = file[order], rank[order]

    def locate(self, i: int) -> tuple[int, int]:
        period, position = divmod(i, len(self.file))
        file = int(self.file[position])
        return file, period * int(self.counts[file]) + int(self.rank[position])


class _Epochs:
    """The two epochs of a file that were used last."""

    def __init__(self, build: Any):
        self._build = build
        self._kept: dict[int, Any] = {}
        self._lock = threading.Lock()

    def get(self, epoch: int) -> Any:
        with self._lock:
            if epoch not in self._kept:
                while len(self._kept) > 1:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[epoch] = self._build(epoch)
            return self._kept[epoch]


def _open(file: TokenFile) -> IndexedTokens:
    """Open a token file; the same that was opened before, where a run goes back and reads it again. Raises ConfigError."""
    indexed = IndexedTokens(file.prefix)
    file.opened = file.opened or indexed.fingerprints
    if indexed.fingerprints != file.opened:
        raise ConfigError(
            f"data.corpus: {file.prefix}.bin or .idx was exchanged while the run goes. Put it back as it was, and start again to go on"
        )
    return indexed


def _of_split(file: TokenFile, indexed: IndexedTokens) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """starts, lengths [n] and document bounds [d + 1] of a token file, and which documents belong to the split [d]."""
    index = (indexed.sequence_starts, np.asarray(indexed.sequence_lengths), np.asarray(indexed.document_bounds))
    if file.split == "all":
        return *index, np.ones(max(len(index[2]) - 1, 0), dtype=bool)
    starts, lengths, bounds, held_out = split_index(*index, file.validation_fraction, file.split_rule)
    return starts, lengths, bounds, held_out if file.split == "validation" else ~held_out


class _GPTFile:
    """The windows of one token file."""

    def __init__(self, file: TokenFile, number: int, sequence_length: int, seed: int, shuffle: bool):
        self.file = file
        self.sequence_length = sequence_length
        self.seed, self.number, self.shuffle = seed, number, shuffle
        indexed = _open(file)
        self.tokens = indexed.tokens
        *index, wanted = _of_split(file, indexed)
        starts, lengths = documents(*index)
        wanted &= lengths > 0
        self.starts, self.lengths = starts[wanted], lengths[wanted]
        total = int(self.lengths.sum())
        self.num_samples = (total - 1) // sequence_length
        if self.num_samples < 1:
            raise ConfigError(
                f"data.corpus: {file.prefix}.bin ({file.split}) has {total} tokens, but one sample takes model.sequence_length + 1 = "
                f"{sequence_length + 1}; give more text, raise data.validation_fraction if this is the validation split, "
                f"or set model.sequence_length={max(1, (total - 1) // 2)}"
            )
        self.epochs = _Epochs(self._epoch)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Starts of the documents in this epoch's order, the ends they reach when laid end to end, and the order of the samples."""
        if not self.shuffle:
            return self.starts, np.cumsum(self.lengths), None
        documents = _permutation(self.seed, DOCUMENT_ORDER, self.number, epoch, len(self.lengths))
        samples = _permutation(self.seed, SAMPLE_ORDER, self.number, epoch, self.num_samples)
        return self.starts[documents], np.cumsum(self.lengths[documents]), samples

    def window(self, i: int) -> np.ndarray:
        """Tokens [sequence_length + 1], int64, of sample i of this file."""
        epoch, position = divmod(i, self.num_samples)
        starts, ends, samples = self.epochs.get(epoch)
        begin = (int(samples[position]) if samples is not None else position) * self.sequence_length
        end = begin + self.sequence_length + 1
        first, last = np.searchsorted(ends, [begin, end - 1], side="right")
        # Documents that the window touches: their ends, cut to the window, and where each one's tokens lie in the file.
        stops = np.minimum(ends[first : last + 1], end)
        begins = np.concatenate([[begin], stops[:-1]])
        origins = starts[first : last + 1] - np.concatenate([ends[first - 1 : first] if first else np.zeros(1, np.int64), ends[first:last]])
        return self.tokens.read(list(zip((origins + begins).tolist(), (origins + stops).tolist()))).astype(np.int64)


class GPTSamples:
    """Windows of sequence_length + 1 tokens over documents laid end to end in an order that each epoch shuffles anew.

    shuffle=False (validation): the files' own order, from the start. Raises ConfigError when there is too little data for one
    sample, a file is damaged, or (in `batch`) a token does not fit `vocab_size`.
    """

    def __init__(self, files: Sequence[TokenFile], sequence_length: int, seed: int, shuffle: bool = True, vocab_size: int | None = None):
        _check_files(files)
        self.vocab_size = vocab_size
        self.files = [_GPTFile(file, number, sequence_length, seed, shuffle) for number, file in enumerate(files)]
        self.blend = Blend([file.weight for file in files])

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Samples as tokens and labels int64 [b, s], loss_mask float32 [b, s]."""
        windows = []
        for i in indices:
            file, position = self.blend.locate(i)
            windows.append(self.files[file].window(position))
        both = np.stack(windows)
        if self.vocab_size is not None and int(both.max()) >= self.vocab_size:
            raise ConfigError(
                f"data.tokenizer: token {int(both.max())} does not fit a vocabulary of {self.vocab_size}; "
                "give the tokenizer that made the token files in data.corpus"
            )
        tokens, labels = np.ascontiguousarray(both[:, :-1]), np.ascontiguousarray(both[:, 1:])
        return {"tokens": tokens, "labels": labels, "loss_mask": np.ones(tokens.shape, dtype=np.float32)}


def _check_files(files: Sequence[TokenFile]) -> None:
    if not files:
        raise ConfigError(
            "data.validation_fraction: this split of the corpus has no documents; raise data.validation_fraction, "
            "or set training.eval_interval=0"
        )


def segment_documents(sequence_lengths: np.ndarray, document_bounds: np.ndarray, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into runs of consecutive sentences of about `target` tokens.

    sequence_lengths [n], document_bounds [d + 1] -> first and last + 1 sentence of each segment, int64 [k]; in a document, a
    sentence belongs to the segment (its offset in tokens) // target, so segments cover the document and never cross its end.
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
    """The segments of one token file, in an order that each epoch shuffles anew."""

    def __init__(self, file: TokenFile, number: int, target: int, least_tokens: int, seed: int, shuffle: bool):
        self.seed, self.number, self.shuffle = seed, number, shuffle
        indexed = _open(file)
        self.tokens = indexed.tokens
        starts, lengths, bounds, in_split = _of_split(file, indexed)
        self.firsts, self.lasts = segment_documents(lengths, bounds, target)
        # Where each sentence starts, in tokens; one more entry for the end.
        self.places = np.concatenate([starts, [len(self.tokens)]])
        self.documents = np.searchsorted(bounds, self.firsts, side="right") - 1
        wanted = in_split[self.documents]
        wanted &= self.places[self.lasts] - self.places[self.firsts] >= least_tokens
        self.firsts, self.lasts, self.documents = self.firsts[wanted], self.lasts[wanted], self.documents[wanted]
        self.num_samples = len(self.firsts)
        if not self.num_samples:
            raise ConfigError(
                f"data.corpus: {file.prefix}.bin ({file.split}) has {len(self.tokens)} tokens in {len(lengths)} sentences, but none of "
                f"{least_tokens} tokens or more, which one BERT sample takes; give more text"
            )
        self.epochs = _Epochs(lambda epoch: _permutation(seed, SAMPLE_ORDER, number, epoch, self.num_samples))

    def segment(self, i: int) -> int:
        epoch, position = divmod(i, self.num_samples)
        return int(self.epochs.get(epoch)[position]) if self.shuffle else position

    def sentences(self, segment: int) -> np.ndarray:
        """Bounds, in tokens of the file, of a segment's sentences: int64 [number of sentences + 1]."""
        return self.places[self.firsts[segment] : self.lasts[segment] + 1]

    def read(self, begin: int, end: int) -> np.ndarray:
        return self.tokens[begin:end].astype(np.int64)

    def other_document(self, segment: int, draw: float) -> int | None:
        """A segment of another document, uniformly by `draw` in [0, 1); None when there is one document only."""
        document = self.documents[segment]
        begin, end = np.searchsorted(self.documents, [document, document + 1])
        others = self.num_samples - int(end - begin)
        if not others:
            return None
        chosen = int(draw * others)
        return chosen if chosen < begin else chosen + int(end - begin)


class BertSamples:
    """Masked-LM samples of consecutive sentences, with whole-word masking (80% mask, 10% random, 10% kept) as in BERT.

    sentence_head none: [CLS] a [SEP]. next_sentence: [CLS] a [SEP] b [SEP], where b follows a (label 0) or comes from another
    document (label 1). sentence_order (ALBERT): b follows a (label 0), or they are swapped (label 1).
    Devlin et al. 2018, arXiv:1810.04805; Lan et al. 2019, arXiv:1909.11942.
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
        _check_files(files)
        for name, value in (("mask_probability", mask_probability), ("short_sequence_probability", short_sequence_probability)):
            if not 0 <= value <= 1 or (name == "mask_probability" and value == 0):
                raise ConfigError(f"data.{name}={value}: must be a probability, for example {0.15 if name == 'mask_probability' else 0.1}")
        self.pairs = sentence_head != "none"
        self.sentence_head, self.seed, self.sequence_length = sentence_head, seed, sequence_length
        self.room = sequence_length - (3 if self.pairs else 2)  # tokens besides [CLS] and [SEP]
        least = 2 if self.pairs else 1
        if self.room < least:
            needed = sequence_length - self.room + least
            raise ConfigError(f"model.sequence_length={sequence_length}: BERT with sentence_head={sentence_head} needs at least {needed}")
        self.mask_probability, self.short_probability = mask_probability, short_sequence_probability
        self.cls, self.sep, self.mask, self.pad = tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad
        self.vocab_size = tokenizer.vocab_size
        self.starts, self.ends = tokenizer.word_starts(), tokenizer.word_ends()
        self.ordinary = np.setdiff1d(np.arange(self.vocab_size), [*tokenizer.special_ids(), self.cls, self.sep, self.mask, self.pad])
        self.files = [_BertFile(file, number, self.room, least, seed, shuffle) for number, file in enumerate(files)]
        self.blend = Blend([file.weight for file in files])

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """tokens (masked), labels, types int64 [b, s]; loss_mask float32 [b, s]; padding_mask bool [b, s], True = real token;
        with a sentence head also sentence_label int64 [b]."""
        shape = (len(indices), self.sequence_length)
        tokens = np.full(shape, self.pad, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        types = np.zeros(shape, dtype=np.int64)
        loss_mask = np.zeros(shape, dtype=np.float32)
        padding_mask = np.zeros(shape, dtype=bool)
        sentence_label = np.zeros(len(indices), dtype=np.int64)
        for row, i in enumerate(indices):
            random = np.random.Generator(_random(self.seed, SAMPLE, i))
            parts, sentence_label[row] = self._parts(i, random)
            original = np.concatenate([[self.cls], *(piece for part in parts for piece in (part, [self.sep]))])
            n = len(original)
            if int(original.max()) >= self.vocab_size:
                raise ConfigError(
                    f"data.tokenizer: token {int(original.max())} does not fit a vocabulary of {self.vocab_size}; "
                    "give the tokenizer that made the token files in data.corpus"
                )
            maskable = np.ones(n, dtype=bool)
            maskable[[0, len(parts[0]) + 1, n - 1]] = False
            tokens[row, :n], predicted = self._mask(original, maskable, random)
            labels[row, :n] = np.where(predicted, original, IGNORED)
            loss_mask[row, :n] = predicted
            padding_mask[row, :n] = True
            types[row, len(parts[0]) + 2 : n] = 1
        batch: dict[str, np.ndarray] = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "types": types,
            "padding_mask": padding_mask,
        }
        if self.pairs:
            batch["sentence_label"] = sentence_label
        return batch

    def _parts(self, i: int, random: np.random.Generator) -> tuple[list[np.ndarray], int]:
        """The one or two texts of sample i, cut to fit, and the sentence label."""
        number, position = self.blend.locate(i)
        file = self.files[number]
        segment = file.segment(position)
        bounds = file.sentences(segment)
        short, length, split, flip, other, where = random.random(6).tolist()
        room, least = self.room, 2 if self.pairs else 1
        if short < self.short_probability:
            room = least + int(length * (room - least + 1))
        if not self.pairs:
            begin = int(bounds[0])
            return [file.read(begin, min(int(bounds[-1]), begin + room))], 0
        # Cut between two sentences that the room allows; a single sentence is cut in the middle.
        begin, end = int(bounds[0]), min(int(bounds[-1]), int(bounds[0]) + room)
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
        return [first, file.read(start, min(int(bounds[-1]), start + room - len(first)))], 1

    def _mask(self, original: np.ndarray, maskable: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Masked tokens and which positions are to be predicted, both [n]: whole words, mask_probability of the tokens on average."""
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
        # The word that crosses the budget is taken with the probability that makes the mean exact.
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
