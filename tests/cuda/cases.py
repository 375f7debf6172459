"""What is trained on the pretended device: a layout each, its waits, and how a run is judged.

The tests run all cases late and some early; matrix.py runs all of them in both modes, and every mutant.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests import distributed
from tests.cuda import runs, sync_points
from tests.cuda.pretended import logs
from tests.cuda.pretended.observed import Mutant
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS, PRETENDED_HALF_GRAD_NORM, PRETENDED_HALF_LOSS

NUM_LAYERS = 2
DISK_DIR = "/var/tmp"  # no tmpfs, which would be refused
EARLY = ("optimizer.early_update=always", "optimizer.clip_grad=0")
FOUR_IN_THREE = ("model.num_layers=4", "moe.weight_slots=3")
LATENT = (
    "model.attention=latent",
    "model.kv_lora_rank=32",
    "model.head_dim=16",
    "model.rotary_head_dim=8",
    "model.value_head_dim=16",
    "model.rotary_scaling={rope_type: yarn, factor: 8.0, original_max_position_embeddings: 8, mscale: 0.7, "
    "mscale_all_dim: 1.0}",
)
LLAMA3 = (
    "model.rotary_scaling={rope_type: llama3, factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, "
    "original_max_position_embeddings: 8}"
)
WINDOW = ("model.sliding_window=8", "model.sliding_window_from=1")
SEPARATE_DOCUMENTS = "data.documents=separate"
SHARED_EXPERT = "moe.shared_expert_ffn_hidden_size=64"
SCARCE = ("moe.capacity_factor=0.8", "moe.router_score=sigmoid", "moe.expert_bias=true")


@dataclass(frozen=True)
class Case:
    """A layout; `waits` are those of a step, on rank 0."""

    ranks: int
    overrides: tuple[str, ...]
    waits: dict[tuple[str, str], int]
    precision: str = "bf16"
    ranks_per_node: int | None = None
    card: str | None = None  # see runs.CARDS
    one_sided: bool = False  # all tokens go to the first half of the experts
    alternate_engines: bool = False  # buckets that may go either way go one way and the other in turn
    # How many events each thread of the host link waits for in a step at most, by its name.
    thread_waits: Mapping[str, int] = field(default_factory=dict)

    @property
    def tolerances(self) -> tuple[float, float]:
        """Of losses and of gradient norms, relative to the CPU's."""
        if self.precision == "fp32":
            return FP32_LOSS, FP32_GRAD_NORM
        return PRETENDED_HALF_LOSS, PRETENDED_HALF_GRAD_NORM


def _experts(*overrides: str) -> tuple[str, ...]:
    return "model=gpt_moe_tiny", *overrides


def _chunks(forward: int, backward: int) -> tuple[str, ...]:
    return f"moe.pipeline_degree={forward}", f"moe.backward_pipeline_degree={backward}"


def _expert_parallel(strategy: str, *overrides: str) -> tuple[str, ...]:
    return _experts("parallel.expert=2", f"moe.memory_strategy={strategy}", *overrides)


def _offloaded(where: str, engine: str, early: str) -> tuple[str, ...]:
    """Optimizer state off the device, in small buckets."""
    return (
        f"optimizer.state_device={where}",
        f"optimizer.engine={engine}",
        f"optimizer.early_update={early}",
        "optimizer.distributed=true",
        "optimizer.bucket_parameters=16384",
        f"memory.disk_dir={DISK_DIR if where == 'disk' else 'null'}",
    )


def _streamed(where: str, *overrides: str) -> tuple[str, ...]:
    """Experts off the device, with more layers than slots."""
    return (
        *(f"moe.weights_device={where}", f"optimizer.state_device={where}", "optimizer.distributed=true"),
        *("model.num_layers=3", f"memory.disk_dir={DISK_DIR if where == 'disk' else 'null'}"),
        *overrides,
    )


