"""A case of the random trainings, and what they found: benchmarks/checks/fuzz.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.checks import fuzz
from benchmarks.checks.fuzz_draws import Case, Draw, Leg
from benchmarks.kit.checkpoint_bits import checkpoint_tensors
from checkpoint import manifest
from tests.training.helpers import make_config, read_metrics, train_on_ranks


def test_a_random_training_is_that_of_one_process(data: list[str], tmp_path: Path) -> None:
    class Given(Draw):
        def next_case(self) -> Case:
            shared = (
                "experiment=gpt_moe_tiny",
                "model.num_layers=2",
                "model.hidden_size=16",
                "moe.router_score=sigmoid",
            )
            sizes = ("model.sequence_length=16", "moe.expert_bias=true", "training.global_batch_size=4")
            layout = ("training.micro_batch_size=1", "parallel.expert=2", "moe.weights_device=host")
            leg = Leg(2, 2, (*layout, "optimizer.state_device=host", "optimizer.engine=host"))
            more = (*shared, *sizes, "moe.aux_loss_coeff=0", "data.documents=separate", "training.precision=fp32")
            return Case(1, "", 2, "short", more, ("training.micro_batch_size=2",), (leg,))

    words = Path(fuzz.__file__).read_text(encoding="utf-8").split()
    lines = [" ".join(words[at : at + 3]) for at in range(0, len(words), 3)]  # several documents in a sample
    (tmp_path / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    texts = [*data, f"data.corpus={tmp_path / 'texts.txt'}", "data.documents_in_text=line"]
    found = fuzz.check(Given(1, 1, thresholds=False), tmp_path, {"short": texts}, [])
    assert found.faults == [] and found.refused == Counter()
    assert max(found.loss, found.grad_norm) < 1e-5
    assert "any" in fuzz.summary([found], markdown=True)


def test_a_step_that_overflows_moves_no_bias(data: list[str], tmp_path: Path) -> None:
    model = ["experiment=gpt_moe_tiny", "model.num_layers=2", "moe.router_score=sigmoid", "moe.expert_bias=true"]
    steps = ["training.precision=fp16", f"training.initial_loss_scale={2.0**22}", "training.steps=5"]
    given = [*model, f"moe.expert_bias_rate={2.0**-10}", *steps, *data, f"run_dir={tmp_path}"]
    train_on_ranks(given)
    lines = read_metrics(tmp_path)
    assert {line["updated"] for line in lines} == {False, True}
    tensors = checkpoint_tensors(manifest.folder_of(tmp_path, len(lines)))
    assert fuzz.wrong_biases(make_config(given), lines, tensors) == []
