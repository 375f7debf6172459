"""A run with parallel=auto: which machine it is for, what is chosen, kept and searched again, and that all ranks have
one layout. The search is a made-up one here."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from base.checksums import write_summed
from base.errors import ConfigError
from configs.compose import compose
from configs.job import Job
from configs.keys import put
from configs.schema import Config
from configs.validate import validate
from simulator.clock.hardware import Hardware, hardware_yaml, load_hardware
from simulator.clock.prediction import Prediction
from simulator.search.answer import LayoutAnswer, SearchCounts, SearchedLayout
from simulator.search.sizer import LayoutMemory, MemoryLimits
from tests import distributed
from tests.training.helpers import TIMEOUT, largest_difference, read_metrics, train_on_ranks
from tests.waits import LONG
from training.starting import choices, machine
from training.starting.choices import LAYOUT_CHOSEN, LayoutChoice, choose_layout

ROOT = Path(__file__).resolve().parents[2]
TINY = ["model=gpt_tiny", "logging=quiet", "sample.prompts=[]", "training.eval_interval=0"]
Seen = list[tuple[int, frozenset[str]]]


def cpu_machine(folder: Path) -> str:
    """The path of a machine of ranks on CPUs."""
    path = folder / "laptop.yaml"
    path.write_text(hardware_yaml(replace(load_hardware("h100_8x"), kind="cpu")), encoding="utf-8")
    return str(path)


def searching(values: dict[str, Any], seen: Seen, most: int = 8) -> Callable[..., LayoutAnswer]:
    """A search that always finds this layout, for up to `most` ranks, and notes what it was asked."""

    def search(job: Job, hardware: Hardware, fixed: frozenset[str]) -> LayoutAnswer:
        world_size = job.world_size
        seen.append((world_size, fixed))
        if world_size > most:
            raise ConfigError(f"world_size ({world_size}) leaves no layout. Try {most} ranks.")
        best = copy.deepcopy(job.config)
        for key, value in values.items():
            put(best, key, value)
        prediction = Prediction(0.25, {"products": 0.2, "step": 0.05}, hardware.name)
        typed = [f"{key}={value}" for key, value in values.items()]
        layout = SearchedLayout(best, typed, prediction, LayoutMemory(2**20), 1000.0)
        slow = replace(prediction, seconds=0.5)
        other = SearchedLayout(best, ["parallel.tensor=1"], slow, LayoutMemory(2**20), 500.0, "it waits for the host")
        counts = SearchCounts(12, 3, 2, 1, 6)
        return LayoutAnswer(layout, [other], counts, MemoryLimits(), hardware.name, world_size, hardware.errors)

    return search


def auto(folder: Path, *overrides: str) -> tuple[Config, frozenset[str]]:
    """A config with parallel=auto, and the keys of its command line."""
    config = compose(
        [*TINY, "parallel=auto", f"hardware={cpu_machine(folder)}", f"run_dir={folder / 'run'}", *overrides]
    )
    return config, frozenset(text.partition("=")[0] for text in overrides)


def keep(choice: LayoutChoice, folder: Path) -> None:
    """Leave a choice in the run's folder, as the run does."""
    (folder / "run").mkdir(exist_ok=True)
    write_summed(folder / "run" / LAYOUT_CHOSEN, choice.record)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many ranks were started; this is rank 0."""

    def start(count: int) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(count))

    start(2)
    return start


def test_a_given_layout_is_no_choice() -> None:
    assert choose_layout(compose(TINY), frozenset()) is None


def test_a_choice_is_said_and_frozen(
    tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: Seen = []
    layout = {"parallel.tensor": 2, "parallel.sequence": True, "training.micro_batch_size": 2}
    monkeypatch.setattr(choices, "search_layout", searching(layout, seen))
    choice = choose_layout(*auto(tmp_path, "training.recompute=full"))
    assert choice is not None and not choice.is_kept and choice.world_size == 2
    assert seen == [(2, frozenset({"training.recompute"}))]
    parallel, training = choice.config.parallel, choice.config.training
    assert (parallel.tensor, parallel.sequence, training.micro_batch_size) == (2, True, 2)
    assert choice.config.hardware == cpu_machine(tmp_path) and training.recompute == "full"
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("layout: parallel.tensor=2 parallel.sequence=True") and "not held to" in said[0]
    assert said[1:] == ["  next: parallel.tensor=1: +100%, it waits for the host"]
    assert choice.record["given"] == {"training.recompute": "full"} and choice.record["counts"]["timed"] == 6


def test_a_run_keeps_its_layout_on_as_many_ranks(tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another number it searches again and says so; also where the command line or another key forbids the old."""
    seen: Seen = []
    monkeypatch.setattr(choices, "search_layout", searching({"training.micro_batch_size": 2}, seen))
    first = choose_layout(*auto(tmp_path))
    assert first is not None
    keep(first, tmp_path)
    monkeypatch.setattr(choices, "search_layout", searching({"training.micro_batch_size": 1}, seen))
    again = choose_layout(*auto(tmp_path))
    assert again is not None and again.is_kept and again.config == first.config and len(seen) == 1
    assert "is kept: this run chose it for 2 rank(s)" in again.lines[0]
    ranks(4)
    other = choose_layout(*auto(tmp_path))
    assert other is not None and not other.is_kept and other.config.training.micro_batch_size == 1
    assert other.lines[0].startswith("searched again, for 4 rank(s) instead of 2: ")
    ranks(2)
    fixed = choose_layout(*auto(tmp_path, "training.recompute=full"))
    assert (
        fixed is not None and not fixed.is_kept and "because the command line sets other layout keys" in fixed.lines[0]
    )
    smaller = choose_layout(*auto(tmp_path, "training.global_batch_size=2"))
    assert (
        smaller is not None
        and not smaller.is_kept
        and "other keys no longer allow the earlier layout" in smaller.lines[0]
    )
    (tmp_path / "run" / LAYOUT_CHOSEN).write_text("{")
    with pytest.raises(
        ConfigError,
        match=rf"{LAYOUT_CHOSEN}, which records .* cannot be read .* or delete it so that the choice is made again",
    ):
        choose_layout(*auto(tmp_path))
    (tmp_path / "run" / LAYOUT_CHOSEN).unlink()
    anew = choose_layout(*auto(tmp_path))
    assert anew is not None and not anew.is_kept and anew.lines[0].startswith("training.micro_batch_size=1 is")


