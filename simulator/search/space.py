"""Search space of layouts: groups of layouts, the layouts of a group, and the possible memory savings of each.

Values are generated from divisibility, and the rules of configs/rules reject the rest; a test compares the counts of
both. A key that the user gave has only its given value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from configs import derived
from configs.job import Job
from configs.keys import get
from configs.rules import RULES, values
from configs.schema import Config
from configs.searched import ASKED_KEYS, LAYOUT_KEYS, SAVING_KEYS
from moe.chunk_plan import STRATEGIES

DEGREES = (1, 2, 4, 8)  # numbers of chunks of an MoE layer that are tried
RECOMPUTE = ("none", "selective", "full")
STATE_DEVICES = ("device", "auto", "host", "disk")  # the fastest first
ENGINES = ("auto", "device_stream", "host", "split")
WEIGHT_DEVICES = ("device", "host", "disk")
ORDERS = ("by_micro_batch", "by_layer")
CHECKED = [rule for rule in RULES if rule is not values.values]  # generated values are in their keys' ranges


@dataclass(frozen=True)
class LayoutGroup:
    """A group of layouts that differ only in model chunks, ranks that exchange heads, and micro-batch size."""

    tensor: int
    sequence: bool
    pipeline: int
    context: int
    expert: int
    expert_tensor: int | None  # None: the config's null


@dataclass(frozen=True)
class LayoutCell:
    """A complete layout with its micro-batch size."""

    group: LayoutGroup
    chunks: int | None
    heads: int | None
    micro: int

    def values(self) -> dict[str, Any]:
        """Return the layout's values by key, in the order of LAYOUT_KEYS."""
        group = self.group
        sizes = (group.tensor, group.sequence, group.pipeline, self.chunks, group.context)
        layout = (*sizes, self.heads, group.expert, group.expert_tensor, self.micro)
        return dict(zip(LAYOUT_KEYS, layout, strict=True))


@dataclass(frozen=True)
class Saving:
    """A candidate's memory savings: recomputation, offloading, and the memory strategy of MoE layers.

    `offload`: of layer inputs. `degree`, `backward_degree`: numbers of chunks of MoE layers in both passes. `engine`:
    of the update of offloaded optimizer state.
    """

    recompute: str
    offload: Any
    degree: Any
    backward_degree: int | None
    strategy: str
    state_device: str
    engine: str
    weights_device: str = "device"
    pass_order: str = "by_micro_batch"

    @property
    def streams(self) -> bool:
        """Whether experts are offloaded."""
        return self.weights_device in WEIGHT_DEVICES[1:]

    def values(self) -> dict[str, Any]:
        """Return the savings' values by key, in the order of SAVING_KEYS."""
        return dict(zip(SAVING_KEYS, self.__dict__.values()))

    @cached_property
    def steps(self) -> tuple[int, int, int, int, int]:
        """Levels of each kind of memory saving; level 0 keeps most on the device.

        The kinds are recomputation, the memory strategy of MoE layers, the device of optimizer state, the update
        engine, and the device of experts.
        """
        state = STATE_DEVICES.index(self.state_device)
        layers = RECOMPUTE.index(self.recompute) + (self.offload != "none")
        experts = (self.weights_device in WEIGHT_DEVICES and WEIGHT_DEVICES.index(self.weights_device)) * 2
        experts += self.pass_order == "by_layer"
        return layers, int(self.strategy not in ("keep", "auto")), state, ENGINES.index(self.engine), int(experts)

    def is_below(self, other: Saving) -> bool:
        """Return whether `other` keeps no more on the device in any respect, with equal chunks: it is no faster."""
        same = (self.degree, self.backward_degree) == (other.degree, other.backward_degree)
        one, two = self.steps, other.steps
        strategy = one[1] == 0 or self.strategy == other.strategy
        return same and strategy and all(a <= b for a, b in zip(one, two, strict=True))


@lru_cache(maxsize=4096)
def divisors_of(number: int) -> tuple[int, ...]:
    """Return the divisors in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def with_keys(config: Config, changes: dict[str, Any]) -> Config:
    """Return the config with other values of some keys; unchanged sections are shared, not copied."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, last = key.partition(".")
        sections.setdefault(section, {})[last] = value
    return replace(config, **{name: replace(getattr(config, name), **new) for name, new in sections.items()})


