"""Every way to serve a model on a cluster predicted: the front, three recommendations, and what to relax where nothing keeps the limits.
Pure.

A row of the space is tensor x pipeline x replicas x requests in flight per replica. Rows that break a rule, do not fit, or serve less than
what arrives are out, with the reason. The front are those that no other one beats in both the time of a request and the cost of a token.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from functools import cached_property
from typing import Any

import numpy as np

from launcher.config.engine import EngineProfile
from launcher.config.inference import SlaConfig, WorkloadConfig
from launcher.config.schema import Config
from launcher.cost.calibration import measured
from launcher.cost.inference import SERVING_DTYPE, HostCosts, InferenceCase, InferenceEstimate, closed, opened, static
from launcher.cost.inputs.device import BYTES, Device, check_network
from launcher.cost.inputs.shape import Shape
from launcher.cost.parts import scale
from launcher.cost.thresholds import FITS
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.rules import check_model, resolve_model
from trainer.shared.run.schema import ResolvedModelConfig

MEMORY = "memory: weights and one request's keys and values do not fit, or a whole static batch's"
SATURATED = "load: more arrives than is served"
DOMINATED = "dominated: another one answers as fast and costs no more"
MOST_AT_ONCE = 256
"""Requests of a replica that a rendered command allows at once, where they arrive at random."""
NINE_OF_TEN = 1.645
"""Standard errors to either side that hold nine of ten."""
LIMITS = {"latency_ms": "ms of a request", "ttft_ms": "ms to the first token", "tpot_ms": "ms per token", "throughput": "requests/s",
          "devices": "devices", "cost": "per million tokens"}  # fmt: skip
"""Limits, and what they are counted in. Of ``throughput`` there must be at least as much, of all others at most."""


@dataclass(frozen=True)
class Relaxation:
    """Limits that have to give, all of them, each with the value that is enough, and the row of a plan that keeps them then."""

    limits: dict[str, float]
    plan: InferencePlan
    row: int


@dataclass(frozen=True)
class InferencePlan:
    """The rows of a space with what is predicted of each."""

    case: InferenceCase
    estimate: InferenceEstimate
    sla: SlaConfig
    device_hour: float
    dropped: dict[str, int]  # combinations that were not predicted, by reason
    rate: float | None = None  # requests per second that arrive, where they do
    among: np.ndarray | None = None  # of a search: which rows were measured, and may be recommended
    wider: InferencePlan | None = None  # where nothing keeps the limits: the same rows, and those of more devices than sla.devices

    @property
    def table(self) -> np.ndarray:
        return self.case.table

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """What the limits are about, by name of the limit."""
        e, devices = self.estimate, self.table["tensor"] * self.table["pipeline"] * self.table["replicas"]
        tokens = e.throughput * np.asarray(self.case.output)
        cost = devices * self.device_hour / 3600 / tokens * 1e6
        return {
            "latency_ms": 1e3 * e.latency,
            "ttft_ms": 1e3 * e.ttft,
            "tpot_ms": 1e3 * e.tpot,
            "throughput": e.throughput,
            "devices": devices,
            "cost": cost,
        }

    @property
    def interval(self) -> tuple[float, float]:
        """Factors on a time between which it lies in nine of ten cases."""
        wide = math.exp(NINE_OF_TEN * self.case.constants.error_spread)
        return 1 / wide, wide

    @cached_property
    def possible(self) -> np.ndarray:
        """Whether a row is likely to fit and serves what arrives."""
        fits = np.asarray(self.estimate.fits >= FITS)
        return fits if self.among is None else fits & self.among

    @cached_property
    def front(self) -> np.ndarray:
        """Rows on the front, fastest first."""
        rows = np.flatnonzero(self.possible)
        return rows[front(self.values["latency_ms"][rows], self.values["cost"][rows])]

    @cached_property
    def kept(self) -> np.ndarray:
        """Whether a row keeps all limits."""
        return self.possible & (np.max(self.excess(), axis=0, initial=0.0) <= 1 + 1e-9)

    def corrected(self, first: np.ndarray, further: np.ndarray, fails: np.ndarray, among: np.ndarray | None = None) -> InferencePlan:
        """The same with factors on the seconds to the first token and per further one, without rows that were seen to fail."""
        e = self.estimate
        known = replace(e, prompt=scale(e.prompt, first), step=scale(e.step, further), fits=np.where(fails, 0.0, e.fits))
        if self.rate is not None:  # what arrives is served all the same: as much more is in flight as it takes longer
            known = replace(known, arriving=e.arriving * known.latency / e.latency)
        return replace(self, estimate=known, among=among, wider=None)

    def excess(self) -> np.ndarray:
        """By how much each limit that is given is missed, as a ratio above 1: (limits, rows)."""
        ratios = [
            limit / self.values[name] if name == "throughput" else self.values[name] / limit for name, limit in limits(self.sla).items()
        ]
        return np.array(ratios).reshape(-1, len(self.table))

    @property
    def out(self) -> dict[str, int]:
        """How many rows are out, by reason."""
        fits = np.asarray(self.estimate.room >= 1) if self.rate is not None else self.possible
        reasons = {MEMORY: int((~self.possible & ~fits).sum()), SATURATED: int((~self.possible & fits).sum())}
        reasons[DOMINATED] = int(self.possible.sum()) - len(self.front)
        return {reason: count for reason, count in reasons.items() if count}

    @property
    def most_served(self) -> tuple[float, int] | None:
        """Where more arrives than any row serves: the requests per second that the best one serves, rounded down, and that row.

        A full room serves as many as it has in the time for which each of them holds its place (``launcher.cost.inference.requests``)."""
        e = self.estimate
        full = np.asarray(e.room >= 1)
        if self.rate is None or self.possible.any() or not full.any():
            return None
        held = np.maximum(e.ttft, e.tpot) + (e.output - 1) * e.tpot
        served = np.where(full, e.replicas * e.running / held, 0.0)
        row = int(np.argmax(served))
        return outward(float(served[row]), "throughput", 4), row

    @property
    def hopeless(self) -> str:
        """Where no row is possible: why, and what would help; else nothing."""
        if self.possible.any():
            return ""
        if self.most_served is None:
            return "nothing fits; more devices, a smaller model or weights in fewer bits would help"
        most, row = self.most_served
        return (
            f"{self.rate:g} requests/s arrive and at most {most:g} are served, by {name_of(self.table[row])}; fewer have to arrive "
            f"(workload.rate={most:g}), or more devices serve them"
        )

    def best(self, name: str, among: np.ndarray) -> int | None:
        """The row of ``among`` (a mask) with the least of a value, the cheaper one where several are equal."""
        rows = np.flatnonzero(among)
        if not len(rows):
            return None
        least = -self.values[name][rows] if name == "throughput" else self.values[name][rows]
        return int(rows[np.lexsort((self.values["cost"][rows], np.round(least, 9)))[0]])

    @property
    def recommended(self) -> dict[str, int | None]:
        """The rows to choose from, by what they are best at."""
        return {
            "lowest latency": self.best("latency_ms", self.possible),
            "highest throughput": self.best("throughput", self.possible),
            "best under your limits": self.best("cost", self.kept),
        }

    def relaxations(self) -> list[Relaxation]:
        """Where no row keeps all limits: for each limit that alone stands in the way, how far it has to give and the row that then is best,
        the least step first, any one of which is enough; where no single one is, what all that are missed need together."""
        if self.wider is not None:
            return self.wider.relaxations()
        excess, names = self.excess(), list(limits(self.sla))
        rows = np.flatnonzero(self.possible)
        if self.kept.any() or not len(rows) or not names:
            return []
        found: list[tuple[float, str, int]] = []
        for i, name in enumerate(names):
            others = np.max(np.delete(excess[:, rows], i, axis=0), axis=0, initial=0.0) <= 1 + 1e-9
            if others.any():
                row = int(rows[others][np.argmin(excess[i, rows[others]])])
                found.append((float(excess[i, row]), name, row))
        if found:
            return [self._relaxation([name], row) for _, name, row in sorted(found)]
        row = int(rows[np.argmin(np.max(excess[:, rows], axis=0))])
        return [self._relaxation([name for i, name in enumerate(names) if excess[i, row] > 1 + 1e-9], row)]

    def _relaxation(self, names: Sequence[str], row: int) -> Relaxation:
        """``names`` as far as ``row`` needs it: in four digits, or in more where the limits would contradict each other."""
        for digits in (4, 6, 9, 17):
            enough: dict[str, Any] = {name: outward(float(self.values[name][row]), name, digits) for name in names}
            if not clash(replace(self.sla, **enough), int(self.case.output)):
                break
        return Relaxation(enough, self, row)


def front(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Positions that no other one beats in both values (both the less the better), in order of the first."""
    order = np.lexsort((second, first))
    best = np.minimum.accumulate(np.concatenate([[np.inf], second[order][:-1]]))
    return order[second[order] < best]


