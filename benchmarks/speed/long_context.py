"""The memory of a rank for a million tokens at published widths: python -m benchmarks.speed.long_context [--fake]
[--json] [--markdown].

The models are those of arXiv:2609.14306: hidden size 7168, 384 experts of 2048, 8 of them for each token, a vocabulary
of 200,000, and 7, 14 or 39 layers that all have experts, on 16, 32 and 64 ranks. Heads are not published: here 64
query heads and 8 key heads of 128 channels. Nothing runs but the plan. The layout is of keys that everyone has: 8
tensor ranks with sequence parallelism times context ranks, experts over all ranks, optimizer state and layer
inputs on the host, full recomputation, and the experts' exchange in chunks of at most 4,096 tokens
(`moe.token_budget`). State is not updated early: a copy of it would be kept to go back to.

Components stand beside what the article's tables have for one node of 8 GPUs: the experts' exchange of 65,536
tokens a rank (128 experts, 10 chunks), and the output layer with its loss in fp32, forward and backward, over 8 ranks.
The bound of a chunk's exchange is 2 x ranks x experts of a token x tokens of a chunk x hidden size x bytes: what
routing never exceeds.

--fake: take two steps of one layer of each layout with torch's FakeTensor, one rank of them, and compare the peak with
the plan's. Optimizer state stays on the device there.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.tables import table
from configs import derived
from configs.compose import compose
from configs.job import Job
from configs.schema import Config
from configs.validate import validate
from models.blueprint import ModelChunk
from moe.chunk_plan import STRATEGIES
from moe.planning import footprint
from moe.planning.inputs import even_load, initial_plan
from simulator.activations import Activations
from simulator.context.context_sizes import attention_flops, layer_exchange
from simulator.context.shared_rows import shared_rows
from simulator.layer_inputs import layer_inputs
from simulator.memory import KINDS
from simulator.run_plan import make_plan
from simulator.sizes import Sizes

GIB = 2**30
H200, NODE = 139.8 * GIB, 2e12  # bytes of a device, of the host of a node with 8 of them
TOKENS, TENSOR, VOCAB_SIZE = 2**20, 8, 200_000
CHUNK = 4096  # tokens of a rank
SHAPES = {7: 16, 14: 32, 39: 64}  # layers: ranks
WIDTHS = (
    "experiment=deepseek_v3_like",
    "training.device=cuda",
    "model.backend=portable",
    "logging.wandb=off",
    f"model.vocab_size={VOCAB_SIZE}",
    "model.num_attention_heads=64",
    "model.num_query_groups=8",
    "model.head_dim=128",
    "moe.num_experts=384",
    "moe.layers=1",
    "moe.shared_expert_ffn_hidden_size=null",
    "moe.num_groups=null",
    "moe.group_top_k=null",
    "moe.sequence_aux_loss_coeff=0",
    "training.global_batch_size=1",
    "training.micro_batch_size=1",
)
SAVING = (
    "optimizer.state_device=host",
    "optimizer.early_update=never",  # no copy of the state to go back to
    "training.recompute=full",
    "training.activation_offload=auto",
    "moe.memory_strategy=recompute",
    f"moe.token_budget={CHUNK}",
)
# GiB in the article: the whole layer's peak before and after its chunks, and the loss's with full logits and in strips.
EXCHANGE_THEIRS = (52.66, 21.43)
LOSS_THEIRS = {16_384: (42.462, 7.322), 32_768: (79.521, 10.622)}


@dataclass(frozen=True)
class LayoutFigures:
    """Bytes of the fullest rank. `kinds`: of its device by kind."""

    layers: int
    ranks: int
    context: int
    parameters: int
    tokens: int  # of a rank, outside the linear layers
    kinds: dict[str, int]
    total: int
    host: int
    even: int  # of a chunk's exchange: what is sent and what comes
    bound: int
    exchange: int  # of a layer's experts, all chunks in flight
    loss: int
    inputs_host: int
    inputs_device: int
    sent: float  # by context ranks, for a layer's attention
    attention: float  # operations of a layer's attention

    @property
    def fits(self) -> bool:
        """Whether an H200, a tenth of it left to its libraries and gaps, and a node's host have so much."""
        return self.total <= 0.9 * H200 and 8 * self.host <= NODE


def overrides(layers: int, ranks: int) -> list[str]:
    """A layout in words of the command line."""
    context = ranks // TENSOR
    layout = [f"parallel.tensor={TENSOR}", "parallel.sequence=true", "parallel.pipeline=1"]
    layout += [f"parallel.context={context}", f"parallel.expert={ranks}"]
    sizes = f"model.num_layers={layers}", f"model.sequence_length={TOKENS}"
    return [*WIDTHS, *SAVING, *layout, *sizes]


