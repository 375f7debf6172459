"""Text of a run's plan, as `python train.py plan=true` prints it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from base.ranks import launched
from configs import derived, hardware_files
from configs.job import Job
from configs.rules import idle
from models.blueprint import model_chunks, padded_vocab_size
from moe.placement_map import PlacementMap
from optim.arrangement.buckets import Arrangement
from parallel.pipeline import layers_of_stage
from simulator.clock.hardware import Hardware
from simulator.clock.prediction import describe_step
from simulator.clock.trace import FOLDER as TRACES
from simulator.clock.trace import write_traces
from simulator.communication import KINDS as SENT_KINDS
from simulator.context.context_sizes import ContextSize, context_sizes, layer_exchange
from simulator.context.shared_rows import Lengths, SharedRows
from simulator.flops import executed_flops_per_token, forward_flops_per_token, training_flops_per_token
from simulator.memory import KINDS
from simulator.offload.expert_options import format_expert_options
from simulator.offload.state import ASSUMED, engine_seconds
from simulator.parameters import rank_coordinates
from simulator.run_plan import RunPlan, make_plan, refuse_what_cannot_fit, state_headroom
from simulator.sizes import format_count, format_size, format_table

LONG_TOKENS = 2**15  # a plan compares sizes of context for micro-batches of at least this number of tokens
UNKNOWN_LENGTHS = ", were samples of one document (the corpus is not prepared)"
MOST_GROUPS = 8  # maximum number of data-parallel ranks of a stage that are listed


def show(
    job: Job,
    attended_share: float | None = None,
    documents: Sequence[Lengths] | None = None,
    hardware: Hardware | None = None,
) -> int:
    """Print the plan that `plan=true` or `plan=json` asks for, and return the exit status.

    With `hardware`, traces of the predicted step are written to the run's folder. Raises ConfigError if the plan does
    not fit the memory limit or the budgets.
    """
    plan = make_plan(job, attended_share=attended_share, documents=documents, hardware=hardware)
    if launched().rank == 0:
        write_timeline(plan)
        print(json.dumps(plan.as_dict()) if job.config.plan == "json" else text(plan), flush=True)
    refuse_what_cannot_fit(plan)
    return 0


def write_timeline(plan: RunPlan) -> None:
    """Write the traces of the predicted step, if there is one, to the run's folder. Only rank 0 calls this."""
    if plan.step is not None:
        config, ranks = plan.job.config, plan.job.world_size
        write_traces(plan.step, Path(config.run_dir), range(0, ranks, ranks // config.parallel.pipeline))


def text(plan: RunPlan) -> str:
    """Return the text of the whole plan, section by section."""
    sections = [_model(plan), _layout(plan), describe_context(plan), _memory(plan), _optimizer_state(plan)]
    sections += [format_expert_options(plan.expert_options, plan.memory), _communication(plan), _time(plan)]
    sections += [idle.ready(plan.job.config), no_export(plan.unexportable)]
    return "\n\n".join(section for section in sections if section)


def no_export(why: str | None) -> str:
    """Return the line that says why the model cannot be exported to Hugging Face; "" if `why` is None."""
    return "" if why is None else f"no export to Hugging Face: {why}"


def _model(plan: RunPlan) -> str:
    job, config, vocab = plan.job, plan.job.config, plan.job.vocab_size
    padded, share = padded_vocab_size(vocab, config.parallel.tensor), plan.attended_share
    executed = executed_flops_per_token(config, padded, job.device, share, plan.shared)
    flops = training_flops_per_token(config, vocab, share)
    square = "full attention square" if share is None else f"{share:.3g} of the attention square"
    lines = [
        f"Plan of {config.name}: {config.model.family}, {job.world_size} {job.device} rank(s), "
        f"{config.training.precision}",
        f"  parameters         {plan.total_parameters:,} ({format_count(plan.total_parameters).strip()}), "
        f"active per token {plan.active_parameters:,} ({format_count(plan.active_parameters).strip()})",
        f"  FLOPs per token    forward {format_count(forward_flops_per_token(config, vocab, share))}FLOP, training "
        f"{format_count(flops)}FLOP (of MFU); carried out {format_count(executed)}FLOP "
        f"({square}, recomputation, padding)",
        f"  a step             {config.training.global_batch_size} samples, {plan.tokens:,} tokens, "
        f"{format_count(flops * plan.tokens)}FLOP; {plan.micro_batches} micro-batch(es) of "
        f"{config.training.micro_batch_size} on each rank",
    ]
    if config.data.documents == "separate":
        known = "the corpus is not prepared with these settings: FLOPs are those of joined ones, the maximum"
        if share is not None:
            known = f"{share:.1%} of the pairs of one-document samples attend, by the corpus' lengths"
        lines.append(f"  separate documents {known}")
    return "\n".join(lines)


def _layout(plan: RunPlan) -> str:
    config, parallel, world_size = plan.job.config, plan.job.config.parallel, plan.job.world_size
    sizes = {
        "pipeline": parallel.pipeline,
        "virtual": parallel.virtual_pipeline or 1,
        "data": derived.data_parallel_size(config, world_size),
        "context": parallel.context,
        "tensor": parallel.tensor,
    }
    if derived.is_moe(config):
        sizes |= {"expert": parallel.expert, "expert tensor": derived.expert_tensor_size(config)}
        sizes["expert data"] = derived.expert_data_parallel_size(config, world_size)
    lines = ["Layout: " + " x ".join(f"{name} {number}" for name, number in sizes.items())]
    everyone = list(rank_coordinates(config, world_size))
    for stage in range(parallel.pipeline):
        ranks = [each for each in everyone if each.stage == stage]
        ends = model_chunks(config)[stage]
        holds = [f"layers {', '.join(_range(chunk) for chunk in layers_of_stage(config, stage))}"]
        holds = (["embedding"] if ends[0].is_first else []) + holds + (["head, loss"] if ends[-1].is_last else [])
        lines.append(f"  stage {stage}: ranks {_range(range(ranks[0].rank, ranks[-1].rank + 1))}; {'; '.join(holds)}")
        groups: dict[int, list[int]] = {}
        for each in ranks:
            groups.setdefault(each.data, []).append(each.rank)
        for data, of_data in list(groups.items())[:MOST_GROUPS]:
            shown = " ".join(map(str, of_data)) if len(of_data) <= 16 else f"{of_data[0]} ... {of_data[-1]}"
            note = ""
            if config.moe.num_experts is not None:
                experts_of = PlacementMap(config.moe.num_experts, parallel.expert).experts_of
                held = dict.fromkeys(everyone[rank].expert for rank in of_data)
                note = "  experts " + " | ".join(_range(experts_of(number)) for number in held)
            lines.append(f"    data {data}: [{shown}]{note}")
        if len(groups) > MOST_GROUPS:
            lines.append(f"    ... and {len(groups) - MOST_GROUPS} more like these")
    if parallel.context > 1:
        lines.append("  In brackets: ranks with parts of the same samples, tensor ranks side by side.")
    elif parallel.tensor > 1:
        lines.append("  In brackets: tensor ranks, which hold the parts of the same weights.")
    return "\n".join(lines)


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _memory(plan: RunPlan) -> str:
    config, table_rows = plan.job.config, list[list[str]]()
    for stage in range(config.parallel.pipeline):
        worst = max((rank for rank in plan.memory if rank.stage == stage), key=lambda rank: rank.total)
        by_kind = [format_size(getattr(worst, kind)) for kind in (*KINDS, "total")]
        mark = "<- most" if worst.stage == plan.worst.stage else ""
        table_rows.append([str(stage), str(worst.rank), *by_kind, mark])
    lines = ["Memory of a rank (the fullest of each stage):"]
    lines.append(format_table(["stage", "rank", *KINDS, "total", ""], table_rows))
    if host := max(rank.host_activations for rank in plan.memory):
        out, back = map(max, zip(*(rank.link_activations for rank in plan.memory), strict=True))
        lines.append(
            f"  Layer inputs on the host are not included: up to {format_size(host)} per rank; a step copies "
            f"{format_size(out)} to the host and {format_size(back)} back."
        )
    lines.append("  These are tensors only: libraries of a GPU and gaps of its allocator take some GiB more.")
    if derived.is_moe(config) and config.parallel.expert > 1:
        bound = format_size(derived.dispatch_bound(config))
        lines.append(
            f"  Dispatch of a chunk, to a rank and back, never takes more than {bound}, whatever the routing "
            "(moe.token_budget)."
        )
    if derived.places_experts(config):
        replicas, num_slots = derived.replica_bytes(config), config.moe.placement.extra_slots
        blocks = derived.block_rows(config) is not None
        grads = "their blocks' gradients travel at once" if blocks else "and as many gradients in fp32"
        lines.append(
            f"  Buffers have {num_slots} slots for replicas of experts in each MoE layer, {format_size(replicas)} of "
            f"weights, {grads}."
        )
    if derived.limits_load(config):
        asked = config.moe.placement
        over = "ends the run" if asked.over_limit == "stop" else "takes more, and is counted"
        lines.append(
            f"  With the busiest rank at moe.placement.max_load ({asked.max_load}) times the mean rank's assignments; "
            f"a call that cannot keep it {over} (moe.placement.over_limit={asked.over_limit})."
        )
    elif derived.is_moe(config):
        lines.append(
            "  For equally busy experts; if a rank's experts have twice the tokens, their activations take twice the "
            "memory."
        )
    return "\n".join(lines)


def _optimizer_state(plan: RunPlan) -> str:
    """Return the lines about optimizer state on device, host and disk, each for the rank with the most."""
    found = [(rank, rank.arrangement) for rank in plan.memory if rank.arrangement is not None]
    if not found:
        return ""
    config, settings, memory = plan.job.config, plan.job.config.optimizer, plan.job.config.memory
    lines = [f"Optimizer state by target (optimizer.state_device={settings.state_device}), of the rank with the most:"]
    for target, key, given in (
        ("device", "training.memory_limit_gib", None),
        ("host", "memory.host_budget", memory.host_budget),
        ("disk", "memory.disk_budget", memory.disk_budget),
    ):
        rank, arrangement = max(found, key=lambda each: getattr(each[1], f"{target}_bytes"))
        notes = [f"{arrangement.targets.count(target)} of {len(arrangement.targets)} buckets"]
        if target == "host":
            purposes = arrangement.host_bytes_by_purpose.items()
            notes += [f"{purpose} {format_size(number)}" for purpose, number in purposes if number]
        limit = state_headroom(rank, plan.capacity) if target == "device" else getattr(plan.capacity, target)
        if target == "disk" and memory.disk_dir is None:
            notes.append("no memory.disk_dir")
        elif math.isfinite(limit):
            why = "beside all else" if target == "device" else f"{key}{'' if given else ', of what is free'}"
            notes.append(f"of {format_size(limit)} ({why})")
        held = format_size(getattr(arrangement, f"{target}_bytes"))
        lines.append(f"  {target:<6} {held:>11}  rank {rank.rank}: {', '.join(notes)}")
    share = min(arrangement.early_share for _, arrangement in found)
    why = "" if config.parallel.overlap_grad_reduce else " (parallel.overlap_grad_reduce is false)"
    lines.append(f"  at least {share:.1%} of the gradients can be offloaded or used during the backward pass{why}")
    if settings.state_device != "device":
        saved = min(arrangement.saved for _, arrangement in found)
        saving = f"this saves {format_size(saved)} of a rank's device, or more"
        if saved <= 0:
            saving = "this saves nothing: a rank's device has as much in use as with optimizer.state_device=device"
        elif plan.job.device == "cpu":
            saving += "; with training.device=cpu that is the host's memory too"
        lines.append(f"  {saving}")
    return "\n".join([*lines, f"  {_engine(plan, found[0][1])}"])


def _engine(plan: RunPlan, arrangement: Arrangement) -> str:
    """Return the text about the engine that updates the weights (device or host)."""
    engine = plan.job.config.optimizer.engine
    if set(arrangement.targets) == {"device"}:
        return "weights are updated in place"
    if not arrangement.flexible:
        return f"optimizer.engine={engine}"
    choice = f"optimizer.engine={engine}: a run measures the link and both updates, and chooses; it has memory for both"
    if plan.job.device == "cpu" or engine == "split":
        return choice
    busy = 0.0 if plan.step is None else plan.step.seconds
    seconds, link = engine_seconds(arrangement, busy), ASSUMED.up / 1e9
    fastest = min(seconds, key=seconds.__getitem__)
    note = " with the passes" if busy else ", which the passes can hide"
    return (
        f"{choice}.\n  With a link of {link:g} GB/s in each direction and a host's update of {ASSUMED.host / 1e9:g} "
        f"GB/s (assumed) it takes {fastest}: {seconds[fastest]:.3g} s{note}"
    )


def _communication(plan: RunPlan) -> str:
    sent = [[str(stage), *(format_size(of[k]) for k in SENT_KINDS)] for stage, of in enumerate(plan.communication)]
    headings = ["stage", *(kind.replace("_", " ") for kind in SENT_KINDS)]
    return "\n".join(["Sent by a rank in a step:", format_table(headings, sent)])


def _time(plan: RunPlan) -> str:
    if plan.step is not None and plan.hardware is not None:
        where = Path(plan.job.config.run_dir) / TRACES
        return f"{describe_step(plan.step, plan.hardware, plan.tokens)}\n  its timeline is in {where}"
    names = ", ".join(hardware_files.names())
    return f"Step time: a prediction needs a machine: give hardware=NAME, one of {names}, or a file's path."


def describe_context(plan: RunPlan) -> str:
    """Return the sharding of rows over context ranks and a table of sizes; "" for short samples on one rank."""
    config, shared = plan.job.config, plan.shared
    tokens = config.training.micro_batch_size * config.model.sequence_length
    if shared.context == 1 and tokens < LONG_TOKENS:
        return ""
    lines = _describe_sharing(plan, shared, tokens) if shared.context > 1 else []
    sizes = context_sizes(plan.job, plan.attended_share, plan.documents)
    lines += _describe_sizes(plan, sizes) if len(sizes) > 1 else []
    return "\n".join(lines)


def _describe_sharing(plan: RunPlan, shared: SharedRows, tokens: int) -> list[str]:
    sent = layer_exchange(plan.job.config, shared)
    who = f"they exchange heads for rows in {shared.places} group(s) of {shared.heads}"
    who = who if shared.heads > 1 else "they exchange keys and values alone"
    lines = [f"Context: {shared.context} ranks share {tokens:,} rows of a micro-batch, {shared.rows:,} each; {who}"]
    lines.append(
        f"  a rank sends {format_size(sum(sent.values()))} for a layer's attention and a micro-batch, forward and "
        f"backward: heads {format_size(sent['heads'])}, keys and values with their gradients "
        f"{format_size(sent['rounds'])}"
    )
    if shared.places > 1 and not any(shared.of_layer):
        by = "" if shared.is_known else UNKNOWN_LENGTHS
        lines.append(f"  documents stay whole on their ranks{by}: no keys and values are sent")
    elif shared.places > 1:
        low, high = min(shared.of_layer), max(shared.of_layer)
        by = ", by the documents' lengths" if plan.job.config.data.documents == "separate" else ""
        by = by if shared.is_known else UNKNOWN_LENGTHS
        lines.append(
            f"  attention takes up to {shared.rounds} round(s); {shared.rows * shared.heads:,} rows receive "
            f"keys and values of {low:,.0f} to {high:,.0f} others{by}"
        )
    return lines


def _describe_sizes(plan: RunPlan, sizes: Sequence[ContextSize]) -> list[str]:
    """Return a table of context-parallel sizes, and the size that exchanges the fewest bytes per FLOP, as lines."""
    timed = sizes[0].seconds is not None
    headings, table_rows = ["parallel.context", "heads", "rows", "sent a layer", "B/kFLOP", "a rank needs"], []
    fits = [each.context for each in sizes if each.memory <= plan.capacity.device]
    for each in sizes:
        row = [str(each.context), str(each.heads), f"{each.rank_rows:,}", format_size(each.sent), f"{each.ratio:.3g}"]
        row += [format_size(each.memory), *(f"{seconds:.3g}" for seconds in each.seconds or ())]
        marks = ["this plan"] * (each.context == plan.job.config.parallel.context)
        marks += ["does not fit"] * (each.context not in fits)
        table_rows.append([*row, f"<- {', '.join(marks)}" if marks else ""])
    headings += ["exchange s", "attention s"] if timed else []
    lines = ["Sizes of context (an exchange is for a layer's attention and a micro-batch, on one rank):"]
    lines.append(format_table([*headings, ""], table_rows))
    if fits:
        least = min((each for each in sizes if each.context in fits), key=lambda each: (each.ratio, each.context))
        that = "that fits " if math.isfinite(plan.capacity.device) else ""
        pays = f"parallel.context={least.context} pays most: no other {that}exchanges less for as much work."
    else:
        pays = "None of them fits."
    if not timed:
        pays += " Attention hides an exchange whose B/kFLOP is under 1000 x bytes/s of the link / FLOP/s of the device."
    return [*lines, f"  {pays}"]
