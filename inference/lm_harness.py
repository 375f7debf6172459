"""The LM evaluation harness (https://github.com/EleutherAI/lm-evaluation-harness) on a model; needs lm-eval."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import lm_eval
import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from base.errors import ConfigError
from inference.decoder import Decoder
from inference.generation import Sampling, answer_limit, generate
from inference.open_model import OpenModel
from inference.scoring import log_likelihoods_of, score_together, shared_batches

MAX_NEW_TOKENS = 256  # longest answer if the task sets no limit
# A task's keys for the maximal length of an answer; the first that is set counts.
MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessModel(TemplateLM):
    """Adapter of a Decoder to the model interface of lm-evaluation-harness. All ranks run the same requests."""

    def __init__(self, model: OpenModel, decoder: Decoder, batch_size: int) -> None:
        super().__init__()
        self.words = model.needed_tokenizer("Give --tokenizer.")
        self.decoder, self.batch_size = decoder, batch_size
        self.length = model.config.model.sequence_length
        self.end_tokens = model.end_tokens

    @property
    def eot_token_id(self) -> int:
        """The id of the token that ends every document."""
        return self.words.eod

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that precedes a text without a context."""
        return self.words.before_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text, by default with the special tokens that the tokenizer adds.

        By default, they are not added to a text that already begins with the prefix token, spelled out.
        """
        if add_special_tokens is None:
            name = self.words.token_piece(self.prefix_token_id)
            add_special_tokens = not (name and string.startswith(name))
        return self.words.encode_prompt(string) if add_special_tokens else self.words.encode(string)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        results = dict.fromkeys(range(len(requests)), (0.0, True))  # the result of an answer without tokens
        longest_answer = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest_answer > self.length:
            self._refuse(f"an answer of {longest_answer} tokens", "be at most", "Omit")
        # The context is truncated on the left to the model's length. The last token of a text is predicted, not read.
        texts = [(context + continuation)[-self.length - 1 :] for _, context, continuation in requests]
        order = sorted((i for i in results if requests[i][2]), key=lambda i: len(texts[i]))
        batches = [order[begin : begin + self.batch_size] for begin in range(0, len(order), self.batch_size)]
        for those in shared_batches(self.decoder, batches, [[len(texts[i]) for i in batch] for batch in batches]):
            found = score_together(self.decoder, [[texts[i] for i in batch] for batch in those])
            for batch, (scores, greedy) in zip(those, found, strict=True):
                for row, i in enumerate(batch):
                    last = len(texts[i]) - 1
                    answer = slice(max(0, last - len(requests[i][2])), last)
                    results[i] = (float(scores[row, answer].double().sum()), bool(greedy[row, answer].all()))
        return [results[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows that predict `sequence_length` tokens each."""
        texts = [[self.prefix_token_id, *self.tok_encode(request.args[0])] for request in requests]
        found = log_likelihoods_of(self.decoder, texts, self.length + 1, self.length, self.batch_size)
        return [float(log_probs.sum()) for log_probs in found]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each prompt up to the first of the task's stop words, without the stop word.

        A prompt is never truncated: if prompt and `max_gen_toks` exceed the model's length, the answer is shortened.
        Raises ConfigError, before anything is generated, if a prompt leaves no token for the answer.
        """
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        wanted = []
        for request in requests:
            limits_of_task = (request.args[1].get(name) for name in MOST_TOKENS)
            wanted.append(int(next((value for value in limits_of_task if value is not None), MAX_NEW_TOKENS)))
        limits = [answer_limit(len(prompt), most, self.length) for prompt, most in zip(prompts, wanted, strict=True)]
        full = [len(prompt) for prompt, most, limit in zip(prompts, wanted, limits, strict=True) if limit == 0 < most]
        if full:
            prompt = f"a prompt of {full[0]} tokens"
            self._refuse(prompt, "leave space for an answer in", "Try fewer --few-shots, or omit")
        cut = [limit for limit, most in zip(limits, wanted, strict=True) if limit < most]
        if cut and dist.get_rank() == 0:
            print(
                f"note: {len(cut)} of {len(limits)} answers are limited to {min(cut)} to {max(cut)} tokens instead of "
                f"the task's max_gen_toks ({max(wanted)}), because prompt and answer must fit the model's sequence "
                f"length ({self.length})",
                file=sys.stderr,
                flush=True,
            )
        answers: dict[int, str] = {}
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(json.dumps([limits[i], request.args[1]], sort_keys=True, default=str), []).append(i)
        for those in alike.values():  # requests with equal settings share passes if weights are streamed
            found = self._answers([prompts[i] for i in those], limits[those[0]], requests[those[0]].args[1])
            answers.update(zip(those, found, strict=True))
        return [answers[i] for i in range(len(requests))]

    def _refuse(self, text: str, must: str, remedy: str) -> NoReturn:
        raise ConfigError(
            f"--tasks: {text} must {must} the model's sequence length ({self.length}). {remedy} the task."
        )

    def _answers(self, prompts: list[list[int]], max_tokens: int, settings: dict[str, Any]) -> list[str]:
        until = settings.get("until") or []
        until = [word for word in ([until] if isinstance(until, str) else until) if word]
        draws = settings.get("do_sample")  # if the task does not set it, a temperature implies it
        temperature = 0.0 if draws is False else float(settings.get("temperature", 1.0 if draws else 0.0))
        sampling = Sampling(temperature, int(settings.get("top_k", 0)), float(settings.get("top_p", 1.0)))

        stop = {*self.end_tokens, self.eot_token_id}

        def is_done(tokens: list[int]) -> bool:
            text = self.words.decode(tokens)
            return any(word in text for word in until)

        found = generate(self.decoder, prompts, max_tokens, sampling, stop=stop, is_done=is_done, batch_size=1)
        texts = [self.words.decode(answer.tokens) for answer in found]
        return [text[: min((text.index(word) for word in until if word in text), default=len(text))] for text in texts]


def run_tasks(
    model: OpenModel,
    decoder: Decoder,
    tasks: list[str],
    folder: Path,
    few_shots: int | None,
    limit: int | None,
    batch_size: int,
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness that a folder defines, and return the metrics of each task by name.

    few_shots: examples before each question. limit: most questions per task. Raises ConfigError for an unknown task.
    """
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        known = sorted(manager.all_tasks)
        advice = (
            f"Give one of its tasks: {', '.join(known)}" if known else "Give another --task-folder: it has no tasks"
        )
        raise ConfigError(f"--tasks ({unknown[0]}) must be a task in {folder}. {advice}.")
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
