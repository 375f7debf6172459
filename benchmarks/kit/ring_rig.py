"""What the measurements of the ring have in common: made models with their one-layer twins, the command, and limits."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit.cgroups import CgroupOutcome, DiskCgroup, MemoryCgroup, drop_page_cache, run_in, run_limited
from benchmarks.kit.made_models import PRESETS, made_config, num_layers, one_layer, weights_bytes, write_made_model
from models.huggingface.families.keys import HfConfig

ROOT = Path(__file__).resolve().parents[2]
GIGABYTES, MOE_GIGABYTES = 2.2, 4.0  # a little more than 2 GiB; with experts, so that the layers are many
MIB = 2**20
PROMPT = "11 23 5 7 101 42 9 2"
TIMEOUT = 1800.0  # seconds of a run: mapping on a throttled disk takes some


@dataclass(frozen=True)
class MadeModel:
    """A made model on the disk, and one of one layer that is else the same."""

    family: str
    config: HfConfig
    full: Path
    one: Path

    @property
    def num_bytes(self) -> int:
        return weights_bytes(self.config)

    @property
    def is_moe(self) -> bool:
        return "top_k" in PRESETS[self.family].keys

    def describe(self) -> str:
        one = weights_bytes(one_layer(self.config))
        return (
            f"{self.family}: {self.num_bytes / 1e9:.2f} GB of {self.config['dtype']} in {num_layers(self.config)} "
            f"layers; {one / 1e9:.2f} GB with one"
        )


def default_gigabytes(family: str) -> float:
    """How large a made model is where nothing is said."""
    return MOE_GIGABYTES if "top_k" in PRESETS[family].keys else GIGABYTES


def make_models(
    folder: Path, family: str, gigabytes: float | None = None, dtype: str = "bfloat16", logical: bool = False
) -> MadeModel:
    """Write the two under `folder`, but for what an earlier call has written there."""
    size = gigabytes or default_gigabytes(family)
    config = made_config(family, size * 1e9, dtype)
    name = f"{family}-{size:g}GB-{dtype}{'-logical' if logical else ''}"
    model = MadeModel(family, config, folder / name, folder / f"{name}-one")
    for path, its_config in ((model.full, config), (model.one, one_layer(config))):
        if not path.exists():
            write_made_model(path, its_config, logical=logical)
    return model


@contextlib.contextmanager
def models_folder(given: Path | None) -> Iterator[Path]:
    """The folder that models lie in, or else one that is gone after; not in /tmp, which may be memory."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="ring-models-") as made:
        yield Path(made)


def generate_arguments(folder: Path, num_tokens: int, rest: Sequence[str] = ()) -> list[str]:
    """Arguments of inference.generate. Drawn tokens: the likeliest ones of a random model soon repeat, and experts with
    them."""
    fixed = ["--checkpoint", str(folder), "--ids", "--prompt", PROMPT, "--temperature", "1", "--seed", "7"]
    return [*fixed, "--ignore-end", "--json", "--max-tokens", str(num_tokens), *rest]


def generate_command(folder: Path, num_tokens: int, rest: Sequence[str] = ()) -> list[str]:
    return [sys.executable, "-m", "inference.generate", *generate_arguments(folder, num_tokens, rest)]


def tokens_of(outcome: CgroupOutcome) -> list[int] | None:
    """The tokens that a run of `generate_arguments` printed, if it came so far."""
    if outcome.status != 0:
        return None
    lines = outcome.stdout.strip().splitlines()
    return None if not lines else [int(token) for token in json.loads(lines[-1])["tokens"]]


def run_cold(
    command: Sequence[str],
    path: Path,
    *,
    memory_bytes: int | None = None,
    rate: float | None = None,
    timeout: float = TIMEOUT,
) -> CgroupOutcome:
    """Run a command in fresh groups after the page cache was dropped; `path`: on the disk that it reads."""
    drop_page_cache(path)
    with MemoryCgroup(memory_bytes) as memory, DiskCgroup(rate, path, memory) as disk:
        return run_in(command, memory, disk, timeout=timeout, cwd=ROOT)


def disk_rate(folder: Path, rate: float | None) -> float:
    """Bytes per second that direct reads of the largest file under `folder` reach in a group held to `rate`."""
    file = max(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    read = ["dd", f"if={file}", "of=/dev/null", "bs=4M", "count=256", "iflag=direct"]
    outcome = run_limited(read, read_bytes_per_second=rate, path=folder, timeout=TIMEOUT)
    assert outcome.status == 0 and outcome.disk_bytes is not None, outcome.stderr
    return outcome.disk_bytes / outcome.seconds


def last_line(text: str) -> str:
    """What a failed command said last."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def rig_parser(description: str | None, models: Sequence[str]) -> argparse.ArgumentParser:
    """The arguments that both measurements have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PRESETS), default=list(models))
    parser.add_argument("--gigabytes", type=float, help="of the weights; default: 2.2, and 4 with experts")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--folder", type=Path, help="where models are kept for another run; default: removed")
    parser.add_argument("--without-pages", action="store_true", help="the one-layer peak without pages of files")
    parser.add_argument("--budget", type=int, metavar="MIB", help="as --memory-budget of both runs; default: not given")
    parser.add_argument("--json", action="store_true")
    return parser


def budget_arguments(options: argparse.Namespace) -> list[str]:
    return [] if options.budget is None else ["--memory-budget", str(options.budget)]


def peak_of(outcome: CgroupOutcome, without_pages: bool) -> int:
    """The peak that a limit is made from. Raises RuntimeError for a run that failed."""
    if outcome.status != 0:
        raise RuntimeError(f"the one-layer model {outcome.verdict()}: {last_line(outcome.stderr)}")
    peak = outcome.peak_held_bytes if without_pages else outcome.peak_bytes
    assert peak is not None
    return peak
