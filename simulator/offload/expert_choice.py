"""Choice of moe.weights_device=auto and training.pass_order=auto: the candidate with the shortest predicted step among
those that fit the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs import derived
from configs.job import Job
from configs.keys import get
from configs.rules import first_problem
from configs.schema import KEYS, Config
from configs.values import as_typed
from optim.arrangement.buckets import Capacity
from optim.arrangement.experts import expert_traffic
from simulator.clock.hardware import Hardware
from simulator.clock.predict import predict_step
from simulator.memory import RankMemory, first_arrangements, fits, rank_memory
from simulator.offload.expert_options import ORDER, STATE, WEIGHTS, expert_candidates, expert_option
from simulator.search.space import with_keys

# Share of the fastest step's seconds within which the candidate is chosen that moves the fewest bytes, then the
# simpler.
SAME = 0.02


@dataclass(frozen=True)
class ExpertDecision:
    """A config with a chosen device for experts. `values`: the chosen keys with their values; `line`: for the log."""

    config: Config
    values: dict[str, Any]
    line: str


@dataclass(frozen=True)
class _Candidate:
    """A config with its memory and the predicted seconds of its step.

    `moved`: bytes of experts and of layer inputs that a rank's links and disk move.
    """

    config: Config
    memory: list[RankMemory]
    seconds: float
    fits: bool
    moved: int  # bytes of experts and of layer inputs that a rank's links and disk move

    def missing(self, capacity: Capacity) -> float:
        """Return the bytes that the fullest rank lacks, summed over device, host and disk."""
        limits = [("total", capacity.device), ("host", capacity.host), ("disk", capacity.disk)]
        return sum(max(max(getattr(rank, key) for rank in self.memory) - limit, 0.0) for key, limit in limits)


def is_asked(config: Config) -> bool:
    """Return whether a config leaves the device of expert weights or the order of passes to be chosen."""
    return "auto" in (config.moe.weights_device, config.training.pass_order)


def decide(job: Job, hardware: Hardware, capacity: Capacity, given: frozenset[str]) -> ExpertDecision:
    """Replace moe.weights_device=auto and training.pass_order=auto in a job's config.

    `capacity`: bytes of a rank's device, host and disk; `given`: keys of the command line, whose values stay. If no
    candidate fits, the one that lacks the fewest bytes is chosen; the check of the run's plan then raises ConfigError
    with values that fit. Raises ConfigError if a prediction does.
    """
    config, world_size = job.config, job.world_size
    asked = {key: get(config, key) for key in (WEIGHTS, ORDER)}
    if not derived.is_moe(config):
        values = {WEIGHTS: "device", ORDER: "by_micro_batch"}
        own = {key: values[key] if value == "auto" else value for key, value in asked.items()}
        return ExpertDecision(with_keys(config, own), own, f"experts: {_typed(own)}: the model has none")
    # Optimizer state may move to the weights' target if its own target was not set.
    moves_state = STATE not in given and config.optimizer.state_device == KEYS[STATE].fresh_default()
    candidates = [
        _evaluate(replace(job, config=changed), hardware, capacity)
        for changed in _matching(asked, expert_candidates(config, world_size, moves_state))
    ]
    if not candidates:
        own = {key: "by_micro_batch" if key == ORDER else "device" for key, value in asked.items() if value == "auto"}
        return ExpertDecision(with_keys(config, own), own, f"experts: {_typed(own)}: the rules allow nothing else")
    fitting = [each for each in candidates if each.fits]
    if fitting:
        least = min(each.seconds for each in fitting)
        # With fewer bytes moved a slow link costs less.
        best = min((each for each in fitting if each.seconds <= least * (1 + SAME)), key=lambda each: each.moved)
    else:
        best = min(candidates, key=lambda each: each.missing(capacity))
    values = {key: get(best.config, key) for key in (WEIGHTS, ORDER, STATE)}
    line = _format_line(config, best, candidates, hardware, world_size)
    more = _wider(job, best, hardware, capacity)
    return ExpertDecision(best.config, values, f"{line}{more}")


def fitting_override(job: Job, capacity: Capacity, most: float) -> str:
    """Return overrides that offload experts so that every rank fits, and the bytes needed; "" if there are none.

    A rank may use `most` bytes of its device, and the host and disk bytes of `capacity`.
    """
    config = job.config
    if not derived.is_moe(config) or derived.streams_experts(config):
        return ""
    for changed in expert_candidates(config, job.world_size, moves_state=True):
        if not derived.streams_experts(changed):
            continue
        memory = rank_memory(replace(job, config=changed), capacity=capacity)
        if fits(memory, replace(capacity, device=most)):
            keys = {key: get(changed, key) for key in (WEIGHTS, ORDER, STATE) if get(changed, key) != get(config, key)}
            device, host = max(rank.total for rank in memory), max(rank.host for rank in memory)
            sizes = f"{device / 2**30:.2f} GiB of its device and {host / 2**30:.2f} GiB of the host"
            return f"set {_typed(keys)}, so that each rank needs at most {sizes}"
    return ""


def _matching(asked: dict[str, str], candidates: Iterator[Config]) -> Iterator[Config]:
    """Yield the candidate configs that have the values that the user set.

    `asked`: value of each key, or auto. With weights on the device all pass orders are equal, so the user's is kept.
    """
    for changed in candidates:
        weights, order = changed.moe.weights_device, changed.training.pass_order
        if asked[WEIGHTS] in ("auto", weights) and (asked[ORDER] in ("auto", order) or weights == "device"):
            yield changed if asked[ORDER] == "auto" else with_keys(changed, {ORDER: asked[ORDER]})


def _evaluate(job: Job, hardware: Hardware, capacity: Capacity) -> _Candidate:
    config, memory = job.config, rank_memory(job, capacity=capacity)
    seconds = predict_step(job, hardware, arrangements=first_arrangements(config, memory)).seconds
    inputs = max(sum(rank.link_activations) for rank in memory)
    traffic = [expert_traffic(config, job.world_size, stage) for stage in range(config.parallel.pipeline)]
    totals = [found.total for found in traffic if found is not None]
    experts = max((each.up + each.down + each.read + each.written for each in totals), default=0)
    return _Candidate(config, memory, seconds, fits(memory, capacity), inputs + experts)


def _format_line(
    config: Config, best: _Candidate, candidates: Sequence[_Candidate], hardware: Hardware, world_size: int
) -> str:
    """Return the log line about the chosen candidate, with its prediction and those of the other candidates."""
    own = {key: get(best.config, key) for key in (WEIGHTS, ORDER)}
    moved = best.config.optimizer.state_device != config.optimizer.state_device
    state = {STATE: best.config.optimizer.state_device} if moved else {}
    found = expert_option(best.config, world_size, hardware, first_arrangements(best.config, best.memory), best.seconds)
    facts = [f"{best.seconds:.3g} s a step predicted on {hardware.name}"]
    if found.break_even is not None:
        facts.append(f"{found.tokens:,.0f} tokens of an expert for each transfer (break-even {found.break_even:,.0f})")
    others = [
        f"{' '.join(str(get(each.config, key)) for key in own)} {each.seconds:.3g} s"
        + ("" if each.fits else ", does not fit")
        for each in candidates
        if each is not best
    ]
    last = f"; else {'; '.join(others)}" if others else ""
    none = "" if best.fits else ", though nothing fits"
    return f"experts: {_typed(own | state)}{none}: {', '.join(facts)}{last}"


def _wider(job: Job, best: _Candidate, hardware: Hardware, capacity: Capacity) -> str:
    """Return the advice to use more expert ranks; "" unless experts then fit the device and steps are faster."""
    if not derived.streams_experts(best.config):
        return ""
    config = job.config
    resident = {WEIGHTS: "device", ORDER: "by_micro_batch", STATE: config.optimizer.state_device}
    found: list[_Candidate] = []
    size = config.parallel.expert
    while (config.moe.num_experts or 0) % (size := 2 * size) == 0 and size <= job.world_size:
        wider = with_keys(config, {**resident, "parallel.expert": size})
        if first_problem(wider, job.world_size) is None:
            found.append(_evaluate(replace(job, config=wider), hardware, capacity))
    faster = [each for each in found if each.fits and each.seconds < best.seconds]
    if not faster:
        return ""
    first = min(faster, key=lambda each: each.seconds)
    typed = as_typed("parallel.expert", first.config.parallel.expert)
    return f"; {typed} would keep them on the device, with {first.seconds:.3g} s a step"


def _typed(values: dict[str, Any]) -> str:
    return " ".join(as_typed(key, value) for key, value in values.items())
