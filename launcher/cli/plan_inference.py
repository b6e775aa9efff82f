"""``trireme plan task=inference``: every way to serve a model predicted, the front, and three recommendations with their commands."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.cli.console import titled, wide_console
from launcher.labels import amount, memory, percent, seconds
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from launcher.config import Config
    from launcher.config.engine import EngineProfile
    from launcher.planning.serving.plan import InferencePlan

GOALS = ("lowest latency", "highest throughput", "best under your limits")


def plan(config: Config, wanted: Mapping[str, list[Any]], arguments: argparse.Namespace) -> int:
    """0 when something fits and keeps the limits, 1 when nothing does."""
    from launcher.planning.serving.plan import plan_inference

    started = time.perf_counter()
    config = traced(restricted(config, wanted))
    planned = plan_inference(config)
    spent = time.perf_counter() - started
    if arguments.explain is not None:
        return explain(config, planned, arguments)
    if arguments.json:
        print(json.dumps(document(config, planned, spent), indent=2, allow_nan=False))
    else:
        show(config, planned, arguments.top, spent)
    return 0 if planned.kept.any() else 1


def restricted(config: Config, wanted: Mapping[str, list[Any]]) -> Config:
    """``config`` with the values given to layout keys."""
    if strange := [name for name in wanted if name not in ("tensor", "pipeline")]:
        raise ConfigError(f"layout.{strange[0]} has no meaning for inference; layout.tensor and layout.pipeline have")
    tensor, pipeline = (wanted.get(name, getattr(config.serving, name)) for name in ("tensor", "pipeline"))
    return dataclasses.replace(config, serving=dataclasses.replace(config.serving, tensor=tensor, pipeline=pipeline))


def traced(config: Config) -> Config:
    """``config`` with lengths and rate of the trace, where one is given. ``ConfigError`` for a request longer than its positions."""
    from launcher.planning.serving.rules import positions
    from launcher.tables.trace import read_trace

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


def heading(config: Config) -> str:
    """One line: model, requests, engine, cluster."""
    from launcher.cost import Shape
    from launcher.planning.plan import world

    size = amount(float(Shape.of(config.model).parameters)).replace(" G", " B")
    work = config.workload
    load = {"batch": work.batch, "concurrency": work.concurrency, "rate": work.rate and f"{work.rate:.4g}"}
    words = "".join(f", {name} {value}" for name, value in load.items() if value is not None)
    return (
        f"{config.model.family} {size} parameters in {config.serving.weights}, {work.input} tokens in, {work.output} "
        f"out{words}, {config.engine.name}, {world(config.cluster)}"
    )


def show(config: Config, planned: InferencePlan, top: int, spent: float) -> None:
    """The tables for people."""
    from launcher.planning.serving.space import name_of

    console = wide_console()
    console.print(heading(config), soft_wrap=False)
    if planned.hopeless:
        console.print(planned.hopeless, soft_wrap=True)
    else:
        console.print(table(planned, planned.front[:top], console.width))
    for goal, row in planned.recommended.items():
        if row is not None:
            console.print(titled(goal, f"{name_of(planned.table[row])}, {figures(planned, row)}"), soft_wrap=True)
            console.print(lines_of(started(config, planned, row)), soft_wrap=True)
    for line in nearest(relaxed(planned)):
        console.print(line, soft_wrap=True)
    for engine, one in rendered(config, planned).items():
        console.print(f"with {engine}:\n{lines_of(one)}", soft_wrap=True)
    console.print(f"{len(planned.table):,} predicted, {len(planned.front):,} on the front ({spent:.2f} s). Out:")
    for reason, count in {**planned.out, **planned.dropped}.items():
        console.print(f"  {count:>8,}  {reason}")


def relaxed(planned: InferencePlan) -> list[dict[str, Any]]:
    """Where nothing keeps all limits, what to do about it as plain data: any one of these is enough, its limits all together."""
    from launcher.planning.serving.limits import LIMITS

    return [
        {
            "limits": [{"limit": name, "value": value, "unit": LIMITS[name]} for name, value in one.limits.items()],
            "row": entry(one.plan, one.row),
        }
        for one in planned.relaxations()
    ]


def nearest(relaxations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same in words, a line for each. Values are as the command line takes them: whole, or with as many digits as they have."""
    lines: list[str] = []
    for one in relaxations:
        needed = [f"sla.{each['limit']}={each['value']!r} ({each['unit']})" for each in one["limits"]]
        together = " together with ".join(needed)
        lines.append(f"{'  or' if lines else 'nothing keeps all limits; nearest:'} {together}, by {one['row']['name']}")
    return lines


