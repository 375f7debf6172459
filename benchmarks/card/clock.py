"""The rung of the clock: figures of this card are fitted to every other training, and predict the rest."""

from __future__ import annotations

from benchmarks.card import training
from benchmarks.card.ladder import PartlyDone, Row, Task

CASES = (training.GPT2, training.LLAMA, training.LLAMA_8B, training.QWEN, training.MIXTRAL, training.MOE_SMALL)
ANOTHER = "h100_8x"  # whose figures a card begins with that has no file
LEAST = 2  # steps to fit to


def measure(task: Task) -> None:
    """Show the fitted figures, the seconds that they predict, and their error next to that of the stated figures.

    Raises PartlyDone if fewer than four trainings are on record.
    """
    from benchmarks.card.sides import vocabulary
    from configs.job import Job
    from simulator.clock.hardware import file_of_card, load_hardware
    from simulator.fit import fit, mean_error, predicted
    from simulator.measured_steps import MeasuredStep

    steps_by_model: dict[str, Row] = {}
    for other in task.others:
        for row in other.rows:
            if other.rung == f"training of {row.get('model')}" and row.get("system") == "mixtrain":
                steps_by_model[row["model"]] = row
    steps = []
    for case in CASES:
        if case.name in steps_by_model:
            config, seconds = case.config(task.is_small, "cpu"), steps_by_model[case.name]["step_s"]
            steps.append(MeasuredStep(case.name, Job(config, 1, vocabulary(config), "cuda"), seconds))
    if len(steps) < 2 * LEAST:
        raise PartlyDone(f"{len(steps)} trainings are on record for this card; {2 * LEAST} are needed")
    device = next((other.machine.get("device", "") for other in task.others), "")
    start = file_of_card(device) or ANOTHER
    hardware = load_hardware(start)
    fitted_to, left_out = steps[::2], steps[1::2]
    found = fit(hardware, fitted_to, "fitted to the ladder's trainings on one card")
    for name, group in (("fitted to", fitted_to), ("predicted", left_out)):
        for step in group:
            seconds = predicted(step, found)
            stated = predicted(step, hardware)
            row = {"model": step.name, "used": name, "measured_s": step.seconds, "clock_s": seconds}
            task.show({**row, "error": seconds / step.seconds - 1, "error_as_stated": stated / step.seconds - 1})
    errors = {"error_percent": mean_error(left_out, found), "as_stated_percent": mean_error(left_out, hardware)}
    task.show({"hardware": start, "left_out": len(left_out), **errors})
    changed = {name: figure.value for name, figure in found.figures.items() if figure.stated is not None}
    task.show({"hardware": start, "figures": changed})