def outward(value: float, name: str, digits: int) -> float:
    """``value`` in so many digits, rounded so that a limit of it is kept by what has ``value``: up, but down where as much is the least."""
    if name == "devices":
        return round(value)
    rounding = ROUND_FLOOR if name == "throughput" else ROUND_CEILING
    return float(Context(prec=digits, rounding=rounding).create_decimal_from_float(value))


def limits(sla: SlaConfig) -> dict[str, float]:
    """The limits that are given."""
    return {name: float(value) for name in LIMITS if (value := getattr(sla, name)) is not None}


def plan_inference(config: Config) -> InferencePlan:
    """The plan of ``config``. ``ConfigError`` where what is asked contradicts itself."""
    check(config)
    table, dropped = serving_space(config)
    found = _predicted(config, table, dropped)
    if not found.kept.any() and len(beyond := serving_space_beyond(config)):
        found = replace(found, wider=_predicted(config, np.concatenate([table, beyond]), {}))
    return found


def _predicted(config: Config, table: np.ndarray, dropped: dict[str, int]) -> InferencePlan:
    """What is predicted of the rows of ``table``, whose requests in flight at a rate follow from it."""
    model, work, table = resolve_model(config.model), config.workload, table.copy()
    hardware = config.cluster.hardware
    device, costs = Device.of(hardware, config.cluster.gpus_per_node), None
    check_network(config.cluster)
    if hardware.calibration:
        device = replace(device, measured=measured(hardware, device))
        costs = HostCosts.of(hardware.calibration) if config.engine.own else None
    lengths, formats = (float(work.input), float(work.output)), (config.serving.weights, config.serving.kv)
    case = InferenceCase(Shape.of(model), table, *lengths, device, config.engine, *formats, costs=costs)
    found = estimated(case, work)
    if work.rate is not None:  # requests in flight follow from the rate
        table["batch"] = np.maximum(np.ceil(found.running), 1)
    return InferencePlan(case, found, config.sla, config.serving.device_hour, dropped, work.rate)


