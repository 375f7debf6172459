"""Published figures of trainings on clusters, and the configs of those that this project can train. Each is a fact from
the source that it names, not a measurement of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.compose import compose
from configs.schema import Config
from configs.validate import validate
from simulator.clock.hardware import Hardware, load_hardware
from simulator.clock.passes import MIXTRAIN, Recipe

FLAT = "FLAT, arXiv 2609.14306"
MOP = "MoP, arXiv 2607.01844, table 2"
SC21 = "Megatron-LM, SC'21, arXiv 2104.04473, table 1"
BRIDGE = "Megatron-Bridge, docs/performance-summary.md, 25.11 container"
MCORE = "Megatron-core, megatron/core/transformer/moe/README.md"
APERTUS = "Megatron-LM pull requests 6491 and 6494, FFGGSSJJ/moe_model_architecture"

# Megatron-LM before FlashAttention: scores of a whole head, gradients in half precision reduced behind the passes.
MEGATRON_2021 = Recipe(
    fused_attention=False, gradient_bytes=2, overlaps_reductions=False, hides_tensor=False, early_loss_grads=False
)


@dataclass(frozen=True)
class PublishedFact:
    """A figure that somebody published. `unit`: tokens/s/GPU, TFLOP/s/GPU or s of an update; `overrides`: the config;
    `taken`: what the source does not print; `figures`: of the machine, where theirs is another than the file's;
    `missing`: why nothing is predicted; `recipe`: what their program does that a config does not say."""

    name: str
    source: str
    published: float
    unit: str
    hardware: str = ""
    ranks: int = 0
    overrides: Sequence[str] = ()
    taken: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    missing: str = ""
    own_flops: float | None = None  # floating-point operations of a step as the source counts them
    recipe: Recipe = MIXTRAIN

    def config(self) -> Config:
        """The composed config, checked for the ranks. Raises ConfigError."""
        config = compose([*OFF, *self.overrides])
        validate(config, self.ranks)
        return config

    def machine(self) -> Hardware:
        """The machine's figures. Raises ConfigError."""
        found = load_hardware(self.hardware)
        return found.with_values(self.figures, self.source) if self.figures else found


OFF = ("sample.prompts=[]", "training.eval_interval=0", "training.device=cuda", "training.precision=bf16")


def keys(**values: Any) -> list[str]:
    """Overrides of `section__key=value`."""
    return [f"{name.replace('__', '.')}={'null' if value is None else value}" for name, value in values.items()]


def gpt(hidden: int, layers: int, heads: int, vocab: int, length: int, **more: Any) -> list[str]:
    """A GPT of these sizes."""
    sizes = keys(
        model__num_layers=layers,
        model__hidden_size=hidden,
        model__num_attention_heads=heads,
        model__vocab_size=vocab,
        model__sequence_length=length,
    )
    return ["model=gpt2_124m", *sizes, *keys(**more)]


def sc21(
    billions: float, hidden: int, layers: int, heads: int, layout: tuple[int, int], run: tuple[int, int, int]
) -> PublishedFact:
    """A row of the weak-scaling table: layout is tensor and pipeline; run is GPUs, batch and TFLOP/s a GPU."""
    (tensor, pipeline), (ranks, batch, rate) = layout, run
    length, vocab = 2048, 51200
    chunks = {2: 4, 4: 3, 8: 5, 16: 3, 35: 3, 64: 2}.get(pipeline)
    micro = 4 if pipeline == 1 else 1
    flops = 96 * batch * length * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))
    return PublishedFact(
        f"GPT {billions:g}B on {ranks} A100, TP{tensor} PP{pipeline}",
        SC21,
        rate,
        "TFLOP/s/GPU",
        "a100_8x",
        ranks,
        gpt(
            hidden,
            layers,
            heads,
            vocab,
            length,
            model__ffn_hidden_size=4 * hidden,
            model__hidden_dropout=0.1,
            parallel__tensor=tensor,
            parallel__pipeline=pipeline,
            parallel__virtual_pipeline=chunks,
            training__global_batch_size=batch,
            training__micro_batch_size=micro,
            training__recompute="full",
            optimizer__distributed="false",
            parallel__overlap_param_gather="false",
        ),
        f"micro-batch {micro}" + (f", {chunks} chunks a stage" if chunks else ""),
        {"between.rate": 2.25e10, "between.shared_by": 1},  # Selene: 8 cards of 200 Gbit/s a node
        own_flops=flops,
        recipe=MEGATRON_2021,
    )


