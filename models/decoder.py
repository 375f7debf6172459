"""A GPT that continues text: the same weights as the training model, run without autograd and with a key-value cache.

Megatron-core's modules spend more time per call than one token's products take. This file reads the weights of the model chunks by
their logical names and applies them with a handful of torch calls a layer; only experts that a token chose are computed. It runs in
every layout: tensor ranks sum their parts, expert ranks compute their own experts for all tokens, pipeline ranks hand on the hidden
state. All ranks of a job hold the same tokens. A capacity factor is not applied: nothing is dropped.

Shapes: b rows of text, s tokens of a row, T = b * s tokens, H hidden size, g key/value heads of this rank, r query heads for each of them,
d channels of a head, L tokens that the cache can hold, V vocabulary, k experts of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state

from configs import derived
from configs.schema import Config, ConfigError
from models.norm import LATENT_NORM_EPSILON
from models.weights import logical_tensors

Group: TypeAlias = dist.ProcessGroup | None
Weights = dict[str, torch.Tensor]


@dataclass
class Cache:
    """Keys `[b, g, L, d]` and values of each layer of this rank, and the number of tokens that each row holds."""

    length: int  # L
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    """What all layers share in one forward pass of T = rows * new tokens."""

    rows: int
    new: int
    cos: torch.Tensor | None  # of each new token: [s, 1, 1, d], or [b, 1, 1, 1, d] for one token a row at different places
    sin: torch.Tensor | None
    cache: Cache | None = None
    start: int | None = None  # where the one new token of every row goes; None: `positions` says it
    positions: torch.Tensor | None = None  # [b]
    end: int = 0  # cached tokens that attention reads
    mask: torch.Tensor | None = None  # bool [b, 1, 1, end], True = read; None: all

    @property
    def is_prefill(self) -> bool:
        return self.end == 0

    def remember(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values `[b, g, s, d]` into the cache; those that the new tokens attend to."""
        cache = self.cache
        if cache is None:
            return key, value
        if self.is_prefill:
            # Zeros, because a masked slot still enters a product: with weight 0, which leaves NaN what it is.
            for held, new in ((cache.keys, key), (cache.values, value)):
                held[layer] = new.new_zeros(*new.shape[:2], cache.length, new.size(3))
                held[layer][:, :, : self.new] = new
            return key, value
        keys, values = cache.keys[layer], cache.values[layer]
        if self.start is not None:
            keys.narrow(2, self.start, 1).copy_(key)
            values.narrow(2, self.start, 1).copy_(value)
        else:
            rows = torch.arange(self.rows, device=key.device)
            keys[rows, :, self.positions] = key.squeeze(2)
            values[rows, :, self.positions] = value.squeeze(2)
        return keys.narrow(2, 0, self.end), values.narrow(2, 0, self.end)


