"""Our tasks' numbers against those of lm-eval's own HFLM: python -m benchmarks.checks.harness_parity [--only WORDS]
[--markdown].

Makes three tiny models, whose tokenizers begin texts with no token, with one by `add_bos_token` of
tokenizer_config.json, and with one by the post-processor of tokenizer.json, and trains a run with each of the
tokenizers. Ten tasks from local files, with questions longer than the model, empty contexts and texts of many windows,
are evaluated from the folders by us and by HFLM, from the exports of the runs by both, and from the runs by us. The
table has the largest relative difference over the numbers of the tasks and the log-likelihoods of all requests. The
exit status says whether all are within 1e-5. Needs the packages lm-eval[hf].
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.tables import table as as_table

BOUND = 1e-5
LENGTH = 40
NO_TOKEN, BY_SETTING, BY_TEMPLATE = TOKENIZERS = ("no begin token", "add_bos_token", "post-processor")
WORDS = "the model reads every question to its end and then a short answer follows in some other line of text".split()
LOGLIKELIHOOD, ROLLING, CHOICE, ANSWER = "loglikelihood", "loglikelihood_rolling", "multiple_choice", "generate_until"
ACCURACY, PERPLEXITY, BITS = ("acc", "acc_norm"), ("perplexity", "acc"), ("bits_per_byte", "word_perplexity")
# name -> what is asked, the metrics, the words of a question (least and most) and the examples before it
TASKS: dict[str, tuple[str, tuple[str, ...], tuple[int, int], int]] = {
    "choices": (CHOICE, ACCURACY, (1, 6), 0),
    "choices_after_examples": (CHOICE, ACCURACY, (1, 4), 2),
    "choices_of_long_questions": (CHOICE, ACCURACY, (60, 120), 0),
    "choices_without_question": (CHOICE, ACCURACY, (0, 0), 0),
    "last_words": (LOGLIKELIHOOD, PERPLEXITY, (1, 6), 0),
    "last_words_of_long_questions": (LOGLIKELIHOOD, PERPLEXITY, (30, 90), 0),
    "last_words_alone": (LOGLIKELIHOOD, PERPLEXITY, (0, 0), 0),
    "short_texts": (ROLLING, BITS, (1, 8), 0),
    "long_texts": (ROLLING, BITS, (20, 200), 0),
    "answers": (ANSWER, ("exact_match",), (1, 4), 0),
}


def write_tasks(folder: Path, seed: int, documents: int) -> None:
    """The tasks' files, and a file of their lines for each."""
    draw = random.Random(seed)
    folder.mkdir()
    for name, (kind, metrics, (least, most), shots) in TASKS.items():
        questions = []
        for _ in range(documents):
            choices = draw.sample(WORDS, 3)
            question = " ".join(draw.choices(WORDS, k=draw.randint(least, most)))
            questions.append(
                {"question": question, "choices": choices, "answer": draw.randrange(3), "word": choices[0]}
            )
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in questions))
        spec: dict[str, Any] = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "output_type": kind,
            "test_split": "test",
            "fewshot_split": "test",
            "num_fewshot": shots,
            "doc_to_text": "" if kind == ROLLING or most == 0 else "{{question}}",
            "doc_to_target": "{{question}}" if kind == ROLLING else "{{word}}",
            "metric_list": [{"metric": metric} for metric in metrics],
        }
        if most == 0:
            # Of a text that begins with a space transformers' class for Llama's sentencepiece models leaves one space
            # out, and sentencepiece, as which we read them, does not.
            spec["target_delimiter"] = ""
        if kind == CHOICE:
            spec |= {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
        if kind == ANSWER:
            spec["generation_kwargs"] = {"until": ["line"], "max_gen_toks": 6, "do_sample": False}
        (folder / f"{name}.yaml").write_text(json.dumps(spec))  # JSON is YAML


def _text() -> str:
    draw = random.Random(0)
    return "\n".join(" ".join(draw.choices(WORDS, k=12)) for _ in range(400))


def write_tokenizer(kind: str, folder: Path) -> tuple[int, int | None, int]:
    """A tokenizer in a folder; its size, begin token and end token."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == BY_SETTING:
        import sentencepiece

        corpus = folder / "corpus"
        corpus.write_text(_text())
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus),
            model_prefix=str(folder / "tokenizer"),
            vocab_size=320,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",  # as Llama's: transformers' class has no other
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
        corpus.unlink()
        (folder / "tokenizer.vocab").unlink()
        settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
        settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return 320, 1, 2
    import tokenizers

    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[begin, end] if kind == BY_TEMPLATE else [end],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(_text().splitlines(), trainer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    first = None
    if kind == BY_TEMPLATE:
        first = model.token_to_id(begin)
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, first)]
        )
        settings["bos_token"] = begin
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    last = model.token_to_id(end)
    assert last is not None  # the trainer has it
    return model.get_vocab_size(), first, last


def write_model(kind: str, folder: Path) -> None:
    """A random model with a tokenizer of that kind, as Hugging Face stores them."""
    import torch
    import transformers

    size, first, end = write_tokenizer(kind, folder)
    torch.manual_seed(3)
    if kind == NO_TOKEN:  # learned positions: nothing may be read at one that is not there
        gpt2 = transformers.GPT2Config(
            vocab_size=size,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=4,
            initializer_range=0.2,
            bos_token_id=end,
            eos_token_id=end,
        )
        transformers.GPT2LMHeadModel(gpt2).save_pretrained(folder)
        return
    llama = transformers.LlamaConfig(
        vocab_size=size,
        max_position_embeddings=LENGTH,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=first,
        eos_token_id=end,
    )
    transformers.LlamaForCausalLM(llama).save_pretrained(folder)


def train_run(kind: str, folder: Path) -> tuple[Path, Path]:
    """A run with a tokenizer of that kind, and its export for transformers."""
    from checkpoint import __main__ as checkpoint
    from tests.training.helpers import train_on_ranks

    words = folder / "words"
    write_tokenizer(kind, words)
    (folder / "corpus.txt").write_text(_text())
    model = words / "tokenizer.model"
    keys = {
        "data.corpus": folder / "corpus.txt",
        "data.tokenizer": model if model.exists() else words,
        "data.cache_dir": folder / "cache",
        "run_dir": folder / "run",
        "model.sequence_length": LENGTH,
    }
    fixed = ("model=gpt_tiny", "training.steps=3", "training.global_batch_size=2", "optimizer.lr=0.01")
    train_on_ranks([*fixed, *(f"{key}={value}" for key, value in keys.items())])
    target = folder / "export"
    if checkpoint.main(["convert", str(folder / "run"), str(target), "--to", "huggingface"]) != 0:
        raise SystemExit(f"the export of {folder / 'run'} failed")
    return folder / "run", target


def _evaluate(model: Any, tasks: Path, names: Sequence[str]) -> dict[str, list[float | str]]:
    """Each task's metrics and what the model answered to each of its requests."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        tasks=list(names),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    numbers: dict[str, list[float | str]] = {}
    for name in names:
        metrics = {key: value for key, value in found["results"][name].items() if "stderr" not in key}
        values: list[float | str] = [metrics[key] for key in sorted(metrics) if isinstance(metrics[key], int | float)]
        for sample in sorted(found["samples"][name], key=lambda sample: sample["doc_id"]):
            for answer in sample["resps"]:
                of_one = answer[0]
                values.append(of_one[0] if isinstance(of_one, tuple | list) else of_one)
        numbers[name] = values
    return numbers


def ours(folder: Path, tasks: Path, names: Sequence[str] = tuple(TASKS)) -> dict[str, list[float | str]]:
    """Evaluate a model's tasks with inference.evaluate."""
    from inference.lm_harness import HarnessModel
    from inference.open_model import open_model

    with open_model(folder, device="cpu") as model:
        return _evaluate(HarnessModel(model, model.decoder(), 3), tasks, names)


def theirs(folder: Path, tasks: Path, names: Sequence[str] = tuple(TASKS)) -> dict[str, list[float | str]]:
    """Evaluate them with lm-eval's own model of transformers (HFLM)."""
    from lm_eval.models.huggingface import HFLM

    return _evaluate(HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1), tasks, names)


