"""Text to tokens: trains or takes the tokenizer, tokenizes in parallel, writes Megatron's .bin/.idx files into data.cache_dir.

`python -m data.prepare --help` says how to do it ahead of training; training does the same on first use.

Everything is written to a temporary name and renamed. Work is cut into parts, so a run that was killed continues where it was.
What exists is found by a key: a hash of the corpus's files (path, size, time of change), the tokenizer and the settings.
Processes that need the same data at once take turns at a file lock: the first does the work, the others find it done.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import platform
import random
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import xxhash
from tqdm import tqdm

from configs import command
from configs.exit_status import FAILED, INTERRUPTED
from configs.files import sync, write_text, writing_into
from configs.schema import ConfigError, DataConfig
from data import lock
from data.corpus import Document, File, Source, parse_corpus, plan_parts, read_span, unpack
from data.digest import digest_of, file_digest
from data.identity import Identity
from data.indexed import IndexedTokens, documents, token_dtype, write_index
from data.split import Split, cut_document, cut_place, hash_suffices, split_documents, split_index
from data.tokenizer import Tokenizer, load_tokenizer, tokenizer_file, train_tokenizer

FORMAT_VERSION = 1  # part of every key: raise it when the same inputs give other files
SHOWN_BAD_LINES = 5
SHOWN_REASONS = 3
TRAINING_SAMPLE_BYTES = 1 << 25  # text read to train a tokenizer
SCANNED_AT_ONCE = 1 << 22
SCANNED_TOKENS = 1 << 28  # of foreign token files, to see whether they fit the tokenizer
REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass
class TokenFile:
    """One term of a split's blend: the documents of `<prefix>.bin` that belong to `split` (all, train or validation)."""

    prefix: str
    weight: float
    num_tokens: int
    split: str = "all"
    validation_fraction: float = 0.0
    split_rule: str = "hash"
    opened: Any = field(default=None, compare=False, repr=False)  # what the files were when samples were first made of them


@dataclass
class PreparedData:
    """What training needs to know of the data. `train` and `valid`: the blends, with weights that sum to 1."""

    tokenizer_path: str
    vocab_size: int
    family: str
    train: list[TokenFile] = field(default_factory=list)
    valid: list[TokenFile] = field(default_factory=list)
    num_documents: int = 0
    num_bytes: int = 0  # of text
    num_bad_lines: int = 0
    bad_lines: list[str] = field(default_factory=list)  # the first few, as file:line: reason
    bad_lines_files: list[str] = field(default_factory=list)  # where all of them are listed
    identity: Identity = field(default_factory=dict)  # what the data are, by content (data/identity.py)


def prepare(
    config: DataConfig, family: str, show_progress: bool = True, rebuild_damaged: bool = False, split_rule: str = "exact"
) -> PreparedData:
    """Make tokenizer and token files for `config`, or find them done. family: gpt | bert.

    Any number of processes may call it at once, with the same arguments (only the one that works shows progress).
    `split_rule`: how validation is chosen (data/split.py); a run goes on with the one that its data have, before `exact` that was
    `hash`.
    `rebuild_damaged`: make token files anew whose size is not what was written; else that is an error.
    Raises ConfigError for what is wrong with the config, a file or the cache, RuntimeError when a worker process dies,
    TimeoutError when another process does not finish within data.timeout_seconds.
    """
    _check(config, family)
    sources = parse_corpus(config.corpus)
    cache = Path(config.cache_dir).expanduser().absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={config.cache_dir}: cannot make this folder ({error.strerror}); give one that can be written"
        ) from error
    tokenizer = _tokenizer(config, sources, cache, show_progress)
    if family == "bert":
        _ = tokenizer.cls, tokenizer.sep, tokenizer.mask  # an error now rather than in the workers
    prepared = PreparedData(tokenizer.path, tokenizer.vocab_size, family)
    split = {"rule": split_rule, "fraction": config.validation_fraction}
    prepared.identity = {"tokenizer": tokenizer.digest, "split": split, "sources": []}
    for source in sources:
        if source.megatron:
            _add_megatron(prepared, source, config, tokenizer, cache)
        else:
            _add_tokenized(prepared, source, config, family, tokenizer, cache, show_progress, rebuild_damaged)
    for files in (prepared.train, prepared.valid):
        total = sum(file.weight for file in files)
        for file in files:
            file.weight /= total
    return prepared


