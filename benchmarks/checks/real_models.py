"""Published configs, made small, on every way through: python -m benchmarks.checks.real_models FOLDER [--only WORDS]
[--markdown] [--json].

FOLDER holds config.json files of published models, one each, called by the model's name. Each is scaled down with its
keys kept (tests/models/real_configs.py), gets random weights, and goes the way of a user: `models.convert import`,
logits against transformers (fp32, up to the original length of scaled positions), two training steps from the imported
weights, `checkpoint convert` to a Hugging Face folder, logits of that against the run's, and greedy text of both. A
model is refused in one line that names the key, or all of it agrees: the exit status is 1 if there was a third outcome.
The columns import and export hold the largest relative difference of logits. What is quantised needs transformers'
`accelerate`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.tables import table
from checkpoint import __main__ as checkpoint
from data.tokenizer import train_tokenizer
from inference.generation import generate
from inference.open_model import open_model
from models import convert
from tests.models.helpers import opened_logits, random_batch, relative_error
from tests.models.real_configs import COMPUTED_AS, make_start, scaled
from tests.tolerances import ORACLE_LOGITS
from tests.training.helpers import train_on_ranks

VOCAB_SIZE, LENGTH, NEW_TOKENS = 512, 40, 12
# A window is shorter than a sample, and a first length of scaled positions is not.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    "vocab_size": VOCAB_SIZE,
    "original_max_position_embeddings": 48,
}
LEARNED = ("gpt2", "bert")  # families whose positions are weights, so that another length is another model
TRAINING = (
    *("training.steps=2", "training.global_batch_size=4", "training.micro_batch_size=2", "optimizer.lr=1e-3"),
    *("optimizer.warmup_steps=0", "checkpoint.interval=0"),
)


@dataclass
class Outcome:
    """The outcome for a model: `word` is works, refused or wrong."""

    word: str
    why: str = ""
    imported: float = float("nan")  # largest relative difference of logits
    exported: float = float("nan")
    text: str = "-"  # what was generated


class Grader:
    """Imports, trains and exports models, each in a folder of its own that is deleted afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.corpus = folder / "text.txt"
        sources = sorted((Path(__file__).parents[2] / "docs" / "guide").glob("*.md"))
        self.corpus.write_text("\n\n\n".join(path.read_text() for path in sources))
        self.tokenizer = folder / "tokenizer.model"
        train_tokenizer([self.corpus.read_text()], 400, str(self.tokenizer))

    def outcome(self, name: str, published: dict[str, Any], seed: int) -> Outcome:
        """Return the outcome for one model."""
        case = self.folder / name
        case.mkdir()
        try:
            return self._outcome(case, published, seed)
        except Exception as error:
            return Outcome("wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            shutil.rmtree(case)

    def _outcome(self, case: Path, published: dict[str, Any], seed: int) -> Outcome:
        hf = scaled(published, SIZES, plain=False)
        theirs, ours, run, back = (case / name for name in ("theirs", "ours", "run", "back"))
        make_start(theirs, hf, seed)
        status, said = _quietly(convert.main, ["import", str(theirs), str(ours)])
        if status:
            refused = status == 2 and "\n" not in said and not ours.exists()
            return Outcome("refused" if refused else "wrong", said)
        batch = random_batch(VOCAB_SIZE, 2, LENGTH, seed)
        imported = relative_error(opened_logits(ours, batch), _theirs(theirs, hf, batch)[0])
        if imported >= ORACLE_LOGITS:
            return Outcome("wrong", "logits after the import", imported)
        overrides = [f"checkpoint.weights={ours}", f"run_dir={run}", f"data.cache_dir={self.folder / 'cache'}"]
        texts = [f"data.corpus={self.corpus}", f"data.tokenizer={self.tokenizer}"]
        length = [] if hf["model_type"] in LEARNED else [f"model.sequence_length={LENGTH}"]
        lines = train_on_ranks([*overrides, *texts, *length, *TRAINING])
        if len(lines) != 2 or not all(line["loss"] > 0 for line in lines):
            return Outcome("wrong", f"training gave {[line['loss'] for line in lines]}", imported)
        status, said = _quietly(checkpoint.main, ["convert", str(run), str(back), "--to", "huggingface"])
        if status:
            return Outcome("wrong", f"export: {said}", imported)
        after = json.loads((back / "config.json").read_text())
        trained, text = _theirs(back, after, batch)
        exported = relative_error(opened_logits(run, batch), trained)
        if exported >= ORACLE_LOGITS:
            return Outcome("wrong", "logits after the export", imported, exported)
        if text is not None:
            with open_model(run, precision="fp32", device="cpu") as model:
                prompts = batch["tokens"][:, :8].tolist()
                written = [done.tokens for done in generate(model.decoder(), prompts, NEW_TOKENS)]
            if written != text:
                return Outcome("wrong", f"greedy text {written}, transformers' {text}", imported, exported)
            return Outcome("works", said, imported, exported, "same text")
        return Outcome("works", said, imported, exported)


def _quietly(main: Any, arguments: list[str]) -> tuple[int, str]:
    words = io.StringIO()
    with contextlib.redirect_stderr(words), contextlib.redirect_stdout(io.StringIO()):
        status = main(arguments)
    return status, words.getvalue().strip()


def _theirs(path: Path, hf: dict[str, Any], batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Logits of transformers in fp32, and what it writes greedily after each sample's first tokens; None for BERT."""
    import transformers

    bert = hf.get("model_type") == "bert"
    name = hf["architectures"][0] if bert else "AutoModelForCausalLM"
    more: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "attn_implementation": "eager"}
    if hf.get("quantization_config"):  # rounded to the folder's type, as an import has them
        more["dtype"] = getattr(torch, hf.get("torch_dtype") or hf.get("dtype") or "bfloat16")
        more["quantization_config"] = transformers.FineGrainedFP8Config(
            weight_block_size=tuple(hf["quantization_config"]["weight_block_size"]), dequantize=True
        )
    source = path
    if hf.get("model_type") in COMPUTED_AS:
        source = path.with_name(f"{path.name}_as_computed")
        shutil.copytree(path, source)
        plain = {key: value for key, value in hf.items() if key != "auto_map"}
        (source / "config.json").write_text(json.dumps({**plain, "model_type": COMPUTED_AS[hf["model_type"]]}))
    with warnings.catch_warnings(), torch.inference_mode(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        model, report = getattr(transformers, name).from_pretrained(source, **more)
        missing = {key for key in report["missing_keys"] if key != "cls.predictions.bias"}
        if missing or report["mismatched_keys"]:
            raise ValueError(f"transformers fills with random weights: {sorted(missing) or report['mismatched_keys']}")
        model = model.float().eval()
        inputs = {"input_ids": batch["tokens"]}
        if bert:
            inputs |= {"token_type_ids": batch["types"], "attention_mask": batch["padding_mask"].long()}
            output = model(**inputs)
            return output.prediction_logits if "prediction_logits" in output else output.logits, None
        model.generation_config = transformers.GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS)
        prompt = batch["tokens"][:, :8]
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0)
        return model(**inputs).logits, text[:, 8:].tolist()


