"""Files that are cut, deleted, replaced, slow or broken while a model runs from them: one line with file and tensor."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.checks.ring_parity import PP2, make_folder, no_memory_for_buffers
from inference import command as arguments
from inference import evaluate, fill_mask, generate
from inference.weights import loader
from memory.copy_stream import CopyStream
from tests import distributed
from tests.inference.test_evaluate import command
from tests.waits import LONG

WIDE = {"vocab_size": 3000, "hidden_size": 96, "intermediate_size": 256}
BUDGET = 1.4  # MiB: one unit of it at a time
SECONDS = 30.0  # of a stuck read, unless the command ends before
AFTER = 60  # reads of a file: a second pass has begun
NAME = "model.layers.1.mlp.up_proj.weight"
OTHER_NAME = "decoder.layers.1.mlp.linear_fc1.weight"
Answer = tuple[int, str, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 3 MiB."""
    return make_folder("llama", tmp_path_factory.mktemp("models") / "llama", [], **WIDE)


@pytest.fixture
def victim(model: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(model, tmp_path / "victim"))


def _line(folder: Path, *more: str) -> list[str]:
    ids = ["--ids", "--prompt", "1 2 3", "--max-tokens", "6", "--ignore-end", "--device", "cpu"]
    return ["--checkpoint", str(folder), *ids, "--memory-budget", f"{BUDGET}", *more]


@contextlib.contextmanager
def _damage(kind: str, path: Path, after: int) -> Iterator[None]:
    """Do it to a file that is being read, at this rank's read number `after`."""
    real, lock, count = os.preadv, threading.Lock(), 0
    over = threading.Event()

    def preadv(*arguments: Any) -> int:
        nonlocal count
        with lock:
            count += 1
            now = count
        if now == after:
            if kind == "cut":
                os.truncate(path, 100_000)
            elif kind == "deleted":
                path.unlink()
            elif kind == "replaced":
                shutil.copy(path, f"{path}.new")
                with open(f"{path}.new", "r+b") as file:
                    file.truncate(1000)
                os.rename(f"{path}.new", path)
        if now >= after and kind == "broken":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if now >= after and kind == "stuck" or now == after and kind == "slow":
            over.wait(1.0 if kind == "slow" else SECONDS)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        if kind in ("slow", "stuck"):  # a busy machine is slow at what is not
            patch.setattr(loader, "SLOW", 0.2)
        if kind == "stuck":
            patch.setattr(loader.UnitLoader.__init__, "__defaults__", (2.0,))
            patch.setattr(CopyStream.close, "__defaults__", (0.5,))  # what the end of the command waits
        try:
            yield
        finally:
            over.set()


def _while_damaged(kind: str, folder: Path, line: list[str]) -> Answer:
    with no_memory_for_buffers(), _damage(kind, folder / "model.safetensors", AFTER):
        return command(generate.main, line)


def _run(folder: Path, *more: str) -> Answer:
    answer: Answer = distributed.run(_while_damaged, 1, "", folder, _line(folder, *more))[0]
    return answer


def _last(answer: Answer) -> str:
    """The last line of a command that refused."""
    status, out, errors = answer
    assert (status, out) == (2, "") and "Traceback" not in errors
    return errors.strip().splitlines()[-1]


@pytest.mark.parametrize("kind", ["deleted", "replaced", "slow"])
def test_what_does_no_harm(kind: str, model: Path, victim: Path) -> None:
    expected = _run(model)
    assert expected[0] == 0 and "are read from the files in every pass" in expected[2]
    ((status, out, errors),) = distributed.run(_while_damaged, 1, kind, victim, _line(victim))
    assert (status, out) == expected[:2]
    slow = re.findall(r"waiting for (.*): tensor (\S+) for 0.2 s", errors)
    assert (slow != []) == (kind == "slow") and all(path == str(victim / "model.safetensors") for path, _ in slow)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "cut",
            r"error: tensor \S+: (\S+) cannot be read: it was cut from \d+ to 100000 bytes while it was read\. Copy",
        ),
        ("broken", r"error: tensor \S+: (\S+) cannot be read: Input/output error\. Copy the file again\."),
        ("stuck", r"error: (\S+): tensor \S+ was not read within 2 s\. Check the disk of this file\."),
    ],
)
def test_what_cannot_be_read_any_more_ends_in_a_line(kind: str, said: str, victim: Path) -> None:
    (answer,) = distributed.run(_while_damaged, 1, kind, victim, _line(victim))
    found = re.match(said, _last(answer))
    assert found is not None and found[1] == str(victim / "model.safetensors"), answer