def table(planned: InferencePlan, rows: Any, width: int) -> Any:
    """Rows with what is predicted of them, in so many characters."""
    from launcher.cli.console import Column, fitted_table
    from launcher.planning.serving.space import name_of

    found = [entry(planned, int(row)) for row in rows]
    sizes = [sum(one["memory"].values()) for one in found]
    give = percent(planned.interval[1] - 1, digits=0)
    columns = [
        Column("#", [str(place) for place in range(1, len(found) + 1)]),
        Column("layout", [name_of(planned.table[row]) for row in rows], least=18),
        Column("latency", [f"{seconds(one['latency_ms'] / 1e3)} ±{give}" for one in found], right=True),
        Column("first token", [seconds(one["ttft_ms"] / 1e3) for one in found], keep=2, right=True),
        Column("per token", [seconds(one["tpot_ms"] / 1e3) for one in found], keep=1, right=True),
        Column("requests/s", [amount(one["throughput"]) for one in found], keep=3, right=True),
        Column("tokens/s/device", [amount(one["tokens_per_device"]) for one in found], keep=1, right=True),
        Column("cost/M", [f"{one['cost']:.3g}" for one in found], keep=2, right=True),
        Column("memory", [memory(size) for size in sizes], keep=3, right=True),
        Column("KV", [percent(one["memory"]["keys and values"] / size, digits=0) for one, size in zip(found, sizes)], keep=4, right=True),
        Column("room", [amount(one["room"]) for one in found], keep=4, right=True),
        Column("mostly", [mostly(one["per_token"]) for one in found], keep=5),
    ]
    return fitted_table(columns, width, [""] * len(found))


def mostly(parts: Mapping[str, Mapping[str, float]]) -> str:
    """The three largest parts of a token's time."""
    whole = sum(part["ms"] for part in parts.values()) or 1.0
    largest = sorted(parts.items(), key=lambda item: -item[1]["ms"])[:3]
    return ", ".join(f"{name} {percent(part['ms'] / whole, digits=0)}" for name, part in largest if part["ms"] > 0.005 * whole)


def figures(planned: InferencePlan, row: int) -> str:
    values = planned.values
    return (
        f"{seconds(values['latency_ms'][row] / 1e3)} a request, {amount(values['throughput'][row])} requests/s, "
        f"{values['cost'][row]:.3g} per million tokens"
    )


def started(config: Config, planned: InferencePlan, row: int, engine: EngineProfile | None = None) -> dict[str, str | None]:
    """The command that starts a replica of a row by the plan's engine or another one, and what it needs beside on several nodes."""
    from launcher.planning.serving.commands import across_nodes, command

    note = across_nodes(planned, row, config.cluster.gpus_per_node, engine)
    return {"command": command(planned, row, config.workload, config.serving.checkpoint, engine), "note": note or None}


def lines_of(one: Mapping[str, Any]) -> str:
    """A command and its note, for people."""
    return f"  {one['command']}" + (f"\n  note: {one['note']}" if one["note"] else "")


def rendered(config: Config, planned: InferencePlan) -> dict[str, dict[str, str | None]]:
    """How each engine that batches continuously is started with the best layout, the plan's own left out."""
    from launcher.config.trainers import engine, engine_names

    found = planned.recommended
    row = next((found[goal] for goal in GOALS[::-1] if found[goal] is not None), None)
    profiles = [engine(name) for name in engine_names()]
    others = [profile for profile in profiles if profile.batching == "continuous" and profile.name != config.engine.name]
    return {} if row is None else {one.name: started(config, planned, row, one) for one in others}


