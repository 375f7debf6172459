"""A checkpoint that is not as it was written is found, passed over and never loaded; nothing in one is ever run."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from base import checksums
from base.errors import ConfigError
from checkpoint import manifest, start
from configs.schema import Config
from inference.open_model import open_model
from tests import distributed
from tests.distributed import RankError
from tests.test_packages import ROOT, own_modules
from tests.tolerances import FP32_LOSS
from tests.training.helpers import largest_difference, train_on_ranks
from training.resilience import events

RUN = [
    "experiment=gpt_moe_tiny",
    "model.hidden_size=32",
    "model.num_layers=2",
    "checkpoint.interval=2",
    "parallel.expert=2",
]
DAMAGES = 120
FILES = ("rank_00000.safetensors", "rank_00001.safetensors", "state.json", "config.yaml", "manifest.json")


@pytest.fixture(scope="module")
def run_dir(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 steps with checkpoints of steps 2, 4 and 5, two files of tensors each."""
    folder = tmp_path_factory.mktemp("run")
    train_on_ranks([*RUN, *data, f"run_dir={folder}", "training.steps=5"], 2)
    assert [path.name for path in manifest.list_checkpoints(folder)] == ["step_0000005", "step_0000004", "step_0000002"]
    for path in manifest.list_checkpoints(folder):
        assert sorted(file.name for file in path.iterdir()) == sorted(FILES) and manifest.problems(path) == []
    return folder


def auto(run_dir: Path) -> Config:
    config = Config()
    config.run_dir = str(run_dir)
    return config


# ---------------------------------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------------------------------


