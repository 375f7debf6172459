"""A run's plan in words and tables, as `python train.py plan=true` prints it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from configs import derived, hardware_files
from configs.ranks import launched
from configs.rules import idle
from configs.schema import Config
from models.blueprint import padded_vocab_size, parts
from moe.placement_map import PlacementMap
from optim.arrangement.arrange import Arrangement
from parallel.pipeline import layers_of_stage
from simulator.clock.hardware import Hardware
from simulator.clock.output.trace import FOLDER as TRACES
from simulator.clock.output.trace import write_traces
from simulator.clock.output.words import step_in_words
from simulator.communication import KINDS as SENT_KINDS
from simulator.context.rows import Lengths
from simulator.context.words import context_in_words, count, size, table
from simulator.flops import executed_flops_per_token, forward_flops_per_token, training_flops_per_token
from simulator.memory import KINDS
from simulator.off_device.words import experts_in_words
from simulator.parameters import places
from simulator.run_plan import RunPlan, make_plan, refuse_what_cannot_fit, room_beside
from simulator.tiers import ASSUMED, engine_seconds

MOST_GROUPS = 8  # expert groups or data ranks of a stage that are drawn one by one


def show(
    config: Config,
    world_size: int,
    vocab_size: int,
    attended_share: float | None = None,
    documents: Sequence[Lengths] | None = None,
    hardware: Hardware | None = None,
) -> int:
    """Print the plan that `plan=true` or `plan=json` asks for; the exit status. With `hardware` the predicted step's
    traces are written into the run's folder. Raises ConfigError where it does not fit the limit or the budgets."""
    plan = make_plan(
        config, world_size, vocab_size, attended_share=attended_share, documents=documents, hardware=hardware
    )
    if launched().rank == 0:
        write_timeline(plan)
        print(json.dumps(plan.as_dict()) if config.plan == "json" else text(plan), flush=True)
    refuse_what_cannot_fit(plan)
    return 0


