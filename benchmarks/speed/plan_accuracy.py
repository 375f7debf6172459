"""Compares the plan of `train.py plan=true` with measured steps: python -m benchmarks.speed.plan_accuracy [--quick]
[--experts] [--json] [--markdown].

Each case takes three steps of its preset on gloo ranks of this machine. The second runs under PyTorch's FLOP counter,
which is taught the CPU's attention kernel and in-place products; its operations over all ranks are divided by the
step's tokens. In the third the bytes of every tensor that is made are counted until it is freed. Weights, gradient
buffers and optimizer state are known by their storages, the gather buffer and tables of positions are "buffers", and
activations are what the peak has on top of all that stays. Shown is the plan over the measurement, of the rank whose
total is the largest; memory is to be within 10%, operations within 1%.

Where tiers hold optimizer state, "optimizer" is what the device holds of it: residents and slots. "host" and "disk" are
what the tensors of its tiers of the host take, with the inputs of layers that wait there, and its file: on a CPU memory
of the same kind, told apart by whose it is.

Where experts lie off the device, slots for their weights and gradients are among "weights" and "gradients", their
records and what these pass through are among "host", and "disk".

Where context ranks share sequences, "exchanged" is what they send each other for attention: all bytes of all ranks, to
be as planned.

The routers of a fresh model spread tokens about evenly, as the plan assumes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from benchmarks.kit.context_bytes import ContextBytes
from benchmarks.kit.tables import table
from configs.job import Job
from configs.schema import Config
from tests import distributed
from tests.training.helpers import make_config

if TYPE_CHECKING:
    from training.engine import Engine

VOCAB_SIZE = 1000  # of the made-up tokens: not a multiple of what storage is padded to
MEMORY_BOUND, FLOPS_BOUND = 0.10, 0.01
TIMEOUT = 1800.0  # of a case, beside other work
KINDS = ("weights", "gradients", "optimizer", "activations", "buffers", "host", "disk")
SMALL = 64 * 1024  # bytes: kinds below this are not judged
STORAGE_MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A preset on some ranks. The name of the layout is for the table."""

    preset: str
    layout: str
    ranks: int
    overrides: tuple[str, ...] = ()


def _case(preset: str, layout: str, ranks: int, *overrides: str) -> Case:
    return Case(preset, layout, ranks, overrides)