def _check(config: DataConfig, family: str) -> None:
    if family not in ("gpt", "bert"):
        raise ConfigError(f"model.family={family}: must be gpt or bert")
    if not 0 <= config.validation_fraction < 1:
        raise ConfigError(f"data.validation_fraction={config.validation_fraction}: must be at least 0 and below 1, for example 0.02")
    if config.num_workers is not None and config.num_workers < 1:
        raise ConfigError(f"data.num_workers={config.num_workers}: must be at least 1, or null for all cores")


def _key(*items: Any) -> str:
    return hashlib.sha256(json.dumps([FORMAT_VERSION, *items]).encode()).hexdigest()[:16]


# Tokenizer


def _tokenizer(config: DataConfig, sources: list[Source], cache: Path, show_progress: bool) -> Tokenizer:
    if config.tokenizer != "sentencepiece":
        return load_tokenizer(Path(config.tokenizer).expanduser().absolute())
    text_sources = [source for source in sources if source.files]
    if not text_sources:
        raise ConfigError(
            "data.tokenizer=sentencepiece: there is no text to train it on, as data.corpus holds only token files; "
            "give the tokenizer that made them, for example data.tokenizer=path/to/tokenizer.model"
        )
    key = _key([source.identity() for source in text_sources], config.vocab_size, config.text_key)
    path = cache / "tokenizers" / f"sentencepiece-{config.vocab_size}-{key}.model"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with lock.hold(path.with_suffix(".lock"), config.timeout_seconds):
            if not path.exists():
                if show_progress:
                    print(f"Training a sentencepiece tokenizer of {config.vocab_size} pieces ...", file=sys.stderr, flush=True)
                begin = time.monotonic()
                files = [file for source in text_sources for file in source.files]
                names = "+".join(source.name for source in text_sources)
                train_tokenizer(_training_texts(files, names, config.text_key, path.parent), config.vocab_size, path)
                if show_progress:
                    print(f"Trained it in {time.monotonic() - begin:.1f} s: {path}", file=sys.stderr, flush=True)
    return load_tokenizer(path)


def _training_texts(files: list[File], names: str, text_key: str, scratch: Path) -> Iterator[str]:
    """Documents from a fixed random choice of the corpus's parts, at most TRAINING_SAMPLE_BYTES. Raises ConfigError without any."""
    num_bad, bad, any_text = 0, [], False
    with tempfile.TemporaryDirectory(dir=scratch, prefix="sample-") as folder:
        plain = [file for file in files if not file.compression]
        packed = [file for file in files if file.compression]
        random.Random(0).shuffle(packed)
        unpacked: dict[str, str] = {}
        budget = TRAINING_SAMPLE_BYTES
        for file in packed:
            if budget <= 0:
                break
            unpacked[file.path] = f"{folder}/{len(unpacked)}"
            unpack(file.path, unpacked[file.path], limit=budget)
            budget -= os.path.getsize(unpacked[file.path])
        spans = [span for part in plan_parts([*plain, *(file for file in packed if file.path in unpacked)], unpacked) for span in part]
        random.Random(1).shuffle(spans)
        budget = TRAINING_SAMPLE_BYTES
        for span in spans:
            if budget <= 0:
                break
            budget -= span.size
            for item in read_span(span, text_key):
                if isinstance(item, Document):
                    any_text = True
                    yield item.text
                else:
                    num_bad += 1
                    bad += [str(item)] if num_bad <= SHOWN_BAD_LINES else []
        if not any_text:
            raise ConfigError(_no_documents(names, num_bad, bad))


# Token files that exist already


