"""Each rule names field, value and rule; what it proposes makes the whole configuration legal."""

from __future__ import annotations

import copy
import re

import pytest

from base.errors import ConfigError
from configs import derived
from configs.compose import compose
from configs.keys import get
from configs.schema import KEYS, Config
from configs.show import nearest, show
from configs.validate import validate
from moe.chunk_plan import STRATEGIES
from moe.placement.policy import POLICIES
from tests.configs import advice

pytestmark = pytest.mark.fast

YARN = "rope_type: yarn, factor: 4.0, original_max_position_embeddings: 8"
# overrides, world size, the field that the message starts with, what else it must say
BROKEN: list[tuple[list[str], int, str, str]] = [
    (["model.family=grt"], 1, "model.family", "model.family=gpt"),
    (["model.activation=gleu"], 1, "model.activation", "model.activation=gelu"),
    (["optimizer.schedule=cosin"], 1, "optimizer.schedule", "optimizer.schedule=cosine"),
    (["training.precision=bf61"], 1, "training.precision", "training.precision=bf16"),
    (["name=' '"], 1, "name", "empty"),
    (
        ["checkpoint.accept_changes=[data.corpos]"],
        1,
        "checkpoint.accept_changes",
        "checkpoint.accept_changes=[data.corpus]",
    ),
    (["checkpoint.accept_changes=[seed]"], 1, "checkpoint.accept_changes", "checkpoint.accept_changes=[training.seed]"),
    (["checkpoint.accept_changes=[data.corpus,model.family]"], 1, "checkpoint.accept_changes", "another model"),
    (["checkpoint.accept_changes=[optimizer.lr]"], 1, "checkpoint.accept_changes", "a resume never refuses"),
    (["checkpoint.resume=''"], 1, "checkpoint.resume", "checkpoint.resume=auto"),
    (["optimizer.lr=inf"], 1, "optimizer.lr", "finite"),
    (["optimizer.lr=-1"], 1, "optimizer.lr", "at least 0"),
    (["optimizer.beta2=1.0"], 1, "optimizer.beta2", "less than 1"),
    (["model.hidden_dropout=1.0"], 1, "model.hidden_dropout", "less than 1"),
    (["model.rotary_fraction=0.1"], 1, "model.rotary_fraction", "head dimension (16)"),
    (["model.rotary_scaling=yarn"], 1, "model.rotary_scaling", "a mapping such as"),
    (["model.rotary_scaling={factor: 2.0}"], 1, "model.rotary_scaling", "have rope_type, one of linear"),
    (["model.rotary_scaling={type: ntk, factor: 2}"], 1, "model.rotary_scaling.type", "one of linear, llama3, yarn"),
    (["model.rotary_scaling={rope_type: linear, factor: 0.5}"], 1, "model.rotary_scaling.factor", "at least 1"),
    (["model.rotary_scaling={rope_type: linear, factor: x, a: 1}"], 1, "model.rotary_scaling", "must not have a"),
    (["model.rotary_scaling={rope_type: yarn, factor: nan}"], 1, "model.rotary_scaling", "original_max_position"),
    ([f"model.rotary_scaling={{{YARN}, beta_slow: 64}}"], 1, "model.rotary_scaling", "less than beta_slow (64.0)"),
    ([f"model.rotary_scaling={{{YARN}, truncate: null}}"], 1, "model.rotary_scaling.truncate", "true or false"),
    ([f"model.rotary_scaling={{{YARN}, type: linear}}"], 1, "model.rotary_scaling.type", "rope_type (yarn)"),
    ([f"model.rotary_scaling={{{YARN}}}", "model.rotary_base=1"], 1, "model.rotary_base", "have the same frequency"),
    (
        [
            "model.rotary_scaling={rope_type: llama3, factor: 8, low_freq_factor: 2, high_freq_factor: 2, "
            "original_max_position_embeddings: 8}"
        ],
        1,
        "model.rotary_scaling.high_freq_factor",
        "greater than low_freq_factor (2.0)",
    ),
    (
        [
            "model.rotary_scaling={rope_type: longrope, factor: 8, short_factor: [1], long_factor: [2], "
            "original_max_position_embeddings: 8}"
        ],
        1,
        "model.rotary_scaling.short_factor",
        "8 numbers",
    ),
    (["model.num_layers=0"], 1, "model.num_layers", "at least 1"),
    (["training.eval_interval=-1"], 1, "training.eval_interval", "training.eval_interval=0"),
    (["data.validation_fraction=1.0"], 1, "data.validation_fraction", "less than 1"),
    (
        ["data.validation_fraction=0", "training.eval_interval=1"],
        1,
        "data.validation_fraction",
        "Try data.validation_fraction=0.02",
    ),
    (["data.validation_corpora={a b: x.txt}"], 1, "data.validation_corpora", "letters, digits, _ - ."),
    (["data.validation_corpora={1: x.txt}"], 1, "data.validation_corpora", "and 1 is not such a name"),
    (["data.validation_corpora={.a: x.txt}"], 1, "data.validation_corpora", "data.validation_corpora={}"),
    (["data.validation_corpora={a: [x.txt,2]}"], 1, "data.validation_corpora", "a must be stdlib, a path"),
    (["data.validation_corpora=x.txt"], 1, "data.validation_corpora", "must be a mapping of names"),
    (["data.documents=seperate"], 1, "data.documents", "Try data.documents=separate"),
    (["data.documents=separate", "model=bert_tiny"], 1, "data.documents", "Try data.documents=joined"),
    (
        ["data.documents=separate", "model.attention_dropout=0.1"],
        1,
        "model.attention_dropout",
        "Try model.attention_dropout=0",
    ),
    (["data.vocab_size=319"], 1, "data.vocab_size", "Try data.vocab_size=320"),
    (
        ["data.vocab_size=100", "model.vocab_size=110"],
        1,
        "data.vocab_size",
        "data.vocab_size=320 model.vocab_size=null",
    ),
    (["data.vocab_size=2147483647"], 1, "data.vocab_size", "Try data.vocab_size=1000000"),
    (["model.vocab_size=1000"], 1, "model.vocab_size", "4096"),
    (["data.corpus=[]"], 1, "data.corpus", "stdlib"),
    (["data.corpus=[{path: a, weight: 0}]"], 1, "data.corpus", "weight"),
    (["training.pass_order=by_layer"], 1, "training.pass_order", "Try training.recompute=full"),
    (
        ["training.pass_order=by_layer", "training.recompute=full", "parallel.pipeline=2"],
        2,
        "training.pass_order",
        "needs parallel.pipeline (2) to be 1",
    ),
    (
        ["training.pass_order=by_layer", "training.recompute=full", "parallel=pp2_vpp2"],
        2,
        "training.pass_order",
        "parallel.virtual_pipeline 2",
    ),
    (["model.num_attention_heads=3"], 1, "model.num_attention_heads", "model.hidden_size (64)"),
    (["model.num_query_groups=3"], 1, "model.num_query_groups", "model.num_attention_heads (4)"),
    (["model.sentence_head=next_sentence"], 1, "model.sentence_head", "bert"),
    (["model.norm_position=post"], 1, "model.norm_position", "bert"),
    (["model=bert_tiny", "model.sequence_length=4"], 1, "model.sequence_length", "8"),
    (["parallel.tensor=3"], 3, "parallel.tensor", "model.num_attention_heads (4)"),
    (["parallel.tensor=3"], 2, "parallel.tensor", "parallel.tensor=2"),
    (["parallel.tensor=2", "model.num_query_groups=1"], 2, "parallel.tensor", "model.num_query_groups (1)"),
    (["parallel.tensor=2", "model.ffn_hidden_size=65"], 2, "parallel.tensor", "model.ffn_hidden_size (65)"),
    (["parallel.sequence=true"], 1, "parallel.sequence", "parallel.sequence=false"),
    (["parallel=tp2_sp", "model.sequence_length=63"], 2, "parallel.tensor", "model.sequence_length (63)"),
    (["parallel.pipeline=3"], 3, "parallel.pipeline", "model.num_layers (4)"),
    (["parallel.virtual_pipeline=2"], 1, "parallel.virtual_pipeline", "parallel.pipeline (1)"),
    (["parallel.pipeline=2", "parallel.virtual_pipeline=1"], 2, "parallel.virtual_pipeline", "at least 2"),
    (["parallel.pipeline=2", "parallel.virtual_pipeline=3"], 2, "parallel.virtual_pipeline", "model.num_layers (4)"),
    (
        ["parallel=pp2_vpp2", "training.global_batch_size=6"],
        2,
        "training.global_batch_size",
        "multiple of parallel.pipeline (2)",
    ),
    (["parallel=pp2_vpp2", "training.global_batch_size=3"], 2, "training.global_batch_size", "divisible"),
    (["parallel.tensor=2"], 1, "world_size", "2 processes"),
    (["parallel.pipeline=2"], 3, "world_size", "or 2 processes"),
    (["parallel.expert=2"], 2, "parallel.expert", "dense"),
    (["parallel.expert_tensor=2"], 2, "parallel.expert_tensor", "parallel.expert_tensor=null"),
    (["training.global_batch_size=7"], 1, "training.global_batch_size", "training.micro_batch_size (2)"),
    (["training.micro_batch_size=16"], 1, "training.global_batch_size", "data-parallel size (1)"),
    (["optimizer.min_lr=0.1"], 1, "optimizer.min_lr", "optimizer.lr (0.001)"),
    (["optimizer.warmup_steps=20"], 1, "optimizer.warmup_steps", "training.steps (20)"),
    (["optimizer.warmup_steps=9", "optimizer.decay_steps=9"], 1, "optimizer.warmup_steps", "optimizer.decay_steps (9)"),
    (["optimizer.schedule=wsd"], 1, "optimizer.wsd_decay_steps", "optimizer.wsd_decay_steps=4"),
    (["optimizer.wsd_decay_steps=4"], 1, "optimizer.wsd_decay_steps", "unless optimizer.schedule is wsd"),
    (["optimizer.state_device=hots"], 1, "optimizer.state_device", "optimizer.state_device=host"),
    (["optimizer.state_device=auto", "optimizer.distributed=false"], 1, "optimizer.state_device", "distributed=true"),
    (["optimizer.moment_dtype=bf16", "optimizer.distributed=false"], 1, "optimizer.moment_dtype", "distributed=true"),
    (["optimizer.engine=split"], 1, "optimizer.engine", "optimizer.engine=auto"),
    (["optimizer.early_update=never"], 1, "optimizer.early_update", "optimizer.early_update=auto"),
    (
        ["optimizer.state_device=host", "optimizer.early_update=always", "parallel.overlap_grad_reduce=false"],
        1,
        "optimizer.early_update",
        "parallel.overlap_grad_reduce=true",
    ),
    (["optimizer.state_device=disk"], 1, "memory.disk_dir", "memory.disk_dir=runs/gpt_tiny"),
    (["optimizer.bucket_parameters=4095"], 1, "optimizer.bucket_parameters", "at least 4096"),
    (["memory.host_budget=0"], 1, "memory.host_budget", "greater than 0"),
    (["training.activation_offload=0"], 1, "training.activation_offload", "none, auto or a number greater than 0"),
    (["training.activation_offload=true"], 1, "training.activation_offload", "none, auto or a number greater than 0"),
    (
        ["training.activation_offload=0.001", "training.recompute=full"],
        1,
        "training.activation_offload",
        "the size of one layer's input",
    ),
    (["training.activation_offload=auto"], 1, "training.activation_offload", "training.recompute=full"),
    (["moe.expert_bias=true"], 1, "moe.expert_bias", "dense"),
    (["moe.capacity_factor=1.0"], 1, "moe.capacity_factor", "dense"),
    (["moe.global_aux_loss_coeff=0.1"], 1, "moe.global_aux_loss_coeff", "dense"),
    (["model=gpt_moe_tiny", "moe.top_k=5"], 1, "moe.top_k", "moe.num_experts (4)"),
    (["model=gpt_moe_tiny", "moe.top_k=1"], 1, "moe.normalize_top_k", "gradient"),
    (
        ["model=gpt_moe_tiny", "moe.router_score=sigmoid", "moe.normalize_top_k=false"],
        1,
        "moe.normalize_top_k",
        "sigmoid",
    ),
    (["model=gpt_moe_tiny", "moe.expert_bias=true"], 1, "moe.router_score", "sigmoid"),
    (["model=gpt_moe_tiny", "moe.capacity_factor=0"], 1, "moe.capacity_factor", "greater than 0"),
    (["model=gpt_moe_tiny", "moe.num_groups=2"], 1, "moe.group_top_k", "moe.group_top_k=1"),
    (["model=gpt_moe_tiny", "moe.group_top_k=2"], 1, "moe.num_groups", "moe.num_groups=2"),
    (["model=gpt_moe_tiny", "moe.num_groups=3", "moe.group_top_k=1"], 1, "moe.num_groups", "moe.num_experts (4)"),
    (["model=gpt_moe_tiny", "moe.num_groups=2", "moe.group_top_k=3"], 1, "moe.group_top_k", "moe.num_groups (2)"),
    (["model=gpt_moe_tiny", "moe.num_groups=4", "moe.group_top_k=1"], 1, "moe.top_k", "groups of 1"),
    (["model=gpt_moe_tiny", "moe.num_groups=4", "moe.group_top_k=4"], 1, "moe.group_top_k", "moe.top_k (2)"),
    (["model=gpt_moe_tiny", "moe.layers=[1,0]"], 1, "moe.layers", "model.num_layers (4)"),
    (["model=gpt_moe_tiny", "moe.layers=[0,0,0,0]"], 1, "moe.layers", "at least one 1"),
    (["model=gpt_moe_tiny", "moe.layers=0"], 1, "moe.layers", "moe.layers=1"),
    (["model=gpt_moe_tiny", "moe.pipeline_degree=automatic"], 1, "moe.pipeline_degree", "at least 1, or auto"),
    (
        ["model=gpt_moe_tiny", "moe.memory_budget=100"],
        1,
        "moe.memory_budget",
        "must be null unless moe.pipeline_degree=auto or moe.memory_strategy=auto",
    ),
    (
        ["model=gpt_moe_tiny", "moe.memory_strategy=offload", "moe.backward_pipeline_degree=2"],
        1,
        "moe.backward_pipeline_degree",
        "must be null or equal moe.pipeline_degree (1)",
    ),
    (["model=gpt_moe_tiny", "moe.pipeline_degree=0"], 1, "moe.pipeline_degree", "at least 1"),
    (["model=gpt_moe_tiny", "moe.backward_pipeline_degree=0"], 1, "moe.backward_pipeline_degree", "at least 1"),
    (["model=gpt_moe_tiny", "moe.pipeline_degree=two"], 1, "moe.pipeline_degree", "integer"),
    (
        ["model=gpt_moe_tiny", "moe.memory_strategy=reuse"],
        1,
        "moe.memory_strategy",
        "one of keep, recompute, communicate",
    ),
    (["model=gpt_moe_tiny", "moe.placement.policy=greedy"], 1, "moe.placement.policy", "one of static, flex"),
    (["model=gpt_moe_tiny", "moe.placement.extra_slots=1"], 1, "moe.placement.extra_slots", "must be 0"),
    (
        ["model=gpt_moe_tiny", "moe.placement.policy=solve"],
        1,
        "moe.placement.policy",
        "because each rank has all experts",
    ),
    (
        ["model=gpt_moe_tiny", "parallel.expert=2", "moe.placement.policy=solve"],
        2,
        "moe.placement.extra_slots",
        "must be at least 1",
    ),
    (
        [
            *("model=gpt_moe_tiny", "parallel.expert=2", "moe.capacity_factor=1.0"),
            *("moe.placement.policy=solve", "moe.placement.extra_slots=2"),
        ],
        2,
        "moe.capacity_factor",
        "without dropping",
    ),
    (
        ["model=gpt_moe_tiny", "moe.placement.bitwise=true", "moe.pipeline_degree=auto"],
        1,
        "moe.pipeline_degree",
        "blocks must not cross chunks",
    ),
    (
        ["model=gpt_moe_tiny", "moe.placement.bitwise=true", "moe.backward_pipeline_degree=2"],
        1,
        "moe.backward_pipeline_degree",
        "null or equal moe.pipeline_degree (1)",
    ),
    (
        [
            *(
                "model=gpt_moe_tiny",
                "parallel.expert=2",
                "moe.placement.policy=least_loaded",
                "moe.placement.extra_slots=1",
            ),
            "moe.placement.max_load=1.2",
        ],
        2,
        "moe.placement.max_load",
        "cannot limit the load",
    ),
    (["model=gpt_moe_tiny", "moe.placement.over_limit=stop"], 1, "moe.placement.over_limit", "there is no limit"),
    (["model=gpt_moe_tiny", "moe.placement.over_limit=end"], 1, "moe.placement.over_limit", "one of warn, stop"),
    (["model=gpt_moe_tiny", "moe.placement.replay=/runs/one"], 1, "moe.placement.replay", "must be null"),
    (["model=gpt_moe_tiny", "moe.placement.costs=free"], 1, "moe.placement.costs", "one of assumed, measured"),
    (["model=gpt_moe_tiny", "moe.placement.interval=-1"], 1, "moe.placement.interval", "at least 0"),
    (["model=gpt_moe_tiny", "parallel.expert=3"], 3, "parallel.expert", "moe.num_experts (4)"),
    (["model=gpt_moe_tiny", "parallel.expert=4"], 1, "world_size", "parallel.expert=1 or 4 processes"),
    (["model=gpt_moe_tiny", "parallel.expert=4"], 6, "world_size", "or 4 processes"),
    (["model=gpt_moe_tiny", "parallel.tensor=2"], 2, "parallel.sequence", "parallel.sequence=true"),
    (
        ["model=gpt_moe_tiny", "parallel=tp2_sp", "parallel.expert_tensor=1"],
        2,
        "parallel.expert_tensor",
        "parallel.tensor (2)",
    ),
    (
        ["model=gpt_moe_tiny", "parallel=tp2_sp", "moe.ffn_hidden_size=65"],
        2,
        "parallel.tensor",
        "moe.ffn_hidden_size (65)",
    ),
    (
        ["model=gpt_moe_tiny", "parallel.expert=2", "parallel.expert_tensor=3", "parallel.tensor=1"],
        6,
        "parallel.expert_tensor",
        "moe.ffn_hidden_size (128)",
    ),
    (
        ["model=gpt_moe_tiny", "parallel=tp2_sp", "moe.shared_expert_ffn_hidden_size=65"],
        2,
        "parallel.tensor",
        "moe.shared_expert_ffn_hidden_size (65)",
    ),
    (["model=bert_moe_tiny", "model.linear_bias=true", "parallel=tp2_sp"], 2, "model.linear_bias", "2 tensor ranks"),
    (
        ["model=bert_moe_tiny", "model.linear_bias=true", "moe.shared_expert_ffn_hidden_size=64"],
        1,
        "model.linear_bias",
        "shared",
    ),
    (["experiment=mixtral_8x7b"], 8, "world_size", "32 processes"),
    (["experiment=deepseek_v3_like"], 1, "world_size", "256 processes"),
]