def figures(layers: int, ranks: int) -> LayoutFigures:
    """Return the numbers of the plan of a layout. Raises ConfigError if the layout breaks a rule."""
    config = compose(overrides(layers, ranks))
    validate(config, ranks)
    plan = make_plan(Job(config, ranks, VOCAB_SIZE, "cuda"))
    worst, sizes, shared = plan.worst, Sizes(config), shared_rows(config)
    of_chunk = math.ceil(sizes.own_tokens / initial_plan(config).degree)
    row = config.model.hidden_size * sizes.element
    even = 2 * config.moe.top_k * of_chunk * row
    inputs = layer_inputs(config, ranks, 0)
    return LayoutFigures(
        layers,
        ranks,
        config.parallel.context,
        plan.total_parameters,
        sizes.own_tokens,
        {kind: getattr(worst, kind) for kind in KINDS},
        worst.total,
        max(rank.host for rank in plan.memory),
        even,
        ranks * even,
        experts_exchange(config),
        loss_peak(config),
        inputs.host,
        inputs.device_peak,
        sum(layer_exchange(config, shared).values()),
        attention_flops(config),
    )


def experts_exchange(config: Config) -> int:
    """Return the peak bytes of a layer's routed experts on a rank if every expert is equally busy."""
    load, plan = even_load(config, "cuda"), initial_plan(config)
    strategy = STRATEGIES[plan.memory_strategy]
    forward = footprint.forward_bytes(load, strategy, plan.degree)
    backward = footprint.backward_bytes(load, strategy, plan.backward_degree, plan.weight_lag, True)
    return max(forward, footprint.kept_bytes(load, strategy) + backward)


def loss_peak(config: Config) -> int:
    """Return the peak bytes of final norm, output layer and loss, including their input hidden states."""
    profile = Activations(config, VOCAB_SIZE, "cuda").profile(ModelChunk((), False, True))
    return max(profile.forward, profile.backward)


def one_layer() -> int:
    """Return the bytes of a layer's experts with inputs, outputs and weights, at the article's sizes for one node."""
    layout = ("parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=1", "parallel.expert=8")
    sizes = ("model.num_layers=1", "model.sequence_length=65536", "moe.num_experts=128", "moe.pipeline_degree=10")
    config = compose([*WIDTHS, *SAVING, *layout, *sizes, "moe.token_budget=null", "training.global_batch_size=8"])
    validate(config, 8)
    state = 2 * Sizes(config).own_tokens * config.model.hidden_size * derived.element_size(config)
    weights = 128 // 8 * derived.expert_numel(config) * derived.element_size(config)
    return state + weights + experts_exchange(config)


def one_loss(tokens: int) -> int:
    """The loss over 8 ranks that have `tokens` each, in fp32, with its part of the weight and that one's gradient."""
    layout = (f"parallel.tensor={TENSOR}", "parallel.sequence=true", "parallel.pipeline=1", "parallel.expert=8")
    sizes = ("model.num_layers=1", f"model.sequence_length={tokens * TENSOR}", "training.precision=fp32")
    config = compose([*WIDTHS, *SAVING, *layout, *sizes])
    validate(config, TENSOR)
    weight = VOCAB_SIZE // TENSOR * config.model.hidden_size * derived.element_size(config)
    return 2 * weight + loss_peak(config)


# ---------------------------------------------------------------------------------------------------------------------
# Without numbers
# ---------------------------------------------------------------------------------------------------------------------


