"""The machine whose step time is predicted: the one that `hardware` names, or this one."""

from __future__ import annotations

from base.errors import ConfigError
from configs import hardware_files
from configs.schema import Config
from parallel import card
from simulator.clock.hardware import Hardware, file_of_card, load_hardware
from simulator.run_plan import device_type

CPU = "cpu_emulated"  # the file of ranks on CPUs


def machine_of(config: Config) -> tuple[Hardware, str]:
    """Return the machine's figures, and a phrase that says why this machine was chosen.

    Without `hardware` a GPU's machine is found by the card's name, and ranks on a CPU get the emulated cluster's.
    Raises ConfigError if no file names the card, for a bad file, and if `training.device` is of another kind.
    """
    if config.hardware is not None:
        found = load_hardware(config.hardware)
        if config.training.device not in ("auto", found.kind):
            raise ConfigError(
                f"training.device ({config.training.device}) must be {found.kind} with hardware={config.hardware}, or "
                "auto. Try training.device=auto."
            )
        return found, f"hardware={config.hardware}"
    if device_type(config) == "cpu":
        return load_hardware(CPU), f"hardware={CPU}, as none was given and the ranks are on CPUs"
    card_name = card.card_name()
    name = None if card_name is None else file_of_card(card_name)
    if name is None:
        raise ConfigError(
            f"hardware (null) must be given: none of {', '.join(hardware_files.names())} is of this card "
            f"({card_name or 'which has no name'}). Try hardware={hardware_files.names()[0]} or the path of a file "
            "that python -m simulator.fit makes of measured steps."
        )
    return load_hardware(name), f"hardware={name}, as none was given and this card is {card_name}"


def refuse_another_kind(machine: Hardware, config: Config) -> None:
    """Raise ConfigError if the run is on other devices than the machine has."""
    device = device_type(config)
    if machine.kind != device:
        other = CPU if device == "cpu" else "null"
        raise ConfigError(
            f"hardware ({machine.name}) must be of {device}, which this run's ranks are on, and is of {machine.kind}. "
            f"Try hardware={other}."
        )
