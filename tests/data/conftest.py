"""Small corpora, tokenizers and token files for the tests of data/."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from configs.schema import DataConfig
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tests.waits import LONG

WORDS = (
    "the a model learns tokens gradient expert router layer batch step loss quickly slowly often never reads "
    "writes holds sends"
).split()


def make_text(seed: int, num_sentences: int) -> str:
    """Prose of made-up sentences, in paragraphs."""
    rng = random.Random(seed)
    sentences = [" ".join(rng.choices(WORDS, k=rng.randint(3, 12))).capitalize() + "." for _ in range(num_sentences)]
    return "\n\n".join(" ".join(sentences[i : i + 4]) for i in range(0, num_sentences, 4))


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [make_text(seed, 1 + seed % 30) for seed in range(200)]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    train_tokenizer(texts + ["def f(x):\n    return x + 1\n"] * 20, 400, path)
    return path


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return load_tokenizer(model_path)


@pytest.fixture
def jsonl(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def config(tmp_path: Path, jsonl: Path, model_path: Path) -> DataConfig:
    """Settings that prepare the small corpus into tmp_path."""
    return DataConfig(
        corpus=str(jsonl),
        tokenizer=str(model_path),
        cache_dir=str(tmp_path / "cache"),
        num_workers=1,
        validation_fraction=0.1,
        timeout_seconds=int(LONG),
    )