def write_timeline(plan: RunPlan) -> None:
    """Write the traces of the predicted step into the run's folder, where there is one. Rank 0 calls it."""
    if plan.step is not None:
        first_ranks = range(0, plan.world_size, plan.world_size // plan.config.parallel.pipeline)
        write_traces(plan.step, Path(plan.config.run_dir), first_ranks)


def text(plan: RunPlan) -> str:
    """Everything, one section after the other."""
    sections = [
        _model(plan),
        _layout(plan),
        context_in_words(plan),
        _memory(plan),
        _tiers(plan),
        experts_in_words(plan.expert_options, plan.memory),
        _communication(plan),
        _time(plan),
    ]
    sections += [idle.ready(plan.config), no_export(plan.unexportable)]
    return "\n\n".join(section for section in sections if section)


def no_export(why: str | None) -> str:
    """What a run whose model leaves in no Hugging Face family says of it; empty where it does."""
    return "" if why is None else f"no export to Hugging Face: {why}"


def _model(plan: RunPlan) -> str:
    config, vocab = plan.config, plan.vocab_size
    padded, share = padded_vocab_size(vocab, config.parallel.tensor), plan.attended_share
    executed = executed_flops_per_token(config, padded, plan.device, share, plan.shared)
    tokens = config.training.global_batch_size * config.model.sequence_length
    flops = training_flops_per_token(config, vocab, share)
    square = "full attention square" if share is None else f"{share:.3g} of the attention square"
    lines = [
        f"Plan of {config.name}: {config.model.family}, {plan.world_size} {plan.device} rank(s), "
        f"{config.training.precision}",
        f"  parameters         {plan.total_parameters:,} ({count(plan.total_parameters).strip()}), "
        f"active on a token {plan.active_parameters:,} ({count(plan.active_parameters).strip()})",
        f"  FLOPs per token    forward {count(forward_flops_per_token(config, vocab, share))}FLOP, training "
        f"{count(flops)}FLOP (of MFU); carried out {count(executed)}FLOP ({square}, recomputation, padding)",
        f"  a step             {config.training.global_batch_size} samples, {tokens:,} tokens, "
        f"{count(flops * tokens)}FLOP; {derived.num_micro_batches(config, plan.world_size)} micro-batch(es) of "
        f"{config.training.micro_batch_size} on each rank",
        *_documents(plan),
    ]
    return "\n".join(lines)


def _documents(plan: RunPlan) -> list[str]:
    """What separate documents leave of attention; nothing where documents are joined."""
    if plan.config.data.documents != "separate":
        return []
    if plan.attended_share is None:
        known = "the corpus is not prepared with these settings: FLOPs are those of joined ones, the most they can be"
    else:
        known = f"{plan.attended_share:.1%} of the pairs of one-document samples attend, by the corpus' lengths"
    return [f"  separate documents {known}"]


def _layout(plan: RunPlan) -> str:
    config, parallel = plan.config, plan.config.parallel
    sizes = {
        "pipeline": parallel.pipeline,
        "virtual": parallel.virtual_pipeline or 1,
        "data": derived.data_parallel_size(config, plan.world_size),
        "context": parallel.context,
        "tensor": parallel.tensor,
    }
    if derived.is_moe(config):
        copies = derived.expert_data_parallel_size(config, plan.world_size)
        sizes |= {"expert": parallel.expert, "expert tensor": derived.expert_tensor_size(config), "expert data": copies}
    lines = ["Layout: " + " x ".join(f"{name} {number}" for name, number in sizes.items())]
    everyone = list(places(config, plan.world_size))
    for stage in range(parallel.pipeline):
        ranks = [place for place in everyone if place.stage == stage]
        ends = parts(config)[stage]
        holds = [f"layers {', '.join(_range(chunk) for chunk in layers_of_stage(config, stage))}"]
        holds = (["embedding"] if ends[0].is_first else []) + holds + (["head, loss"] if ends[-1].is_last else [])
        lines.append(f"  stage {stage}: ranks {_range(range(ranks[0].rank, ranks[-1].rank + 1))}; {'; '.join(holds)}")
        groups: dict[int, list[int]] = {}
        for place in ranks:
            groups.setdefault(place.data, []).append(place.rank)
        lines += [
            f"    data {data}: [{_ranks(of_data)}]{_expert_note(config, everyone, of_data)}"
            for data, of_data in _few(groups)
        ]
        if len(groups) > MOST_GROUPS:
            lines.append(f"    ... and {len(groups) - MOST_GROUPS} more like these")
    if parallel.context > 1:
        lines.append("  In brackets: ranks with parts of the same samples, tensor ranks side by side.")
    elif parallel.tensor > 1:
        lines.append("  In brackets: tensor ranks, which hold the parts of the same weights.")
    return "\n".join(lines)


def _few(groups: dict[int, list[int]]) -> list[tuple[int, list[int]]]:
    return list(groups.items())[:MOST_GROUPS]


def _ranks(ranks: Sequence[int]) -> str:
    return " ".join(str(rank) for rank in ranks) if len(ranks) <= 16 else f"{ranks[0]} ... {ranks[-1]}"


def _expert_note(config: Config, everyone: Sequence, ranks: Sequence[int]) -> str:  # type: ignore[type-arg]
    if config.moe.num_experts is None:
        return ""
    experts_of = PlacementMap(config.moe.num_experts, config.parallel.expert).experts_of
    held = dict.fromkeys(everyone[rank].expert for rank in ranks)
    return "  experts " + " | ".join(_range(experts_of(number)) for number in held)


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _memory(plan: RunPlan) -> str:
    rows = []
    for stage in range(plan.config.parallel.pipeline):
        worst = max((rank for rank in plan.memory if rank.stage == stage), key=lambda rank: rank.total)
        mark = "<- most" if worst.stage == plan.worst.stage else ""
        rows.append(
            [str(stage), str(worst.rank), *(size(getattr(worst, kind)) for kind in KINDS), size(worst.total), mark]
        )
    lines = ["Memory of a rank (the fullest of each stage):", table(["stage", "rank", *KINDS, "total", ""], rows)]
    if host := max(rank.host_activations for rank in plan.memory):
        out, back = map(max, zip(*(rank.link_activations for rank in plan.memory), strict=True))
        lines.append(
            f"  Layer inputs on the host come beside these: up to {size(host)} a rank; a step copies {size(out)} there "
            f"and {size(back)} back."
        )
    lines.append("  Tensors alone: a GPU's libraries and its allocator's gaps come on top, some GiB.")
    if derived.is_moe(plan.config) and plan.config.parallel.expert > 1:
        bound = size(derived.dispatch_bound(plan.config))
        lines.append(
            f"  Dispatch of a chunk, to a rank and back, never takes more than {bound}, whatever routing does "
            "(moe.token_budget)."
        )
    if derived.places_experts(plan.config):
        copies, slots = derived.copy_bytes(plan.config), plan.config.moe.placement.extra_slots
        blocks = derived.block_rows(plan.config) is not None
        grads = "their blocks' gradients travel at once" if blocks else "and as many gradients in fp32"
        lines.append(
            f"  Buffers have {slots} slots for copies of experts in each MoE layer, {size(copies)} of weights, {grads}."
        )
    if derived.limits_load(plan.config):
        asked = plan.config.moe.placement
        over = "ends the run" if asked.over_limit == "stop" else "takes more, and is counted"
        lines.append(
            f"  With the busiest rank at moe.placement.max_load ({asked.max_load}) times the mean rank's assignments; "
            f"a call that cannot keep it {over} (moe.placement.over_limit={asked.over_limit})."
        )
    elif derived.is_moe(plan.config):
        lines.append(
            "  With every expert equally busy; the busiest rank's experts take as many times more as it has more "
            "tokens."
        )
    return "\n".join(lines)


def _tiers(plan: RunPlan) -> str:
    """Where optimizer state lies that is kept in tiers: a line each, of the rank that has most there."""
    found = [(rank, rank.tiers) for rank in plan.memory if rank.tiers is not None]
    if not found:
        return ""
    settings, memory = plan.config.optimizer, plan.config.memory
    lines = [f"Optimizer state by tier (optimizer.state_device={settings.state_device}), of the rank with most in it:"]
    for tier, key, given in (
        ("device", "training.memory_limit_gib", None),
        ("host", "memory.host_budget", memory.host_budget),
        ("disk", "memory.disk_budget", memory.disk_budget),
    ):
        rank, tiers = max(found, key=lambda each: _in_tier(each[1], tier))
        parts = [f"{tiers.tiers.count(tier)} of {len(tiers.tiers)} buckets"]
        if tier == "host":
            parts += [f"{what} {size(number)}" for what, number in tiers.host_parts.items() if number]
        room = {"device": room_beside(rank, plan.rooms), "host": plan.rooms.host, "disk": plan.rooms.disk}[tier]
        if tier == "disk" and memory.disk_dir is None:
            parts.append("no memory.disk_dir")
        elif math.isfinite(room):
            why = "beside all else" if tier == "device" else f"{key}{'' if given else ', of what is free'}"
            parts.append(f"of {size(room)} ({why})")
        lines.append(f"  {tier:<6} {size(_in_tier(tiers, tier)):>11}  rank {rank.rank}: {', '.join(parts)}")
    share = min(tiers.early_share for _, tiers in found)
    why = "" if plan.config.parallel.overlap_grad_reduce else " (parallel.overlap_grad_reduce is false)"
    lines.append(
        f"  in the backward pass the gradients of {share:.1%} of the parameters (at least) can leave or be used{why}"
    )
    if settings.state_device != "device":
        lines.append(f"  {_saved(plan, min(tiers.saved for _, tiers in found))}")
    return "\n".join([*lines, f"  {_engine(plan, found[0][1])}"])


def _saved(plan: RunPlan, least: int) -> str:
    """What tiers are for, of the rank that has least of it."""
    if least <= 0:
        return "this saves nothing: a rank's device has as much in use as with optimizer.state_device=device"
    words = f"this saves {size(least)} of a rank's device, or more"
    return f"{words}; with training.device=cpu that is the host's memory too" if plan.device == "cpu" else words


def _in_tier(tiers: Arrangement, tier: str) -> int:
    return {"device": tiers.device_bytes, "host": tiers.host_bytes, "disk": tiers.disk_bytes}[tier]


def _engine(plan: RunPlan, tiers: Arrangement) -> str:
    """What updates the weights."""
    engine = plan.config.optimizer.engine
    if set(tiers.tiers) == {"device"}:
        return "weights are updated in place"
    if not tiers.flexible:
        return f"optimizer.engine={engine}"
    words = f"optimizer.engine={engine}: a run measures the link and both updates, and chooses; it has memory for both"
    if plan.device == "cpu" or engine == "split":
        return words
    busy = 0.0 if plan.step is None else plan.step.seconds
    seconds, link = engine_seconds(tiers, busy), ASSUMED.up / 1e9
    fastest = min(seconds, key=seconds.__getitem__)
    beside = (
        f"{seconds[fastest]:.3g} s with the passes" if busy else f"{seconds[fastest]:.3g} s, which the passes can hide"
    )
    return (
        f"{words}.\n  With a link of {link:g} GB/s in each direction and a host's update of {ASSUMED.host / 1e9:g} "
        f"GB/s (assumed) it takes {fastest}: {beside}"
    )


def _communication(plan: RunPlan) -> str:
    rows = [[str(stage), *(size(sent[kind]) for kind in SENT_KINDS)] for stage, sent in enumerate(plan.communication)]
    headings = ["stage", *(kind.replace("_", " ") for kind in SENT_KINDS)]
    return "\n".join(["Sent by a rank in a step:", table(headings, rows)])


def _time(plan: RunPlan) -> str:
    if plan.step is not None and plan.hardware is not None:
        where = Path(plan.config.run_dir) / TRACES
        return f"{step_in_words(plan.step, plan.hardware, plan.tokens)}\n  its timeline is in {where}"
    names = ", ".join(hardware_files.names())
    return f"Step time: no prediction without a machine: give hardware=NAME, one of {names}, or a file's path."
