"""Continue a text with the model of a run, in whatever layout it trains in."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from training.run import Run


def continue_text(run: Run, prompt: str, num_tokens: int, *, temperature: float, top_p: float = 1.0) -> str:
    """The text that the model adds to `prompt`, `num_tokens` long; temperature 0 takes the likeliest token each time.

    Each token costs one forward pass over the model's whole sequence length, which fits every layout and needs no cache.
    A collective call; every rank returns the same text.
    """
    length = run.config.model.sequence_length
    ids = run.tokenizer.encode(prompt)
    generator = torch.Generator().manual_seed(run.config.training.seed)
    start = len(ids)
    for _ in range(num_tokens):
        window = ids[-length:] or [run.tokenizer.eod]
        tokens = torch.full((1, length), run.tokenizer.eod, dtype=torch.long)
        tokens[0, : len(window)] = torch.tensor(window)
        logits = run.model.forward({"tokens": tokens})
        ids.append(_choose(run, logits, len(window) - 1, temperature, top_p, generator))
    return run.tokenizer.decode(ids[start:])


def _choose(run: Run, logits: torch.Tensor | None, position: int, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Pick a token on the last stage and tell it to every rank."""
    topology = run.topology
    token = torch.zeros(1, dtype=torch.long, device=topology.device)
    if logits is not None:
        row = logits[0, position]
        if topology.tensor_size > 1:
            parts = [torch.empty_like(row) for _ in range(topology.tensor_size)]
            dist.all_gather(parts, row.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            row = torch.cat(parts)
        row = row[: run.vocab_size].cpu()
        token[0] = int(row.argmax()) if temperature == 0 else _sample(row / temperature, top_p, generator)
    dist.broadcast(token, src=topology.world_size - 1)  # the last rank is on the last pipeline stage in every layout
    return int(token)


def _sample(scores: torch.Tensor, top_p: float, generator: torch.Generator) -> int:
    """Draw from the smallest set of tokens whose probabilities reach `top_p` (nucleus sampling, Holtzman et al. 2020)."""
    probabilities, order = scores.softmax(dim=0).sort(descending=True)
    before = probabilities.cumsum(dim=0) - probabilities
    probabilities = torch.where(before < top_p, probabilities, 0.0)
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
