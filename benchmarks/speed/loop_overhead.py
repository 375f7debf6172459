"""Cost of the training loop: its step against a bare loop over Megatron-core's schedule, DDP and optimizer.

`python -m benchmarks.speed.loop_overhead [--ranks 2] [--rounds 16] [--steps 3] [--json] [key=value ...]`

Both sides train the same model on the same data in the same processes, in alternating rounds of `--steps` steps. Our
side is a step of `Trainer.fit`, with all callbacks of a run (W&B is off); the bare side calls Megatron-core directly on
batches that are ready in memory. Printed: the median over rounds of the ratio of their times, and the share of a step
spent waiting for data.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from configs.compose import compose
from configs.schema import Config
from configs.validate import validate
from models.loss.output_layer import LossOutput
from parallel.topology import Topology
from training.callbacks.guard import Guard
from training.starting.run_builder import build_run
from training.trainer import Trainer


def bare_step(
    config: Config, topology: Topology, vocab_size: int, steps: Iterator[list[dict[str, torch.Tensor]]]
) -> Callable[[], None]:
    """Take a step as a short script would: with Megatron-core's DDP, optimizer and schedule, and nothing else."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    from models import gpt
    from models.build import build_model

    chunk = build_model(config, topology, vocab_size)[0]
    settings = get_model_config(chunk)
    model = DistributedDataParallel(
        settings,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
        ),
        chunk,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.optimizer.lr,
            min_lr=config.optimizer.min_lr,
            weight_decay=config.optimizer.weight_decay,
            clip_grad=config.optimizer.clip_grad,
            params_dtype=torch.float32,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    for member in optimizer.chained_optimizers:
        for group in member.optimizer.param_groups:
            group["fused"] = True  # the same kernel on both sides
    settings.grad_scale_func = optimizer.scale_loss
    settings.finalize_model_grads_func = finalize_model_grads
    settings.no_sync_func = model.no_sync
    settings.grad_sync_func = model.start_grad_sync
    settings.param_sync_func = model.start_param_sync
    schedule = get_forward_backward_func()

    def forward_step(iterator: Iterator[dict[str, torch.Tensor]], module: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(iterator)

        def mean_loss(output: LossOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = output[0] / batch["labels"].numel()
            return mean, {"loss": mean.detach()}

        return gpt.forward(module, batch), mean_loss

    def step() -> None:
        batches = next(steps)
        model.train()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = schedule(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=config.model.sequence_length,
            micro_batch_size=config.training.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        loss = torch.stack([entry["loss"] for entry in losses]).mean()
        if dist.get_world_size() > 1:
            dist.all_reduce(loss)
        float(loss)

    return step


def measure(config: Config, rounds: int, steps: int) -> dict[str, float]:
    """Alternate both loops; return the median ratio and the wait for data over all rounds. Every rank of the job calls
    it."""
    trainer = Trainer(config, guard=Guard(config))
    run = build_run(config, trainer.callbacks, contextlib.ExitStack())
    trainer._start(run)
    # Fresh data for each step of both: on a batch learned by heart, gradients turn denormal and CPUs slow down.
    ready = [run.loader.next_step() for _ in range((rounds + 1) * steps)]
    bare = bare_step(config, run.topology, run.vocab_size, iter(ready))
    waits: list[float] = []

    def ours() -> None:
        metrics = trainer.train_step(run)
        assert metrics is not None, "a step was refused"
        for callback in trainer.callbacks:
            callback.after_step(run, metrics)
        waits.append(metrics["data_wait_seconds"] / metrics["step_seconds"])

    def timed(step: Callable[[], None]) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        dist.barrier()
        return (time.perf_counter() - start) / steps

    for step in (ours, bare):  # first calls allocate
        timed(step)
    waits.clear()
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for i in range(rounds):
        for name, step in (("ours", ours), ("bare", bare)) if i % 2 == 0 else (("bare", bare), ("ours", ours)):
            times[name].append(timed(step))
    for callback in trainer.callbacks:
        callback.close()
    run.loader.close()
    ratios = [a / b for a, b in zip(times["ours"], times["bare"], strict=True)]
    return {
        "ranks": dist.get_world_size(),
        "ours_ms": 1000 * statistics.median(times["ours"]),
        "bare_ms": 1000 * statistics.median(times["bare"]),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "data_wait_share": statistics.median(waits),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    if arguments.ranks > 1 and not dist.is_torchelastic_launched():
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(arguments.ranks),
        ]
        return subprocess.run(
            [*launcher, "-m", "benchmarks.speed.loop_overhead", *sys.argv[1:]], check=False, timeout=1800
        ).returncode
    with tempfile.TemporaryDirectory() as folder:
        sizes = [
            "model=gpt_small",
            "model.num_layers=4",
            "model.hidden_size=256",
            "model.ffn_hidden_size=704",
            "model.sequence_length=256",
        ]
        defaults = [*sizes, "training.global_batch_size=8", "training.micro_batch_size=2", "training.steps=100000"]
        quiet = [
            f"run_dir={folder}",
            "checkpoint.resume=never",
            "logging.progress=false",
            "training.eval_interval=0",
            "logging.wandb=off",
            "checkpoint=off",
        ]
        config = compose([*defaults, *quiet, *arguments.overrides])
        validate(config, arguments.ranks)
        result = measure(config, arguments.rounds, arguments.steps)
        if dist.get_rank() == 0:
            print(
                f"{'ranks':>5} {'ours ms':>9} {'bare ms':>9} {'ratio':>7} {'lowest':>7} {'highest':>8} "
                f"{'data wait':>10}"
            )
            print(
                f"{result['ranks']:>5} {result['ours_ms']:>9.1f} {result['bare_ms']:>9.1f} {result['ratio']:>7.4f} "
                f"{result['ratio_low']:>7.3f} {result['ratio_high']:>8.3f} {result['data_wait_share']:>10.4%}"
            )
            if arguments.json:
                print(json.dumps(result))
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