def gpt_oss(layers: int, experts: int, length: int, **more: Any) -> list[str]:
    """The shapes of gpt-oss, without its windows of 128 in every other layer, sinks and clamped activation."""
    return [
        "model=qwen3_30b_a3b",
        *keys(
            model__num_layers=layers,
            model__hidden_size=2880,
            model__num_attention_heads=64,
            model__num_query_groups=8,
            model__head_dim=64,
            model__qk_norm="false",
            model__vocab_size=201088,
            model__sequence_length=length,
            moe__num_experts=experts,
            moe__top_k=4,
            moe__ffn_hidden_size=2880,
        ),
        *keys(**more),
    ]


def flat(name: str, layers: int, ranks: int, length: int, published: float) -> PublishedFact:
    """A row of FLAT's whole trainings: Kimi-K2's widths, experts over all ranks, sequences over 16."""
    return PublishedFact(
        f"{name}, {length // 1024}K tokens on {ranks} H200",
        f"{FLAT}, end to end",
        published,
        "tokens/s/GPU",
        "h200_8x",
        ranks,
        [
            "model=deepseek_v3_like",
            *keys(
                model__num_layers=layers,
                model__num_attention_heads=64,
                model__vocab_size=200000,
                model__sequence_length=length,
                model__num_query_groups=None,
                model__attention="latent",
                model__q_lora_rank=1536,
                model__kv_lora_rank=512,
                model__rotary_head_dim=64,
                model__value_head_dim=128,
                moe__num_experts=384,
                moe__num_groups=None,
                moe__group_top_k=None,
                moe__layers=1,
                parallel__expert=ranks,
                parallel__context=16,
                parallel__context_heads=16,
                training__global_batch_size=ranks // 16,
                training__micro_batch_size=1,
                training__recompute="full",
                training__activation_offload="auto",
                optimizer__state_device="host",
                optimizer__engine="device_stream",
            ),
        ],
        "sequences over 16 ranks by heads, 64 heads of latent attention, a dense part on each rank",
    )


def mixtral(wide: bool, rate: float, source: str, ranks: int, layout: Sequence[str], taken: str) -> PublishedFact:
    """Mixtral 8x7B or 8x22B in Megatron-core's reference layout."""
    large = keys(
        model__num_layers=56,
        model__hidden_size=6144,
        model__ffn_hidden_size=16384,
        model__num_attention_heads=48,
        model__num_query_groups=8,
        moe__ffn_hidden_size=16384,
    )
    return PublishedFact(
        f"Mixtral 8x{22 if wide else 7}B on {ranks} H100",
        source,
        rate,
        "TFLOP/s/GPU",
        "h100_8x",
        ranks,
        [
            "model=mixtral_8x7b",
            *(large if wide else []),
            *keys(
                model__vocab_size=32000,
                model__sequence_length=4096,
                training__global_batch_size=256,
                training__micro_batch_size=1,
            ),
            *layout,
        ],
        taken,
    )


WITHOUT_SHAPES = "their exchange sends a row for each token and expert: see benchmarks/speed/apertus_order.py"
FSDP = "weights sharded over all ranks (FSDP2) are no layout of this project yet"

OFF_THE_DEVICE: dict[str, Any] = {
    "parallel__expert": 8,
    "training__global_batch_size": 8,
    "training__micro_batch_size": 1,
    "training__recompute": "full",
    "optimizer__state_device": "host",
    "optimizer__early_update": "never",
}

