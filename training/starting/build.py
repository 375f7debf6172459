"""A run from its config: data, ranks, folder, engine and the state of its checkpoint, in this order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoint import kept_tokenizer, manifest, resume, start
from checkpoint.saver import Saver
from checkpoint.state_file import in_words
from configs import files
from configs.progress import begin
from configs.ranks import launched
from configs.rules import idle
from configs.schema import Config, ConfigError
from configs.weights import check_files
from data import identity
from data.build import build_data
from data.pieces import corpus_share, drawn_pieces
from data.prepare import PreparedData, prepare
from data.prepare.advice import lone_documents
from data.tokenizer import load_tokenizer
from data.vocabulary import expected_vocab_size
from models.huggingface.translate import unexportable
from models.specs import backend_line, resolve_backend
from models.transformer_config import fusions
from parallel import card
from parallel import topology as topology_module
from parallel.refusal import raise_together, refuse_other_facts
from simulator import run_plan
from simulator.flops import training_flops_per_token
from simulator.text import no_export
from training import progress
from training.engine import Engine
from training.loss_buckets import with_lengths
from training.resilience.health import Health, SkippedSamples
from training.run import Callback, Run
from training.starting import beginning, dry_run, limits


def build(config: Config, callbacks: Sequence[Callback], built: contextlib.ExitStack) -> Run:
    """Join the job, claim the run's folder, and have everything there that a step needs. A collective call.

    What must be closed goes to `built`, as soon as it is there. Raises ConfigError.
    """
    run_dir = Path(config.run_dir)
    prepared, expected = _prepare(config)
    tokenizer = load_tokenizer(prepared.tokenizer_path, tried=True)
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    topology = topology_module.initialize(config)
    refuse_other_facts(identity.facts(prepared.identity))
    for callback in callbacks:
        callback.on_join(topology)

    claim = resume.claim(run_dir)  # keeps other jobs out of the run's folder
    if claim is not None:
        built.callback(claim.release)
    begun = resume.find(config, vocab_size, prepared.identity, beginning.passed_over)
    folder = begun.start.checkpoint
    if topology.rank == 0:
        beginning.name_damage(run_dir, begun.start)
    for callback in callbacks:
        callback.on_claim(0 if folder is None else int(folder.name[5:]))

    on_gpu = topology.device.type == "cuda"
    if (expected.vocab_size, expected.device) != (vocab_size, topology.device.type) or on_gpu:
        size = torch.cuda.get_device_properties(topology.device).total_memory if on_gpu else None
        expected = run_plan.make_plan(
            config, topology.world_size, vocab_size, topology.device.type, size, expected.attended_share
        )
    raise_together(_problem(expected, topology.device))
    engine = Engine(config, topology, vocab_size, run_plan.room_beside(expected.memory[topology.rank], expected.rooms))
    built.callback(engine.close)
    health, position = Health(config), progress.Progress()
    if topology.rank == 0 and config.logging.progress and (folder or config.checkpoint.weights):
        begin(f"Reading {folder or config.checkpoint.weights}")
    if folder is not None:
        position = progress.load(engine, folder)
        health.resume(position.health)
    elif config.checkpoint.weights is not None:
        raise_together(_problem_with_weights(Path(config.checkpoint.weights)))
        engine.load_weights(Path(config.checkpoint.weights))
    skipped = SkippedSamples.load(run_dir, begun.start.origin)

    def data(consumed: int) -> Any:
        return build_data(
            config,
            prepared,
            rank=topology.data.rank,
            world_size=topology.data.size,
            consumed_samples=consumed,
            pin=topology.device.type == "cuda",
            on_host=engine.on_host,
            on_validation=lambda batch: engine.on_host(with_lengths(batch)),
        )

    loader, make_validation_loaders = data(position.consumed_samples)
    saver = Saver(config, engine.host_link)
    run = Run(
        config,
        topology,
        engine,
        vocab_size,
        tokenizer,
        loader,
        make_validation_loaders,
        saver,
        health,
        position,
        skipped,
        callbacks,
    )
    built.callback(lambda: run.loader.close())
    run.make_loader = lambda consumed: data(consumed)[0]
    run.claim, run.facts = claim, {"run": begun.start.record.id, "data": prepared.identity}
    if run.is_main:
        if (line := backend_line(config, topology.device)) is not None:
            print(line, flush=True)
        beginning.say(config, begun, position.step)
        _describe(run, begun.start, expected)
    if dry_run.wanted(config, topology.device):
        dry_run.first_batch(engine, expected)
    return run


def _problem(expected: run_plan.RunPlan, device: torch.device) -> str | None:
    """Why this rank cannot have what it needs. What is free is not the same on every node."""
    try:
        run_plan.refuse_what_cannot_fit(expected, device)
    except ConfigError as error:
        return str(error)
    return None


def _problem_with_weights(folder: Path) -> str | None:
    """Why this node's ranks cannot take their weights from a folder, each of which reads some of its files."""
    launch = launched()
    try:
        check_files(
            folder, slice(launch.local_rank if launch.local_world_size else None, None, launch.local_world_size)
        )
    except ConfigError as error:
        return str(error)
    return None


