"""The command line: what is printed, what is run, and what a wrong line says."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from base.errors import ConfigError
from configs.compose import CONFIG_DIR, compose, load, run, to_yaml
from configs.schema import KEYS, Config
from tests.waits import LONG

ROOT = Path(__file__).resolve().parents[2]


def _run(monkeypatch: pytest.MonkeyPatch, *argv: str, status: int = 0) -> tuple[object, list[Config]]:
    """Run a command line with a main that records its configurations; the exit status and these."""
    seen: list[Config] = []

    def main(config: Config, given: frozenset[str]) -> int:
        seen.append(config)
        return status

    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    with pytest.raises(SystemExit) as ended:
        run(main)
    return ended.value.code, seen


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    overrides = [
        "data.corpus=[{path: a.txt, weight: 2.5}, b]",
        "moe.layers=[1,0,1,0]",
        "optimizer.lr=1.3e-4",
        "sample.prompts=['x: y']",
    ]
    config = compose(overrides)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(path) == config
    assert "${" not in path.read_text(encoding="utf-8")
    assert config.data.corpus == [{"path": "a.txt", "weight": 2.5}, "b"]


def test_a_key_that_a_file_leaves_out_has_its_default(tmp_path: Path) -> None:
    lines = to_yaml(compose([])).splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("  documents:")]
    assert len(kept) == len(lines) - 1
    (tmp_path / "config.yaml").write_text("".join(kept), encoding="utf-8")
    assert load(tmp_path / "config.yaml").data.documents == "joined"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        ("a: [", "cannot read"),
        ("- 1", "mapping"),
        ("model: {num_layer: 2}", "model.num_layers"),
        ("model: {num_layers: two}", "an integer"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_the_status_of_main_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    status, seen = _run(monkeypatch, "model=gpt_tiny", "training.steps=3")
    assert (status, seen[0].name, seen[0].training.steps) == (0, "gpt_tiny", 3)
    assert _run(monkeypatch, "model=gpt_tiny", status=3)[0] == 3


def test_a_config_error_of_main_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def main(config: Config, given: frozenset[str]) -> int:
        raise ConfigError("data.corpus (x.txt) must exist.\nTry data.corpus=stdlib.")

    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 2
    line = "[rank 1] config error: data.corpus (x.txt) must exist. Try data.corpus=stdlib."
    assert capsys.readouterr().err == f"{line}\n"
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == line


def test_another_exception_of_main_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(config: Config, given: frozenset[str]) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(RuntimeError, match="a bug"):
        run(main)


def test_a_sweep_runs_its_product_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    status, seen = _run(
        monkeypatch, "-m", "model=gpt_tiny,bert_tiny", "training.seed=1,2", "name=${model.family}_${training.seed}"
    )
    assert status == 0
    assert [config.name for config in seen] == ["gpt_1", "gpt_2", "bert_1", "bert_2"]


def test_a_sweep_is_checked_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "-m", "training.steps=3,0", "name=s${training.steps}") == (2, [])
    assert "training.steps (0)" in capsys.readouterr().err
    assert _run(monkeypatch, "-m", "training.seed=1,2") == (2, [])
    assert "'name=quickstart_${training.seed}'" in capsys.readouterr().err
    assert _run(monkeypatch, "-m", "training.seed=1,2", "name=quickstart_${training.seed}")[0] == 0


def test_presets_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    header = "# @package _global_\ndefaults:\n  - override /model: gpt_tiny\n"
    (folder / "mine.yaml").write_text(header + "name: mine\ntraining:\n  steps: 7\n", encoding="utf-8")
    (folder / "typo.yaml").write_text(header + "training:\n  stesp: 7\n", encoding="utf-8")
    status, seen = _run(monkeypatch, "--config-dir", str(tmp_path), "experiment=mine")
    assert (status, seen[0].run_dir, seen[0].model.hidden_size, seen[0].training.steps) == (0, "runs/mine", 64, 7)
    layout = "defaults:\n  - override /model: gpt_tiny\n  - override /parallel: tp2_sp\n"
    (folder / "layout.yaml").write_text("# @package _global_\n" + layout, encoding="utf-8")
    (folder / "model.yaml").write_text(header.replace("tiny", "tinny"), encoding="utf-8")
    (folder / "broken.yaml").write_text(header + "name: [\n", encoding="utf-8")
    says = {
        "typo": "experiment/typo.yaml: training.stesp is not a known key. Try training.steps=20.",
        "layout": "experiment/layout.yaml: defaults may override only model, but override parallel: parallel=",
        "model": "experiment/model.yaml: model (gpt_tinny) must be one of",
        "broken": f"cannot read {folder / 'broken.yaml'}: while parsing",
    }
    for name, start in says.items():
        assert _run(monkeypatch, "--config-dir", str(tmp_path), f"experiment={name}") == (2, [])
        err = capsys.readouterr().err
        assert err.startswith(f"config error: {start}") and err.count("\n") == 1


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from configs.compose import run

def main(config, given):
    assert "torch" not in sys.modules
    print("ran", config.name)
    return 0

if __name__ == "__main__":
    run(main)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(root=str(ROOT)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("argv", "first", "says"),
    [
        (["--cfg", "job"], "name: quickstart", "run_dir: runs/${name}"),
        (["--cfg", "job", "--resolve", "name=mine"], "name: mine", "run_dir: runs/mine"),
        (["--cfg", "job", "--package", "optimizer"], "# @package optimizer", "schedule: linear"),
        (["--cfg", "job", "name=1e3"], "name: '1e3'", ""),
        (["--help"], "Pretrain GPT or BERT", "experiment: bert_base,"),
        (["--version"], "mixtrain ", "megatron-core 0.16.1"),
        (["model=bert_tiny"], "ran bert_tiny", ""),
        (["-m", "model=bert_tiny,gpt_tiny"], "ran bert_tiny", "ran gpt_tiny"),
    ],
)
def test_what_a_command_prints(script: Path, argv: list[str], first: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, str(script), *argv], cwd=script.parent, capture_output=True, text=True, timeout=LONG
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(first)
    assert says in done.stdout
    assert {path.name for path in script.parent.iterdir()} == {"train.py"}, "a command leaves nothing behind"


def test_help_names_every_key_and_preset_within_100_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "--help", "model=gpt_tiny", "training.steps=77") == (0, [])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    words = " ".join(out.split())
    for name, key in KEYS.items():
        assert f"{name}=" in out and f"{key.meaning} [{key.rule()}]" in words, name
    for preset in CONFIG_DIR.glob("*/*.yaml"):
        assert re.search(rf"\b{preset.stem}\b", out), preset
    assert "  training.steps=77\n" in out and "  model.hidden_size=64\n" in out
    assert _run(monkeypatch, "--help", "training.steps=many") == (2, [])


def test_version_is_this_projects(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "--version") == (0, [])
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"mixtrain {tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}"
    assert f"torch {importlib.metadata.version('torch')}" in rest


def test_train_py_runs_from_any_folder_with_paths_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("some text")
    seen = []
    for corpus in ("mine.txt", "other.txt"):
        command = [
            sys.executable,
            str(ROOT / "train.py"),
            f"data.corpus={corpus}",
            "data.tokenizer=no.model",
            "run_dir=r",
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        seen.append(done.stderr)
    assert "no.model" in seen[0] and "other.txt" not in seen[0]
    assert "other.txt" in seen[1]


def _guide_example(title: str) -> list[str]:
    """The indented blocks of a section of the guide."""
    text = (ROOT / "docs" / "guide" / "configuration.md").read_text(encoding="utf-8")
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", section, re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


def test_the_guides_preset_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    model, experiment, command, typo, line = _guide_example("Presets of your own")
    for content in (model, experiment):
        path = Path(content.splitlines()[0].removeprefix("# "))
        path.parent.mkdir(parents=True)
        path.write_text(content.partition("\n")[2], encoding="utf-8")
    status, seen = _run(monkeypatch, *shlex.split(command.replace("python train.py", "")))
    assert status == 0, capsys.readouterr().err
    config = seen[0]
    assert (config.name, config.model.hidden_size, config.training.global_batch_size, config.training.steps) == (
        "wide",
        96,
        16,
        500,
    )
    assert config.optimizer.warmup_steps == 25 and config.run_dir == "runs/wide"
    (path.parent / "wide_typo.yaml").write_text(
        path.read_text().replace("steps: 1000", "stesp: 1000"), encoding="utf-8"
    )
    assert _run(monkeypatch, *shlex.split(typo.replace("python train.py", ""))) == (2, [])
    assert capsys.readouterr().err == line
