"""What a plan says of experts off the device."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.context.words import size, table
from simulator.memory import RankMemory
from simulator.off_device.options import ORDER, STATE, WEIGHTS, ExpertOption
from simulator.off_device.parts import expert_parts

HEADINGS = ["weights", "passes", "state", "device", "tokens", "break-even", "up", "down", "read", "written", "step"]


def experts_in_words(found: Sequence[ExpertOption], memory: Sequence[RankMemory]) -> str:
    """Where experts lie, and what else the rules allow; empty where no experts could leave the device."""
    if len(found) < 2 and not any(each.moved.up for each in found):
        return ""
    own = found[0]
    lines = ["Experts by where their weights lie (bytes of one rank in a step; the first is this run's):"]
    lines.append(table([*HEADINGS, "TB a day"], [_row(each) for each in found]))
    lines.append(
        "  tokens: of an expert between two transfers of its weights; below the break-even the link is slower."
    )
    lines += _kept(memory)
    if own.written_a_day:
        lines.append(f"  This run writes {own.written_a_day / 1e12:.3g} TB a day to a node's disk.")
    elif own.written and own.seconds is None:
        lines.append(
            f"  This run writes {size(own.written)} a rank and step to the disk; hardware=NAME says how much a day."
        )
    return "\n".join(lines)


def _row(of: ExpertOption) -> list[str]:
    day = of.written_a_day
    return [
        *(str(of.values[key]) for key in (WEIGHTS, ORDER, STATE)),
        size(of.device),
        f"{of.tokens:,.0f}",
        "" if of.break_even is None else f"{of.break_even:,.0f}",
        *(size(number) if number else "" for number in (of.moved.up, of.moved.down, of.read, of.written)),
        "" if of.seconds is None else f"{of.seconds:.3g} s",
        "" if not day else f"{day / 1e12:.3g}",
    ]


def _kept(memory: Sequence[RankMemory]) -> list[str]:
    """What experts of the rank with most of them take of each tier."""
    found = [rank.experts for rank in memory if rank.experts is not None]
    if not found:
        return []
    most = max(found, key=lambda records: records.weights_kept + records.grads_kept)
    lines = []
    for tier, parts in expert_parts(most).items():
        words = ", ".join(f"{what} {size(number)}" for what, number in parts.items() if number)
        if words:
            lines.append(f"  {tier:<6} {size(sum(parts.values())):>11}  {words}")
    shared = f"; {most.parts} ranks keep a part each" if most.parts > 1 else ""
    lines.append(f"  of {most.num_layers} MoE layers, {most.weight_slots} on the device at once{shared}")
    return lines
