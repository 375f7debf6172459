"""What moe.weights_device=auto and training.pass_order=auto mean: of the ways to keep experts that fit, the one whose
step is predicted to be the shortest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from configs import derived
from configs.keys import get
from configs.rules import first_problem
from configs.schema import KEYS, Config
from configs.values import as_typed
from optim.arrangement.arrange import Arrangement, Capacity
from optim.arrangement.traffic import expert_traffic
from simulator.clock.hardware import Hardware
from simulator.clock.predict import predict_step
from simulator.memory import RankMemory, over_budget, rank_memory
from simulator.off_device.options import ORDER, STATE, WEIGHTS, option, ways
from simulator.search.space import with_keys

SAME = 0.02  # of the fastest step's seconds: within that the way is taken that moves least, then the simpler one


@dataclass(frozen=True)
class ExpertDecision:
    """A config whose experts have their place. `values`: of WEIGHTS, ORDER and STATE; `line`: what to say of it."""

    config: Config
    values: dict[str, Any]
    line: str


@dataclass(frozen=True)
class _Tried:
    config: Config
    memory: list[RankMemory]
    seconds: float
    fits: bool
    moved: int  # bytes that a rank's links and disk move of experts and of layer inputs

    def missing(self, rooms: Capacity) -> float:
        """Bytes that the fullest rank has too little of, over all tiers."""
        pairs = [("total", rooms.device), ("host", rooms.host), ("disk", rooms.disk)]
        return sum(max(max(getattr(rank, key) for rank in self.memory) - room, 0.0) for key, room in pairs)


def is_asked(config: Config) -> bool:
    """Whether a config leaves it open where experts lie or which passes come first."""
    return "auto" in (config.moe.weights_device, config.training.pass_order)


def may_move_state(config: Config, given: frozenset[str]) -> bool:
    """Whether optimizer state may go to the weights' tier: nobody set where it lies."""
    return STATE not in given and config.optimizer.state_device == KEYS[STATE].fresh_default()


def decide(
    config: Config, world_size: int, vocab_size: int, hardware: Hardware, rooms: Capacity, given: frozenset[str]
) -> ExpertDecision:
    """The config with `auto` replaced. `rooms`: what a rank may take of each tier; `given`: keys of the command line,
    whose values stay. Where nothing fits it is what lacks least, which the run's plan then refuses with what would do.
    Raises ConfigError where a prediction does."""
    asked = {key: get(config, key) for key in (WEIGHTS, ORDER)}
    if not derived.is_moe(config):
        values = {WEIGHTS: "device", ORDER: "by_micro_batch"}
        own = {key: values[key] if value == "auto" else value for key, value in asked.items()}
        return ExpertDecision(with_keys(config, own), own, f"experts: {_typed(own)}: the model has none")
    tried = [
        _try(changed, world_size, vocab_size, hardware, rooms)
        for changed in _open(config, asked, ways(config, world_size, may_move_state(config, given)))
    ]
    if not tried:
        own = {key: "by_micro_batch" if key == ORDER else "device" for key, value in asked.items() if value == "auto"}
        return ExpertDecision(with_keys(config, own), own, f"experts: {_typed(own)}: the rules allow nothing else")
    fitting = [each for each in tried if each.fits]
    if fitting:
        least = min(each.seconds for each in fitting)
        # What moves less loses less where a link is slower than it should be.
        best = min((each for each in fitting if each.seconds <= least * (1 + SAME)), key=lambda each: each.moved)
    else:
        best = min(tried, key=lambda each: each.missing(rooms))
    values = {key: get(best.config, key) for key in (WEIGHTS, ORDER, STATE)}
    line = _line(config, best, tried, hardware, world_size)
    more = _wider(config, best, world_size, vocab_size, hardware, rooms)
    return ExpertDecision(best.config, values, f"{line}{more}")


def fitting_way(config: Config, world_size: int, vocab_size: int, device: str, rooms: Capacity, most: float) -> str:
    """Overrides with which experts off the device let every rank stay under `most` bytes of its device and within the
    tiers' budgets, with what it takes then; empty where none do."""
    if not derived.is_moe(config) or derived.streams_experts(config):
        return ""
    for changed in ways(config, world_size, moves_state=True):
        if not derived.streams_experts(changed):
            continue
        memory = rank_memory(changed, vocab_size, world_size, device, rooms=rooms)
        if max(rank.total for rank in memory) <= most and not over_budget(memory, rooms):
            keys = {key: get(changed, key) for key in (WEIGHTS, ORDER, STATE) if get(changed, key) != get(config, key)}
            sizes = max(rank.total for rank in memory), max(rank.host for rank in memory)
            return f"{_typed(keys)} would, with {_gib(sizes[0])} each and {_gib(sizes[1])} of the host"
    return ""


