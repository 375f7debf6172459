"""Build a run from its config: data, process groups, folder, engine and the state of its checkpoint, in this order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from base import files
from base.progress import begin
from base.ranks import launched
from checkpoint import kept_tokenizer, manifest, resume, start
from checkpoint.saver import Saver
from checkpoint.state_file import describe_layout
from configs.job import Job
from configs.rules import idle
from configs.schema import Config
from configs.weights import check_files
from data import identity
from data.document_lengths import corpus_share, draw_segments
from data.loader import build_data
from data.prepare import PreparedData, prepare
from data.prepare.notes import lone_documents
from data.tokenizer import expected_vocab_size, load_tokenizer
from models.huggingface.translate import unexportable
from models.specs import backend_line, resolve_backend
from models.transformer_config import fusions
from parallel import card
from parallel import topology as topology_module
from parallel.joint_errors import raised_together, refuse_other_facts
from parallel.topology import Topology
from simulator import run_plan
from simulator.flops import training_flops_per_token
from simulator.text import no_export
from training import progress
from training.engine import Engine
from training.loss_buckets import with_lengths
from training.resilience.health import Health, SkippedSamples
from training.run import Callback, Run
from training.starting import dry_run, limits, start_log


def build_run(config: Config, callbacks: Sequence[Callback], built: contextlib.ExitStack) -> Run:
    """Connect the ranks, lock the run's folder, and build everything that a step needs. A collective call. Registers
    every object that must be closed with `built` as soon as the object exists. Raises ConfigError."""
    prepared, expected = _prepare_before_ranks_meet(config)
    tokenizer = load_tokenizer(prepared.tokenizer_path, tried=True)
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    topology, claim, resumption = _join(config, callbacks, built, prepared, vocab_size)
    device, on_gpu = topology.device, topology.device.type == "cuda"
    job = Job(config, topology.world_size, vocab_size, device.type)
    if expected.job != job or on_gpu:
        size = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
        expected = run_plan.make_plan(job, size, expected.attended_share)
    # The memory that is free differs between nodes.
    with raised_together():
        run_plan.refuse_what_cannot_fit(expected, device)
    headroom = run_plan.state_headroom(expected.memory[topology.rank], expected.capacity)
    engine = Engine(config, topology, vocab_size, headroom)
    built.callback(engine.close)
    position, health = _load_state(config, engine, resumption.start.checkpoint)
    skipped = SkippedSamples.load(Path(config.run_dir), resumption.start.origin)

    def make_loaders(consumed: int) -> Any:
        return build_data(
            config,
            prepared,
            rank=topology.data.rank,
            world_size=topology.data.size,
            consumed_samples=consumed,
            pin=on_gpu,
            on_host=engine.on_host,
            on_validation=lambda batch: engine.on_host(with_lengths(batch)),
        )

    loader, make_validation_loaders = make_loaders(position.consumed_samples)
    run = Run(
        config,
        topology,
        engine,
        vocab_size,
        tokenizer,
        loader,
        make_validation_loaders,
        Saver(config, engine.host_link),
        health,
        position,
        skipped,
        callbacks,
        make_loader=lambda consumed: make_loaders(consumed)[0],
        claim=claim,
        facts={"run": resumption.start.record.id, "data": prepared.identity},
    )
    built.callback(lambda: run.loader.close())
    if run.is_main:
        _describe(run, resumption, expected)
    if dry_run.wanted(config, device):
        dry_run.first_batch(engine, expected)
    return run


def _join(
    config: Config, callbacks: Sequence[Callback], built: contextlib.ExitStack, prepared: PreparedData, vocab_size: int
) -> tuple[Topology, resume.Claim | None, resume.Resumption]:
    """Connect the ranks, lock the run's folder against other jobs, and find the checkpoint to resume from, if any."""
    topology = topology_module.initialize(config)
    refuse_other_facts(identity.facts(prepared.identity))
    for callback in callbacks:
        callback.on_join(topology)
    run_dir = Path(config.run_dir)
    claim = resume.claim(run_dir)
    if claim is not None:
        built.callback(claim.release)
    resumption = resume.find(config, vocab_size, prepared.identity, start_log.log_skipped_checkpoint)
    folder = resumption.start.checkpoint
    if claim is not None:
        start_log.log_damaged_files(run_dir, resumption.start)
    for callback in callbacks:
        callback.on_claim(0 if folder is None else int(folder.name[5:]))
    return topology, claim, resumption


