"""Perplexity, tasks of the LM evaluation harness and masked words, against transformers on the same weights."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from base.errors import ConfigError
from inference import evaluate, fill_mask
from inference import generate as generation
from inference.scoring import Score, windows
from tests import distributed
from tests.models.test_huggingface import FAMILIES, VOCAB_SIZE
from tests.tolerances import ORACLE_LOGITS

LENGTH = 24
WORDS = [*"abcdefghijklmnopqrstuvwxyz0123456789 .,:;=+-*/()[]{}<>\n", "the", "in", "re", "on", "def", "self", "return"]


def _save(name: str, folder: Path) -> Any:
    """A random model of a family with a word-level tokenizer, in a Hugging Face folder."""
    import tokenizers
    import transformers

    class_name, values = FAMILIES[name]
    model_class = getattr(transformers, class_name)
    key = "n_positions" if "n_positions" in values else "max_position_embeddings"
    torch.manual_seed(2)
    model = model_class(model_class.config_class(**{**values, key: LENGTH, "eos_token_id": 0})).eval()
    model.save_pretrained(folder)
    special = ["<|endoftext|>", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, "[UNK]", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def command(main: Callable[[list[str]], int], arguments: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def _log_probs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double().log_softmax(dim=1)


@pytest.mark.parametrize(
    ("num_tokens", "length", "stride"), [(2, 8, 4), (8, 8, 4), (9, 8, 4), (31, 8, 3), (30, 8, 7), (1, 8, 4), (5, 2, 1)]
)
def test_windows_predict_each_token_once(num_tokens: int, length: int, stride: int) -> None:
    counted: list[int] = []
    for begin, end, first in windows(num_tokens, length, stride):
        assert 0 <= begin < first < end <= num_tokens and end - begin <= length
        assert first == 1 or first - begin >= length - stride
        counted += range(first, end)
    assert counted == list(range(1, num_tokens))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 8, 9])
def test_a_score_by_position_has_every_token_once(num_tokens: int) -> None:
    score = Score.of(torch.arange(num_tokens, dtype=torch.float64), 10) + Score.of(torch.ones(1).double(), 5)
    wanted = {"0": [1.0]}
    for token in range(num_tokens):
        begin = 2 ** (token.bit_length() - 1) if token else 0
        name = str(token) if token < 2 else f"{begin}-{2 * begin - 1}"
        wanted.setdefault(name, []).append(float(token))
    assert score.by_position == {name: (sum(found), len(found)) for name, found in wanted.items()}
    assert score.num_tokens == num_tokens + 1 and score.num_bytes == 15


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3"])
def test_perplexity_of_files(name: str, tmp_path: Path) -> None:
    model = _save(name, tmp_path / "hf")
    texts = {"short": "def f(self):\r\n return 1\u2028\n", "long": "the return in the red zone; " * 6 + "end"}
    for key, text in texts.items():
        (tmp_path / key).write_bytes(text.encode())
    stride = 10
    arguments = [
        "--checkpoint",
        str(tmp_path / "hf"),
        "--device",
        "cpu",
        "--stride",
        str(stride),
        "--batch",
        "3",
        "--json",
        "--files",
    ]
    status, out, err = distributed.run(
        command, 1, evaluate.main, [*arguments, *(str(tmp_path / key) for key in texts)]
    )[0]
    assert status == 0, err
    scores = json.loads(out)["files"]
    import tokenizers

    words = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    total = 0.0
    for key, text in texts.items():
        ids = [0, *words.encode(text, add_special_tokens=False).ids]
        nats = 0.0
        for begin, end, first in windows(len(ids), LENGTH, stride):
            log_probs = _log_probs(model, ids[begin:end])
            nats -= sum(float(log_probs[i - begin - 1, ids[i]]) for i in range(first, end))
        score = scores[str(tmp_path / key)]
        assert score["num_tokens"] == len(ids) - 1 and score["num_bytes"] == len(text.encode())
        assert score["nats"] == pytest.approx(nats, rel=ORACLE_LOGITS)
        assert score["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=10 * ORACLE_LOGITS)
        assert score["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=ORACLE_LOGITS)
        total += nats
        by_position = score["by_position"]
        assert list(by_position)[:4] == ["0", "1", "2-3", "4-7"]
        assert sum(found for found, _ in by_position.values()) == pytest.approx(nats, rel=ORACLE_LOGITS)
        assert sum(count for _, count in by_position.values()) == len(ids) - 1
    assert scores["all"]["nats"] == pytest.approx(total, rel=ORACLE_LOGITS)
    printed = [argument for argument in arguments if argument != "--json"]
    status, out, err = distributed.run(
        command, 1, evaluate.main, [*printed, *(str(tmp_path / key) for key in texts), "--by-position"]
    )[0]
    table_lines = [line.split() for line in out.partition("position")[2].splitlines()[1:]]
    everything = scores["all"]["by_position"]
    counts = [(name, count) for name, (_, count) in everything.items()]
    assert [(row[0], int(row[1])) for row in table_lines] == counts, err
    assert [float(row[2]) for row in table_lines] == pytest.approx(
        [nats / count for nats, count in everything.values()], abs=1e-4
    )


CHOICES = [
    ("def f(", ["self", "the", "a b c"], 0),
    ("return in ", ["1", "on", "re"], 2),
    ("a = 1 + ", ["2", "(3)", "x"], 1),
]
CHOICE_TASK = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""
PERPLEXITY_TASK = """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: bits_per_byte
"""
ANSWER_TASK = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{expected}}"
target_delimiter: ""
generation_kwargs: {until: ["STOP"], max_gen_toks: 6}
metric_list:
  - metric: exact_match
"""


