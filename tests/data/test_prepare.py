import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from base.errors import ConfigError
from configs.schema import DataConfig
from data import indexed as indexed_module
from data import split as split_module
from data.indexed import UINT16_VOCAB_LIMIT, IndexedTokens, token_dtype
from data.prepare import prepare
from data.prepare import tokenize_source as tokenize_module
from data.prepare.command import main, parse_arguments
from data.tokenizer import load_tokenizer
from tests.data.test_tokenizer import byte_level
from tests.data.token_files import write_tokens
from tests.waits import LONG, until, until_gone

REPOSITORY = Path(__file__).resolve().parents[2]


def documents_of(prepared) -> dict[str, list[list[list[int]]]]:
    """Per split, each document as a list of sequences, read by Megatron's own reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    splits: dict[str, list[list[list[int]]]] = {}
    for name, files in (("train", prepared.train), ("valid", prepared.valid)):
        splits[name] = []
        for file in files:
            dataset = IndexedDataset(file.prefix)
            bounds = dataset.document_indices
            for first, last in zip(bounds[:-1], bounds[1:], strict=True):
                splits[name].append([dataset[i].tolist() for i in range(first, last)])
    return splits


def tree(folder: Path) -> dict[str, bytes]:
    """The token files under a folder: name -> content."""
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix in (".bin", ".idx")}


@pytest.fixture
def no_cuts(monkeypatch):
    """Split by hash, which cuts no document."""
    monkeypatch.setattr(split_module, "_hash_suffices", lambda *_: True)


def test_gpt_documents_end_with_end_of_document_and_megatron_reads_them(config, texts, tokenizer, no_cuts):
    prepared = prepare(config, "gpt", show_progress=False)
    splits = documents_of(prepared)
    assert all(
        len(document) == 1 and document[0][-1] == tokenizer.eod for split in splits.values() for document in split
    )
    decoded = {name: [tokenizer.decode(document[0][:-1]) for document in split] for name, split in splits.items()}
    assert sorted(decoded["train"] + decoded["valid"]) == sorted(texts)
    held_out = set(decoded["valid"])
    assert 5 < len(held_out) < 40  # of 200, 10%
    assert decoded["train"] == [text for text in texts if text not in held_out]  # the corpus's order
    for name, files in (("train", prepared.train), ("valid", prepared.valid)):
        assert [file.num_tokens for file in files] == [sum(len(document[0]) for document in splits[name])]
    assert prepared.vocab_size == tokenizer.vocab_size and prepared.num_documents == 200 and prepared.num_bad_lines == 0


def test_bert_documents_are_sentences(config, texts, tokenizer, no_cuts):
    splits = documents_of(prepare(config, "bert", show_progress=False))
    documents = splits["train"] + splits["valid"]
    assert sorted("".join(tokenizer.decode(sentence) for sentence in document) for document in documents) == sorted(
        texts
    )
    sentences = [tokenizer.decode(sentence).strip() for document in documents for sentence in document]
    assert all(sentence.endswith(".") and sentence.count(".") == 1 for sentence in sentences)


def test_reader_agrees_with_megatron_writer(tmp_path):
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    for vocab_size in (1000, UINT16_VOCAB_LIMIT - 1, UINT16_VOCAB_LIMIT, 100_000):
        documents = [[[1, 2, 3], [4]], [[5]], [[6, 7], [8], [9, vocab_size - 1]]]
        prefix = tmp_path / str(vocab_size)
        assert token_dtype(vocab_size) is DType.optimal_dtype(vocab_size)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=token_dtype(vocab_size))
        for document in documents:
            for sequence in document:
                builder.add_item(torch.tensor(sequence))
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
        write_tokens(tmp_path / "own", token_dtype(vocab_size), documents)
        for suffix in (".bin", ".idx"):
            assert (tmp_path / f"own{suffix}").read_bytes() == Path(f"{prefix}{suffix}").read_bytes()
        indexed = IndexedTokens(prefix)
        assert indexed.tokens[:].tolist() == [*range(1, 10), vocab_size - 1]
        assert indexed.document_bounds.tolist() == [0, 2, 3, 6]
        index = (indexed.sequence_starts, indexed.sequence_lengths, indexed.document_bounds)
        assert [array.tolist() for array in indexed_module.documents(*index)] == [[0, 4, 5], [4, 1, 5]]


def test_result_does_not_depend_on_the_number_of_workers(config, tmp_path):
    results = []
    for workers in (1, 3):
        cache = tmp_path / f"cache{workers}"
        prepare(replace(config, cache_dir=str(cache), num_workers=workers, **_several_shards(tmp_path)), "gpt", False)
        results.append(tree(cache))
    assert results[0] == results[1] and len(results[0]) == 4


def _several_shards(tmp_path: Path) -> dict[str, str]:
    """A corpus of several shards."""
    path = tmp_path / "several.txt"
    path.write_text("\n\n\n".join(f"Document {i}. " + "a model learns tokens " * 500 for i in range(600)))
    return {"corpus": str(path)}


def test_finished_work_is_skipped_and_changes_are_noticed(config, jsonl, monkeypatch):
    first = prepare(config, "gpt", False)
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_module, "run_jobs", None)  # any work would fail
        assert prepare(config, "gpt", False) == first
    with open(jsonl, "a") as file:
        file.write('{"text": "one more"}\n')
    second = prepare(config, "gpt", False)
    assert second.num_documents == first.num_documents + 1 and second.train[0].prefix != first.train[0].prefix


def test_bad_lines_are_counted_and_listed(config, jsonl):
    with open(jsonl, "a") as file:
        file.write("".join("{\n" for _ in range(9)))
    for _ in range(2):  # the second time from the cache
        prepared = prepare(config, "gpt", False)
        assert prepared.num_bad_lines == 9 and prepared.bad_lines[0].startswith(f"{jsonl}:201: not JSON")
        assert len(Path(prepared.bad_lines_files[0]).read_text().splitlines()) == 9


def test_only_bad_lines(config, jsonl):
    jsonl.write_text("nonsense\n")
    with pytest.raises(
        ConfigError, match="data.corpus: corpus.jsonl contains no documents: its only line is bad: .*:1: not JSON"
    ):
        prepare(config, "gpt", False)


# data.prepare, which is killed when the first shard is done and the others are under way.
KILLED = """
import os, signal, sys
from data.prepare import command, worker_pool
send, shards = worker_pool._send, []
def counted(process, message):
    send(process, message)
    shards.extend(["spans"] if "spans" in message else [])
    if len(shards) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
