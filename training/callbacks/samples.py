"""What the trained model makes of `sample.prompts`, greedy and sampled, when a run ends."""

from __future__ import annotations

from training.generation import continue_text
from training.run import Callback, Run


class Samples(Callback):
    """Prints a greedy and a sampled continuation of each prompt; only a GPT has one."""

    def on_end(self, run: Run) -> None:
        settings = run.config.sample
        if run.config.model.family != "gpt" and settings.prompts:
            run.say("sample.prompts are not continued: a masked language model does not generate text")
            return
        for prompt in settings.prompts:
            greedy = continue_text(run, prompt, settings.num_tokens, temperature=0.0)
            sampled = continue_text(run, prompt, settings.num_tokens, temperature=settings.temperature, top_p=settings.top_p)
            run.say(f"--- prompt\n{prompt}\n--- greedy continuation\n{greedy}\n--- sampled continuation\n{sampled}\n---")
