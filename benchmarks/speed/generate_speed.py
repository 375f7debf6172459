"""Generation against Hugging Face's `generate` on the same weights: `python -m benchmarks.speed.generate_speed
[--models NAME ...] [--json]`.

Each model is random, of its family's proportions at a size for a CPU, saved by transformers and loaded by both. Greedy,
one process, the same prompts; runs alternate, and medians are compared. Prefill is the time to the first token, decode
the tokens after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.tables import headline, line
from inference.generation import generate
from inference.open_model import OpenModel, open_model

LLAMA = {
    "vocab_size": 16003,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
EXPERTS = {**LLAMA, "hidden_size": 384, "intermediate_size": 768, "num_attention_heads": 6, "num_experts_per_tok": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 16003, "n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 1024, "initializer_range": 0.1},
    ),
    "gpt2_124m": ("GPT2LMHeadModel", {"initializer_range": 0.1}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 32, "moe_intermediate_size": 192, "head_dim": 64}),
    "olmoe": ("OlmoeForCausalLM", {**EXPERTS, "num_experts": 32, "intermediate_size": 192, "num_key_value_heads": 6}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **EXPERTS,
            "num_key_value_heads": 6,
            "n_routed_experts": 32,
            "n_shared_experts": 1,
            "moe_intermediate_size": 192,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
}


@dataclass(frozen=True)
class Row:
    """Medians of one model at one batch size, seconds and tokens/s, and whether both made the same tokens."""

    model: str
    batch: int
    parameters: int
    same_tokens: bool
    our_prefill_seconds: float
    their_prefill_seconds: float
    our_decode_tokens_per_second: float
    their_decode_tokens_per_second: float
    our_seconds: float
    their_seconds: float

    @property
    def speedup(self) -> float:
        """The ratio of the seconds of a whole generation: theirs to ours."""
        return self.their_seconds / self.our_seconds


def measure(name: str, batches: list[int], prompt_length: int, num_tokens: int, repeats: int) -> Iterator[Row]:
    """Measure both programs on one model, at each batch size."""
    import transformers

    class_name, values = MODELS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    settings = {**values, "bos_token_id": 0, "eos_token_id": 1}
    theirs = model_class(model_class.config_class(**settings)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        with open_model(Path(folder), device="cpu") as model:
            for batch in batches:
                yield _measure_batch(name, theirs, model, batch, prompt_length, num_tokens, repeats)


def _measure_batch(
    name: str, theirs: Any, model: OpenModel, batch: int, prompt_length: int, num_tokens: int, repeats: int
) -> Row:
    decoder = model.decoder()
    prompts = torch.randint(2, model.vocab_size, (batch, prompt_length), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones_like(prompts)

    def run_theirs(count: int) -> list[list[int]]:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": count}
        return theirs.generate(prompts, attention_mask=mask, **options)[:, prompt_length:].tolist()

    def run_ours(count: int) -> list[list[int]]:
        return [made.tokens for made in generate(decoder, prompts.tolist(), count, batch_size=batch)]

    same = run_ours(num_tokens) == run_theirs(num_tokens)
    ours_first, theirs_first = _alternate(run_ours, run_theirs, 1, repeats)
    ours_all, theirs_all = _alternate(run_ours, run_theirs, num_tokens, repeats)
    rest = batch * (num_tokens - 1)
    decode = rest / (ours_all - ours_first), rest / (theirs_all - theirs_first)
    parameters = sum(parameter.numel() for parameter in theirs.parameters())
    return Row(name, batch, parameters, same, ours_first, theirs_first, *decode, ours_all, theirs_all)


def _alternate(
    ours: Callable[[int], Any], theirs: Callable[[int], Any], count: int, repeats: int
) -> tuple[float, float]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, taken in zip((ours, theirs), seconds, strict=True):
            begin = time.perf_counter()
            function(count)
            taken.append(time.perf_counter() - begin)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=[name for name in MODELS if name != "gpt2_124m"]
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"prompts of {options.prompt_length} tokens, {options.tokens} new ones, {threads}")
    headings = ["model", "batch", "Mparam", "same tokens", "prefill ms", "theirs", "decode tok/s", "theirs", "faster"]
    print(headline(headings, markdown=False))
    table_rows = []
    for name in options.models:
        for row in measure(name, options.batches, options.prompt_length, options.tokens, options.repeats):
            table_rows.append(row)
            cells = [
                *(row.model, str(row.batch), f"{row.parameters / 1e6:.1f}", "yes" if row.same_tokens else "NO"),
                *(f"{1e3 * row.our_prefill_seconds:.1f}", f"{1e3 * row.their_prefill_seconds:.1f}"),
                *(
                    f"{row.our_decode_tokens_per_second:.0f}",
                    f"{row.their_decode_tokens_per_second:.0f}",
                    f"{row.speedup:.2f}x",
                ),
            ]
            print(line(cells, headings, markdown=False), flush=True)
    if options.json:
        print(json.dumps([{**asdict(row), "speedup": row.speedup} for row in table_rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
