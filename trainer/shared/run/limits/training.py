"""Rules of a training: its batches, phases, data, optimizer and records."""

from __future__ import annotations

import dataclasses

from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.errors import ConfigError, divisors, listed
from trainer.shared.run.optimizer import GroupsConfig, MuonConfig
from trainer.shared.run.read import to_dict
from trainer.shared.run.resolved import ResolvedOptimizerConfig, ResolvedTrainConfig
from trainer.shared.run.schema import TrainConfig
from trainer.shared.run.tuning import virtual_tokens

TRACKING_REMEDY = "leave it out and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the environment"
"""Remedy for a secret in ``tracking.uri``."""


def check_tracking_uri(uri: str | None) -> None:
    """Raises ``ConfigError`` on a user name or password in the address."""
    if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
        raise ConfigError(
            f"tracking.uri contains a user name or password, which would be written into every trial's folder; {TRACKING_REMEDY}"
        )


def check_batch(config: TrainConfig) -> None:
    layout, batch = config.layout, config.run.global_batch
    unit = layout.micro_batch * (layout.data or 1)
    if batch % unit:
        raise ConfigError(
            f"run.global_batch={batch} is not divisible by layout.micro_batch={layout.micro_batch} x layout.data={layout.data} = {unit}; "
            f"use a multiple of {unit}, such as {max(unit, round(batch / unit) * unit)}"
        )


def check_phases(config: TrainConfig) -> None:
    """Raises ``ConfigError`` unless phases are in order, and each reads whole sequences of the data."""
    before = 0
    for number, given in enumerate(config.run.phases):
        name, seq = f"run.phases[{number}]", config.model.seq
        batch, length = given.global_batch or config.run.global_batch, given.seq or seq
        if given.until is None:
            raise ConfigError(f"{name}.until is missing; give the tokens of the run with which the phase ends")
        if given.until <= before:
            raise ConfigError(
                f"{name}.until={given.until} leaves it no step: the phase before ends with {before} tokens; give more, in ascending order"
            )
        if seq % length:
            shorter = listed(d for d in divisors(seq) if d * 64 >= seq)
            why = f"is longer than model.seq={seq}, the length at the end" if length > seq else f"does not divide model.seq={seq}"
            raise ConfigError(f"{name}.seq={length} {why}; use {shorter}, or change model.seq")
        if length < seq:
            _check_pieces(config, f"{name}.seq={length}")
        if batch * length % seq:
            unit = seq // length
            raise ConfigError(
                f"{name}.global_batch={batch} of {name}.seq={length} tokens are not whole sequences of model.seq={seq}, of which they are "
                f"pieces; use a multiple of {unit}, such as {max(unit, round(batch / unit) * unit)}"
            )
        before += -(-(given.until - before) // (batch * length)) * batch * length


def _check_pieces(config: TrainConfig, name: str) -> None:
    """Checks that sequences can be cut in pieces."""
    if config.data.kind == "instructions":
        raise ConfigError(f"{name} would cut examples of data.kind=instructions; give global_batch alone, or use another data.kind")
    if FAMILIES[config.model.family].encoder_decoder or config.model.encoder_layers:
        raise ConfigError(f"{name} would cut what an encoder reads from what its decoder writes; give global_batch alone")
    if virtual_tokens(config.tune):
        raise ConfigError(f"{name} would cut virtual tokens of tune.method={config.tune.method} from their text; give global_batch alone")
    if config.layout.slice_lengths is not None:
        raise ConfigError(f"{name} is cut in slices of its own; leave layout.slice_lengths out for slices of equal work")


def check_validation(config: TrainConfig) -> None:
    data, every = config.data, config.run.eval_every
    if every and config.run.task == "train" and (data.kind == "synthetic" or not data.held_out):
        raise ConfigError(
            f"run.eval_every={every} has no text to validate on: data.kind={data.kind}, data.held_out={data.held_out:g}; "
            "set data.held_out, such as 0.02, or run.eval_every=0"
        )


def check_packing(config: TrainConfig) -> None:
    """Checks packing: packed rows mark an example's beginning by the answer before it; virtual tokens stand at the beginning of a row."""
    if not config.data.pack:
        return
    if config.data.kind != "instructions":
        raise ConfigError(f"data.pack=true packs examples, and data.kind={config.data.kind} has none; use data.pack=false")
    if virtual_tokens(config.tune):
        raise ConfigError(
            f"data.pack=true leaves no place before each example for the virtual tokens of tune.method={config.tune.method}; "
            "use data.pack=false"
        )
    if config.data.task is not None:
        raise ConfigError(f"data.pack=true packs examples of one task, and data.task={config.data.task} tells them apart; use one of them")
    if config.run.compile:
        raise ConfigError(
            "run.compile=true compiles blocks for which all rows are alike, and those of data.pack=true are not; use one of them"
        )


def check_optimizer(optimizer: ResolvedOptimizerConfig) -> None:
    for name, value in to_dict(MuonConfig()).items() if optimizer.kind != "muon" else ():
        if (given := getattr(optimizer.muon, name)) != value:
            raise ConfigError(
                f"optimizer.muon.{name}={str(given).lower()} is for optimizer.kind=muon, not {optimizer.kind}; leave one of them out"
            )
    if optimizer.muon.momentum >= 1:
        raise ConfigError(
            f"optimizer.muon.momentum={optimizer.muon.momentum:g} never learns from a gradient; use a value from 0 to below 1"
        )
    if optimizer.muon.row_beta >= 1:
        raise ConfigError(f"optimizer.muon.row_beta={optimizer.muon.row_beta:g} never learns from an update; use a value from 0 to below 1")
    start = optimizer.warmup_steps + optimizer.stable_steps
    if optimizer.stable_steps and start > optimizer.decay_steps:
        raise ConfigError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} and optimizer.stable_steps={optimizer.stable_steps} end after "
            f"optimizer.decay_steps={optimizer.decay_steps}, by which the rate has fallen; lower one of them, or raise that"
        )
    for f in dataclasses.fields(GroupsConfig):
        own = getattr(optimizer.groups, f.name).lr
        if own is not None and optimizer.lr == 0:
            raise ConfigError(f"optimizer.groups.{f.name}.lr={own:g} has the schedule of optimizer.lr=0, which has none; set optimizer.lr")