def entry(planned: InferencePlan, row: int) -> dict[str, Any]:
    """One row as plain data: figures, and every part of time and memory, those of time beside their speed of light."""
    from launcher.planning.serving.space import name_of

    e = planned.estimate
    values = {name: float(np_values[row]) for name, np_values in planned.values.items()}
    devices = values["devices"]
    return {
        "name": name_of(planned.table[row]),
        "layout": {name: int(planned.table[row][name]) for name in planned.table.dtype.names or ()},
        **values,
        "devices": int(devices),
        "tokens_per_device": values["throughput"] * float(planned.case.output) / devices,
        "latency_interval_ms": [values["latency_ms"] * factor for factor in planned.interval],
        "fits": float(e.fits[row]),
        "room": None if e.room[row] == float("inf") else int(e.room[row]),
        "first_token": beside(planned, e.prompt, e.prompt_light, row),
        "per_token": beside(planned, e.step, e.step_light, row),
        "memory": {name: at(planned, value, row) for name, value in e.memory.items()},
    }


def beside(planned: InferencePlan, parts: Mapping[str, Any], light: Mapping[str, Any], row: int) -> dict[str, dict[str, float]]:
    """Milliseconds by part, and at the speed of light."""
    return {name: {"ms": 1e3 * at(planned, value, row), "light_ms": 1e3 * at(planned, light[name], row)} for name, value in parts.items()}


def at(planned: InferencePlan, value: Any, row: int) -> float:
    import numpy as np

    return float(np.broadcast_to(value, planned.table.shape)[row])


def document(config: Config, planned: InferencePlan, spent: float) -> dict[str, Any]:
    """What ``--json`` prints."""
    from launcher.planning.serving.space import name_of
    from trainer.shared.run.read import to_dict

    others = rendered(config, planned)
    chosen = {
        goal: None if row is None else entry(planned, row) | started(config, planned, row) for goal, row in planned.recommended.items()
    }
    return {
        "model": to_dict(config.model),
        "workload": to_dict(config.workload),
        "limits": to_dict(config.sla),
        "engine": config.engine.name,
        "front": [entry(planned, int(row)) for row in planned.front],
        "recommended": chosen,
        "most_served": planned.most_served and {"rate": planned.most_served[0], "name": name_of(planned.table[planned.most_served[1]])},
        "relaxations": relaxed(planned),
        "commands": {name: one["command"] for name, one in others.items()},
        "notes": {name: one["note"] for name, one in others.items() if one["note"]},
        "considered": len(planned.table),
        "out": planned.out,
        "not_predicted": planned.dropped,
        "seconds": spent,
    }


def explain(config: Config, planned: InferencePlan, arguments: argparse.Namespace) -> int:
    """One row: every part of the first token, of a further one, and of memory."""
    one = entry(planned, chosen(planned, arguments.explain))
    if arguments.json:
        print(json.dumps(one, indent=2, allow_nan=False))
        return 0
    console = wide_console()
    console.print(heading(config))
    console.print(titled(one["name"], f"{seconds(one['latency_ms'] / 1e3)} a request"))
    for title, parts in (("to the first token", one["first_token"]), ("per further token", one["per_token"])):
        console.print(_parts(title, parts))
    for name, size in sorted(one["memory"].items(), key=lambda item: -item[1]):
        console.print(f"  {name:32}{memory(size)}")
    return 0


def _parts(title: str, parts: Mapping[str, Mapping[str, float]]) -> Any:
    from rich import box
    from rich.table import Table

    made = Table(title, "ms", "at the speed of light", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, part in sorted(parts.items(), key=lambda item: -item[1]["ms"]):
        if part["ms"]:
            made.add_row(name, f"{part['ms']:.3f}", f"{part['light_ms']:.3f}")
    made.add_row("all", *(f"{sum(part[key] for part in parts.values()):.3f}" for key in ("ms", "light_ms")))
    return made


def chosen(planned: InferencePlan, what: str) -> int:
    """The row that ``--explain`` means: a place of the front, or a name such as ``t8 p4 r1 b64``."""
    from launcher.planning.serving.space import name_of

    if what.isdecimal():
        if not 1 <= int(what) <= len(planned.front):
            raise ConfigError(f"--explain={what} is not a place of the front; it has {len(planned.front)}")
        return int(planned.front[int(what) - 1])
    names = [name_of(row) for row in planned.table]
    if what not in names:
        raise ConfigError(f"--explain={what!r} is none of the {len(names)} that were predicted; give a name such as {names[0]!r}")
    return names.index(what)