def size_of(hf: dict[str, Any]) -> str:
    """The size that the published config has, in words."""
    layers, width = hf.get("num_hidden_layers", hf.get("n_layer")), hf.get("hidden_size", hf.get("n_embd"))
    experts = hf.get("n_routed_experts") or hf.get("num_local_experts") or hf.get("num_experts")
    return f"{layers} x {width}" + (f", {experts} experts" if experts else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    markdown = arguments.markdown
    torch.set_num_threads(1)
    files = [path for path in sorted(arguments.folder.glob("*.json")) if arguments.only in path.name]
    if not files:
        parser.error(f"{arguments.folder} holds no .json file whose name has {arguments.only!r}")
    works, refused, wrong = [], [], []
    with tempfile.TemporaryDirectory() as name:
        grader = Grader(Path(name))
        for number, path in enumerate(files):
            hf = json.loads(path.read_text())
            model = path.stem.replace("__", "/")
            done = grader.outcome(path.stem, hf, arguments.seed + number)
            print(f"{number + 1} of {len(files)}: {model}: {done.word} {done.why}", file=sys.stderr, flush=True)
            about = [str(hf.get("model_type", "-")), model, size_of(hf)]
            if done.word == "works":
                works.append([*about, f"{done.imported:.0e}", "2 steps", done.text, f"{done.exported:.0e}"])
            elif done.word == "refused":
                refused.append([*about, done.why.removeprefix("error: ")])
            else:
                wrong.append([*about, done.why])
    counts = Counter(row[0] for row in works)
    names = {family: ", ".join(row[1] for row in works if row[0] == family) for family in sorted(counts)}
    print(f"{len(works)} work, {len(refused)} are refused, {len(wrong)} are wrong.\n")
    print(table(["family", "models", "published as"], [[f, str(counts[f]), n] for f, n in names.items()], markdown))
    headings = ["family", "model", "layers x width"]
    print("\n" + table([*headings, "import", "train", "generate", "export"], sorted(works), markdown))
    for what, outcomes in (("refused with", refused), ("wrong", wrong)):
        if outcomes:
            print("\n" + table([*headings, what], sorted(outcomes), markdown))
    if arguments.json:
        print(json.dumps({"works": len(works), "refused": len(refused), "wrong": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
