"""Predictions of every way to serve a model: the front, three recommendations with their commands, and relaxations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.config import Config
from launcher.config.engine import EngineProfile
from launcher.config.trainers import engine, engine_names
from launcher.cost import Shape
from launcher.goals.goal import Wanted
from launcher.goals.views import Answer, Entry, GoalColumn, Grid, Line, Listing, View
from launcher.labels import amount, memory, percent, seconds
from launcher.planning.plan import world
from launcher.planning.serving.commands import across_nodes, command
from launcher.planning.serving.limits import LIMITS
from launcher.planning.serving.plan import InferencePlan, plan_inference
from launcher.planning.serving.rules import positions
from launcher.planning.serving.space import name_of
from launcher.tables.trace import read_trace
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict

UNMEASURED = "--measure is for trainings; 'trireme search task=inference' measures what may be on the front"


@dataclass(frozen=True)
class ServingPlan:
    """The ways to serve the model of ``config`` with their predictions or measurements."""

    config: Config
    planned: InferencePlan

    @property
    def found(self) -> bool:
        return bool(self.planned.kept.any())

    def heading(self) -> str:
        config, work = self.config, self.config.workload
        size = amount(float(Shape.of(config.model).parameters)).replace(" G", " B")
        load = {"batch": work.batch, "concurrency": work.concurrency, "rate": work.rate and f"{work.rate:.4g}"}
        words = "".join(f", {name} {value}" for name, value in load.items() if value is not None)
        return (
            f"{config.model.family} {size} parameters in {config.serving.weights}, {work.input} tokens in, {work.output} "
            f"out{words}, {self.planned.case.engine.name}, {world(config.cluster)}"
        )

    def answer(self, top: int, seconds: float, words: Sequence[str]) -> Answer:
        planned, served = self.planned, self.planned.most_served
        recommended = planned.recommended.items()
        document = {
            "model": to_dict(self.config.model),
            "workload": to_dict(self.config.workload),
            "limits": to_dict(self.config.sla),
            "engine": self.planned.case.engine.name,
            "front": [self.entry(int(row)) for row in planned.front],
            "recommended": {goal: None if row is None else self.entry(row) | self.started(row) for goal, row in recommended},
            "most_served": served and {"rate": served[0], "name": name_of(planned.table[served[1]])},
            **self.advice(),
            "considered": len(planned.table),
            "out": planned.out,
            "not_predicted": planned.dropped,
            "seconds": seconds,
        }
        return Answer(document, self._shown(document, top))

    def explained(self, row: str, picture: Path | None) -> Answer:
        one = self.entry(self._chosen(row))
        sizes = sorted(one["memory"].items(), key=lambda item: -item[1])
        views: list[View] = [
            Line(f"{seconds(one['latency_ms'] / 1e3)} a request", one["name"], wraps=True),
            _parts("to the first token", one["first_token"]),
            _parts("per further token", one["per_token"]),
            *(f"  {name:32}{memory(size)}" for name, size in sizes),
        ]
        return Answer(one, views)

    def measures(self, count: int, overrides: Sequence[str]) -> Answer:
        raise ConfigError(UNMEASURED)

    def entry(self, row: int) -> dict[str, Any]:
        """Returns one row as plain data: figures, and every part of time and memory, times next to their speed of light."""
        planned, e = self.planned, self.planned.estimate
        return {
            "name": name_of(planned.table[row]),
            "layout": {name: int(planned.table[row][name]) for name in planned.table.dtype.names or ()},
            **self.figures(row),
            "devices": int(planned.values["devices"][row]),
            "tokens_per_device": self.tokens_per_device(row),
            "latency_interval_ms": [float(planned.values["latency_ms"][row]) * factor for factor in planned.interval],
            "fits": float(e.fits[row]),
            "room": None if e.room[row] == float("inf") else int(e.room[row]),
            "first_token": self._beside(e.prompt, e.prompt_light, row),
            "per_token": self._beside(e.step, e.step_light, row),
            "memory": {name: self._at(value, row) for name, value in e.memory.items()},
        }

    def figures(self, row: int) -> dict[str, float]:
        """Returns the quantities that the limits bound, by name."""
        return {name: float(values[row]) for name, values in self.planned.values.items()}

    def tokens_per_device(self, row: int) -> float:
        """Returns the tokens that a row generates per second and device."""
        values = self.planned.values
        return float(values["throughput"][row]) * float(self.planned.case.output) / float(values["devices"][row])

    def started(self, row: int, profile: EngineProfile | None = None) -> dict[str, str | None]:
        """Returns the command that starts a replica of a row with the plan's engine or another one, and extra steps on several nodes."""
        config = self.config
        note = across_nodes(self.planned, row, config.cluster.gpus_per_node, profile)
        return {"command": command(self.planned, row, config.workload, config.serving.checkpoint, profile), "note": note or None}

    def advice(self) -> dict[str, Any]:
        """Returns relaxations if no row keeps the limits, and the commands of other engines for the best row."""
        others = self._other_engines()
        return {
            "relaxations": self.relaxed(),
            "commands": {name: one["command"] for name, one in others.items()},
            "notes": {name: one["note"] for name, one in others.items() if one["note"]},
        }

    def relaxed(self) -> list[dict[str, Any]]:
        """Returns alternatives if no row keeps all limits: any one is enough, with all its limits together."""
        return [
            {
                "limits": [{"limit": name, "value": value, "unit": LIMITS[name]} for name, value in one.limits.items()],
                "row": dataclasses.replace(self, planned=one.plan).entry(one.row),
            }
            for one in self.planned.relaxations()
        ]

    def _other_engines(self) -> dict[str, dict[str, str | None]]:
        """Returns the commands of all continuously batching engines but the plan's own, for the best row."""
        row = next((row for row in reversed(self.planned.recommended.values()) if row is not None), None)
        profiles = [engine(name) for name in engine_names()]
        others = [profile for profile in profiles if profile.batching == "continuous" and profile.name != self.config.engine.name]
        return {} if row is None else {one.name: self.started(row, one) for one in others}

    def _beside(self, parts: Mapping[str, Any], light: Mapping[str, Any], row: int) -> dict[str, dict[str, float]]:
        """Returns milliseconds by part, and at the speed of light."""
        return {name: {"ms": 1e3 * self._at(value, row), "light_ms": 1e3 * self._at(light[name], row)} for name, value in parts.items()}

    def _at(self, value: Any, row: int) -> float:
        return float(np.broadcast_to(value, self.planned.table.shape)[row])

    def _chosen(self, what: str) -> int:
        """Returns the row of ``what``: a place on the front, or a name such as ``t8 p4 r1 b64``."""
        front = self.planned.front
        if what.isdecimal():
            if not 1 <= int(what) <= len(front):
                raise ConfigError(f"--explain={what} is not a place of the front; it has {len(front)}")
            return int(front[int(what) - 1])
        names = [name_of(row) for row in self.planned.table]
        if what not in names:
            raise ConfigError(f"--explain={what!r} is not one of the {len(names)} that were predicted; give a name such as {names[0]!r}")
        return names.index(what)

    def _shown(self, document: Entry, top: int) -> Iterator[View]:
        planned, front = self.planned, document["front"]
        yield Line(planned.hopeless) if planned.hopeless else Listing(columns_of(planned.interval[1] - 1), front[:top])
        yield from advised(document)
        yield f"{document['considered']:,} predicted, {len(front):,} on the front ({document['seconds']:.2f} s). Out:"
        yield from (f"  {count:>8,}  {reason}" for reason, count in {**planned.out, **planned.dropped}.items())


