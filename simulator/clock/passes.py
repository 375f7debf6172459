"""Seconds of a block's passes on a hardware, and what they are spent on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from configs.schema import Config
from models.blueprint.operation import CONTEXT, CONTEXT_HEADS, EXPERT_TENSOR, TENSOR
from simulator.clock.axes import Group, collective, exchange
from simulator.clock.hardware import Hardware
from simulator.clock.work import BlockWork, PassWork

Reasons = Counter[str]  # seconds by name in prediction.REASONS
REASON_OF_AXIS = {TENSOR: "tensor", EXPERT_TENSOR: "tensor", CONTEXT: "context", CONTEXT_HEADS: "context"}
SHARPNESS = 6  # of the longer of two that go on at once: at equal lengths both take 12% longer


@dataclass(frozen=True)
class BlockSeconds:
    """By reason, of each pass."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]


class PassClock:
    """Work in seconds."""

    def __init__(self, config: Config, hardware: Hardware, groups: Mapping[str, Group]) -> None:
        self.hardware, self.groups = hardware, groups
        self.products = hardware["products.fp32" if config.training.precision == "fp32" else "products.half"]
        self.attention = self.products if config.training.precision == "fp32" else hardware["attention.half"]

    def block(self, work: BlockWork, calls: tuple[Reasons, Reasons] | None = None) -> BlockSeconds:
        """Both passes; `calls`: of its routed experts, forward and backward."""
        none: Reasons = Counter()
        forward_call, backward_call = calls or (none, none)
        forward, again = self.of(work.forward, forward_call), self.of(work.again, forward_call)
        backward = self.of(work.backward, backward_call)
        backward["recomputed"] += sum(again.values())
        return BlockSeconds(forward, backward)

    def device(self, work: PassWork) -> Reasons:
        """What the device computes."""
        rate, each = self.hardware["device.rate"], self.hardware["device.operation"]
        result: Reasons = Counter()
        result["products"] = work.products / self.products + work.attention / self.attention
        result["memory"] = (work.bytes + work.product_bytes) / rate + work.started * each
        return result

    def of(self, work: PassWork, call: Reasons | None = None) -> Reasons:
        """A pass, with what a call of routed experts takes where it has one."""
        result = self.device(work)
        attention = work.attention / self.attention or result["products"]
        for sent in work.sent:
            group = self.groups[sent.axis]
            if sent.kind == "all_to_all":
                start, each = exchange(self.hardware, group)
                seconds = start + each * sent.num_bytes * (group.size - 1) / group.size
            else:
                seconds = collective(self.hardware, sent.kind, group, sent.num_bytes)
            result[f"{REASON_OF_AXIS[sent.axis]}:{group.place}"] += seconds
        if work.rounds:
            group = self.groups[CONTEXT]
            start, each = exchange(self.hardware, group)
            result[f"context:{group.place}"] += max(0.0, start + each * work.rounds - attention)
        if work.moe and call is not None:
            result.update(call)
        return self._with_launches(result, work.started)

    def _with_launches(self, result: Reasons, started: int) -> Reasons:
        """The host starts operations while the device is at earlier ones, or before each."""
        launching = started * self.hardware["launch.operation"]
        if not self.hardware["launch.overlaps"]:
            result["launches"] += launching
            return result
        device = sum(result.values())
        if longest := max(device, launching):
            shortest = min(device, launching) / longest
            result["launches"] += longest * (1 + shortest**SHARPNESS) ** (1 / SHARPNESS) - device
        return result


def longest(reasons: Mapping[str, float]) -> float:
    """Seconds of all of them."""
    return sum(reasons.values())
