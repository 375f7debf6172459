"""Choose the hardware file (rates and sizes of a machine) for predictions: the file that `hardware` names, or the file
of this machine."""

from __future__ import annotations

from base.errors import ConfigError
from configs import hardware_files
from configs.schema import Config
from parallel import card
from simulator.clock.hardware import Hardware, file_of_card, load_hardware
from simulator.run_plan import device_type

CPU = "cpu_emulated"  # the file of ranks on CPUs


def machine_of(config: Config) -> tuple[Hardware, str]:
    """Return the description of the hardware that the run uses, and a phrase that explains how it was chosen. Without
    `hardware` in the config, a GPU's file is found by the GPU's name, and ranks on CPUs use the file of the emulated
    cluster. Raises ConfigError if no file names the GPU, if the file is invalid, or if `training.device` is not the
    hardware's kind of device."""
    if config.hardware is not None:
        found = load_hardware(config.hardware)
        if config.training.device not in ("auto", found.kind):
            raise ConfigError(
                f"training.device ({config.training.device}) must be {found.kind} or auto with "
                f"hardware={config.hardware}. Try training.device=auto."
            )
        return found, f"hardware={config.hardware}"
    if device_type(config) == "cpu":
        return load_hardware(CPU), f"hardware={CPU}, since none was given and the ranks are on CPUs"
    card_name = card.card_name()
    name = None if card_name is None else file_of_card(card_name)
    if name is None:
        raise ConfigError(
            f"hardware (null) must name a file: none of {', '.join(hardware_files.names())} describes this card "
            f"({card_name or 'its name is unknown'}). Try hardware={hardware_files.names()[0]} or the path of a file "
            "that python -m simulator.fit writes from measured steps."
        )
    return load_hardware(name), f"hardware={name}, since none was given and this card is {card_name}"


def refuse_another_kind(machine: Hardware, config: Config) -> None:
    """Raise ConfigError if the machine has GPUs but the run uses CPUs, or vice versa."""
    device = device_type(config)
    if machine.kind != device:
        other = CPU if device == "cpu" else "null"
        raise ConfigError(
            f"hardware ({machine.name}) must describe {device} devices, because this run's ranks use {device}, but "
            f"it describes {machine.kind} devices. Try hardware={other}."
        )