_TWO_LAYERS = ("model.num_layers=2", "training.micro_batch_size=2", "training.global_batch_size=4")
# Samples long enough that the layers, and not copies of gradients, are the most.
_SEPARATE = ("data.documents=separate", "model.sequence_length=1024", "optimizer.distributed=false")
_SELECTIVE = "training.recompute=selective"
_WINDOW = ("model.sliding_window=64",)
_LATENT = tuple(
    f"model.{key}"
    for key in (
        *("attention=latent", "num_query_groups=null", "kv_lora_rank=64"),
        *("head_dim=32", "rotary_head_dim=16", "value_head_dim=32"),
    )
)
CASES = [
    _case("gpt_tiny", "single", 1, "training.micro_batch_size=2"),
    _case(
        "gpt_small",
        "TP2+SP, bf16",
        2,
        *_TWO_LAYERS,
        "parallel.tensor=2",
        "parallel.sequence=true",
        "training.precision=bf16",
    ),
    _case("gpt2_124m", "DP2, selective", 2, *_TWO_LAYERS, "training.recompute=selective", "model.sequence_length=256"),
    _case("bert_tiny", "TP2xPP2", 4, "parallel.tensor=2", "parallel.pipeline=2", "training.micro_batch_size=2"),
    _case("bert_small", "DP2", 2, *_TWO_LAYERS),
    _case("bert_moe_small", "DP2xEP2", 4, *_TWO_LAYERS, "parallel.expert=2", "training.global_batch_size=8"),
    _case(
        "gpt_moe_tiny",
        "PP2xVPP2",
        2,
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "training.micro_batch_size=1",
    ),
    _case(
        "gpt_moe_tiny",
        "TP2+SPxEP2xETP2",
        4,
        "parallel.tensor=2",
        "parallel.sequence=true",
        "parallel.expert=2",
        "parallel.expert_tensor=2",
    ),
    _case(
        "gpt_moe_small",
        "EP2, 4 chunks, recompute",
        2,
        *_TWO_LAYERS,
        "parallel.expert=2",
        "moe.pipeline_degree=4",
        "moe.memory_strategy=recompute",
    ),
    _case(
        "gpt_moe_small",
        "EP2, slots for copies",
        2,
        *_TWO_LAYERS,
        "parallel.expert=2",
        "moe.placement.policy=solve",
        "moe.placement.extra_slots=2",
        "moe.placement.max_load=1.0",  # so that every slot has a replica, as the plan assumes
    ),
    _case("quickstart", "single", 1, "training.global_batch_size=4"),
    _case(
        "quickstart",
        "PP4, full recompute",
        4,
        "parallel.pipeline=4",
        "training.recompute=full",
        "training.global_batch_size=16",
    ),
    _case("gpt_small", "documents apart", 1, *_TWO_LAYERS, *_SEPARATE),
    _case("gpt_small", "documents apart, latent", 1, *_TWO_LAYERS, *_SEPARATE, *_LATENT),
    _case(
        "gpt_small", "documents apart, window, bf16", 1, *_TWO_LAYERS, *_SEPARATE, *_WINDOW, "training.precision=bf16"
    ),
    _case("gpt_small", "window", 1, *_TWO_LAYERS, *_WINDOW, "optimizer.distributed=false"),
    _case("gpt_small", "latent", 1, *_TWO_LAYERS, *_LATENT, "optimizer.distributed=false"),
    _case(
        "gpt_small",
        "documents apart, TP2+SP, bf16",
        2,
        *_TWO_LAYERS,
        *_SEPARATE,
        "parallel.tensor=2",
        "parallel.sequence=true",
        "training.precision=bf16",
    ),
    _case("gpt_moe_small", "documents apart, EP2", 2, *_TWO_LAYERS, *_SEPARATE, "parallel.expert=2"),
    _case(
        "gpt_small",
        "documents apart, PP2, full recompute",
        2,
        *_TWO_LAYERS,
        *_SEPARATE,
        "parallel.pipeline=2",
        "training.recompute=full",
    ),
    _case(
        "gpt_tiny",
        "DP4, bf16, unsharded",
        4,
        "training.precision=bf16",
        "optimizer.distributed=false",
        "training.micro_batch_size=2",
    ),
    _case(
        "llama3_8b",
        "narrow, TP2, untied",
        2,
        "model.num_layers=2",
        "model.hidden_size=256",
        "model.ffn_hidden_size=896",
        "model.num_attention_heads=8",
        "model.num_query_groups=2",
        "model.head_dim=null",
        "model.sequence_length=256",
        "model.vocab_size=null",
        "parallel.tensor=2",
        "parallel.sequence=false",
        "parallel.pipeline=1",
        "training.precision=fp32",
        "training.recompute=none",
        "training.global_batch_size=2",
    ),
]


def _tiered(preset: str, layout: str, ranks: int, *overrides: str) -> Case:
    size = 2**16 if preset.endswith("tiny") else 2**18 if preset == "quickstart" else 2**20
    return Case(
        preset, layout, ranks, (f"optimizer.bucket_parameters={size}", "parallel.overlap_grad_reduce=true", *overrides)
    )


