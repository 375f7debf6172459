"""Mutants: one wrong line each, and the tests that notice it.

    python -m benchmarks.checks.mutants [--only WORD...] [--processes 1] [--no-check] [--markdown] [--json]

Each mutant is applied to a copy of the working tree, and the tests that are named for it run there. They must pass
without any, and one of them fail with it. The text that a mutant replaces stands in its file
once; if the code was rewritten, the list must have the new text. The exit status is 1 if a mutant is not noticed.
tests/cuda/sync_points.py has mutants of waits at run time, which `python -m tests.cuda.matrix` runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.exit_handler import WRONG_CONFIG
from benchmarks.kit.tables import table

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 1800.0  # seconds for one run of the tests that a mutant has
PASSED, FAILED = 0, 1  # pytest's exit status


@dataclass(frozen=True)
class Mutant:
    """A line that is wrong, and who notices: tests as pytest takes them, relative to tests/."""

    what: str
    subject: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTANTS = [
    # -----------------------------------------------------------------------------------------------------------------
    Mutant(
        "data-parallel ranks train on the same samples",
        "data",
        "data/loader.py",
        "first_sample + self._rank * self._micro, first",
        "first_sample, first",
        ("data/test_loader.py::test_every_world_size_gives_the_same_micro_batches",),
    ),
    Mutant(
        "every epoch has the first one's order",
        "data",
        "data/samples/gpt.py",
        "SAMPLE_ORDER, self.number, epoch, self.num_samples",
        "SAMPLE_ORDER, self.number, 0, self.num_samples",
        ("data/test_samples.py::test_every_epoch_has_an_order_of_its_own",),
    ),
    Mutant(
        "the last token of a separate document predicts the next document",
        "data",
        "data/samples/gpt.py",
        'labels[foreign], batch["loss_mask"][foreign] = shared.IGNORED, 0.0',
        "labels[foreign] = shared.IGNORED",
        ("data/test_separate_documents.py::test_documents_of_one_token_predict_nothing",),
    ),
    Mutant(
        "pairs of a sliding window count as those of all layers",
        "data",
        "data/document_lengths.py",
        "pairs = int(keys.sum()) * (len(pattern) - sum(pattern))",
        "pairs = int(keys.sum()) * len(pattern)",
        ("data/test_document_lengths.py::test_pairs_of_a_batch",),
    ),
    Mutant(
        "slices of a row are not merged",
        "attention",
        "models/attention/slice_attention.py",
        "output, sums = _merge(slice_rows.take(self.output), slice_rows.take(self.sums), output, sums)",
        "pass",
        ("models/test_slices.py::test_any_slices", "models/test_separate.py::test_separate_is_one_by_one"),
    ),
    Mutant(
        "a document attends to the one before it",
        "attention",
        "models/attention/mask_slices.py",
        "    begins = positions == 0\n",
        "    begins = positions == -1\n",
        ("models/test_slices.py::test_documents_and_windows", "models/test_separate.py::test_separate_is_one_by_one"),
    ),
    Mutant(
        "a window has a slice too many",
        "attention",
        "models/attention/mask_slices.py",
        "            if begin and reach:",
        "            if reach and query + begin >= window:",
        ("models/test_slices.py::test_documents_and_windows",),
    ),
    Mutant(
        "rows turn by their places in the sample",
        "attention",
        "models/attention/sequence_rows.py",
        "return index.t()",
        "return torch.arange(self._shape[1]).expand(self._shape).t()",
        ("models/test_rotary.py::test_rows_turn_by_their_positions",),
    ),
    Mutant(
        "learned positions count in the sample",
        "attention",
        "models/gpt.py",
        "position_ids(tokens) if positions is None else positions",
        "position_ids(tokens)",
        ("models/test_separate.py::test_separate_is_one_by_one[learned]",),
    ),
    Mutant(
        "a blend begins again with each period",
        "data",
        "data/samples/shared.py",
        "return file, period * int(self.counts[file]) + int(self.rank[position])",
        "return file, int(self.rank[position])",
        ("data/test_samples.py::test_blend_positions_continue_over_periods",),
    ),
    Mutant(
        "twice as many words are replaced at random",
        "data",
        "data/samples/bert.py",
        "draws[1] >= 0.9",
        "draws[1] >= 0.8",
        ("data/test_samples.py::test_masking_takes_whole_words_at_the_right_rate",),
    ),
    Mutant(
        "copies of a document are trained on and validated with",
        "data",
        "data/split.py",
        "hashes = np.where(is_duplicate, texts, hashes)",
        "hashes = np.where(is_duplicate, hashes, hashes)",
        ("data/test_split.py::test_documents_of_equal_text_are_split_alike",),
    ),
    # -----------------------------------------------------------------------------------------------------------------
    Mutant(
        "what was written is not compared when it is read back",
        "checkpoint",
        "checkpoint/shards.py",
        "xxhash.xxh3_64_intdigest(chunk) != expected",
        "False",
        ("checkpoint/test_stored_state.py::test_a_save_that_fails_holds_nothing",),
    ),
    Mutant(
        "weights that are not finite are saved",
        "checkpoint",
        "checkpoint/shards.py",
        "if not (math.isfinite(low) and math.isfinite(high)):",
        "if False:",
        ("checkpoint/test_checkpoint.py::test_damaged_weights_are_no_checkpoint",),
    ),
    Mutant(
        "a box that lacks elements is taken",
        "checkpoint",
        "checkpoint/shards.py",
        "if filled != wanted:",
        "if filled > wanted:",
        ("checkpoint/test_shards.py::test_elements_that_nobody_wrote_are_an_error",),
    ),
    Mutant(
        "one checkpoint more is kept",
        "checkpoint",
        "checkpoint/manifest.py",
        "for folder in older[keep - 1 :]:",
        "for folder in older[keep:]:",
        ("checkpoint/test_checkpoint.py::test_what_is_kept",),
    ),
    Mutant(
        "a bucket may change before it is written",
        "checkpoint",
        "checkpoint/shards.py",
        "            held = self._offloaded.read(bucket)\n",
        "            held = self._offloaded.read(bucket)\n            self._offloaded.release(bucket)\n",
        ("checkpoint/test_stored_state.py::test_tiers_and_device_write_and_read_the_same",),
    ),
    # -----------------------------------------------------------------------------------------------------------------
    Mutant(
        "sizes alone say that a checkpoint is good",
        "resume",
        "checkpoint/manifest.py",
        "    return next(iter(problems(folder)), None)",
        "    return problem_with(folder)",
        ("checkpoint/test_checkpoint_damage.py::test_every_damage_is_found_and_passed_over",),
    ),
    Mutant(
        "each rank checks the same share of a checkpoint",
        "resume",
        "checkpoint/resume.py",
        "sorted(files)[rank::world_size]",
        "sorted(files)[::world_size]",
        ("checkpoint/test_checkpoint_damage.py::test_two_ranks_pass_over_and_go_on",),
    ),
    Mutant(
        "a resumed run begins its data again",
        "resume",
        "training/progress.py",
        'return Progress(saved["step"], saved["consumed_samples"],',
        'return Progress(saved["step"], 0,',
        ("training/test_resume.py::test_same_layout_bit_for_bit",),
    ),
    Mutant(
        "masks of the step before",
        "resume",
        "training/step.py",
        "    engine.dropout.step = step\n",
        "    engine.dropout.step = engine.dropout.step + 1\n",
        ("training/test_resume.py::test_same_layout_bit_for_bit",),
    ),
    Mutant(
        "a run is begun anew by another way to start",
        "resume",
        "checkpoint/start.py",
        'if resume not in ("auto", held.resume):',
        "if False:",
        ("training/test_start.py::test_the_table",),
    ),
    Mutant(
        "moments begin again at each resume",
        "resume",
        "optim/state.py",
        "torch.tensor(float(steps), dtype=torch.float32, device=device)",
        "torch.tensor(0.0, dtype=torch.float32, device=device)",
        ("optim/test_state.py::test_restored_state_steps_on_as_the_original",),
    ),
    Mutant(
        "a refused step leaves the routers' biases",
        "resume",
        "training/engine.py",
        "            buffer.copy_(before)\n",
        "            pass\n",
        ("training/test_health.py::test_nonfinite_is_named_and_skipped",),
    ),
    # -----------------------------------------------------------------------------------------------------------------
    Mutant(
        "tensor ranks' losses count more than once",
        "schedule",
        "training/step.py",
        "return losses if engine.topology.tensor.rank == 0 else torch.zeros_like(losses)",
        "return losses",
        ("training/test_layouts.py::test_other_models",),
    ),
    Mutant(
        "a mean over each rank's own tokens",
        "schedule",
        "training/step.py",
        "    if topology.data.size > 1:\n        dist.all_reduce(count",
        "    if topology.data.size > 9:\n        dist.all_reduce(count",
        ("training/test_layouts.py::test_other_models",),
    ),
    Mutant(
        "the warm-up ends a step late",
        "schedule",
        "optim/optimizer.py",
        "return config.lr * step / config.warmup_steps",
        "return config.lr * (step - 1) / config.warmup_steps",
        ("optim/test_schedule.py::test_warmup_is_linear_and_ends_at_the_peak",),
    ),
    Mutant(
        "a stage holds one micro-batch less than it does",
        "schedule",
        "parallel/pipeline.py",
        "warmup = stages - stage - 1",
        "warmup = stages - stage - 2",
        ("simulator/test_plan.py::test_memory_and_operations_are_those_of_a_step",),
    ),
    Mutant(
        "experts wait for all chunks",
        "schedule",
        "moe/schedule/program.py",
        "program += [Experts(i), Combine(i)]",
        "program += [Combine(i), Experts(i)]",
        ("moe/test_program.py::test_the_experts_run_while_later_chunks_travel",),
    ),
    Mutant(
        "weight gradients come before the input gradients leave",
        "schedule",
        "moe/schedule/program.py",
        "        if i >= lag:\n            program.append(ExpertWeightGrads(i - lag))\n",
        "        if i >= lag:\n            program.insert(-2, ExpertWeightGrads(i - lag))\n",
        ("moe/test_program.py::test_a_chunks_gradients_leave_before_its_weight_gradients",),
    ),
    Mutant(
        "noise pipelines a layer",
        "schedule",
        "moe/planning/planner.py",
        "return 1.0 + MARGIN if degree > 1 else 1.0",
        "return 1.0",
        ("moe/test_planner.py::test_solver_equals_brute_force_over_all_plans",),
    ),
    # -----------------------------------------------------------------------------------------------------------------
    Mutant(
        "experts that moved are looked for where they were",
        "placement",
        "moe/placement_map.py",
        "return self._indices // self.num_expert_slots",
        "return np.arange(self.num_experts) // self.num_expert_slots",
        ("moe/placement/test_operations.py",),
    ),
    Mutant(
        "a slot is sent to where it came from",
        "placement",
        "moe/placement/migration.py",
        "Migration(expert_slot, int(after.primary_ranks[old]), int(before.primary_ranks[new]))",
        "Migration(expert_slot, int(before.primary_ranks[new]), int(after.primary_ranks[old]))",
        ("moe/placement/test_operations.py::test_a_thousand_operations_lose_nothing",),
    ),
    Mutant(
        "a rank's own assignments do not stay",
        "placement",
        "moe/placement/quotas.py",
        "    mine_ER[:, rank] = stays_ER[:, rank]\n",
        "",
        ("moe/placement/test_solve.py::test_shares_are_exact_and_prefer_what_is_near",),
    ),
    Mutant(
        "an expert keeps one token more than its capacity",
        "placement",
        "moe/capacity.py",
        "torch.int32) <= count_E)",
        "torch.int32) <= count_E + 1)",
        ("moe/test_capacity.py::test_what_is_kept_is_what_a_loop_keeps",),
    ),
    Mutant(
        "the balance of a step is that of all steps",
        "placement",
        "moe/balance.py",
        "        self._sums.zero_()\n",
        "",
        ("moe/test_balance.py::test_formula_and_megatrons_loss_of_the_whole_batch",),
    ),
    # -----------------------------------------------------------------------------------------------------------------
    Mutant(
        "an early update stays though the step is clipped",
        "tiers",
        "optim/offload/optimizer.py",
        "if early is not None and not clipped:",
        "if early is not None:",
        ("optim/offload/test_parity.py::test_same_bits",),
    ),
    Mutant(
        "moments are not cleared where a run begins",
        "tiers",
        "optim/offload/optimizer.py",
        '                if kind not in ("master", WEIGHT):\n                    flat.zero_()\n',
        '                if kind == "exp_avg":\n                    flat.zero_()\n',
        ("optim/offload/test_parity.py::test_same_bits",),
    ),
    Mutant(
        "the budget of the host is not asked",
        "tiers",
        "memory/budgets.py",
        "if self.total + num_bytes > self.limit:",
        "if False:",
        ("memory/test_budgets.py::test_what_is_too_much_is_refused_with_the_least_that_would_do",),
    ),
    Mutant(
        "layer inputs come back in the order in which they left",
        "tiers",
        "memory/layer_inputs.py",
        "                kept.next = inputs[-1]\n",
        "                pass\n",
        ("training/test_activation_offload.py::test_numbers_are_the_same",),
    ),
    # -----------------------------------------------------------------------------------------------------------------
    Mutant(
        "the host's counts are read before they are there",
        "lost waits",
        "moe/alltoall/flat.py",
        "        handle.wait()\n        sent, got",
        "        sent, got",
        ("cuda/test_pretended_gpu.py::test_numbers_are_the_cpus[keep]",),
    ),
    Mutant(
        "a snapshot is written before it is copied",
        "lost waits",
        "checkpoint/shards.py",
        "self._link.down.issue(copy_all, num_bytes=ends[-1], priority=SAVES).wait()",
        "self._link.down.issue(copy_all, num_bytes=ends[-1], priority=SAVES)",
        ("cuda/test_snapshots.py",),
    ),
    Mutant(
        "weights are used before their update is over",
        "lost waits",
        "optim/offload/optimizer.py",
        "            if (done := self._back.pop(index, None)) is not None:\n                done.order()\n",
        "            self._back.pop(index, None)\n",
        ("cuda/test_pretended_gpu.py::test_numbers_are_the_cpus[state streamed from the host]",),
    ),
    Mutant(
        "a gradient leaves before it is reduced",
        "lost waits",
        "optim/offload/optimizer.py",
        "(Completion.so_far(self.device), _Reduction(group.grad_reduce_handle))",
        "(Completion.already(),)",
        ("cuda/test_pretended_gpu.py::test_numbers_are_the_cpus[state updated on the host early]",),
    ),
    Mutant(
        "layer inputs are read before they are back",
        "lost waits",
        "memory/completion.py",
        'and raise its error. Raises TimeoutError."""\n        self.order()\n',
        'and raise its error. Raises TimeoutError."""\n',
        ("cuda/test_pretended_gpu.py::test_numbers_are_the_cpus[layer inputs on the host]",),
    ),
]


