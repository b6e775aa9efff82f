"""``trireme size`` backwards: the GPUs with which a given model ends in time, and what they cost."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli import recipes
from launcher.cli.console import Column, fitted_table, wide_console
from launcher.cli.sized_run import (
    WRITTEN,
    best_layout,
    cluster_of,
    configuration,
    document_of_base,
    how_to_use,
    model_of,
    planned_seconds,
    price_of,
    started,
    told_of_base,
)
from launcher.labels import amount, money
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.planning.size import Provision
    from trainer.shared.run.schema import ModelConfig

MOST = 65_536
"""GPUs that are tried where ``--gpus`` names no limit."""


def backwards(arguments: argparse.Namespace) -> int:
    """Prints the fewest, the cheapest and the fastest number of GPUs, and a configuration for the cheapest; 0."""
    from launcher.planning.baseline import baseline
    from launcher.planning.shapes import count
    from launcher.planning.size import CHEAPEST, TOKENS_PER_PARAMETER, ModelSizeOption

    model = model_of(arguments)
    tokens = arguments.tokens or TOKENS_PER_PARAMETER * count(model)
    found = numbers(arguments, model, tokens)
    chosen = next(each for each in found if each.name == CHEAPEST)
    entries = [entry(each, arguments, model, tokens) for each in found]
    start = baseline(model, tokens, chosen.gpus)
    config = None if arguments.tflops is not None else at(arguments, chosen.gpus)
    ready = configuration(ModelSizeOption("asked", model, tokens, chosen.days), start, config, arguments)
    if arguments.out is not None:
        what = f"{count(model):.4g} parameters, {tokens:.4g} tokens, {chosen.gpus:,} GPUs for {chosen.days:.1f} days. {WRITTEN}"
        recipes.write(Path(arguments.out), ready, what, "--out")
        print(f"written: {arguments.out}; {how_to_use(Path(arguments.out))}", file=sys.stderr)
    if arguments.json:
        about = {"model": to_dict(model), "parameters": count(model), "tokens": tokens, "deadline_days": arguments.days}
        print(json.dumps(about | {"choices": entries, "base": document_of_base(start), "config": ready}, indent=2, allow_nan=False))
        return 0
    show(entries, count(model), tokens, arguments.days)
    if base := told_of_base(start):
        print(base)
    if arguments.out is None:
        print(recipes.as_yaml(ready))
    return 0


def numbers(arguments: argparse.Namespace, model: ModelConfig, tokens: float) -> list[Provision]:
    """Returns the choices among whole nodes, and among the GPUs of one node where that is enough."""
    from launcher.planning.size import CHEAPEST, DAY, provisions, seconds_at

    if arguments.tflops is not None:

        def days_at(gpus: int) -> float:
            return seconds_at(gpus, arguments.tflops, arguments.recompute or "none")(model, tokens) / DAY

        node, most = 1, arguments.gpus or MOST
    else:
        config = at(arguments, arguments.gpus)
        node, most = config.cluster.gpus_per_node, arguments.gpus or MOST

        def days_at(gpus: int) -> float:
            return forward(arguments, model, tokens, gpus)

    found = provisions(days_at, arguments.days, node, most)
    if found[0].gpus > node or node == 1:
        return found
    within = provisions(days_at, arguments.days, 1, node)
    cheapest = min((each for each in (*within, *found) if each.name == CHEAPEST), key=lambda each: each.gpu_hours)
    return [within[0], cheapest, found[-1]]


def at(arguments: argparse.Namespace, gpus: int | None) -> Config:
    """Returns the configuration whose cluster has that many GPUs; None: one node."""

    return cluster_of(argparse.Namespace(**vars(arguments) | {"gpus": gpus}))


def forward(arguments: argparse.Namespace, model: ModelConfig, tokens: float, gpus: int) -> float:
    """Returns the days that ``trireme size --gpus`` answers; infinite where no layout fits."""
    from launcher.planning.size import DAY

    try:
        return planned_seconds(at(arguments, gpus))(model, tokens) / DAY
    except ConfigError:  # of the layouts: the overrides have been composed before
        return math.inf


def entry(found: Provision, arguments: argparse.Namespace, model: ModelConfig, tokens: float) -> dict[str, Any]:
    """Returns a choice as plain data, with its layout and what it costs."""
    from launcher.planning.baseline import baseline
    from launcher.planning.layout_names import name_of

    price = price_of(arguments)
    known = {"name": found.name, "gpus": found.gpus, "days": found.days, "gpu_hours": found.gpu_hours}
    known["price"] = None if price is None else found.gpu_hours * price
    if arguments.tflops is not None:
        return known | {"layout": None, "layout_name": None}
    config, start = at(arguments, found.gpus), baseline(model, max(tokens, 1e9), found.gpus)
    layout, _ = best_layout(started(config, start))
    return known | {"layout": to_dict(layout), "layout_name": name_of(layout)}


def show(entries: list[dict[str, Any]], parameters: float, tokens: float, days: float) -> None:
    """The table for people; choices that are the same number share a line."""
    console, rows = wide_console(), dict[int, dict[str, Any]]()
    for each in entries:
        rows.setdefault(each["gpus"], each | {"names": []})["names"].append(each["name"])
    lines = [*rows.values()]
    columns = [
        Column("", [", ".join(line["names"]) for line in lines], least=len("fewest GPUs,")),
        Column("GPUs", [f"{line['gpus']:,}" for line in lines], right=True),
        Column("days", [f"{line['days']:.1f}" if line["days"] >= 1 else f"{line['days']:.2g}" for line in lines], right=True),
        Column("GPU-hours", [amount(line["gpu_hours"]) for line in lines], right=True),
    ]
    if lines[0]["price"] is not None:
        columns.append(Column("cost", [money(line["price"]) for line in lines], right=True))
    if lines[0]["layout_name"] is not None:
        columns.append(Column("layout", [line["layout_name"] for line in lines], keep=1, least=16))
    console.print(f"{amount(parameters).replace(' G', ' B')} parameters, {amount(tokens)} tokens, {days:g} days at most")
    console.print(fitted_table(columns, console.width, [""] * len(lines)))
    console.print("fastest: twice as many GPUs gain nothing, or are more than there are; the configuration is the cheapest's", style="dim")