_HOST, _DISK = "optimizer.state_device=host", "optimizer.state_device=disk"
_DISK_DIR = "memory.disk_dir=/var/tmp"
TIER_CASES = [
    _tiered("gpt_tiny", "host, fp32", 1, _HOST, "training.micro_batch_size=2"),
    _tiered("gpt_tiny", "host by host, DP2", 2, _HOST, "optimizer.engine=host", "optimizer.early_update=never"),
    _tiered(
        "gpt_small",
        "host, TP2+SP, bf16",
        2,
        *_TWO_LAYERS,
        _HOST,
        "parallel.tensor=2",
        "parallel.sequence=true",
        "training.precision=bf16",
        "optimizer.early_update=always",
    ),
    _tiered("gpt_small", "disk, DP2, bf16", 2, *_TWO_LAYERS, _DISK, _DISK_DIR, "training.precision=bf16"),
    _tiered(
        "gpt_tiny",
        "host by host, PP2, fp16",
        2,
        _HOST,
        "parallel.pipeline=2",
        "training.precision=fp16",
        "optimizer.engine=host",
        "training.micro_batch_size=2",
    ),
    _tiered("gpt_moe_tiny", "host, EP2, bf16", 2, _HOST, "parallel.expert=2", "training.precision=bf16"),
    _tiered(
        "gpt_moe_tiny",
        "disk by host, PP2xVPP2",
        2,
        _DISK,
        _DISK_DIR,
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "training.micro_batch_size=1",
        "optimizer.engine=host",
    ),
    _tiered("bert_tiny", "host, TP2+SP", 2, _HOST, "parallel.tensor=2", "parallel.sequence=true"),
    _tiered(
        "gpt_moe_small",
        "host, DP2xEP2, bf16 moment",
        4,
        *_TWO_LAYERS,
        _HOST,
        "parallel.expert=2",
        "training.global_batch_size=8",
        "optimizer.moment_dtype=bf16",
        "optimizer.early_update=never",
    ),
    _tiered(
        "gpt_small",
        "auto, device and host",
        1,
        *_TWO_LAYERS,
        "optimizer.state_device=auto",
        "training.memory_limit_gib=0.18",
    ),
    _tiered("bert_small", "device, DP2, bf16 moment", 2, *_TWO_LAYERS, "optimizer.moment_dtype=bf16"),
    _tiered(
        "quickstart",
        "auto, device, host and disk",
        1,
        "training.global_batch_size=4",
        "optimizer.state_device=auto",
        "training.memory_limit_gib=0.06",
        "memory.host_budget=24",
        _DISK_DIR,
    ),
]


_TILES = ("training.recompute=full", "training.token_tile=256")
# Samples that do not stay whole.
_SHARED = (
    *("model.num_layers=2", "model.sequence_length=2048", "optimizer.distributed=false"),
    *("training.micro_batch_size=1", "training.global_batch_size=4"),
)


def _shared(preset: str, layout: str, context: int, heads: int, *overrides: str, ranks: int = 0) -> Case:
    sizes = f"parallel.context={context}", f"parallel.context_heads={heads}"
    return _case(preset, f"CP{context}, heads over {heads}{layout}", ranks or context, *_SHARED, *sizes, *overrides)


CONTEXT_CASES = [
    _shared("gpt_small", "", 2, 1),
    _shared("gpt_small", ", documents apart, selective", 2, 1, "data.documents=separate", _SELECTIVE),
    _shared("gpt_small", ", bf16", 2, 2, "training.precision=bf16"),
    _shared("gpt_small", ", grouped", 4, 2, "model.num_query_groups=2"),
    _shared("gpt_small", ", one key head", 4, 4, "model.num_query_groups=1"),
    _shared("gpt_small", ", one key head", 4, 1, "model.num_query_groups=1"),
    _shared("gpt_small", ", latent", 2, 2, *_LATENT),
    _shared(
        "gpt_small",
        ", TP2+SP, bf16",
        2,
        1,
        *("parallel.tensor=2", "parallel.sequence=true", "training.precision=bf16"),
        ranks=4,
    ),
    _shared("gpt_small", ", PP2, full recompute", 2, 1, "parallel.pipeline=2", "training.recompute=full", ranks=4),
    _shared("bert_small", "", 2, 1, "model.attention_dropout=0.0"),
    _shared("gpt_moe_small", ", EP2", 2, 1, "parallel.expert=2"),
    _shared("gpt_moe_small", ", EP4, 4 chunks", 2, 2, "parallel.expert=4", "moe.pipeline_degree=4", ranks=4),
    _shared("gpt_small", ", latent, bf16", 2, 1, *_LATENT, "training.precision=bf16"),
    _shared("gpt_small", ", one layer of two with a window", 2, 1, *_WINDOW, "model.sliding_window_from=1"),
    _shared("gpt_small", ", tiles", 2, 1, *_TILES),
]


_BY_LAYER = ("training.pass_order=by_layer", "training.recompute=full")
_BF16, _SHARDED, _ALL = "training.precision=bf16", "moe.shard_weights=true", "moe.shard_weights=false"


