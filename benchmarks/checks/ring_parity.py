"""The same bits with every memory budget: python -m benchmarks.checks.ring_parity [--only WORDS] [--markdown] [--json].

Opens models of every kind with all weights in memory, and with budgets that have them come from the files in every
pass. 0% holds one unit at a time (an attention, a feed-forward block, a block of the output layer) and one expert; 100%
would hold all. A cell is `same` if every bit of the results is. These are logits of a prompt's pass; tokens chosen
greedily, drawn with a seed, and computed without a cache; log-likelihoods of overlapping windows; of a BERT the
probabilities of masked words. Behind it stands the share of the weights' bytes that came from memory.

Sources: every family of tests/models/test_huggingface.py as a Hugging Face folder; such folders in parts, in
pytorch_model.bin and in fp8; checkpoints of trainings in layouts, with moved homes and with optimizer state in every
tier; exported weights. Budgets are of a rank, and count no room for buffers, so that models of 100 KiB feel them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from base.units import MIB
from benchmarks.kit.tables import headline, line
from checkpoint import export
from inference.decoder import TextBatch, transformer
from inference.fill_mask import fill_masks
from inference.generation import Sampling, generate
from inference.open_model import OpenModel, open_model
from inference.scoring import log_likelihoods_of
from tests import distributed
from tests.models.test_huggingface import FAMILIES
from tests.training.helpers import train_on_ranks

SHARES = (0.0, 0.25, 0.6, 0.95)  # of what lies between the least budget and all
PROMPTS = [[5, 7, 9, 11], [3], [8, 1, 2, 3, 4, 5, 6, 7, 8], [90, 91], [17] * 6]
TEXT = [(7 * i) % 97 for i in range(50)]
MASKED = [[2, 5, 4, 7, 4], [2, 4, 9], [4] * 7]  # token 4 is the mask
DRAWN = Sampling(1.5, top_k=40, top_p=0.9, seed=7)
LENGTH = 32  # learned positions of the Hugging Face models
FP8_BLOCK = (4, 8)
TP2, PP2, EP2 = "parallel.tensor=2", "parallel.pipeline=2", "parallel.expert=2"
PLACED = ("moe.placement.policy=least_loaded", "moe.placement.extra_slots=2", "moe.placement.interval=1")
SMALL = (
    *("model.num_layers=2", "training.steps=2", "training.global_batch_size=8", "training.micro_batch_size=2"),
    *("checkpoint.interval=0", "optimizer.bucket_parameters=4096", "data.vocab_size=384", "optimizer.lr=0.01"),
)


@dataclass(frozen=True)
class Case:
    """A model: how its folder is made, on which ranks and with which precision (None: as stored) it is opened."""

    source: str
    layout: str | None = None
    precision: str | None = None

    @property
    def ranks(self) -> int:
        """Processes that open it."""
        return 1 if self.layout is None else 2


@dataclass
class Compared:
    """What became of a case: for each share of the budget, the results that differ on some rank, and the smallest part
    of the bytes that came from memory on a rank."""

    case: Case
    differing: dict[float, list[str]] = field(default_factory=dict)
    from_memory: dict[float, float] = field(default_factory=dict)
    seconds: float = 0.0
    failed: str = ""

    @property
    def passed(self) -> bool:
        """Whether every bit was the same, and weights did come from the files."""
        streamed = any(share < 1 for share in self.from_memory.values())
        return not self.failed and streamed and not any(self.differing.values())


# ---------------------------------------------------------------------------------------------------------------------
# On a rank
# ---------------------------------------------------------------------------------------------------------------------


def results(model: OpenModel) -> dict[str, Any]:
    """Everything that a model answers, by way of asking."""
    if model.config.model.family == "bert":
        return {"masked": fill_masks(model, MASKED, 4, 5), "alone": fill_masks(model, MASKED[:1], 4, 99)}
    decoder = model.decoder()
    batches = [TextBatch(torch.tensor([prompt]), [len(prompt)]) for prompt in PROMPTS[:2]]
    with torch.inference_mode():
        logits = [each.tolist() for each in decoder.prefill_all(batches)]
    return {
        "logits": logits,
        "greedy": generate(decoder, PROMPTS, 6, batch_size=2),
        "drawn": generate(decoder, PROMPTS[:3], 6, DRAWN, batch_size=1),
        "no cache": generate(decoder, PROMPTS[:3], 3, batch_size=2, use_cache=False),
        "windows": log_likelihoods_of(decoder, [TEXT], 16, 8, 2)[0].tolist(),
    }


@contextlib.contextmanager
def no_memory_for_buffers() -> Iterator[None]:
    """Budgets count nothing for what is the same whatever the model: they would all hold a tiny one."""
    before, transformer.WORK_BYTES = transformer.WORK_BYTES, 0
    try:
        yield
    finally:
        transformer.WORK_BYTES = before


def with_budgets(
    folder: Path, layout: str | None, precision: str | None, shares: Sequence[float]
) -> dict[float, tuple[list[str], float, int]]:
    """For each share: which results are not those with all weights in memory, the part of the bytes that came from
    memory, and how many passes there were. A collective call."""
    keys = [] if layout is None else [layout]
    found = {}
    with no_memory_for_buffers(), contextlib.redirect_stderr(io.StringIO()):
        with open_model(folder, keys, device="cpu", precision=precision) as model:
            whole, weights = results(model), model.weights
            assert not weights.streams and weights.plan is not None
            sizes = (weights.sizes.least + weights._other, weights.sizes.total + weights._other)
            every = [sizes] * dist.get_world_size()
            dist.all_gather_object(every, sizes)
            passes = weights.counts.passes
        least, total = max(low for low, _ in every), max(high for _, high in every)
        for share in shares:
            budget = (least + share * (total - 1 - least)) / MIB
            with open_model(folder, keys, device="cpu", precision=precision, budget=budget) as model:
                ours, counts = results(model), model.weights.counts
                differing = [way for way, result in whole.items() if ours[way] != result]
                found[share] = (differing, counts.share_from_memory, passes - counts.passes)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Folders
# ---------------------------------------------------------------------------------------------------------------------


def _random_model(name: str, **more: Any) -> Any:
    """A family's random model of transformers."""
    import transformers

    class_name, values = FAMILIES[name]
    model_class = getattr(transformers, class_name)
    key = "n_positions" if "n_positions" in values else "max_position_embeddings"
    torch.manual_seed(1)
    return model_class(model_class.config_class(**{**values, key: LENGTH, **more})).eval()


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _in_fp8(folder: Path) -> None:
    """Projections become fp8 with scales, as DeepSeek-V3 has them."""
    from safetensors.torch import save_file

    path, block = folder / "model.safetensors", FP8_BLOCK
    tensors, generator = _tensors(folder), torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith("proj.weight") or "kv_a_proj" in name]:
        num_rows, columns = tensors[name].shape
        tensors[name] = (100 * torch.randn(num_rows, columns, generator=generator)).to(torch.float8_e4m3fn)
        grid = -(-num_rows // block[0]), -(-columns // block[1])
        tensors[f"{name}_scale_inv"] = torch.rand(grid, generator=generator) * 1e-2 + 1e-4
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))


