"""What a step's line says beside the loss: the same numbers in every layout, and those that Megatron-core and the
counts give."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from configs.schema import Config
from moe.watch import FEW_EXPERTS, entropy
from optim.grad_norms import component_of
from tests import distributed
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import Lines, make_config, read_metrics, train, train_on_ranks
from training.callbacks.logging.step_numbers import WINDOW, StepTimes, nearest_rank
from training.report.metrics import expert_counts, scalars, texts

SIZES = [
    "experiment=gpt_moe_tiny",
    "model.num_layers=4",
    "moe.layers=[0,1,1,1]",
    "model.hidden_size=32",
    "model.sequence_length=32",
    "moe.shared_expert_ffn_hidden_size=32",
    "moe.aux_loss_coeff=0.01",
    "moe.z_loss_coeff=0.001",
    "training.global_batch_size=8",
    "training.micro_batch_size=2",
    "training.steps=3",
    "checkpoint=off",
]
MODEL_PARTS = {"router", "shared_experts", "experts", "norm", "attention", "dense_mlp", "embedding"}


def train_and_ask_megatron(config: Config) -> tuple[Lines, list[float]]:
    """The lines of this rank, and Megatron-core's own norm of the same gradients in the same steps."""
    from training import step

    theirs: list[float] = []
    ours = step.prepare_gradients

    def both(optimizer: Any) -> Any:
        overflow = ours(optimizer)
        theirs.append(optimizer.get_grad_norm())
        return overflow

    with mock.patch.object(step, "prepare_gradients", both):
        return train(config), theirs