def _streamed(tier: str, layout: str, ranks: int, *overrides: str) -> Case:
    """Experts that lie on the host or the disk, with their optimizer state."""
    targets = f"moe.weights_device={tier}", f"optimizer.state_device={tier}", *((_DISK_DIR,) if tier == "disk" else ())
    sizes = (
        "model.num_layers=4",
        "moe.ffn_hidden_size=384",
        "training.micro_batch_size=2",
        "training.global_batch_size=8",
    )
    return _case(
        "gpt_moe_tiny",
        f"experts on {tier}{layout}",
        ranks,
        "optimizer.bucket_parameters=65536",
        *sizes,
        *targets,
        *overrides,
    )


EXPERT_CASES = [
    _streamed("host", "", 1),
    _streamed("host", ", by layer, bf16", 1, *_BY_LAYER, _BF16),
    _streamed("disk", ", bf16", 1, _BF16),
    _streamed("disk", ", by layer", 1, *_BY_LAYER),
    _streamed("host", ", EP2, bf16", 2, "parallel.expert=2", _BF16),
    _streamed("disk", ", EP2, by layer", 2, "parallel.expert=2", *_BY_LAYER),
    _streamed("host", ", DP2 in parts", 2, _SHARDED),
    _streamed("host", ", DP2, bf16", 2, _ALL, _BF16),
    _streamed("disk", ", DP2 in parts, by layer, bf16", 2, _SHARDED, *_BY_LAYER, _BF16),
    _streamed("host", ", PP2, full recompute", 2, "parallel.pipeline=2", "training.recompute=full"),
    _streamed("disk", ", PP2, bf16", 2, "parallel.pipeline=2", _BF16),
    _streamed(
        "host",
        ", EP2xDP2 in parts, by layer, layer inputs on the host",
        4,
        "parallel.expert=2",
        _SHARDED,
        *_BY_LAYER,
        "training.activation_offload=auto",
    ),
]


# ---------------------------------------------------------------------------------------------------------------------
# On the ranks
# ---------------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that come into being inside the block, and the most that were there at once.

    torch.distributed's MemTracker does the same, but cannot enter Megatron-core's DDP, whose `buffers` is a list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        # By identity: the storages that are there before the block, and those whose end will be noticed.
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor):
                self._seen[item.untyped_storage()] = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage not in self._seen:
                    self._seen[storage] = None
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, storage.nbytes()).atexit = False
        return result

    def _gone(self, num_bytes: int) -> None:
        self.now -= num_bytes


class _NoModules(nullcontext[None]):
    """Counts of the whole alone: torch's own follows modules by hooks, which torch.autograd.grad refuses."""

    parents = ("Global",)


def measure(config: Config) -> dict[str, Any]:
    """Bytes by kind and operations of one training step of this rank."""
    from torch.utils.flop_counter import FlopCounterMode

    from memory.pool import WORKSPACE
    from parallel import topology as topology_module
    from simulator.run_plan import make_plan, state_headroom
    from training.engine import Engine
    from training.starting.dry_run import made_up_batches
    from training.step import train_step

    gc.collect()  # an earlier run in this process may still have host memory, which would leave less for this one
    topology = topology_module.initialize(config)
    plan = make_plan(Job(config, topology.world_size, VOCAB_SIZE, topology.device.type))
    model = Engine(config, topology, VOCAB_SIZE, state_headroom(plan.memory[topology.rank], plan.capacity))
    count = config.training.global_batch_size // (config.training.micro_batch_size * topology.data.size)
    batches = made_up_batches(config, count, VOCAB_SIZE, seed=topology.data.rank)
    train_step(model, batches, 1)
    exchanged = ContextBytes(topology.context.group)
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter, exchanged:
        train_step(model, batches, 2)
    WORKSPACE.pooled = False
    WORKSPACE._free.clear()  # a pool of host memory, which a GPU's allocator takes the place of
    try:
        gc.collect()
        known = _storages_by_kind(model)
        inputs = {tensor.untyped_storage()._cdata for batch in batches for tensor in batch.values()}
        with LiveBytes() as live:
            train_step(model, batches, 3)
        bytes_of = {kind: sum(storages.values()) for kind, storages in known.items()}
        in_kinds = inputs.union(*known.values())
        others = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _own_tensors(model)}
        bytes_of["buffers"] = sum(size for storage, size in others.items() if storage not in in_kinds)
        bytes_of["activations"] = live.peak
        bytes_of["disk"] = _disk_bytes(model)
    finally:
        WORKSPACE.pooled = True
        model.close()
    return {**bytes_of, "flops": counter.get_total_flops(), "exchanged": exchanged.sent}


