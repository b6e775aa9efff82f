"""The whole run with the fastest layout: the trainer it is predicted for, its duration and cost, and the next command."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from launcher.config import Config, resolve
from launcher.cost.phases import mean_tokens
from launcher.goals.views import Entry, Line, View
from launcher.labels import amount, duration, percent
from launcher.planning.layout_names import name_of, overrides_of
from launcher.planning.plan import Plan
from trainer.shared.run.errors import ConfigError

SURE = 0.8
"""Probability with which the fastest layout is among so many, as that of the intervals."""


def whole_run(config: Config, planned: Plan) -> dict[str, Any]:
    """Returns the predicted cost of all ``run.steps`` with the fastest layout: seconds, GPU-hours of all ranks, and their price if
    ``cluster.price_per_gpu_hour`` is given."""
    step = float(planned.seconds[planned.order[0]])
    took = config.run.steps * step
    hours, price = took * config.cluster.world_size / 3600, config.cluster.price_per_gpu_hour
    return {
        "steps": config.run.steps,
        "tokens": round(config.run.steps * mean_tokens(config.model, config.run)),
        "step_s": step,
        "seconds": took,
        "gpu_hours": hours,
        "price_per_gpu_hour": price,
        "price": None if price is None else hours * price,
    }


def next_command(config: Config, planned: Plan, words: Sequence[str]) -> dict[str, str | None]:
    """Returns the command that trains with the fastest layout. ``words`` are the plan's arguments. If train would refuse the layout, the
    command explains it instead, and ``refused`` is the reason."""
    layout = planned.layout(int(planned.order[0]))
    given = [word for word in words if not word.lstrip("+").startswith("layout.")]
    try:
        resolve(dataclasses.replace(config, layout=dataclasses.replace(layout, data=None)))
    except ConfigError as error:
        return {"command": f"trireme plan {shlex.join([*words, '--explain', name_of(layout)])}", "refused": str(error)}
    return {"command": f"trireme train {shlex.join([*given, *overrides_of(layout, config.layout)])}", "refused": None}


def contenders(planned: Plan, words: Sequence[str]) -> dict[str, Any]:
    """Returns how many layouts it takes to have the fastest among them with the probability ``SURE``, and the command that finds it."""
    held = np.cumsum(np.sort(planned.chances)[::-1])
    return {"count": int(np.searchsorted(held, SURE * held[-1]) + 1), "sure": SURE, "command": f"trireme search {shlex.join(words)}"}


def shown(document: Entry) -> Iterator[View]:
    """Yields all for people, wrapped to the terminal, except commands, which are meant to be pasted."""
    run, then, among = document["run"], document["next"], document["contenders"]
    yield f"These are times of the trainer {document['trainer']}."
    price = "" if run["price"] is None else f", {amount(run['price'])} at {run['price_per_gpu_hour']:g} a GPU-hour"
    work = f"All {run['steps']:,} steps ({amount(run['tokens'])} tokens) by the first layout"
    yield f"{work}: {duration(run['seconds'])}, {amount(run['gpu_hours'])} GPU-hours{price}."
    if then["refused"]:
        yield f"trireme train refuses it: {then['refused']}"
    if among["count"] > 1:
        yield f"One of {among['count']} layouts is the fastest with a probability of {percent(among['sure'], digits=0)}. To measure which:"
        yield Line(f"  {among['command']}")
    yield Line(f"Next:\n  {then['command']}")