def fake() -> list[dict[str, Any]]:
    """Return each layout's peak on a device without numbers, with the plan's, from a process of its own: the device's
    guard must be loaded before torch. Raises RuntimeError for one that fails."""
    from tests.cuda.pretended import build

    found = []
    for layers, ranks in SHAPES.items():
        code = f"import ctypes; ctypes.CDLL({str(build.guard())!r}, ctypes.RTLD_GLOBAL)"
        code += f"; from benchmarks.speed import long_context; long_context.take_steps({layers}, {ranks})"
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise RuntimeError(f"{layers} layers on {ranks} ranks: {done.stderr[-2000:]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def take_steps(layers: int, ranks: int) -> None:
    """Take two steps of a layer in that process; the last printed line is the result."""
    from tests.cuda.fake import replaced

    replaced.install()
    from tests.cuda.fake.cases import Case
    from tests.cuda.fake.measure import measure

    preset, *asked = overrides(layers, ranks)
    asked += ["model.num_layers=1", "training.activation_offload=none"]
    asked += ["optimizer.state_device=device", "optimizer.early_update=auto"]
    found = measure(Case(preset.removeprefix("experiment="), f"{layers} layers", ranks, tuple(asked)), 0)
    print(json.dumps({"layers": layers, "ranks": ranks, "peak": found.peak, "planned": found.planned}))


# ---------------------------------------------------------------------------------------------------------------------
# Shown
# ---------------------------------------------------------------------------------------------------------------------


def gib(num_bytes: float) -> str:
    """Two decimals."""
    return f"{num_bytes / GIB:.2f}"


def _ranks_row(of: LayoutFigures) -> list[str]:
    cells = [f"{of.layers}", f"{of.parameters / 1e9:.0f}B", f"{of.ranks}", f"{TENSOR} x {of.context}", f"{of.tokens:,}"]
    cells += [gib(of.kinds[kind]) for kind in KINDS]
    return [*cells, gib(of.total), gib(of.host), "fits" if of.fits else "DOES NOT FIT"]


def _parts_row(of: LayoutFigures) -> list[str]:
    cells = [f"{of.layers}", gib(of.even), gib(of.bound), gib(of.exchange), gib(of.loss)]
    cells += [gib(of.inputs_host), gib(of.inputs_device), gib(of.sent)]
    return [*cells, f"{1000 * of.sent / of.attention:.4f}"]


def _theirs(longest: LayoutFigures) -> list[list[str]]:
    before, after = EXCHANGE_THEIRS
    ours = one_layer()
    table_rows = [
        ["a layer's experts, 65,536 tokens a rank", f"{before:.2f}", f"{after:.2f}", gib(ours), _beside(ours, after)]
    ]
    for tokens, (full, strips) in LOSS_THEIRS.items():
        ours = one_loss(tokens)
        name = f"output layer and loss, fp32, {tokens:,} tokens a rank"
        table_rows.append([name, f"{full:.2f}", f"{strips:.2f}", gib(ours), _beside(ours, strips)])
    # Algorithm 3: of all inputs on the host, at most two are on the device.
    theirs = 2 * longest.inputs_host / longest.layers / GIB
    name = f"layer inputs of {longest.layers} layers, {longest.tokens:,} tokens a rank"
    ours = longest.inputs_device
    table_rows.append([name, gib(longest.inputs_host), f"{theirs:.2f}", gib(ours), _beside(ours, theirs)])
    return table_rows


def _beside(ours: float, theirs: float) -> str:
    return f"{ours / GIB / theirs:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--fake", "--json", "--markdown"):
        parser.add_argument(flag, action="store_true")
    arguments = parser.parse_args()
    found = [figures(layers, ranks) for layers, ranks in SHAPES.items()]
    headings = ["layers", "model", "ranks", "tensor x context", "tokens of a rank", *KINDS, "total", "host", ""]
    print(f"GiB of the fullest rank, one sample of {TOKENS:,} tokens:\n")
    print(table(headings, [_ranks_row(each) for each in found], arguments.markdown))
    headings = ["layers", "a chunk, even", "a chunk, bound", "experts", "loss", "inputs, host", "inputs, device"]
    print("\nOf these, GiB of a rank:\n")
    headings += ["sent for attention", "B/kFLOP"]
    print(table(headings, [_parts_row(each) for each in found], arguments.markdown))
    print("\nBeside the article's components on 8 GPUs, GiB:\n")
    theirs = _theirs(found[0])
    headings = ["", "theirs before", "theirs", "here, planned", "here / theirs"]
    print(table(headings, theirs, arguments.markdown))
    without_numbers = fake() if arguments.fake else []
    if without_numbers:
        print("\nTwo steps of one layer with FakeTensor, optimizer state on the device, GiB:\n")
        table_rows = [
            [
                f"{each['layers']}",
                f"{each['ranks']}",
                gib(each["peak"]),
                gib(each["planned"]),
                f"{each['peak'] / each['planned']:.3f}",
            ]
            for each in without_numbers
        ]
        print(table(["layers", "ranks", "peak", "planned", "peak / planned"], table_rows, arguments.markdown))
    fit = sum(each.fits for each in found)
    print(f"\n{fit} of {len(found)} layouts fit H200s with a tenth of each left, and a node's 2 TB of host memory")
    if arguments.json:
        print(json.dumps({"layouts": [asdict(each) for each in found], "fake": without_numbers}))
    return 0 if fit == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