def _add_megatron(prepared: PreparedData, source: Source, config: DataConfig, tokenizer: Tokenizer, cache: Path) -> None:
    assert source.megatron
    tokens = IndexedTokens(source.megatron)
    scanned = range(0, min(len(tokens.tokens), SCANNED_TOKENS), SCANNED_AT_ONCE)
    largest = max((int(tokens.tokens[begin : begin + SCANNED_AT_ONCE].max()) for begin in scanned), default=0)
    if largest >= tokenizer.vocab_size:
        raise ConfigError(
            f"data.tokenizer={config.tokenizer}: {source.megatron}.bin holds token {largest}, but this tokenizer has only "
            f"{tokenizer.vocab_size} tokens; give the tokenizer that made the file"
        )
    files = {suffix: file_digest(f"{source.megatron}.{suffix}", cache, config.timeout_seconds) for suffix in ("bin", "idx")}
    split = prepared.identity["split"]
    *index, held_out = split_index(
        tokens.sequence_starts, np.asarray(tokens.sequence_lengths), np.asarray(tokens.document_bounds), split["fraction"], split["rule"]
    )
    lengths = documents(*index)[1]
    splits = {}
    for blend, name, wanted in ((prepared.train, "train", ~held_out), (prepared.valid, "validation", held_out)):
        num_tokens = int(lengths[wanted].sum())
        splits[name] = {"tokens": num_tokens, "digest": digest_of(files, name, split)}
        if num_tokens:
            weight = num_tokens if source.weight is None else source.weight
            blend.append(TokenFile(source.megatron, weight, num_tokens, name, split["fraction"], split["rule"]))
    num_documents = max(len(tokens.document_bounds) - 1, 0)
    prepared.num_documents += num_documents
    prepared.identity["sources"].append(_source_identity(source, num_documents, splits["train"], splits["validation"], files))


# Tokenization


def _add_tokenized(
    prepared: PreparedData,
    source: Source,
    config: DataConfig,
    family: str,
    tokenizer: Tokenizer,
    cache: Path,
    show_progress: bool,
    rebuild_damaged: bool,
) -> None:
    tokenizer_hash = hashlib.sha256(tokenizer_file(tokenizer.path).read_bytes()).hexdigest()
    named = [] if tokenizer.named_eod is None else [tokenizer.named_eod]
    key = _key(source.identity(), tokenizer_hash, family, config.text_key, config.validation_fraction, *named)
    folder = cache / "tokens" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', source.name)[:40]}-{family}-{key}"
    rule = prepared.identity["split"]["rule"]
    find = functools.partial(_find_done, folder, source, config, cache, rule)
    done = find(rebuild_damaged)
    if done is None:
        folder.mkdir(parents=True, exist_ok=True)
        with lock.hold(folder / "lock", config.timeout_seconds):
            done = find(rebuild_damaged)
            if done is None:
                with _room_given_back(folder), writing_into(folder):
                    _tokenize(source, config, family, tokenizer, folder, cache, rule, show_progress)
                done = find(False)
                assert done is not None
    folder = Path(done["folder"])
    for split, name in ((prepared.train, "train"), (prepared.valid, "valid")):
        num_tokens = done["tokens"][name]
        if num_tokens:
            split.append(TokenFile(str(folder / name), num_tokens if source.weight is None else source.weight, num_tokens))
    digests = done["digests"]
    splits = {
        name: {"tokens": done["tokens"][name], "digest": digest_of(digests[f"{name}.bin"], digests[f"{name}.idx"])}
        for name in ("train", "valid")
    }
    prepared.identity["sources"].append(
        _source_identity(source, done["documents"], splits["train"], splits["valid"], None, done.get("text"))
    )
    prepared.num_documents += done["documents"]
    prepared.num_bytes += done["bytes"]
    prepared.num_bad_lines += done["bad_lines"]
    prepared.bad_lines += done["first_bad_lines"]
    if done["bad_lines"]:
        prepared.bad_lines_files.append(str(folder / "bad_lines.txt"))


def _source_identity(
    source: Source, num_documents: int, train: Any, valid: Any, files: dict[str, str] | None, text: str | None = None
) -> dict[str, Any]:
    """What data/identity.py says of a source."""
    python = platform.python_version() if any(file.format == "stdlib" for file in source.files) else None
    names = {"name": source.given, "weight": source.weight, "documents": num_documents}
    return {**names, "train": train, "valid": valid, "files": files, "python": python, "text": text}