@pytest.mark.parametrize(("overrides", "world_size", "key", "says"), BROKEN, ids=lambda value: str(value)[:70])
def test_rule(overrides: list[str], world_size: int, key: str, says: str) -> None:
    base = [] if any(text.startswith("experiment=") for text in overrides) else ["experiment=gpt_tiny"]
    config = compose([*base, *overrides])
    with pytest.raises(ConfigError) as caught:
        validate(config, world_size)
    message = str(caught.value)
    value = world_size if key == "world_size" else get(config, key)
    assert message.startswith(f"{key} ({show(value)}) ")
    assert says in message

    field, alternatives = advice.split(message)
    assert field == key
    assert alternatives, message
    for alternative in alternatives:
        fixes = [fix for fix in alternative if not fix.startswith("WORLD_SIZE=")]
        processes = [int(fix.partition("=")[2]) for fix in alternative if fix.startswith("WORLD_SIZE=")]
        validate(compose([*base, *overrides, *fixes]), processes[0] if processes else world_size)


def test_memory_strategies_are_the_layers() -> None:
    assert set(KEYS["moe.memory_strategy"].choices) == {*STRATEGIES, "auto"}
    assert set(KEYS["moe.placement.policy"].choices) == {*POLICIES, "static"}


@pytest.fixture(scope="module")
def legal() -> Config:
    return compose(["experiment=gpt_moe_tiny"])