def check_checkpoints(config: TrainConfig) -> None:
    """Checks that a run which continues one checkpoint of several has them, and does not save among them."""
    settings = config.run.checkpoint
    if settings.at is None:
        return
    if config.run.task != "train":
        raise ConfigError(f"run.checkpoint.at={settings.at} is for training; name the folder of that checkpoint instead")
    if settings.dir is None or not settings.resume:
        raise ConfigError(f"run.checkpoint.at={settings.at} names a checkpoint of run.checkpoint.dir; give that, and resume=true")
    if settings.every:
        raise ConfigError(
            f"run.checkpoint.at={settings.at} continues from there in every attempt, and run.checkpoint.every={settings.every} would save "
            "what none continues; leave one of them out"
        )
    if settings.at >= config.run.steps:
        raise ConfigError(f"run.checkpoint.at={settings.at} leaves no step of run.steps={config.run.steps}; raise run.steps")


def check_average(config: ResolvedTrainConfig) -> None:
    """Checks that an average of weights begins before the run ends, or in a run that continues it."""
    start, run = config.optimizer.average_from, config.run
    if start is not None and run.task == "train" and start >= run.steps and not run.checkpoint.every:
        raise ConfigError(
            f"optimizer.average_from={start} begins to average after run.steps={run.steps}, and nothing is saved that could continue; "
            "lower it, or set run.checkpoint.every"
        )


def check_moments(config: ResolvedTrainConfig) -> None:
    """Checks the format of moments: bf16 has 8 significant bits, so an average that moves by less than a part in 256 would stand still."""
    run, optimizer = config.run, config.optimizer
    if run.moments == "fp32":
        return
    if run.precision not in ("bf16", "fp16", "fp8"):
        raise ConfigError(f"run.moments=bf16 is for run.precision=bf16, fp16 or fp8, and it is {run.precision}; leave one of them out")
    shares = {"beta1": optimizer.beta1, "beta2": optimizer.beta2} | (
        {"muon.momentum": optimizer.muon.momentum} if optimizer.one_moment else {}
    )
    for name, share in shares.items():
        if 1 - share < 2**-8:
            raise ConfigError(
                f"optimizer.{name}={share:g} moves a moment by less than bf16 can hold; use {1 - 2**-8:g} or less, or run.moments=fp32"
            )