def _prepare(config: Config) -> tuple[PreparedData, run_plan.RunPlan]:
    """The corpus as tokens, and what the run will need, as far as it is known before the ranks meet. Raises
    ConfigError."""
    launch = launched()
    device = topology_module.choose_device(config)  # a wrong device is told before a corpus is prepared
    early = start.find(config, manifest.problem_with)  # every byte is read once all ranks are there
    start.check_tokenizer(config, early)
    data_config = start.data_config(config, early)
    if not config.training.eval_interval:
        data_config = dataclasses.replace(data_config, validation_corpora={})
    # Before a corpus is tokenized, and before any rank of this node has taken its memory.
    vocab_size = expected_vocab_size(dataclasses.replace(config, data=data_config))
    expected = run_plan.make_plan(config, launch.world_size, vocab_size, device.type)
    if device.type == "cpu":
        run_plan.refuse_what_the_host_cannot_hold(expected)
        limits.check_addresses(expected.memory[launch.rank].total + expected.memory[launch.rank].host)
    show_progress = launch.rank == 0 and config.logging.progress
    prepared = prepare(
        data_config,
        config.model.family,
        show_progress,
        documents_in_text=start.documents_in_text(config, early),
    )
    if config.data.documents == "separate" and launch.rank == 0:  # whose plan is written and said
        share = corpus_share(config, prepared.train)
        pieces = drawn_pieces(config, prepared.train) if config.parallel.context > 1 else None
        expected = run_plan.make_plan(
            config, launch.world_size, vocab_size, device.type, attended_share=share, documents=pieces
        )
    if launch.rank == 0:
        for note in [*prepared.notes, *lone_documents(prepared, config.model.sentence_head)]:
            print(f"data: {note}", flush=True)
    if launch.rank == 0 and prepared.num_bad_lines:
        listed = ", ".join(prepared.bad_lines_files)
        print(
            f"data: {prepared.num_bad_lines} bad lines were left out, listed in {listed}; first "
            f"{prepared.bad_lines[0]}",
            flush=True,
        )
    return prepared, expected


def _describe(run: Run, begun: start.Start, expected: run_plan.RunPlan) -> None:
    """Leave in the run's folder what it is, and say it. Rank 0 calls it."""
    config = run.config
    assert run.claim is not None
    files.write_text(run.run_dir / manifest.CONFIG, run.saver.config_text)
    with files.spared(run.run_dir / run_plan.PLAN_FILE):
        run_plan.write(expected, run.run_dir)
    kept_tokenizer.keep(run.run_dir, run.tokenizer)
    run.claim.keep(begun.record)
    flops = training_flops_per_token(config, run.vocab_size, expected.attended_share)
    print(
        f"{config.name}: {config.model.family}, {run.topology.device.type}, "
        f"{in_words({'world_size': run.topology.world_size, **vars(config.parallel)})}; "
        f"vocabulary {run.vocab_size}; {flops / 1e6:.1f} MFLOP per token; steps {run.progress.step} to "
        f"{config.training.steps} of {run.tokens_per_step} tokens; writing to {run.run_dir}",
        flush=True,
    )
    for line in (idle.ready(config), no_export(unexportable(config, run.vocab_size))):
        if line:
            print(line, flush=True)
    device = run.topology.device
    if device.type == "cuda":
        fused = ", ".join(fusions(config, resolve_backend(config, device))) or "none"
        print(f"{torch.cuda.get_device_name(device)}: {card.in_words(config)}; fusions {fused}", flush=True)