class Decoder:
    """Runs the model chunks of this rank on token ids. It reads the chunks' own storage: later changes of the weights count.

    Raises ConfigError for a model that does not generate text. Under parallelism every method is a collective call, with the same
    arguments on all ranks; each returns the same on all ranks.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], config: Config, vocab_size: int) -> None:
        if config.model.family != "gpt":
            raise ConfigError(
                f"model.family ({config.model.family}) does not continue text: it fills in masked words. Try python -m training.fill_mask."
            )
        weights = {item.name: item.local.detach() for item in logical_tensors(chunks)}
        self.vocab_size = vocab_size
        self.max_length = config.model.sequence_length if config.model.position_embedding == "learned" else None
        self.device = next(iter(weights.values())).device
        self._tensor_group = _if_split(parallel_state.get_tensor_model_parallel_group())
        self._pipeline_group = _if_split(parallel_state.get_pipeline_model_parallel_group())
        self._hidden_size, self._dtype = config.model.hidden_size, next(iter(weights.values())).dtype
        self._embedding = weights.get("embedding.word_embeddings.weight")
        self._position_embedding = weights.get("embedding.position_embeddings.weight")
        self._output = weights.get("output_layer.weight", self._embedding)
        if self._output is not None and self._tensor_group is None:
            self._output = self._output[:vocab_size]
        self._final_norm = _norm(weights, "decoder.final_layernorm", config) if "decoder.final_layernorm.weight" in weights else None
        self._rotary = _Rotary(config, self.device) if config.model.position_embedding == "rope" else None
        held = {int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers.")}
        self._layers = {layer: _Layer(layer, weights, config, self._tensor_group) for layer in held}
        self._stages = self._find_stages(config.model.num_layers)

    def prefill(self, tokens: torch.Tensor, lengths: Sequence[int], cache: Cache | None) -> torch.Tensor:
        """Read the first tokens of each row, int64 `[b, s]`, of which row i has `lengths[i]` (what follows them is ignored), into an
        empty cache. Returns the logits after each row's last token, fp32 `[b, V]`."""
        hidden = self._run(tokens, self._first_step(tokens, cache))
        if cache is not None:
            cache.counts = list(lengths)
        if hidden is not None:
            last = torch.tensor(lengths, device=self.device) - 1
            hidden = hidden.view(*tokens.shape, -1)[torch.arange(len(last), device=self.device), last]
        return self._logits(hidden, len(lengths))

    def decode(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Add one token to each row, int64 `[b]`, and return the logits after it, fp32 `[b, V]`."""
        counts = cache.counts
        longest, alike = max(counts), min(counts) == max(counts)
        positions = mask = None
        if not alike:
            positions = torch.tensor(counts, device=self.device)
            mask = (torch.arange(longest + 1, device=self.device) <= positions[:, None])[:, None, None]
        cos = sin = None
        if self._rotary is not None:
            cos, sin = self._rotary.at(longest + 1, slice(longest, longest + 1) if positions is None else positions[:, None])
        start = longest if alike else None
        step = _Step(len(tokens), 1, cos, sin, cache, start, positions, longest + 1, mask)
        logits = self._logits(self._run(tokens[:, None], step), len(tokens))
        cache.counts = [count + 1 for count in counts]
        return logits

    def score(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each token after the ones before it, and whether it is the likeliest: fp32 and bool `[b, s - 1]`."""
        hidden = self._run(tokens, self._first_step(tokens, None))
        num_rows, length = tokens.shape
        if hidden is not None:
            hidden = hidden.view(num_rows, length, -1)[:, :-1].reshape(num_rows * (length - 1), -1)
        targets = tokens[:, 1:].reshape(-1).to(self.device)
        log_probs, greedy = [], []
        for begin in range(0, len(targets), SCORED_AT_ONCE):  # logits are the largest tensor by far
            part = targets[begin : begin + SCORED_AT_ONCE]
            logits = self._logits(None if hidden is None else hidden[begin : begin + SCORED_AT_ONCE], len(part))
            log_probs.append(-F.cross_entropy(logits, part, reduction="none"))
            greedy.append(logits.argmax(dim=1) == part)
        shape = (num_rows, length - 1)
        return torch.cat(log_probs).view(shape), torch.cat(greedy).view(shape)

    def _first_step(self, tokens: torch.Tensor, cache: Cache | None) -> _Step:
        cos = sin = None
        if self._rotary is not None:
            cos, sin = self._rotary.at(tokens.size(1), slice(0, tokens.size(1)))
        return _Step(tokens.size(0), tokens.size(1), cos, sin, cache)

    def _run(self, tokens: torch.Tensor, step: _Step) -> torch.Tensor | None:
        """The final hidden states [T, H], normalized, on the ranks of the last pipeline stage; None on the others."""
        hidden = self._embed(tokens.to(self.device), step) if self._stages[0].is_mine else None
        for stage in self._stages:
            if stage.is_mine:
                if hidden is None:
                    hidden = torch.empty(step.rows * step.new, self._hidden_size, dtype=self._dtype, device=self.device)
                    dist.recv(hidden, group=self._pipeline_group, group_src=stage.comes_from)
                assert hidden is not None
                for layer in stage.layers:
                    hidden = self._layers[layer](hidden, step)
                if stage.goes_to is not None:
                    dist.send(hidden, group=self._pipeline_group, group_dst=stage.goes_to)
                    hidden = None
        return None if hidden is None or self._final_norm is None else self._final_norm(hidden)

    def _embed(self, tokens: torch.Tensor, step: _Step) -> torch.Tensor:
        weight = self._embedding
        assert weight is not None
        flat = tokens.reshape(-1)
        if self._tensor_group is None:
            hidden = F.embedding(flat, weight)
        else:
            local = flat - self._tensor_group.rank() * len(weight)
            elsewhere = (local < 0) | (local >= len(weight))
            hidden = F.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere[:, None], 0.0)
            dist.all_reduce(hidden, group=self._tensor_group)
        if self._position_embedding is not None:
            if step.is_prefill:
                positions = self._position_embedding[: step.new].repeat(step.rows, 1)
            else:
                positions = self._position_embedding[step.start if step.positions is None else step.positions]
            hidden = hidden + positions
        return hidden

    def _logits(self, hidden: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
        if hidden is not None:
            assert self._output is not None
            logits = F.linear(hidden, self._output).float()
            logits = _gather(logits, self._tensor_group)[:, : self.vocab_size].contiguous()
        else:
            logits = torch.empty(num_tokens, self.vocab_size, device=self.device)
        if self._pipeline_group is not None:
            dist.broadcast(logits, group=self._pipeline_group, group_src=self._pipeline_group.size() - 1)
        return logits

    def _find_stages(self, num_layers: int) -> list[_Stage]:
        """Runs of layers that one pipeline rank holds, in the order of the model; with virtual stages a rank has several."""
        if self._pipeline_group is None:
            return [_Stage(range(num_layers), True, None, None)]
        rank = self._pipeline_group.rank()
        held: list[list[int] | None] = [None] * self._pipeline_group.size()
        dist.all_gather_object(held, sorted(self._layers), group=self._pipeline_group)
        owner = {layer: i for i, layers in enumerate(held) for layer in layers or []}
        runs = [(who, list(layers)) for who, layers in groupby(range(num_layers), owner.__getitem__)]
        comes_from = [None, *(who for who, _ in runs[:-1])]
        goes_to = [*(who for who, _ in runs[1:]), None]
        return [_Stage(layers, who == rank, before, after) for (who, layers), before, after in zip(runs, comes_from, goes_to, strict=True)]


@dataclass(frozen=True)
class _Stage:
    layers: Sequence[int]
    is_mine: bool
    comes_from: int | None  # rank in the pipeline group
    goes_to: int | None


SCORED_AT_ONCE = 1024  # tokens whose logits exist at the same time


# ---------------------------------------------------------------------------------------------------------------------
# Parts of a layer. Each is made once from the weights and then called on [T, H].
# ---------------------------------------------------------------------------------------------------------------------

Apply = Callable[[torch.Tensor], torch.Tensor]


class _Layer:
    def __init__(self, layer: int, weights: Weights, config: Config, group: Group) -> None:
        prefix = f"decoder.layers.{layer}."
        of_layer = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        self.attention_norm = _norm(of_layer, "input_layernorm", config)
        kind: type[_Attention | _LatentAttention] = _LatentAttention if config.model.attention == "latent" else _Attention
        self.attention = kind(layer, of_layer, config, group)
        self.feed_forward_norm = _norm(of_layer, "pre_mlp_layernorm", config)
        self.feed_forward: Apply
        if derived.moe_layer_pattern(config)[layer]:
            self.feed_forward = _Experts(of_layer, config, group)
        else:
            self.feed_forward = _feed_forward(of_layer, "mlp.", config, group)

    def __call__(self, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), step)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class _Attention:
    """Grouped-query attention. Megatron keeps each group's rows together: its r queries, its key, its value."""

    def __init__(self, layer: int, weights: Weights, config: Config, group: Group) -> None:
        self.layer = layer
        self.weight, self.bias = weights["self_attention.linear_qkv.weight"], weights.get("self_attention.linear_qkv.bias")
        self.d = derived.head_dim(config)
        self.r = config.model.num_attention_heads // derived.num_query_groups(config)
        self.g = self.weight.size(0) // ((self.r + 2) * self.d)
        self.project = _row_linear(weights, "self_attention.linear_proj", group)
        self.query_norm = self.key_norm = None
        if config.model.qk_norm:
            make = _norm if config.model.qk_norm_over == "head" else functools.partial(_all_heads_norm, group)
            self.query_norm = make(weights, "self_attention.q_layernorm", config)
            self.key_norm = make(weights, "self_attention.k_layernorm", config)

    def __call__(self, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        r = self.r
        qkv = F.linear(hidden, self.weight, self.bias).view(step.rows, step.new, self.g, r + 2, self.d)
        if self.query_norm is not None and self.key_norm is not None:
            query_key = torch.cat([self.query_norm(qkv[..., :r, :]), self.key_norm(qkv[..., r : r + 1, :])], dim=-2)
        else:
            query_key = qkv[..., : r + 1, :]
        if step.cos is not None:
            query_key = _rotate(query_key, step.cos, step.sin)
        query, key, value = query_key[..., :r, :], query_key[..., r, :].transpose(1, 2), qkv[..., r + 1, :].transpose(1, 2)
        key, value = step.remember(self.layer, key, value)
        if step.is_prefill:
            query = query.flatten(2, 3).transpose(1, 2)
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=r > 1)
            output = output.transpose(1, 2)
        else:
            # The r queries of a group read the same keys: to the kernel they are r tokens of one head.
            output = F.scaled_dot_product_attention(query.squeeze(1), key, value, attn_mask=step.mask)
        return self.project(output.reshape(len(hidden), -1))