# One sample a micro-batch: two would each stay whole on a rank, and nothing would be exchanged.
CONTEXT = (
    *("parallel.context=2", "parallel.context_heads=1"),
    *("training.micro_batch_size=1", "training.global_batch_size=2"),  # no rank has micro-batches of its own
    "model.attention_dropout=0",
)
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
DENSE, NONE = "model=gpt_tiny", sync_points.waits({}, 0)
# The limit makes the planner use replicas however even the load is.
PLACED = ("moe.placement.policy=solve", "moe.placement.extra_slots=2", "moe.placement.max_load=1.0")
IN_BLOCKS = ("moe.placement.bitwise=true", "moe.placement.block_rows=16", "moe.placement.interval=1")
CLIPPED = "optimizer.clip_grad=0.1"  # in every step
SHARDED_WEIGHTS = "moe.shard_weights=true"  # of ranks that hold the same experts
LAYER_WISE = ("training.pass_order=by_layer", "model.tie_embeddings=false")
LAYERS_OFFLOADED = ("training.recompute=full", "training.activation_offload=auto")
FLAT = sync_points.waits(sync_points.FLAT, NUM_LAYERS * 2)
CASES = {
    "dense": Case(1, ("model=gpt_tiny",), sync_points.waits({}, 0), "fp32"),
    "experts on one rank": Case(1, _experts(), sync_points.waits({}, 0)),
    "keep": Case(2, _expert_parallel("keep"), FLAT),
    "keep, chunks": Case(2, _expert_parallel("keep", SHARED_EXPERT, *_chunks(4, 2)), FLAT),
    "recompute": Case(2, _expert_parallel("recompute", SHARED_EXPERT), FLAT),
    "recompute, chunks": Case(2, _expert_parallel("recompute", *_chunks(4, 2)), FLAT),
    "offload": Case(2, _expert_parallel("offload"), FLAT),
    "offload, chunks": Case(2, _expert_parallel("offload", SHARED_EXPERT, *_chunks(4, 4)), FLAT),
    "hierarchical": Case(
        4,
        _experts("parallel.expert=4", "moe.all_to_all=hierarchical", SHARED_EXPERT, *_chunks(4, 2)),
        sync_points.waits(sync_points.HIERARCHICAL, NUM_LAYERS),
        ranks_per_node=2,
    ),
    "communicate": Case(2, _expert_parallel("communicate_recompute", *_chunks(2, 2)), FLAT),
    "capacity": Case(
        2,
        _expert_parallel("keep", "parallel.tensor=2", "parallel.sequence=true", *SCARCE),
        sync_points.waits(sync_points.FLAT, NUM_LAYERS * 4),
    ),
    "capacity by position": Case(
        2,
        _expert_parallel("keep", "parallel.tensor=2", "parallel.sequence=true", *SCARCE, "moe.drop_policy=position"),
        sync_points.waits(sync_points.FLAT, NUM_LAYERS * 4),
    ),
    "experts at copies": Case(
        2,
        _expert_parallel("keep", SHARED_EXPERT, *_chunks(4, 2), *PLACED),
        sync_points.waits(sync_points.PLACED, NUM_LAYERS * 2),
        one_sided=True,
    ),
    "experts at copies, offload": Case(
        4,
        _experts("parallel.expert=4", "moe.memory_strategy=offload", *PLACED),
        sync_points.waits(sync_points.PLACED, NUM_LAYERS),
        one_sided=True,
    ),
    "experts at copies, in blocks": Case(
        2,
        _expert_parallel("recompute", *_chunks(2, 2), *PLACED, *IN_BLOCKS),
        sync_points.waits(sync_points.PLACED_LOOP, NUM_LAYERS * 2),
        one_sided=True,
    ),
    "recompute layers": Case(
        2,
        _expert_parallel("keep", "training.recompute=full"),
        sync_points.waits(sync_points.FLAT_TWICE, NUM_LAYERS * 2),
    ),
    "layer inputs on the host": Case(
        1, (*LAYERS_OFFLOADED, *DROPOUT, "model=gpt_tiny"), sync_points.waits({}, 0), "fp32"
    ),
    "by layer": Case(
        2,
        (*_expert_parallel("keep", *LAYER_WISE, *LAYERS_OFFLOADED, *DROPOUT), "training.micro_batch_size=1"),
        sync_points.waits(sync_points.FLAT_TWICE, NUM_LAYERS * 4),
    ),
    "some layer inputs on the host": Case(
        4,
        (
            *_expert_parallel("keep", "parallel.pipeline=2"),
            "training.recompute=full",
            "training.activation_offload=0.02",
        ),
        sync_points.waits(sync_points.FLAT_TWICE, NUM_LAYERS * 2 // 2),
    ),
    "tensor": Case(
        2,
        _expert_parallel("keep", "parallel.tensor=2", "parallel.sequence=true", *DROPOUT),
        sync_points.waits(sync_points.FLAT, NUM_LAYERS * 4),
    ),
    "bert": Case(2, ("model=bert_moe_tiny", "parallel.expert=2"), FLAT),
    "fp16": Case(
        2,
        _expert_parallel("keep"),
        sync_points.waits(sync_points.LOOP_OVER_EXPERTS, NUM_LAYERS * 2),
        "fp16",
    ),
    "empty groups": Case(
        2,
        _expert_parallel("keep", "moe.num_experts=24", *_chunks(4, 4)),
        FLAT,
        card="leaves empty groups",
    ),
    "older card": Case(
        2,
        _expert_parallel("keep", *_chunks(4, 2)),
        sync_points.waits(sync_points.LOOP_OVER_EXPERTS, NUM_LAYERS * 2),
        card="A100",
    ),
    "loop on one rank": Case(1, _experts(), sync_points.waits(sync_points.LOOP_LOCAL, NUM_LAYERS * 4), "fp32"),
    "pipeline": Case(2, ("model=gpt_tiny", "parallel.pipeline=2", LLAMA3), sync_points.waits({}, 0)),
    "experts in a pipeline": Case(
        4, _expert_parallel("keep", "parallel.pipeline=2"), sync_points.waits(sync_points.FLAT, NUM_LAYERS * 2 // 2)
    ),
    "latent attention": Case(2, _expert_parallel("keep", *LATENT), FLAT),
    "documents apart": Case(2, _expert_parallel("keep", SEPARATE_DOCUMENTS, "model.num_query_groups=2"), FLAT),
    "documents apart, fp32": Case(1, (DENSE, SEPARATE_DOCUMENTS, *WINDOW), NONE, "fp32"),
    "documents apart, latent attention": Case(2, _expert_parallel("keep", SEPARATE_DOCUMENTS, *LATENT), FLAT),
    "documents apart, recomputed": Case(
        2, (DENSE, SEPARATE_DOCUMENTS, *WINDOW, "parallel.tensor=2", "parallel.sequence=true", *LAYERS_OFFLOADED), NONE
    ),
    "context": Case(2, (DENSE, *CONTEXT, *WINDOW), NONE),
    "context, fp32": Case(2, (DENSE, *CONTEXT, "model.num_query_groups=2"), NONE, "fp32"),
    "context, latent attention": Case(2, _expert_parallel("keep", *CONTEXT, *LATENT), FLAT),
    "context by heads": Case(
        4, _expert_parallel("keep", *CONTEXT, "parallel.context=4", "parallel.context_heads=2"), FLAT
    ),
    "context, recomputed": Case(
        2, (DENSE, SEPARATE_DOCUMENTS, *CONTEXT, *LAYERS_OFFLOADED, "training.token_tile=16"), NONE
    ),
    "context, bert": Case(2, ("model=bert_tiny", *CONTEXT), NONE),
    "communicate, two degrees": Case(2, _expert_parallel("communicate", SHARED_EXPERT, *_chunks(4, 2)), FLAT),
    "communicate and offload": Case(2, _expert_parallel("communicate_offload", *_chunks(2, 2)), FLAT),
    "offload and recompute": Case(2, _expert_parallel("offload_recompute", *_chunks(2, 2)), FLAT),
    "a rank without rows": Case(2, _expert_parallel("keep", *_chunks(4, 2)), FLAT, one_sided=True),
    "interleaved": Case(
        2,
        ("model=gpt_tiny", "parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.num_layers=4", *WINDOW),
        sync_points.waits({}, 0),
    ),
    "data parallel": Case(2, ("model=gpt_tiny",), sync_points.waits({}, 0), "fp32"),
    "gradients not sharded": Case(
        2, ("model=gpt_tiny", "optimizer.distributed=false"), sync_points.waits({}, 0), "fp32"
    ),
    "nothing overlapped": Case(
        2, ("model=gpt_tiny", "parallel.overlap_grad_reduce=false"), sync_points.waits({}, 0), "fp32"
    ),
    "state streamed from the host": Case(
        2, _expert_parallel("keep", *_offloaded("host", "device_stream", "never")), FLAT
    ),
    "state streamed early": Case(1, (DENSE, *_offloaded("host", "device_stream", "always")), NONE, "fp32"),
    "state updated on the host": Case(
        2, (DENSE, *_offloaded("host", "host", "never")), NONE, "fp16", thread_waits=sync_points.host_waits(7)
    ),
    "state updated on the host early": Case(
        2,
        _expert_parallel("keep", *_offloaded("host", "host", "always")),
        FLAT,
        thread_waits=sync_points.host_waits(10),
    ),
    "state split": Case(
        1,
        (DENSE, *_offloaded("host", "split", "never")),
        NONE,
        "fp16",
        alternate_engines=True,
        thread_waits=sync_points.host_waits(7),
    ),
    "state split early": Case(
        1,
        (DENSE, *_offloaded("host", "split", "always")),
        NONE,
        alternate_engines=True,
        thread_waits=sync_points.host_waits(7),
    ),
    "state by the fastest engine": Case(
        1, (DENSE, *_offloaded("host", "auto", "auto")), NONE, "fp32", thread_waits=sync_points.host_waits(13)
    ),
    "state dropped where it is clipped": Case(
        1,
        (DENSE, *_offloaded("host", "split", "always"), CLIPPED),
        NONE,
        alternate_engines=True,
        thread_waits=sync_points.host_waits(7),
    ),
    "state streamed from the disk": Case(
        1, (DENSE, *_offloaded("disk", "device_stream", "never")), NONE, "fp32", thread_waits=sync_points.disk_waits(13)
    ),
    "state streamed from the disk early": Case(
        1, (DENSE, *_offloaded("disk", "device_stream", "always")), NONE, thread_waits=sync_points.disk_waits(13)
    ),
    "state on the disk updated on the host": Case(
        1, (DENSE, *_offloaded("disk", "host", "never")), NONE, "fp32", thread_waits=sync_points.host_waits(13)
    ),
    "state on the disk updated on the host early": Case(
        1,
        (DENSE, *_offloaded("disk", "host", "always"), "optimizer.moment_dtype=bf16"),
        NONE,
        thread_waits=sync_points.host_waits(13),
    ),
    "state and layer inputs on the host": Case(
        4,
        (*_expert_parallel("keep", "parallel.pipeline=2"), *_offloaded("host", "split", "always"), *LAYERS_OFFLOADED),
        sync_points.waits(sync_points.FLAT_TWICE, NUM_LAYERS * 2 // 2),
        alternate_engines=True,
        thread_waits=sync_points.host_waits(3),
    ),
    "state, late gradients": Case(
        2,
        (
            *_expert_parallel("keep", "parallel.tensor=2", "parallel.sequence=true"),
            *_offloaded("host", "split", "always"),
            CLIPPED,
        ),
        sync_points.waits(sync_points.FLAT, NUM_LAYERS * 4),
        alternate_engines=True,
        thread_waits=sync_points.host_waits(5),
    ),
    "state of interleaved stages": Case(
        2,
        (
            DENSE,
            "parallel.pipeline=2",
            "parallel.virtual_pipeline=2",
            "model.num_layers=4",
            *_offloaded("host", "split", "always"),
        ),
        NONE,
        alternate_engines=True,
        thread_waits=sync_points.host_waits(6),
    ),
    "experts on the host": Case(
        2,
        _expert_parallel("keep", *_streamed("host"), "moe.weight_slots=1"),
        sync_points.waits(sync_points.FLAT, 3 * 2),
        thread_waits=sync_points.expert_waits(45),
    ),
    "experts on the disk": Case(
        2,
        _expert_parallel("offload", *_streamed("disk", *FOUR_IN_THREE), *_chunks(2, 2)),
        sync_points.waits(sync_points.FLAT, 4 * 2),
        thread_waits=sync_points.expert_waits(45, read=16, written=20),
    ),
    "experts on the host by layer": Case(
        1,
        # Layer inputs stay: their copies would order those of gradients, too.
        _experts(*_streamed("host"), *LAYER_WISE, "training.recompute=full"),
        NONE,
        thread_waits=sync_points.expert_waits(45),
    ),
    "experts on the disk by layer": Case(
        2,
        _expert_parallel("keep", *_streamed("disk", *EARLY), *LAYER_WISE, *LAYERS_OFFLOADED),
        sync_points.waits(sync_points.FLAT_TWICE, 3 * 2),
        thread_waits=sync_points.expert_waits(45, read=16, written=20),
    ),
    "experts' parts on the host": Case(
        2,
        _experts(*_streamed("host", SHARDED_WEIGHTS, "model.num_layers=2", *EARLY)),
        NONE,
        thread_waits=sync_points.expert_waits(45),
    ),
    "experts' parts on the disk by layer": Case(
        2,
        _experts(*_streamed("disk", SHARDED_WEIGHTS), *LAYER_WISE, *LAYERS_OFFLOADED),
        NONE,
        thread_waits=sync_points.expert_waits(45, read=16, written=20),
    ),
    "experts' parts over ranks": Case(
        4,
        _expert_parallel("recompute", *_streamed("disk", SHARDED_WEIGHTS), "training.micro_batch_size=1"),
        sync_points.waits(sync_points.FLAT, 3 * 2),
        thread_waits=sync_points.expert_waits(45, read=16, written=20),
    ),
    "experts on the host at copies": Case(
        2,
        _expert_parallel("keep", *_streamed("host"), *PLACED),
        sync_points.waits(sync_points.PLACED, 3 * 2),
        one_sided=True,
        thread_waits=sync_points.expert_waits(60),
    ),
    "tensor, whole sequences": Case(2, ("model=gpt_tiny", "parallel.tensor=2"), sync_points.waits({}, 0), "fp32"),
}

# Left to the matrix: what they add to others is their combination.
MATRIX_ONLY = (
    "recompute",
    "recompute, chunks",
    "communicate",
    "offload and recompute",
    "loop on one rank",
    "experts at copies, offload",
    "some layer inputs on the host",
    "gradients not sharded",
    "state by the fastest engine",
    "state on the disk updated on the host",
    "offload",
    "nothing overlapped",
    "state streamed early",
    "state updated on the host",
    "state split early",
    "state dropped where it is clipped",
    "state streamed from the disk",
    "state on the disk updated on the host early",
    "state and layer inputs on the host",
    "state, late gradients",
    "state of interleaved stages",
    "capacity by position",
    # Those that tests/cuda/test_experts_off_device.py does not take, too.
    *(name for name in CASES if name.startswith(("experts on the ", "experts' parts"))),
)


def run(name: str, device: str, mutant: Mutant | None = None, early: bool = False) -> list[runs.Outcome]:
    """Train a case; what each rank saw."""
    case = CASES[name]
    overrides = (f"model.num_layers={NUM_LAYERS}", f"training.precision={case.precision}", *case.overrides)
    backend = distributed.PRETENDED if device == "cuda" else "gloo"
    arguments = device, overrides, case.ranks_per_node, mutant, case.card, early, case.one_sided, case.alternate_engines
    return distributed.run(runs.train, case.ranks, *arguments, backend=backend)


def deviations(outcomes: Sequence[runs.Outcome], of_cpu: Sequence[runs.Outcome]) -> tuple[float, float]:
    """The largest relative distance of a loss and of a gradient norm from the CPU's; infinite for no number."""
    return _worst(outcomes, of_cpu, "losses"), _worst(outcomes, of_cpu, "grad_norms")


def _worst(outcomes: Sequence[runs.Outcome], of_cpu: Sequence[runs.Outcome], name: str) -> float:
    worst = 0.0
    for outcome, other in zip(outcomes, of_cpu, strict=True):
        for found, expected in zip(getattr(outcome, name), getattr(other, name), strict=True):
            worst = max(worst, abs(found - expected) / abs(expected) if math.isfinite(found) else math.inf)
    return worst


def faults(outcomes: Sequence[runs.Outcome]) -> list[str]:
    """What no program should do, of all ranks; also an order of operations at which NCCL would hang."""
    pinned = {f"memory is pinned in a step, in {call_site}" for outcome in outcomes for call_site in outcome.pinned}
    return (
        sorted({what for outcome in outcomes for what in outcome.faults})
        + sorted(pinned - {f"memory is pinned in a step, in {sync_points.SMALL}"})
        + logs.compare([outcome.log for outcome in outcomes])
    )


def wrong_waits(name: str, outcomes: Sequence[runs.Outcome]) -> list[str]:
    """Where rank 0's host waits in a step, and the table does not say so, or the other way round; and threads that wait
    for more events than the case says."""
    found, table = outcomes[0].waits, Counter(CASES[name].waits)
    new = [f"{count} new: {kind} in {call_site}" for (kind, call_site), count in (found - table).items()]
    gone = [f"{count} gone: {kind} in {call_site}" for (kind, call_site), count in (table - found).items()]
    return new + gone + _too_many_thread_waits(name, outcomes)


def _too_many_thread_waits(name: str, outcomes: Sequence[runs.Outcome]) -> list[str]:
    # Of the whole run: their work may reach into the next step.
    wrong = []
    for rank, outcome in enumerate(outcomes):
        by_thread: Counter[str] = Counter()
        for (thread, kind, call_site), count in outcome.worker_waits.items():
            if kind == "event.synchronize" and call_site != sync_points.STREAMS_END:  # all other kinds are faults
                by_thread[thread] += count
        for thread, count in by_thread.items():
            most = CASES[name].thread_waits.get(thread, 0) * runs.STEPS
            if count > most:
                wrong.append(f"{count} events that {thread} waited for on rank {rank}, at most {most} are to be")
    return wrong


def noticed(name: str, mutant: Mutant) -> str:
    """How a case without the mutant's call fails; empty where it does not. Raises ValueError where the call is never
    made."""
    early = mutant.what == "written"
    try:
        outcomes = run(name, "cuda", mutant, early=early)
    except distributed.RankError as error:
        return "refused: " + str(error).strip().splitlines()[-1]
    except distributed.RankDied as error:  # gloo ends a process that gets more than it has room for
        if "Received data size doesn't match" not in str(error):
            raise
        return "refused: gloo received another size than was expected"
    if not any(outcome.mutant is not None and outcome.mutant.left_out for outcome in outcomes):
        raise ValueError(f"{mutant.what} was not called through {mutant.call_site} in {name}")
    if not all(math.isfinite(number) for outcome in outcomes for number in outcome.losses + outcome.grad_norms):
        return "no numbers"
    if early and [each.losses for each in outcomes] != [each.losses for each in run(name, "cuda")]:
        return "other losses"
    return "; ".join(faults(outcomes)[:1])