def estimated(case: InferenceCase, work: WorkloadConfig, rate: np.ndarray | None = None) -> InferenceEstimate:
    """Static batches where they are asked for or the engine knows no others; else a closed loop, or open arrivals (at ``rate``, by row)."""
    if work.rate is not None:
        return opened(case, work.rate if rate is None else rate)
    if work.concurrency is None:
        return static(case) if work.batch is not None or case.engine.batching != "continuous" else closed(case)
    found = closed(case)  # where it cannot be shared out evenly, some replicas have fewer
    return replace(found, arriving=np.minimum(found.arriving, work.concurrency / case.replicas))


def check(config: Config) -> None:
    """``ConfigError`` for a workload or limits that contradict each other, the engine, the model or the cluster."""
    check_model(config.model)
    _check_workload(config)
    _check_formats(config)
    for name in ("command", "server"):
        _filled(config.engine, name, dict.fromkeys(("model", "weights", "kv"), "") | dict.fromkeys(SIZES, 1))
    _check_limits(config)
    if not config.serving.checkpoint.strip() or not config.serving.checkpoint.isprintable():
        raise ConfigError(
            f"serving.checkpoint={config.serving.checkpoint!r} names no checkpoint that a command could serve; give a folder or a name on "
            "one line, or leave it out for MODEL"
        )
    _check_lengths(config)


