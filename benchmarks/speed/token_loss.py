"""The loss in tiles of tokens against full logits: python -m benchmarks.speed.token_loss [--cases N ...] [--rounds 7]
[--tokens 8192] [--quick] [--json] [--markdown].

Both are the output layer with its loss, forward and backward, as a training has them: from hidden states to their
gradient, and to the weight's in its fp32 buffer. Full logits are Megatron-core's layer and its vocabulary parallel
cross entropy, the gradient added to the buffer afterwards. Each rank computes with one thread. Time is measured in
rounds in which both take turns; the ratio is the median over rounds of one round's, with its standard error. Memory is
exact: PyTorch's memory tracker counts every tensor from the start of the forward to the end of the backward pass,
without hidden states, weight and their gradients. A case of BERT has a bias, and predicts 15% of its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

import parallel.megatron

# isort: split
from benchmarks.kit.cluster import Cluster, ClusterError
from benchmarks.kit.rounds import measure, standard_error
from benchmarks.kit.tables import headline, line
from models.loss.output_layer import predicted_rows, select_rows
from models.loss.tiles import token_tile
from models.loss.token_loss import Targets, VocabularyShard, token_loss
from parallel.dtypes import DTYPES

MIB = 2**20
MASKED = 0.15  # of BERT's tokens
QUICK = {"tokens": 1024, "hidden": 64, "vocabulary": 4096}


@dataclass(frozen=True)
class LossCase:
    """One shape: `ranks` tensor ranks share the vocabulary, under sequence parallelism also the tokens."""

    family: str
    precision: str
    vocabulary: int
    ranks: int = 1
    sequence: bool = False
    tokens: int = 8192
    hidden: int = 512


CASES = [
    LossCase("gpt", "fp32", 32768),
    LossCase("gpt", "bf16", 32768),
    LossCase("bert", "fp32", 32768),
    LossCase("bert", "bf16", 32768),
    LossCase("gpt", "fp32", 131072),
    LossCase("gpt", "bf16", 131072),
    LossCase("gpt", "fp32", 32768, 2),
    LossCase("gpt", "bf16", 32768, 2),
    LossCase("gpt", "bf16", 32768, 2, True),
]


# ---------------------------------------------------------------------------------------------------------------------
# On the ranks
# ---------------------------------------------------------------------------------------------------------------------

_state: dict[str, Any] = {}


def build(case: LossCase) -> None:
    """Make this rank's inputs."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel.megatron.apply_patches("cpu")
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=case.ranks)
    rank, dtype = dist.get_rank(), DTYPES[case.precision]
    generator = torch.Generator().manual_seed(0)
    num_rows = case.vocabulary // case.ranks
    own_tokens = case.tokens // (case.ranks if case.sequence else 1)
    weight = torch.nn.Parameter((torch.randn(num_rows, case.hidden, generator=generator) * 0.02).to(dtype))
    weight.main_grad = torch.zeros(num_rows, case.hidden)  # type: ignore[attr-defined]
    mask = torch.ones(1, case.tokens)
    if case.family == "bert":
        mask = (torch.arange(case.tokens) * MASKED % 1 < MASKED).float().unsqueeze(0)
    _state.update(
        case=case,
        hidden=torch.randn(own_tokens, 1, case.hidden, generator=generator).to(dtype).requires_grad_(),
        weight=weight,
        bias=torch.nn.Parameter(torch.zeros(num_rows, dtype=dtype)) if case.family == "bert" else None,
        labels=torch.randint(0, case.vocabulary, (1, case.tokens), generator=generator),
        mask=mask,
        grad=torch.tensor(1.0) / mask.sum(),
        part=VocabularyShard(
            parallel_state.get_tensor_model_parallel_group(), rank * num_rows, num_rows, case.sequence
        ),
    )


def _full() -> torch.Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as linear

    case, shard = _state["case"], _state["part"]
    reduces = case.ranks > 1 and not case.sequence
    logits = linear(
        _state["hidden"], _state["weight"], _state["bias"], False, reduces, case.sequence, None, None, shard.group
    )
    losses = vocab_parallel_cross_entropy(logits, _state["labels"].t().contiguous())
    return (losses.t() * _state["mask"]).sum()


def _tiles() -> torch.Tensor:
    case, shard = _state["case"], _state["part"]
    loss_rows = predicted_rows(_state["mask"], shard.ranks)
    targets = Targets(_state["labels"], _state["mask"], loss_rows, _state["grad"])
    hidden = select_rows(_state["hidden"], loss_rows, shard.group.rank())
    return token_loss(hidden, _state["weight"], _state["bias"], targets, shard, token_tile(case.tokens))[0]