worker_pool._send = counted
sys.exit(command.main(sys.argv[1:]))
"""


def test_kill_in_the_middle_then_resume(config, tmp_path):
    settings = replace(config, **_several_shards(tmp_path), num_workers=2)
    expected = tmp_path / "expected"
    prepare(replace(settings, cache_dir=str(expected)), "gpt", False)
    arguments = [
        f"data.{key}={getattr(settings, key)}"
        for key in ("corpus", "tokenizer", "cache_dir", "validation_fraction", "num_workers")
    ]
    process = subprocess.Popen([sys.executable, "-c", KILLED, *arguments], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    cache, workers = Path(settings.cache_dir), set()

    def has_ended() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            workers.update(psutil.Process(process.pid).children())
        return process.poll() is not None

    until(has_ended, "the kill", poll=0.002)
    assert process.returncode == -signal.SIGKILL
    assert not list(cache.rglob("done.json"))
    # Workers end with their input, when they have written their shard, as does the process that tries tokenizers.
    assert len(workers) == 3
    until_gone(workers)
    kept = {path: path.stat().st_mtime_ns for path in cache.rglob("parts/*.npz")}
    assert kept
    # What remains is tokenized, what was kept is not: were it, its absence below would not matter.
    done: list[str] = []
    original = tokenize_module.run_jobs

    def record(jobs, *arguments):
        done.extend(job["out"] for job in jobs if "out" in job)
        original(jobs, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize_module, "run_jobs", record)
        prepare(settings, "gpt", False)
    assert done and not set(done) & set(map(str, kept))
    assert tree(cache) == tree(expected)
    assert not list(cache.rglob("*.tmp*")) and not list(cache.rglob("*.npz"))


def test_several_processes_at_once(config):
    code = "import sys, data.prepare.command as p; sys.exit(p.main(sys.argv[1:]))"
    keys = ("corpus", "cache_dir", "num_workers")
    arguments = [f"data.{key}={getattr(config, key)}" for key in keys] + ["data.vocab_size=350"]
    command = [sys.executable, "-c", code, *arguments]
    processes = [
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=LONG) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert sum("Training a sentencepiece tokenizer" in errors for _, errors in outputs) == 1
    without_time = {
        "\n".join(line for line in output.splitlines() if not line.startswith("seconds")) for output, _ in outputs
    }
    assert len(without_time) == 1


def test_waiting_for_another_process_ends(config):
    prepared = prepare(config, "gpt", False)
    folder = Path(prepared.train[0].prefix).parent
    (folder / "done.json").unlink()
    with open(folder / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=f"pid {os.getpid()} .*data.timeout_seconds"):
            prepare(replace(config, timeout_seconds=1), "gpt", False)


def test_a_summary_that_is_another_files_is_made_again(config):
    folder = Path(prepare(config, "gpt", False).train[0].prefix).parent
    whole = json.loads((folder / "done.json").read_text())
    (folder / "done.json").write_text('{"step": 10}\n')  # such as a checkpoint's state
    assert prepare(config, "gpt", False).num_documents == 200
    assert json.loads((folder / "done.json").read_text()) == whole


def test_a_worker_that_dies_is_an_error(config, monkeypatch, tmp_path):
    (tmp_path / "fake").write_text("#!/bin/sh\nread line\nkill -9 $$\n")
    (tmp_path / "fake").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "fake"))
        with pytest.raises(RuntimeError, match="worker process died with status -9"):
            prepare(config, "gpt", False)
        (tmp_path / "fake").write_text("#!/bin/sh\nexec sleep 60\n")
        with pytest.raises(TimeoutError, match="data.timeout_seconds"):
            prepare(replace(config, timeout_seconds=1), "gpt", False)
    assert prepare(config, "gpt", False).num_documents == 200


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_truncated_files(config, suffix):
    prepared = prepare(config, "gpt", False)
    path = Path(f"{prepared.train[0].prefix}.{suffix}")
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(
        ConfigError, match=f"{path} was damaged .*: it has {len(content) - 10} bytes, not {len(content)}.*data.prepare"
    ):
        prepare(config, "gpt", False)
    with pytest.raises(ConfigError, match="truncated"):
        IndexedTokens(prepared.train[0].prefix)
    assert prepare(config, "gpt", False, rebuild_damaged=True) == prepared
    assert path.read_bytes() == content


def test_damaged_index(config):
    prefix = prepare(config, "gpt", False).train[0].prefix
    path = Path(f"{prefix}.idx")
    content = path.read_bytes()
    for damaged, words in (
        (b"X" + content[1:], "header"),
        (content[:9] + b"\x07" + content[10:], "version 7"),
        (content[:20], "header"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=f"{path}.*{words}.*data.prepare"):
            IndexedTokens(prefix)
    path.unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        IndexedTokens(prefix)


def test_existing_megatron_files(config, tmp_path, model_path):
    rng = np.random.default_rng(0)
    write_tokens(tmp_path / "own", np.uint16, [[rng.integers(0, 300, rng.integers(1, 50))] for _ in range(100)])
    for corpus in (tmp_path / "own", tmp_path / "own.bin"):
        prepared = prepare(replace(config, corpus=str(corpus)), "gpt", False)
        assert prepared.train[0].prefix == str(tmp_path / "own")
        total = len(IndexedTokens(tmp_path / "own").tokens)
        assert prepared.train[0].num_tokens + prepared.valid[0].num_tokens == total
    with pytest.raises(ConfigError, match="data.tokenizer=sentencepiece.*only token files"):
        prepare(replace(config, corpus=str(tmp_path / "own"), tokenizer="sentencepiece"), "gpt", False)
    write_tokens(tmp_path / "large", np.uint16, [[[1, 2, 900]]])
    with pytest.raises(ConfigError, match="data.tokenizer=.*token 900"):
        prepare(replace(config, corpus=str(tmp_path / "large")), "gpt", False)


def test_blend_weights(config, jsonl, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("A text. Another text.\n\n\n\nAnd one more.\n\n\n\nThe last." * 9)
    blend = [{"path": str(jsonl), "weight": 3}, {"path": str(other), "weight": 1}]
    prepared = prepare(replace(config, corpus=blend), "gpt", False)
    assert [file.weight for file in prepared.train] == [0.75, 0.25] == [file.weight for file in prepared.valid]
    assert len(prepare(replace(config, corpus=[str(jsonl), str(other)]), "gpt", False).train) == 1


def test_hugging_face_tokenizer(config, texts, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    byte_level(folder, texts)
    prepared = prepare(replace(config, tokenizer=str(folder)), "gpt", False)
    tokenizer = load_tokenizer(folder)
    documents = documents_of(prepared)["train"]
    assert tokenizer.decode(documents[0][0][:-1]) in texts
    with pytest.raises(ConfigError, match="data.tokenizer=.*no cls token"):
        prepare(replace(config, tokenizer=str(folder)), "bert", False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"validation_fraction": 1.0}, "data.validation_fraction=1.0"),
        ({"num_workers": 0}, "data.num_workers=0"),
        ({"corpus": "none.txt"}, "data.corpus=none.txt"),
        ({"tokenizer": "none.model"}, "data.tokenizer="),
        ({"cache_dir": "/proc/none"}, "data.cache_dir=/proc/none"),
        ({"text_key": "body"}, "no field 'body'"),
    ],
)
def test_wrong_settings(config, changes, words):
    with pytest.raises(ConfigError, match=words):
        prepare(replace(config, **changes), "gpt", False)


def test_command_line(config, capsys):
    arguments = [f"data.{key}={getattr(config, key)}" for key in ("corpus", "tokenizer", "cache_dir")]
    assert main([*arguments, "model.family=bert"]) == 0
    output = capsys.readouterr().out
    assert "documents   200" in output and "bad lines   0" in output and "-bert-" in output
    assert "lengths " not in output
    assert main(["--help"]) == 0 and "data.text_key" in capsys.readouterr().out
    for wrong, words in (
        (["data.corpu=x"], "Did you mean data.corpus?"),
        (["corpus=x"], "Did you mean data.corpus?"),
        (["data.num_workers=many"], "many"),
        (["stdlib"], "key=value"),
        (["data.corpus=missing.txt"], "missing.txt"),
        (["model.family=t5"], "model.family=t5"),
        (["model.sequence_length=0"], "model.sequence_length=0"),
        (["model.sequence_length=long"], "model.sequence_length=long"),
    ):
        assert main(wrong) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error, error


def test_command_line_values():
    blend = "data.corpus=[{path: a.txt, weight: 0.7}, {path: b.txt, weight: 0.3}]"
    config, family, length = parse_arguments([blend, "data.num_workers=2", "model.family=bert"])
    assert isinstance(config, DataConfig) and family == "bert" and config.num_workers == 2 and length is None
    assert config.corpus == [{"path": "a.txt", "weight": 0.7}, {"path": "b.txt", "weight": 0.3}]
    assert json.dumps(config.corpus)