def columns_of(give: float) -> Sequence[GoalColumn]:
    """Returns the columns of ways to serve whose times lie within ``give`` of the prediction."""
    within = f" ±{percent(give, digits=0)}"
    return (
        GoalColumn("layout", "name", least=18, right=False),
        GoalColumn("latency", "latency_ms", lambda ms: seconds(ms / 1e3) + within),
        GoalColumn("first token", "ttft_ms", lambda ms: seconds(ms / 1e3), keep=2),
        GoalColumn("per token", "tpot_ms", lambda ms: seconds(ms / 1e3), keep=1),
        GoalColumn("requests/s", "throughput", amount, keep=3),
        GoalColumn("tokens/s/device", "tokens_per_device", amount, keep=1),
        GoalColumn("cost/M", "cost", "{:.3g}".format, keep=2),
        GoalColumn("memory", "memory", lambda parts: memory(sum(parts.values())), keep=3),
        GoalColumn("KV", "memory", lambda parts: percent(parts["keys and values"] / sum(parts.values()), digits=0), keep=4),
        GoalColumn("room", "room", amount, keep=4),
        GoalColumn("mostly", "per_token", mostly, keep=5, right=False),
    )


def mostly(parts: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the three largest parts of a token's time."""
    whole = sum(part["ms"] for part in parts.values()) or 1.0
    largest = sorted(parts.items(), key=lambda item: -item[1]["ms"])[:3]
    return ", ".join(f"{name} {percent(part['ms'] / whole, digits=0)}" for name, part in largest if part["ms"] > 0.005 * whole)


def advised(document: Entry) -> Iterator[View]:
    """Yields the recommendations of a plan or a search, for people, and its advice if no row keeps the limits."""
    for goal, one in document["recommended"].items():
        if one is not None:
            kind = f" ({one['kind']})" if "kind" in one else ""
            took = f"{seconds(one['latency_ms'] / 1e3)} a request{kind}, {amount(one['throughput'])} requests/s"
            again = f"\n  trireme plan recipe={Path(one['recipe']).stem}" if one.get("recipe") else ""
            yield Line(f"{one['name']}, {took}, {one['cost']:.3g} per million tokens", goal)
            yield Line(f"{lines_of(one)}{again}")
    yield from map(Line, nearest(document["relaxations"]))
    for name, words in document["commands"].items():
        yield Line(f"with {name}:\n{lines_of({'command': words, 'note': document['notes'].get(name)})}")


def nearest(relaxations: Sequence[Entry]) -> list[str]:
    """Describes relaxations, a line for each. Values are as the command line takes them: integers, or with all their digits."""
    lines: list[str] = []
    for one in relaxations:
        needed = [f"sla.{each['limit']}={each['value']!r} ({each['unit']})" for each in one["limits"]]
        together = " together with ".join(needed)
        lines.append(f"{'  or' if lines else 'nothing keeps all limits; nearest:'} {together}, by {one['row']['name']}")
    return lines


def lines_of(one: Entry) -> str:
    """Returns a command and its note, for people."""
    return f"  {one['command']}" + (f"\n  note: {one['note']}" if one["note"] else "")


def _parts(title: str, parts: Mapping[str, Mapping[str, float]]) -> Grid:
    largest = sorted(parts.items(), key=lambda item: -item[1]["ms"])
    rows = [(name, f"{part['ms']:.3f}", f"{part['light_ms']:.3f}") for name, part in largest if part["ms"]]
    ms, light = (f"{sum(part[key] for part in parts.values()):.3f}" for key in ("ms", "light_ms"))
    return Grid((title, "ms", "at the speed of light"), [*rows, ("all", ms, light)])


def plan_serving(config: Config, wanted: Wanted) -> ServingPlan:
    """Returns the plan of ``config`` with the values ``wanted`` of layout keys."""
    config = traced(restricted(config, wanted))
    return ServingPlan(config, plan_inference(config))


def restricted(config: Config, wanted: Wanted) -> Config:
    """Returns ``config`` with the values given to layout keys."""
    if strange := [name for name in wanted if name not in ("tensor", "pipeline")]:
        raise ConfigError(f"layout.{strange[0]} has no meaning for inference; layout.tensor and layout.pipeline have")
    tensor, pipeline = (wanted.get(name, getattr(config.serving, name)) for name in ("tensor", "pipeline"))
    return dataclasses.replace(config, serving=dataclasses.replace(config.serving, tensor=tensor, pipeline=pipeline))


def traced(config: Config) -> Config:
    """Returns ``config`` with lengths and rate of its trace, if it has one. ``ConfigError`` for a request longer than the positions."""
    work = config.workload
    if work.trace is None:
        return config
    if work.batch or work.concurrency or work.rate or work.longest:
        raise ConfigError(
            f"workload.trace={work.trace} says when requests come, and how long; leave out workload.batch, concurrency, rate and longest"
        )
    trace, most = read_trace(work.trace), positions(config)
    if most is not None and trace.longest > most:
        raise ConfigError(
            f"row {trace.row} of workload.trace={work.trace} has input + output of {trace.longest} tokens, more than model.seq={most}, the "
            "positions that the model has learned; leave such requests out, or shorten them"
        )
    told = dataclasses.replace(work, input=trace.input, output=trace.output, rate=trace.rate, longest=trace.longest)
    return dataclasses.replace(config, workload=told)