@pytest.fixture(scope="module")
def data(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """With a validation corpus of its own, which fills no whole number of batches."""
    path = tmp_path_factory.mktemp("validation") / "own.txt"
    path.write_text("".join(f"Number {i} of the texts that nobody trains on.\n" for i in range(16)))
    return [*data, f"data.validation_corpora={{own: {path}}}", "training.eval_interval=3", "training.eval_batches=3"]


@pytest.fixture(scope="module")
def single(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return train_on_ranks([*SIZES, *data, f"run_dir={tmp_path_factory.mktemp('single')}"])


LAYOUTS = {
    "TP2+SP x PP2": (4, ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"]),
    "EP2, plain optimizer": (2, ["parallel.expert=2", "optimizer.distributed=false"]),
    "PP2xVPP2 x EP2": (4, ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.expert=2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_do_not_depend_on_the_layout(data: list[str], single: Lines, layout: str, tmp_path: Path) -> None:
    ranks, overrides = LAYOUTS[layout]
    config = make_config([*SIZES, *data, *overrides, f"run_dir={tmp_path}"], ranks)
    answers = distributed.run(train_and_ask_megatron, ranks, config)
    lines, theirs = answers[0]
    assert read_metrics(tmp_path) == lines
    assert [line["grad_norm"] for line in lines] == pytest.approx(theirs, rel=1e-6)
    for line, expected in zip(lines, single, strict=True):
        norms = line["grad_norm_by_part"]
        assert set(norms) == MODEL_PARTS
        assert math.sqrt(sum(norm * norm for norm in norms.values())) == pytest.approx(line["grad_norm"], rel=1e-9)
        assert norms == pytest.approx(expected["grad_norm_by_part"], rel=FP32_GRAD_NORM)
        layers, expected_layers = line["moe_layers"], expected["moe_layers"]
        assert layers["layer"] == [1, 2, 3]
        for name in ("router_entropy", "aux_loss", "z_loss"):
            assert layers[name] == pytest.approx(expected_layers[name], rel=FP32_LOSS), name
        assert sum(layers["aux_loss"]) / 3 == pytest.approx(line["aux_loss"])
        assert layers["dropped_tokens"] == [0, 0, 0]
        assert [sum(counts) for counts in line["tokens_per_expert"]["counts"]] == [8 * 32 * 2] * 3
        assert layers["degree"] == [1, 1, 1] and layers["memory_strategy"] == ["keep"] * 3
        assert layers["all_to_all"] == ["flat" if "EP2" in layout else "none"] * 3
        memory = line["memory"]
        assert 0 < memory["host"] == memory["device"] and memory["device_peak"] > 0  # on a CPU the device is the host
    losses = ("validation_loss", "valid/own/loss", "valid/own/unigram_entropy")
    for name in losses:
        assert lines[-1][name] == pytest.approx(single[-1][name], rel=FP32_LOSS), name
    assert not set(losses) & lines[0].keys() and single[-1]["valid/own/loss"] != single[-1]["validation_loss"]
    # Ranks that wait at the end of a step wait for others' numbers: all of them know all.
    assert all(answer[0][-1]["grad_norm_by_part"] == lines[-1]["grad_norm_by_part"] for answer in answers)
    assert len(lines[0]["memory"]["device_peak_by_rank"]) == ranks
    assert lines[1]["moe_layers"]["measured_forward_seconds"][2] > 0  # the last layer is another rank's under pipelines


def test_plans_of_the_planner_beside_what_was_measured(data: list[str], tmp_path: Path) -> None:
    overrides = [
        *SIZES,
        *data,
        "parallel.pipeline=2",
        "moe.pipeline_degree=auto",
        "training.steps=8",
        f"run_dir={tmp_path}",
    ]
    lines = train_on_ranks(overrides, 2)
    written = [
        json.loads(line)
        for name in ("plans", "plans_stage1")
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
    ]
    last = lines[-1]["moe_layers"]
    for i, layer in enumerate(last["layer"]):
        # what the last step ran with
        of_layer = [line for line in written if line.get("layer") == layer and line["step"] < 8]
        in_force = [line for line in of_layer if "load" in line][-1]
        measured = [line["measured"] for line in of_layer if "measured" in line and line["step"] > in_force["step"]]
        assert last["degree"][i] == in_force["plan"]["degree"]
        assert last["predicted_forward_seconds"][i] == in_force["predicted"]["forward"]
        assert last["measured_backward_seconds"][i] == (measured[-1]["backward"] if measured else None)


def test_evaluation_leaves_no_trace_in_the_next_step(data: list[str], tmp_path: Path, single: Lines) -> None:
    lines = train_on_ranks(
        [*SIZES, *data, "training.eval_interval=1", "training.eval_batches=2", f"run_dir={tmp_path}"]
    )
    for line, expected in zip(lines, single, strict=True):
        assert line["validation_loss"] > 0
        assert line["tokens_per_expert"] == expected["tokens_per_expert"]
        assert line["moe_layers"]["router_entropy"] == expected["moe_layers"]["router_entropy"]


def test_dropped_tokens_are_those_that_capacity_refuses(data: list[str], tmp_path: Path) -> None:
    (line, *_) = train_on_ranks([*SIZES, *data, "moe.capacity_factor=0.5", f"run_dir={tmp_path}"])
    for counts, dropped in zip(line["tokens_per_expert"]["counts"], line["moe_layers"]["dropped_tokens"], strict=True):
        assert dropped == 8 * 32 * 2 - sum(counts)
        # Half of an even share is an expert's most: at least half of all pairs go.
        assert dropped >= 8 * 32


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_entropy_of_known_scores(score: str) -> None:
    assert float(entropy(torch.zeros(3, 5, 8), score)) == pytest.approx(15 * math.log(8), rel=1e-6)
    logits = torch.tensor([[3.0, -1.0, 0.5]], dtype=torch.float64)
    scores = logits.exp() if score == "softmax" else torch.sigmoid(logits)
    probs = scores / scores.sum()
    assert float(entropy(logits, score)) == pytest.approx(float(-(probs * probs.log()).sum()), rel=1e-6)
    assert float(entropy(torch.tensor([[200.0, -200.0]]), "softmax")) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [FEW_EXPERTS - 1, FEW_EXPERTS, FEW_EXPERTS + 1])
def test_entropy_over_few_and_many_experts(experts: int, score: str) -> None:
    logits = torch.randn(5, 7, experts, generator=torch.Generator().manual_seed(experts)) * 3
    scores = logits.double().softmax(-1) if score == "softmax" else logits.double().sigmoid()
    probs = scores / scores.sum(dim=-1, keepdim=True)
    assert float(entropy(logits, score)) == pytest.approx(float(-(probs * probs.log()).sum()), rel=1e-6)


def test_parts_of_the_model_by_name() -> None:
    names = {
        "decoder.layers.0.mlp.router.weight": "router",
        "module.decoder.layers.0.mlp.experts.linear_fc1.weight": "experts",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight": "shared_experts",
        "decoder.layers.3.mlp.linear_fc2.bias": "dense_mlp",
        "encoder.layers.0.self_attention.linear_qkv.weight": "attention",
        "decoder.layers.0.self_attention.q_layernorm.weight": "norm",
        "embedding.position_embeddings.weight": "embedding",
        "output_layer.weight": "head",
        "lm_head.dense.bias": "head",
        "something.new": "other",
    }
    assert {name: component_of(name) for name in names} == names


def test_step_time_percentiles_over_a_window() -> None:
    assert [nearest_rank([1.0, 2.0, 3.0, 4.0], percent) for percent in (1, 25, 26, 50, 95, 100)] == [1, 1, 2, 2, 4, 4]
    generator = random.Random(7)
    times = [generator.random() for _ in range(WINDOW + 50)]
    callback = StepTimes()
    for seconds in times:
        line: dict[str, Any] = {"step_seconds": seconds}
        callback.after_step(None, line)  # type: ignore[arg-type]
    recent = sorted(times[-WINDOW:])
    expected = {f"p{percent}": recent[math.ceil(percent * WINDOW / 100) - 1] for percent in (50, 95, 99)}
    assert line["step_seconds_percentiles"] == expected


def test_loggers_get_every_number_of_the_line() -> None:
    line = {
        "step": 3,
        "loss": 1.5,
        "mfu": None,
        "updated": True,
        "memory": {"host": 7, "device_peak_by_rank": [5, 6]},
        "tokens_per_expert": {"mean": 2.0, "max_over_mean": [1.5, 1.0], "counts": [[3, 1], [2, 2]]},
        "moe_layers": {
            "layer": [1, 3],
            "router_entropy": [0.5, 0.25],
            "memory_strategy": ["keep", "offload"],
            "predicted": [None, 2.0],
        },
    }
    assert scalars(line) == {
        "loss": 1.5,
        "updated": True,
        "memory/host": 7,
        "memory/device_peak_by_rank/0": 5,
        "memory/device_peak_by_rank/1": 6,
        "tokens_per_expert/mean": 2.0,
        "tokens_per_expert/max_over_mean/0": 1.5,
        "tokens_per_expert/max_over_mean/1": 1.0,
        "moe_layers/router_entropy/1": 0.5,
        "moe_layers/router_entropy/3": 0.25,
        "moe_layers/predicted/3": 2.0,
    }
    assert texts(line) == {"moe_layers/memory_strategy/1": "keep", "moe_layers/memory_strategy/3": "offload"}
    assert expert_counts(line) == {"tokens_per_expert/layer_1": [3, 1], "tokens_per_expert/layer_3": [2, 2]}


def test_tensorboard_holds_the_same_numbers(data: list[str], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = train_on_ranks([*SIZES, *data, "logging.tensorboard=true", f"run_dir={tmp_path}"])
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    for line in lines:
        for name, value in scalars(line).items():
            found = [event.value for event in events.Scalars(name) if event.step == line["step"]]
            assert found == [pytest.approx(float(value), rel=1e-6)], name
    for name, counts in expert_counts(lines[-1]).items():
        assert events.Histograms(name)[-1].histogram_value.bucket == counts


def test_what_experts_off_the_device_move_is_counted(data: list[str], tmp_path: Path) -> None:
    """From the disk, by micro-batch: each gradient leaves, and is added to the sum, which is read and written. What an
    evaluation fetches is no step's."""
    micro_batches, layers = 4, 3
    off = ["moe.weights_device=disk", "optimizer.state_device=disk", "optimizer.distributed=true"]
    off += [f"memory.disk_dir={tmp_path}", "training.steps=2", "training.eval_interval=1", "training.eval_batches=1"]
    train(make_config([*SIZES, *data, *off, f"run_dir={tmp_path / 'run'}"]))
    for line in read_metrics(tmp_path / "run"):
        found = line["expert_tiers"]
        weights, grads = found["weights_disk"], found["gradients_disk"]  # of whole blocks, in fp32
        assert weights == grads > 0 and found["wait_seconds"] >= 0 and found["asked"] == 0
        per_layer = found["up"] / found["fetched"]
        passes = 2 * micro_batches  # of three layers, two of which stay in their slots where passes turn
        assert "validation_loss" in line and found["fetched"] == layers * passes - 2 * (passes - 1)
        assert per_layer * layers <= weights and found["down"] == per_layer * layers * micro_batches
        assert found["written"] == grads * micro_batches + weights
        assert found["read"] == found["fetched"] * weights // layers + grads * micro_batches + weights
