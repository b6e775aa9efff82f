"""The rows of a serving plan: tensor x pipeline x replicas x requests in flight per replica, without those that break a rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from launcher.config.engine import EngineProfile
from launcher.config.schema import Config
from launcher.cost.inference import SERVING_DTYPE
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.resolved import ResolvedModelConfig


def serving_space(config: Config) -> tuple[np.ndarray, dict[str, int]]:
    """Returns all rows that obey the rules, and the number of combinations that do not, by reason."""
    devices = min(config.cluster.world_size, config.sla.devices or config.cluster.world_size)
    rows, dropped = _rows(config, devices, bool(config.workload.concurrency or config.workload.rate))
    if not rows:
        raise ConfigError(f"no tensor x pipeline is possible: {'; '.join(dropped)}; widen serving.tensor, pipeline and replicas")
    return np.array(rows, SERVING_DTYPE), dropped


def serving_space_beyond(config: Config) -> np.ndarray:
    """Returns the rows of the cluster that have more devices than ``sla.devices`` allows."""
    rows, _ = _rows(config, config.cluster.world_size, True) if config.sla.devices is not None else ([], {})
    return np.array([row for row in rows if math.prod(row[:3]) > (config.sla.devices or 0)], SERVING_DTYPE)


def _rows(config: Config, devices: int, several: bool) -> tuple[list[tuple[int, int, int, int]], dict[str, int]]:
    """Returns the rows on at most ``devices``, with ``several`` numbers of replicas or as many as fit, and counts combinations that break a
    rule, by reason."""
    model, work, engine = resolve_model(config.model), config.workload, config.engine
    rows: list[tuple[int, int, int, int]] = []
    dropped: Counter[str] = Counter()
    for tensor in dict.fromkeys(config.serving.tensor or powers(devices)):
        for pipeline in dict.fromkeys(config.serving.pipeline or powers(devices)):
            if reason := _broken(tensor, pipeline, devices, model, engine):
                dropped[reason] += 1
                continue
            most = min(devices // (tensor * pipeline), work.concurrency or devices)
            named = [count for count in dict.fromkeys(config.serving.replicas) if count <= most]
            if config.serving.replicas and not named:
                dropped["more ranks than devices, or replicas than requests"] += 1
            for replicas in named if config.serving.replicas else sorted({*powers(most), most}) if several else [most]:
                rows += [(tensor, pipeline, replicas, batch) for batch in _batches(config, replicas)]
    return rows, dict(dropped)


def _batches(config: Config, replicas: int) -> Sequence[int]:
    """Returns the numbers of requests in flight per replica to compare."""
    work = config.workload
    if work.batch is not None:
        return [work.batch]
    if work.concurrency is not None:
        return [math.ceil(work.concurrency / replicas)]
    if work.rate is None and not config.serving.batch:
        raise ConfigError("serving.batch=[] leaves no size to compare; give one or more, or workload.batch, concurrency or rate")
    return [1] if work.rate is not None else list(dict.fromkeys(config.serving.batch))


def _broken(tensor: int, pipeline: int, devices: int, model: ResolvedModelConfig, engine: EngineProfile) -> str:
    """Returns the rule that a layout breaks; empty if there is none."""
    if tensor * pipeline > devices:
        return "more ranks than devices"
    if model.heads % tensor:
        return f"tensor does not divide model.heads={model.heads}"
    if model.kv_heads % tensor and (engine.own or tensor % model.kv_heads):  # other engines copy heads if there are fewer than ranks
        return f"tensor does not divide model.kv_heads={model.kv_heads}{'' if engine.own else ', nor is it a multiple'}"
    if engine.own and model.ffn % tensor:
        return f"tensor does not divide model.ffn={model.ffn}"
    widths = {"ffn": model.expert_ffn, "shared_ffn": model.experts.shared_ffn} if model.experts.count else {}
    for name, width in widths.items():  # each rank has a part of every expert
        if width % tensor:
            return f"tensor does not divide model.experts.{name}={width}"
    if model.layers % pipeline:
        return f"pipeline does not divide model.layers={model.layers}"
    if tensor > 1 and not engine.tensor:
        return "the engine does not run tensor-parallel"
    return "the engine does not run pipeline-parallel" if pipeline > 1 and not engine.pipeline else ""


def powers(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to ``most``."""
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def name_of(layout: np.void) -> str:
    """Returns a name such as ``t8 p4 r2 b64``: tensor, pipeline, replicas, requests in flight per replica."""
    return " ".join(f"{letter}{layout[field]}" for letter, field in zip("tprb", SERVING_DTYPE.names or ()))
