"""Continue texts: `python -m inference.generate --checkpoint MODEL --prompt TEXT [--max-tokens 64] [--temperature 0.8
--top-p 0.95]`.

MODEL is a run folder (its newest good checkpoint is used), one of its checkpoints/step_XXXXXXX, a folder of `python -m
checkpoint.export`, or a Hugging Face folder. Prompts come from --prompt, --prompts-file (one prompt per line) or
standard input. With temperature 0, the most likely token is always taken. The continuation of a prompt does not depend
on other prompts. The command also runs under torchrun, in any layout: `torchrun --nproc-per-node 2 -m
inference.generate ... parallel.tensor=2`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from base.errors import ConfigError
from configs import derived
from inference.command import add_model_arguments, run_command
from inference.texts import prompts_of, read_prompts
from inference.weights.routing_file import FLAG, RoutingHeader, RoutingWriter

if TYPE_CHECKING:
    from inference.open_model import OpenModel


def _number(
    kind: Callable[[str], float], low: float, high: float = float("inf"), above: bool = False
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high or (above and value == low):
            rule = f"above {low}" if above else f"at least {low}"
            raise argparse.ArgumentTypeError(
                f"{text} must be {rule}" + (f" and at most {high}" if high < float("inf") else "")
            )
        return value

    parse.__name__ = kind.__name__
    return parse


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inference.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", help="a text to continue; may be given several times")
    source.add_argument("--prompts-file", type=Path, help="a text file with one prompt per line, or a JSON file")
    add("--text-key", default="text", help="as data.text_key: the field of a JSON file (text)")
    add("--max-tokens", type=_number(int, 1), default=64, help="maximal number of new tokens per prompt (64)")
    add("--temperature", type=_number(float, 0), default=0.0, help="0 (default): always the most likely token")
    add("--top-k", type=_number(int, 0), default=0, help="draw from the K likeliest tokens; 0 (default): all")
    share = _number(float, 0, 1, above=True)
    add("--top-p", type=share, default=1.0, help="draw from the likeliest tokens of this total probability (1)")
    add("--seed", type=_number(int, 0), default=1234, help="random seed of each prompt (1234)")
    add("--batch", type=_number(int, 1), default=8, help="prompts that are continued together (8)")
    add("--ignore-end", action="store_true", help="continue after an end-of-text token")
    add("--ids", action="store_true", help="prompts and continuations are token ids separated by spaces")
    add("--no-cache", action="store_true", help="recompute the whole text for every token (slow; for comparison)")
    add("--record-routing", type=Path, metavar="FILE", help="new file for the experts of each token, in JSON lines")
    add("--json", action="store_true", help="print one JSON object per prompt")
    return parser


def _read_prompts(options: argparse.Namespace) -> list[str]:
    if options.prompt is not None:
        return list(options.prompt)
    if options.prompts_file is None:
        lines = prompts_of(sys.stdin.buffer.read(), "standard input")
    else:
        lines = read_prompts(options.prompts_file, "--prompts-file", options.text_key)
    if not lines:
        raise ConfigError("there is no prompt. Give --prompt TEXT, --prompts-file FILE, or lines on standard input.")
    return lines


def _same_prompts_everywhere(options: argparse.Namespace) -> list[str]:
    """Read the prompts on rank 0, which alone has torchrun's standard input, and return them on all ranks.

    Raises ConfigError on all ranks if they cannot be read. A collective call.
    """
    import torch.distributed as dist

    answer: list[list[str] | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer[0] = _read_prompts(options)
        except ConfigError as error:
            answer[0] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], str):
        raise ConfigError(answer[0])
    return answer[0] or []


def _encode(prompts: list[str], model: OpenModel, as_ids: bool) -> list[list[int]]:
    if not as_ids:
        tokenizer = model.needed_tokenizer("Give prompts as token ids with --ids.")
        return [tokenizer.encode_prompt(prompt) or [tokenizer.before_text] for prompt in prompts]
    try:
        return [[int(word) for word in prompt.split()] for prompt in prompts]
    except ValueError as error:
        rule = "must be integers separated by spaces, because of --ids"
        raise ConfigError(f"each prompt {rule}: {error}. Give token ids, or omit --ids.") from error


@contextlib.contextmanager
def recorded(model: OpenModel, path: Path | None) -> Iterator[None]:
    """Record the experts that each token chooses in a new file, on rank 0, while the context is open. Without a `path`,
    nothing is recorded.

    Raises ConfigError for a dense model, and with several pipeline stages, because no stage has all layers.
    """
    if path is None:
        yield
        return
    layers = tuple(layer for layer, is_moe in enumerate(derived.moe_layer_pattern(model.config)) if is_moe)
    if not layers:
        raise ConfigError(f"{FLAG} ({path}) needs a model with experts, and {model.source} has none. Omit it.")
    layout = model.config.parallel
    if layout.pipeline > 1:
        ranks, experts = layout.expert * layout.pipeline, model.config.moe.num_experts or 0
        advice = "fewer ranks" if experts % ranks else f"parallel.pipeline=1 parallel.expert={ranks}"
        raise ConfigError(f"parallel.pipeline ({layout.pipeline}) must be 1 with {FLAG}. Try {advice}.")
    if model.topology.rank > 0:
        yield
        return
    header = RoutingHeader(str(model.source), model.config.moe.num_experts or 0, model.config.moe.top_k, layers)
    with RoutingWriter(path, header) as writer:
        model.weights.record = writer
        try:
            yield
        finally:
            model.weights.record = None


def _main(options: argparse.Namespace) -> None:
    import torch.distributed as dist  # imported here: --help must not wait for torch

    from inference.generation import Sampling, generate, shared_passes
    from inference.open_model import open_from
    from models.huggingface.special_tokens import GENERATION_CONFIG, changes_of_text

    with open_from(options) as model:
        decoder = model.decoder()
        prompts = _same_prompts_everywhere(options)
        ids = _encode(prompts, model, options.ids)
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
        for key, value in changes_of_text(model.source).items() if dist.get_rank() == 0 else ():
            note = f"note: {GENERATION_CONFIG} asks for {key} ({value}), which is not supported and has no effect"
            print(note, file=sys.stderr, flush=True)
        stop = set() if options.ignore_end else model.end_tokens
        with recorded(model, options.record_routing):
            most, size, use_cache = options.max_tokens, options.batch, not options.no_cache
            shared_passes(decoder, ids, most, size, use_cache)  # load the weights before timing
            begin = time.perf_counter()
            completions = generate(decoder, ids, most, sampling, stop=stop, batch_size=size, use_cache=use_cache)
        seconds = time.perf_counter() - begin
        if dist.get_rank() != 0:
            return
        for prompt, prompt_ids, completion in zip(prompts, ids, completions, strict=True):
            # An end token that is no special token is part of the text, as in transformers.
            ended = completion.tokens if completion.end is None else [*completion.tokens, completion.end]
            text = " ".join(map(str, completion.tokens)) if options.ids else model.needed_tokenizer("").decode(ended)
            if options.json:
                line = {"prompt": prompt, "text": text, "prompt_tokens": prompt_ids, "tokens": completion.tokens}
                print(json.dumps({**line, "stopped": completion.stopped}), flush=True)
            elif len(prompts) > 1:
                print(f"--- prompt\n{prompt}\n--- continuation\n{text}", flush=True)
            else:
                print(text, flush=True)
        if (progress := model.weights.progress()) is not None:
            print(progress, file=sys.stderr, flush=True)
        made = sum(len(completion.tokens) for completion in completions)
        print(f"{made} tokens in {seconds:.2f} s, {made / seconds:.0f} tokens/s", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_command(_main, _arguments(), arguments)


if __name__ == "__main__":
    sys.exit(main())
