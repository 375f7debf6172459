"""Train a sentencepiece model on a sample of the corpus."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterable
from pathlib import Path

from configs.schema import ConfigError
from data.tokenizer.base import CLS, EOD, MASK, PAD, SEP, SPACE
from data.tokenizer.settings import first_line

MIN_TRAINED_VOCAB = 320  # 256 bytes, 7 special symbols and some room for real pieces
MAX_TRAINING_SENTENCES = 50_000
MAX_TRAINING_CHARACTERS = 2_000_000
MAX_SENTENCE_CHARACTERS = 2_000


def train_tokenizer(texts: Iterable[str], vocab_size: int, out: str | Path) -> None:
    """Train a lossless sentencepiece model on a bounded sample of `texts` and write it to `out`, atomically.

    Unigram rather than BPE: on source text it encodes 3 to 4 times as fast at 2% more tokens. Deterministic for the
    same texts. The same model serves GPT and BERT: it has pad, end-of-document, [CLS], [SEP] and [MASK] symbols. Few
    texts give a vocabulary smaller than `vocab_size`. Raises ConfigError when vocab_size is too small or there is no
    text.
    """
    import sentencepiece

    if vocab_size < MIN_TRAINED_VOCAB:
        raise ConfigError(
            f"data.vocab_size={vocab_size}: a trained tokenizer needs at least {MIN_TRAINED_VOCAB} "
            f"(256 bytes, the special symbols and some words); data.vocab_size=4096 works"
        )
    lines = _sample_lines(texts)
    if not lines:
        raise ConfigError("data.corpus: it holds no text to train a tokenizer on")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9995,
            unk_id=0,
            pad_id=1,
            eos_id=2,
            bos_id=-1,
            pad_piece=PAD,
            eos_piece=EOD,
            control_symbols=[CLS, SEP, MASK],
            user_defined_symbols=["\n"],
            max_sentence_length=16 * MAX_SENTENCE_CHARACTERS,
            seed_sentencepiece_size=200_000,
            num_threads=2,  # fixed: the sums of the EM steps, and so the model, depend on it
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"data.vocab_size={vocab_size}: sentencepiece could not train on this corpus: {first_line(error)}"
        ) from error
    temporary = Path(f"{out}.tmp{os.getpid()}")
    temporary.write_bytes(model.getvalue())
    temporary.rename(out)


def _sample_lines(texts: Iterable[str]) -> list[str]:
    """At most MAX_TRAINING_SENTENCES lines and MAX_TRAINING_CHARACTERS characters of the texts, chosen by a fixed
    seed."""
    lines = []
    for text in texts:
        for line in text.replace(SPACE, " ").split("\n"):
            for begin in range(0, len(line), MAX_SENTENCE_CHARACTERS):
                lines.append(line[begin : begin + MAX_SENTENCE_CHARACTERS])
    random.Random(0).shuffle(lines)
    chosen: list[str] = []
    total = 0
    for line in lines[:MAX_TRAINING_SENTENCES]:
        total += len(line)
        if total > MAX_TRAINING_CHARACTERS and chosen:
            break
        chosen.append(line)
    return chosen
