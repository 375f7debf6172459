"""The cases of clock_accuracy.py: small trainings of every kind on two and four emulated ranks."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.kit.emulated_settings import Setting

SLOW, MIDDLE, FAST = RATES = ("200mbit", "500mbit", "1gbit")
VOCABULARY = 1024

GPT = (
    "model=gpt_tiny",
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=4",
    "model.sequence_length=256",
)
BERT = ("model=bert_tiny", *GPT[1:])
WIDE = (*GPT[:1], "model.num_layers=2", "model.hidden_size=384", "model.ffn_hidden_size=768", *GPT[4:])
EXPERTS = ("moe.num_experts=8", "moe.top_k=2", "moe.ffn_hidden_size=256")
MOE, BERT_MOE = (*GPT, *EXPERTS), (*BERT, *EXPERTS)
TENSOR, SEQUENCE = ("parallel.tensor=2",), ("parallel.tensor=2", "parallel.sequence=true")
STAGES, CHUNKS = ("parallel.pipeline=2",), ("parallel.pipeline=2", "parallel.virtual_pipeline=2")
SPREAD = ("parallel.expert=2",)
CONTEXT = ("parallel.context=2",)
HOST = ("optimizer.state_device=host", "optimizer.engine=host")
STREAM = ("optimizer.state_device=host", "optimizer.engine=device_stream")
DISK = ("optimizer.state_device=disk", "optimizer.engine=host")
SERIAL = ("parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false")
WHOLE = ("optimizer.distributed=false", "parallel.overlap_param_gather=false")
FULL, SELECTIVE = ("training.recompute=full",), ("training.recompute=selective",)


@dataclass(frozen=True)
class Case:
    """A training on so many ranks. `kind`: what it is, in words; `is_fitted`: the hardware's figures come from it."""

    kind: str
    is_fitted: bool
    ranks: int
    rate: str
    setting: Setting

    @property
    def name(self) -> str:
        """Unique among the cases."""
        return f"{self.kind}, {self.ranks} ranks, {self.rate}"


def case(
    kind: str,
    is_fitted: bool,
    ranks: int,
    rate: str,
    *groups: tuple[str, ...],
    num_replicas: int = 1,
    micro_batches: int = 2,
    size: int = 2,
) -> Case:
    """`num_replicas`: data-parallel ranks; `micro_batches`: of each; `size`: samples of a micro-batch."""
    samples = (
        f"training.micro_batch_size={size}",
        f"training.global_batch_size={size * micro_batches * num_replicas}",
    )
    overrides = tuple(override for group in (*groups, samples) for override in group)
    return Case(kind, is_fitted, ranks, rate, Setting(overrides, VOCABULARY))


def degree(number: int) -> tuple[str, ...]:
    """The experts' pipeline degree."""
    return (f"moe.pipeline_degree={number}",)


TENSOR_4, STAGES_4 = ("parallel.tensor=4",), ("parallel.pipeline=4",)
SPREAD_4, CONTEXT_4 = ("parallel.expert=4",), ("parallel.context=4",)

CASES = (
    # What figures are fitted to.
    case("gpt, data", True, 2, SLOW, GPT, num_replicas=2),
    case("gpt, data", True, 4, MIDDLE, GPT, num_replicas=4),
    case("wide gpt, data, whole state", True, 2, MIDDLE, WIDE, WHOLE, num_replicas=2),
    case("gpt, data, serial", True, 4, SLOW, GPT, SERIAL, num_replicas=4),
    case("gpt, tensor", True, 2, MIDDLE, GPT, TENSOR, micro_batches=4),
    case("gpt, tensor", True, 4, FAST, GPT, TENSOR_4, micro_batches=4),
    case("gpt, sequence", True, 2, SLOW, GPT, SEQUENCE),
    case("gpt, pipeline", True, 2, SLOW, GPT, STAGES, micro_batches=4),
    case("gpt, pipeline", True, 4, MIDDLE, GPT, STAGES_4, micro_batches=4),
    case("gpt, pipeline, long", True, 2, FAST, GPT, STAGES, micro_batches=8, size=1),
    case("moe, expert", True, 2, SLOW, MOE, SPREAD, degree(1), num_replicas=2),
    case("moe, expert", True, 4, MIDDLE, MOE, SPREAD_4, degree(1), num_replicas=4),
    case("moe, expert in 2", True, 2, MIDDLE, MOE, SPREAD, degree(2), num_replicas=2),
    case("moe, expert in 2", True, 4, FAST, MOE, SPREAD_4, degree(2), num_replicas=4),
    case("gpt, context", True, 2, MIDDLE, GPT, CONTEXT, micro_batches=4),
    case("gpt, data, full recompute", True, 2, FAST, GPT, FULL, num_replicas=2),
    case("gpt, data, host", True, 2, FAST, GPT, HOST, num_replicas=2),
    case("gpt, data, disk", True, 2, FAST, GPT, DISK, num_replicas=2),
    case("bert, data", True, 2, FAST, BERT, num_replicas=2),
    case("bert, tensor", True, 2, SLOW, BERT, TENSOR),
    # What they are held against.
    case("bert, pipeline", False, 2, MIDDLE, BERT, STAGES, micro_batches=4),
    case("bert, sequence", False, 4, SLOW, BERT, ("parallel.tensor=4", "parallel.sequence=true"), micro_batches=4),
    case("gpt, tensor and data", False, 4, MIDDLE, GPT, TENSOR, num_replicas=2, micro_batches=4),
    case("gpt, sequence and pipeline", False, 4, SLOW, GPT, SEQUENCE, STAGES, micro_batches=4),
    case("gpt, virtual pipeline", False, 2, MIDDLE, GPT, CHUNKS, micro_batches=4),
    case("gpt, virtual pipeline and data", False, 4, SLOW, GPT, CHUNKS, num_replicas=2, micro_batches=4),
    case("wide gpt, pipeline and data", False, 4, FAST, WIDE, STAGES, num_replicas=2, micro_batches=4),
    case("moe, expert and its copies", False, 4, MIDDLE, MOE, SPREAD, degree(1), num_replicas=4),
    case("moe, expert in 4", False, 4, SLOW, MOE, SPREAD_4, degree(4), num_replicas=4),
    case("moe, expert and pipeline", False, 4, MIDDLE, MOE, SPREAD, STAGES, degree(1), num_replicas=2, micro_batches=4),
    case("moe, expert and sequence", False, 4, FAST, MOE, SPREAD, SEQUENCE, degree(1), num_replicas=2, micro_batches=4),
    case("bert moe, expert", False, 2, SLOW, BERT_MOE, SPREAD, degree(1), num_replicas=2),
    case("bert moe, expert in 2", False, 4, FAST, BERT_MOE, SPREAD_4, degree(2), num_replicas=4),
    case("moe, full recompute", False, 2, MIDDLE, MOE, SPREAD, degree(2), FULL, num_replicas=2),
    case("gpt, context and tensor", False, 4, MIDDLE, GPT, CONTEXT, TENSOR, micro_batches=4),
    case("gpt, context of 4", False, 4, FAST, GPT, CONTEXT_4, micro_batches=4),
    case("gpt, tensor, selective recompute", False, 2, FAST, GPT, TENSOR, SELECTIVE, micro_batches=4),
    case("moe, host", False, 2, MIDDLE, MOE, SPREAD, degree(1), HOST, num_replicas=2),
    case("gpt, pipeline, disk", False, 2, SLOW, GPT, STAGES, DISK, micro_batches=4),
    case("bert, data, streamed state", False, 2, MIDDLE, BERT, STREAM, num_replicas=2),
)
