"""Files of hardware's figures: what is shipped is whole, and what is wrong in a file is one line with a value that
works."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from base.errors import ConfigError
from configs import hardware_files
from simulator.clock.hardware import FIGURES, file_of_card, hardware_yaml, load_hardware

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", hardware_files.names())
def test_a_shipped_file_is_whole(name: str, tmp_path: Path) -> None:
    """Each figure has a source of several words, links shared by ranks have no more of them than a node, and writing
    reads back."""
    machine = load_hardware(name)
    assert machine.name == name and set(machine.figures) == set(FIGURES)
    for figure in machine.figures.values():
        assert len(figure.source) > 3
    for key in ("between.shared_by", "host.link_shared_by"):
        assert 1 <= machine[key] <= machine["ranks_per_node"]
    assert machine["disk.read"] > 0 or machine["disk.memory"] == 0
    (tmp_path / "again.yaml").write_text(hardware_yaml(machine))
    again = load_hardware(str(tmp_path / "again.yaml"))
    assert (again.figures, again.kind, again.about, again.errors) == (
        machine.figures,
        machine.kind,
        machine.about,
        machine.errors,
    )


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100_8x"),
        ("NVIDIA H100 80GB HBM3", "h100_8x"),
        ("NVIDIA H200", "h200_8x"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", None),
        ("NVIDIA A100-PCIE-40GB", None),
    ],
)
def test_a_card_finds_its_machine(card: str, name: str | None) -> None:
    assert file_of_card(card) == name
    assert name is None or hardware_files.find(name) is not None


# A change of a good file: the path of keys, its value (None: left out), and parts of what is said. With `value:` or
# another key in the advice, that is taken and must be right.
WRONG: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "kind": ("kind", "tpu", ("kind (tpu)", "cuda, cpu")),
    "no_about": ("about", None, ("about (null)", "which machine")),
    "no_figures": ("figures", 3, ("figures (3)", "mapping")),
    "errors": ("errors", "none", ("errors (none)", "python -m simulator.fit")),
    "unknown_key": ("figurs", {}, ("figurs", "Did you mean figures")),
    "unknown_figure": ("figures.products.haf", {}, ("figures.products.haf", "Did you mean figures.products.half")),
    "missing_figure": ("figures.products.half", None, ("figures.products.half", "FLOP/s", "missing")),
    "bare_number": ("figures.inside.rate", 1e9, ("figures.inside.rate", "a value and a source")),
    "no_source": ("figures.inside.rate.source", "", ("figures.inside.rate.source", "where the value is from")),
    "text": ("figures.inside.rate.value", "fast", ("figures.inside.rate.value (fast)", "bytes/s")),
    "nan": ("figures.inside.rate.value", float("nan"), ("figures.inside.rate.value (nan)", "number")),
    "negative": ("figures.device.memory.value", -1, ("figures.device.memory.value (-1)", "above 0")),
    "in_gigabytes": ("figures.inside.rate.value", 230, ("figures.inside.rate.value (230)", "bytes/s")),
    "in_microseconds": ("figures.between.startup.value", 1e6, ("figures.between.startup.value", "at most 60")),
    "half_a_rank": ("figures.ranks_per_node.value", 2.5, ("figures.ranks_per_node.value (2.5)", "whole number")),
    "no_ranks": ("figures.ranks_per_node.value", 0, ("figures.ranks_per_node.value (0)", "above 0")),
    "more_than_all": ("figures.launch.exposed.value", 2, ("figures.launch.exposed.value (2)", "at most 1")),
    "stated": ("figures.inside.rate.stated", "much", ("figures.inside.rate.stated (much)", "number")),
    "unit_of_a_figure": ("figures.inside.rate.unit", "GB", ("figures.inside.rate.unit", "value, source, stated")),
}


def _put(content: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key whose middle part, a figure's name, may have dots itself."""
    key_parts = key.split(".")
    if key_parts[0] == "figures" and len(key_parts) > 1:
        name = next(
            (name for name in FIGURES if key.removeprefix("figures.") in (name, f"{name}.{key_parts[-1]}")), None
        )
        rest = [] if name is None or key == f"figures.{name}" else [key_parts[-1]]
        key_parts = ["figures", name or key.removeprefix("figures."), *rest]
    for name in key_parts[:-1]:
        content = content[name]
    if value is None:
        del content[key_parts[-1]]
    else:
        content[key_parts[-1]] = value


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_file_is_one_line(name: str, tmp_path: Path) -> None:
    key, value, says = WRONG[name]
    path = tmp_path / "mine.yaml"
    good = yaml.safe_load((hardware_files.FOLDER / "a100_8x.yaml").read_text())
    changed = copy.deepcopy(good)
    _put(changed, key, value)
    path.write_text(yaml.safe_dump(changed))
    with pytest.raises(ConfigError) as caught:
        load_hardware(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    for text in says:
        assert text in message
    tried = message.partition("Try ")[2].rstrip(".")
    if tried.startswith("{"):
        _put(changed, key, yaml.safe_load(tried))
        path.write_text(yaml.safe_dump(changed))
        assert load_hardware(str(path)).figures["inside.rate"].source == "datasheet"
    if tried.startswith(("value: ", "stated: ", "kind: ", "about: ", "errors: ")):
        last, _, text = tried.partition(": ")
        _put(changed, key, yaml.safe_load(text) if last in ("value", "stated", "errors") else text)
        path.write_text(yaml.safe_dump(changed))
        assert load_hardware(str(path)).name == "mine"


def test_a_name_of_no_file_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"hardware \(h100x8\) must be one of .*Try hardware=h100_8x\."):
        load_hardware("h100x8")