FACTS: list[PublishedFact] = [
    PublishedFact(
        "update of gpt-oss-20b streamed from the host, 8 H200",
        f"{FLAT}, table of the optimizer",
        1.93,
        "s of an update",
        "h200_8x",
        8,
        gpt_oss(
            24,
            32,
            4096,
            **OFF_THE_DEVICE,
            optimizer__engine="device_stream",
            optimizer__bucket_parameters=100_000_000,
        ),
        "experts over the 8 ranks",
    ),
    PublishedFact(
        "update of gpt-oss-20b on the host, 8 H200",
        f"{FLAT}, table of the optimizer",
        3.95,
        "s of an update",
        "h200_8x",
        8,
        gpt_oss(
            24,
            32,
            4096,
            **OFF_THE_DEVICE,
            optimizer__engine="host",
        ),
        "experts over the 8 ranks; host.update of h200_8x is made of this very figure",
    ),
    PublishedFact(
        "slots of that update",
        f"{FLAT}, table of the optimizer",
        4.234,
        "GiB",
        missing="memory, not time: 2 slots of 142.076M parameters with 16 bytes each are 4.234 GiB, by their own rule",
    ),
    sc21(1.7, 2304, 24, 24, (1, 1), (32, 512, 137)),
    sc21(3.6, 3072, 30, 32, (2, 1), (64, 512, 138)),
    sc21(7.5, 4096, 36, 32, (4, 1), (128, 512, 142)),
    sc21(18.4, 6144, 40, 48, (8, 1), (256, 1024, 135)),
    sc21(39.1, 8192, 48, 64, (8, 2), (512, 1536, 138)),
    sc21(76.1, 10240, 60, 80, (8, 4), (1024, 1792, 140)),
    sc21(145.6, 12288, 80, 96, (8, 8), (1536, 2304, 148)),
    sc21(310.1, 16384, 96, 128, (8, 16), (1920, 2160, 155)),
    sc21(529.6, 20480, 105, 128, (8, 35), (2520, 2520, 163)),
    sc21(1008.0, 25600, 128, 160, (8, 64), (3072, 3072, 163)),
    mixtral(
        False,
        468,
        f"{MCORE}: 468 TFLOPS with v0.9",
        64,
        keys(
            parallel__tensor=1,
            parallel__sequence="false",
            parallel__expert=8,
            parallel__pipeline=4,
            parallel__virtual_pipeline=8,
        ),
        "the reference layout of v0.8",
    ),
    mixtral(
        True,
        0.493 * 989,
        "MoE Parallel Folding, arXiv 2504.14960: 49.3% MFU",
        128,
        keys(
            parallel__tensor=4,
            parallel__sequence="true",
            parallel__expert=2,
            parallel__pipeline=8,
            parallel__virtual_pipeline=7,
        ),
        "the reference layout of Megatron-core v0.8 for 128 GPUs",
    ),
    PublishedFact(
        "gpt-oss-120b on 64 H100, PP4 EP8",
        BRIDGE,
        5630,
        "tokens/s/GPU",
        "h100_8x",
        64,
        gpt_oss(
            36,
            128,
            4096,
            parallel__pipeline=4,
            parallel__expert=8,
            training__global_batch_size=512,
            training__micro_batch_size=4,
        ),
        "attention without windows, nothing computed again",
    ),
    PublishedFact(
        "gpt-oss-120b on 64 GB200, EP64",
        BRIDGE,
        15876,
        "tokens/s/GPU",
        "gb200",
        64,
        gpt_oss(36, 128, 8192, parallel__expert=64, training__global_batch_size=1280, training__micro_batch_size=1),
        "attention without windows, nothing computed again",
    ),
    PublishedFact(
        "DeepSeek-V3 on 256 GB200, BF16, PP4 VP4 EP64",
        BRIDGE,
        3139,
        "tokens/s/GPU",
        missing="61 layers and a layer of multi-token prediction in unequal stages",
    ),
    PublishedFact(
        "Qwen3-235B-A22B on 256 GB200, BF16, PP8 VP3 EP32",
        BRIDGE,
        4916,
        "tokens/s/GPU",
        missing="94 layers in unequal stages: embedding and loss take the place of a layer each",
    ),
    PublishedFact(
        "Qwen3-30B-A3B on 16 H100, FP8",
        BRIDGE,
        5275,
        "tokens/s/GPU",
        missing="products in FP8",
    ),
    flat("120B", 7, 16, 131072, 1355),
    flat("120B", 7, 16, 1048576, 642),
    flat("241B", 14, 32, 131072, 866),
    flat("241B", 14, 32, 1048576, 314),
    flat("667B", 39, 64, 131072, 316),
    flat("667B", 39, 64, 1048576, 124),
    PublishedFact(
        "MoP 120B, 128K tokens on 16 H200", MOP, 1043, "tokens/s/GPU", missing="MoP prints no sizes of layers"
    ),
    PublishedFact("MoP 1T, 128K tokens on 96 H200", MOP, 166, "tokens/s/GPU", missing="MoP prints no sizes of layers"),
    PublishedFact("FSDP's best for 120B, 128K on 16 H200", MOP, 223, "tokens/s/GPU", missing=FSDP),
    PublishedFact("Apertus 46B-A4B, EP8, resident, 32 GH200", APERTUS, 6830, "tokens/s/GPU", missing=WITHOUT_SHAPES),
    PublishedFact("Apertus 46B-A4B, EP16, resident, 32 GH200", APERTUS, 5790, "tokens/s/GPU", missing=WITHOUT_SHAPES),
    PublishedFact("Apertus 46B-A4B, EP8 with overlap, 32 GH200", APERTUS, 9400, "tokens/s/GPU", missing=WITHOUT_SHAPES),
    PublishedFact("Apertus 46B-A4B, EP4, offloaded, 32 GH200", APERTUS, 8700, "tokens/s/GPU", missing=WITHOUT_SHAPES),
    PublishedFact("Apertus 27B-A3B, resident", APERTUS, 18100, "tokens/s/GPU", missing=WITHOUT_SHAPES),
    PublishedFact("Apertus 27B-A3B, offloaded", APERTUS, 17000, "tokens/s/GPU", missing=WITHOUT_SHAPES),
    PublishedFact(
        "Qwen3-8B, 1M tokens a step on 8 H100",
        "TRL 1.13.0, guide to long contexts",
        380,
        "s of a step",
        missing=FSDP,
    ),
]
