"""Rules that span several fields of a run. Pure.

``resolve`` is called before anything is submitted; in the types that it returns, derived values are never None. ``check`` raises
``ConfigError`` on the first broken rule. The launcher only adds the rules of the cluster itself.
"""

from __future__ import annotations

import dataclasses

from trainer.shared.run.derived import resolve_model, resolve_optimizer, with_derived
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.limits.layout import (
    check_offloading,
    check_schedule,
    check_sharding,
    check_slices,
    check_split,
    check_world,
    data_degree,
)
from trainer.shared.run.limits.model import check_model
from trainer.shared.run.limits.own import (
    check_async_tensor,
    check_context,
    check_eight_bits,
    check_own_experts,
    check_own_keys,
    check_own_latents,
    check_own_slices,
    check_own_stacks,
    untrained,
)
from trainer.shared.run.limits.training import (
    check_average,
    check_batch,
    check_checkpoints,
    check_moments,
    check_optimizer,
    check_packing,
    check_phases,
    check_tracking_uri,
    check_validation,
)
from trainer.shared.run.limits.transfer import check_transferred
from trainer.shared.run.phases import PhaseTable, resolve_phases
from trainer.shared.run.resolved import ResolvedLayoutConfig, ResolvedTrainConfig
from trainer.shared.run.schema import PhaseConfig, TrainConfig
from trainer.shared.run.tuning import check_tasks, check_tune


def resolve(config: TrainConfig, world_size: int) -> ResolvedTrainConfig:
    """Returns ``config`` with every derived value, checked for ``world_size`` ranks."""
    check_model(config.model)
    model = resolve_model(config.model)
    check_split(model, config.layout)  # the model's limits on any cluster are reported before those of this cluster
    layout = with_derived(ResolvedLayoutConfig, config.layout, data=data_degree(config.layout, world_size))
    run = dataclasses.replace(config.run, phases=_resolve_phases(config, model.seq))
    resolved = with_derived(ResolvedTrainConfig, config, model=model, layout=layout, optimizer=resolve_optimizer(config), run=run)
    check(resolved, world_size)
    return resolved


def _resolve_phases(config: TrainConfig, seq: int) -> list[PhaseConfig]:
    """Returns the phases of a training; other tasks have none."""
    if config.run.task != "train":
        return []
    check_phases(config)
    return resolve_phases(config.run, seq)


def check(config: ResolvedTrainConfig, world_size: int) -> None:
    """Raises ``ConfigError`` on the first broken rule of a resolved ``config`` on ``world_size`` ranks."""
    check_model(config.model)
    if config.command is None and (name := untrained(config.model)) is not None:
        raise ConfigError(f"{name} can be planned but not trained here yet; use trainer=NAME of another trainer, or leave it out")
    check_own_experts(config)
    check_own_stacks(config)
    check_own_latents(config)
    check_split(config.model, config.layout)
    check_context(config)
    check_world(config.layout, world_size)
    check_schedule(config)
    check_slices(config.model, config.layout)
    check_own_slices(config)
    check_batch(config)
    check_sharding(config.layout)
    check_offloading(config)
    check_tracking_uri(config.tracking.uri)
    check_validation(config)
    check_checkpoints(config)
    check_optimizer(config.optimizer)
    check_transferred(config)
    check_average(config)
    check_moments(config)
    check_eight_bits(config)
    check_async_tensor(config)
    check_packing(config)
    check_tune(config.tune, config.model)
    check_tasks(config)
    if config.command is not None:
        check_own_keys(config, config.command.trainer)
    if config.run.warmup_steps >= config.run.steps:
        most = config.run.steps - 1
        raise ConfigError(
            f"run.warmup_steps={config.run.warmup_steps} leaves no step of run.steps={config.run.steps} to measure; "
            f"use {f'{most} or less' if most else most}, or more steps"
        )
    if config.run.task == "train":
        _check_each_phase(config, world_size)


def _check_each_phase(config: ResolvedTrainConfig, world_size: int) -> None:
    """Checks every other rule with the sizes of each phase."""
    for number, phase in enumerate(PhaseTable.of(config.run, config.model.seq).phases[:-1]):
        try:
            check(phase.of(config), world_size)
        except ConfigError as error:
            where = f"run.phases[{number}], of run.global_batch={phase.global_batch} and model.seq={phase.seq}"
            raise ConfigError(f"{where}: {error}") from None
