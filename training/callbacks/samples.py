"""When a run ends, print greedy and sampled continuations of `sample.prompts` by the trained model."""

from __future__ import annotations

from inference.decoder import Decoder
from inference.generation import Sampling, answer_limit, generate
from training.run import Callback, Run


class PromptSamples(Callback):
    """Prints a greedy and a sampled continuation of each prompt in `sample.prompts`; GPT models only."""

    def on_end(self, run: Run) -> None:
        settings = run.config.sample
        if run.config.model.family != "gpt" and settings.prompts:
            run.log("sample.prompts are not continued: a masked language model does not generate text")
            return
        for prompt in settings.prompts:
            greedy = continue_text(run, prompt, settings.num_tokens, temperature=0.0)
            how = {"temperature": settings.temperature, "top_p": settings.top_p}
            sampled = continue_text(run, prompt, settings.num_tokens, **how)
            texts = {"prompt": prompt, "greedy continuation": greedy, "sampled continuation": sampled}
            run.log("".join(f"--- {name}\n{text}\n" for name, text in texts.items()) + "---")


def continue_text(run: Run, prompt: str, num_tokens: int, *, temperature: float, top_p: float = 1.0) -> str:
    """Return the text of `num_tokens` tokens with which the model in training continues `prompt`. The text is shorter
    if the learned positions of the model run out, and "" with a log line if the prompt fills them. Temperature 0 means
    greedy decoding. A collective call in any layout; every rank returns the whole text."""
    ids = run.tokenizer.encode_prompt(prompt) or [run.tokenizer.eod]
    with run.engine.frozen_weights():
        decoder = Decoder.of_chunks(run.engine.bare_chunks, run.config, run.topology, run.vocab_size)
        if decoder.max_length is not None and num_tokens > 0:
            num_tokens = answer_limit(len(ids), num_tokens, decoder.max_length)
            if num_tokens == 0:
                full = f"a prompt of {len(ids)} tokens fills the model's {decoder.max_length} learned positions"
                run.log(f"{full}, so it is not continued")
        if num_tokens == 0:
            return ""
        sampling = Sampling(temperature, top_p=top_p, seed=run.config.training.seed)
        return run.tokenizer.decode(generate(decoder, [ids], num_tokens, sampling)[0].tokens)