@pytest.mark.parametrize(
    "name", [name for name, key in KEYS.items() if {key.low, key.above, key.high, key.below} != {None}]
)
def test_every_range_is_held(name: str, legal: Config) -> None:
    key = KEYS[name]
    whole = int in key.kinds or key.of_items is int
    outside = [
        None if key.low is None else key.low - 1,
        key.above,
        key.below,
        None if key.high is None else key.high + 1,
    ]
    for value in (int(number) if whole else float(number) for number in outside if number is not None):
        config = copy.deepcopy(legal)
        section, _, last = name.rpartition(".")
        setattr(get(config, section) if section else config, last, [value] if key.of_items is int else value)
        with pytest.raises(ConfigError, match=re.escape(name)):
            validate(config, 1)


def test_advice_with_further_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"model\.family \(grt\).*Try model\.family=gpt parallel\.context=1\."):
        validate(compose(["experiment=gpt_tiny", "model.family=grt", "parallel.context=2"]), 1)
    with pytest.raises(ConfigError, match=r"model\.family \(grt\).*Try model\.family=gpt\."):
        validate(compose(["experiment=gpt_tiny", "model.family=grt", "parallel.context=2", "optimizer.lr=-1"]), 1)


def test_nearest() -> None:
    assert nearest("hiden_size", ["hidden_size", "head_dim"]) == "hidden_size"
    assert nearest("zzz", ["hidden_size", "head_dim"]) is None


def test_derived_values() -> None:
    config = compose(
        [
            "experiment=gpt_moe_tiny",
            "parallel=tp2_sp",
            "moe.layers=2",
            "model.ffn_hidden_size=96",
            "moe.ffn_hidden_size=null",
        ]
    )
    assert derived.moe_layer_pattern(config) == [1, 0, 1, 0]
    assert (
        derived.expert_tensor_size(config),
        derived.data_parallel_size(config, 4),
        derived.num_micro_batches(config, 4),
    ) == (2, 2, 2)
    assert (derived.head_dim(config), derived.num_query_groups(config), derived.expert_ffn_hidden_size(config)) == (
        16,
        4,
        96,
    )
    config.parallel.expert = 2
    assert (derived.expert_tensor_size(config), derived.expert_data_parallel_size(config, 4)) == (1, 2)
    config.moe.layers = [0, 1, 1, 1]
    assert derived.moe_layer_pattern(config) == [0, 1, 1, 1]
    assert derived.moe_layer_pattern(compose(["experiment=gpt_tiny"])) == [0, 0, 0, 0]
    assert derived.overlap_param_gather(config)
    config.optimizer.distributed = False
    assert not derived.overlap_param_gather(config)
