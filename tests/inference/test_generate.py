"""Generated tokens against transformers', with and without the cache, alone and in batches, in layouts, and the command
line."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from base.errors import ConfigError
from inference import generate as command
from inference import generation
from inference.generation import Sampling, generate
from inference.open_model import open_model
from tests import distributed
from tests.models.test_huggingface import FAMILIES, VOCAB_SIZE

GPT_FAMILIES = [name for name in FAMILIES if not name.startswith("bert")]
LAYOUTS = (["parallel.tensor=2"], ["parallel.pipeline=2"], ["parallel.expert=2"])
PROMPTS = [[5, 7, 9, 11], [3], [8, 1, 2, 3, 4, 5, 6, 7, 8], [90, 91]]
NUM_TOKENS = 12
LENGTH = 32  # beyond this the rotary families go on; GPT-2's learned positions end


def _save(name: str, folder: Path, length: int = LENGTH) -> Any:
    """A random model of a family in a Hugging Face folder."""
    import transformers

    class_name, values = FAMILIES[name]
    model_class = getattr(transformers, class_name)
    key = "n_positions" if "n_positions" in values else "max_position_embeddings"
    torch.manual_seed(1)
    model = model_class(model_class.config_class(**{**values, key: length})).eval()
    model.save_pretrained(folder)
    return model


def theirs(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of transformers, none of which ends the text."""
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if (getattr(model.config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        settings["use_cache"] = False  # of all families Phi-3 alone reads again what now turns otherwise
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_tokens, **settings)
    return output[0, len(prompt) :].tolist()


def ours(
    folder: Path, layout: list[str], prompts: list[list[int]], num_tokens: int, **settings: Any
) -> list[list[int]]:
    with open_model(folder, layout, device="cpu") as model:
        return [completion.tokens for completion in generate(model.decoder(), prompts, num_tokens, **settings)]


def _all_settings(folder: Path) -> dict[str, list[list[int]]]:
    with open_model(folder, device="cpu") as model:
        decoder = model.decoder()
        cases: dict[str, dict[str, Any]] = {
            "one batch": {},
            "no cache": {"use_cache": False},
            "alone": {"batch_size": 1},
            "top 1": {"sampling": Sampling(1.0, top_k=1)},
            "top p": {"sampling": Sampling(1.0, top_p=1e-6)},
        }
        return {
            name: [completion.tokens for completion in generate(decoder, PROMPTS, NUM_TOKENS, **settings)]
            for name, settings in cases.items()
        }


@pytest.mark.parametrize("name", GPT_FAMILIES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = _save(name, tmp_path)
    expected = [theirs(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    for case, tokens in distributed.run(_all_settings, 1, tmp_path)[0].items():
        assert tokens == expected, case
    splits = (
        LAYOUTS if FAMILIES[name][1].get("num_local_experts", FAMILIES[name][1].get("num_experts")) else LAYOUTS[:2]
    )
    layout = splits[GPT_FAMILIES.index(name) % len(splits)]
    if layout == ["parallel.pipeline=2"] and name == "gpt2_untied":  # three layers
        layout = ["parallel.tensor=2"]
    assert distributed.run(ours, 2, tmp_path, layout, PROMPTS, NUM_TOKENS) == [expected] * 2


def _sampled(folder: Path) -> None:
    sampling = Sampling(1.5, top_k=40, top_p=0.9, seed=7)
    with open_model(folder, device="cpu") as model:
        decoder = model.decoder()
        together = generate(decoder, PROMPTS, NUM_TOKENS, sampling)
        assert generate(decoder, PROMPTS, NUM_TOKENS, sampling, batch_size=1) == together
        assert generate(decoder, PROMPTS, NUM_TOKENS, Sampling(1.5, seed=8)) != together
        end = together[2].tokens[3]
        stopped = generate(decoder, PROMPTS, NUM_TOKENS, sampling, stop=[end])
        first = together[2].tokens.index(end)
        assert (stopped[2].tokens, stopped[2].stopped) == (together[2].tokens[:first], True)
        for short, full in zip(stopped, together):
            assert full.tokens[: len(short.tokens)] == short.tokens
            assert short.stopped == (end in full.tokens)


def test_sampling_does_not_depend_on_the_batch_and_stops(tmp_path: Path) -> None:
    _save("llama", tmp_path)
    distributed.run(_sampled, 1, tmp_path)


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    cases = {
        Sampling(1.0): [0.5, 0.3, 0.15, 0.05],
        Sampling(0.5): [0.25, 0.09, 0.0225, 0.0025],
        Sampling(1.0, top_k=2): [0.5, 0.3, 0, 0],
        Sampling(1.0, top_p=0.79): [0.5, 0.3, 0, 0],
        Sampling(1.0, top_p=0.81): [0.5, 0.3, 0.15, 0],
        Sampling(1.0, top_k=3, top_p=0.8): [0.5, 0.3, 0, 0],
    }
    for sampling, weights in cases.items():
        generator = torch.Generator().manual_seed(0)
        drawn = Counter(generation._sample(probabilities.log(), sampling, generator) for _ in range(4000))
        for token, weight in enumerate(weights):
            assert abs(drawn[token] / 4000 - weight / sum(weights)) < 0.03, (sampling, token)
            assert (drawn[token] == 0) == (weight == 0)


def _beyond_the_length(folder: Path) -> list[int]:
    with open_model(folder, device="cpu") as model:
        decoder = model.decoder()
        if decoder.max_length is not None:
            with pytest.raises(
                ConfigError, match=r"prompt 2 \(5 tokens\) and --max-tokens \(30\) do not fit .* Try --max-tokens 27"
            ):
                generate(decoder, [[1, 2], [1, 2, 3, 4, 5]], 30)
        with pytest.raises(
            ConfigError, match=f"token id {VOCAB_SIZE}, but the model's token ids are 0 to {VOCAB_SIZE - 1}"
        ):
            generate(decoder, [[1, VOCAB_SIZE]], 3)
        with pytest.raises(ConfigError, match="prompt 1 has no tokens"):
            generate(decoder, [[]], 3)
        return generate(decoder, [[1, 2, 3]], LENGTH - 3 if decoder.max_length else 2 * LENGTH)[0].tokens


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_texts_longer_than_training(name: str, tmp_path: Path) -> None:
    model = _save(name, tmp_path)
    tokens = distributed.run(_beyond_the_length, 1, tmp_path)[0]
    assert tokens == theirs(model, [1, 2, 3], len(tokens))


def _command(arguments: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = command.main(arguments)
    return status, out.getvalue(), err.getvalue()


def test_command_line(tmp_path: Path) -> None:
    model = _save("llama", tmp_path / "hf")
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbf5 7 9 11\r\n3\n")
    source = [
        "--checkpoint",
        str(tmp_path / "hf"),
        "--device",
        "cpu",
        "--ids",
        "--prompts-file",
        str(tmp_path / "prompts"),
    ]
    expected = [theirs(model, prompt, 6) for prompt in PROMPTS[:2]]
    status, out, err = distributed.run(_command, 1, [*source, "--max-tokens", "6", "--json", "--ignore-end"])[0]
    lines = [json.loads(line) for line in out.splitlines()]
    assert (status, [line["tokens"] for line in lines]) == (0, expected)
    assert "tokens/s" in err
    wrong = {
        "--prompt is no option beside a file": ([*source[:-2], "--prompt", "a b"], "must be integers"),
        "no tokenizer": (
            [*source[:4], "--prompt", "hello"],
            "has no tokenizer (docs/guide/tokenizers.md lists the formats)",
        ),
        "no model": (["--checkpoint", str(tmp_path / "nowhere"), "--prompt", "a"], "is not a model"),
        "layout": ([*source, "parallel.tensor=2"], "world_size (1) must be divisible"),
        "no layout": ([*source, "model.hidden_size=2"], "model.hidden_size=2 is not a layout key"),
    }
    for arguments, message in wrong.values():
        status, out, err = distributed.run(_command, 1, arguments)[0]
        assert (status, out) == (2, "")
        assert message in err