BEGIN = 1  # begins texts with a "=" only, so that both kinds of tokenizers are one


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[tuple[list[int], int]]]]:
    """Our model as the harness sees it, of 10 tokens, without the harness; and what it is asked to continue, with the
    most tokens. A text's tokens are its letters' numbers."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.instance", "lm_eval.api.model", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setattr(sys.modules["lm_eval.api.model"], "TemplateLM", object)
    monkeypatch.delitem(sys.modules, "inference.lm_harness", raising=False)
    lm_harness = importlib.import_module("inference.lm_harness")
    asked: list[tuple[list[int], int]] = []

    def generate(_: Any, prompts: list[list[int]], max_tokens: int, *rest: Any, **more: Any) -> list[Any]:
        asked.append((prompts[0], max_tokens))
        return [SimpleNamespace(tokens=[])]

    monkeypatch.setattr(lm_harness, "generate", generate)
    monkeypatch.setattr(lm_harness.dist, "get_rank", lambda: 0)
    words = SimpleNamespace(
        encode=lambda text: [ord(letter) for letter in text],
        encode_prompt=lambda text: [BEGIN, *map(ord, text)] if "=" in text else list(map(ord, text)),
        decode=lambda ids: "",
        token_piece=lambda token: "<s>",
        eod=0,
        before_text=BEGIN,
    )
    config = SimpleNamespace(model=SimpleNamespace(sequence_length=10))
    model = SimpleNamespace(config=config, end_tokens={0}, needed_tokenizer=lambda advice: words)
    yield lm_harness.HarnessModel(model, None, 2), asked
    sys.modules.pop("inference.lm_harness", None)


def _request(prompt: str, max_tokens: int) -> Any:
    return SimpleNamespace(args=(prompt, {"max_gen_toks": max_tokens}))


@pytest.mark.parametrize(
    ("prompt", "most", "limit"), [("abcd", 3, 3), ("abcd", 6, 6), ("abcd", 7, 6), ("abcd", 256, 6)]
)
def test_a_prompt_of_the_harness_stays_whole(
    prompt: str, most: int, limit: int, harness: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, asked = harness
    model.generate_until([_request("ab", 1), _request(prompt, most)])
    assert asked == [([97, 98], 1), ([ord(letter) for letter in prompt], limit)]
    said = capsys.readouterr().err
    assert ("note: 1 of 2 answers are limited to 6 to 6 tokens" in said) == (limit < most)


def test_what_is_longer_than_the_model_is_refused_by_the_harness(harness: Any) -> None:
    model, asked = harness
    requests = [_request("ab", 1), _request("a" * 10, 1)]
    with pytest.raises(ConfigError, match=r"--tasks: a prompt of 10 tokens must .*\(10\). Try fewer --few-shots"):
        model.generate_until(requests)
    assert asked == []
    with pytest.raises(ConfigError, match=r"--tasks: an answer of 11 tokens must be at most"):
        model._loglikelihood_tokens([(("", ""), [1], [2] * 11)])


def test_the_harness_gets_the_begin_token_of_the_tokenizer(harness: Any) -> None:
    model, asked = harness
    assert model.prefix_token_id == BEGIN
    assert model.tok_encode("a") == [97] and model.tok_encode("a=") == [BEGIN, 97, 61]
    assert model.tok_encode("a=", add_special_tokens=False) == [97, 61]
    assert model.tok_encode("<s>=") == [*map(ord, "<s>=")]
    model.generate_until([_request("", 1), _request("=", 2)])
    assert asked == [([BEGIN], 1), ([BEGIN, 61], 2)]


def test_an_answer_of_the_harness_goes_on_past_an_empty_stop_word(harness: Any) -> None:
    model, asked = harness
    names = ("max_new_tokens", "max_tokens", "max_completion_tokens")
    model.generate_until([SimpleNamespace(args=("a", {name: 3, "until": [""]})) for name in names])
    assert asked == [([97], 3)] * 3


def _scored(harness: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[list[int]]]:
    """The model of the harness, for which each token has -1, and the texts that it is shown."""
    shown: list[list[int]] = []

    def score(_: Any, batches: list[list[list[int]]]) -> list[Any]:
        shown.extend(text for batch in batches for text in batch)
        shapes = [(len(batch), max(map(len, batch)) - 1) for batch in batches]
        return [(-torch.ones(shape), torch.ones(shape, dtype=torch.bool)) for shape in shapes]

    model, _ = harness
    model.decoder = SimpleNamespace(batches_at_once=lambda *_: 1)
    for module in ("inference.lm_harness", "inference.scoring"):
        monkeypatch.setattr(sys.modules[module], "score_together", score)
    return model, shown


@pytest.mark.parametrize(("num_tokens", "windows_of"), [(1, [2]), (10, [11]), (11, [11, 11]), (30, [11, 11, 11])])
def test_rolling_windows_of_the_harness_have_one_token_of_context(
    num_tokens: int, windows_of: list[int], harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shown = _scored(harness, monkeypatch)
    text = "abcdefghijklmnopqrstuvwxyzABCD"[:num_tokens]
    assert model.loglikelihood_rolling([_request(text, 0)]) == [-num_tokens]
    assert list(map(len, shown)) == windows_of
    assert shown[0][0] == BEGIN and shown[-1][-1] == ord(text[-1])


def test_the_harness_reads_a_question_as_long_as_the_model(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shown = _scored(harness, monkeypatch)
    requests = [(("", ""), list(range(9)), [50, 51]), (("", ""), list(range(40)), [50, 51]), (("", ""), [7], [])]
    assert model._loglikelihood_tokens(requests) == [(-2.0, True), (-2.0, True), (0.0, True)]
    assert shown == [[*range(9), 50, 51], [*range(31, 40), 50, 51]]


def _evaluate_tasks(cache: Path, arguments: list[str]) -> tuple[int, str, str]:
    os.environ["HF_HOME"] = str(cache)  # read when the harness is imported
    return command(evaluate.main, arguments)


def test_tasks_without_the_harness_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "config.json").touch()  # as far as it is looked at
    status, _, said = command(
        evaluate.main, ["--checkpoint", str(tmp_path), "--tasks", "a", "--task-folder", str(tmp_path)]
    )
    assert status == 2
    assert said == (
        "error: --tasks needs the package lm-eval, which is not installed. Try bash launch/setup.sh --extra eval.\n"
    )


def test_tasks_of_the_harness(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the optional package lm-eval is not installed")
    import tokenizers

    model = _save("llama", tmp_path / "hf")
    words = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return words.encode(text, add_special_tokens=False).ids

    right, nats, num_bytes, lines = 0, 0.0, 0, []
    for question, choices, answer in CHOICES:
        context = encode(question)
        sums = []
        for choice in choices:
            ids = encode(question + choice)
            log_probs = _log_probs(model, ids)
            begin = len(encode(question.rstrip(" ")))
            sums.append(sum(float(log_probs[i - 1, ids[i]]) for i in range(begin, len(ids))))
        right += sums.index(max(sums)) == answer
        log_probs = _log_probs(model, [0, *context])
        nats -= sum(float(log_probs[i, token]) for i, token in enumerate(context))
        num_bytes += len(question)
        tokens = torch.tensor([context])
        settings = {"do_sample": False, "eos_token_id": 0, "pad_token_id": 0, "max_new_tokens": 6}
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[0, len(context) :].tolist()
        text = words.decode([token for token in made if token < 5 + len(WORDS)])
        lines.append({"question": question, "choices": choices, "answer": answer, "expected": text})
    lines[0]["expected"] = "!"  # a wrong answer
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "tasks").mkdir()
    for name, task in {"choices": CHOICE_TASK, "texts": PERPLEXITY_TASK, "answers": ANSWER_TASK}.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(task.replace("DATA", str(tmp_path / "data.jsonl")))
    arguments = [
        "--checkpoint",
        str(tmp_path / "hf"),
        "--device",
        "cpu",
        "--json",
        "--task-folder",
        str(tmp_path / "tasks"),
        "--tasks",
    ]
    status, out, err = distributed.run(
        _evaluate_tasks, 1, tmp_path / "cache", [*arguments, "choices", "texts", "answers"]
    )[0]
    assert status == 0, err
    results = json.loads(out.splitlines()[-1])["tasks"]
    assert results["choices"]["acc,none"] == pytest.approx(right / len(CHOICES))
    assert results["texts"]["bits_per_byte,none"] == pytest.approx(
        nats / math.log(2) / num_bytes, rel=10 * ORACLE_LOGITS
    )
    assert results["answers"]["exact_match,none"] == pytest.approx(2 / 3)
    status, out, err = distributed.run(_evaluate_tasks, 1, tmp_path / "cache", [*arguments, "choicess"])[0]
    assert (status, out) == (2, "") and "--tasks (choicess) must be a task in " in err
    assert ". Give one of its tasks: answers, choices, " in err


@pytest.mark.parametrize("layout", [[], ["parallel.tensor=2"]])
def test_masked_words(layout: list[str], tmp_path: Path) -> None:
    model = _save("bert_masked_lm", tmp_path)
    source = ["--checkpoint", str(tmp_path), "--device", "cpu", *layout, "--json", "--top-k", "3"]
    ids = [1, 20, 3, 33, 9, 3, 2]
    expected = model(torch.tensor([ids])).logits[0, [2, 5]].softmax(dim=1).topk(3)
    text = " ".join(map(str, ids))
    status, out, err = distributed.run(
        command, len(layout) + 1, fill_mask.main, [*source, "--ids", "--mask-id", "3", "--text", text]
    )[0]
    assert status == 0, err
    found_places = json.loads(out)["places"]
    assert [[guess["token"] for guess in guesses] for guesses in found_places] == expected.indices.tolist()
    found = torch.tensor([[guess["probability"] for guess in guesses] for guesses in found_places])
    assert (found - expected.values).abs().max() < ORACLE_LOGITS
    if layout:
        return
    status, out, err = distributed.run(command, 1, fill_mask.main, [*source, "--text", "a = [MASK] + [MASK]"])[0]
    assert status == 0 and [len(guesses) for guesses in json.loads(out)["places"]] == [3, 3], err
    assert re.match(r"Loading .* \.\.\.\n", err)
    wrong = {
        "--text has no [MASK] (token id ": (fill_mask.main, [*source, "--text", "a = 1"]),
        f"more than the model's sequence length ({LENGTH})": (
            fill_mask.main,
            [*source, "--text", "[MASK]" + "a" * LENGTH],
        ),
        "(bert) must be gpt to continue or score text. Try python -m inference.fill_mask": (
            generation.main,
            [*source[:4], "--prompt", "a"],
        ),
        f"token id 500, but the model's token ids are 0 to {VOCAB_SIZE - 1}. Replace it.": (
            fill_mask.main,
            [*source, "--ids", "--mask-id", "3", "--text", "3 500"],
        ),
    }
    for message, (main, arguments) in wrong.items():
        status, out, err = distributed.run(command, 1, main, arguments)[0]
        assert (status, out) == (2, "") and message in err


@pytest.mark.parametrize("line", [["--length", "99"], ["--length", "8", "--stride", "9"]], ids=["length", "stride"])
def test_an_advised_length_and_stride_are_typed_and_taken(line: list[str]) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(sequence_length=LENGTH)))
    decoder: Any = SimpleNamespace(max_length=LENGTH)
    parser = argparse.ArgumentParser()
    for option in ("--length", "--stride"):
        parser.add_argument(option, type=int)
    fixed = argparse.Namespace(files=[Path("nothing")], text_key="text", documents_in_text="file", batch=1)
    with pytest.raises(ConfigError) as caught:
        evaluate._evaluate_files(parser.parse_args(line, fixed), model, decoder)
    advised = re.search(r"Try (--[a-z]+ [0-9]+)\.$", str(caught.value))
    assert advised, caught.value
    with pytest.raises(ConfigError, match="nothing"):  # the window is right: the file is next
        evaluate._evaluate_files(parser.parse_args([*line, *advised[1].split()], fixed), model, decoder)