def _open(config: Config, asked: dict[str, str], found: Iterator[Config]) -> Iterator[Config]:
    """Leave the ways that have what was asked for. An order that was given stays, whatever it is worth."""
    for changed in found:
        own = {key: value for key, value in asked.items() if value != "auto"}
        if WEIGHTS in own and get(changed, WEIGHTS) != own[WEIGHTS]:
            continue
        if ORDER in own and get(changed, ORDER) != own[ORDER]:
            if changed.moe.weights_device != "device":
                continue
            changed = with_keys(changed, {ORDER: own[ORDER]})
        yield changed


def _try(config: Config, world_size: int, vocab_size: int, hardware: Hardware, rooms: Capacity) -> _Tried:
    memory = rank_memory(config, vocab_size, world_size, hardware.kind, rooms=rooms)
    seconds = predict_step(config, world_size, vocab_size, hardware, arrangements=_lie(config, memory)).seconds
    fits = max(rank.total for rank in memory) <= rooms.device and not over_budget(memory, rooms)
    inputs = max(sum(rank.link_activations) for rank in memory)
    traffic = [expert_traffic(config, world_size, stage) for stage in range(config.parallel.pipeline)]
    totals = [found.total for found in traffic if found is not None]
    experts = max((each.up + each.down + each.read + each.written for each in totals), default=0)
    return _Tried(config, memory, seconds, fits, inputs + experts)


def _line(config: Config, best: _Tried, tried: Sequence[_Tried], hardware: Hardware, world_size: int) -> str:
    """What was chosen, its prediction, and what the others would take."""
    own = {key: get(best.config, key) for key in (WEIGHTS, ORDER)}
    moved = best.config.optimizer.state_device != config.optimizer.state_device
    state = {STATE: best.config.optimizer.state_device} if moved else {}
    found = option(best.config, world_size, hardware, _lie(best.config, best.memory), best.seconds)
    words = [f"{best.seconds:.3g} s a step predicted on {hardware.name}"]
    if found.break_even is not None:
        words.append(f"{found.tokens:,.0f} tokens of an expert for each transfer (break-even {found.break_even:,.0f})")
    others = [
        f"{_typed({key: get(each.config, key) for key in own}, short=True)} {each.seconds:.3g} s"
        + ("" if each.fits else ", does not fit")
        for each in tried
        if each is not best
    ]
    last = f"; else {'; '.join(others)}" if others else ""
    none = "" if best.fits else ", though nothing fits"
    return f"experts: {_typed(own | state)}{none}: {', '.join(words)}{last}"


def _wider(config: Config, best: _Tried, world_size: int, vocab_size: int, hardware: Hardware, rooms: Capacity) -> str:
    """Advice: more ranks for the experts of a layer, where all would stay on the device and steps would be shorter."""
    if not derived.streams_experts(best.config):
        return ""
    resident = {WEIGHTS: "device", ORDER: "by_micro_batch", STATE: config.optimizer.state_device}
    found: list[_Tried] = []
    size = config.parallel.expert
    while (config.moe.num_experts or 0) % (size := 2 * size) == 0 and size <= world_size:
        wider = with_keys(config, {**resident, "parallel.expert": size})
        if first_problem(wider, world_size) is None:
            found.append(_try(wider, world_size, vocab_size, hardware, rooms))
    faster = [each for each in found if each.fits and each.seconds < best.seconds]
    if not faster:
        return ""
    first = min(faster, key=lambda each: each.seconds)
    typed = as_typed("parallel.expert", first.config.parallel.expert)
    return f"; {typed} would keep them on the device, with {first.seconds:.3g} s a step"


def _lie(config: Config, memory: Sequence[RankMemory]) -> list[Arrangement | None]:
    """How optimizer state lies on the first rank of each stage."""
    first = {rank.stage: rank.tiers for rank in reversed(memory)}
    return [first[stage] for stage in range(config.parallel.pipeline)]


def _typed(values: dict[str, Any], short: bool = False) -> str:
    if short:
        return " ".join(str(value) for value in values.values())
    return " ".join(as_typed(key, value) for key, value in values.items())


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
