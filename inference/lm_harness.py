"""Our models in the LM evaluation harness (https://github.com/EleutherAI/lm-evaluation-harness). Needs the package
lm-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from configs.schema import ConfigError
from inference.decoder import Decoder
from inference.generation import Sampling, generate
from inference.open_model import OpenModel
from inference.scoring import log_likelihoods

MAX_NEW_TOKENS = 256  # of an answer whose task does not say


class HarnessModel(TemplateLM):
    """What the harness asks of a language model, on a Decoder. All ranks of a job run the same harness in step."""

    def __init__(self, model: OpenModel, decoder: Decoder, batch_size: int) -> None:
        super().__init__()
        self.words = model.needed_tokenizer("Give --tokenizer.")
        self.decoder, self.batch_size = decoder, batch_size
        self.length = model.config.model.sequence_length
        self.end_tokens = model.end_tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends, and in training precedes, every document."""
        return self.words.eod

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids without special tokens."""
        return self.words.encode(string)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        results: dict[int, tuple[float, bool]] = {}
        # A continuation is predicted from as much of its context as the model was trained to read.
        texts = [(context + continuation)[-self.length :] for _, context, continuation in requests]
        order = sorted(range(len(requests)), key=lambda i: len(texts[i]))
        for begin in range(0, len(order), self.batch_size):
            group = order[begin : begin + self.batch_size]
            longest = max(len(texts[i]) for i in group)
            scores, greedy = self.decoder.score(
                torch.tensor([texts[i] + [0] * (longest - len(texts[i])) for i in group])
            )
            for row, i in enumerate(group):
                last = len(texts[i]) - 1
                part = slice(max(0, last - len(requests[i][2])), last)
                results[i] = (float(scores[row, part].double().sum()), bool(greedy[row, part].all()))
        return [results[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts."""
        stride = max(1, self.length // 2)
        texts = [[self.eot_token_id, *self.words.encode(request.args[0])] for request in requests]
        return [
            float(log_likelihoods(self.decoder, text, self.length, stride, self.batch_size).sum()) for text in texts
        ]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to one of the task's stop words, which is left out."""
        return [self._answer(*request.args) for request in requests]

    def _answer(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        max_tokens = min(int(settings.get("max_gen_toks", MAX_NEW_TOKENS)), self.length - 1)
        prompt = (self.words.encode(context) or [self.eot_token_id])[-(self.length - max_tokens) :]
        temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0
        sampling = Sampling(temperature, int(settings.get("top_k", 0)), float(settings.get("top_p", 1.0)))

        def is_done(tokens: list[int]) -> bool:
            text = self.words.decode(tokens)
            return any(word in text for word in until)

        answer = generate(self.decoder, [prompt], max_tokens, sampling, stop=self.end_tokens, is_done=is_done)[0]
        text = self.words.decode(answer.tokens)
        return text[: min((text.index(word) for word in until if word in text), default=len(text))]


def run_tasks(
    model: OpenModel,
    decoder: Decoder,
    tasks: list[str],
    folder: Path,
    few_shots: int | None,
    limit: int | None,
    batch_size: int,
) -> dict[str, Any]:
    """Metrics of each task, by name. Raises ConfigError for a task that the folder does not have."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise ConfigError(
            f"--tasks ({unknown[0]}) is none of the tasks in {folder}: "
            f"{', '.join(sorted(manager.all_tasks)) or 'none'}."
        )
    results = lm_eval.simple_evaluate(
        model=HarnessModel(model, decoder, batch_size),
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=few_shots,
        limit=limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        task: {name: value for name, value in metrics.items() if name != "alias"}
        for task, metrics in results["results"].items()
    }
