"""Every shipped preset composes and is legal; the command line beats a preset; small presets are legal in every small
layout."""

from __future__ import annotations

import pytest

from configs import derived
from configs.compose import CONFIG_DIR, compose
from configs.validate import validate

pytestmark = pytest.mark.fast

EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))
MODELS = sorted(path.stem for path in (CONFIG_DIR / "model").glob("*.yaml"))
OVERLAYS = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONFIG_DIR.glob("*/*.yaml")
    if path.parent.name not in ("model", "experiment")
)
WORLD_SIZES = {"llama3_8b": 8, "mixtral_8x7b": 32, "qwen3_30b_a3b": 16, "deepseek_v3_like": 256}
TINY = ["gpt_tiny", "gpt_moe_tiny", "bert_tiny", "bert_moe_tiny"]
LAYOUTS = {
    "tp2": (2, ["parallel.tensor=2"]),
    "tp2_sp": (2, ["parallel=tp2_sp"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "pp2_vpp2": (2, ["parallel=pp2_vpp2"]),
    "dp2": (2, []),
    "dp4": (4, []),
    "ep2": (2, ["parallel=ep2"]),
    "tp2_pp2": (4, ["parallel=tp2_sp", "parallel.pipeline=2"]),
    "ep2_pp2": (4, ["parallel=ep2", "parallel.pipeline=2"]),
    "ep4": (4, ["parallel.expert=4"]),
    "tp2_ep2_etp1": (4, ["parallel=tp2_sp", "parallel.expert=2"]),
    "tp2_ep2_etp2": (4, ["parallel=tp2_sp", "parallel.expert=2", "parallel.expert_tensor=2"]),
    "dp2_tp2": (4, ["parallel=tp2_sp"]),
    "dp2_pp2_vpp2": (4, ["parallel=pp2_vpp2"]),
    "dp2_pp2_ep2": (4, ["parallel=pp2_vpp2", "parallel.expert=2"]),
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_legal_and_names_its_run_after_its_model(name: str) -> None:
    config = compose([f"experiment={name}"])
    validate(config, WORLD_SIZES.get(name, 1))
    assert config.name == name
    assert config.run_dir == f"runs/{name}"


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_with_the_quickstart_settings(name: str) -> None:
    config, quickstart = compose([f"model={name}", "training.steps=40"]), compose(["training.steps=40"])
    validate(config, 1)
    assert (config.name, config.run_dir) == (name, f"runs/{name}")
    assert config.training == quickstart.training
    assert config.optimizer == quickstart.optimizer
    assert config.parallel == quickstart.parallel
    sparse = name == "quickstart" or any(word in name for word in ("moe", "mixtral", "a3b", "deepseek"))
    assert derived.is_moe(config) == sparse


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_takes_few_steps_unless_told_otherwise(name: str) -> None:
    assert compose([f"model={name}"]).training.steps == 20


def test_models_and_experiments_have_the_same_names() -> None:
    assert EXPERIMENTS == MODELS


@pytest.mark.parametrize("choice", OVERLAYS)
def test_every_other_choice_is_legal(choice: str) -> None:
    # 4 ranks hold every shipped layout; the quickstart has experts, so that moe=aux_loss_free applies.
    validate(compose([choice]), 4)


def _legal(name: str, layout: str) -> bool:
    if "moe" not in name:
        return "ep" not in layout  # a dense model has no experts to spread
    return layout != "tp2"  # Megatron-core trains MoE over tensor ranks with sequence parallelism only


@pytest.mark.parametrize("group", ["model", "experiment"])
@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in TINY for layout in LAYOUTS if _legal(name, layout)]
)
def test_tiny_presets_are_legal_in_every_layout(name: str, layout: str, group: str) -> None:
    world_size, overrides = LAYOUTS[layout]
    config = compose([f"{group}={name}", *overrides])
    validate(config, world_size)
    assert derived.num_micro_batches(config, world_size) >= 1


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_presets_accept_any_number_of_steps_and_any_rate(name: str, steps: int) -> None:
    config = compose([f"experiment={name}", f"training.steps={steps}", "optimizer.lr=1e-5"])
    validate(config, WORLD_SIZES.get(name, 1))
    assert config.optimizer.warmup_steps < steps
    assert config.optimizer.min_lr <= 1e-5


def test_a_choice_or_key_on_the_command_line_beats_the_experiment() -> None:
    large = compose(["experiment=mixtral_8x7b"])
    assert (large.parallel.tensor, large.parallel.expert, large.training.precision) == (2, 8, "bf16")
    single = compose(["experiment=mixtral_8x7b", "parallel=single", "moe=dense", "training.precision=fp32"])
    assert (single.parallel.tensor, single.parallel.expert, single.training.precision) == (1, 1, "fp32")
    assert single.moe.num_experts is None
    validate(single, 1)
    other = compose(["experiment=gpt2_124m", "model=gpt_tiny"])
    assert (other.name, other.model.hidden_size, other.training.global_batch_size) == ("gpt_tiny", 64, 512)
    assert compose(["experiment=bert_base"]).optimizer.weight_decay == 0.01
    assert compose(["experiment=bert_base", "optimizer=adamw"]).optimizer.weight_decay == 0.1
    assert compose(["model=gpt_tiny", "moe=eight_experts"]).moe.num_experts == 8
    assert compose(["name=mine", "model=gpt_tiny"]).run_dir == "runs/mine"


# Parameters in billions of the published models, from their papers or cards; computed below from the sizes in the
# presets.
PUBLISHED = {
    "gpt2_124m": 0.124,
    "llama3_8b": 8.03,
    "mixtral_8x7b": 46.7,
    "qwen3_30b_a3b": 30.5,
    "bert_base": 0.110,
    "bert_large": 0.335,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    config = compose([f"experiment={name}"])
    model, moe = config.model, config.moe
    assert model.vocab_size is not None
    matrices = 3 if model.activation == "swiglu" else 2
    attention = (
        2
        * model.hidden_size
        * derived.head_dim(config)
        * (model.num_attention_heads + derived.num_query_groups(config))
    )
    total = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    total += model.sequence_length * model.hidden_size if model.position_embedding == "learned" else 0
    for is_moe in derived.moe_layer_pattern(config):
        width = (
            derived.expert_ffn_hidden_size(config) * (moe.num_experts or 1)
            if is_moe
            else derived.ffn_hidden_size(config)
        )
        total += attention + matrices * model.hidden_size * width
    # Norms, biases, routers and heads are left out of the count: under 1% here.
    assert total / 1e9 == pytest.approx(PUBLISHED[name], rel=0.015)