def huggingface_folder(source: str, folder: Path, **more: Any) -> None:
    """A folder of a family: `family`, `family bf16`, `family in parts`, `family in pytorch_model.bin`, `family fp8`.
    `more`: values of its config."""
    name, _, kind = source.partition(" ")
    model = _random_model(name, **more)
    if kind in ("bf16", "fp8"):
        model = model.to(torch.bfloat16)
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, max_shard_size="20KB" if kind == "in parts" else "5GB")
    if kind == "fp8":
        _in_fp8(folder)
    elif kind == "in pytorch_model.bin":
        torch.save(_tensors(folder), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()


@dataclass(frozen=True)
class Training:
    """A training, whose run is opened."""

    model: str
    ranks: int
    overrides: tuple[str, ...]


TRAININGS = {
    "run of TP2xPP2": Training("gpt_tiny", 4, (TP2, "parallel.sequence=true", PP2)),
    "run of TP2xPP2, MoE": Training("gpt_moe_tiny", 4, (TP2, "parallel.sequence=true", PP2)),
    "run of EP4, moved homes": Training("gpt_moe_tiny", 4, ("parallel.expert=4", *PLACED)),
    "run of EP2, moved homes": Training("gpt_moe_tiny", 2, (EP2, *PLACED)),
    "run of EP2xETP2, moved homes": Training(
        "gpt_moe_tiny", 4, (TP2, "parallel.sequence=true", EP2, "parallel.expert_tensor=2", *PLACED)
    ),
    "run with state on host": Training("gpt_moe_tiny", 2, (EP2, "optimizer.state_device=host")),
    "run with state on disk": Training("gpt_moe_tiny", 2, (EP2, "optimizer.state_device=disk")),
    "run in bf16, expert bias": Training(
        "gpt_moe_tiny",
        2,
        (EP2, "training.precision=bf16", "moe.router_score=sigmoid", "moe.expert_bias=true"),
    ),
    "run of BERT, TP2": Training("bert_tiny", 2, (TP2,)),
    "run of BERT, MoE, EP2": Training("bert_moe_tiny", 2, (EP2, *PLACED)),
}
EXPORTED = ", exported"


def make_folder(source: str, folder: Path, data: Sequence[str], **more: Any) -> Path:
    """What a source's words ask for. `more`: values of the config of a Hugging Face folder."""
    run = source.removesuffix(EXPORTED)
    if run not in TRAININGS:
        huggingface_folder(source, folder, **more)
        return folder
    training = TRAININGS[run]
    words = [f"experiment={training.model}", *SMALL, f"memory.disk_dir={folder}", f"run_dir={folder / 'run'}"]
    with contextlib.redirect_stdout(io.StringIO()):
        train_on_ranks([*words, *data, *training.overrides], training.ranks)
        if source.endswith(EXPORTED):
            export.export(folder / "run", folder / "exported")
            return folder / "exported"
    return folder / "run"


def cases() -> list[Case]:
    """All that is compared."""
    gpt = [name for name in FAMILIES if not name.startswith("bert")]
    found = [Case(name, None, precision) for name in gpt for precision in ("fp32", "bf16")]
    found += [
        Case(f"{name} bf16", None, precision) for name in ("llama", "mixtral", "gpt2") for precision in (None, "fp32")
    ]
    found += [Case("llama", None, "fp16"), Case("bert"), Case("bert", None, "bf16"), Case("bert_masked_lm")]
    for layout in (TP2, PP2):
        found += [Case(name, layout) for name in ("gpt2", "llama_tied", "mixtral", "qwen3_moe", "deepseek_v3", "bert")]
    found += [Case(name, EP2, "bf16") for name in ("mixtral", "qwen3_moe_normalized", "deepseek_v2")]
    for kind in ("in parts", "in pytorch_model.bin"):
        found += [Case(f"{name} {kind}") for name in ("gpt2", "llama", "mixtral")]
    found += [
        Case("llama in parts", TP2),
        Case("deepseek_v3 fp8"),
        Case("deepseek_v3 fp8", EP2),
        Case("llama fp8", TP2),
    ]
    for name, training in TRAININGS.items():
        is_moe = "moe" in training.model
        found += [Case(name), Case(name, EP2 if is_moe else TP2), Case(name, PP2)]
    found += [
        Case(f"{name}{EXPORTED}", layout)
        for name in ("run of TP2xPP2, MoE", "run of EP4, moved homes")
        for layout in (None, EP2)
    ]
    return found


def compare(case: Case, folder: Path, shares: Sequence[float] = SHARES) -> Compared:
    """Open a case's folder with all budgets."""
    begin, found = time.perf_counter(), Compared(case)
    try:
        every = distributed.run(with_budgets, case.ranks, folder, case.layout, case.precision, list(shares))
    except (distributed.RankError, distributed.RankHang, distributed.RankDied) as error:
        found.failed = str(error).strip().splitlines()[-1]
        return found
    for share in shares:
        found.differing[share] = sorted({way for of_rank in every for way in of_rank[share][0]})
        found.from_memory[share] = min(of_rank[share][1] for of_rank in every)
    found.seconds = time.perf_counter() - begin
    return found


def compare_all(
    chosen: Sequence[Case], data: Sequence[str], on_row: Callable[[Compared], None] = lambda row: None
) -> list[Compared]:
    """Make every folder once, and compare all cases. `on_row` hears of each as soon as it is known."""
    found, made = [], dict[str, Path]()
    with tempfile.TemporaryDirectory(prefix="ring-parity-") as root:
        for case in sorted(chosen, key=lambda case: case.source):
            if case.source not in made:
                for before in made.values():
                    shutil.rmtree(before, ignore_errors=True)
                folder = Path(root) / f"{len(made)}"
                folder.mkdir()
                made[case.source] = make_folder(case.source, folder, data)
            found.append(compare(case, made[case.source]))
            on_row(found[-1])
    return found


HEADINGS = ["model", "layout", "precision", *(f"{share:.0%}" for share in SHARES), "seconds", ""]


def _cells(row: Compared) -> list[str]:
    def cell(share: float) -> str:
        if share not in row.differing:
            return "-"
        said = ", ".join(row.differing[share]) or "same"
        return f"{said}, {row.from_memory[share]:.0%}"

    layout = (row.case.layout or "").removeprefix("parallel.")
    return [
        *(row.case.source, layout, row.case.precision or "stored"),
        *(cell(share) for share in SHARES),
        *(f"{row.seconds:.1f}", row.failed or ("" if row.passed else "DIFFERS")),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose model has these words")
    parser.add_argument("--markdown", action="store_true", help="print the table in markdown")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every training, as data.corpus=FOLDER")
    options = parser.parse_args()
    chosen = [case for case in cases() if options.only in case.source]
    print(headline(HEADINGS, options.markdown), flush=True)
    begin = time.perf_counter()
    try:
        outcomes = compare_all(
            chosen, options.overrides, lambda row: print(line(_cells(row), HEADINGS, options.markdown), flush=True)
        )
    finally:
        distributed.shutdown()
    good = sum(row.passed for row in outcomes)
    print(
        f"\n{good} of {len(outcomes)} models have the same bits with each of {len(SHARES)} budgets, in "
        f"{time.perf_counter() - begin:.0f} s"
    )
    if options.json:
        print(json.dumps({"shares": SHARES, "rows": [{**asdict(row), "passed": row.passed} for row in outcomes]}))
    return 0 if good == len(outcomes) else 1


if __name__ == "__main__":
    from benchmarks.checks import ring_parity  # under the name by which ranks find its functions

    sys.exit(ring_parity.main())