def _find_done(folder: Path, source: Source, config: DataConfig, cache: Path, rule: str, rebuild_damaged: bool) -> dict[str, Any] | None:
    """The summary of finished work, with its `folder`; None when there is none. Raises ConfigError when it was damaged.

    The split by hash lies in `folder`, as it did before there was another; one that `exact` makes otherwise in its folder `exact`.
    """
    for place in [folder / "exact", folder] if rule == "exact" else [folder]:
        try:
            done: dict[str, Any] = json.loads((place / "done.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        done["folder"] = str(place)
        if rule == "exact" and place == folder:
            tokens = done["tokens"]
            if not hash_suffices(done["documents"], tokens["train"], tokens["valid"], config.validation_fraction, source.is_stdlib):
                continue
        return _checked(done, place, cache, config.timeout_seconds, rebuild_damaged)
    return None


def _checked(done: dict[str, Any], folder: Path, cache: Path, timeout: float, rebuild_damaged: bool) -> dict[str, Any] | None:
    """The summary, with the files' digests as they are now; None where they were damaged and are to be made again."""
    written = done.get("digests", {})  # a cache of an earlier version has none
    done["digests"] = {}
    for name, size in done["sizes"].items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else None
        if actual == size:
            done["digests"][name] = file_digest(path, cache, timeout)
            if done["digests"][name] == written.get(name, done["digests"][name]):
                continue
        if rebuild_damaged:
            return None
        found = "is missing" if actual is None else f"has {actual} bytes" if actual != size else f"has {size} other bytes"
        raise ConfigError(
            f"data.cache_dir: {path} {found}, but {size} were written: it was truncated or damaged; delete {folder}, "
            "or run `python -m data.prepare` with the same data settings to make it again"
        )
    if rebuild_damaged:
        try:
            for name in ("train", "valid"):
                IndexedTokens(folder / name)
        except ConfigError:
            return None
    return done


@contextlib.contextmanager
def _room_given_back(folder: Path) -> Iterator[None]:
    """Where a disk fails, deletes what was half written; finished parts stay, and are gone on from."""
    try:
        yield
    except OSError:
        for leftover in folder.rglob("*.tmp*"):
            with contextlib.suppress(OSError):
                leftover.unlink()
        raise


def _tokenize(
    source: Source, config: DataConfig, family: str, tokenizer: Tokenizer, folder: Path, cache: Path, rule: str, show_progress: bool
) -> None:
    """Unpack, tokenize the parts that are not there yet, and merge them. Called by one process at a time."""
    parts_dir, unpacked_dir = folder / "parts", folder / "unpacked"
    parts_dir.mkdir(exist_ok=True)
    unpacked_dir.mkdir(exist_ok=True)
    for leftover in [*parts_dir.glob("*.tmp*"), *unpacked_dir.glob("*.tmp*")]:
        leftover.unlink(missing_ok=True)

    packed = {file.path: str(unpacked_dir / f"{i:06d}") for i, file in enumerate(source.files) if file.compression}
    settings = {"tokenizer": tokenizer.path, "text_key": config.text_key, "family": family}
    workers = config.num_workers or len(os.sched_getaffinity(0))
    jobs = [{"unpack": path, "out": out, "size": os.path.getsize(path)} for path, out in packed.items() if not os.path.exists(out)]
    _run_jobs(jobs, settings, workers, config.timeout_seconds, "unpacking", 0, show_progress)

    parts = plan_parts(source.files, packed)
    if not parts:
        raise ConfigError(_no_documents(source.name, 0, []))
    outs = [parts_dir / f"{i:06d}.npz" for i in range(len(parts))]
    sizes = [sum(span.size for span in part) for part in parts]
    missing = [i for i, out in enumerate(outs) if not out.exists()]
    jobs = [{"spans": [astuple(span) for span in parts[i]], "out": str(outs[i]), "size": sizes[i]} for i in missing]
    ready = sum(sizes) - sum(sizes[i] for i in missing)
    _run_jobs(jobs, settings, workers, config.timeout_seconds, "tokenizing", ready, show_progress)

    hashes, lengths = _documents(outs)
    split = split_documents(hashes, lengths, config.validation_fraction, rule, source.is_stdlib)
    target = folder if split.by_hash else folder / "exact"
    target.mkdir(exist_ok=True)
    (target / "done.json").unlink(missing_ok=True)
    done = _merge(outs, target, tokenizer, family, split)
    if not done["documents"]:
        shutil.rmtree(folder)
        raise ConfigError(_no_documents(source.name, done["bad_lines"], done["first_bad_lines"]))
    done["text"] = _text_digest(outs)
    done["digests"] = {name: file_digest(target / name, cache, config.timeout_seconds) for name in done["sizes"]}
    write_text(target / "done.json", json.dumps(done, indent=1))
    shutil.rmtree(parts_dir)
    shutil.rmtree(unpacked_dir)


def _text_digest(parts: list[Path]) -> str | None:
    """Of the text of all documents, whatever their tokens and their split; None where an earlier version has made a part."""
    digest = xxhash.xxh3_128()
    for part in parts:
        arrays = _load(part)
        if "texts" not in arrays:
            return None
        digest.update(arrays["texts"].tobytes())
    return digest.hexdigest()


def _no_documents(name: str, num_bad: int, bad: list[str]) -> str:
    """The message for a corpus without a document: the first reasons, each once, with the file and the line."""
    if not num_bad:
        return f"data.corpus: {name} holds no text"
    by_reason: dict[str, str] = {}
    for line in bad:
        by_reason.setdefault(line.split(": ", 1)[-1], line)
    first = list(by_reason.values())[:SHOWN_REASONS]
    latin = next((line for line in bad if ": not UTF-8" in line or line.endswith("is not UTF-8")), None)
    advice = " Text must be UTF-8: convert it, for example with: iconv -f LATIN1 -t UTF-8 < FILE > NEW" if latin else ""
    which = "its only line is bad" if num_bad == 1 else f"all {num_bad:,} lines are bad, the first"
    return f"data.corpus: {name} holds no documents: {which}: {'; '.join(first)}{'.' if advice else ''}{advice}"


def _documents(parts: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Hash and length in tokens of every document of the parts."""
    hashes, lengths = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for part in parts:
        arrays = _load(part)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(arrays["sequence_lengths"], dtype=np.int64)])
        hashes.append(arrays["hashes"])
        lengths.append(np.diff(ends[np.concatenate([np.zeros(1, np.int64), np.cumsum(arrays["sequences_per_document"])])]))
    return np.concatenate(hashes), np.concatenate(lengths)


def _merge(parts: list[Path], folder: Path, tokenizer: Tokenizer, family: str, split: Split) -> dict[str, Any]:
    """Concatenate the parts into train and valid files. Returns the summary, with the sizes of what was written."""
    dtype = token_dtype(tokenizer.vocab_size)
    names = ("train", "valid")
    lengths: dict[str, list[np.ndarray]] = {name: [] for name in names}
    counts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    bad: list[str] = []
    first = num_bytes = 0
    with contextlib.ExitStack() as stack:
        bins = {name: stack.enter_context(open(folder / f"{name}.bin.tmp", "wb")) for name in names}
        for part in parts:
            arrays = _load(part)
            per_document, per_sequence = arrays["sequences_per_document"], arrays["sequence_lengths"]
            tokens = np.fromfile(part.with_suffix(".bin"), dtype)
            assert len(tokens) == per_sequence.sum(dtype=np.int64), part
            in_valid = split.held_out[first : first + len(per_document)]
            first += len(in_valid)
            if split.cut is not None and first - len(in_valid) <= split.cut < first:
                number = split.cut - first + len(in_valid)
                tokens, per_sequence, per_document = _cut(tokens, per_sequence, per_document, number, split.tail, tokenizer, family)
                in_valid = np.insert(in_valid, number + 1, True)
            sequence_in_valid = np.repeat(in_valid, per_document)
            for name, wanted in (("train", False), ("valid", True)):
                lengths[name].append(per_sequence[sequence_in_valid == wanted])
                counts[name].append(per_document[in_valid == wanted])
            # Runs of sequences that go to the same file, in tokens; most documents go to train, so there are few.
            changes = np.flatnonzero(np.diff(sequence_in_valid)) + 1
            ends = [*np.cumsum(per_sequence)[changes - 1].tolist(), len(tokens)]
            begin, wanted = 0, bool(len(sequence_in_valid) and sequence_in_valid[0])
            for end in ends:
                bins["valid" if wanted else "train"].write(tokens[begin:end].data)
                begin, wanted = end, not wanted
            num_bytes += int(arrays["num_bytes"])
            bad += arrays["bad_lines"].tolist()
    for name in names:
        bounds = np.concatenate([np.zeros(1, np.int64), *counts[name]]).cumsum()
        write_index(folder / f"{name}.idx.tmp", dtype, np.concatenate(lengths[name]), bounds)
    files = [f"{name}.{suffix}" for name in names for suffix in ("bin", "idx")]
    for file in files:
        sync(folder / f"{file}.tmp")
        os.rename(folder / f"{file}.tmp", folder / file)
    write_text(folder / "bad_lines.txt", "".join(f"{line}\n" for line in bad))
    return {
        "tokens": {name: int(sum(int(part.sum(dtype=np.int64)) for part in lengths[name])) for name in names},
        "documents": first,
        "bytes": num_bytes,
        "bad_lines": len(bad),
        "first_bad_lines": bad[:SHOWN_BAD_LINES],
        "sizes": {file: (folder / file).stat().st_size for file in files},
    }


def _cut(
    tokens: np.ndarray, per_sequence: np.ndarray, per_document: np.ndarray, number: int, tail: int, tokenizer: Tokenizer, family: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of a part in which document `number` is made two, of which the second has about `tail` tokens."""
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(per_document)])
    starts = np.cumsum(per_sequence, dtype=np.int64) - per_sequence
    first, last = int(bounds[number]), int(bounds[number + 1])
    begin = int(starts[first])
    content = tokens[begin : begin + int(per_sequence[first:last].sum())]
    place = cut_place(per_sequence[first:last], tail, content, (tokenizer.line_ends(), tokenizer.word_starts()))
    _, per_sequence, bounds = cut_document(starts, per_sequence, bounds, number, place)
    if family == "gpt":  # a document is one sequence, which ends with end-of-document
        tokens = np.insert(tokens, begin + place, tokenizer.eod)
        per_sequence[first] += 1
    return tokens, per_sequence, np.diff(bounds)


def _load(part: Path) -> Any:
    """The arrays of a part, each read when it is asked for."""
    return np.load(io.BytesIO(part.read_bytes()))


# Processes


class _Lines:
    """What tqdm writes to: each of its pictures becomes a line of a log."""

    def __init__(self, log: TextIO):
        self._log = log

    def write(self, text: str) -> None:
        if text.strip():
            self._log.write(text.strip() + "\n")

    def flush(self) -> None:
        self._log.flush()


def _run_jobs(
    jobs: list[dict[str, Any]], settings: dict[str, Any], num_workers: int, timeout: float, verb: str, ready: int, show_progress: bool
) -> None:
    """Have worker processes do the jobs. `ready`: bytes done before. Raises when a job fails or a worker dies or hangs."""
    if not jobs:
        return
    # One thread per worker: there is a worker per core.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    pending = list(enumerate(jobs))[::-1]
    processes: list[subprocess.Popen[bytes]] = []
    selector = selectors.DefaultSelector()
    total = ready + sum(job["size"] for job in jobs)
    look: dict[str, Any] = {"dynamic_ncols": True, "mininterval": 0.5}
    if not sys.stderr.isatty():  # a log: plain lines, and not many
        look = {"file": _Lines(sys.stderr), "mininterval": 30.0, "bar_format": "{desc}: {n_fmt}B of {total_fmt}B, {rate_fmt}"}
    bar = tqdm(total=total, initial=ready, unit="B", unit_scale=True, desc=verb, disable=not show_progress, **look)
    try:
        with bar:
            for _ in range(min(num_workers, len(jobs))):
                command = [sys.executable, "-m", "data.worker"]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
                processes.append(process)
                assert process.stdout
                selector.register(process.stdout, selectors.EVENT_READ, process)
                _send(process, settings)
                number, job = pending.pop()
                _send(process, {"job": number, **job})
            running = len(processes)
            while running:
                events = selector.select(timeout)
                if not events:
                    raise TimeoutError(f"{verb}: no worker finished a part within {timeout} s (data.timeout_seconds); raise it")
                for key, _ in events:
                    process = key.data
                    line = process.stdout.readline()
                    if not line:
                        raise RuntimeError(
                            f"{verb}: a worker process died with status {process.wait(timeout=10)}; "
                            "finished parts are kept, so the same command continues (with less memory: data.num_workers=1)"
                        )
                    reply = json.loads(line)
                    if "error" in reply:
                        if reply.get("config"):
                            raise ConfigError(reply["error"])
                        raise OSError(reply["errno"], f"{verb}: {reply['error']}", reply["file"])
                    bar.update(jobs[reply["job"]]["size"])
                    if pending:
                        number, job = pending.pop()
                        _send(process, {"job": number, **job})
                    else:
                        selector.unregister(process.stdout)
                        process.stdin.close()
                        running -= 1
    finally:
        selector.close()
        for process in processes:
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if stream:
                        stream.close()
            try:
                process.wait(timeout=1 if sys.exc_info()[0] is None else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)


def _send(process: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed when its answer is read
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()


# Command line

HELP = """\
Tokenize a corpus ahead of training: python -m data.prepare [key=value ...]

Training with the same data settings finds the result in data.cache_dir and starts at once. It may be run again at any time:
finished work is skipped, interrupted work is continued, damaged files are made again.

keys (as for train.py):
  data.corpus=stdlib        the standard library's sources, about 30 MB
  data.corpus=PATH          .txt .jsonl .md .rst .py (also .gz .zst), .parquet, a folder of those, or Megatron .bin/.idx
  data.corpus='[A,B]'       several, mixed by size
  data.corpus='[{path: A, weight: 0.7}, {path: B, weight: 0.3}]'   a blend
  data.text_key=text        field of .jsonl, column of .parquet
  data.tokenizer=sentencepiece   trained on the corpus (data.vocab_size=4096 pieces); or a .model file, or a Hugging Face folder
  data.cache_dir=cache      where the results go
  data.validation_fraction=0.02  share of the tokens for validation
  data.num_workers=null     processes; null: all cores
  model.family=gpt          gpt, or bert: documents are stored as sentences
"""


def parse_arguments(arguments: list[str]) -> tuple[DataConfig, str]:
    """DataConfig and model family of `key=value` arguments. Raises ConfigError naming the key."""
    import difflib

    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    defaults = OmegaConf.create({"data": OmegaConf.structured(DataConfig), "model": {"family": "gpt"}})
    known = [f"data.{key}" for key in asdict(DataConfig())] + ["model.family"]
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument}: arguments have the form key=value, for example data.corpus=stdlib")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1) or difflib.get_close_matches(f"data.{key}", known, 1)
            raise ConfigError(f"{key}: no such key" + (f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"))
    try:
        merged = OmegaConf.merge(defaults, OmegaConf.from_dotlist(arguments))
        data = OmegaConf.to_object(merged.data)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{' '.join(arguments)}: {str(error).splitlines()[0]}") from error
    assert isinstance(data, DataConfig)
    return data, str(merged.model.family)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help", "help"} & set(arguments):
        print(HELP)
        return 0
    return command.run(lambda: _prepare(arguments))


def _prepare(arguments: list[str]) -> int:
    config, family = parse_arguments(arguments)
    begin = time.monotonic()
    try:
        prepared = prepare(config, family, show_progress=True, rebuild_damaged=True)
    except RuntimeError as error:  # a worker died
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED
    print(f"tokenizer   {prepared.tokenizer_path} ({prepared.vocab_size} tokens)")
    print(f"documents   {prepared.num_documents:,} ({prepared.num_bytes / 1e6:,.1f} MB of text)")
    print(f"bad lines   {prepared.num_bad_lines:,}" + "".join(f"\n            {line}" for line in prepared.bad_lines))
    if prepared.bad_lines_files:
        print("            all are listed in " + ", ".join(prepared.bad_lines_files))
    for name, files in (("train", prepared.train), ("validation", prepared.valid)):
        for file in files:
            print(f"{name:<11} {file.num_tokens:,} tokens, weight {file.weight:.3f}, {file.prefix}.bin")
    print(f"seconds     {time.monotonic() - begin:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