def _own_tensors(model: Engine) -> list[torch.Tensor]:
    """What stays between steps besides weights, gradients and optimizer: the gather buffer, tables of positions, slots
    for copies of experts."""
    from megatron.core import parallel_state

    from moe.layer import MixtrainMoELayer

    found = list(parallel_state.get_global_memory_buffer().buffer.values())
    for chunk in model.bare_chunks:
        if chunk.rotary is not None:
            found.append(chunk.rotary.of_length(model.config.model.sequence_length, model.topology.device))
        for module in chunk.modules():
            if isinstance(module, MixtrainMoELayer) and (placement := module.placement) is not None:
                if (buffers := placement.replica_buffers) is not None:
                    found.append(buffers.weights)
                    found += [] if buffers._grads is None else [buffers._grads]
    return found


def _storages_by_kind(model: Engine) -> dict[str, dict[int, int]]:
    from optim.offload.optimizer import offload_of
    from parallel.megatron.optimizer import members

    def storages(tensors: Any) -> dict[int, int]:
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}

    stream = model.experts  # of experts off the device, whose parameters are stand-ins
    buffers, grad_slots = ([], []) if stream is None else (stream.weight_slots, stream.grad_slots)
    weights = storages(p.data for chunk in model.bare_chunks for p in chunk.parameters())
    weights |= storages(buffer.flat for buffer in buffers)
    gradients = storages(
        b.grad_data for chunk in model.chunks for b in [*chunk.buffers, *chunk.expert_parallel_buffers]
    )
    gradients |= storages(buffer.flat for buffer in grad_slots)
    state: list[torch.Tensor] = []
    for member in members(model.optimizer):
        if member.optimizer is not None:
            for group in member.optimizer.param_groups:
                state += group["params"]
            for values in member.optimizer.state.values():
                state += [value for value in values.values() if isinstance(value, torch.Tensor)]
    tiers = offload_of(model.optimizer)
    memory = None if tiers is None else tiers.memory
    on_device = [] if memory is None else [*memory.resident, *memory.device_stages]
    state += _tensors(on_device)
    optimizer = {key: size for key, size in storages(state).items() if key not in weights}
    of_tiers = storages([] if memory is None else _tensors([*vars(memory).values(), *vars(memory.store).values()]))
    host = {key: size for key, size in of_tiers.items() if key not in optimizer}
    host |= storages([] if model.layer_inputs is None else model.layer_inputs.memory)
    if tiers is not None and tiers.experts is not None:
        experts = tiers.experts
        stages = [] if experts._stages is None else experts._stages._stages
        host |= storages(_tensors([*vars(experts.store).values(), experts.buffer, stages]))
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "host": host}


def _tensors(found: Any) -> list[torch.Tensor]:
    """All tensors in lists of tensors and of plain records of them."""
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, (list, tuple)):
        return [tensor for each in found for tensor in _tensors(each)]
    return _tensors(list(vars(found).values())) if is_dataclass(found) else []


def _disk_bytes(model: Engine) -> int:
    from optim.offload.optimizer import offload_of

    tiers = offload_of(model.optimizer)
    if tiers is None:
        return 0
    files = [tiers.memory.disk, None if tiers.experts is None else tiers.experts.disk]
    return sum(file.num_bytes for file in files if file is not None)


