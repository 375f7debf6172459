"""Measure how well a model predicts texts: `python -m inference.evaluate --checkpoint MODEL --files TEXT ... [--stride
128]`.

Prints the perplexity per token and the bits per byte of each file and of all files together; `--by-position` adds the
loss per position in the text. A file is split into documents as in training. Each document follows the tokenizer's
begin token, or its end-of-text token if there is no begin token. A document longer than the model's sequence length is
read in overlapping windows: each token is predicted once, from at least (length - stride) earlier tokens. Perplexity
compares models with the same tokenizer, bits per byte compare any models.

`--tasks NAME ... --task-folder FOLDER` runs tasks of the LM evaluation harness (`bash launch/setup.sh --extra eval`
installs it) from the .yaml files of a folder. The data of the tasks are local files; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.errors import ConfigError
from data.corpus.text import RULES
from inference.command import add_model_arguments, run_command
from inference.texts import read_texts

if TYPE_CHECKING:
    from inference.decoder import Decoder
    from inference.open_model import OpenModel
    from inference.scoring import Score

HARNESS = "bash launch/setup.sh --extra eval"  # installs the LM evaluation harness


def evaluate_texts(
    model: OpenModel, decoder: Decoder, texts: Sequence[str], length: int, stride: int, batch_size: int
) -> list[Score]:
    """Return the score of each text: the log-likelihood of its tokens, in windows of at most `length` tokens.

    stride: tokens by which a window advances. The first token is predicted from the begin token or, if there is none,
    from the end-of-text token.
    """
    from inference.scoring import Score, log_likelihoods_of  # imported here: --help must not wait for torch

    tokenizer = model.needed_tokenizer("Give --tokenizer.")
    tokens = [[tokenizer.before_text, *tokenizer.encode(text)] for text in texts]
    found = log_likelihoods_of(decoder, tokens, length, stride, batch_size)
    return [Score.of(-log_probs, len(text.encode())) for log_probs, text in zip(found, texts, strict=True)]


def _evaluate_files(options: argparse.Namespace, model: OpenModel, decoder: Decoder) -> dict[str, Any]:
    import torch.distributed as dist

    from inference.scoring import Score

    length = options.length or model.config.model.sequence_length
    if decoder.max_length is not None and length > decoder.max_length:
        raise ConfigError(
            f"--length ({length}) exceeds the model's {decoder.max_length} learned positions. Try --length "
            f"{decoder.max_length}."
        )
    if length < 2:
        raise ConfigError(f"--length ({length}) must be at least 2, to read a token and predict one. Give --length 2.")
    stride = options.stride or max(1, length // 2)
    if stride >= length:
        raise ConfigError(
            f"--stride ({stride}) must be less than the length of a window ({length}). Try --stride {length // 2}."
        )
    scores: dict[str, Score] = {}
    for path in options.files:
        texts = read_texts(path, "--files", options.text_key, options.documents_in_text)
        if not texts:
            raise ConfigError(f"--files ({path}) contains no text. Omit the file.")
        found = evaluate_texts(model, decoder, texts, length, stride, options.batch)
        scores[str(path)] = sum(found, Score(0.0, 0, 0))
    total = sum(scores.values(), Score(0.0, 0, 0))
    lines = [*scores.items(), *([("all", total)] if len(scores) > 1 else [])]
    if dist.get_rank() == 0 and not options.json:
        width = max(len(name) for name, _ in lines)
        print(f"{'text':<{width}}  {'tokens':>9} {'perplexity':>12} {'bits/byte':>10}")
        for name, score in lines:
            print(f"{name:<{width}}  {score.num_tokens:>9} {score.perplexity:>12.4f} {score.bits_per_byte:>10.4f}")
        if options.by_position:
            print(f"\n{'position':<{width}}  {'tokens':>9} {'loss, nats':>12}")
            for positions, (nats, count) in total.by_position.items():
                print(f"{positions:<{width}}  {count:>9} {nats / count:>12.4f}")
    return {
        name: {**vars(score), "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}
        for name, score in lines
    }


def _evaluate_tasks(options: argparse.Namespace, model: OpenModel, decoder: Decoder) -> dict[str, Any]:
    # Libraries of the harness read these variables at import. They forbid downloads.
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    import torch.distributed as dist

    try:
        from inference.lm_harness import run_tasks
    except ImportError as error:
        raise ConfigError(f"--tasks needs the package lm-eval ({error}). Try {HARNESS}.") from error
    results = run_tasks(
        model, decoder, options.tasks, options.task_folder, options.few_shots, options.limit, options.batch
    )
    if dist.get_rank() == 0 and not options.json:
        for task, metrics in results.items():
            for name, value in metrics.items():
                print(f"{task}  {name}: {value:.4f}" if isinstance(value, float) else f"{task}  {name}: {value}")
    return results


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inference.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add("--files", type=Path, nargs="+", default=[], help="files of any kind that training reads")
    add("--text-key", default="text", help="as data.text_key: field of JSON, column of .parquet (text)")
    rule = "as data.documents_in_text: what a document is in .txt, .raw and .tokens (file)"
    add("--documents-in-text", choices=RULES, default=RULES[0], help=rule)
    add("--length", type=int, help="tokens of a window; default: the model's sequence length")
    add("--stride", type=int, help="tokens from one window to the next; default: half a window")
    add("--by-position", action="store_true", help="also print the loss per position in the text, over all files")
    add("--tasks", nargs="+", default=[], help="names of tasks of the LM evaluation harness")
    add("--task-folder", type=Path, help="folder with the tasks' .yaml files")
    add("--few-shots", type=int, help="examples before each question (default: the task's number)")
    add("--limit", type=int, help="number of questions per task (default: all)")
    add("--batch", type=int, default=8, help="windows or questions that are computed together (8)")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def _main(options: argparse.Namespace) -> None:
    if not options.files and not options.tasks:
        raise ConfigError("--files and --tasks are missing. Give --files TEXT or --tasks NAME --task-folder FOLDER.")
    for name in ("length", "stride", "batch", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} ({value}) must be at least 1. Omit it to use the default.")
    if options.tasks and (options.task_folder is None or not options.task_folder.is_dir()):
        folder = options.task_folder
        raise ConfigError(f"--task-folder ({folder}) must be a folder with the tasks' .yaml files. Give its path.")
    if options.tasks and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"--tasks needs the package lm-eval, which is not installed. Try {HARNESS}.")
    import torch.distributed as dist

    from inference.open_model import open_from

    with open_from(options) as model:
        decoder = model.decoder()
        result: dict[str, Any] = {}
        if options.files:
            result["files"] = _evaluate_files(options, model, decoder)
        if options.tasks:
            result["tasks"] = _evaluate_tasks(options, model, decoder)
        if dist.get_rank() == 0 and options.json:
            print(json.dumps(result))
        if dist.get_rank() == 0 and (line := model.weights.progress()) is not None:
            print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_command(_main, _arguments(), arguments)


if __name__ == "__main__":
    sys.exit(main())
