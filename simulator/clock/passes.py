"""Seconds of a block's passes on a hardware, and what they are spent on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.schema import Config
from models.blueprint.operation import CONTEXT, CONTEXT_HEADS, EXPERT_TENSOR, TENSOR
from simulator.clock.axes import Group, collective, exchange
from simulator.clock.hardware import Hardware
from simulator.clock.work import BlockWork, PassWork, Product

REASON_OF_AXIS = {TENSOR: "tensor", EXPERT_TENSOR: "tensor", CONTEXT: "context", CONTEXT_HEADS: "context"}


class Reasons(dict[str, float]):
    """Seconds by name in prediction.REASONS; none of what is not there."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, of: Mapping[str, float], times: float = 1.0) -> None:
        """Add what another mapping has, so many times."""
        for name, seconds in of.items():
            self[name] += times * seconds


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
        self.tile = hardware["products.tile"]
        self.attention = self.products if config.training.precision == "fp32" else hardware["attention.half"]

    def block(self, work: BlockWork, calls: tuple[Reasons, Reasons] | None = None) -> BlockSeconds:
        """Both passes; `calls`: of its routed experts, forward and backward."""
        forward_call, backward_call = calls or (Reasons(), Reasons())
        forward, again = self.of(work.forward, forward_call), self.of(work.again, forward_call)
        backward = self.of(work.backward, backward_call)
        backward["recomputed"] += sum(again.values())
        return BlockSeconds(forward, backward)

    def device(self, work: PassWork) -> Reasons:
        """What the device computes."""
        rate, each = self.hardware["device.rate"], self.hardware["device.operation"]
        result = Reasons()
        products = sum(self.product(each) for each in work.products)
        result["products"] = products + work.attention / self.attention
        result["memory"] = work.bytes / rate + work.started * each
        return result

    def product(self, of: Product) -> float:
        """Seconds of a matrix product."""
        computing = of.flops / self.products * (1 + self.tile * of.edge)
        return max(computing, of.bytes / self.hardware["device.rate"])

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
            if sent.beside is not None:
                seconds = max(0.0, seconds - self.product(sent.beside))
            result[f"{REASON_OF_AXIS[sent.axis]}:{group.place}"] += seconds
        if work.rounds:
            group = self.groups[CONTEXT]
            start, each = exchange(self.hardware, group)
            result[f"context:{group.place}"] += max(0.0, start + each * work.rounds - attention)
        if work.moe and call is not None:
            result.add(call)
        return self._with_launches(result, work.started)

    def _with_launches(self, result: Reasons, started: int) -> Reasons:
        """The host starts operations while the device is at earlier ones; a share of the shorter is not hidden."""
        launching = started * self.hardware["launch.operation"]
        device = sum(result.values())
        exposed = min(1.0, self.hardware["launch.exposed"])
        result["launches"] += max(0.0, launching - device) + exposed * min(device, launching)
        return result
