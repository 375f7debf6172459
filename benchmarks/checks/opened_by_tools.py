"""Checkpoints of every training feature, opened by every tool: python -m benchmarks.checks.opened_by_tools [--only
WORDS] [--markdown] [--json].

Trains a tiny model for three steps with each feature, in the layouts that it has, and opens what it left on one
process: generate, evaluate and fill_mask from the run; `checkpoint verify`; convert to logical weights and to a Hugging
Face folder; both again on two ranks; report and status. ok: the tool ended with status 0, and what it says of the model
is what the run's own folder says: texts token by token, log-likelihoods and probabilities within rounding. A dash: the
tool is not for such a model. The exit status says whether all did.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.tables import table as as_table
from configs.compose import load
from configs.derived import is_moe
from tests import distributed
from tests.tolerances import BF16_LOSS, FP32_LOSS
from tests.training.helpers import train_on_ranks

EP2, EP4 = ("parallel.expert=2",), ("parallel.expert=4",)
TP2, PP2 = ("parallel.tensor=2", "parallel.sequence=true"), ("parallel.pipeline=2",)
VPP = (*PP2, "parallel.virtual_pipeline=2", "model.num_layers=4")
ETP2 = (*TP2, *EP2, "parallel.expert_tensor=2")
MOVES = ("moe.placement.extra_slots=2", "moe.placement.interval=1")
FULL = "training.recompute=full"
SIGMOID = ("moe.router_score=sigmoid", "moe.expert_bias=true", "moe.expert_bias_rate=0.05")
MLA = ("model.attention=latent", "model.kv_lora_rank=16", "model.rotary_head_dim=8", "model.value_head_dim=8")
SMALL = (
    *("model.num_layers=2", "training.steps=3", "training.global_batch_size=8", "training.micro_batch_size=2"),
    *("optimizer.lr=0.01", "optimizer.warmup_steps=0", "checkpoint.interval=0", "optimizer.bucket_parameters=4096"),
)
TOOLS = (
    *("generate", "evaluate", "fill_mask", "on TP2", "on EP2", "weights", "huggingface"),
    *("verify", "report", "status"),
)


@dataclass(frozen=True)
class Feature:
    """A training run: its model, its number of ranks, and the keys that turn the feature on."""

    model: str
    ranks: int
    overrides: tuple[str, ...]


def _placed(policy: str, *more: str) -> tuple[str, ...]:
    return (f"moe.placement.policy={policy}", *MOVES, *more)


def features(disk: Path) -> dict[str, Feature]:
    """Return every feature by name. `disk`: a folder for optimizer state."""
    moe, gpt, bert, bert_moe = "gpt_moe_tiny", "gpt_tiny", "bert_tiny", "bert_moe_tiny"
    found = {
        f"placement {policy}, EP2": Feature(moe, 2, (*EP2, *_placed(policy)))
        for policy in ("flex", "least_loaded", "solve", "auto")
    }
    found |= {
        "placement solve, EP4": Feature(moe, 4, (*EP4, *_placed("solve"))),
        "placement least_loaded, EP2xETP2": Feature(moe, 4, (*ETP2, *_placed("least_loaded"))),
        "placement solve, PP2xEP2": Feature(moe, 4, (*PP2, *EP2, *_placed("solve"))),
        "max_load, record": Feature(
            moe, 2, (*EP2, *_placed("solve", "moe.placement.max_load=1.5", "moe.placement.record=true"))
        ),
        "bitwise": Feature(moe, 2, (*EP2, *_placed("solve", "moe.placement.bitwise=true"))),
        "placement, BERT": Feature(bert_moe, 2, (*EP2, *_placed("least_loaded"))),
    }
    layouts: dict[str, tuple[int, tuple[str, ...]]] = {
        "TP2": (2, TP2),
        "PP2": (2, PP2),
        "VPP2": (2, VPP),
        "DP2": (2, ()),
        "EP2": (2, EP2),
    }
    layouts |= {"EP2xETP2": (4, ETP2)}
    for tier in ("host", "disk", "auto"):
        for name, (ranks, layout) in layouts.items():
            state = (f"optimizer.state_device={tier}", f"memory.disk_dir={disk}")
            found[f"state on {tier}, {name}"] = Feature(moe, ranks, (*layout, *state))
    on_host = ("optimizer.state_device=host", "optimizer.early_update=always", "optimizer.moment_dtype=bf16")
    found |= {
        "state on host, moved homes": Feature(moe, 2, (*EP2, *_placed("least_loaded"), *on_host)),
        "activation offload": Feature(gpt, 1, (FULL, "training.activation_offload=auto")),
        "activation offload, EP2": Feature(moe, 2, (*EP2, FULL, "training.activation_offload=auto")),
        "recompute selective": Feature(moe, 1, ("training.recompute=selective",)),
        "capacity": Feature(moe, 1, ("moe.capacity_factor=1.0",)),
        "capacity, EP2, by position": Feature(moe, 2, (*EP2, "moe.capacity_factor=1.0", "moe.drop_policy=position")),
        "capacity, BERT": Feature(bert_moe, 1, ("moe.capacity_factor=0.5",)),
        "expert_bias": Feature(moe, 2, (*EP2, *SIGMOID)),
        "expert_bias, groups": Feature(moe, 1, (*SIGMOID, "moe.num_groups=2", "moe.group_top_k=1")),
        "biases of experts": Feature(moe, 2, (*EP2, "model.linear_bias=true")),
        "shared expert": Feature(moe, 2, (*EP2, "moe.shared_expert_ffn_hidden_size=48")),
        "router losses": Feature(
            moe, 1, ("moe.z_loss_coeff=0.01", "moe.global_aux_loss_coeff=0.01", "moe.sequence_aux_loss_coeff=0.01")
        ),
        "chunks, offload of inputs": Feature(moe, 2, (*EP2, "moe.pipeline_degree=2", "moe.memory_strategy=offload")),
        "auto degree and strategy": Feature(
            moe, 2, (*EP2, "moe.pipeline_degree=auto", "moe.memory_strategy=auto", "moe.memory_budget=4096")
        ),
        "latent attention": Feature(gpt, 1, MLA),
        "latent attention, TP2, expert_bias": Feature(moe, 2, (*TP2, *MLA, *SIGMOID)),
        "learned positions, dropout": Feature(
            gpt, 1, ("model.position_embedding=learned", "model.hidden_dropout=0.1", "model.attention_dropout=0.1")
        ),
        "GPT-2's parts": Feature(
            gpt,
            2,
            (
                *TP2,
                *("model.position_embedding=learned", "model.normalization=layernorm", "model.activation=gelu_tanh"),
                *("model.linear_bias=true", "model.hidden_dropout=0.1"),
            ),
        ),
        "fp16": Feature(gpt, 1, ("training.precision=fp16", "training.initial_loss_scale=256")),
        "bf16, EP2, placed": Feature(moe, 2, (*EP2, *_placed("solve"), "training.precision=bf16")),
        "deterministic": Feature(moe, 1, ("training.deterministic=true",)),
        "BERT": Feature(bert, 1, ()),
        "BERT, TP2": Feature(bert, 2, (*TP2,)),
        "BERT, PP2, no sentence head": Feature(bert, 2, (*PP2, "model.sentence_head=none")),
        "BERT, MoE, EP2": Feature(bert_moe, 2, (*EP2,)),
        "optimizer not sharded, DP2": Feature(gpt, 2, ("optimizer.distributed=false",)),
        "elastic, spikes, stragglers": Feature(
            gpt, 2, ("training.elastic=true", "training.nonfinite=rollback", "training.spike_factor=9")
        ),
    }
    return found


@dataclass(frozen=True)
class Answer:
    """The output of a command line, and its exit status."""

    status: int
    out: str
    errors: str

    @property
    def last(self) -> str:
        """The last line of the error."""
        return (self.errors.strip().splitlines() or [f"status {self.status}"])[-1]


def answers(lines: dict[str, tuple[str, list[str]]]) -> dict[str, Answer]:
    """Run command lines of tools on this rank: name -> (module with `main`, arguments); return their answers."""
    import importlib

    found = {}
    for name, (module, arguments) in lines.items():
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                status = importlib.import_module(module).main(arguments)
            except SystemExit as end:
                status = int(end.code or 0)
            except Exception as error:  # a traceback is a cell of the table
                status = 1
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
        found[name] = Answer(status, out.getvalue(), errors.getvalue())
    return found


def open_all(run_dir: Path, work: Path, text: Path) -> dict[str, str]:
    """Return the cell of each tool for the run in `run_dir`: ok, a dash, or the error."""
    config = load(run_dir / "config.yaml")
    is_bert, tolerance = config.model.family == "bert", FP32_LOSS if config.training.precision == "fp32" else BF16_LOSS
    folders = {"run": run_dir, "weights": work / "weights", "huggingface": work / "huggingface"}

    def use(source: str) -> dict[str, tuple[str, list[str]]]:
        model = ["--checkpoint", str(folders[source]), "--device", "cpu", "--json"]
        prompt = ["--prompt", "def run(self", "--max-tokens", "12", "--ignore-end"]
        if is_bert:
            return {"fill_mask": ("inference.fill_mask", [*model, "--text", "def [MASK](self):"])}
        return {
            "generate": ("inference.generate", [*model, *prompt]),
            "evaluate": ("inference.evaluate", [*model, "--files", str(text)]),
        }

    convert = ("checkpoint.__main__", ["convert", str(run_dir)])
    lines = use("run")
    lines["weights"] = (convert[0], [*convert[1], str(folders["weights"])])
    lines["huggingface"] = (convert[0], [*convert[1], str(folders["huggingface"]), "--to", "huggingface"])
    lines["verify"] = (convert[0], ["verify", str(run_dir)])
    lines["report"] = ("training.report.__main__", [str(run_dir), "--output", str(work / "report.html")])
    lines["status"] = ("training.status", [str(run_dir), "--json"])
    found: dict[str, Answer] = distributed.run(answers, 1, lines)[0]
    cells = {tool: "ok" if answer.status == 0 else answer.last for tool, answer in found.items()}
    if "no Hugging Face family" in cells["huggingface"]:
        cells["huggingface"] = "-"
    if cells["status"] == "ok" and json.loads(found["status"].out)["state"] != "finished":
        cells["status"] = found["status"].out.strip()
    if any(cells[tool] != "ok" for tool in use("run")):
        return cells
    for kind in ("weights", "huggingface"):
        if cells[kind] == "ok":
            cells[kind] = _differs(found, tolerance, distributed.run(answers, 1, use(kind))[0])
    layouts = {"on TP2": "parallel.tensor=2", "on EP2": "parallel.expert=2"}
    if not is_moe(config):
        del layouts["on EP2"]
    elif config.model.linear_bias:  # whose sum Megatron-core would add up over tensor ranks: refused
        del layouts["on TP2"]
    for name, layout in layouts.items():
        two = {tool: (module, [layout, *line]) for tool, (module, line) in use("run").items()}
        cells[name] = _differs(found, tolerance, distributed.run(answers, 2, two)[0])
    return cells


def _differs(ours: dict[str, Answer], tolerance: float, theirs: dict[str, Answer]) -> str:
    """Return the differences between the answers to the same questions."""
    for tool, answer in theirs.items():
        if answer.status != 0:
            return f"{tool}: {answer.last}"
        one, other = (json.loads(text.out.splitlines()[-1]) for text in (ours[tool], answer))
        problem = _unlike(one, other, tolerance)
        if problem:
            return f"{tool}: {problem}"
    return "ok"


def _unlike(one: Any, other: Any, tolerance: float) -> str:
    """The first two values that differ; the likeliest tokens of a half-precision model may, which rounding decides."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() - ({"text", "tokens", "token"} if tolerance == BF16_LOSS else set())
        return next((f"{key} {found}" for key in keys if (found := _unlike(one[key], other[key], tolerance))), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next((found for a, b in zip(one, other, strict=True) if (found := _unlike(a, b, tolerance))), "")
    alike = math.isclose(one, other, rel_tol=tolerance) if isinstance(one, float) else one == other
    return "" if alike else f"{one} and {other}"


def table(
    chosen: dict[str, Feature], root: Path, data: Sequence[str], on_row: Callable[[str, dict[str, str]], None]
) -> dict[str, dict[str, str]]:
    """Return the cells of each feature; `on_row` gets each row as soon as it is known."""
    text = root / "text.txt"
    text.write_text("def run(self):\n    return self\n\nimport os\n" * 8)
    table_rows = {}
    for number, (name, feature) in enumerate(chosen.items()):
        work = root / f"{number}"
        common = [f"experiment={feature.model}", *SMALL, *data, f"run_dir={work / 'run'}"]
        try:
            train_on_ranks([*common, *feature.overrides], feature.ranks)
        except Exception as error:
            table_rows[name] = {"training": str(error).strip().splitlines()[-1]}
        else:
            table_rows[name] = {"training": "ok", **open_all(work / "run", work, text)}
        on_row(name, table_rows[name])
    return table_rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="features whose name has these words")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="of every training, such as data.corpus=FOLDER")
    options = parser.parse_args()

    def show(name: str, cells: dict[str, str]) -> None:
        wrong = {tool: cell for tool, cell in cells.items() if cell not in ("ok", "-")}
        print(f"{'WRONG' if wrong else 'ok':<6} {name} {wrong or ''}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="opened-by-tools-") as folder:
        root = Path(folder)
        chosen = {name: feature for name, feature in features(root).items() if options.only in name}
        table_rows = table(chosen, root, ["data.vocab_size=384", *options.overrides], show)
    columns = ("training", *TOOLS)
    lines = [[name, *(cells.get(tool, "-") for tool in columns)] for name, cells in table_rows.items()]
    print(as_table(["feature", *columns], lines, options.markdown))
    wrong = sum(cell not in ("ok", "-") for line in lines for cell in line[1:])
    print(f"{len(table_rows)} features, {wrong} cells wrong")
    if options.json:
        print(json.dumps(table_rows))
    distributed.shutdown()
    return int(wrong > 0)


if __name__ == "__main__":
    from benchmarks.checks import opened_by_tools  # under the name by which ranks find its functions

    sys.exit(opened_by_tools.main())