def difference(one: list[float | str], other: list[float | str]) -> float:
    """The largest relative difference of two tasks' numbers; infinite where they have others or other texts."""
    if len(one) != len(other):
        return math.inf
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        if isinstance(a, str) or isinstance(b, str):
            worst = max(worst, 0.0 if a == b else math.inf)
        else:
            worst = max(worst, abs(a - b) / max(abs(b), 1e-6))
    return worst


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only tokenizers whose name has these words")
    parser.add_argument("--seed", type=int, default=1, help="of the tasks' questions")
    parser.add_argument("--documents", type=int, default=20, help="lines of each task (20)")
    parser.add_argument("--markdown", action="store_true", help="print a table in markdown")
    options = parser.parse_args(arguments)
    questions, worst = [], 0.0
    for kind in (kind for kind in TOKENIZERS if options.only in kind):
        with tempfile.TemporaryDirectory(prefix="mixtrain-") as name:
            folder = Path(name)
            write_tasks(folder / "tasks", options.seed, options.documents)
            write_model(kind, folder / "model")
            run, export = train_run(kind, folder)
            wanted = theirs(export, folder / "tasks")
            pairs = {
                "folder": (ours(folder / "model", folder / "tasks"), theirs(folder / "model", folder / "tasks")),
                "export": (ours(export, folder / "tasks"), wanted),
                "run": (ours(run, folder / "tasks"), wanted),
            }
        for task in TASKS:
            found = [difference(mine[task], other[task]) for mine, other in pairs.values()]
            worst = max(worst, *found)
            questions.append([kind, task, *(f"{value:.1e}" for value in found)])
    print(as_table(["tokenizer", "task", "folder", "export", "run"], questions, options.markdown))
    print(f"\nlargest difference {worst:.1e}, bound {BOUND:.0e}: {'ok' if worst <= BOUND else 'WRONG'}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