def positions(config: Config) -> int | None:
    """Positions that the model has learned: no request is longer. None for a model that has learned none."""
    model = resolve_model(config.model)
    return model.seq if model.family == "gpt" else None


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
    """Number formats that the engine has: keys and values are as wide as what is computed with, or have a format of their own."""
    weights, kv, engine = config.serving.weights, config.serving.kv, config.engine
    if engine.formats and weights not in engine.formats:
        raise ConfigError(f"serving.weights={weights} is no format of {engine.name}; use {listed(engine.formats)}, or another engine=NAME")
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


def clash(sla: SlaConfig, output: int) -> str:
    """How the limits of times contradict each other for requests of ``output`` tokens, or nothing."""
    total, first, each = sla.latency_ms, sla.ttft_ms, sla.tpot_ms
    if total is not None and first is not None and first > total:
        return f"sla.ttft_ms={first:g} is above sla.latency_ms={total:g}: no request ends before its first token; lower it, or leave it out"
    if total is not None and each is not None and each * (output - 1) > total:
        return (
            f"sla.tpot_ms={each:g} for workload.output={output} tokens takes longer than sla.latency_ms={total:g} allows; "
            f"give {total / max(output - 1, 1):.3g} or less, or leave it out"
        )
    return ""


def serving_space(config: Config) -> tuple[np.ndarray, dict[str, int]]:
    """All rows that obey the rules, and how many combinations do not, by reason."""
    devices = min(config.cluster.world_size, config.sla.devices or config.cluster.world_size)
    rows, dropped = _rows(config, devices, bool(config.workload.concurrency or config.workload.rate))
    if not rows:
        raise ConfigError(f"no tensor x pipeline is possible: {'; '.join(dropped)}; widen serving.tensor, pipeline and replicas")
    return np.array(rows, SERVING_DTYPE), dropped


def serving_space_beyond(config: Config) -> np.ndarray:
    """The rows of the cluster that have more devices than ``sla.devices`` allows."""
    rows, _ = _rows(config, config.cluster.world_size, True) if config.sla.devices is not None else ([], {})
    return np.array([row for row in rows if math.prod(row[:3]) > (config.sla.devices or 0)], SERVING_DTYPE)


def _rows(config: Config, devices: int, several: bool) -> tuple[list[tuple[int, int, int, int]], dict[str, int]]:
    """Rows on so many devices, with ``several`` numbers of replicas or with as many as there is room for; and how many combinations break
    a rule."""
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
    """Requests in flight per replica that are compared."""
    work = config.workload
    if work.batch is not None:
        return [work.batch]
    if work.concurrency is not None:
        return [math.ceil(work.concurrency / replicas)]
    if work.rate is None and not config.serving.batch:
        raise ConfigError("serving.batch=[] leaves no size to compare; give one or more, or workload.batch, concurrency or rate")
    return [1] if work.rate is not None else list(dict.fromkeys(config.serving.batch))