def test_an_elastic_run_takes_the_most_ranks_with_a_layout(
    tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Seen = []
    monkeypatch.setattr(choices, "search_layout", searching({"training.micro_batch_size": 1}, seen, most=2))
    ranks(4)
    with pytest.raises(ConfigError, match=r"world_size \(4\)"):
        choose_layout(*auto(tmp_path))
    choice = choose_layout(*auto(tmp_path, "training.elastic=true"))
    assert choice is not None and choice.world_size == 2 and [size for size, _ in seen] == [4, 4, 3, 2]


def test_the_machine_is_named_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal proposes something that is then right."""
    config = compose([*TINY, "hardware=h100_8x"])
    found, why = machine.machine_of(config)
    assert found.name == "h100_8x" and why == "hardware=h100_8x"
    with pytest.raises(ConfigError, match=r"training.device \(cpu\) must be cuda .*Try training.device=auto"):
        machine.machine_of(compose([*TINY, "hardware=h100_8x", "training.device=cpu"]))
    with pytest.raises(ConfigError, match=r"hardware \(h100_8x\) must describe cpu devices.*Try hardware=cpu_emulated"):
        machine.refuse_another_kind(found, compose([*TINY, "training.device=cpu"]))
    monkeypatch.setattr(machine, "device_type", lambda config: "cuda")
    machine.refuse_another_kind(found, config)
    for card, name in (("NVIDIA H200", "h200_8x"), ("NVIDIA GH200 480GB", "gh200")):
        monkeypatch.setattr(machine.card, "card_name", lambda card=card: card)
        found, why = machine.machine_of(compose(TINY))
        assert found.name == name and card in why
    monkeypatch.setattr(machine.card, "card_name", lambda: "NVIDIA L40S")
    with pytest.raises(
        ConfigError, match=r"hardware \(null\) must name a file: .*NVIDIA L40S.*Try hardware=a100_8x"
    ) as caught:
        machine.machine_of(compose(TINY))
    tried = str(caught.value).partition("Try ")[2].split()[0]
    validate(compose([*TINY, tried]), 1)


def test_a_run_for_a_machine_of_other_devices_is_refused(tmp_path: Path) -> None:
    from training.starting import preflight

    config = compose([*TINY, "hardware=h100_8x", f"run_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"hardware \(h100_8x\) must describe cpu devices"):
        preflight.check(config)
    config.hardware = cpu_machine(tmp_path)
    preflight.check(config)


def test_a_search_imports_no_torch() -> None:
    code = (
        "import sys, training.starting.plans, training.starting.choices; "
        "print(sorted({'torch', 'megatron'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONG)
    assert found.stdout == "[]\n", found.stderr


def _train_auto(config: Config, layout: dict[str, Any]) -> bool:
    """A run with parallel=auto on this rank; whether it kept an earlier layout."""
    from training.trainer import Trainer

    search, choices.search_layout = choices.search_layout, searching(layout, [])
    try:
        choice = choose_layout(config, frozenset())
    finally:
        choices.search_layout = search
    assert choice is not None
    Trainer(choice.config, choice=choice).fit()
    return choice.is_kept


def test_a_run_trains_in_its_layout_and_keeps_it(data: list[str], tmp_path: Path) -> None:
    """Losses are those of the layout when it is given; config.yaml has it, and a second start keeps it."""
    layout = {"parallel.tensor": 2, "parallel.sequence": True, "training.micro_batch_size": 2}
    rate = ["optimizer.schedule=constant", "optimizer.warmup_steps=0"]
    config, _ = auto(tmp_path, *data, *rate, "training.steps=2")
    assert distributed.run(_train_auto, 2, config, layout, timeout=TIMEOUT) == [False, False]
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (kept["parallel"]["tensor"], kept["parallel"]["layout"], kept["hardware"]) == (2, "auto", config.hardware)
    record = json.loads((tmp_path / "run" / LAYOUT_CHOSEN).read_text())
    assert record["world_size"] == 2 and record["values"]["parallel.tensor"] == 2 and len(record["runners_up"]) == 1
    config.training.steps = 3
    assert distributed.run(_train_auto, 2, config, {"parallel.tensor": 1}, timeout=TIMEOUT) == [True, True]
    typed = [f"{key}={value}" for key, value in layout.items()]
    given = train_on_ranks([*TINY, *data, *rate, *typed, "training.steps=3", f"run_dir={tmp_path / 'given'}"], 2)
    assert largest_difference(read_metrics(tmp_path / "run"), given, "loss") < 1e-6
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert kinds.count("layout_chosen") == kinds.count("layout_kept") == 1


def _own_layout(config: Config) -> str:
    """A layout of this rank's own; what is said of it."""
    import os

    from parallel import topology

    config.parallel.tensor = 1 + int(os.environ["RANK"])
    try:
        topology.initialize(config)
    except ConfigError as error:
        return str(error)
    return "taken"


def test_ranks_that_chose_other_layouts_end(tmp_path: Path) -> None:
    config, _ = auto(tmp_path)
    for said in distributed.run(_own_layout, 2, config, timeout=TIMEOUT):
        rule = "parallel.layout (auto) must lead to the same layout on all ranks, but ranks 0 and 1 chose"
        assert said.startswith(rule)
        assert "parallel.tensor=1 and parallel.tensor=2" in said


def _train_with_machine(config: Config) -> None:
    from training.trainer import Trainer

    Trainer(config).fit()


def test_after_twenty_steps_the_prediction_is_compared(data: list[str], tmp_path: Path) -> None:
    """Once, with both times, the back-test and where to look; the prediction's timeline is there."""
    hardware = f"hardware={cpu_machine(tmp_path)}"
    config = compose([*TINY, *data, hardware, "training.steps=22", "checkpoint=off", f"run_dir={tmp_path / 'run'}"])
    distributed.run(_train_with_machine, 1, config, timeout=TIMEOUT)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "predicted_step"]
    assert event["step"] == 20 and event["predicted_seconds"] > 0 and event["measured_seconds"] > 0
    assert "median of 19 steps" in event["text"] and "not held to measured steps" in event["text"]
    off = event["measured_seconds"] / event["predicted_seconds"] - 1
    assert ("Where to look: " in event["text"]) == (abs(off) > 0.15)
    assert list((tmp_path / "run" / "traces_predicted").glob("stage_00000_rank_00000.json.gz"))