def _formulas() -> dict[Any, Any]:
    """What PyTorch's counter does not know: the CPU's attention kernel, forward and backward, and products that add in
    place."""
    aten = torch.ops.aten

    def attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        batch, heads, length, channels = query
        return 4 * batch * heads * length * key[2] * channels

    def attention_backward(grad: Any, query: Any, key: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        batch, heads, length, channels = query
        return 10 * batch * heads * length * key[2] * channels

    def add_product(total: Any, left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * left[0] * left[1] * right[1]

    return {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        aten.addmm_: add_product,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Comparing
# ---------------------------------------------------------------------------------------------------------------------


def compare(case: Case, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plan beside the measurement; `ratios` is plan over measurement."""
    from models.blueprint import padded_vocab_size
    from simulator.flops import executed_flops_per_token
    from simulator.run_plan import make_plan

    config = make_config([f"experiment={case.preset}", "training.device=cpu", *case.overrides, *overrides], case.ranks)
    measured = distributed.run(measure, case.ranks, config, timeout=TIMEOUT)
    plan = make_plan(Job(config, case.ranks, VOCAB_SIZE, "cpu"))
    plans = plan.memory
    exchanged = {
        "planned": sum(plan.communication[each.stage]["context_exchange"] for each in plans),
        "measured": sum(each["exchanged"] for each in measured),
    }
    rank = max(range(case.ranks), key=lambda rank: sum(measured[rank][kind] for kind in KINDS))
    planned = {kind: getattr(plans[rank], kind) for kind in KINDS}
    tokens = config.training.global_batch_size * config.model.sequence_length
    flops = sum(result["flops"] for result in measured) / tokens
    planned_flops = executed_flops_per_token(config, padded_vocab_size(VOCAB_SIZE, config.parallel.tensor), "cpu")
    ratios = {
        kind: planned[kind] / measured[rank][kind]
        for kind in KINDS
        if max(planned[kind], measured[rank][kind]) >= SMALL
    }
    total = sum(measured[rank][kind] for kind in KINDS)
    worst = max(abs(ratio - 1) for ratio in [*ratios.values(), sum(planned.values()) / total])
    return {
        "preset": case.preset,
        "layout": case.layout,
        "ranks": case.ranks,
        "rank": rank,
        "planned": planned,
        "measured": {kind: measured[rank][kind] for kind in KINDS},
        "by_rank": [(plans[i].activations, measured[i]["activations"]) for i in range(case.ranks)],
        "ratios": {**ratios, "total": sum(planned.values()) / total},
        "flops": flops,
        "flops_ratio": planned_flops / flops,
        "exchanged": exchanged,
        "passed": worst <= MEMORY_BOUND
        and abs(planned_flops / flops - 1) <= FLOPS_BOUND
        and abs(exchanged["planned"] - exchanged["measured"]) <= case.ranks,  # each rank's mean is a whole number
    }


def _row(result: dict[str, Any]) -> list[str]:
    cells = [
        result["preset"],
        result["layout"],
        str(result["ranks"]),
        f"{sum(result['measured'].values()) / STORAGE_MIB:.1f}",
    ]
    cells += [f"{result['ratios'][kind]:.3f}" if kind in result["ratios"] else "" for kind in (*KINDS, "total")]
    exchanged = result["exchanged"]
    cells.append(f"{result['flops_ratio']:.4f}")
    cells.append(f"{exchanged['planned'] / exchanged['measured']:.6f}" if exchanged["measured"] else "")
    return [*cells, "" if result["passed"] else "TOO FAR"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first three cases")
    parser.add_argument("--context", action="store_true", help="the cases with context parallelism")
    parser.add_argument("--experts", action="store_true", help="the cases with experts off the device")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases, from 0")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides for all cases")
    arguments = parser.parse_args()
    every = [*CASES, *TIER_CASES, *CONTEXT_CASES, *EXPERT_CASES]
    cases = CASES[:3] if arguments.quick else CONTEXT_CASES if arguments.context else every
    cases = EXPERT_CASES if arguments.experts else cases
    if arguments.cases is not None:
        cases = [every[number] for number in arguments.cases]
    headings = ["preset", "layout", "ranks", "MiB", *KINDS, "total", "FLOPs", "exchanged", ""]
    results = []
    try:
        for case in cases:
            results.append(compare(case, arguments.overrides))
            print(
                f"{case.preset} {case.layout}: {'as planned' if results[-1]['passed'] else 'TOO FAR'}",
                file=sys.stderr,
                flush=True,
            )
    finally:
        distributed.shutdown()
    print(table(headings, [_row(result) for result in results], arguments.markdown))
    passed = sum(result["passed"] for result in results)
    print(f"{passed} of {len(results)} within 10% of memory by kind and 1% of the operations, exchanged bytes alike")
    if arguments.json:
        print(json.dumps({"cases": results}))
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    from benchmarks.speed import plan_accuracy  # under the name by which ranks find its functions

    sys.exit(plan_accuracy.main())
