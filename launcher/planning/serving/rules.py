"""Rules of a serving plan: workload, formats, limits and lengths must not contradict each other, the engine or the model."""

from __future__ import annotations

from launcher.config.engine import check_lines
from launcher.config.schema import Config
from launcher.cost.inputs.device import BYTES
from launcher.planning.serving.limits import clash
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.limits.model import check_model


def check(config: Config) -> None:
    """Raises ``ConfigError`` for a workload or limits that contradict each other, the engine, the model or the cluster."""
    check_model(config.model)
    _check_stacks(config)
    _check_workload(config)
    _check_formats(config)
    check_lines(config.engine)
    _check_limits(config)
    if not config.serving.checkpoint.strip() or not config.serving.checkpoint.isprintable():
        raise ConfigError(
            f"serving.checkpoint={config.serving.checkpoint!r} names no checkpoint that a command could serve; give a folder or a name on "
            "one line, or leave it out for MODEL"
        )
    _check_lengths(config)


def _check_stacks(config: Config) -> None:
    if resolve_model(config.model).encoder_layers:
        raise ConfigError(
            f"task=inference predicts and measures models of one stack, and model.family={config.model.family} has an encoder; "
            "choose a layout for it by hand: trireme serve and generate take any"
        )


def _check_workload(config: Config) -> None:
    work, engine = config.workload, config.engine
    given = {name: getattr(work, name) for name in ("batch", "concurrency", "rate") if getattr(work, name) is not None}
    if len(given) > 1:
        words = " and ".join(f"workload.{name}={value:g}" for name, value in given.items())
        raise ConfigError(f"{words} contradict each other: requests come in batches, in a closed loop, or at a rate; give one of them")
    if engine.batching == "static" and "batch" not in given and given:
        name, value = next(iter(given.items()))
        raise ConfigError(
            f"workload.{name}={value:g} needs an engine that takes requests in as they come, and {engine.name} serves static batches; "
            "give workload.batch, or another engine=NAME"
        )


def _check_formats(config: Config) -> None:
    """Checks that the engine has the number formats: keys and values are as wide as the compute type, or have a format of their own."""
    weights, kv, engine = config.serving.weights, config.serving.kv, config.engine
    if engine.formats and weights not in engine.formats:
        raise ConfigError(
            f"serving.weights={weights} is not a format of {engine.name}; use {listed(engine.formats)}, or another engine=NAME"
        )
    if kv not in engine.kv_formats and BYTES[kv] != max(BYTES[weights], 2):
        own = f" or {listed(engine.kv_formats)}" if engine.kv_formats else ""
        raise ConfigError(
            f"serving.kv={kv} with serving.weights={weights} is nothing that {engine.name} keeps; give "
            f"serving.kv={weights if BYTES[weights] >= 2 else 'bf16'}{own}"
        )


def _check_limits(config: Config) -> None:
    sla, work, serving = config.sla, config.workload, config.serving
    if words := clash(sla, work.output):
        raise ConfigError(words)
    if sla.throughput is not None and work.rate is not None and sla.throughput > work.rate:
        raise ConfigError(
            f"sla.throughput={sla.throughput:g} is above workload.rate={work.rate:g}: no more is served than arrives; lower it"
        )
    least = min(serving.tensor or [1]) * min(serving.pipeline or [1])
    most = config.cluster.world_size if sla.devices is None else sla.devices
    if least > most:
        where = "the cluster has" if sla.devices is None else "sla.devices allows"
        raise ConfigError(f"serving.tensor x serving.pipeline are at least {least} devices, and {where} {most}; give smaller degrees")
    if sla.devices is not None and sla.devices > config.cluster.world_size:
        raise ConfigError(
            f"sla.devices={sla.devices} is more than the cluster has ({config.cluster.world_size}); lower it, or raise cluster.nodes"
        )


def positions(config: Config) -> int | None:
    """Returns the number of learned positions, which bounds every request; None for a model without learned positions."""
    model = resolve_model(config.model)
    return model.seq if model.positions == "learned" else None


def _check_lengths(config: Config) -> None:
    work, most = config.workload, positions(config)
    mean = work.input + work.output
    if most is not None and mean > most:
        raise ConfigError(
            f"workload.input={work.input} + workload.output={work.output} are more than model.seq={most}, the positions that the model "
            "has learned; shorten them"
        )
    if work.longest is not None and work.longest < mean:
        raise ConfigError(
            f"workload.longest={work.longest} is less than workload.input={work.input} + workload.output={work.output}; give {mean} or "
            "more, or leave it out"
        )
    if most is not None and work.longest is not None and work.longest > most:
        raise ConfigError(
            f"workload.longest={work.longest} is more than model.seq={most}, the positions that the model has learned; give {most} or less"
        )