def _load_state(config: Config, engine: Engine, checkpoint: Path | None) -> tuple[progress.Progress, Health]:
    """Load the model from a checkpoint or, without a checkpoint, only the weights from the folder `checkpoint.weights`.
    Returns the run's progress, and the checks that decide whether later steps are good. Raises ConfigError on every
    rank."""
    position, health, weights = progress.Progress(), Health(config), config.checkpoint.weights
    if engine.topology.rank == 0 and config.logging.progress and (checkpoint or weights):
        begin(f"Reading {checkpoint or weights}")
    if checkpoint is not None:
        position = progress.load(engine, checkpoint)
        health.resume(position.health)
    elif weights is not None:
        launch = launched()  # each of the node's ranks checks some of the files
        share = slice(launch.local_rank if launch.local_world_size else None, None, launch.local_world_size)
        with raised_together():
            check_files(Path(weights), share)
        engine.load_weights(Path(weights))
    return position, health


def _prepare_before_ranks_meet(config: Config) -> tuple[PreparedData, run_plan.RunPlan]:
    """Prepare the corpus and make a first plan of memory and time, before the ranks connect. Raises ConfigError."""
    launch = launched()
    device = topology_module.choose_device(config)  # a wrong device is reported before a corpus is prepared
    early = start.find(config, manifest.problem_with)  # the ranks read every byte later, together
    start.check_tokenizer(config, early)
    data_config = start.data_config(config, early)
    if not config.training.eval_interval:
        data_config = dataclasses.replace(data_config, validation_corpora={})
    # Checked before a corpus is tokenized, and before any rank of this node has allocated its memory.
    vocab_size = expected_vocab_size(dataclasses.replace(config, data=data_config))
    job = Job(config, launch.world_size, vocab_size, device.type)
    expected = run_plan.make_plan(job)
    if device.type == "cpu":
        run_plan.refuse_what_the_host_cannot_hold(expected)
        limits.check_addresses(expected.memory[launch.rank].total + expected.memory[launch.rank].host)
    show_progress = launch.rank == 0 and config.logging.progress
    prepared = prepare(
        data_config, config.model.family, show_progress, documents_in_text=start.documents_in_text(config, early)
    )
    if config.data.documents == "separate" and launch.rank == 0:  # the rank that writes and prints the plan
        share = corpus_share(config, prepared.train)
        documents = draw_segments(config, prepared.train) if config.parallel.context > 1 else None
        expected = run_plan.make_plan(job, attended_share=share, documents=documents)
    if launch.rank == 0:
        notes = [*prepared.notes, *lone_documents(prepared, config.model.sentence_head)]
        if prepared.num_bad_lines:
            listed = f"listed in {', '.join(prepared.bad_lines_files)}; first {prepared.bad_lines[0]}"
            notes.append(f"{prepared.num_bad_lines} bad lines were left out, {listed}")
        for note in notes:
            print(f"data: {note}", flush=True)
    return prepared, expected


def _describe(run: Run, resumption: resume.Resumption, expected: run_plan.RunPlan) -> None:
    """Log the start, print a summary, and write config, tokenizer, run record and the plan of memory and time
    (`expected`) to the run's folder. Only rank 0 calls this."""
    config, device = run.config, run.topology.device
    if (line := backend_line(config, device)) is not None:
        print(line, flush=True)
    start_log.log_start(config, resumption, run.progress.step)
    assert run.claim is not None
    files.write_text(run.run_dir / manifest.CONFIG, run.saver.config_text)
    with files.spared(run.run_dir / run_plan.PLAN_FILE):
        run_plan.write(expected, run.run_dir)
    kept_tokenizer.keep(run.run_dir, run.tokenizer)
    run.claim.keep(resumption.start.record)
    flops = training_flops_per_token(config, run.vocab_size, expected.attended_share)
    layout = describe_layout({"world_size": run.topology.world_size, **vars(config.parallel)})
    print(
        f"{config.name}: {config.model.family}, {device.type}, {layout}; "
        f"vocabulary {run.vocab_size}; {flops / 1e6:.1f} MFLOP per token; steps {run.progress.step} to "
        f"{config.training.steps} of {run.tokens_per_step} tokens; writing to {run.run_dir}",
        flush=True,
    )
    for note in filter(None, (idle.ready(config), no_export(unexportable(config, run.vocab_size)))):
        print(note, flush=True)
    if device.type == "cuda":
        fused = ", ".join(fusions(config, resolve_backend(config, device))) or "none"
        print(f"{torch.cuda.get_device_name(device)}: {card.describe(config)}; fusions {fused}", flush=True)