def _pass(way: str) -> float:
    """Run a forward and a backward pass; return the loss."""
    loss = _full() if way == "full" else _tiles()
    (loss * _state["grad"]).backward()
    weight = _state["weight"]
    if way == "full":
        weight.main_grad.add_(weight.grad)
    return float(loss.detach())


def _clear() -> None:
    for name in ("hidden", "weight", "bias"):
        if _state[name] is not None:
            _state[name].grad = None


def timed(way: str) -> dict[str, float]:
    """Return the seconds of both passes."""
    start = time.perf_counter()
    _pass(way)
    seconds = time.perf_counter() - start
    _clear()
    return {"pass": seconds}


def peak_bytes(way: str) -> tuple[int, float]:
    """Return the most bytes of tensors at once, without inputs and gradients, and the loss."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker, device = MemTracker(), torch.device("cpu")
    hidden, weight = _state["hidden"], _state["weight"]
    given = [each for each in _state.values() if isinstance(each, torch.Tensor)]
    tracker.track_external(*given, weight.main_grad)
    with tracker:
        before = tracker.get_tracker_snapshot("current")[device]["Total"]
        loss = _pass(way)
        peak = tracker.get_tracker_snapshot("peak")[device]["Total"] - before
    _clear()
    gradients = hidden.numel() * hidden.element_size()
    if way == "full":
        gradients += weight.numel() * weight.element_size()
    return int(peak) - gradients, loss


# ---------------------------------------------------------------------------------------------------------------------
# Here
# ---------------------------------------------------------------------------------------------------------------------


def compare(case: LossCase, num_rounds: int) -> dict[str, Any]:
    """Measure time and memory of both losses, the largest over the ranks."""
    with Cluster(1, ranks_per_node=case.ranks) as cluster:
        cluster.call(build, case)
        memory, losses = {}, {}
        for way in ("full", "tiles"):
            found = cluster.call(peak_bytes, way)
            memory[way], losses[way] = max(each[0] for each in found), found[0][1]
        rounds = measure(cluster, timed, {"full": ("full",), "tiles": ("tiles",)}, num_rounds)
    ratios = [tiles / full for full, tiles in zip(*(rounds.seconds[way]["pass"] for way in ("full", "tiles")))]
    return {
        **asdict(case),
        "seconds": {way: rounds.median(way, "pass") for way in ("full", "tiles")},
        "ratio": statistics.median(ratios),
        "ratio_error": standard_error(ratios),
        "bytes": memory,
        "saved": 1 - memory["tiles"] / memory["full"],
        "loss_difference": abs(losses["tiles"] / losses["full"] - 1),
        "rounds": rounds.num_rounds,
        "dropped": rounds.num_dropped,
    }


HEADINGS = ["case", "s full", "s tiles", "time tiles / full", "MiB full", "MiB tiles", "saved", "loss apart"]


def _row(result: dict[str, Any]) -> list[str]:
    layout = "" if result["ranks"] == 1 else f", TP{result['ranks']}{'+SP' if result['sequence'] else ''}"
    return [
        f"{result['family']} {result['precision']} {result['vocabulary']}{layout}",
        *(f"{result['seconds'][way]:.2f}" for way in ("full", "tiles")),
        f"{result['ratio']:.3f} +- {result['ratio_error']:.3f}",
        *(f"{result['bytes'][way] / MIB:.1f}" for way in ("full", "tiles")),
        f"{100 * result['saved']:.1f}%",
        f"{result['loss_difference']:.0e}",
    ]


def main() -> int:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases, from 0")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--markdown", action="store_true", help="a table for benchmarks/results")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    print(headline(HEADINGS, arguments.markdown), flush=True)
    try:
        for number in range(len(CASES)) if arguments.cases is None else arguments.cases:
            case = LossCase(**{**asdict(CASES[number]), "tokens": arguments.tokens})
            if arguments.quick:
                case = LossCase(**{**asdict(case), **QUICK})
            results.append(compare(case, 2 if arguments.quick else arguments.rounds))
            print(line(_row(results[-1]), HEADINGS, arguments.markdown), flush=True)
    except (ClusterError, RuntimeError) as error:
        print(f"token_loss: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"cases": results}))
    return 0


if __name__ == "__main__":
    from benchmarks.speed import token_loss as module  # under the name by which ranks find its functions

    sys.exit(module.main())
