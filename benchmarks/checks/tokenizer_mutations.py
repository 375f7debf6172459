"""Mutated tokenizer files, read and used within 20 s and 2 GiB each, or refused in one line that names the tokenizer.

`python -m benchmarks.checks.tokenizer_mutations [--cases 500] [--seed 0] [--json]`

Small tokenizers of every format that data.tokenizer takes are changed at random: bytes flipped, cut, doubled; values of
their JSON exchanged for null, huge numbers, deep lists, long texts; patterns that backtrack, replacements in a chain,
dropout. The process that reads them may have 2 GiB of address space itself; exit status 1 if one case was wrong.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from base.errors import ConfigError
from data.tokenizer import load_tokenizer
from data.tokenizer.formats.spec import byte_level_alphabet
from data.tokenizer.probes import PROBES

Files = dict[str, bytes]
SECONDS, BYTES = 20.0, 2 << 30
CORPUS = ["the model learns the words of the text ", "    return self.x == 12345\n\n", "caf\u00e9 \u4e2d\u6587"] * 9
VALUES: list[Any] = [None, True, -1, 10**9, 2**63, 1e300, "", "x" * 200_000, [], {}, [[[]]], "\ud800", 0.5]
REPLACE = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
RULES: list[tuple[str, Any]] = [
    ("normalizer", {"type": "Sequence", "normalizers": [REPLACE] * 40}),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": "(.*)*x"}, "content": "y" * 9}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 99).decode()}),
    (
        "pre_tokenizer",
        {"type": "Split", "pattern": {"Regex": "(e+)+$x"}, "behavior": "Isolated", "invert": False},
    ),
    ("decoder", {"type": "Sequence", "decoders": [REPLACE] * 40}),
]


def starts() -> dict[str, Files]:
    """Return small tokenizers, by format."""

    def trained(model: Any, trainer: Any) -> Any:
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.train_from_iterator(CORPUS, trainer)
        return tokenizer

    usual: dict[str, Any] = {"special_tokens": ["</s>", "<pad>"], "show_progress": False}
    alphabet = sorted(byte_level_alphabet())
    pairs = trained(models.BPE(), trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, **usual))
    unigram = trained(
        models.Unigram(), trainers.UnigramTrainer(vocab_size=320, initial_alphabet=alphabet, unk_token="<pad>", **usual)
    )
    settings = json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}).encode()
    spec = json.loads(pairs.to_str())["model"]
    words = {**spec["vocab"], "<|endoftext|>": len(spec["vocab"])}
    merges = "".join(f"{left} {right}\n" for left, right in spec["merges"])
    ranks = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the"]
    coded = [base64.b64encode(token).decode() for token in ranks]
    config = {"pattern": r"\p{L}+|\s+|[^\s\p{L}]+", "default_num_special_tokens": 20}
    vocab = [{"rank": i, "token_bytes": text} for i, text in enumerate(coded)]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    return {
        "tokenizer.json, BPE": {"tokenizer.json": pairs.to_str().encode(), "tokenizer_config.json": settings},
        "tokenizer.json, Unigram": {"tokenizer.json": unigram.to_str().encode(), "tokenizer_config.json": settings},
        "vocab.json": {"vocab.json": json.dumps(words).encode(), "merges.txt": merges.encode()},
        "vocab.txt": {"vocab.txt": "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##s"]).encode()},
        "tiktoken": {"tokenizer.model": "".join(f"{text} {i}\n" for i, text in enumerate(coded)).encode()},
        "tekken.json": {"tekken.json": json.dumps({"config": config, "vocab": vocab}).encode()},
        "sentencepiece": {"tokenizer.model": out.getvalue()},
    }


def mutated(files: Files, rng: random.Random) -> tuple[Files, str]:
    """Change one file of a tokenizer; return it with the kind of change."""
    name = rng.choice(list(files))
    content, edits = files[name], ["bytes", "cut", "doubled", "empty", "numbers"]
    if name.endswith(".json"):
        edits += ["value"] * 6 + ["deep"] + ["rule"] * 4 * (name == "tokenizer.json")
    way = rng.choice(edits)
    first, second = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    if way == "bytes":
        changed = bytearray(content)
        for _ in range(rng.choice([1, 4, 64])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        content = bytes(changed)
    elif way == "cut":
        content = content[:first] + content[second:] if rng.random() < 0.5 else content[:first]
    elif way == "doubled":
        content = content[:second] + content[first:second] * rng.choice([1, 9]) + content[second:]
    elif way == "empty":
        content = b""
    elif way == "numbers":
        digits = [i for i, byte in enumerate(content) if 48 <= byte < 58]
        position = rng.choice(digits or [0])
        content = content[:position] + rng.choice([b"999999999", b"-7", b"9" * 5000]) + content[position + 1 :]
    elif way == "deep":
        content = content[:first] + b"[" * 100_000 + content[first:]
    else:
        tree = json.loads(content)
        if way == "rule":
            key, rule = rng.choice(RULES)
            tree[key] = rule
            tree["model"]["dropout"] = rng.choice([None, 0.5, 7]) if tree["model"]["type"] == "BPE" else None
        else:
            _exchange(tree, rng)
        content = json.dumps(tree).encode()
    return {**files, name: content}, f"{name}, {way}"


def _exchange(tree: Any, rng: random.Random) -> None:
    """Replace a random value of a JSON tree, or a random key."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(tree[key], (dict, list)) and tree[key] and rng.random() < 0.8:
            tree = tree[key]
            continue
        if isinstance(tree, dict) and rng.random() < 0.2:
            tree[rng.choice(["", "x" * 200_000, "\ud800"])] = tree.pop(key)
        else:
            tree[key] = rng.choice(VALUES)
        return


def outcome(folder: Path) -> str:
    """Read a mutated tokenizer; return read, refused, or what is wrong with the answer."""
    begin = time.monotonic()
    try:
        tokenizer = load_tokenizer(folder)
        for text in PROBES:
            tokenizer.decode(tokenizer.encode(text))
        tokenizer.special_ids()
        found = "read"
    except ConfigError as error:
        text = str(error)
        found = "refused" if str(folder) in text and "\n" not in text else f"not one line that names it: {text[:200]}"
    except BaseException as error:  # a PanicException is no Exception
        found = f"{type(error).__name__}: {str(error)[:200]}"
    seconds = time.monotonic() - begin
    return found if seconds < SECONDS else f"{found} after {seconds:.0f} s"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if a case was neither read nor refused."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks.tokenizer_mutations", description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    rng, counts, wrong, longest = random.Random(options.seed), Counter[tuple[str, str]](), [], 0.0
    bases = starts()
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(options.cases):
            base = list(bases)[number % len(bases)]
            files, how = mutated(bases[base], rng)
            folder = Path(temporary, str(number))
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content)
            begin = time.monotonic()
            found = outcome(folder)
            longest = max(longest, time.monotonic() - begin)
            counts[base, found if found in ("read", "refused") else "wrong"] += 1
            if found not in ("read", "refused"):
                wrong.append(f"case {number}, {base}, {how}: {found}")
    print("| format | read | refused | wrong |\n| --- | --- | --- | --- |")
    for base in bases:
        print(f"| {base} | {' | '.join(str(counts[base, word]) for word in ('read', 'refused', 'wrong'))} |")
    print(f"\n{options.cases} cases, seed {options.seed}: {len(wrong)} wrong; the longest took {longest:.1f} s")
    print("\n".join(wrong), end="")
    if options.json:
        print(json.dumps({"cases": options.cases, "seed": options.seed, "wrong": wrong, "longest_s": longest}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