def truncate(path: Path, other: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def flip_a_bit(path: Path, other: Path, rng: random.Random) -> None:
    at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
    with open(path, "r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ bit]))


def lose(path: Path, other: Path, rng: random.Random) -> None:
    path.unlink()


def swap(path: Path, other: Path, rng: random.Random) -> None:
    shutil.copyfile(other, path)


def zero_a_block(path: Path, other: Path, rng: random.Random) -> None:
    """What a disk does that lost a write: the size is right."""
    size = path.stat().st_size
    start = rng.randrange(size)
    with open(path, "r+b") as stream:
        stream.seek(start)
        length = len(stream.read(4096))
        stream.seek(start)
        stream.write(b"\xa5" * length)


KINDS = (truncate, flip_a_bit, lose, swap, zero_a_block)


def test_every_damage_is_found_and_passed_over(run_dir: Path, tmp_path: Path) -> None:
    rng = random.Random(4)
    newest, older = manifest.folder_of(run_dir, 5), manifest.folder_of(run_dir, 4)
    damaged_run = tmp_path / "run"
    # the same in all steps
    cases = [(name, damage) for name in FILES for damage in KINDS if (name, damage) != ("config.yaml", swap)]
    for name, damage in cases * (DAMAGES // len(cases)):
        shutil.rmtree(damaged_run, ignore_errors=True)
        shutil.copytree(run_dir / "checkpoints", damaged_run / "checkpoints")
        damaged = manifest.folder_of(damaged_run, 5)
        damage(damaged / name, older / name, rng)
        changed = not (damaged / name).exists() or (damaged / name).read_bytes() != (newest / name).read_bytes()
        assert changed, f"{damage.__name__} of {name} did nothing"
        problem = manifest.verify(damaged)
        assert problem is not None and name in problem and "\n" not in problem, (name, damage.__name__, problem)
        found = start.find(auto(damaged_run))
        assert found.checkpoint == manifest.folder_of(damaged_run, 4)
        assert found.passed_over == (f"skipped {damaged}: {problem}",)
        config = auto(tmp_path / "other")
        config.checkpoint.resume = str(damaged)
        with pytest.raises(ConfigError, match="is not a good checkpoint"):
            start.find(config)
        with pytest.raises(ConfigError, match="holds no good checkpoint"):
            manifest.good_checkpoint_at(damaged)


def open_here(folder: Path) -> str:
    """The name of the checkpoint that a model is opened from."""
    with open_model(folder) as model:
        return model.source.name


def test_a_model_is_never_opened_from_damage(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged_run = shutil.copytree(run_dir, tmp_path / "run")
    newest = manifest.folder_of(damaged_run, 5)
    flip_a_bit(newest / FILES[1], damaged_run, random.Random(0))
    assert distributed.run(open_here, 1, damaged_run) == ["step_0000004"]
    assert f"skipped {newest}: its file {FILES[1]} was changed" in capsys.readouterr().out
    with pytest.raises(RankError, match="holds no good checkpoint: .*rank_00001.safetensors was changed"):
        distributed.run(open_here, 1, manifest.folder_of(damaged_run, 5))
    (manifest.folder_of(damaged_run, 5) / manifest.STATE).unlink()
    with pytest.raises(RankError, match="holds no good checkpoint: .*state.json is missing"):
        distributed.run(open_here, 1, manifest.folder_of(damaged_run, 5))


def test_folders_that_took_each_others_names(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(manifest.folder_of(run_dir, 4), manifest.folder_of(tmp_path, 5))
    assert manifest.verify(manifest.folder_of(tmp_path, 5)) == "its manifest.json belongs to step 4, not to step 5"
    copied = shutil.copytree(manifest.folder_of(run_dir, 4), tmp_path / "best")  # a name of the owner's own is fine
    assert manifest.verify(copied) is None


def forget_a_file(folder: Path) -> None:
    """Take a rank's file out, and rewrite the manifest to match."""
    files = manifest.read(folder)
    del files["rank_00001.safetensors"]
    (folder / "rank_00001.safetensors").unlink()
    manifest.write(folder, 5, files)


def test_a_manifest_that_lacks_a_rank_is_found(run_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(manifest.folder_of(run_dir, 5), manifest.folder_of(tmp_path, 5))
    forget_a_file(folder)
    problem = manifest.verify(folder)
    assert problem is not None and problem.startswith("its files hold ")


def test_two_ranks_pass_over_and_go_on(
    data: list[str], run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks share out the reading; the file that rank 1 reads is the damaged one."""
    shutil.copytree(run_dir, tmp_path / "run")
    rng = random.Random(1)
    for step, name in ((5, "rank_00000.safetensors"), (4, "rank_00001.safetensors")):
        flip_a_bit(manifest.folder_of(tmp_path / "run", step) / name, Path(), rng)
    capfd.readouterr()
    lines = train_on_ranks([*RUN, *data, f"run_dir={tmp_path / 'run'}", "training.steps=5"], 2)
    undisturbed = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4, 5]
    assert largest_difference(lines, undisturbed[2:], "loss") < FP32_LOSS
    said = [line for line in capfd.readouterr().out.splitlines() if "skipped" in line]
    assert len(said) == 2 and all("was changed" in line for line in said)
    mine = ("checkpoint_passed_over", "resumed", "checkpoint_saved")
    kinds = [event["kind"] for event in events.read(tmp_path / "run") if event["kind"] in mine]
    assert kinds[-5:] == ["checkpoint_passed_over"] * 2 + ["resumed"] + ["checkpoint_saved"] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Code in files
# ---------------------------------------------------------------------------------------------------------------------


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def bare_pickle(mark: Path, original: bytes) -> bytes:
    return pickle.dumps(Payload(mark))


def torch_file(mark: Path, original: bytes) -> bytes:
    stream = io.BytesIO()
    torch.save({"model": Payload(mark)}, stream)
    return stream.getvalue()


def yaml_tag(mark: Path, original: bytes) -> bytes:
    return f"!!python/object/apply:os.system ['touch {mark}']\n".encode()


def behind_the_content(mark: Path, original: bytes) -> bytes:
    return original + pickle.dumps(Payload(mark))


PAYLOADS = (bare_pickle, torch_file, yaml_tag, behind_the_content)


def test_the_payloads_would_run(tmp_path: Path) -> None:
    pickle.loads(bare_pickle(tmp_path / "a", b""))
    torch.load(io.BytesIO(torch_file(tmp_path / "b", b"")), weights_only=False)
    assert (tmp_path / "a").exists() and (tmp_path / "b").exists()


def use_everything(folder: str, out: str) -> dict[str, Any]:
    """On a rank: what each way to use a checkpoint says of one."""
    from checkpoint import __main__ as checkpoint
    from checkpoint.shards import ShardReader

    said: dict[str, Any] = {}
    for command in (["ls", folder], ["verify", folder], ["show", folder], ["convert", folder, out]):
        said[command[0]] = checkpoint.main(command)
    for name, function in (("ShardReader", ShardReader), ("read_state", checkpoint.read_state)):
        try:
            function(Path(folder))
            said[name] = None
        except ConfigError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("name", FILES)
def test_a_planted_payload_never_runs(run_dir: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    for i, payload in enumerate(PAYLOADS):
        for recomputed in (False, True):
            if recomputed and name == "manifest.json":
                continue
            damaged_run = tmp_path / f"run{i}{recomputed}"
            shutil.copytree(run_dir / "checkpoints", damaged_run / "checkpoints")
            folder = manifest.folder_of(damaged_run, 5)
            (folder / name).write_bytes(payload(mark, (folder / name).read_bytes()))
            # where other formats keep their pickles
            for planted in (".metadata", "common.pt", "optimizer.pt", "__0_0.distcp"):
                (folder / planted).write_bytes(bare_pickle(mark, b""))
            if recomputed:
                manifest.write(
                    folder, 5, {file: checksums.sum_of(folder / file) for file in FILES if file != "manifest.json"}
                )
            found = start.find(auto(damaged_run))
            (said,) = found.passed_over
            assert found.checkpoint == manifest.folder_of(damaged_run, 4)
            assert said.startswith(f"skipped {folder}: its ") and name in said and "\n" not in said
            if recomputed or name == "manifest.json":
                (answers,) = distributed.run(use_everything, 1, str(folder), str(damaged_run / "out"))
                assert answers["ls"] == answers["verify"] == 1 and answers["show"] == answers["convert"] == 2
                if name != "config.yaml":
                    assert answers["ShardReader" if name != "state.json" else "read_state"] is not None
            assert not mark.exists(), (name, payload.__name__, recomputed)


def test_a_payload_stops_a_run_that_names_the_checkpoint(data: list[str], run_dir: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    folder = shutil.copytree(manifest.folder_of(run_dir, 5), tmp_path / "step_0000005")
    (folder / FILES[0]).write_bytes(torch_file(mark, b""))
    manifest.write(folder, 5, {file: checksums.sum_of(folder / file) for file in FILES if file != "manifest.json"})
    with pytest.raises(
        distributed.RankError,
        match=rf"{FILES[0]} is not a valid checkpoint file: it does not start with a safetensors header",
    ):
        train_on_ranks([*RUN, *data, f"run_dir={tmp_path / 'run'}", f"checkpoint.resume={folder}"], 2)
    assert not mark.exists()


# ---------------------------------------------------------------------------------------------------------------------
# The source tree
# ---------------------------------------------------------------------------------------------------------------------

UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
READERS = (
    "torch.distributed.checkpoint",
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies",
)
CALLS = {
    "torch.jit.load",
    "torch.package.PackageImporter",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "pandas.read_pickle",
}
CALLS |= {"dist_checkpointing.load", "torch.hub.load", "eval", "exec"}


def unrestricted(source: str) -> list[str]:
    """Lines of a file that could run what is in a file they load."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [f"{base[0]}.{alias.name}" if base else alias.name for alias in node.names] + base
            if any(name.split(".")[0] in UNPICKLERS or name.startswith(READERS) for name in names):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Call):
            name, options = (
                ast.unparse(node.func),
                {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords},
            )
            unsafe = name in CALLS or (name == "torch.load" and options.get("weights_only") != "True")
            if (
                unsafe
                or options.get("allow_pickle", "False") != "False"
                or options.get("trust_remote_code", "False") != "False"
            ):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_nothing_in_the_source_unpickles_files() -> None:
    sources = {
        name: path for name, path in own_modules(ROOT).items() if name.split(".")[0] not in ("tests", "benchmarks")
    }
    assert "checkpoint.shards" in sources and len(sources) > 50
    found = {name: lines for name, path in sources.items() if (lines := unrestricted(path.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import load",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "from megatron.core import dist_checkpointing\ndist_checkpointing.load({}, folder)",
        "from megatron.core.dist_checkpointing.serialization import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader)",
        "AutoModel.from_pretrained(folder, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_what_could_run_a_file_is_found(source: str) -> None:
    assert unrestricted(source)
