"""Keeps how a searched layout was chosen, for the next start and for people."""

from __future__ import annotations

from configs.checksums import write_summed
from training.resilience import events
from training.run import Callback, Run
from training.starting.layout_choice import CHOSEN, LayoutChoice


class ChosenLayout(Callback):
    """Writes `layout_chosen.json` and records the choice as an event when the run starts or goes on."""

    def __init__(self, choice: LayoutChoice) -> None:
        self._choice = choice

    def on_start(self, run: Run) -> None:
        if not run.is_main:
            return
        choice = self._choice
        kind = "layout_kept" if choice.is_kept else "layout_chosen"
        events.record(run.run_dir, kind, choice.lines[0], step=run.progress.step, world_size=choice.world_size)
        if not choice.is_kept:
            write_summed(run.run_dir / CHOSEN, choice.record)