def test_a_rank_that_lost_another_says_so_in_a_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(_: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35211.")

    monkeypatch.setattr(arguments, "GRACE", 0.0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    arguments.add_model_arguments(parser)
    assert arguments.run_command(body, parser, ["--checkpoint", str(model), "--device", "cpu"]) == 1
    assert (
        capsys.readouterr().err
        == "error: another rank has failed. Read its last line of output, which names the cause.\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "1")  # nobody else can have left: a bug, which keeps its traceback
    with pytest.raises(RuntimeError, match="Connection closed"):
        arguments.run_command(body, parser, ["--checkpoint", str(model), "--device", "cpu"])


def test_a_process_ends_although_a_disk_never_answers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * 2**20))
    lines = [
        "import os, pathlib, threading, time",
        "from memory.read_only_file import BounceBuffers, ReadOnlyFile",
        f"file = ReadOnlyFile(pathlib.Path({str(path)!r}), BounceBuffers(2**20))",
        "os.preadv = lambda *_: time.sleep(1000)",
        "read = threading.Thread(target=file.read, args=(5, memoryview(bytearray(2 * 2**20))), daemon=True)",
        "read.start()",
        "time.sleep(0.2)",
        "print(file.is_direct, [each.name for each in threading.enumerate() if each.name.startswith('direct')])",
    ]
    found = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=LONG, check=True
    )
    if found.stdout.startswith("False"):
        pytest.skip("no direct reads on this file system")
    assert "direct-read" in found.stdout


def _named_twice(path: Path) -> None:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length].decode().rstrip()
    again = f"{header[:-1]},{json.dumps(NAME)}:{json.dumps(json.loads(header)[NAME])}}}".encode()
    path.write_bytes(struct.pack("<Q", len(again)) + again + raw[8 + length :])


def _in_two_files(path: Path) -> None:
    tensors = load_file(path)
    shards = {
        "model-00001-of-00002.safetensors": {name: each for name, each in tensors.items() if "norm" not in name},
        "model-00002-of-00002.safetensors": {
            name: each for name, each in tensors.items() if "norm" in name or name == NAME
        },
    }
    for name, held in shards.items():
        save_file(held, path.with_name(name), {"format": "pt"})
    index = {name: shard for shard, held in shards.items() for name in held}
    path.with_name("model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    path.unlink()


def _edited(path: Path, kind: str) -> None:
    if kind == "twice":
        return _named_twice(path)
    if kind == "in two files":
        return _in_two_files(path)
    tensors = load_file(path)
    weight = tensors.pop(NAME)
    if kind == "shape":
        tensors[NAME] = weight[:-2].clone()
    elif kind == "nan":
        tensors[NAME] = weight.index_fill(0, torch.tensor([3]), float("nan"))
    save_file(tensors, path, {"format": "pt"})
    return None


@pytest.mark.parametrize("kind", ["missing", "twice", "in two files", "shape"])
def test_wrong_tensors_are_refused_before_the_first_token(kind: str, victim: Path) -> None:
    _edited(victim / "model.safetensors", kind)
    said = _last(_run(victim))
    assert NAME in said and str(victim) in said, said


@pytest.mark.parametrize("way", [[], ["--temperature", "1"], ["--no-cache"]], ids=["greedy", "drawn", "no cache"])
def test_a_weight_that_is_nan_is_named(way: list[str], victim: Path) -> None:
    _edited(victim / "model.safetensors", "nan")
    said = _last(_run(victim, *way))
    assert f"{victim / 'model.safetensors'}: tensor {OTHER_NAME} has a number that is NaN or infinite in fp32" in said


def test_answers_beyond_a_precision_are_refused(victim: Path) -> None:
    path = victim / "model.safetensors"
    tensors = load_file(path)
    for name in (NAME, NAME.replace("up_proj", "down_proj")):
        tensors[name] = tensors[name] * 1e4
    save_file(tensors, path, {"format": "pt"})
    assert "are not finite in fp16" in _last(_run(victim, "--precision", "fp16"))


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "abc", ""])
def test_budgets_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for main, more in ((generate.main, []), (evaluate.main, []), (fill_mask.main, ["--text", "[MASK]"])):
        with pytest.raises(SystemExit) as ended:
            main(["--checkpoint", "nowhere", f"--memory-budget={text}", *more])
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert ended.value.code == 2 and "argument --memory-budget: " in last and text in last


def _advised(main: Any, arguments: list[str]) -> tuple[str, Answer]:
    """What a command with too small a budget says, and what it does with the advised one."""
    said = _last(command(main, [*arguments, "--memory-budget", "0.5"]))
    advice = re.search(r"Try --memory-budget (\d+)", said)
    assert advice is not None, said
    return said, command(main, [*arguments, "--memory-budget", advice[1]])


@pytest.mark.parametrize("layout", [[], [PP2]], ids=["one rank", "pipeline"])
def test_the_advised_budget_is_enough(layout: list[str], model: Path) -> None:
    line = ["--checkpoint", str(model), "--ids", "--max-tokens", "3", "--device", "cpu", "--batch", "1", *layout]
    prompts = [word for text in ("1 2 3", "4", "5 6") for word in ("--prompt", text)]
    for said, (status, _, errors) in distributed.run(_advised, 1 + len(layout), generate.main, [*line, *prompts]):
        assert status == 0 and ("(rank " in said) == bool(layout), (said, errors)


def test_a_model_that_continues_text_fills_no_masks(model: Path) -> None:
    line = ["--checkpoint", str(model), "--ids", "--mask-id", "4", "--text", "1 4", "--device", "cpu"]
    assert "Try python -m inference.generate, which continues text." in _last(
        distributed.run(command, 1, fill_mask.main, line)[0]
    )
    assert _run(model)[0] == 0