def is_legal(config: Config, world_size: int) -> bool:
    """Return whether no rule rejects a config, provided that each value is in its key's range."""
    return not any(True for rules in CHECKED for _ in rules(config, world_size))


class LayoutSpace:
    """Generates the candidates of a job's config; the keys in `fixed` keep their values."""

    def __init__(
        self, job: Job, fixed: frozenset[str], ranks_per_node: int, given: frozenset[str] | None = None
    ) -> None:
        """Prepare the candidates of a job's config; the keys in `fixed` keep their values.

        `ranks_per_node` (or tensor ranks, if more) limits expert_tensor. `given`: the user's keys, by default `fixed`.
        """
        fixed -= {key for key in ASKED_KEYS if get(job.config, key) == "auto"}
        self.job, self.config, self.world_size, self.fixed = job, job.config, job.world_size, fixed
        self.given = fixed if given is None else given
        self.ranks_per_node = ranks_per_node
        self.is_moe = derived.is_moe(job.config)
        self._savings: dict[bool, list[Saving]] = {}
        self._legal: dict[tuple[bool, int | None, bool], list[Saving]] = {}

    def _values(self, key: str, generated: list[Any]) -> list[Any]:
        return [get(self.config, key)] if key in self.fixed else generated

    # -- layouts -------------------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[LayoutGroup]:
        """Yield every group of layouts that the rules allow, small sizes first."""
        model, world = self.config.model, self.world_size
        heads, groups = model.num_attention_heads, derived.num_query_groups(self.config)
        for tensor in self._values("parallel.tensor", [d for d in divisors_of(heads) if groups % d == 0]):
            if world % tensor:
                continue
            wanted = [True] if self.is_moe and tensor > 1 else [False, True] if tensor > 1 else [False]
            for sequence in self._values("parallel.sequence", wanted):
                for pipeline in self._values("parallel.pipeline", list(divisors_of(model.num_layers))):
                    if world % (tensor * pipeline) == 0:
                        yield from self._of_stages(tensor, sequence, pipeline)

    def _of_stages(self, tensor: int, sequence: bool, pipeline: int) -> Iterator[LayoutGroup]:
        replicas = self.world_size // (tensor * pipeline)
        experts = self.config.moe.num_experts or 1
        for context in self._values("parallel.context", list(divisors_of(replicas))):
            if replicas % context:
                continue
            for expert in self._values("parallel.expert", list(divisors_of(experts))):
                for split in self._values("parallel.expert_tensor", self._splits(tensor, pipeline, expert)):
                    group = LayoutGroup(tensor, sequence, pipeline, context, expert, split)
                    cell = next(self.cells(group), None)
                    if cell is not None and is_legal(self.layout(cell, self._plain), self.world_size):
                        yield group

    def _splits(self, tensor: int, pipeline: int, expert: int) -> list[int | None]:
        if not self.is_moe or expert == 1 or self.world_size % (pipeline * expert):
            return [None]
        width, most = derived.expert_ffn_hidden_size(self.config), max(tensor, self.ranks_per_node)
        ranks = self.world_size // (pipeline * expert)
        return [None, *(d for d in divisors_of(width) if 1 < d <= most and ranks % d == 0)]

    def chunks_of(self, group: LayoutGroup) -> list[int | None]:
        """Return the possible numbers of model chunks per stage, largest (shortest pipeline wait) first."""
        of_stage = self.config.model.num_layers // group.pipeline
        more = [d for d in reversed(divisors_of(of_stage)) if d > 1] if group.pipeline > 1 else []
        return self._values("parallel.virtual_pipeline", [*more, None])

    def micros_of(self, group: LayoutGroup, chunks: int | None) -> list[int]:
        """Return the possible micro-batch sizes in ascending order."""
        config, replicas = self.config, self.world_size // (group.tensor * group.pipeline * group.context)
        if config.training.global_batch_size % replicas:
            return []
        own, length = config.training.global_batch_size // replicas, config.model.sequence_length
        if group.sequence and group.context == 1 and length % group.tensor:
            return []
        num_shards = group.context * (group.tensor if group.sequence else 1) if group.context > 1 else 1
        sizes = self._values("training.micro_batch_size", list(divisors_of(own)))
        return [
            size
            for size in sizes
            if own % size == 0
            and size * length % num_shards == 0
            and (chunks is None or own // size % group.pipeline == 0)
            and (chunks is None or config.model.num_layers % (group.pipeline * chunks) == 0)
        ]

    def heads_of(self, group: LayoutGroup, chunks: int | None, micro: int) -> list[int | None]:
        """Return the possible numbers of context ranks that exchange heads. The first is None, the config's default."""
        if group.context == 1 or "parallel.context_heads" in self.fixed:
            return [self.first_heads]
        config = self.layout(LayoutCell(group, chunks, None, micro), self._plain)
        chosen = derived.context_heads(config)
        found = [n for n in derived.allowed_context_heads(config) if self._differs(group, n, micro)]
        return [None if n == chosen else n for n in sorted(found, key=lambda n: (n != chosen, n))]

    def _differs(self, group: LayoutGroup, heads: int, micro: int) -> bool:
        """Return whether exchanging heads between `heads` ranks differs from using more data-parallel ranks.

        It does if all context ranks exchange heads, if a micro-batch is one sample, if documents of unequal length are
        balanced between context ranks, or if the user gave one of the keys.
        """
        given = {"parallel.context", "parallel.context_heads", "training.micro_batch_size"} & self.given
        if given or (self.config.data.documents == "separate" and self.config.model.family == "gpt"):
            return True
        return group.context == heads or micro == 1

    @property
    def first_heads(self) -> int | None:
        """First number of context ranks exchanging heads that a search tries; None: the config's default."""
        return self.config.parallel.context_heads if "parallel.context_heads" in self.fixed else None

    def cells(self, group: LayoutGroup) -> Iterator[LayoutCell]:
        """Yield every layout of a group, whose layouts differ in model chunks, exchanged heads and micro-batch size."""
        for chunks in self.chunks_of(group):
            for micro in self.micros_of(group, chunks):
                for heads in self.heads_of(group, chunks, micro):
                    yield LayoutCell(group, chunks, heads, micro)

    def num_cells(self, group: LayoutGroup, chunks: int | None = 0, first: int = 0) -> int:
        """Return the number of layouts in a group.

        `chunks` other than 0: count only layouts with this number. `first`: index of the first micro-batch size
        counted.
        """
        wanted = self.chunks_of(group) if chunks == 0 else [chunks]
        found = {number: self.micros_of(group, number)[first:] for number in wanted}
        micros = [micro for each in found.values() for micro in each]
        if not micros or group.context == 1 or "parallel.context_heads" in self.fixed:
            return len(micros)
        some = next(number for number, each in found.items() if each)
        heads = derived.allowed_context_heads(self.layout(LayoutCell(group, some, None, micros[0]), self._plain))
        return sum(self._differs(group, number, micro) for micro in micros for number in heads)

    # -- memory savings ------------------------------------------------------------------------------------------------

    @property
    def _plain(self) -> Saving:
        """Memory savings that the user set and those that they require, with defaults for the rest."""
        config, fixed = self.config, self.fixed
        offloads = "training.activation_offload" in fixed and config.training.activation_offload != "none"
        has_engine = "optimizer.engine" in fixed and config.optimizer.engine != "auto"
        weights, order = (get(config, key) for key in ASKED_KEYS)
        streams = weights in WEIGHT_DEVICES[1:]  # the experts' optimizer state is offloaded, too
        state = weights if streams else "host" if has_engine else "device"
        own = "device" if weights == "auto" else weights, ORDERS[0] if order == "auto" else order
        again = "full" if offloads or own[1] == "by_layer" else "none"
        least: tuple[Any, ...] = again, "none", 1, None, "keep", state, "auto", *own
        return Saving(*(get(config, key) if key in fixed else value for key, value in zip(SAVING_KEYS, least)))

    def savings(self, is_spread: bool) -> list[Saving]:
        """Return all memory savings, starting with those that keep most on the device.

        `is_spread`: whether experts are spread over ranks.
        """
        if is_spread not in self._savings:
            found = list(self._all_savings(is_spread))
            self._savings[is_spread] = sorted(found, key=lambda saving: (sum(saving.steps), saving.steps))
        return self._savings[is_spread]

    def _all_savings(self, is_spread: bool) -> Iterator[Saving]:
        moe, on_cpu = self.config.moe, self.job.device == "cpu"
        strategies, degrees, back = [moe.memory_strategy], [moe.pipeline_degree], [moe.backward_pipeline_degree]
        if self.is_moe:
            strategies = [
                name
                for name, strategy in STRATEGIES.items()
                if not (on_cpu and strategy.offloads) and (is_spread or "communicate" not in name)
            ]
            degrees, back = list(DEGREES), [None]
        keys = "moe.memory_strategy", "moe.pipeline_degree", "moe.backward_pipeline_degree"
        generated: tuple[list[Any], ...] = strategies, degrees, back
        of_moe = [self._values(key, found) for key, found in zip(keys, generated, strict=True)]
        for recompute in self._values("training.recompute", list(RECOMPUTE)):
            offloads = self._values(
                "training.activation_offload", ["none", "auto"] if recompute == "full" else ["none"]
            )
            for offload, strategy, degree, backward, targets in product(offloads, *of_moe, self._targets(recompute)):
                yield Saving(recompute, offload, degree, backward, strategy, *targets)

    def _targets(self, recompute: str) -> Iterator[tuple[str, str, str, str]]:
        """Yield the choices of offloading that a level of recomputation allows.

        A choice is (device of optimizer state, update engine, device of expert weights, order of passes).
        """
        has_disk = self.config.memory.disk_dir is not None
        for weights, order in self._expert_targets(recompute, has_disk):
            targets = [t for t in STATE_DEVICES if t != "disk" or has_disk]
            if weights != "device":
                targets = ["host", "disk"] if weights == "host" and has_disk else [weights]
            for target in self._values("optimizer.state_device", targets):
                if weights != "device" and target not in targets:
                    continue
                engines = ["auto"] if target == "device" or weights != "device" else list(ENGINES)
                for engine in self._values("optimizer.engine", engines):
                    yield target, engine, weights, order

    def _expert_targets(self, recompute: str, has_disk: bool) -> Iterator[tuple[str, str]]:
        """Yield the device of expert weights and the order of passes; keys that are not auto keep their value."""
        weights, order = (get(self.config, key) for key in ASKED_KEYS)
        targets = [t for t in WEIGHT_DEVICES if t != "disk" or has_disk] if self.is_moe else ["device"]
        for target in targets if weights == "auto" else [weights]:
            orders = [ORDERS[0]] if target == "device" else list(ORDERS)
            for each in orders if order == "auto" else [order]:
                if recompute == "full" or each != "by_layer":
                    yield target, each

    # -- configs -------------------------------------------------------------------------------------------------------

    def layout(self, cell: LayoutCell, saving: Saving) -> Config:
        """Return the config of a candidate."""
        return with_keys(self.config, cell.values() | saving.values())

    def legal_savings(self, cell: LayoutCell) -> list[Saving]:
        """Return the memory savings that the rules allow for a layout.

        These rules depend on the layout only through expert parallelism, pipeline stages and, if the user set
        training.activation_offload to a number of MiB, the size of a layer input. Equal cases share one list.
        """
        is_spread = cell.group.expert > 1
        found = self.savings(is_spread)
        given = not isinstance(self._plain.offload, str)
        drops_layer_wise = cell.group.pipeline > 1 and any(each.pass_order == "by_layer" for each in found)
        size = derived.layer_input_bytes(self.layout(cell, found[0])) if given and found else None
        key = is_spread, size, drops_layer_wise
        if key not in self._legal:
            some = [each for each in found if not drops_layer_wise or each.pass_order != "by_layer"]
            self._legal[key] = [s for s in some if is_legal(self.layout(cell, s), self.world_size)]
        return self._legal[key]
