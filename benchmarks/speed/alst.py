"""DeepSpeed's ALST (Arctic Long Sequence Training, arXiv 2506.13996) on one GPU, for
benchmarks/speed/longest_context.py.

Hugging Face's Llama with torch's causal attention and no mask, under ZeRO-3 in bf16, its optimizer on the host. The
features are those of ArcticTraining: checkpoints of layers, their inputs on the host (pinned here, so faster than
there), the tiled loss (1 GiB of fp32 logits a tile) and the tiled feed-forward layers (a tile of as many tokens as
channels), both DeepSpeed's own. Ulysses, which exchanges heads between ranks, has nothing to do on one. AdamW is
torch's fused one on the host, since DeepSpeed's is compiled at its first use.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

FEATURES = ("checkpoints", "layer inputs on host", "tiled loss", "tiled feed-forward")
TILE_OF_LOGITS = 2**30  # bytes in fp32
ELEMENT_ON_HOST = 16  # bytes a parameter: fp32 master weight, two moments and gradient


class HuggingFaceLlama(torch.nn.Module):
    """A Llama with a loss; `num_features` of FEATURES are in use, and may change between steps."""

    def __init__(self, sizes: dict[str, Any], device: torch.device) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.num_features = 0
        # It must not shorten a text, nor make a mask or a cache.
        settings = LlamaConfig(**sizes, attn_implementation="sdpa", use_cache=False)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with device:
                self.llama: Any = LlamaForCausalLM(settings)
        finally:
            torch.set_default_dtype(before)
        self.llama.gradient_checkpointing_enable()
        for module in self.llama.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = self._checkpointed
            if type(module).__name__ == "LlamaMLP":
                module.forward = functools.partial(self._feed_forward, module)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss, fp32 [], of token ids [1, s] and those that follow each."""
        hidden = self.llama.model(input_ids=tokens, use_cache=False).last_hidden_state
        count = labels.numel()
        if self.num_features <= FEATURES.index("tiled loss"):
            logits = self.llama.lm_head(hidden).float()
            return F.cross_entropy(logits.view(count, -1), labels.view(-1))
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

        def of_tile(llama: Any, token_rows: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            logits = llama.lm_head(token_rows).float()
            return F.cross_entropy(logits, following, reduction="sum") / count

        tiles = math.ceil(4 * count * self.llama.config.vocab_size / TILE_OF_LOGITS)
        weights = [self.llama.lm_head.weight]
        loss: torch.Tensor = TiledFusedLogitsLoss.apply(
            of_tile, self.llama, hidden, labels, None, tiles, weights, "sum"
        )
        return loss

    def _checkpointed(self, layer: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        run = functools.partial(checkpoint, layer, *inputs, use_reentrant=True, preserve_rng_state=False, **named)
        if self.num_features <= FEATURES.index("layer inputs on host"):
            return run()
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return run()

    def _feed_forward(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        def whole(layer: Any, token_rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = layer.down_proj(
                layer.act_fn(layer.gate_proj(token_rows)) * layer.up_proj(token_rows)
            )
            return result

        if self.num_features <= FEATURES.index("tiled feed-forward"):
            return whole(layer, hidden)
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

        weights = [layer.down_proj.weight, layer.gate_proj.weight, layer.up_proj.weight]
        output: torch.Tensor = TiledMLP.apply(whole, layer, hidden, math.ceil(hidden.size(1) / hidden.size(2)), weights)
        return output


class AlstSide:
    """One DeepSpeed engine for all features and lengths; a new one after a failed step, which an engine does not
    survive."""

    features = FEATURES

    def __init__(self, sizes: dict[str, Any], device: torch.device, weights_on_host: bool) -> None:
        import deepspeed

        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False)
        self.device, self._sizes, self._weights_on_host = device, sizes, weights_on_host
        self._is_whole = True
        self._engine: Any = None
        self._model, self._engine = self._build()
        self.num_parameters = sum(getattr(each, "ds_numel", each.numel()) for each in self._model.parameters())

    def host_bytes(self, feature: int, length: int) -> int:
        """Return the bytes of state, of the weights if they are on the host, and of the inputs of all layers."""
        element = ELEMENT_ON_HOST + (2 if self._weights_on_host else 0)
        layers, hidden = self._sizes["num_hidden_layers"], self._sizes["hidden_size"]
        return element * self.num_parameters + (2 * layers * hidden * length if feature >= 1 else 0)

    def begin(self, feature: int, length: int) -> Callable[[], float]:
        """Return a function that takes a step of `length` tokens with the first `feature + 1` features and returns its
        loss."""
        if self._engine is None:
            self._model, self._engine = self._build()
        self._model.num_features = feature + 1
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, self._sizes["vocab_size"], (1, length + 1), generator=generator)
        given, following = tokens[:, :-1].to(self.device), tokens[:, 1:].contiguous().to(self.device)

        def step() -> float:
            self._is_whole = False
            loss = self._engine(given, following)
            self._engine.backward(loss)
            self._engine.step()
            self._is_whole = True
            return float(loss.detach())

        return step

    def end(self) -> None:
        """Clean up after steps, also after failed ones."""
        if not self._is_whole:
            engine, self._engine, self._model = self._engine, None, None
            self._is_whole = True
            engine.destroy()

    def close(self) -> None:
        """Release the engine and leave the job."""
        engine, self._engine, self._model = self._engine, None, None
        if engine is not None:
            engine.destroy()
        torch.distributed.destroy_process_group()

    def _build(self) -> tuple[Any, Any]:
        import deepspeed

        torch.manual_seed(0)
        model = HuggingFaceLlama(self._sizes, self.device)
        settings = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        optimizer = torch.optim.AdamW(model.parameters(), **settings)  # type: ignore[arg-type]
        on_host = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        zero = {
            "stage": 3,
            "offload_optimizer": on_host,
            # On one rank a gathered weight is a copy: as few of them as DeepSpeed takes.
            "stage3_max_live_parameters": 10**8,
            "stage3_prefetch_bucket_size": 10**7,
            "reduce_bucket_size": 10**8,
            "overlap_comm": True,
            **({"offload_param": on_host} if self._weights_on_host else {}),
        }
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        engine.train()
        return model, engine