def _broken(tensor: int, pipeline: int, devices: int, model: ResolvedModelConfig, engine: EngineProfile) -> str:
    """The rule that a layout breaks, or nothing."""
    if tensor * pipeline > devices:
        return "more ranks than devices"
    if model.heads % tensor:
        return f"tensor does not divide model.heads={model.heads}"
    if model.kv_heads % tensor and (engine.own or tensor % model.kv_heads):  # others copy heads of which there are fewer than ranks
        return f"tensor does not divide model.kv_heads={model.kv_heads}{'' if engine.own else ', nor is it a multiple'}"
    if engine.own and model.ffn % tensor:
        return f"tensor does not divide model.ffn={model.ffn}"
    if model.layers % pipeline:
        return f"pipeline does not divide model.layers={model.layers}"
    if tensor > 1 and not engine.tensor:
        return "the engine does not run tensor-parallel"
    return "the engine does not run pipeline-parallel" if pipeline > 1 and not engine.pipeline else ""


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to ``most``."""
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


SIZES = ("tensor", "pipeline", "ranks", "batch", "length", "tokens")
"""Whole numbers that a command may have in braces."""


ACROSS = {
    "vllm serve": "needs a Ray cluster over them, or in recent releases this command on each of them with --nnodes {nodes} "
    "--node-rank 0, 1, ... --master-addr ADDRESS, and --headless on all but the first",
    "sglang.launch_server": "needs this command on each of them with --nnodes {nodes} --node-rank 0, 1, ... --dist-init-addr ADDRESS:PORT",
    "trtllm-serve": "needs mpirun -n {ranks} with a host list (or srun), and trtllm-llmapi-launch before this command",
    "mpirun": "needs mpirun to be given a host list",
    "trireme": "needs cluster=slurm cluster.nodes={nodes} cluster.gpus_per_node={each}",
}
"""What a replica over several nodes needs beside the command that starts it, by a word of the command: docs.vllm.ai (parallelism and
scaling), docs.sglang.ai (multi-node), nvidia.github.io/TensorRT-LLM (trtllm-serve, multi-node)."""


def across_nodes(planned: InferencePlan, row: int, each: int, engine: EngineProfile | None = None) -> str:
    """What the command of a row does not say where its replica has more ranks than the ``each`` devices of a node; else nothing."""
    engine, layout = engine or planned.case.engine, planned.table[row]
    ranks = int(layout["tensor"]) * int(layout["pipeline"])
    if ranks <= each:
        return ""
    nodes = -(-ranks // each)
    needs = next((words for word, words in ACROSS.items() if word in engine.command), "needs what the engine's documentation says of it")
    return f"a replica is on {nodes} nodes, and {needs.format(nodes=nodes, ranks=ranks, each=each)}"


def command(planned: InferencePlan, row: int, work: WorkloadConfig, checkpoint: str, engine: EngineProfile | None = None) -> str:
    """How the engine of the plan, or another one, is started with the layout of a row: a line for a shell."""
    case = planned.case
    layout, engine = case.table[row], engine or case.engine
    batch, room = int(layout["batch"]), max(planned.estimate.room[row], 1)
    if work.rate is not None:  # arrivals bunch: as many as there is room for, and no fewer than stay at once in the mean
        batch = max(batch, int(min(room, MOST_AT_ONCE)))
    elif engine.batching == "continuous":  # those beyond the room wait, and are no more at once for being allowed
        batch = int(min(batch, room))
    tensor, pipeline = int(layout["tensor"]), int(layout["pipeline"])
    words: Mapping[str, object] = {
        "model": shlex.quote(checkpoint),
        "tensor": tensor,
        "pipeline": pipeline,
        "ranks": tensor * pipeline,
        "batch": batch,
        "length": work.longest or int(case.input + case.output),
        "tokens": int(case.output),
        "weights": engine.formats.get(case.weights, ""),
        "kv": engine.kv_formats.get(case.kv, ""),
    }
    comes = work.rate is not None or work.concurrency is not None
    return _filled(engine, "server" if comes and engine.server else "command", words)


def _filled(engine: EngineProfile, name: str, words: Mapping[str, object]) -> str:
    line: str = getattr(engine, name)
    try:
        return " ".join(filled for word in line.split() if (filled := word.format(**words)))  # blanks of what is filled in stay
    except (KeyError, IndexError, ValueError, AttributeError):
        known = ", ".join(f"{{{word}}}" for word in words)
        raise ConfigError(f"engine.{name}={line!r} of {engine.name} cannot be filled in; in braces it may have {known}") from None


def name_of(layout: np.void) -> str:
    """``t8 p4 r2 b64``: tensor, pipeline, replicas, requests in flight per replica."""
    return " ".join(f"{letter}{layout[field]}" for letter, field in zip("tprb", SERVING_DTYPE.names or ()))