class _LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). The cache holds whole keys and values."""

    def __init__(self, layer: int, weights: Weights, config: Config, group: Group) -> None:
        of_attention = {name.removeprefix("self_attention."): tensor for name, tensor in weights.items()}
        model = config.model
        self.layer, self.group = layer, group
        self.plain, self.rotary, self.value = derived.head_dim(config), model.rotary_head_dim, model.value_head_dim
        self.kv_rank = model.kv_lora_rank
        self.query_down = of_attention.get("linear_q_down_proj.weight")
        self.query_up = of_attention["linear_q_proj.weight" if self.query_down is None else "linear_q_up_proj.weight"]
        self.key_value_down, self.key_value_up = of_attention["linear_kv_down_proj.weight"], of_attention["linear_kv_up_proj.weight"]
        if self.query_down is not None:
            self.query_norm = _norm(of_attention, "q_layernorm", config, LATENT_NORM_EPSILON)
        self.key_value_norm = _norm(of_attention, "kv_layernorm", config, LATENT_NORM_EPSILON)
        self.project = _row_linear(of_attention, "linear_proj", group)

    def __call__(self, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        query_input = hidden
        if self.query_down is not None:
            query_input = self.query_norm(_gather(F.linear(hidden, self.query_down), self.group))
        shape = (step.rows, step.new)
        query = F.linear(query_input, self.query_up).view(*shape, -1, self.plain + self.rotary)
        compressed, rotary_key = _gather(F.linear(hidden, self.key_value_down), self.group).split([self.kv_rank, self.rotary], dim=1)
        key_value = F.linear(self.key_value_norm(compressed), self.key_value_up).view(*shape, -1, self.plain + self.value)
        plain_query, rotary_query = query.split([self.plain, self.rotary], dim=-1)
        plain_key, value = key_value.split([self.plain, self.value], dim=-1)
        # One head more: the key that all heads share turns like their queries.
        turned = _deinterleaved(torch.cat([rotary_query, rotary_key.view(*shape, 1, self.rotary)], dim=2))
        turned = _rotate(turned[..., None, :], step.cos, step.sin).squeeze(3)
        query = torch.cat([plain_query, turned[:, :, :-1]], dim=-1).transpose(1, 2)
        key = torch.cat([plain_key, turned[:, :, -1:].expand_as(rotary_query)], dim=-1).transpose(1, 2)
        key, value = step.remember(self.layer, key, value.transpose(1, 2))
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=step.mask, is_causal=step.is_prefill)
        return self.project(output.transpose(1, 2).reshape(len(hidden), -1))


class _Experts:
    """The router's choice, the experts of this rank for the tokens that chose them, and the shared expert."""

    def __init__(self, weights: Weights, config: Config, group: Group) -> None:
        self.moe = config.moe
        self.router = weights["mlp.router.weight"].float()
        self.expert_bias = weights.get("mlp.router.expert_bias")
        held = {int(name.split(".")[2]) for name in weights if name.startswith("mlp.experts.")}
        self.experts = {expert: _feed_forward(weights, f"mlp.experts.{expert}.", config, None) for expert in sorted(held)}
        self.group = _if_split(parallel_state.get_expert_tensor_and_model_parallel_group())
        has_shared = "mlp.shared_experts.linear_fc1.weight" in weights
        self.shared = _feed_forward(weights, "mlp.shared_experts.", config, group) if has_shared else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        probs, chosen = self.route(hidden)
        if len(hidden) == 1:
            output = torch.zeros_like(hidden)
            for expert, weight in zip(chosen[0].tolist(), probs[0].tolist(), strict=True):
                if expert in self.experts:
                    output.add_(self.experts[expert](hidden), alpha=weight)
        else:
            output = self._all_tokens(hidden, probs.to(hidden.dtype), chosen)
        if self.group is not None:
            dist.all_reduce(output, group=self.group)
        return output if self.shared is None else output + self.shared(hidden)

    def _all_tokens(self, hidden: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)  # pairs of a token and an expert, by expert
        counts = torch.bincount(flat, minlength=self.moe.num_experts or 0).tolist()
        rows = hidden[order // chosen.size(1)].split(counts)
        outputs = [
            self.experts[expert](part) if expert in self.experts else torch.zeros_like(part)
            for expert, part in enumerate(rows)
            if len(part)
        ]
        by_token = torch.cat(outputs)[order.argsort()].view(*chosen.shape, -1)
        return torch.bmm(probs[:, None], by_token).squeeze(1)

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (fp32) and numbers of each token's experts `[T, k]`: Megatron-core's topk_routing_with_score_function."""
        moe = self.moe
        scores = F.linear(hidden.float(), self.router)
        if moe.router_score == "sigmoid":
            scores = scores.sigmoid()
        elif not moe.normalize_top_k:
            scores = scores.softmax(dim=1)
        ranking = scores if self.expert_bias is None else scores + self.expert_bias
        if moe.num_groups is not None and moe.group_top_k is not None:
            ranking = _limit_to_groups(ranking, moe.num_groups, moe.group_top_k, moe.top_k)
        chosen = ranking.topk(moe.top_k, dim=1).indices
        probs = scores.gather(1, chosen)
        if moe.router_score == "softmax" and moe.normalize_top_k:
            probs = probs.softmax(dim=1)
        elif moe.router_score == "sigmoid" and moe.top_k > 1:
            probs = probs / (probs.sum(dim=1, keepdim=True) + 1e-20)
        return probs * (moe.routed_scaling_factor or 1.0), chosen


def _limit_to_groups(scores: torch.Tensor, num_groups: int, group_top_k: int, top_k: int) -> torch.Tensor:
    """Scores with -inf outside the best groups of experts (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""
    by_group = scores.view(len(scores), num_groups, -1)
    best = by_group.topk(top_k // group_top_k, dim=2).values.sum(dim=2).topk(group_top_k, dim=1).indices
    excluded = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, False)
    return by_group.masked_fill(excluded[..., None], float("-inf")).view_as(scores)


class _Rotary:
    """Cosines and sines of rotary positions (Su et al. 2021), kept for as many positions as were asked for."""

    def __init__(self, config: Config, device: torch.device) -> None:
        size = int(derived.head_dim(config) * config.model.rotary_fraction)
        if config.model.attention == "latent":
            size = config.model.rotary_head_dim
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        self.frequencies = 1.0 / config.model.rotary_base**steps
        self.cos = self.sin = torch.empty(0, device=device)

    def at(self, length: int, positions: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 cosines and signed sines `[*positions, 1, 1, d]`; all positions are below `length`."""
        if len(self.cos) < length:
            angles = torch.outer(torch.arange(2 * length, dtype=torch.float32, device=self.frequencies.device), self.frequencies)
            self.cos = torch.cat([angles.cos(), angles.cos()], dim=1)[:, None, None]
            # The sign of rotate_half([a, b]) = [-b, a], so that the halves need only be swapped.
            self.sin = torch.cat([-angles.sin(), angles.sin()], dim=1)[:, None, None]
        return self.cos[positions], self.sin[positions]


def _deinterleaved(x: torch.Tensor) -> torch.Tensor:
    """DeepSeek's pairs of channels are neighbours; here they stand half the channels apart."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def _rotate(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
    """Turn the first channels of `x` [..., d]; `cos` and `sin` say how many."""
    assert cos is not None and sin is not None
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    size = cos.size(-1)
    if size < x.size(-1):
        return torch.cat([_rotate(x[..., :size], cos, sin), x[..., size:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(size // 2, dims=-1), sin)


def _norm(weights: Weights, name: str, config: Config, epsilon: float | None = None) -> Apply:
    weight, bias, epsilon = weights[f"{name}.weight"], weights.get(f"{name}.bias"), epsilon or config.model.norm_epsilon
    shape = weight.shape
    if config.model.normalization == "layernorm":
        return lambda x: F.layer_norm(x, shape, weight, bias, epsilon)
    return lambda x: F.rms_norm(x, shape, weight, epsilon)


def _all_heads_norm(group: Group, weights: Weights, name: str, config: Config) -> Apply:
    """RMSNorm over all heads together: queries `[b, s, g, r, d]` or keys `[b, s, g, 1, d]` of this rank."""
    weight, epsilon = weights[f"{name}.weight"], config.model.norm_epsilon

    def apply(x: torch.Tensor) -> torch.Tensor:
        if group is None:
            return F.rms_norm(x.flatten(2), weight.shape, weight, epsilon).view(x.shape)
        squares = x.float().square().sum(dim=(2, 3, 4), keepdim=True)
        dist.all_reduce(squares, group=group)
        scaled = x.float() * torch.rsqrt(squares / len(weight) + epsilon)
        return scaled.to(x.dtype) * weight.chunk(group.size())[group.rank()].view(x.shape[2:])

    return apply


def _gather(part: torch.Tensor, group: Group) -> torch.Tensor:
    """`[T, width]` from the columns `[T, width / ranks]` of the tensor ranks."""
    if group is None:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _row_linear(weights: Weights, name: str, group: Group) -> Apply:
    """A linear layer whose input is split over `group`: the parts are summed, then the bias is added once."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if group is None:
        return lambda x: F.linear(x, weight, bias)

    def apply(x: torch.Tensor) -> torch.Tensor:
        output = F.linear(x, weight)
        dist.all_reduce(output, group=group)
        return output if bias is None else output.add_(bias)

    return apply


def _feed_forward(weights: Weights, prefix: str, config: Config, group: Group) -> Apply:
    weight, bias = weights[f"{prefix}linear_fc1.weight"], weights.get(f"{prefix}linear_fc1.bias")
    project = _row_linear(weights, f"{prefix}linear_fc2", group)
    if config.model.activation == "swiglu":

        def apply(x: torch.Tensor) -> torch.Tensor:
            gate, up = F.linear(x, weight, bias).chunk(2, dim=1)
            return project(F.silu(gate).mul_(up))

        return apply
    approximate = "tanh" if config.model.activation == "gelu_tanh" else "none"
    return lambda x: project(F.gelu(F.linear(x, weight, bias), approximate=approximate))


def _if_split(group: dist.ProcessGroup) -> Group:
    """The group, or None where it has one rank and nothing needs to be sent."""
    return group if group.size() > 1 else None