@dataclass(frozen=True)
class Verdict:
    """The verdict on one mutant."""

    mutant: Mutant
    noticed: bool
    by: str  # the first test that failed, or why none did
    seconds: float


def copy_tree(target: Path) -> None:
    """The working tree as git lists it, so that nothing is compiled or cached in it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=TIMEOUT,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit status in a tree, and the first test that failed or pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", "--durations=0"]
    done = subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", done.stdout, re.M)
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    return done.returncode, failed[0] if failed else f"pytest ended with {done.returncode}: {last}"


def apply(mutant: Mutant, tree: Path) -> None:
    """Make the line wrong. Raises ValueError where its text is not there once."""
    text = (tree / mutant.file).read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.file} has the text of '{mutant.what}' {text.count(mutant.before)} times, not once")
    (tree / mutant.file).write_text(text.replace(mutant.before, mutant.after))


def grade(mutant: Mutant) -> Verdict:
    """Whether a mutant's tests fail with it."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        try:
            apply(mutant, tree)
            status, by = run_tests(tree, mutant.tests)
        except (ValueError, subprocess.TimeoutExpired) as error:
            return Verdict(mutant, False, str(error), time.monotonic() - begin)
    return Verdict(mutant, status == FAILED, by, time.monotonic() - begin)


def check_unchanged(mutants: Sequence[Mutant]) -> str | None:
    """Return the test of these mutants that fails, or is missing, in the unchanged tree; None if all pass."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_tree(Path(folder))
        tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
        status, by = run_tests(Path(folder), tuple(tests))
    return None if status == PASSED else by


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="mutants with one of these words in what they do")
    parser.add_argument("--processes", type=int, default=1, help="mutants that are tested at a time")
    parser.add_argument("--no-check", action="store_true", help="take it that the tests pass without any mutant")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not arguments.only or any(word in f"{mutant.subject} {mutant.what}" for word in arguments.only)
    ]
    if not chosen:
        print(f"--only ({' '.join(arguments.only)}) must be words of a mutant, such as attention", file=sys.stderr)
        return WRONG_CONFIG
    begin = time.monotonic()
    problem = None if arguments.no_check else check_unchanged(chosen)
    if problem is not None:
        print(f"without any mutant: {problem}", file=sys.stderr)
        return 1
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(arguments.processes) as pool:
        for verdict in pool.map(grade, chosen):
            verdicts.append(verdict)
            word = "noticed" if verdict.noticed else "NOT NOTICED"
            print(f"{verdict.seconds:5.0f} s {word}: {verdict.mutant.what}: {verdict.by}", flush=True)
    noticed = sum(verdict.noticed for verdict in verdicts)
    table_rows = [
        [v.mutant.what, v.mutant.subject, v.mutant.file, v.by if v.noticed else f"NOTHING: {v.by}"] for v in verdicts
    ]
    print()
    print(table(["what is wrong", "subject", "file", "noticed by"], table_rows, markdown=arguments.markdown))
    print(f"\n{noticed} of {len(verdicts)} mutants are noticed, in {(time.monotonic() - begin) / 60:.0f} minutes")
    if arguments.json:
        found: list[dict[str, Any]] = [
            {"what": v.mutant.what, "file": v.mutant.file, "noticed": v.noticed, "by": v.by} for v in verdicts
        ]
        print(json.dumps({"mutants": found, "noticed": noticed}))
    return int(noticed < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
